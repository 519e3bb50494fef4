"""Sampled text with a drafter has the target's own distribution: chi-square against exact enumeration."""

from collections import Counter
from itertools import product

import pytest
import torch
from distributions import (
    DRAWS,
    PROMPT,
    SETTINGS,
    SIGNIFICANCE,
    V,
    acceptance_rate,
    chain_target,
    draw_transitions,
    next_probabilities,
    p_value,
    sampling,
    small_drafter,
    small_target,
    transitions_p_value,
)

from osprey.modeling import OspreyCandidateGenerator, record_acceptance


def draw_sequences(target, drafter, options, draws, length, seed=0):
    """Counts of every continuation of `length` tokens over independent `generate` calls, `[V ** length]`."""
    torch.manual_seed(seed)
    counts = torch.zeros(V**length, dtype=torch.double)
    place = V ** torch.arange(length - 1, -1, -1)
    config = sampling(**options, max_new_tokens=length, pad_token_id=0)
    with record_acceptance() as calls:
        for _ in range(draws):
            ids = target.generate(PROMPT, generation_config=config, assistant_model=drafter)
            counts[(ids[0, PROMPT.shape[1] :] * place).sum()] += 1
    return counts, acceptance_rate([one for call in calls for one in call.rounds])


def sequence_probabilities(target, options, length):
    """Exact probability of every continuation of `length` tokens, `[V ** length]`, first token first."""
    texts, probabilities = [PROMPT], torch.ones(1, dtype=torch.double)
    for _ in range(length):
        following = torch.stack([next_probabilities(target, ids, options) for ids in texts])  # [texts, V]
        probabilities = (probabilities[:, None] * following).flatten()
        texts = [torch.cat([ids, torch.tensor([[token]])], dim=1) for ids in texts for token in range(V)]
    return probabilities


@pytest.mark.parametrize(
    ("name", "shortlist"),
    [("temperature 1", None), ("repetition penalty", [0, 2, 3, 5])],
)
def test_whole_sequences(name, shortlist):
    """Four tokens: the prefill's, then rounds of drafts in which every number of accepted tokens occurs."""
    target = small_target()
    expected = sequence_probabilities(target, SETTINGS[name], 4)
    assert abs(expected.sum().item() - 1) < 1e-6
    counts, rate = draw_sequences(target, small_drafter(target, shortlist), SETTINGS[name], DRAWS, 4)
    assert 0.02 < rate < 0.95  # both branches of speculative sampling are exercised
    assert p_value(counts, expected) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("name", "shortlist"),
    [(name, None) for name in SETTINGS if name != "repetition penalty"]
    + [(name, [0, 2, 3, 5]) for name in ("temperature 0.5", "top-k", "top-p")],
)
def test_transitions(name, shortlist):
    target = chain_target()
    counts, rounds = draw_transitions(target, small_drafter(target, shortlist), SETTINGS[name])
    assert 0.02 < acceptance_rate(rounds) < 0.95
    assert transitions_p_value(target, counts, SETTINGS[name]) > SIGNIFICANCE


def test_adaptive_draft_length_stays_lossless():
    target = chain_target()
    drafter = small_drafter(target)
    drafter.generation_config.assistant_confidence_threshold = 0.2
    counts, rounds = draw_transitions(target, drafter, {})
    assert transitions_p_value(target, counts, {}) > SIGNIFICANCE
    # Drafts of every length, so that what is lossless is the adaptive length and not one that happens to be fixed.
    lengths = Counter(drafted for drafted, _ in rounds)
    assert all(lengths[length] > 20 for length in (1, 2, 3)), lengths


def test_the_first_token_after_a_sampled_end():
    """An end token ends the text, and only as often as the target samples it."""
    target = small_target()
    drafter = small_drafter(target)
    config = sampling(max_new_tokens=4, pad_token_id=0, eos_token_id=3)
    torch.manual_seed(0)
    counts, draws = torch.zeros(5, dtype=torch.double), 200
    for _ in range(draws):
        text = target.generate(PROMPT, generation_config=config, assistant_model=drafter)[0, 3:].tolist()
        counts[text.index(3) if 3 in text else 4] += 1
        assert 3 not in text[:-1]
    expected = torch.zeros(5, dtype=torch.double)
    for tail, probability in zip(
        product(range(V), repeat=4), sequence_probabilities(target, {}, 4).tolist(), strict=True
    ):
        expected[tail.index(3) if 3 in tail else 4] += probability
    assert p_value(counts, expected) > SIGNIFICANCE


def broken_argmax(self, candidate_ids, draft_logits):
    """The best token, with scores that claim it was sampled."""
    scores = self.logits_processor(candidate_ids, self.drafter.widen_logits(draft_logits.float()))
    return scores.argmax(-1, keepdim=True), scores, 1.0


def broken_raw_scores(self, candidate_ids, draft_logits):
    """Sampled from the processed scores, but the unprocessed are returned."""
    raw = self.drafter.widen_logits(draft_logits.float())
    scores = self.logits_processor(candidate_ids, raw.clone())
    return torch.multinomial(scores.softmax(-1), 1), raw, 1.0


@pytest.mark.parametrize(
    ("broken", "name"), [(broken_argmax, "temperature 1"), (broken_raw_scores, "temperature 0.5")]
)
def test_the_test_of_transitions_would_notice(broken, name, monkeypatch):
    monkeypatch.setattr(OspreyCandidateGenerator, "choose", broken)
    target = chain_target()
    counts, _ = draw_transitions(target, small_drafter(target), SETTINGS[name])
    assert transitions_p_value(target, counts, SETTINGS[name]) < SIGNIFICANCE


def test_the_test_of_sequences_would_notice(monkeypatch):
    monkeypatch.setattr(OspreyCandidateGenerator, "choose", broken_argmax)
    target = small_target()
    counts, _ = draw_sequences(target, small_drafter(target), {}, DRAWS, 4)
    assert p_value(counts, sequence_probabilities(target, {}, 4)) < SIGNIFICANCE
