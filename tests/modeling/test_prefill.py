"""The drafter's prefill: in chunks, and of the last block no more than later positions read."""

import pytest
import torch
from tiny import DraftLog, assert_same_text, oracle, tiny_drafter, tiny_prompt, tiny_target
from torch import nn
from transformers.cache_utils import DynamicCache

from osprey.eval.baselines import make_eagle3
from osprey.modeling import OspreyCandidateGenerator, generation_osprey


def make_drafter(kind: str, target):
    like = tiny_drafter(target, qk_norm=kind == "qk norm", no_rope_layers=[1, 0] if kind == "no rope" else None)
    drafter = like if not kind.startswith("eagle3") else make_eagle3(target, like, int(kind[-1]), seed=1).eval()
    if kind == "fused":
        drafter.fuse_projections()
    return drafter


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "fused", "qk norm", "no rope", "eagle3 x 1", "eagle3 x 2"])
def test_the_last_position_alone(kind):
    """The same state, keys and values as a run that computes every position."""
    drafter = make_drafter(kind, tiny_target())
    tokens, context = tiny_prompt(12), torch.randn(1, 12, drafter.config.hidden_size)
    expected, found = DynamicCache(config=drafter.config), DynamicCache(config=drafter.config)
    for part in (slice(0, 7), slice(7, 12), slice(11, 12)):
        arguments = tokens[:, part], context[:, part]
        whole = drafter.run_layers(*arguments, cache=expected)
        last = drafter.run_layers(*arguments, cache=found, last_only=True)
        torch.testing.assert_close(last, whole[:, -1:], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 4, 64, 65])
def test_few_queries_read_what_many_do(length):
    """The short way through attention, at and past its limit, against the general one."""
    drafter = tiny_drafter(tiny_target())
    cache, other = DynamicCache(config=drafter.config), DynamicCache(config=drafter.config)
    tokens, context = tiny_prompt(9 + length), torch.randn(1, 9 + length, drafter.config.hidden_size)
    whole = drafter.run_layers(tokens, context, cache=other)
    drafter.run_layers(tokens[:, :9], context[:, :9], cache=cache)
    found = drafter.run_layers(tokens[:, 9:], context[:, 9:], cache=cache)
    torch.testing.assert_close(found, whole[:, 9:], rtol=1e-4, atol=1e-4)


def rows_of(drafter) -> dict[str, list[int]]:
    """Number of positions that each linear layer ran over, call by call."""
    rows = {}
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, args, output, name=name: rows.setdefault(name, []).append(args[0].shape[1])
            )
    return rows


def test_a_prefill_computes_what_is_read(monkeypatch):
    """Of the last block and the head one position a step; of everything else each position of the prompt once."""
    monkeypatch.setattr(generation_osprey, "CHUNK", 8)
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.num_assistant_tokens = 2
    rows = rows_of(drafter)
    target.generate(tiny_prompt(29), max_new_tokens=4, do_sample=False, assistant_model=drafter)  # one round of two
    assert rows["fc"][:4] == rows["layers.0.mlp.up_proj"][:4] == [8, 8, 8, 5]
    assert rows["layers.1.self_attn.k_proj"][:9] == [7, 1, 7, 1, 7, 1, 4, 1, 1]
    assert set(rows["layers.1.self_attn.o_proj"] + rows["layers.1.mlp.up_proj"] + rows["lm_head"]) == {1}


@pytest.mark.parametrize("chunk", [4, 32])
def test_of_a_long_prompt_the_last_part_is_read(chunk, monkeypatch):
    """Its last positions alone, counted from there; the drafter computes what it would for a prompt of just these."""
    monkeypatch.setattr(generation_osprey, "CHUNK", chunk)
    monkeypatch.setattr(generation_osprey, "PROMPT_WINDOW", 10)
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.num_assistant_tokens = 2
    prompt = tiny_prompt(29)
    states = target(prompt, output_hidden_states=True).hidden_states
    taps = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)[:, -10:]  # [1, 10, 3H]
    next_token = target.generate(prompt, max_new_tokens=1, do_sample=False)[:, -1:]
    context = drafter.project_taps(taps)
    expected = drafter.run_layers(torch.cat([prompt[:, -9:], next_token], dim=1), context, cache=None)[:, -1:]
    rows, found, draft_logits = rows_of(drafter), [], drafter.draft_logits
    monkeypatch.setattr(drafter, "draft_logits", lambda state: found.append(state) or draft_logits(state))
    target.generate(prompt, max_new_tokens=4, do_sample=False, assistant_model=drafter)
    assert sum(rows["fc"][: -(-10 // chunk)]) == 10
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 4, 10, 11])
def test_drafts_after_a_prefill_in_chunks(family, chunk, monkeypatch):
    monkeypatch.setattr(generation_osprey, "CHUNK", chunk)
    target = tiny_target(family)
    drafter = tiny_drafter(target)
    plain = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False)
    oracle(monkeypatch, plain, 0.7)
    log = DraftLog().start(monkeypatch)
    assisted = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert_same_text(target, plain, assisted)
    log.assert_follows_definition(target, drafter)


def test_padding_of_more_than_a_chunk(monkeypatch):
    monkeypatch.setattr(generation_osprey, "CHUNK", 3)
    target = tiny_target()
    prompt = torch.nn.functional.pad(tiny_prompt(), (7, 0))
    mask = (torch.arange(18) >= 7).long()[None]
    log = DraftLog().start(monkeypatch)
    kwargs = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    plain = target.generate(prompt, **kwargs)
    drafter = tiny_drafter(target)
    assert_same_text(target, plain, target.generate(prompt, assistant_model=drafter, **kwargs))
    log.steps = [(verified - 7, ids[:, 7:], logits) for verified, ids, logits in log.steps]
    log.assert_follows_definition(target, drafter)


def test_what_waits_is_bounded_where_nothing_is_drafted(monkeypatch):
    """Rounds that only copy leave the drafter behind; it catches up a chunk at a time."""
    monkeypatch.setattr(generation_osprey, "CHUNK", 16)
    plan, waiting = OspreyCandidateGenerator.plan, []

    def copies_alone(generator, input_ids, room):
        waiting.append(generator.num_unread)
        copied, budget = plan(generator, input_ids, room)
        return (copied[:, :0], 1) if len(waiting) == 60 else (copied, copied.shape[1])

    monkeypatch.setattr(OspreyCandidateGenerator, "plan", copies_alone)
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.lookup_num_tokens = 4
    log = DraftLog().start(monkeypatch)
    target.generate(tiny_prompt(40), max_new_tokens=120, do_sample=False, assistant_model=drafter)
    assert 10 < max(waiting) <= 16
    assert len(log.steps) == 1
    log.assert_follows_definition(target, drafter)
