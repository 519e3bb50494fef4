"""The EAGLE-3-style baseline is what its paper says, and goes through the same trainer and generator."""

import json

import pytest
import torch
from bytes_tokenizer import VOCABULARY as BYTES
from distill_line import flags, make_line
from tiny import DraftLog, tiny_drafter, tiny_prompt, tiny_target
from transformers import AutoModelForCausalLM

from osprey.cli.baseline import main as baseline
from osprey.cli.distill import main as distill
from osprey.eval.baselines import Eagle3Drafter, make_eagle3
from osprey.modeling import OspreyDrafter
from osprey.train.unroll import Chains, unroll


@pytest.fixture(params=[1, 2])
def pair(request):
    target = tiny_target(tie_word_embeddings=False)
    return target, make_eagle3(target, tiny_drafter(target, shortlist=list(range(0, 48, 2))), request.param, 0).eval()


@torch.no_grad()
def test_the_residual_starts_from_the_fused_taps(pair):
    target, drafter = pair
    taps = torch.randn(1, 6, 96)
    context = drafter.project_taps(taps)
    for layer in drafter.layers:  # blocks that add nothing
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    assert torch.equal(drafter.run_layers(tiny_prompt(6), context), context)


def test_only_the_first_layer_is_widened(pair):
    target, drafter = pair
    widths = [layer.self_attn.q_proj.in_features for layer in drafter.layers]
    assert widths == [64, 32][: len(widths)]
    assert torch.equal(drafter.embed_tokens.weight, target.get_input_embeddings().weight)
    assert torch.equal(drafter.lm_head.weight, target.get_output_embeddings().weight[drafter.draft_ids])


def test_a_padded_vocabulary(monkeypatch):
    """Without a shortlist, ids that only pad the vocabulary are not drafted, and the head has rows for them."""
    target = tiny_target(tie_word_embeddings=False)
    like = tiny_drafter(target)
    monkeypatch.setattr(OspreyDrafter, "draft_ids", property(lambda self: torch.arange(40)))
    drafter = make_eagle3(target, like, 1, 0)
    assert torch.equal(drafter.lm_head.weight[:40], target.get_output_embeddings().weight[:40])
    if hasattr(like.config, "target_num_tokens"):
        like.config.target_num_tokens = 40
        assert make_eagle3(target, like, 1, 0).config.target_num_tokens == 40


@pytest.mark.skipif(not hasattr(OspreyDrafter, "fuse_projections"), reason="drafters are not fused yet")
@torch.no_grad()
def test_fused_projections_compute_the_same(pair):
    _, drafter = pair
    ids, context = tiny_prompt(6), torch.randn(1, 6, 32)
    expected = drafter(ids, context).logits
    drafter.fuse_projections()
    drafter.fuse_projections()  # a second call finds nothing left to do
    torch.testing.assert_close(drafter(ids, context).logits, expected, rtol=1e-4, atol=1e-4)


def test_weights_are_random_by_seed():
    target = tiny_target()
    first, second, third = (make_eagle3(target, tiny_drafter(target), 1, seed) for seed in (0, 0, 1))
    for name, weight in first.layers.named_parameters():
        assert torch.equal(weight, second.layers.get_parameter(name))
        assert weight.ndim < 2 or not torch.equal(weight, third.layers.get_parameter(name))


def test_unrolled_steps_are_draft_steps(pair, monkeypatch):
    target, drafter = pair
    drafter.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    log = DraftLog().start(monkeypatch)
    prompt = tiny_prompt()
    plain = target.generate(prompt, max_new_tokens=10, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=10, do_sample=False, assistant_model=drafter), plain)
    log.assert_follows_definition(target, drafter)
    with torch.no_grad():
        for verified, ids, logits in log.steps:
            step, anchor = ids.shape[1] - verified, verified - 2
            states = target(ids[:, : verified - 1], output_hidden_states=True).hidden_states
            taps = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
            taps = torch.nn.functional.pad(taps, (0, 0, 0, ids.shape[1] - taps.shape[1]))
            chains = Chains(torch.tensor([[anchor]]), torch.tensor([[step + 1]]))
            outputs = unroll(drafter, ids, taps, chains, step + 1)
            found = outputs[step][:, anchor if step == 0 else 0]
            torch.testing.assert_close(drafter.draft_logits(found), logits, rtol=1e-4, atol=1e-4)


def test_the_same_command_trains_it(tmp_path, capsys):
    line = make_line(tmp_path)
    out = ["--out", str(line / "eagle"), "--layers", "2", "--json"]
    assert baseline([str(line / "target"), "--like", str(line / "drafter"), *out]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 2
    command = flags(line, "trained", "run", max_steps=3)
    assert distill([str(line / "eagle"), *command[1:]]) == 0
    trained = AutoModelForCausalLM.from_pretrained(line / "trained")
    assert isinstance(trained, Eagle3Drafter)
    start = AutoModelForCausalLM.from_pretrained(line / "eagle")
    assert torch.equal(trained.embed_tokens.weight, start.embed_tokens.weight)
    assert torch.equal(trained.draft_ids, torch.arange(0, BYTES, 2))
    assert not torch.equal(trained.layers[1].mlp.up_proj.weight, start.layers[1].mlp.up_proj.weight)
    with pytest.raises(ValueError, match="--layers must be"):
        baseline([str(line / "target"), "--like", str(line / "drafter"), "--out", "x", "--layers", "0"])
