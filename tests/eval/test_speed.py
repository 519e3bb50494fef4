"""Ratios and shares by hand from made-up times, and a clock that sees what a made-up machine does."""

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_drafter, tiny_target

from osprey.eval.peers import PLAIN, Peer, drafter_peer
from osprey.eval.prompts import Prompt
from osprey.eval.rounds import HEAD, LAYERS, TAPS, TARGET, Pass, rounds_of, summarize_parts, watch_passes
from osprey.eval.speed import Contestant, Trial, by_group, make_clock, race, ratios, time_generate
from osprey.eval.suites import Item


def trial(contestant, prompt, seconds, first_token=1.0, tokens=10, group="chat", rounds=()):
    return Trial(contestant, prompt, group, list(range(tokens)), seconds, first_token, list(rounds))


def test_ratios_by_hand():
    trials = [
        *(trial("plain", "a", seconds) for seconds in (9.0, 10.0, 30.0)),  # the median is 10
        trial("plain", "b", 20.0, 2.0, tokens=20),
        *(trial("osprey", "a", seconds, 1.5, rounds=[(3, 2), (3, 0)]) for seconds in (1.0, 5.0, 5.0)),
        trial("osprey", "b", 5.0, 3.0, tokens=30, rounds=[(1, 1)]),
        trial("lookup", "a", 10.0, 0.5),
        trial("lookup", "b", 10.0, 1.0, tokens=20),
    ]
    plain, osprey, lookup = ratios(trials, "plain", "lookup")
    assert (plain.tokens_per_second, plain.speedup, plain.first_token, plain.mal) == (1.0, 1.0, 1.0, None)
    assert (osprey.tokens_per_second, osprey.speedup, osprey.prompts, osprey.tokens) == (4.0, 4.0, 2, 40)
    assert lookup.speedup == 1.5 and osprey.over_lookup == pytest.approx(4.0 / 1.5)
    assert osprey.first_token == 1.5 and lookup.first_token == 0.5
    assert osprey.mal == pytest.approx((3 + 1 + 2) / 3)
    assert (osprey.different, lookup.different) == (1, 0)
    assert ratios(trials[:8], "plain", "lookup")[1].over_lookup is None


def test_groups_keep_their_trials():
    trials = [trial("plain", "a", 1.0), trial("plain", "b", 1.0, group="code"), trial("plain", "c", 1.0)]
    assert {name: [one.prompt for one in some] for name, some in by_group(trials).items()} == {
        "chat": ["a", "c"],
        "code": ["b"],
    }


def passes_of(*steps, start=0.0):
    """Passes from (part, positions, seconds, seconds of nothing before it)."""
    passes, now = [], start
    for part, positions, seconds, idle in steps:
        passes.append(Pass(part, positions, now + idle, now + idle + seconds))
        now += idle + seconds
    return passes


PLAIN_PASSES = passes_of(
    (TARGET, 20, 7.0, 0.0), (TARGET, 1, 10.0, 0.5), (TARGET, 1, 12.0, 0.5), (TARGET, 1, 11.0, 0.5)
)
ASSISTED_PASSES = passes_of(
    (TARGET, 20, 8.0, 0.0),
    (TAPS, 20, 0.5, 1.0),  # the first round: a prefill of 1.5, and a second step
    (LAYERS, 20, 1.0, 0.0),
    (HEAD, 1, 0.25, 0.0),
    (LAYERS, 1, 0.75, 0.0),
    (HEAD, 1, 0.25, 0.0),
    (TARGET, 3, 14.0, 0.0),
    (TAPS, 2, 0.5, 1.0),  # drafts two
    (LAYERS, 2, 1.5, 0.0),
    (HEAD, 1, 0.5, 0.0),
    (LAYERS, 1, 1.0, 0.0),
    (HEAD, 1, 0.5, 0.0),
    (TARGET, 3, 15.0, 1.0),
    (TARGET, 5, 20.0, 2.0),  # copies four
)


def test_rounds_by_hand():
    prefill, rounds = rounds_of(ASSISTED_PASSES)
    assert prefill.seconds == 8.0
    assert [(one.width, one.steps, one.drafting, one.verifying, one.outside) for one in rounds] == [
        (3, 2, 2.75, 14.0, 1.0),
        (3, 2, 4.0, 15.0, 2.0),
        (5, 0, 0.0, 20.0, 2.0),
    ]
    assert [one.seconds for one in rounds_of(PLAIN_PASSES)[1]] == [10.5, 12.5, 11.5]


def test_parts_by_hand():
    parts = summarize_parts([PLAIN_PASSES], [ASSISTED_PASSES])
    assert (parts.plain_step, parts.plain_outside, parts.rounds) == (11.0, 0.5, 2)
    assert parts.verification == {3: 15.0, 5: 20.0}
    assert parts.draft_step == 1.0 + 0.5 and parts.first_step == 0.5 + 1.5 + 0.5
    assert (parts.target_prefill, parts.drafter_prefill) == (8.0, 1.5)
    total = 21.0 + 22.0
    assert parts.drafting_share == pytest.approx(4.0 / total)
    assert parts.outside_share == pytest.approx(4.0 / total)
    assert parts.verifying_share == pytest.approx(35.0 / total)
    # The bound of the first is 15 + 2 * 1.5 of 21 seconds, that of the second 20 of 22.
    assert parts.of_bound == pytest.approx((18 / 21 + 20 / 22) / 2)


def test_answers_too_short_to_show_parts():
    with pytest.raises(ValueError, match="more new tokens"):
        summarize_parts([PLAIN_PASSES], [ASSISTED_PASSES[:7]])


@pytest.fixture
def pair():
    target = tiny_target(vocab_size=VOCABULARY)
    return target, tiny_drafter(target)


def items(count):
    return [Item(Prompt(f"p{i}", "chat", "en", (f"Prompt {i}",)), "f") for i in range(count)]


class Machine:
    """A clock that only the forwards of a target move, by ten seconds and one more for each row."""

    def __init__(self, target):
        self.now = 0.0
        target.register_forward_hook(self.work, with_kwargs=True)

    def work(self, module, args, kwargs, output):
        self.now += 10 + kwargs["input_ids"].shape[1]

    def __call__(self):
        return self.now


def test_times_of_a_call(pair):
    target, _ = pair
    clock = Machine(target)
    one = time_generate(target, bytes_tokenizer(), Contestant(Peer(PLAIN, "plain")), items(1)[0], 5, clock)
    prompt = len("Prompt 0")
    assert one.first_token == 10 + prompt and one.seconds == 10 + prompt + 4 * 11
    assert len(one.token_ids) == 5 and one.rounds == []


def test_everybody_runs_everything_and_begins_in_turn(pair):
    target, drafter = pair
    contestants = [Contestant(Peer(PLAIN, "plain")), Contestant(drafter_peer("osprey", drafter), "2")]
    trials = list(race(target, bytes_tokenizer(), contestants, items(2), 6, 3, Machine(target)))
    names = [one.contestant for one in trials]
    assert names[:4] == ["plain", "osprey, 2", "osprey, 2", "plain"] and len(names) == 2 * 3 * 2
    assert {(one.prompt, one.contestant) for one in trials} == {(p, n) for p in ("p0", "p1") for n in set(names)}
    plain, osprey = ratios(trials, "plain", "lookup")
    assert osprey.different == 0 and osprey.mal >= 1
    assert all(drafted <= 2 for one in trials for drafted, _ in one.rounds)


def test_passes_of_real_calls(pair):
    target, drafter = pair
    drafter.generation_config.num_assistant_tokens = 3
    contestant = Contestant(drafter_peer("osprey", drafter))
    clock = make_clock("process", torch.device("cpu"))
    with watch_passes(target, drafter, clock) as passes:
        one = time_generate(target, bytes_tokenizer(), contestant, items(1)[0], 12, clock)
    prefill, rounds = rounds_of(passes)
    assert prefill.positions == len("Prompt 0") and len(rounds) == len(one.rounds)
    assert [cost.steps for cost in rounds] == [drafted for drafted, _ in one.rounds]
    assert all(cost.width == cost.steps + 1 and cost.outside > 0 for cost in rounds)
    before = len(passes)
    time_generate(target, bytes_tokenizer(), contestant, items(1)[0], 12, clock)  # nobody watches any more
    assert len(passes) == before and "run_layers" not in vars(drafter)


def test_refusals(pair):
    target, _ = pair
    with pytest.raises(ValueError, match="wall or process"):
        make_clock("sun", torch.device("cpu"))
    with pytest.raises(ValueError, match="use the wall clock"):
        make_clock("process", torch.device("cuda"))
    with pytest.raises(ValueError, match="'p0' has 8 tokens.* 256 positions"):
        time_generate(target, bytes_tokenizer(), Contestant(Peer(PLAIN, "plain")), items(1)[0], 249, lambda: 0.0)
