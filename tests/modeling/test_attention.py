"""Attention in groups: the same as transformers' sdpa, for the time of an assisted call, and only there."""

from types import SimpleNamespace

import pytest
import torch
from tiny import assert_same_text, tiny_drafter, tiny_prompt, tiny_target
from transformers import StoppingCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from osprey.modeling import attention_osprey
from osprey.modeling.attention_osprey import FEW_POSITIONS, GROUPED, grouped_attention, grouped_attention_forward


def attention_inputs(length: int, batch: int = 2, past: int = 7):
    """Random states of six query heads on two key heads, and a mask with padding: causal, and of float or bool."""
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(batch, 6, length, 4, generator=generator)
    key, value = torch.randn(2, batch, 2, past + length, 4, generator=generator)
    mask = torch.ones(batch, 1, length, past + length, dtype=torch.bool).tril(past)
    mask[1, :, :, :3] = False  # the second row is padded
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    return module, query, key, value, mask


@pytest.mark.parametrize("length", [1, 2, 5, FEW_POSITIONS, FEW_POSITIONS + 1])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_groups_are_sdpa(length, kind):
    module, query, key, value, mask = attention_inputs(length)
    if kind.is_floating_point:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    found, _ = grouped_attention_forward(module, query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_groups_cannot_do_goes_to_sdpa(monkeypatch):
    """No mask of few positions, a mask for each head, dropout, a bias by position, as many key heads as heads."""
    monkeypatch.setattr(attention_osprey, "attend_in_groups", lambda *args: pytest.fail("in groups"))
    monkeypatch.setattr(attention_osprey, "sdpa_attention_forward", lambda *args, **kwargs: ("sdpa", None))
    module, query, key, value, mask = attention_inputs(4)
    for args, kwargs in (
        ((query, key, value, None), {}),
        ((query, key, value, mask.expand(-1, 6, -1, -1)), {}),
        ((query, key, value, mask), {"dropout": 0.1}),
        ((query, key, value, mask), {"position_bias": mask}),
        ((query[:, :2], key, value, mask), {}),
    ):
        assert grouped_attention_forward(module, *args, **kwargs) == ("sdpa", None)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_verifications_are_grouped_for_one_call(family, monkeypatch):
    lengths, attend = [], attention_osprey.attend_in_groups

    def watched(query, *args):
        lengths.append(query.shape[2])
        return attend(query, *args)

    target = tiny_target(family)
    drafter = tiny_drafter(target)
    plain = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False)
    monkeypatch.setattr(attention_osprey, "attend_in_groups", watched)
    text = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert_same_text(target, plain, text)
    assert max(lengths) > 1  # of the target: the drafter has imported its own name for it
    assert target.config._attn_implementation == target.config.get_text_config()._attn_implementation == "sdpa"


class Failing(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise RuntimeError("stopped")


def test_sdpa_is_back_after_an_error():
    target = tiny_target()
    with pytest.raises(RuntimeError, match="stopped"):
        target.generate(
            tiny_prompt(), max_new_tokens=9, assistant_model=tiny_drafter(target), stopping_criteria=[Failing()]
        )
    assert target.config._attn_implementation == "sdpa"


def test_another_implementation_stays():
    target = tiny_target()
    target.set_attn_implementation("eager")
    with grouped_attention(target):
        assert target.config._attn_implementation == "eager"
    target.set_attn_implementation("sdpa")
    with grouped_attention(target):
        assert target.config._attn_implementation == GROUPED
