"""Copies of what followed the last tokens before: found by definition, lossless, and continued by the drafter."""

import pytest
import torch
from distributions import SETTINGS, SIGNIFICANCE, chain_target, draw_transitions, small_drafter, transitions_p_value
from tiny import DraftLog, assert_same_text, oracle, tiny_drafter, tiny_prompt, tiny_target

from osprey.modeling import OspreyCandidateGenerator, record_acceptance
from osprey.modeling.lookup_osprey import NgramIndex


def looking_up(target, copied=6, ngram_size=2, drafted=5, **changes):
    drafter = tiny_drafter(target, **changes)
    drafter.generation_config.lookup_num_tokens = copied
    drafter.generation_config.lookup_ngram_size = ngram_size
    drafter.generation_config.num_assistant_tokens = drafted
    return drafter


def circling_target(family="llama", **changes):
    """A target whose next token hangs on the last one, and only a little on the others: its text soon recurs."""
    target = tiny_target(family, **changes)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight *= 0.002
    return target


class CopyLog(list):
    """Number of tokens copied in each round of the `generate` calls that follow."""

    def __init__(self, monkeypatch):
        plan = OspreyCandidateGenerator.plan

        def noting(generator, *args):
            copied = plan(generator, *args)
            self.append(copied[0].shape[1])
            return copied

        monkeypatch.setattr(OspreyCandidateGenerator, "plan", noting)


def followers(text: list[int], shortest: int, longest: int) -> tuple[int, int]:
    """By definition: the position behind the latest earlier occurrence of the longest known ending, and its size."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                return end, size
    return 0, 0


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3), (3, 5)])
def test_the_index_finds_what_a_search_finds(shortest, longest):
    text = torch.randint(0, 3, (300,), generator=torch.Generator().manual_seed(longest)).tolist()
    index, found = NgramIndex(shortest, longest), 0
    for start in range(0, len(text), 3):  # as rounds add tokens, several at a time
        index.extend(text[start : start + 3])
        known = text[: start + 3]
        assert index.find() == followers(known, shortest, longest)
        found += index.find()[1] > 0
    assert found > 20


def test_a_copy_past_the_end_goes_round():
    index = NgramIndex(2, 4)
    index.extend([7, 1, 2, 3, 1, 2])
    assert index.copy(index.find()[0], 7) == [3, 1, 2, 3, 1, 2, 3]
    index.extend([9])
    assert index.find() == (0, 0)


@pytest.mark.parametrize("drafted", [1, 4, 9])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "mixtral"])
def test_greedy_text_and_drafts(family, drafted, monkeypatch):
    """Copies alone, copies that the drafter continues, and drafts where nothing recurs."""
    target = circling_target(family)
    drafter = looking_up(target, copied=3, drafted=drafted)
    prompt = tiny_prompt(6).repeat(1, 2)
    plain = target.generate(prompt, max_new_tokens=72, do_sample=False)
    oracle(monkeypatch, plain, 0.4)
    copies, log = CopyLog(monkeypatch), DraftLog().start(monkeypatch)
    with record_acceptance() as calls:
        assisted = target.generate(prompt, max_new_tokens=72, do_sample=False, assistant_model=drafter)
    assert_same_text(target, plain, assisted)
    assert 0 in copies and 3 in copies
    rounds = calls[0].rounds[: len(copies)]
    assert any(copied == 3 and accepted > 0 for copied, (_, accepted) in zip(copies, rounds, strict=True))
    room = 71  # beside the prefill's token
    for copied, (length, accepted) in zip(copies, rounds, strict=True):
        assert length == max(copied, min(drafted, room - 1))
        room -= accepted + 1
    # The drafter saw true states for all that was verified, also in rounds that only copied, and ran over copies.
    log.assert_follows_definition(target, drafter)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3},
        {"bad_words_ids": [[i] for i in range(10)]},
        {"eos_token_id": list(range(0, 48, 9)), "pad_token_id": 0},
    ],
)
def test_options(options, static, monkeypatch):
    target = tiny_target()
    kwargs = {"max_new_tokens": 24, "do_sample": False, **options}
    if static:
        kwargs["cache_implementation"] = "static"
    copies = CopyLog(monkeypatch)
    for seed in range(4):
        prompt = tiny_prompt(7, seed).repeat(1, 2)
        plain = target.generate(prompt, **kwargs)
        for copied in (2, 8):
            drafter = looking_up(target, copied, ngram_size=1, shortlist=list(range(1, 48, 2)))
            assert torch.equal(plain, target.generate(prompt, assistant_model=drafter, **kwargs))
    assert max(copies) == 8


def test_a_copy_ends_with_an_end_token(monkeypatch):
    target = circling_target()
    first = target.generate(tiny_prompt(), max_new_tokens=1, do_sample=False)[0, -1].item()
    # When the first token comes again, the index copies what follows it here, up to the end token.
    prompt = torch.tensor([[first, 40, 41, 42, 43, *tiny_prompt()[0].tolist()]])
    copies, log = CopyLog(monkeypatch), DraftLog().start(monkeypatch)
    with record_acceptance() as calls:
        target.generate(
            prompt,
            max_new_tokens=12,
            do_sample=False,
            assistant_model=looking_up(target, copied=8, ngram_size=1),
            eos_token_id=42,
            pad_token_id=0,
        )
    assert copies[0] == 3 and calls[0].rounds[0][0] == 3
    assert all(verified > prompt.shape[1] + 1 for verified, _, _ in log.steps)  # nothing was drafted behind it


@pytest.mark.parametrize("name", ["temperature 1", "temperature 0.5", "top-k, top-p, temperature"])
def test_sampling_is_lossless(name, monkeypatch):
    target = chain_target()
    drafter = small_drafter(target)
    drafter.generation_config.lookup_num_tokens, drafter.generation_config.lookup_ngram_size = 2, 1
    copies = CopyLog(monkeypatch)
    counts, rounds = draw_transitions(target, drafter, SETTINGS[name])
    assert transitions_p_value(target, counts, SETTINGS[name]) > SIGNIFICANCE
    assert sum(copied > 0 for copied in copies) > 50
    assert any(accepted > copied > 0 for copied, (_, accepted) in zip(copies, rounds, strict=False))


def test_the_test_of_sampling_would_notice(monkeypatch):
    """Scores that claim a copied token was one of many possible: it is accepted too often."""

    def broken(generator, tokens):
        return torch.zeros(*tokens.shape, generator.drafter.config.vocab_size)

    monkeypatch.setattr(OspreyCandidateGenerator, "certain_scores", broken)
    target = chain_target()
    drafter = small_drafter(target)
    drafter.generation_config.lookup_num_tokens, drafter.generation_config.lookup_ngram_size = 2, 1
    counts, _ = draw_transitions(target, drafter, {})
    assert transitions_p_value(target, counts, {}) < SIGNIFICANCE


def test_ensemble_weight_takes_a_copy_as_certain():
    """With a weight near 0 the drafter's word is all that counts: every copied token is kept."""
    target = tiny_target()
    drafter = looking_up(target, copied=4, ngram_size=1, drafted=1)
    with record_acceptance() as calls:
        target.generate(
            tiny_prompt(4).repeat(1, 3),
            max_new_tokens=20,
            do_sample=False,
            assistant_model=drafter,
            assistant_ensemble_weight=1e-6,
        )
    assert all(drafted == accepted for drafted, accepted in calls[0].rounds)
    assert max(drafted for drafted, _ in calls[0].rounds) == 4


def test_nothing_grows_or_drifts_over_2000_tokens(monkeypatch):
    target = tiny_target(max_position_embeddings=4096, sliding_window=None)
    drafter = looking_up(target, copied=3, drafted=4, max_position_embeddings=4096)
    made = []
    update = OspreyCandidateGenerator.update_candidate_strategy
    monkeypatch.setattr(
        OspreyCandidateGenerator,
        "update_candidate_strategy",
        lambda self, *args: (made.append((self, self.runner)), update(self, *args))[1],
    )
    text = target.generate(
        tiny_prompt(), max_new_tokens=2000, do_sample=True, top_k=0, assistant_model=drafter, temperature=3.0
    )
    generator, runner = made[-1]
    assert text.shape[1] == 2011
    assert runner.num_cached + sum(tokens.shape[1] for tokens, _ in generator.unread) >= 2000
    assert len(generator.unread) < 50 and generator.ngrams.tokens == text[0, : len(generator.ngrams.tokens)].tolist()
    assert runner.cache.get_seq_length() <= 2011 + 5
    assert runner.cache.layers[0].buffers[0].shape[2] <= 2 * 2016
    known = runner.num_cached
    states = target(text[:, :known], output_hidden_states=True).hidden_states
    with torch.no_grad():
        context = drafter.project_taps(torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1))
        output = drafter(text[:, 1 : known + 1], context, use_cache=True)
    for ours, theirs in zip(runner.cache.layers, output.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :known], theirs.keys, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.values[:, :, :known], theirs.values, rtol=1e-3, atol=1e-3)
