"""The measuring core: arithmetic on hand-worked rounds, and real runs of tiny models."""

import pytest
import torch
from tiny import oracle, tiny_drafter, tiny_prompt, tiny_target

from osprey.eval.acceptance import (
    Difference,
    Measurement,
    Run,
    acceptance_by_position,
    explain_difference,
    greedy_or_sampled,
    mean_acceptance_length,
    measure,
    summarize,
)

# Four verifications of up to three drafted tokens; emitted: 4 + 1 + 2 + 2 = 9 tokens.
ROUNDS = [(3, 3), (3, 0), (3, 1), (1, 1)]


def inputs_of(prompt: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}


def test_mean_acceptance_length():
    assert mean_acceptance_length(ROUNDS) == 9 / 4
    assert mean_acceptance_length([]) is None


def test_acceptance_by_position_is_conditional():
    # Position 0: tried four times, accepted three. Position 1: of these three one drafted no second token, so tried
    # twice, accepted once. Position 2: tried once, accepted.
    assert acceptance_by_position(ROUNDS) == [3 / 4, 1 / 2, 1.0]
    assert acceptance_by_position([(2, 0)]) == [0.0, None]
    assert acceptance_by_position([(0, 0)]) == []


def test_summary_of_two_requests():
    first = Measurement("a", "en", Run([1] * 10, 2.0, ROUNDS), Run([1] * 10, 4.0), identical=True)
    second = Measurement("b", "en", Run([1] * 5, 1.0, [(2, 2)]), Run([1] * 5, 1.0), identical=True)
    summary = summarize([first, second])
    assert summary.requests == 2
    assert summary.tokens_per_second_plain == 15 / 5
    assert summary.tokens_per_second_assisted == 15 / 3
    assert summary.speedup == pytest.approx(5 / 3)  # total plain time / total assisted time
    assert summary.mal_mean == (9 / 4 + 3) / 2
    assert summary.mal_pooled == (9 + 3) / (4 + 1)
    assert summary.acceptance_by_position == [4 / 5, 2 / 3, 1.0]
    assert summary.identical is True and summary.near_ties == 0


def test_faster_plain_precision_scales_plain_only():
    measurement = Measurement("a", "en", Run([1] * 10, 2.0, ROUNDS), Run([1] * 10, 4.0), identical=True)
    summary = summarize([measurement], plain_scale=1.25)
    assert summary.tokens_per_second_plain == 2.5 * 1.25
    assert summary.tokens_per_second_assisted == 5.0
    assert summary.speedup == pytest.approx(2 / 1.25)


def test_one_differing_text_makes_all_not_identical():
    same = Measurement("a", "en", Run([1], 1.0), Run([1], 1.0), identical=True)
    tie = Measurement(
        "b", "en", Run([1], 1.0), Run([2], 1.0), identical=False, difference=Difference(0, 1e-6, near_tie=True)
    )
    summary = summarize([same, tie])
    assert summary.identical is False and summary.near_ties == 1


def test_nothing_compared():
    summary = summarize([Measurement("a", "en", Run([1, 2], 1.0))])
    assert summary.tokens_per_second_plain is summary.speedup is summary.identical is summary.mal_mean is None
    assert summary.tokens_per_second_assisted == 2.0


def test_negative_temperature():
    with pytest.raises(ValueError, match="temperature is -1"):
        greedy_or_sampled(-1)


@pytest.mark.parametrize("plain_first", [True, False])
def test_greedy_measurement(monkeypatch, plain_first):
    target = tiny_target()
    drafter, prompt = tiny_drafter(target), tiny_prompt()
    truth = target.generate(**inputs_of(prompt), max_new_tokens=20, do_sample=False)
    oracle(monkeypatch, truth, rate=1.0)
    measurement = measure(
        target, drafter, inputs_of(prompt), id="a", group="en", max_new_tokens=20, plain_first=plain_first
    )
    assert measurement.identical and measurement.difference is None
    assert measurement.plain.token_ids == measurement.assisted.token_ids == truth[0, prompt.shape[1] :].tolist()
    assert measurement.plain.seconds > 0 and measurement.assisted.seconds > 0
    assert measurement.plain.rounds == []
    # The prefill gives one token; three drafts of five, all accepted, give 18 more; the last token needs no draft.
    assert measurement.assisted.rounds == [(5, 5), (5, 5), (5, 5), (0, 0)]
    assert mean_acceptance_length(measurement.assisted.rounds) == 19 / 4


def test_sampled_texts_are_not_compared():
    target = tiny_target()
    measurement = measure(
        target, tiny_drafter(target), inputs_of(tiny_prompt()), id="a", group="en", max_new_tokens=6, temperature=1.0
    )
    assert measurement.plain is not None and measurement.identical is None


def test_without_comparison_plain_is_not_run():
    target = tiny_target()
    measurement = measure(
        target, tiny_drafter(target), inputs_of(tiny_prompt()), id="a", group="en", max_new_tokens=6, compare=False
    )
    assert measurement.plain is None and measurement.identical is None
    assert len(measurement.assisted.token_ids) == 6


@pytest.fixture
def scripted(monkeypatch):
    """A tiny target whose last logits are given by the test."""
    target = tiny_target()

    def script(logits: list[float]):
        def forward(input_ids, logits_to_keep):
            script.seen = input_ids.tolist()
            return type("Output", (), {"logits": torch.tensor([[logits]])})

        monkeypatch.setattr(target, "forward", forward)
        return target

    return script


def test_near_tie_is_proved_after_the_common_prefix(scripted):
    target = scripted([0.0, 5.0, 5.0005, 1.0])
    difference = explain_difference(target, inputs_of(torch.tensor([[9, 8]])), plain=[3, 1, 0], assisted=[3, 2, 0])
    assert scripted.seen == [[9, 8, 3]]
    assert difference.position == 1
    assert difference.logit_gap == pytest.approx(0.0005, abs=1e-6)
    assert difference.near_tie


@pytest.mark.parametrize(
    ("logits", "why"), [([0.0, 5.0, 5.1], "a clear gap"), ([5.0, 5.0, 1.0], "a tie between other tokens")]
)
def test_other_differences_are_no_near_ties(scripted, logits, why):
    difference = explain_difference(scripted(logits), inputs_of(torch.tensor([[9]])), plain=[1], assisted=[2])
    assert not difference.near_tie, why


def test_a_shorter_text_is_no_near_tie():
    target = tiny_target()
    difference = explain_difference(target, inputs_of(tiny_prompt()), plain=[1, 2, 3], assisted=[1, 2])
    assert difference == Difference(2, None, False)
