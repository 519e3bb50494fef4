"""Made-up runs of a benchmark: what tests of reports and plots need, without a model."""

import random
from typing import Any

from osprey.eval.journal import Journal

SETTINGS = {
    "target": "tiny",
    "drafter": "osprey",
    "peers": ["plain", "osprey", "eagle3", "prompt-lookup"],
    "suite": "made-up",
    "temperatures": [0.0],
    "draft_lengths": ["3"],
    "context_lengths": [],
    "matrix": [],
    "max_new_tokens": 40,
    "seed": 0,
    "weights": "fp32",
    "device": "cpu",
    "threads": 1,
}
ENVIRONMENT = {"command": "osprey bench", "commit": None, "machine": "none", "versions": {}}


def a_run(request: str, peer: str, rounds: list[tuple[int, int]], seconds: float = 1.0, **changes: Any) -> dict:
    """A run whose text has the tokens that its `rounds` emitted behind the one of the prefill."""
    tokens = 1 + sum(accepted + 1 for _, accepted in rounds)
    run = {
        "request": request,
        "temperature": 0.0,
        "peer": peer,
        "draft_length": "3",
        "file": "made-up",
        "domain": "chat",
        "language": "en",
        "context_length": None,
        "prompt_tokens": 9,
        "seconds": seconds,
        "token_ids": list(range(tokens)),
        "rounds": [[drafted, accepted, 2.0, 20.0] for drafted, accepted in rounds],
        "difference": None,
        "peak_memory_bytes": 1000,
    }
    return run | changes


def plain_run(request: str, tokens: int, seconds: float = 1.0, **changes: Any) -> dict:
    return a_run(request, "plain", [], seconds, draft_length="default", token_ids=list(range(tokens)), **changes)


def journal_of(path, runs: list[dict], settings: dict[str, Any] = SETTINGS) -> Journal:
    journal = Journal(path, settings, {"plain_scale": 1.0})
    for run in runs:
        journal.append(run)
    return journal


def random_runs(settings: dict[str, Any], cells: list[tuple[str, str]], requests: int, seed: int = 0) -> list[dict]:
    """Runs in which each peer of `settings` accepts at a rate of its own, that differs from cell to cell.

    `cells`: domain and language of each group of `requests` requests.
    """
    draw = random.Random(seed)
    runs = []
    for cell, (domain, language) in enumerate(cells):
        for context in settings["context_lengths"] or [None]:
            for index in range(requests):
                at = {"domain": domain, "language": language, "context_length": context}
                name = f"{domain}-{language}-{context}-{index}"
                runs.append(plain_run(name, 40, 2.0, **at))
                for rank, peer in enumerate(settings["peers"][1:]):
                    for length in settings["draft_lengths"]:
                        drafted = int(length) if length.isdecimal() else 4
                        rate = 0.25 + 0.3 * ((cell * 7 + rank * 3) % 5) / 5 + draw.uniform(-0.1, 0.1)
                        rounds = [(drafted, accepted_of(draw, drafted, rate)) for _ in range(12)]
                        tokens = 1 + sum(accepted + 1 for _, accepted in rounds)
                        seconds = 12 * (0.05 + 0.006 * drafted)
                        changes = {"draft_length": length, "token_ids": list(range(tokens)), **at}
                        runs.append(a_run(name, peer, rounds, seconds, **changes))
    return runs


def accepted_of(draw: random.Random, drafted: int, rate: float) -> int:
    for place in range(drafted):
        if draw.random() > rate:
            return place
    return drafted
