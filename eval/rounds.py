"""Where the time of assisted generation goes: the parts of a round, and the bound that they leave.

A round drafts, verifies with one forward of the target, and keeps its books. The bound counts for each round what its
verification usually costs and, for each token the network drafted, what a draft step usually costs: nothing between
the models, no longer first step. It is `MAL / (verify + k * draft)` with each round's own width and k.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from statistics import median

from transformers import PreTrainedModel

TARGET, TAPS, LAYERS, HEAD = "target", "project_taps", "run_layers", "draft_logits"


@dataclass(frozen=True)
class Pass:
    """A call of one part of the two models, over some positions, from `start` to `end` in seconds."""

    part: str
    positions: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@contextmanager
def watch_passes(
    target: PreTrainedModel, drafter: PreTrainedModel | None, clock: Callable[[], float]
) -> Iterator[list[Pass]]:
    """Collects the forwards of `target`, and the parts of the draft steps of `drafter`, in the calls inside."""
    passes: list[Pass] = []
    since: list[float] = []

    def before(module, args, kwargs) -> None:
        since.append(clock())

    def after(module, args, kwargs, output) -> None:
        inputs = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        passes.append(Pass(TARGET, inputs.shape[1], since.pop(), clock()))

    def timed(name: str):
        method = getattr(drafter, name)

        @wraps(method)
        def call(states, *args, **kwargs):
            start = clock()
            output = method(states, *args, **kwargs)
            passes.append(Pass(name, states.shape[1], start, clock()))
            return output

        return call

    hooks = [
        target.register_forward_pre_hook(before, with_kwargs=True),
        target.register_forward_hook(after, with_kwargs=True),
    ]
    names = (TAPS, LAYERS, HEAD) if drafter is not None else ()
    for name in names:
        setattr(drafter, name, timed(name))  # hides the method of this drafter
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()
        for name in names:
            delattr(drafter, name)


@dataclass(frozen=True)
class RoundCost:
    """Seconds of one round, and what they were spent for.

    Attributes:
        width: rows of the verification.
        steps: tokens that the network drafted; copied ones are not among them.
    """

    width: int
    steps: int
    drafting: float
    verifying: float
    outside: float

    @property
    def seconds(self) -> float:
        return self.drafting + self.verifying + self.outside


def rounds_of(passes: Sequence[Pass]) -> tuple[Pass, list[RoundCost]]:
    """The target's prefill, and the rounds of one `generate` call: each ends with its forward of the target.

    Plain generation has rounds too, without drafting.
    """
    ends = [index for index, one in enumerate(passes) if one.part == TARGET]
    rounds = []
    for last, this in zip(ends, ends[1:], strict=False):
        drafting = passes[last + 1 : this]
        seconds = passes[this].end - passes[last].end
        inside = sum(one.seconds for one in drafting)
        rounds.append(
            RoundCost(
                passes[this].positions,
                sum(one.part == HEAD for one in drafting),
                inside,
                passes[this].seconds,
                seconds - inside - passes[this].seconds,
            )
        )
    return passes[ends[0]], rounds


@dataclass(frozen=True)
class Parts:
    """Medians in seconds, of one or several calls; shares are of the rounds' time, the first round left out.

    Attributes:
        plain_step, plain_outside: a forward of the target in plain generation, and what surrounds it.
        verification: by width. draft_step: one token drafted from one position. first_step: the step that begins a
            draft, over what the last verification made known.
        outside: a round's time outside the two models.
        of_bound: the bound's seconds of a round over those measured.
        target_prefill, drafter_prefill: sums over the prompts; the drafter's ends where it scores its first token.
    """

    rounds: int
    plain_step: float
    plain_outside: float
    verification: dict[int, float]
    draft_step: float | None
    first_step: float | None
    outside: float
    drafting_share: float
    verifying_share: float
    outside_share: float
    of_bound: float
    target_prefill: float
    drafter_prefill: float


def summarize_parts(plain: Sequence[Sequence[Pass]], assisted: Sequence[Sequence[Pass]]) -> Parts:
    """Sums up the passes of plain and of assisted calls, of the same prompts.

    Raises:
        ValueError: no call has a second round, so that there is nothing to sum up.
    """
    plain_rounds = [one for passes in plain for one in rounds_of(passes)[1]]
    target_prefill, drafter_prefill, rounds, later = 0.0, 0.0, [], []
    for passes in assisted:
        prefill, own = rounds_of(passes)
        target_prefill += prefill.seconds
        first_head = next((index for index, one in enumerate(passes) if one.part == HEAD), 0)
        drafter_prefill += sum(one.seconds for one in passes[:first_head] if one.part != TARGET)
        rounds += own[1:]  # in the first the drafter runs over the prompt
        later += passes_after(passes, 2)
    if not rounds or not plain_rounds:
        raise ValueError("the answers are too short to show a round's parts: allow more new tokens.")
    verification = {
        width: median(one.verifying for one in rounds if one.width == width)
        for width in sorted({one.width for one in rounds})
    }
    heads = [one.seconds for one in later if one.part == HEAD]
    steps = [one.seconds for one in later if one.part == LAYERS and one.positions == 1]
    draft_step = median(steps) + median(heads) if steps and heads else None
    first_steps = first_steps_of(later)
    total = sum(one.seconds for one in rounds)
    bounds = [verification[one.width] + one.steps * (draft_step or 0.0) for one in rounds]
    return Parts(
        rounds=len(rounds),
        plain_step=median(one.verifying for one in plain_rounds),
        plain_outside=median(one.outside for one in plain_rounds),
        verification=verification,
        draft_step=draft_step,
        first_step=median(first_steps) if first_steps else None,
        outside=median(one.outside for one in rounds),
        drafting_share=sum(one.drafting for one in rounds) / total,
        verifying_share=sum(one.verifying for one in rounds) / total,
        outside_share=sum(one.outside for one in rounds) / total,
        of_bound=median(bound / one.seconds for bound, one in zip(bounds, rounds, strict=True)),
        target_prefill=target_prefill,
        drafter_prefill=drafter_prefill,
    )


def passes_after(passes: Sequence[Pass], forwards: int) -> list[Pass]:
    """The passes behind so many forwards of the target."""
    ends = [index for index, one in enumerate(passes) if one.part == TARGET]
    return list(passes[ends[forwards - 1] + 1 :]) if len(ends) >= forwards else []


def first_steps_of(passes: Sequence[Pass]) -> list[float]:
    """Seconds of the steps that begin a draft: each starts with the taps and ends with the head."""
    seconds, current = [], None
    for one in passes:
        if one.part == TAPS:
            current = 0.0
        if current is not None:
            current += one.seconds
        if one.part == HEAD and current is not None:
            seconds.append(current)
            current = None
    return seconds
