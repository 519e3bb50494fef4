"""Runs a suite: every request under every peer, draft length and temperature, in one process, plain generation too.

Orders alternate from request to request, so that a machine that slows down or speeds up favours nobody.
"""

import resource
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from osprey.eval.acceptance import explain_difference, greedy_or_sampled
from osprey.eval.journal import Journal
from osprey.eval.peers import DEFAULT, Peer, Round, run_peer
from osprey.eval.prompts import encode, max_positions
from osprey.eval.suites import Item

WARM_UP_TOKENS = 8
WARM_UP_CHARACTERS = 400
Cell = tuple[Peer, str]  # a peer and a draft length


@dataclass(frozen=True)
class Plan:
    """How each request is run. The seed gives every request one of its own, the same for all peers."""

    temperatures: list[float]
    draft_lengths: list[str]
    max_new_tokens: int
    seed: int = 0


def cells_of(peers: list[Peer], plan: Plan) -> list[Cell]:
    return [(peer, length) for peer in peers for length in peer.draft_lengths(plan.draft_lengths)]


def in_turn(plain: Cell, cells: list[Cell], index: int) -> list[Cell]:
    """The order for request `index`: peers take turns in being first, now before plain generation, now behind it."""
    lap, start = divmod(index, len(cells)) if cells else (0, 0)
    order = cells[start:] + cells[:start]
    order.insert(lap % 2, plain)
    return order


def run_suite(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    peers: list[Peer],
    items: list[Item],
    plan: Plan,
    journal: Journal,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Measures what `journal` does not hold yet; one temperature after the other.

    Args:
        peers: plain generation first. (Sampling lets transformers cut down an assistant with another tokenizer for
            good, so temperature 0 comes first whatever the order of the plan.)
        progress: called with the number of runs that are dealt with since the last call.

    Returns:
        The requests that were skipped since they, with their new tokens, are longer than the target's positions.
    """
    plain, *others = peers
    cells = cells_of(others, plan)
    skipped: list[str] = []
    for temperature in sorted(plan.temperatures):
        for index, item in enumerate(items):
            requests = Conversation(target, tokenizer, item, temperature, plan, journal)
            order = in_turn((plain, DEFAULT), cells, index)
            skipped += [name for name in requests.run(order, progress) if name not in skipped]
    return skipped


def warm_up(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, peers: list[Peer], item: Item) -> None:
    """Lets each peer generate a few tokens: first calls take longer."""
    messages = [{"role": "user", "content": item.prompt.turns[0][:WARM_UP_CHARACTERS]}]
    inputs = {name: tensor.to(target.device) for name, tensor in encode(tokenizer, messages).items()}
    for peer in peers:
        run_peer(target, tokenizer, peer, DEFAULT, inputs, max_new_tokens=WARM_UP_TOKENS, **greedy_or_sampled(0))


@dataclass
class Conversation:
    """The turns of one prompt at one temperature, each a request; later turns follow plain generation's answers."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    item: Item
    temperature: float
    plan: Plan
    journal: Journal

    def run(self, order: list[Cell], progress: Callable[[int], None]) -> list[str]:
        """Measures all turns, and returns the names of those that do not fit into the target's positions."""
        limit = max_positions(self.target)
        prompt, messages = self.item.prompt, []
        names = [
            f"{prompt.id}/turn-{n}" if len(prompt.turns) > 1 else prompt.id for n in range(1, len(prompt.turns) + 1)
        ]
        for number, (name, turn) in enumerate(zip(names, prompt.turns, strict=True)):
            messages.append({"role": "user", "content": turn})
            inputs = encode(self.tokenizer, messages)
            if limit is not None and inputs["input_ids"].shape[1] + self.plan.max_new_tokens > limit:
                progress(len(order) * len(names[number:]))
                return names[number:]
            inputs = {key: tensor.to(self.target.device) for key, tensor in inputs.items()}
            answer = self.run_turn(name, inputs, order, progress)
            messages.append({"role": "assistant", "content": self.tokenizer.decode(answer, skip_special_tokens=True)})
        return []

    def run_turn(
        self, name: str, inputs: dict[str, torch.Tensor], order: list[Cell], progress: Callable[[int], None]
    ) -> list[int]:
        """Runs what the journal lacks of one request, and returns the tokens of plain generation."""
        plain: list[int] | None = None
        waiting: list[dict[str, Any]] = []  # runs that have not been compared with plain generation yet
        for peer, length in order:
            run = self.journal.runs.get((name, self.temperature, peer.name, length))
            if run is None:
                run = self.generate(name, inputs, peer, length)
                waiting.append(run)
            if peer.kind == "plain":
                plain = run["token_ids"]
            while waiting and plain is not None:
                self.compare(waiting[0], inputs, plain)
                self.journal.append(waiting.pop(0))
            progress(1)
        return plain

    def generate(self, name: str, inputs: dict[str, torch.Tensor], peer: Peer, length: str) -> dict[str, Any]:
        on_cuda = self.target.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        run, rounds = run_peer(
            self.target,
            self.tokenizer,
            peer,
            length,
            inputs,
            seed=zlib.crc32(f"{self.plan.seed}/{name}".encode()),
            max_new_tokens=self.plan.max_new_tokens,
            **greedy_or_sampled(self.temperature),
        )
        return {
            "request": name,
            "temperature": self.temperature,
            "peer": peer.name,
            "draft_length": length,
            "file": self.item.file,
            "domain": self.item.prompt.domain,
            "language": self.item.prompt.language,
            "context_length": self.item.context_length,
            "prompt_tokens": inputs["input_ids"].shape[1],
            "seconds": round(run.seconds, 6),
            "token_ids": run.token_ids,
            "rounds": [row_of(each) for each in rounds],
            "difference": None,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_cuda else process_peak_bytes(),
        }

    def compare(self, run: dict[str, Any], inputs: dict[str, torch.Tensor], plain: list[int]) -> None:
        """Notes where a greedy text parts from plain generation's, which it should not."""
        if self.temperature == 0 and run["token_ids"] != plain:
            run["difference"] = asdict(explain_difference(self.target, inputs, plain, run["token_ids"]))


def row_of(each: Round) -> list[float]:
    """Drafted, accepted, milliseconds of drafting, milliseconds of verifying."""
    return [each.drafted, each.accepted, round(1e3 * each.draft_seconds, 3), round(1e3 * each.verify_seconds, 3)]


def process_peak_bytes() -> int:
    """The most memory that this process has had so far, all models included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
