"""Draft length from costs and chances: the analytic optimum on synthetic ones, and the same text on real models."""

import gc
import itertools
import math
import random
import threading

import pytest
import torch
from distributions import SIGNIFICANCE, chain_target, draw_transitions, small_drafter, transitions_p_value
from tiny import assert_same_text, oracle, tiny_drafter, tiny_prompt, tiny_target

from osprey.modeling import controller_osprey, record_acceptance
from osprey.modeling.controller_osprey import AdaptiveDraftLength, FixedDraftLength, PairStatistics, statistics_of


class World:
    """A target and a drafter of which only the costs, in seconds, and the chances are real; its clock is its own."""

    def __init__(self, plain, rows, row, first, following, chances, seed=0, confidence=None, cold=()):
        self.plain, self.rows, self.row = plain, rows, row  # of one row; of more: rows + row * width
        self.first, self.following, self.chances = first, following, chances
        self.confidence = confidence or (lambda chance: chance)  # what the drafter says where the truth is `chance`
        self.random, self.now = random.Random(seed), 0.0
        self.pair = PairStatistics()
        self.length, self.grows = 0, False  # of the text
        self.long_factor = 1  # of what verifying costs behind 1,024 tokens and more
        self.cold = set(cold)  # what takes three times as long at first: "first", "next", widths of verifications

    def wait(self, kind, seconds):
        self.now += seconds * (3 if kind in self.cold else 1)
        self.cold.discard(kind)

    def verification(self, width):
        seconds = self.plain if width == 1 else self.rows + self.row * width
        return seconds * (self.long_factor if self.length >= 1024 else 1)

    def rate_of(self, length):
        """Tokens a second of drafting always `length` tokens of average chance."""
        mean = sum(self.chances) / len(self.chances)
        tokens = sum(mean**i for i in range(length + 1))
        drafting = self.first + (length - 1) * self.following if length else 0.0
        return tokens / (drafting + self.verification(length + 1))

    def run(self, rounds, longest, copies=None, copy_chance=0.0, copies_every=2):
        """Plays rounds; returns tokens a second, and per round (copied, drafted)."""
        policy = AdaptiveDraftLength(self.pair, longest, clock=lambda: self.now)
        tokens, start, done = 0, self.now, []
        for index in range(rounds):
            policy.start_round(self.length)
            available = copies if copies and index % copies_every == 0 else 0
            copied, budget = policy.plan(4 if available else 0, available)
            chances = [copy_chance] * copied
            if budget:
                policy.start_draft(1)
                for step in range(budget):
                    self.wait(*(("next", self.following) if step else ("first", self.first)))
                    chances.append(self.random.choice(self.chances))
                    if not policy.wants_more(self.confidence(chances[-1])):
                        break
            policy.end_round()
            self.wait(len(chances) + 1, self.verification(len(chances) + 1))
            accepted = next((i for i, chance in enumerate(chances) if self.random.random() >= chance), len(chances))
            policy.verified(accepted)
            tokens += accepted + 1
            self.length += (accepted + 1) * self.grows
            done.append((copied, len(chances) - copied))
        return tokens / (self.now - start), done


COSTS = {
    "cheap rows": {"plain": 1.0, "rows": 0.95, "row": 0.02, "first": 0.08, "following": 0.05},
    "dear rows": {"plain": 1.0, "rows": 1.3, "row": 0.10, "first": 0.08, "following": 0.05},
    "dear drafts": {"plain": 1.0, "rows": 1.0, "row": 0.02, "first": 0.5, "following": 0.4},
}


@pytest.mark.parametrize("chance", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("costs", COSTS)
def test_the_analytic_optimum(costs, chance):
    """With one chance for all tokens the best policy is a fixed length, which can be computed."""
    world = World(**COSTS[costs], chances=[chance])
    rates = [world.rate_of(length) for length in range(9)]
    best = max(range(9), key=rates.__getitem__)
    world.run(300, 8)  # learns
    _, done = world.run(600, 8)
    lengths = [drafted for _, drafted in done]
    usual = max(set(lengths), key=lengths.count)
    assert rates[usual] > 0.97 * rates[best], (usual, best, rates)
    mean_rate = sum(rates[length] for length in lengths) / len(lengths)
    assert mean_rate > 0.96 * rates[best]
    if best == 0:  # never slower than plain by more than the probes cost
        assert mean_rate > 0.98
    elif rates[best] > 1.15 * rates[0]:  # no near-tie with plain steps
        assert lengths.count(0) < 0.1 * len(lengths)


def test_long_texts_have_costs_of_their_own():
    """Short and long prompts in turn, where drafts pay in both and a long text's plain step costs four short ones."""
    world = World(**COSTS["cheap rows"], chances=[0.7])
    world.long_factor = 4
    for call in range(12):
        world.length = 3000 if call % 2 else 50
        _, done = world.run(30, 4)
        if call > 3:
            assert sum(drafted == 0 for _, drafted in done) <= 2, (call, done)
    assert world.pair.at(3000) is world.pair.at(2048) is not world.pair.at(50)
    assert world.pair.at(1023) is world.pair.at(50) is not world.pair.at(1024)


def test_a_text_grows_past_a_length():
    """A round's seconds belong to where it began, and from the limit on all is measured anew."""
    world = World(**COSTS["cheap rows"], chances=[0.7])
    world.length, world.grows, world.long_factor = 990, True, 4
    world.run(40, 4)
    for at, factor in ((1023, 1), (1024, 4)):
        costs = world.pair.at(at)
        assert costs.scheduled == controller_osprey.SCHEDULE_ROUNDS
        seconds = [one for width, recent in costs.samples.items() if isinstance(width, int) for one in recent]
        assert len(seconds) > 6 and factor * 0.98 < min(seconds) and max(seconds) < factor * 1.1


def test_confidences_are_used_and_corrected():
    """Half the tokens are sure and half hopeless: stopping behind a hopeless one beats every fixed length."""
    for confidence in (None, lambda chance: 0.95 if chance > 0.5 else 0.75):  # also from a drafter that boasts
        world = World(**COSTS["dear drafts"] | {"first": 0.25, "following": 0.25}, chances=[0.95, 0.05])
        world.confidence = confidence or world.confidence
        world.run(400, 6)
        rate, _ = world.run(4000, 6)
        mean = world.rate_of
        assert rate > 1.02 * max(mean(length) for length in range(7))


@pytest.mark.parametrize("row", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("copy_chance", [0.0, 0.3])
def test_a_hopeless_drafter_costs_what_trials_may(row, copy_chance):
    """However dear a verification is: the schedule, what trials may lose, a few hopeful ones more, and 1 %."""
    world = World(plain=1.0, rows=1.0, row=row, first=0.3, following=0.2, chances=[0.01, 0.05])
    for tokens in (100, 1000):
        start, emitted = world.now, 0
        while emitted < tokens:
            before = world.now
            rate, _ = world.run(20, 4, copies=4, copy_chance=copy_chance)
            emitted += rate * (world.now - before)
        dearest = 0.3 + 3 * 0.2 + world.verification(5) - 1.0
        schedule = 2 * dearest + 2 * (0.3 + world.verification(2) - 1.0)
        assert world.now - start <= emitted * 1.025 + schedule + 3 * dearest + controller_osprey.EXPLORE_STEPS


def test_copies_are_found_to_pay_beside_good_drafts():
    """Copies that are nearly always right beat drafts that already pay: both are known from few trials."""
    world = World(plain=1.0, rows=1.13, row=0.07, first=0.08, following=0.06, chances=[0.8])
    world.run(60, 3)
    _, done = world.run(200, 3, copies=6, copy_chance=0.97)
    offered = done[100::2]  # every other round has a copy
    assert sum(copied > 0 for copied, _ in offered) > 0.9 * len(offered)
    assert sum(drafted == 3 for _, drafted in done[101::2]) > 0.9 * len(offered)


@pytest.mark.parametrize(("chance", "copies_pay"), [(0.9, True), (0.02, False)])
def test_copies_are_used_where_they_pay(chance, copies_pay):
    world = World(**COSTS["cheap rows"] | {"rows": 1.0}, chances=[0.5])
    world.run(100, 5)
    _, done = world.run(400, 5, copies=6, copy_chance=chance)
    share = sum(copied > 0 for copied, _ in done[50:]) / len(done[50:])
    assert share > 0.45 if copies_pay else share < 0.1
    assert not copies_pay or max(copied for copied, _ in done) == 6


@pytest.mark.parametrize("chance", [0.7, 0.9, 0.97])
@pytest.mark.parametrize("costs", COSTS)
def test_the_analytic_optimum_of_copies(costs, chance):
    """In a text that runs in circles one copy follows the other: of all lengths the one that is best for ever."""
    world = World(**COSTS[costs], chances=[0.01])

    def rate_of(length):
        return sum(chance**i for i in range(length + 1)) / world.verification(length + 1)

    best = max(rate_of(length) for length in range(65))
    _, done = world.run(600, 3, copies=64, copy_chance=chance, copies_every=1)
    assert sum(rate_of(copied) for copied, _ in done[100:]) > 0.95 * best * 500


@pytest.mark.parametrize("chance", [0.02, 0.8])
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("cold", [[1], [2, 3, 4, 5], ["first", "next"], ["first", "next", *range(1, 66)]])
def test_what_is_slow_at_first_misleads_for_a_while_only(cold, costs, chance):
    """Caches fill and memory is mapped: the first of a kind takes three times as long as all others."""
    shares = []
    for seed in range(5):  # one may begin with bad luck
        world = World(**COSTS[costs], chances=[chance], cold=cold, seed=seed)
        world.run(200, 4)
        _, done = world.run(200, 4)
        rates = [world.rate_of(length) for length in range(5)]
        shares.append(sum(rates[drafted] for _, drafted in done) / (max(rates) * len(done)))
    assert sum(shares) > 0.95 * len(shares), shares


def test_plain_steps_that_have_become_cheap_are_found():
    """Drafts give 1.5 times the plain steps that were measured first, half of what plain steps give from then on."""
    world = World(plain=3.0, rows=3.0, row=0.1, first=0.1, following=0.1, chances=[0.75])
    _, done = world.run(200, 2)
    assert sum(drafted > 0 for _, drafted in done[100:]) > 90
    world.plain = 0.75
    _, done = world.run(1200, 2)
    assert sum(drafted > 0 for _, drafted in done[800:]) < 100


def test_it_comes_back_when_drafting_pays_again():
    world = World(**COSTS["cheap rows"], chances=[0.01])
    world.run(300, 5)
    _, done = world.run(100, 5)
    assert sum(drafted == 0 for _, drafted in done) > 85 and any(drafted > 0 for _, drafted in done)
    world.chances = [0.9]
    _, done = world.run(600, 5)
    assert sum(drafted > 2 for _, drafted in done[300:]) > 280


def test_the_same_costs_give_the_same_choices():
    runs = [World(**COSTS["dear rows"], chances=[0.2, 0.8], seed=4).run(300, 6) for _ in range(2)]
    assert runs[0] == runs[1]


def adaptive(drafter, longest=5):
    drafter.generation_config.adaptive_draft_length = True
    drafter.generation_config.num_assistant_tokens = longest
    return drafter


@pytest.fixture
def ticking(monkeypatch):
    """A clock that a test drives: each look at it is a millisecond, or what the test sets."""
    ticks = itertools.count()
    monkeypatch.setattr(AdaptiveDraftLength.__init__, "__defaults__", (lambda: next(ticks) * 1e-3,))


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("lookup", [0, 4])
def test_the_text_stays(family, lookup, ticking, monkeypatch):
    target = tiny_target(family)
    drafter = adaptive(tiny_drafter(target))
    drafter.generation_config.lookup_num_tokens, drafter.generation_config.lookup_ngram_size = lookup, 1
    lengths, judged = set(), 0
    for seed, rate in enumerate((0.0, 0.5, 0.95, 0.95, 0.95)):
        prompt = tiny_prompt(9, seed)
        kwargs = {"max_new_tokens": 44 + seed, "do_sample": False}  # ends at different places of a round
        plain = target.generate(prompt, **kwargs)
        with monkeypatch.context() as patch, record_acceptance() as calls:
            oracle(patch, plain, rate)
            assert_same_text(target, plain, target.generate(prompt, assistant_model=drafter, **kwargs))
        assert 1 + sum(right + 1 for _, right in calls[0].rounds) == 44 + seed
        lengths |= {drafted for drafted, _ in calls[0].rounds}
        judged += sum(min(drafted, right + 1) for drafted, right in calls[0].rounds)  # up to the first rejected one
    assert {0, 1, 5} <= lengths
    pair = statistics_of(target, drafter)
    costs = pair.at(0)
    assert costs.scheduled == controller_osprey.SCHEDULE_ROUNDS and {"first", "next", 1, 2, 6} <= costs.samples.keys()
    assert lookup or pair.drafted.counts["any"][1] == judged


def test_a_round_without_room_says_nothing(ticking, monkeypatch):
    target = tiny_target()
    drafter = adaptive(tiny_drafter(target))
    plain = target.generate(tiny_prompt(), max_new_tokens=11, do_sample=False)
    oracle(monkeypatch, plain, 1.0)
    with record_acceptance() as calls:
        target.generate(tiny_prompt(), max_new_tokens=11, do_sample=False, assistant_model=drafter)
    assert calls[0].rounds == [(5, 5), (0, 0), (1, 1), (0, 0)]  # the schedule's first three, and one token left
    assert statistics_of(target, drafter).drafted.counts["any"] == (6, 6)


def test_sampling_is_lossless(ticking):
    target = chain_target()
    drafter = adaptive(small_drafter(target), 3)
    drafter.generation_config.lookup_num_tokens, drafter.generation_config.lookup_ngram_size = 2, 1
    counts, rounds = draw_transitions(target, drafter, {})
    assert transitions_p_value(target, counts, {}) > SIGNIFICANCE
    assert len({drafted for drafted, _ in rounds}) > 2


@pytest.mark.parametrize(
    ("flag", "do_sample", "measures"),
    [(False, False, False), (None, False, True), (None, True, False), (True, True, True), (True, False, True)],
)
def test_off_is_off(flag, do_sample, measures):
    """Where it is off nothing is measured; left to itself it is off for sampled text, which a seed then repeats."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.adaptive_draft_length = flag
    target.generate(tiny_prompt(), max_new_tokens=24, assistant_model=drafter, do_sample=do_sample)
    assert (statistics_of(target, drafter).costs != {}) == measures


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_drafter_that_never_drafts_leaves_plain_decoding(do_sample, monkeypatch):
    """Every round a verification of one row: the same text, also from the same seed."""
    monkeypatch.setattr(AdaptiveDraftLength, "plan", lambda *args: (0, 0))
    target = tiny_target()
    texts = []
    for assistant in (None, adaptive(tiny_drafter(target))):
        torch.manual_seed(3)
        with record_acceptance() as calls:
            texts.append(
                target.generate(tiny_prompt(), max_new_tokens=24, do_sample=do_sample, assistant_model=assistant)
            )
    assert torch.equal(*texts) and calls[0].rounds == [(0, 0)] * 23


def test_statistics_belong_to_a_pair_and_die_with_it():
    target, other = tiny_target(), tiny_target()
    drafter = tiny_drafter(target)
    pair = statistics_of(target, drafter)
    assert statistics_of(target, drafter) is pair
    assert statistics_of(other, drafter) is not pair and statistics_of(target, tiny_drafter(target)) is not pair
    before = len(controller_osprey._pairs)
    del target, other
    gc.collect()
    assert len(controller_osprey._pairs) == before - 2


def test_threads_share_a_pair(monkeypatch):
    target = tiny_target()
    drafter = adaptive(tiny_drafter(target))
    plain = target.generate(tiny_prompt(), max_new_tokens=40, do_sample=False)
    texts = []

    def work():
        for _ in range(3):
            texts.append(target.generate(tiny_prompt(), max_new_tokens=40, do_sample=False, assistant_model=drafter))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 9
    for text in texts:
        assert_same_text(target, plain, text)
    samples = statistics_of(target, drafter).at(0).samples.values()
    assert samples and all(math.isfinite(seconds) and seconds > 0 for recent in samples for seconds in recent)


def test_without_measurements_copies_stay_short():
    policy = FixedDraftLength(longest=3, threshold=0.0)
    assert policy.plan(match_size=5, copied=32) == (10, 3)
    assert policy.plan(match_size=5, copied=4) == (4, 3)
