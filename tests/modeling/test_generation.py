"""Assisted generation gives the target's own text, and drafts are what the definition says."""

import pytest
import torch
from tiny import (
    TARGET_CONFIGS,
    VOCABULARY,
    DraftLog,
    assert_same_text,
    oracle,
    tiny_drafter,
    tiny_prompt,
    tiny_target,
)
from torch.nn import functional as F
from transformers import CLIPVisionConfig, DynamicCache, LlavaConfig, LlavaForConditionalGeneration
from transformers.generation import GenerationMixin

from osprey.modeling import OspreyCandidateGenerator, record_acceptance
from osprey.modeling.decoding_osprey import install

SHORTLIST = list(range(1, VOCABULARY, 2))


def both(target, drafter, prompt, monkeypatch=None, rate=0.8, seed=0, log=None, **kwargs):
    """Greedy ids of plain and of assisted generation; with `monkeypatch` the drafter is right at `rate`."""
    kwargs = {"max_new_tokens": 24, "do_sample": False} | kwargs
    plain = target.generate(prompt, **kwargs)
    if monkeypatch is not None:
        oracle(monkeypatch, plain if isinstance(plain, torch.Tensor) else plain.sequences, rate, seed)
    if log is not None:
        log.start(monkeypatch)
    with record_acceptance() as calls:
        assisted = target.generate(prompt, assistant_model=drafter, **kwargs)
    return plain, assisted, calls[0].rounds


@pytest.mark.parametrize("shortlist", [None, SHORTLIST])
@pytest.mark.parametrize("family", TARGET_CONFIGS)
def test_greedy_text_is_the_target_s_own(family, shortlist, monkeypatch):
    accepted, rejected = 0, 0
    for seed in range(2):
        target = tiny_target(family, seed)
        drafter = tiny_drafter(target, seed, shortlist)
        for rate in (0.0, 0.6, 0.95):
            with monkeypatch.context() as patch:
                prompt = tiny_prompt(9 + seed, seed)
                plain, assisted, rounds = both(target, drafter, prompt, patch, rate, seed)
            assert_same_text(target, plain, assisted)
            accepted += sum(right for _, right in rounds)
            rejected += sum(drafted - right for drafted, right in rounds)
            # The prefill emits one token, each round what it accepted and the bonus token.
            assert 1 + sum(right + 1 for _, right in rounds) == plain.shape[1] - prompt.shape[1]
    assert accepted > 20 and rejected > 20


@pytest.mark.parametrize("rate", [0.0, 0.8])
@pytest.mark.parametrize(
    ("family", "shortlist"), [("llama", SHORTLIST)] + [(family, None) for family in TARGET_CONFIGS]
)
def test_drafts_follow_the_definition(family, rate, shortlist, monkeypatch):
    """Contexts, positions, keys and values after every mix of accepted and rejected drafts."""
    target = tiny_target(family)
    drafter = tiny_drafter(target, shortlist=shortlist)
    log = DraftLog()
    plain, assisted, _ = both(target, drafter, tiny_prompt(), monkeypatch, rate, log=log)
    assert_same_text(target, plain, assisted)
    log.assert_follows_definition(target, drafter)


@torch.no_grad()
def test_verified_positions_hold_the_keys_and_values_of_a_prefill(monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    made = []
    update = OspreyCandidateGenerator.update_candidate_strategy
    monkeypatch.setattr(
        OspreyCandidateGenerator,
        "update_candidate_strategy",
        lambda self, *args: (made.append(self.runner), update(self, *args))[1],
    )
    _, assisted, rounds = both(target, drafter, tiny_prompt(), monkeypatch, 0.7)
    assert any(drafted > right > 0 for drafted, right in rounds)
    runner = made[-1]
    known = runner.num_cached
    states = target(assisted[:, :known], output_hidden_states=True).hidden_states
    context = drafter.project_taps(torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1))
    expected = DynamicCache(config=drafter.config)
    drafter.run_layers(assisted[:, 1 : known + 1], context, cache=expected)
    assert known > 25
    for ours, theirs in zip(runner.cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys[:, :, :known], theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values[:, :, :known], theirs.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_assistant_tokens", range(1, 9))
def test_draft_length(num_assistant_tokens, monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.num_assistant_tokens = num_assistant_tokens
    plain, assisted, rounds = both(target, drafter, tiny_prompt(), monkeypatch, 0.9)
    assert_same_text(target, plain, assisted)
    assert max(drafted for drafted, _ in rounds) == num_assistant_tokens
    assert all(right <= drafted for drafted, right in rounds)
    room = plain.shape[1] - tiny_prompt().shape[1] - 1
    for drafted, right in rounds:  # never more than what is left, the target's own token apart
        assert drafted == min(num_assistant_tokens, room - 1)
        room -= right + 1


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.5, 1.1])
def test_confidence_threshold_ends_a_draft(threshold, monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.assistant_confidence_threshold = threshold
    log = DraftLog()
    plain, assisted, rounds = both(target, drafter, tiny_prompt(), monkeypatch, 0.0, log=log)
    assert_same_text(target, plain, assisted)
    # The drafter's own probability of a draft, by hand from the logged logits: a draft ends once it is below.
    expected, room, at = [], 23, 0
    for _, right in rounds:
        length, confidence = 0, 1.0
        while length < min(5, room - 1):
            confidence *= log.steps[at][2].softmax(-1).max().item()
            length, at = length + 1, at + 1
            if confidence < threshold:
                break
        expected.append(length)
        room -= right + 1
    assert [drafted for drafted, _ in rounds] == expected and at == len(log.steps)
    assert threshold < 1 or max(expected) == 1


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7])
def test_few_new_tokens(max_new_tokens, monkeypatch):
    target = tiny_target()
    plain, assisted, rounds = both(
        target, tiny_drafter(target), tiny_prompt(), monkeypatch, 1.0, max_new_tokens=max_new_tokens
    )
    assert torch.equal(plain, assisted) and assisted.shape[1] == 11 + max_new_tokens
    assert len(rounds) == {1: 0, 2: 1, 3: 1, 7: 1}[max_new_tokens]


@pytest.mark.parametrize("max_length", range(12, 19))
def test_max_length_inside_a_draft(max_length, monkeypatch):
    target = tiny_target()
    plain, assisted, _ = both(
        target, tiny_drafter(target), tiny_prompt(), monkeypatch, 1.0, max_length=max_length, max_new_tokens=None
    )
    assert torch.equal(plain, assisted) and assisted.shape[1] == max_length


@pytest.mark.parametrize("place", range(1, 8))
def test_eos_inside_a_draft(place, monkeypatch):
    """The text ends with the end token wherever in a draft it falls, also as one of several end tokens."""
    target = tiny_target()
    free = target.generate(tiny_prompt(), max_new_tokens=24, do_sample=False)
    eos = free[0, 11 + place].item()
    for ids in (eos, [eos, 0]):
        with monkeypatch.context() as patch:
            plain, assisted, _ = both(
                target, tiny_drafter(target), tiny_prompt(), patch, 1.0, eos_token_id=ids, pad_token_id=0
            )
        assert torch.equal(plain, assisted) and assisted[0, -1] == eos


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_prompts(length, monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    log = DraftLog()
    plain, assisted, _ = both(target, drafter, tiny_prompt(length), monkeypatch, log=log)
    assert_same_text(target, plain, assisted)
    log.assert_follows_definition(target, drafter)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_left_padded_prompt(family, monkeypatch):
    target = tiny_target(family)
    drafter = tiny_drafter(target)
    prompt = F.pad(tiny_prompt(), (4, 0))
    mask = (torch.arange(15) >= 4).long()[None]
    log = DraftLog()
    plain, assisted, _ = both(target, drafter, prompt, monkeypatch, attention_mask=mask, log=log)
    assert torch.equal(plain, assisted)
    log.steps = [(verified - 4, ids[:, 4:], logits) for verified, ids, logits in log.steps]
    log.assert_follows_definition(target, drafter)


def test_inputs_embeds(monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    embeds = target.get_input_embeddings()(tiny_prompt()).detach()
    kwargs = {"max_new_tokens": 20, "do_sample": False, "inputs_embeds": embeds}
    plain = target.generate(**kwargs)
    whole = torch.cat([tiny_prompt(), plain], dim=1)
    oracle(monkeypatch, plain, 0.8)
    log = DraftLog().start(monkeypatch)
    assert torch.equal(plain, target.generate(assistant_model=drafter, **kwargs))
    # Of the prompt only the last position has a successor whose id is known.
    log.steps = [(n + 11, torch.cat([whole[:, :11], ids], dim=1), logits) for n, ids, logits in log.steps]
    log.assert_follows_definition(target, drafter, start=10)
    # With the ids beside them the drafter reads the whole prompt.
    monkeypatch.undo()
    log = DraftLog().start(monkeypatch)
    assert torch.equal(whole, target.generate(tiny_prompt(), assistant_model=drafter, **kwargs))
    log.assert_follows_definition(target, drafter)


@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompt_continued_from_a_cache(family, only_new, monkeypatch):
    """A second turn on the cache of a first: the target reads only what is new, and the text is plain decoding's."""
    target = tiny_target(family)
    drafter = tiny_drafter(target)
    turn = tiny_prompt(5, seed=3)

    def two_turns(assistant=None):
        cache = DynamicCache(config=target.config)
        first = target.generate(
            tiny_prompt(), cache=cache, max_new_tokens=8, do_sample=False, assistant_model=assistant
        )
        past = cache.get_seq_length()
        assert past == first.shape[1] - 1
        second = torch.cat([first, turn], dim=1)
        seen.clear()
        log.steps.clear()
        given = second[:, past:] if only_new else second
        text = target.generate(
            given,
            attention_mask=torch.ones_like(second),
            cache=cache,
            max_new_tokens=16,
            do_sample=False,
            assistant_model=assistant,
        )
        assert seen[0] == second.shape[1] - past
        return second, past, torch.cat([second[:, :past], text], dim=1) if only_new else text, cache

    seen, log = [], DraftLog()
    target.get_input_embeddings().register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    _, past, plain, plain_cache = two_turns()
    oracle(monkeypatch, plain[:, past:] if only_new else plain, 0.8)
    second, past, assisted, cache = two_turns(drafter)
    assert_same_text(target, plain, assisted)
    assert_same_text(target, target.generate(second, max_new_tokens=16, do_sample=False), plain)
    assert cache.get_seq_length() == plain_cache.get_seq_length()
    monkeypatch.undo()
    log.start(monkeypatch)
    second, past, assisted, _ = two_turns(drafter)
    if only_new:  # the ids that the drafter saw are those of the second turn
        log.steps = [(n + past, torch.cat([second[:, :past], ids], dim=1), logits) for n, ids, logits in log.steps]
    assert log.steps[0][0] == second.shape[1] + 1
    log.assert_follows_definition(target, drafter, start=past)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_static_cache(family, monkeypatch):
    kwargs = {"cache_implementation": "static", "max_new_tokens": 20, "do_sample": False}
    target, prompt = tiny_target(family), tiny_prompt()
    drafter = tiny_drafter(target)
    if family == "gemma3":  # a static window cannot be rolled back: as for any assistant, transformers says so
        with pytest.raises(ValueError, match="cache that can be cropped"):
            target.generate(prompt, assistant_model=drafter, **kwargs)
        target = tiny_target(family, sliding_window=64)  # unless nothing leaves it
    log = DraftLog()
    plain, assisted, _ = both(target, drafter, prompt, monkeypatch, **kwargs, log=log)
    assert_same_text(target, plain, assisted)
    log.assert_follows_definition(target, drafter)


def test_static_cache_continued(monkeypatch):
    from transformers import StaticCache

    target = tiny_target()
    texts = []
    for assistant in (None, tiny_drafter(target)):
        cache = StaticCache(config=target.config, max_cache_len=64)
        ids = target.generate(tiny_prompt(), cache=cache, max_new_tokens=8, do_sample=False, assistant_model=assistant)
        ids = torch.cat([ids, tiny_prompt(5, seed=3)], dim=1)
        texts.append(target.generate(ids, cache=cache, max_new_tokens=16, do_sample=False, assistant_model=assistant))
    assert_same_text(target, *texts)


def llava(seed=0):
    torch.manual_seed(seed)
    text = tiny_target().config
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_id=VOCABULARY - 1, image_seq_length=4)
    return LlavaForConditionalGeneration(config).eval()


def test_text_model_inside_a_multimodal_target(monkeypatch):
    target = llava()
    drafter = tiny_drafter(target)
    assert drafter.config.vocab_size == VOCABULARY and drafter.config.target_num_hidden_layers == 5
    prompt = torch.cat([tiny_prompt(3), torch.full((1, 4), VOCABULARY - 1), tiny_prompt(4, seed=5)], dim=1)
    pixels = torch.randn(1, 3, 8, 8)
    log = DraftLog()
    plain, assisted, _ = both(target, drafter, prompt, monkeypatch, pixel_values=pixels, bad_words_ids=[[47]], log=log)
    assert torch.equal(plain, assisted)
    log.assert_follows_definition(target, drafter, pixel_values=pixels)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_dtype_mixes(dtypes, monkeypatch):
    target = tiny_target().to(getattr(torch, dtypes[0]))
    drafter = tiny_drafter(target).to(getattr(torch, dtypes[1]))
    plain, assisted, rounds = both(target, drafter, tiny_prompt(), monkeypatch)
    # bfloat16 has 8 bits: logits of up to 8 are 1/16 apart, and a forward of another width rounds otherwise.
    assert_same_text(target, plain, assisted, tolerance=0.15 if dtypes[0] == "bfloat16" else 1e-4)
    assert sum(right for _, right in rounds) > 0


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations(implementation, monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.set_attn_implementation(implementation)
    log = DraftLog()
    plain, assisted, _ = both(target, drafter, tiny_prompt(), monkeypatch, log=log)
    assert_same_text(target, plain, assisted)
    log.assert_follows_definition(target, drafter)


def test_inference_mode_and_training_mode(monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with torch.inference_mode():
        plain, assisted, _ = both(target, drafter, tiny_prompt(), monkeypatch)
    assert_same_text(target, plain, assisted)
    drafter.train()
    assert torch.equal(assisted, target.generate(tiny_prompt(), max_new_tokens=24, assistant_model=drafter))
    drafter(tiny_prompt()).logits.sum().backward()  # nothing from inference mode lingers


def test_many_calls_and_many_targets():
    one, other = tiny_target("llama", 0), tiny_target("qwen3", 1)
    drafters = [tiny_drafter(one), tiny_drafter(other)]
    for seed in range(4):
        for target, drafter in zip((one, other), drafters, strict=True):
            plain, assisted, _ = both(target, drafter, tiny_prompt(5 + seed, seed))
            assert_same_text(target, plain, assisted)
    assert all(not hasattr(drafter, "cache") for drafter in drafters)


def test_recording_acceptance():
    target = tiny_target()
    drafter = tiny_drafter(target)
    target.generate(tiny_prompt(), max_new_tokens=8, assistant_model=drafter)  # not inside: not recorded
    with record_acceptance() as calls:
        target.generate(tiny_prompt(), max_new_tokens=8, assistant_model=drafter)
        with record_acceptance() as inner:
            target.generate(tiny_prompt(), max_new_tokens=9, assistant_model=drafter)
        target.generate(tiny_prompt(), max_new_tokens=1, assistant_model=drafter)
        target.generate(tiny_prompt(), max_new_tokens=8)
    assert len(calls) == 2 and len(inner) == 1
    assert sum(right + 1 for _, right in calls[0].rounds) == 7
    assert calls[0].mean_acceptance_length == 7 / len(calls[0].rounds)
    assert calls[1].rounds == [] and calls[1].mean_acceptance_length != calls[1].mean_acceptance_length


def test_installing_again_changes_nothing():
    names = ("_get_candidate_generator", "_validate_generation_mode", "_assisted_decoding")
    before = [getattr(GenerationMixin, name) for name in names]
    install()
    assert [getattr(GenerationMixin, name) for name in names] == before
    assert all(function.__name__ == name for function, name in zip(before, names, strict=True))


def test_other_assistants_pass_through():
    target, small = tiny_target(), tiny_target("llama", 1, num_hidden_layers=2)
    plain = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False)
    with record_acceptance() as calls:
        for kwargs in ({"assistant_model": small}, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}):
            assert_same_text(
                target, plain, target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False, **kwargs)
            )
    assert calls == []
    other = tiny_target("llama", 2, vocab_size=VOCABULARY + 1)
    with pytest.raises(ValueError, match="different tokenizers"):  # transformers' own check, untouched
        target.generate(tiny_prompt(), assistant_model=other)


def test_batches_are_refused_as_for_every_assistant():
    target = tiny_target()
    with pytest.raises(ValueError, match="batch_size = 1"):
        target.generate(tiny_prompt().repeat(2, 1), max_new_tokens=4, assistant_model=tiny_drafter(target))
