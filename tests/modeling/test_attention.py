"""Attention in groups: the same as transformers' sdpa, for the time of an assisted call and in its thread alone."""

import threading
from types import SimpleNamespace

import pytest
import torch
from tiny import assert_same_text, tiny_drafter, tiny_prompt, tiny_target
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from osprey.modeling import attention_osprey
from osprey.modeling.attention_osprey import FEW_POSITIONS, grouped_attention, install_grouped_attention


def sdpa(*args, **kwargs):
    return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)[0]


@pytest.fixture
def grouped(monkeypatch):
    """Numbers of positions of what was attended to in groups."""
    lengths, attend = [], attention_osprey.attend_in_groups

    def watched(query, *args):
        lengths.append(query.shape[2])
        return attend(query, *args)

    monkeypatch.setattr(attention_osprey, "attend_in_groups", watched)  # drafters have a name of their own for it
    return lengths


def attention_inputs(length: int, batch: int = 2, past: int = 7):
    """Random states of six query heads on two key heads, and a mask with padding: causal, and of float or bool."""
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(batch, 6, length, 4, generator=generator)
    key, value = torch.randn(2, batch, 2, past + length, 4, generator=generator)
    mask = torch.ones(batch, 1, length, past + length, dtype=torch.bool).tril(past)
    mask[1, :, :, :3] = False  # the second row is padded
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    return module, query, key, value, mask


@pytest.mark.parametrize("length", [1, 2, 5, FEW_POSITIONS])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_groups_are_sdpa(length, kind, grouped):
    module, query, key, value, mask = attention_inputs(length)
    if kind.is_floating_point:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    expected = sdpa(module, query, key, value, mask, scaling=0.3)
    assert grouped == []
    with grouped_attention():
        found = sdpa(module, query, key, value, mask, scaling=0.3)
    assert grouped == [length]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_groups_cannot_do_is_left(grouped):
    """No mask, a mask for each head, dropout, a bias by position, as many key heads as heads, many positions."""
    module, query, key, value, mask = attention_inputs(4)
    alone = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    with grouped_attention():
        sdpa(module, query, key, value, None)
        sdpa(module, query, key, value, mask.expand(-1, 6, -1, -1))
        sdpa(module, query, key, value, mask, dropout=0.1)
        sdpa(module, query, key, value, mask.float(), position_bias=mask.float())
        sdpa(alone, query[:, :2], key, value, mask)
        sdpa(*attention_inputs(FEW_POSITIONS + 1))
    assert grouped == []


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_verifications_are_grouped(family, grouped):
    target = tiny_target(family)
    drafter = tiny_drafter(target)
    plain = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False)
    assert grouped == []
    text = target.generate(tiny_prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert_same_text(target, plain, text)
    assert max(grouped) > 1


def test_nothing_stays_behind(grouped):
    """Neither after an error, nor in another thread, nor of a second installation."""
    installed = ALL_ATTENTION_FUNCTIONS["sdpa"]
    install_grouped_attention()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is installed
    inputs = attention_inputs(3)
    with pytest.raises(RuntimeError), grouped_attention():
        other = threading.Thread(target=sdpa, args=inputs)
        other.start()
        other.join()
        assert grouped == []
        raise RuntimeError
    sdpa(*inputs)
    assert grouped == []
