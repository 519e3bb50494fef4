"""Measuring a drafter: plain and assisted `generate` side by side on one target, and what to make of the figures.

Mean acceptance length (MAL) is tokens emitted per verification forward of the target, the bonus token included; the
prefill forward verifies nothing and is not counted. Times are those of whole `generate` calls, prefill included.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from osprey.modeling import record_acceptance


@dataclass
class Run:
    """One `generate` call: the new tokens, the wall time in seconds and, if assisted, its verification rounds."""

    token_ids: list[int]
    seconds: float
    rounds: list[tuple[int, int]] = field(default_factory=list)  # (drafted, accepted) per verification


@dataclass
class Difference:
    """Where two greedy texts part, and how close the target's two best logits are there.

    Attributes:
        position: index of the first new token that differs.
        logit_gap: best minus second-best logit of the target after the common prefix; None where one text is only
            a prefix of the other.
        near_tie: whether the differing tokens are these two best and the gap is within float noise, so that the
            choice between them hangs on the order of additions, not on the drafter.
    """

    position: int
    logit_gap: float | None
    near_tie: bool


@dataclass
class Measurement:
    """Plain and assisted generation from one prompt; `plain` is None where it was not run."""

    id: str
    group: str
    assisted: Run
    plain: Run | None = None
    identical: bool | None = None  # None: not compared, or sampled (two draws need not agree)
    difference: Difference | None = None


def greedy_or_sampled(temperature: float) -> dict[str, Any]:
    """`generate` arguments: greedy at temperature 0, else sampling from the untruncated distribution."""
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}, but must be 0 (greedy) or above.")
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}


def timed_generate(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    drafter: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    seed: int = 0,
    **generate_kwargs,
) -> Run:
    """One timed `generate` call on `inputs` (`input_ids`, `attention_mask`: `[1, T]`), assisted with a drafter."""
    on_cuda = target.device.type == "cuda"
    torch.manual_seed(seed)
    with record_acceptance() as calls:
        if on_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        output = target.generate(**inputs, assistant_model=drafter, streamer=streamer, **generate_kwargs)
        if on_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    token_ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    return Run(token_ids, seconds, calls[0].rounds if calls else [])


def measure(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    *,
    id: str,
    group: str,
    max_new_tokens: int,
    temperature: float = 0.0,
    compare: bool = True,
    plain_first: bool = True,
    streamer: BaseStreamer | None = None,
    seed: int = 0,
) -> Measurement:
    """Generates from one prompt plainly and assisted, in this process, and compares the tokens.

    Callers alternate `plain_first`, so that a machine that slows down or speeds up favours neither. The streamer
    follows the assisted run, whose time includes it.
    """
    kwargs = {"max_new_tokens": max_new_tokens, "seed": seed, **greedy_or_sampled(temperature)}
    plain = timed_generate(target, inputs, **kwargs) if compare and plain_first else None
    assisted = timed_generate(target, inputs, drafter, streamer, **kwargs)
    if compare and not plain_first:
        plain = timed_generate(target, inputs, **kwargs)
    measurement = Measurement(id, group, assisted, plain)
    if plain is not None and temperature == 0:
        measurement.identical = plain.token_ids == assisted.token_ids
        if not measurement.identical:
            measurement.difference = explain_difference(target, inputs, plain.token_ids, assisted.token_ids)
    return measurement


@torch.no_grad()
def explain_difference(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], plain: list[int], assisted: list[int]
) -> Difference:
    """Teacher-forces the common prefix of two differing texts and looks at the target's logits behind it."""
    position = next((i for i, pair in enumerate(zip(plain, assisted, strict=False)) if pair[0] != pair[1]), None)
    if position is None:
        return Difference(min(len(plain), len(assisted)), None, False)
    prefix = torch.tensor([plain[:position]], dtype=torch.long, device=target.device)  # [1, position]
    input_ids = torch.cat([inputs["input_ids"].to(target.device), prefix], dim=-1)  # [1, T + position]
    logits = target(input_ids=input_ids, logits_to_keep=1).logits[0, -1].float()  # [V]
    best = logits.topk(2)
    gap = (best.values[0] - best.values[1]).item()
    # Float noise between widths was measured at about 5e-5 with float32 activations; half precision rounds logits
    # of 16 to 32 to an eighth (bfloat16).
    noise = 1e-3 if target.dtype == torch.float32 else 0.25
    return Difference(
        position, gap, gap <= noise and set(best.indices.tolist()) == {plain[position], assisted[position]}
    )


def mean_acceptance_length(rounds: Sequence[tuple[int, int]]) -> float | None:
    """Tokens emitted per verification; None without one."""
    return sum(accepted + 1 for _, accepted in rounds) / len(rounds) if rounds else None


def acceptance_by_position(rounds: Iterable[tuple[int, int]]) -> list[float | None]:
    """Per draft position d: the share accepted of the tokens drafted there whose d predecessors were all accepted.

    A draft cut short by the end of the text or by the token limit counts its tail as not accepted. None where no
    verification got that far.
    """
    rounds = list(rounds)
    depth = max((drafted for drafted, _ in rounds), default=0)
    rates: list[float | None] = []
    for d in range(depth):
        tried = [accepted > d for drafted, accepted in rounds if drafted > d and accepted >= d]
        rates.append(sum(tried) / len(tried) if tried else None)
    return rates


def tokens_per_second(runs: Sequence[Run]) -> float | None:
    seconds = sum(run.seconds for run in runs)
    return sum(len(run.token_ids) for run in runs) / seconds if seconds else None


@dataclass
class Summary:
    """Figures over some requests. Rates are pooled: all tokens over all seconds.

    Attributes:
        speedup: seconds per plain token / seconds per assisted token; for identical texts the ratio of total times.
        mal_mean: mean of the requests' MALs. mal_pooled: all tokens emitted by verifications / all verifications.
        identical: whether every text is the same, token by token; None where none was compared.
    """

    requests: int
    tokens_per_second_plain: float | None
    tokens_per_second_assisted: float | None
    speedup: float | None
    mal_mean: float | None
    mal_pooled: float | None
    acceptance_by_position: list[float | None]
    identical: bool | None
    near_ties: int  # texts that differ, but only by a near-tie


def summarize(measurements: Sequence[Measurement], plain_scale: float = 1.0) -> Summary:
    """Sums up requests, or one request alone.

    Args:
        plain_scale: how much faster plain generation is in another precision than in the measured one; plain rates
            are multiplied by it, so that the speedup is over the faster plain generation.
    """
    plain = tokens_per_second([m.plain for m in measurements if m.plain is not None])
    plain = None if plain is None else plain * plain_scale
    assisted = tokens_per_second([m.assisted for m in measurements])
    lengths = [mean_acceptance_length(m.assisted.rounds) for m in measurements]
    lengths = [length for length in lengths if length is not None]
    rounds = [pair for m in measurements for pair in m.assisted.rounds]
    compared = [m.identical for m in measurements if m.identical is not None]
    return Summary(
        requests=len(measurements),
        tokens_per_second_plain=plain,
        tokens_per_second_assisted=assisted,
        speedup=assisted / plain if plain and assisted else None,
        mal_mean=math.fsum(lengths) / len(lengths) if lengths else None,
        mal_pooled=mean_acceptance_length(rounds),
        acceptance_by_position=acceptance_by_position(rounds),
        identical=all(compared) if compared else None,
        near_ties=sum(m.difference is not None and m.difference.near_tie for m in measurements),
    )
