"""From runs to figures: the result of a benchmark, as it is written to JSON.

A row of `groups` holds the figures of one peer at one draft length and temperature over one slice of the requests:
all, a domain, a language, both, or a file of the suite. Where a slice is not narrowed its value is null. An interval
is `{"value", "low", "high"}`, 95 % by bootstrap over requests (see `osprey.eval.intervals`).
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

import numpy as np

from osprey.eval.acceptance import acceptance_by_position, mean_acceptance_length
from osprey.eval.intervals import bootstrap, mean, ratio_of_sums
from osprey.eval.journal import SCHEMA_VERSION, Journal
from osprey.eval.peers import PLAIN

Run = dict[str, Any]  # as in the journal
SLICES = ((), ("domain",), ("language",), ("domain", "language"), ("file",))
DIMENSIONS = ("domain", "language", "file")
SETTING = ("temperature", "context_length", "peer", "draft_length")


def make_result(
    journal: Journal, settings: dict[str, Any], environment: dict[str, Any], skipped: list[str], seed: int
) -> dict[str, Any]:
    """The result of the runs in `journal`; its figures depend on the runs and on `seed` alone.

    `settings` name the peers (`peers`, plain generation first, then what the others are compared with) and the
    `draft_lengths`, in the order in which they are reported.
    """
    peers, draft_lengths = settings["peers"], settings["draft_lengths"]
    order = {name: rank for rank, name in enumerate([*peers, *draft_lengths])}
    runs = sorted(journal.runs.values(), key=lambda run: (order[run["peer"]], order.get(run["draft_length"], -1)))
    scale = journal.notes.get("plain_scale", 1.0)
    plain = {(run["request"], run["temperature"]): run for run in runs if run["peer"] == PLAIN}
    groups = [
        {
            **dict(zip(SETTING, setting, strict=True)),
            **{name: dict(narrowed).get(name) for name in DIMENSIONS},
            **figures(some, [plain[run["request"], run["temperature"]] for run in some], scale, seed),
        }
        for setting, of_setting in grouped(runs, lambda run: tuple(run[name] for name in SETTING))
        for names in SLICES
        for narrowed, some in grouped(of_setting, lambda run, names=names: tuple((name, run[name]) for name in names))
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "settings": settings,
        "environment": environment,
        **journal.notes,
        "requests": len({run["request"] for run in runs}),
        "skipped": {"longer_than_context": skipped},
        "peak_memory_bytes": max((run["peak_memory_bytes"] for run in runs), default=0),
        "groups": groups,
        "comparisons": compare_peers(runs, peers[1], seed) if len(peers) > 1 else [],
    }


def grouped(runs: Iterable[Run], key: Callable[[Run], tuple]) -> list[tuple[tuple, list[Run]]]:
    """Runs by `key`, in the order in which keys first appear."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.items())


def figures(runs: list[Run], plain: list[Run], plain_scale: float, seed: int) -> dict[str, Any]:
    """The figures of some runs of one peer, beside plain generation of the same requests.

    `mal_mean` is the mean of the requests' MALs, `mal_pooled` all tokens that verifications emitted per verification.
    `accepted_share` is the share of the text that was drafted and accepted. `speedup` is the ratio of the rates in
    tokens per second, for equal texts that of the times. Milliseconds are medians over verifications.
    """
    rounds = [each for run in runs for each in run["rounds"]]  # [drafted, accepted, draft ms, verify ms]
    verified = [run for run in runs if run["rounds"]]
    emitted = [sum(each[1] + 1 for each in run["rounds"]) for run in verified]
    verifications = [len(run["rounds"]) for run in verified]
    tokens, seconds = [len(run["token_ids"]) for run in runs], [run["seconds"] for run in runs]
    plain_tokens, plain_seconds = [len(run["token_ids"]) for run in plain], [run["seconds"] for run in plain]
    lengths = [e / v for e, v in zip(emitted, verifications, strict=True)]
    is_plain, greedy = runs[0]["peer"] == PLAIN, runs[0]["temperature"] == 0

    def speedup(tokens, seconds, plain_tokens, plain_seconds):
        return ratio_of_sums(tokens, seconds) / ratio_of_sums(plain_tokens, plain_seconds) / plain_scale

    texts = [run["token_ids"] == other["token_ids"] for run, other in zip(runs, plain, strict=True)]
    ties = [run for run in runs if run["difference"] is not None and run["difference"]["near_tie"]]
    return {
        "requests": len(runs),
        "tokens": sum(tokens),
        "verifications": len(rounds),
        "mal_mean": interval(bootstrap(mean, lengths, seed=seed)),
        "mal_pooled": interval(bootstrap(ratio_of_sums, emitted, verifications, seed=seed)),
        "acceptance_by_position": acceptance_by_position((each[0], each[1]) for each in rounds),
        "accepted_share": sum(each[1] for each in rounds) / sum(tokens) if rounds and sum(tokens) else None,
        "drafted_per_verification": fmean(each[0] for each in rounds) if rounds else None,
        "draft_ms": median(each[2] for each in rounds) if rounds else None,
        "verify_ms": median(each[3] for each in rounds) if rounds else None,
        "tokens_per_second_plain": plain_scale * sum(plain_tokens) / sum(plain_seconds),
        "tokens_per_second": (plain_scale if is_plain else 1.0) * sum(tokens) / sum(seconds),
        "speedup": None
        if is_plain
        else interval(bootstrap(speedup, tokens, seconds, plain_tokens, plain_seconds, seed=seed)),
        "identical": sum(texts) if greedy and not is_plain else None,
        "near_ties": len(ties) if greedy and not is_plain else None,
    }


def interval(estimate) -> dict[str, float] | None:
    return None if estimate is None else asdict(estimate)


def compare_peers(runs: list[Run], first: str, seed: int) -> list[dict[str, Any]]:
    """The mean MAL of the peer `first` over each other's, on the same requests: of all, by domain, by language.

    Both figures of a request are resampled together, so that what makes a request easy for both cancels out.
    """
    drafting = [run for run in runs if run["peer"] != PLAIN]
    rows = []
    for setting, some in grouped(
        drafting, lambda run: (run["temperature"], run["context_length"], run["draft_length"])
    ):
        for names in SLICES[:3]:
            for narrowed, part in grouped(some, lambda run, names=names: tuple((n, run[n]) for n in names)):
                by_peer = {
                    peer: {run["request"]: mal_of(run) for run in own if run["rounds"]}
                    for (peer,), own in grouped(part, lambda run: (run["peer"],))
                }
                ours = by_peer.pop(first, {})
                for peer, theirs in by_peer.items():
                    both = [request for request in ours if request in theirs]
                    ratio = bootstrap(
                        ratio_of_sums, [ours[each] for each in both], [theirs[each] for each in both], seed=seed
                    )
                    rows.append(
                        {
                            **dict(zip(("temperature", "context_length", "draft_length"), setting, strict=True)),
                            **{name: dict(narrowed).get(name) for name in DIMENSIONS[:2]},
                            "peer": first,
                            "over": peer,
                            "requests": len(both),
                            "mal_ratio": interval(ratio),
                        }
                    )
    return rows


def mal_of(run: Run) -> float | None:
    return mean_acceptance_length([(each[0], each[1]) for each in run["rounds"]])


def matrix(result: dict[str, Any], peers: list[str]) -> tuple[list[str], np.ndarray]:
    """Mean MAL of `peers` (drafters of one domain each) by domain tested: the domains, and `[peers, domains]`.

    At the first temperature and draft length and in the shortest context. A domain that a drafter is named for stands
    in that drafter's place.
    """
    settings = result["settings"]
    firsts = {name: settings[f"{name}s"][0] for name in ("temperature", "draft_length")}
    firsts["context_length"] = min(settings["context_lengths"], default=None)
    rows = select(result, language=None, file=None, **firsts)
    found = list(dict.fromkeys(row["domain"] for row in rows if row["domain"] is not None))
    domains = [name for name in peers if name in found] + [name for name in found if name not in peers]
    values = {(row["peer"], row["domain"]): row["mal_mean"] for row in rows}
    cells = [[(values.get((peer, domain)) or {}).get("value", np.nan) for domain in domains] for peer in peers]
    return domains, np.array(cells, dtype=np.float64)


def select(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The rows of `groups` that have these values."""
    return [row for row in result["groups"] if all(row[name] == value for name, value in wanted.items())]
