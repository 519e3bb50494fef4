"""Sampled text with a drafter has the target's own distribution: chi-square against exact enumeration."""

from collections import Counter
from itertools import product

import pytest
import torch
from scipy.stats import chi2
from tiny import tiny_drafter, tiny_target
from transformers.generation import GenerationConfig, LogitsProcessorList

from osprey.modeling import OspreyCandidateGenerator, record_acceptance

V = 6
PROMPT = torch.tensor([[1, 4, 2]])
DRAWS, TRANSITIONS = 400, 800  # enough for the deliberately broken samplers at the end to fail
SIGNIFICANCE = 1e-4  # seeds are fixed; this is the share of torch versions whose streams would fail by chance
SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "top-k, top-p, temperature": {"top_k": 4, "top_p": 0.9, "temperature": 1.5},
    "repetition penalty": {"repetition_penalty": 1.8},
    "min-p, typical": {"min_p": 0.1, "typical_p": 0.95},
}


def small_target(seed=0):
    shape = {
        "vocab_size": V,
        "hidden_size": 16,
        "head_dim": 4,
        "num_hidden_layers": 4,
        "max_position_embeddings": 1024,
    }
    target = tiny_target("untied", seed, **shape, initializer_range=0.6)
    with torch.no_grad():
        target.lm_head.weight *= 0.5  # no token certain, none impossible
    return target


def small_drafter(target, shortlist=None):
    drafter = tiny_drafter(target, 3, shortlist, num_hidden_layers=1, initializer_range=0.5)
    with torch.no_grad():
        drafter.lm_head.weight *= 0.4  # unsure, so that it proposes what the target may accept
    drafter.generation_config.num_assistant_tokens = 3
    return drafter


def sampling(**options) -> GenerationConfig:
    return GenerationConfig(do_sample=True, **{"top_k": 0, "top_p": 1.0, "temperature": 1.0} | options)


@torch.no_grad()
def next_probabilities(target, ids, options):
    """Exact distribution of the next token after `ids` (`[1, L]`), by transformers' own processors, `[V]`."""
    processors: LogitsProcessorList = target._get_logits_processor(sampling(**options), ids.shape[1])
    return processors(ids, target(ids).logits[:, -1].float()).softmax(-1)[0].double()


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square test of `counts` against exact probabilities; cells that expect under 5 are pooled."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "a sequence of probability zero was generated"
    order = expected.argsort()
    counts, expected = counts[order], expected[order]
    small = int((expected.cumsum(0) < 5).sum()) + 1  # pooled cells, smallest first, until they expect 5 together
    small = max(small, int((expected < 5).sum()))
    counts = torch.cat([counts[:small].sum()[None], counts[small:]])
    expected = torch.cat([expected[:small].sum()[None], expected[small:]])
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return float(chi2.sf(statistic, len(counts) - 1))


def acceptance_rate(rounds) -> float:
    return sum(right for _, right in rounds) / sum(drafted for drafted, _ in rounds)


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


# A target without attention is a Markov chain of order one, so the transitions of one long text are independent draws:
# thousands of them from few calls, with long drafts.
def chain_target():
    target = small_target()
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    with torch.no_grad():
        target.lm_head.weight *= 0.6  # top-p leaves several states reachable
    return target


def draw_transitions(target, drafter, options, tokens=TRANSITIONS // 2, calls=2, seed=0):
    torch.manual_seed(seed)
    counts = torch.zeros(V, V, dtype=torch.double)
    config = sampling(**options, max_new_tokens=tokens, pad_token_id=0)
    with record_acceptance() as recorded:
        for _ in range(calls):
            ids = target.generate(PROMPT, generation_config=config, assistant_model=drafter)[0, 2:]
            counts.index_put_((ids[:-1], ids[1:]), torch.ones((), dtype=torch.double), accumulate=True)
    return counts, [one for call in recorded for one in call.rounds]


def transitions_p_value(target, counts, options) -> float:
    """One test over all states: the sum of independent chi-square statistics, by their p-values (Fisher)."""
    values = []
    for state in range(V):
        exact = next_probabilities(target, torch.tensor([[state]]), options)
        if (exact * counts[state].sum() >= 5).sum() >= 2:
            values.append(max(p_value(counts[state], exact), 1e-300))
    assert len(values) >= 2  # the text goes through enough states to say something
    return float(chi2.sf(-2 * torch.tensor(values, dtype=torch.double).log().sum().item(), 2 * len(values)))


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
