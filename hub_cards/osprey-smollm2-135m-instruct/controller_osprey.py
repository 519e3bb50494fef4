"""How long a draft pays.

A round that drafts `k` tokens takes `draft(k) + verify(k + 1)` seconds and emits `1 + P_1 + ... + P_k` tokens on
average, where `P_i` is the chance that the first `i` are all accepted. One more token pays as long as its chance is
above what its draft step and its row in the verification cost, in tokens at the best rate that can be had; at the
optimum that rule and the best rate agree (Dinkelbach 1967, for ratios). The seconds are measured; the chances are the
drafter's own probabilities, corrected by how often such tokens were accepted.

What has not paid so far is tried again, since texts change, but on a budget: all such trials together may lose a small
share of the time. So a drafter that never pays costs that share, whatever its rounds cost.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from statistics import median_low
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

SHORT_TEXT = 1024  # tokens up to which a text costs alike; from there on for each doubling
SCHEDULE_ROUNDS = 6  # the first at each length: twice the longest draft, none, one token, to measure what each costs
RECENT = 9  # measurements of a kind that count
PLAIN_EVERY = 64  # rounds without a plain step after which one stands in for a draft, to be measured again
PROBE_EVERY = 16  # rounds after which what does not pay is tried again; sooner where it has just ceased to pay
MEMORY = 32  # drafted rounds over which a call's rate is averaged, and
START_WEIGHT = 8  # how many of them the average of earlier calls counts for
FORGET = 400  # tokens of a kind, and rounds at a length, after which older ones count less
LONGEST_UNMEASURED_COPY = 10  # tokens, where nothing says what a row of a verification costs
PRIOR_WEIGHT = 4  # tokens that the guess before any measurement counts for
COPY_PRIOR = 0.7  # that guess for a copied token, a hopeful one: what is not tried stays unknown
EXPLORE_SHARE = 0.01  # of all time at a length that trials may lose, beside
EXPLORE_STEPS = 2  # plain steps


class AcceptanceRates:
    """How often tokens of a kind were accepted, those before them in the draft being so."""

    def __init__(self):
        self.counts: dict[Hashable, tuple[float, float]] = {}  # kind to (accepted, tried)

    def add(self, kind: Hashable, accepted: bool) -> None:
        right, tried = self.counts.get(kind, (0.0, 0.0))
        scale = 0.5 if tried >= FORGET else 1.0
        self.counts[kind] = (right * scale + accepted, tried * scale + 1)

    def chance(self, kind: Hashable, prior: float) -> float:
        right, tried = self.counts.get(kind, (0.0, 0.0))
        return (right + prior * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)


@dataclass
class DraftingRate:
    """Running averages over the rounds in which the drafter drafted."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: int = 0

    def add(self, tokens: int, seconds: float, memory: int) -> None:
        self.rounds += 1
        share = 1 / min(self.rounds, memory)
        self.tokens += (tokens - self.tokens) * share
        self.seconds += (seconds - self.seconds) * share

    def per_second(self) -> float:
        return per_second(self.tokens, self.seconds)


class Costs:
    """What rounds behind texts of about one length have taken, in seconds."""

    def __init__(self):
        self.samples: dict[Hashable, deque[float]] = {}  # seconds: "first", "next", or the width of a verification
        self.scheduled = 0  # rounds of the schedule that are done
        self.since_plain = 0  # rounds since the last plain step
        self.spent = self.lost = 0.0  # seconds of all rounds, and those that trials lost against the best known
        self.drafting = DraftingRate()

    def add_seconds(self, kind: Hashable, seconds: float) -> None:
        recent = self.samples.get(kind, ())
        self.samples[kind] = deque([*recent, seconds], maxlen=RECENT)

    def seconds(self, kind: Hashable) -> float:
        """What recent ones took. The first may have taken far longer, and does not count once there are two."""
        return median_low(self.samples[kind]) if kind in self.samples else 0.0

    def verification(self, width: int) -> float:
        """Seconds of a verification of `width` rows: what a plain step takes, or by a line through all others."""
        points = [(w, median_low(s), len(s)) for w, s in list(self.samples.items()) if isinstance(w, int) and w > 1]
        if width == 1 or not points:
            return self.seconds(1)
        points = [point for point in points if point[2] > 1] or points  # without the first of a width, as above
        total = sum(n for _, _, n in points)
        mean_width = sum(w * n for w, _, n in points) / total
        mean_cost = sum(cost * n for _, cost, n in points) / total
        spread = sum(n * (w - mean_width) ** 2 for w, _, n in points)
        slope = sum(n * (w - mean_width) * cost for w, cost, n in points) / spread if spread else 0.0
        return mean_cost + max(slope, 0.0) * (width - mean_width)

    def may_explore(self) -> bool:
        """Whether the budget allows another trial of what did not pay."""
        return self.lost <= EXPLORE_STEPS * self.seconds(1) + EXPLORE_SHARE * self.spent

    def row(self) -> float:
        """Seconds that one more row adds to a verification."""
        return self.verification(3) - self.verification(2)

    def round(self, length: int) -> float:
        """Seconds of a round in which the drafter drafts `length` tokens."""
        return self.seconds("first") + (length - 1) * self.seconds("next") + self.verification(length + 1)


class PairStatistics:
    """What the `generate` calls of one target with one drafter have measured on this machine.

    Threads may share it: each value is replaced as a whole, and one lost sample of many does not matter.
    """

    def __init__(self):
        self.drafted, self.copied = AcceptanceRates(), AcceptanceRates()
        self.costs: dict[int, Costs] = {}

    def at(self, length: int) -> Costs:
        """Costs behind `length` tokens: attention makes every row dearer, the target's more than the drafter's."""
        return self.costs.setdefault((length // SHORT_TEXT).bit_length(), Costs())


_pairs: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, PairStatistics]] = WeakKeyDictionary()
_pairs_lock = threading.Lock()


def statistics_of(target: PreTrainedModel, drafter: PreTrainedModel) -> PairStatistics:
    """The statistics of a pair, which live as long as both models do."""
    with _pairs_lock:
        return _pairs.setdefault(target, WeakKeyDictionary()).setdefault(drafter, PairStatistics())


class FixedDraftLength:
    """Drafts up to `longest` tokens, fewer where the drafter's probability of all of them falls below `threshold`.

    Copies are at most `LONGEST_UNMEASURED_COPY` tokens.
    """

    def __init__(self, longest: int, threshold: float):
        self.longest, self.threshold = longest, threshold
        self.needs_probabilities = threshold > 0

    def start_round(self, length: int) -> None:
        pass

    def plan(self, match_size: int, copied: int) -> tuple[int, int]:
        return min(copied, LONGEST_UNMEASURED_COPY), self.longest

    def start_draft(self, positions: int) -> None:
        self.confidence = 1.0

    def wants_more(self, probability: float) -> bool:
        self.confidence *= probability
        return self.confidence >= self.threshold

    def end_round(self) -> None:
        pass

    def verified(self, accepted: int) -> None:
        pass


class AdaptiveDraftLength:
    """Drafts or copies, in each round of one `generate` call, as far as it pays; the text never depends on it.

    Args:
        pair: what earlier calls have measured.
        longest: most tokens that the drafter may draft.
        clock: seconds that only ever rise.
    """

    needs_probabilities = True

    def __init__(self, pair: PairStatistics, longest: int, clock: Callable[[], float] = time.perf_counter):
        self.pair, self.longest, self.clock = pair, longest, clock
        self.copied = AcceptanceRates()  # of this text: another says nothing about it
        self.costs: Costs | None = None  # at the present length of the text
        self.idle_rounds = 0  # since the last draft
        self.explores = False  # whether this round tries what has not paid
        self.probe_after = 2
        self.verifying_since: float | None = None
        self.kinds: list[Hashable] = []

    def start_round(self, length: int) -> None:
        """To be called when a verification is over and the text has `length` tokens."""
        if self.verifying_since is not None:
            self.costs.add_seconds(len(self.kinds) + 1, self.clock() - self.verifying_since)
        costs = self.pair.at(length)
        if costs is not self.costs:
            self.costs = costs
            self.drafting = replace(costs.drafting, rounds=min(costs.drafting.rounds, START_WEIGHT))
        self.kinds, self.drafts = [], False  # kinds of the tokens in this round's draft

    def end_round(self) -> None:
        """To be called when a draft, or none, goes to its verification."""
        self.verifying_since = self.clock()

    def plan(self, match_size: int, copied: int) -> tuple[int, int]:
        """Of `copied` tokens that followed a match of `match_size`, how many to copy, and how many to draft."""
        if self.costs.scheduled < SCHEDULE_ROUNDS:
            self.limit, self.is_scheduled = (self.longest, 0, 1)[self.costs.scheduled % 3], True
            self.costs.scheduled += 1
            self.explores = False
            return 0, self.limit
        self.limit, self.is_scheduled = self.longest, False
        best, may_explore = self.best_rate(), self.costs.may_explore()
        length, copying_rate = self.plan_copy(match_size, copied)
        self.explores = copying_rate < best
        if length and (not self.explores or may_explore):
            self.kinds = [(match_size, place > 0) for place in range(length)]
            return length, 0
        if self.costs.since_plain >= PLAIN_EVERY:
            self.explores = False
            return 0, 0
        is_known = self.drafting.rounds >= START_WEIGHT
        pays = is_known and self.drafting.per_second() >= best
        is_due = not is_known or self.idle_rounds >= self.probe_after
        self.explores = not pays and may_explore and is_due
        if not pays and not self.explores:
            self.idle_rounds += 1
            return 0, 0
        self.idle_rounds, self.probe_after = 0, 2 if pays else min(2 * self.probe_after, PROBE_EVERY)
        return 0, self.longest

    def plan_copy(self, match_size: int, available: int) -> tuple[int, float]:
        """How many of `available` tokens pay, and the tokens a second that copying them gives."""
        chance, emitted, length = 1.0, 1.0, 0
        best, row, two_rows = self.best_rate(), self.costs.row(), self.costs.verification(2)
        while length < available:
            kind = (match_size, length > 0)
            chance *= self.copied.chance(kind, self.pair.copied.chance(kind, COPY_PRIOR))
            # Not beyond what the copy's own rate pays for either: the next copy goes on, at that rate.
            if length > 0 and chance <= row * max(best, per_second(emitted, two_rows + (length - 1) * row)):
                break
            emitted, length = emitted + chance, length + 1
        return length, per_second(emitted, self.costs.verification(length + 1))

    def best_rate(self) -> float:
        """Tokens a second of drafting or of plain steps, whichever gives more."""
        return max(self.drafting.per_second(), per_second(1.0, self.costs.seconds(1)))

    def start_draft(self, positions: int) -> None:
        """`positions`: how many the drafter's first step runs over; a prompt's time says nothing of later rounds."""
        self.drafts, self.chance = True, 1.0
        self.step_since = self.clock() if positions <= 2 * self.longest + 2 else None

    def wants_more(self, probability: float) -> bool:
        """Whether to draft another token; to be called after each, with what the drafter thinks of it."""
        now = self.clock()
        if self.step_since is not None:
            self.costs.add_seconds("next" if self.kinds else "first", now - self.step_since)
        self.step_since = now
        bucket = min(int(probability * 10), 9)
        self.kinds.append(bucket)
        self.chance *= self.pair.drafted.chance(bucket, (bucket + 0.5) / 10)
        if self.is_scheduled or len(self.kinds) >= self.limit:
            return len(self.kinds) < self.limit
        cost = self.costs.seconds("next") + self.costs.row()
        return self.chance * self.pair.drafted.chance("any", 0.5) > self.best_rate() * cost

    def verified(self, accepted: int) -> None:
        """What became of the draft; tokens behind the first rejected one say nothing."""
        for place, kind in enumerate(self.kinds[: accepted + 1]):
            for rates in (self.pair.drafted,) if self.drafts else (self.copied, self.pair.copied):
                rates.add(kind, place < accepted)
            if self.drafts:
                self.pair.drafted.add("any", place < accepted)
        length, best = len(self.kinds), self.best_rate()
        self.costs.since_plain = self.costs.since_plain + 1 if length else 0
        seconds = self.costs.round(length) if self.drafts else self.costs.verification(length + 1)
        self.costs.spent += seconds
        if self.explores and best > 0:
            self.costs.lost = max(self.costs.lost + seconds - (accepted + 1) / best, 0.0)
        if self.drafts and not self.is_scheduled:
            self.drafting.add(accepted + 1, seconds, MEMORY)
            self.costs.drafting.add(accepted + 1, seconds, FORGET)


def per_second(tokens: float, seconds: float) -> float:
    return tokens / seconds if seconds > 0 else 0.0
