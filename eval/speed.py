"""Ways to generate, timed side by side: ratios from one run of one process.

Each prompt is run by each contestant in turn, some times over, and who begins changes from one time to the next: a
machine that slows down favours nobody. A prompt counts with the median of its times, a group with all its tokens over
all its seconds. Ratios are those of tokens a second, above 1 where the contestant is the faster.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from osprey.eval.acceptance import greedy_or_sampled, mean_acceptance_length
from osprey.eval.peers import DEFAULT, Peer, watch_rounds
from osprey.eval.prompts import check_length, encode
from osprey.eval.suites import Item

Clock = Callable[[], float]


def make_clock(kind: str, device: torch.device) -> Clock:
    """Seconds on the `wall`, or of this `process` on all its CPU threads, which other jobs disturb less.

    Raises:
        ValueError: the clock is unknown, or would not see an accelerator at work.
    """
    if kind not in ("wall", "process"):
        raise ValueError(f"the clock is {kind!r}, but must be wall or process.")
    if device.type == "cpu":
        return time.perf_counter if kind == "wall" else time.process_time
    if kind == "process":
        raise ValueError(f"the process clock sees no work of {device.type}: use the wall clock.")

    def after_the_device() -> float:
        torch.accelerator.synchronize()
        return time.perf_counter()

    return after_the_device


@dataclass(frozen=True)
class Contestant:
    """A peer with one draft length."""

    peer: Peer
    length: str = DEFAULT

    @property
    def name(self) -> str:
        return self.peer.name if self.length == DEFAULT else f"{self.peer.name}, {self.length}"


@dataclass(frozen=True)
class Trial:
    """One timed `generate` call.

    Attributes:
        first_token: seconds to the first new token, of the `seconds` of the whole call.
        rounds: per verification, (tokens drafted, drafted tokens accepted).
    """

    contestant: str
    prompt: str
    group: str
    token_ids: list[int]
    seconds: float
    first_token: float
    rounds: list[tuple[int, int]]


class FirstToken(BaseStreamer):
    """Notes when the first new token comes; `generate` shows the prompt before it."""

    def __init__(self, clock: Clock):
        self.clock, self.shown, self.at = clock, 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.shown += 1
        if self.shown == 2:
            self.at = self.clock()

    def end(self) -> None:
        pass


def time_generate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contestant: Contestant,
    item: Item,
    max_new_tokens: int,
    clock: Clock,
) -> Trial:
    """Answers the first turn of a prompt greedily.

    Raises:
        ValueError: the prompt and the answer do not fit into the target's positions.
    """
    inputs = encode(tokenizer, [{"role": "user", "content": item.prompt.turns[0]}])
    inputs = {name: tensor.to(target.device) for name, tensor in inputs.items()}
    prompt_length = inputs["input_ids"].shape[1]
    check_length(inputs, target, item.prompt.id, max_new_tokens)
    arguments = {**inputs, **greedy_or_sampled(0), **contestant.peer.prepare(contestant.length, tokenizer)}
    streamer = FirstToken(clock)
    with watch_rounds(target) as rounds:
        start = clock()
        output = target.generate(**arguments, max_new_tokens=max_new_tokens, streamer=streamer)
        seconds = clock() - start
    return Trial(
        contestant.name,
        item.prompt.id,
        item.prompt.domain if item.context_length is None else f"context of {item.context_length}",
        output[0, prompt_length:].tolist(),
        seconds,
        streamer.at - start,
        [(one.drafted, one.accepted) for one in rounds],
    )


def race(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contestants: Sequence[Contestant],
    items: Sequence[Item],
    max_new_tokens: int,
    repeats: int,
    clock: Clock,
) -> Iterator[Trial]:
    """All trials as they are done, after a few unmeasured tokens of each contestant."""
    for contestant in contestants:
        time_generate(target, tokenizer, contestant, items[0], 4, clock)
    first = 0
    for item in items:
        for _ in range(repeats):
            for contestant in [*contestants[first:], *contestants[:first]]:
                yield time_generate(target, tokenizer, contestant, item, max_new_tokens, clock)
            first = (first + 1) % len(contestants)


@dataclass(frozen=True)
class Ratio:
    """A contestant against the one called plain, over the same prompts.

    Attributes:
        speedup: tokens a second over those of plain generation.
        over_lookup: tokens a second over those of prompt lookup; None where that did not run.
        first_token: seconds to the first token over those of plain generation: above 1 is slower.
        mal: tokens a verification, pooled; None for plain generation.
        different: prompts whose text is not that of plain generation.
    """

    contestant: str
    prompts: int
    tokens: int
    tokens_per_second: float
    speedup: float
    over_lookup: float | None
    first_token: float
    mal: float | None
    different: int


def ratios(trials: Sequence[Trial], plain: str, lookup: str) -> list[Ratio]:
    """Sums up trials of the same prompts, one entry a contestant, in the order in which they first ran."""
    by: dict[str, dict[str, list[Trial]]] = {}  # contestant, prompt
    for trial in trials:
        by.setdefault(trial.contestant, {}).setdefault(trial.prompt, []).append(trial)
    texts = {prompt: runs[0].token_ids for prompt, runs in by[plain].items()}
    rates, first_tokens = {}, {}
    for name, prompts in by.items():
        seconds = sum(median(run.seconds for run in runs) for runs in prompts.values())
        rates[name] = sum(len(runs[0].token_ids) for runs in prompts.values()) / seconds
        first_tokens[name] = sum(median(run.first_token for run in runs) for runs in prompts.values())
    return [
        Ratio(
            name,
            len(prompts),
            sum(len(runs[0].token_ids) for runs in prompts.values()),
            rates[name],
            rates[name] / rates[plain],
            rates[name] / rates[lookup] if lookup in rates else None,
            first_tokens[name] / first_tokens[plain],
            mean_acceptance_length([one for runs in prompts.values() for one in runs[0].rounds]),
            sum(runs[0].token_ids != texts[prompt] for prompt, runs in prompts.items()),
        )
        for name, prompts in by.items()
    ]


def by_group(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.group, []).append(trial)
    return groups
