"""Stage 1 on calibration text: which blocks, groups and channels go, the report, and the arithmetic of `cost`."""

import json

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_target
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from osprey.cli.main import main
from osprey.train.cost import flops_per_token, meta_parameters
from osprey.train.importance import measure_importance
from osprey.train.prune import PruneArguments, choose_layers, prune
from osprey.train.width import narrow, narrow_config

FAMILIES = ["llama", "untied", "qwen2", "qwen3", "smollm3"]


def silence(block):
    """A block that adds nothing to the residual stream."""
    for module in (block.self_attn.o_proj, block.mlp.down_proj):
        torch.nn.init.zeros_(module.weight)


@pytest.fixture
def files(tmp_path):
    """A model whose blocks 1 and 2 do nothing, and text."""
    model = tiny_target(vocab_size=VOCABULARY)
    silence(model.model.layers[1])
    silence(model.model.layers[2])
    model.save_pretrained(tmp_path / "source")
    bytes_tokenizer().save_pretrained(tmp_path / "source")
    for name in ("text", "held_en"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "some words of text. " * 5}) + "\n")
    return tmp_path


def rows(number=2, length=10, vocabulary=48):
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        yield {"input_ids": ids, "position_ids": list(range(length)), "labels": ids}


def test_fixed_strategies():
    assert choose_layers(30, 4, "first") == [0, 1, 2, 3]
    assert choose_layers(30, 4, "uniform") == [0, 7, 15, 22]
    assert choose_layers(30, 2, "uniform") == [0, 15]
    assert choose_layers(30, 4, "ends") == [0, 1, 28, 29]
    assert choose_layers(30, 3, "ends") == [0, 1, 29]
    assert choose_layers(30, 1, "ends") == [0]
    for strategy in ("first", "uniform", "ends"):
        assert choose_layers(5, 5, strategy) == [0, 1, 2, 3, 4]


def test_importance_is_what_its_definition_says():
    model = tiny_target("qwen3")
    importance = measure_importance(model, rows())
    cosines, angles = torch.zeros(6, 6), torch.zeros(6, 6)
    states = []
    model.model.norm.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    for row in rows():
        with torch.no_grad():
            hidden = model(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states
        hidden = [*hidden[:-1], states.pop()]  # what transformers gives as the last one is behind the norm
        for i in range(6):
            for j in range(6):
                cosine = torch.cosine_similarity(hidden[i][0], hidden[j][0], dim=-1)
                cosines[i, j] += cosine.mean() / 2
                angles[i, j] += (cosine.clamp(-1, 1).acos() / torch.pi).mean() / 2
    torch.testing.assert_close(importance.cosine, cosines)
    torch.testing.assert_close(importance.angle, angles, rtol=1e-3, atol=1e-3)
    assert importance.influence == pytest.approx((1 - cosines.diagonal(1)).tolist(), abs=1e-5)


@pytest.mark.parametrize("strategy", ["influence", "angular"])
def test_blocks_that_do_nothing_go_first(files, strategy):
    prune(
        PruneArguments(
            source=str(files / "source"),
            out=str(files / "out"),
            layers=3,
            strategy=strategy,
            calibration=[str(files / "text.jsonl")],
        )
    )
    record = json.loads((files / "out" / "training.json").read_text())["stages"][-1]
    assert record["layer_ids"] == [0, 3, 4]
    assert record["influence"][1] == record["influence"][2] == pytest.approx(0, abs=1e-5)
    ids = torch.randint(3, 48, (1, 9))
    source, pruned = (AutoModelForCausalLM.from_pretrained(files / name) for name in ("source", "out"))
    with torch.no_grad():
        torch.testing.assert_close(pruned(ids).logits, source(ids).logits)


def test_angular_removes_one_run_influence_single_blocks():
    model = tiny_target(num_hidden_layers=6)
    for block in (1, 3, 4):
        silence(model.model.layers[block])
    importance = measure_importance(model, rows())
    assert choose_layers(6, 4, "angular", importance=importance) == [0, 1, 2, 5]
    assert choose_layers(6, 3, "influence", importance=importance) == [0, 2, 5]


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_and_channels_that_do_nothing_go_first(tmp_path, family):
    model = tiny_target(family, num_attention_heads=8, num_key_value_heads=4)
    for index, layer in enumerate(model.model.layers):
        with torch.no_grad():
            group = index % 4
            for silent in (group, (group + 2) % 4):
                layer.self_attn.o_proj.weight[:, 16 * silent : 16 * (silent + 1)] = 0  # 2 heads of 8
            layer.mlp.down_proj.weight[:, index::2] = 0
    importance = measure_importance(model, rows())
    narrower = narrow(model, importance, list(range(5)), num_key_value_heads=2, intermediate_size=26)
    assert narrower.config.num_attention_heads == 4
    narrower.save_pretrained(tmp_path)
    narrower = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert narrower.model.layers[0].mlp.up_proj.weight.shape == (26, 32)
    assert narrower.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)
    ids = torch.randint(3, 48, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(narrower(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_group_and_channel_importance_is_the_norm_of_what_they_add():
    model = tiny_target(num_hidden_layers=1)
    layer, row = model.model.layers[0], next(rows(1))
    inputs = {}
    layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: inputs.update(o=args[0][0]))
    layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: inputs.update(down=args[0][0]))
    importance = measure_importance(model, [row])
    for group in range(2):
        alone = torch.zeros_like(inputs["o"])
        alone[:, 16 * group : 16 * (group + 1)] = inputs["o"][:, 16 * group : 16 * (group + 1)]
        norm = (alone @ layer.self_attn.o_proj.weight.t()).norm(dim=-1).square().mean().sqrt()
        torch.testing.assert_close(importance.groups[0, group], norm)
    alone = torch.zeros_like(inputs["down"])
    alone[:, 7] = inputs["down"][:, 7]
    norm = (alone @ layer.mlp.down_proj.weight.t()).norm(dim=-1).square().mean().sqrt()
    torch.testing.assert_close(importance.channels[0, 7], norm)


def test_width_from_the_command_line_and_report(files, capsys):
    run = ["prune", str(files / "source"), "--out", str(files / "out"), "--layers", "2", "--strategy", "ends"]
    width = ["--num_key_value_heads", "1", "--intermediate_size", "40", "--calibration", str(files / "text.jsonl")]
    assert main([*run, *width, "--report", "--held_out", str(files / "held_en.jsonl")]) == 0
    printed = capsys.readouterr().out
    pruned = AutoModelForCausalLM.from_pretrained(files / "out")
    config = pruned.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.num_attention_heads) == (2, 1, 2)
    assert (config.intermediate_size, config.head_dim) == (40, 8)
    report = json.loads((files / "out" / "prune_report.json").read_text())
    base = report["source"]["perplexity"]["mean"]
    worth = [block["perplexity_without"]["mean"] for block in report["blocks"]]
    assert worth[1] == pytest.approx(base, rel=1e-4)  # the silent ones are worth nothing
    assert worth[2] == pytest.approx(base, rel=1e-4)
    assert abs(worth[0] - base) > 0.01 * base
    assert [block["kept"] for block in report["blocks"]] == [True, False, False, False, True]
    assert report["pruned"]["parameters"] == sum(weight.numel() for weight in pruned.parameters())
    assert f"{worth[3]:.2f}" in printed
    assert "perplexity en" in printed


def test_refusals(files, capsys):
    run = ["prune", str(files / "source"), "--out", str(files / "out"), "--layers", "2"]
    (files / "binary.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    text = ["--calibration", str(files / "text.jsonl")]
    cases = {
        ("--strategy", "influence"): "the strategy influence is decided on text: give files with --calibration.",
        ("--intermediate_size", "8"): "pruning the width is decided on text: give files with --calibration.",
        ("--intermediate_size", "49", *text): "--intermediate_size 49 is out of range: the source has 48.",
        ("--num_key_value_heads", "0", *text): "--num_key_value_heads 0 is out of range: the source has 2.",
        ("--report",): "--report measures perplexities: give text files with --held_out.",
        ("--strategy", "influence", "--calibration", "none.jsonl"): "there is no data file none.jsonl.",
        ("--strategy", "influence", "--calibration", str(files / "binary.jsonl")): "not UTF-8",
    }
    for options, message in cases.items():
        assert main([*run, *options]) == 1
        assert message in capsys.readouterr().err
    assert not (files / "out").exists()
    llama = tiny_target(hidden_size=24, num_attention_heads=6, num_key_value_heads=6, head_dim=4)
    with pytest.raises(
        ValueError, match="leaves 5 attention heads, with which a llama model of hidden size 24 cannot"
    ):
        narrow_config(llama.config, 5, None)


def test_sliding_windows_are_refused(tmp_path, capsys):
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    tiny_target("qwen2", **windows).save_pretrained(tmp_path / "source")
    bytes_tokenizer().save_pretrained(tmp_path / "source")
    run = ["prune", str(tmp_path / "source"), "--out", str(tmp_path / "out")]
    assert main([*run, "--keep", "0,4"]) == 1
    assert "layers 4 of the source attend in a sliding window" in capsys.readouterr().err
    assert main([*run, "--keep", "0,1"]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_cost_is_what_torch_counts(family):
    model = tiny_target(family)
    assert meta_parameters(model.config) == sum(weight.numel() for weight in model.parameters())
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(3, 19)[None], use_cache=False)
    # Torch counts the whole square of scores: as if a row were twice as long, of which half is seen.
    assert counter.get_total_flops() == 16 * flops_per_token(model.config, length=32)
