"""Linear layers with float16 weights: close to float32, and lossless between plain and assisted decoding."""

import pytest
import torch
from tiny import assert_same_text, oracle, tiny_drafter, tiny_prompt, tiny_target

from osprey.modeling import fp16_linears, int8_linears, record_acceptance


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "untied"])
def test_close_to_float32(family):
    target = tiny_target(family, initializer_range=0.1)
    expected = target(tiny_prompt()).logits
    assert fp16_linears(target) is target
    assert not any(type(module) is torch.nn.Linear for module in target.modules())
    found = target(tiny_prompt()).logits
    assert found.dtype == torch.float32
    # float16 keeps 11 bits of each weight: 2^-11 of the largest logit, a few layers deep.
    assert 0 < (found - expected).abs().max() < 0.02 * expected.abs().max()


@torch.no_grad()
def test_weights_are_rounded_to_float16_and_nothing_else_is():
    linear = torch.nn.Linear(64, 48)
    x = torch.randn(5, 64)
    expected = torch.nn.functional.linear(x.double(), linear.weight.half().double(), linear.bias.double())
    model = fp16_linears(torch.nn.Sequential(linear))
    for rows in (1, 2, 5):  # and a row does not depend on its neighbours
        torch.testing.assert_close(model(x[:rows]).double(), expected[:rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [{}, {"shortlist": list(range(8, 48))}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_assisted_is_plain_on_the_same_float16_target(family, form, monkeypatch):
    target = fp16_linears(tiny_target(family))
    drafter = fp16_linears(tiny_drafter(target, **form))
    plain = target.generate(tiny_prompt(), max_new_tokens=24, do_sample=False)
    oracle(monkeypatch, plain, 0.8)
    with record_acceptance() as calls:
        assisted = target.generate(tiny_prompt(), max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert_same_text(target, plain, assisted, tolerance=1e-3)
    assert calls[0].mean_acceptance_length > 1


@torch.no_grad()
def test_a_drafter_with_a_tied_shortlist():
    drafter = tiny_drafter(tiny_target(), shortlist=[1, 3, 4, 9, 20, 33], tie_word_embeddings=True)
    expected = drafter(tiny_prompt()).logits
    torch.testing.assert_close(fp16_linears(drafter)(tiny_prompt()).logits, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("form", [{}, {"shortlist": list(range(8, 48))}, {"tie_word_embeddings": True}])
def test_an_int8_drafter_keeps_the_text(form, monkeypatch):
    target = fp16_linears(tiny_target())
    drafter = tiny_drafter(target, **form)
    with torch.no_grad():
        expected = drafter(tiny_prompt()).logits
        found = int8_linears(drafter)(tiny_prompt()).logits
    kept = torch.isfinite(expected)
    assert torch.equal(kept, torch.isfinite(found))
    # Weights and activations keep 7 or 8 bits, two blocks deep.
    assert 0 < (found - expected)[kept].abs().max() < 0.2 * expected[kept].abs().max()
    linears = {name: module for name, module in drafter.named_modules() if hasattr(module, "_packed_params")}
    weights = {name: module._packed_params.dtype for name, module in linears.items() if "_packed" not in name}
    assert len(weights) == 4 * 2 + 2 and weights.pop("fc") == torch.float16
    assert set(weights.values()) == {torch.qint8}
    plain = target.generate(tiny_prompt(), max_new_tokens=24, do_sample=False)
    oracle(monkeypatch, plain, 0.8)
    assisted = target.generate(tiny_prompt(), max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert_same_text(target, plain, assisted, tolerance=1e-3)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="takes an Osprey drafter, but this is a LlamaForCausalLM: use fp16_linears"):
        int8_linears(tiny_target())
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32 model on the CPU, but this one is torch.bfloat16 on cpu: load"):
        fp16_linears(model)
    with pytest.raises(ValueError, match="torch.float32 on meta"):
        fp16_linears(torch.nn.Linear(4, 4, device="meta"))
    assert type(model[0]) is torch.nn.Linear
    done = fp16_linears(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)))
    assert fp16_linears(done) is done  # a second call finds nothing left to do
