"""The comparison of pruning strategies goes on where it was; the throughput's figures fit together."""

import json
import runpy
import sys

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from distill_line import make_line, prepare
from tiny import tiny_target

from osprey.cli import compare_pruning as command
from osprey.cli import throughput
from osprey.train import compare_pruning as stage
from osprey.train.cost import flops_per_token
from osprey.train.distill import load_drafter
from osprey.train.feature_data import FeatureDataset


@pytest.fixture
def flags(tmp_path):
    tiny_target(vocab_size=VOCABULARY).save_pretrained(tmp_path / "source")
    bytes_tokenizer().save_pretrained(tmp_path / "source")
    for name in ("en", "held_en", "held_fr"):
        rows = [{"text": f"{name} the quick brown fox. " * (1 + n % 4)} for n in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [str(tmp_path / "source"), "--data_root", str(tmp_path), "--data", "en.jsonl", "--precision", "fp32"]
    return [*flags, "--length", "64", "--batch_rows", "1"]


def test_comparison_goes_on_with_what_is_missing(flags, tmp_path, monkeypatch, capsys):
    flags += ["--out", str(tmp_path / "out"), "--held_out", "held_en.jsonl", "held_fr.jsonl", "--tokens", "512"]
    flags += ["--eval_steps", "4", "--strategies", "first", "influence", "--depths", "1"]
    pretrain, begun = stage.pretrain, []

    def interrupted(arguments):
        begun.append(arguments.model)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return pretrain(arguments)

    monkeypatch.setattr(stage, "pretrain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.main(flags)
    results = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert list(results["cells"]) == ["first-1"]
    assert results["cells"]["first-1"]["layer_ids"] == [0]
    assert command.main(flags) == 0
    printed = capsys.readouterr().out
    assert [name.rsplit("/", 1)[1] for name in begun] == ["first-1-pruned", "influence-1-pruned", "influence-1-pruned"]
    results = json.loads((tmp_path / "out" / "comparison.json").read_text())
    cell = results["cells"]["influence-1"]
    influence = cell["influence"]
    assert cell["layer_ids"] == [influence.index(max(influence))]
    assert [entry["tokens"] for entry in cell["perplexity_during"]] == [256]
    assert f"| influence | 1 | {cell['layer_ids'][0]} |" in printed
    source = next(line for line in printed.splitlines() if line.startswith("| source |")).split("|")[3:5]
    # Thousands are printed with two digits.
    assert [float(cell) for cell in source] == pytest.approx([results["source"][k] for k in ("en", "fr")], rel=0.05)
    assert not list((tmp_path / "out").glob("*.run"))
    changes = {
        ("--tokens", "1024"): "tokens was 512.0, is 1024.0",
        ("--seed", "1"): "seed was 0, is 1",
        ("--held_out", "held_en.jsonl"): r"held_out was \['held_en.jsonl', 'held_fr.jsonl'\], is \['held_en.jsonl'\]",
        (
            "--calibration",
            str(tmp_path / "held_fr.jsonl"),
        ): r"calibration was \[\], is \[\['held_fr.jsonl', '[0-9a-f]{64}",
    }
    for change, message in changes.items():
        with pytest.raises(
            ValueError, match=rf"was made with other settings \({message}.*: give the same, or another"
        ):
            command.main([*flags, *change])
    # Version 0.1.0 stored three of the settings.
    old = {name: results["settings"][name] for name in ("tokens", "learning_rate", "data")}
    (tmp_path / "out" / "comparison.json").write_text(json.dumps(results | {"settings": old}))
    assert command.main([*flags, "--seed", "1"]) == 0
    (tmp_path / "out" / "comparison.json").write_text(json.dumps(results))
    tiny_target(vocab_size=VOCABULARY, seed=3).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"made with other settings \(model_sha256 was"):
        command.main(flags)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_throughput(flags, capsys, threads):
    threads(1)
    assert throughput.main([*flags, "--measured_steps", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    config = tiny_target(vocab_size=VOCABULARY).config
    assert result["step_gflops"] == round(3 * 64 * flops_per_token(config, 64) / 1e9, 6) > 0
    for name in ("wall", "cpu"):
        found = result[name]
        assert found["tokens_per_second"] == pytest.approx(64 / found["seconds_per_step"], rel=0.05)
        assert 0 < found["share_of_bound"] < 1
        assert found["gflops"] < min(found["matmul_gflops"])
    threads(2)
    assert throughput.main([*flags, "--measured_steps", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["threads"] == 2
    assert "cpu" not in result
    with pytest.raises(ValueError, match="--batch_rows 0 must be at least 1"):
        throughput.main([*flags, "--batch_rows", "0"])


def test_distillation_throughput_counts_the_matrix_products(tmp_path, capsys, threads):
    threads(1)
    line = make_line(tmp_path)
    same = {"prompt": "say it", "response": "well, it!", "temperature": 0.0, "finish": "stop", "language": "en"}
    (line / "same.jsonl").write_text("".join(json.dumps({"id": f"p-{n}", **same}) + "\n" for n in range(30)))
    prepare(line, "same.jsonl", "same")
    command = [str(line / "drafter"), f"--features={line / 'same'}", "--measured_steps", "4", "--precision", "fp32"]
    command += [
        "--per_device_train_batch_size",
        "2",
        "--unroll_steps",
        "1",
        "--muon",
        "false",
        "--disable_tqdm",
        "true",
    ]
    assert throughput.main([*command, "--output_dir", str(line / "run")]) == 0
    result = json.loads(capsys.readouterr().out)
    row = FeatureDataset([line / "same"])[0]
    positions, answer = 2 * (len(row["input_ids"]) - 1), 2 * int(row["response_mask"].sum())
    drafter = load_drafter(str(line / "drafter"))
    blocks = sum(weight.numel() for weight in drafter.layers.parameters() if weight.ndim == 2)
    config = drafter.config
    # Forward, and backward to weights and inputs; `fc` reads what needs no gradient, and so does the frozen head.
    products = positions * (3 * blocks + 2 * drafter.fc.weight.numel())
    products += answer * config.draft_vocab_size * (2 * config.hidden_size + config.target_hidden_size + 2)
    assert result["step_gflops"] == round(2 * products / 1e9, 6) > 0
    for name in ("wall", "cpu"):
        assert 0 < result[name]["share_of_bound"] < 1


@pytest.mark.parametrize("module", ["compare_pruning", "throughput"])
def test_modules_refuse_in_one_sentence(module, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [module, "source", "--length", "long"])
    monkeypatch.delitem(sys.modules, f"osprey.cli.{module}")  # run anew, not the one that is imported above
    with pytest.raises(SystemExit) as status:
        runpy.run_module(f"osprey.cli.{module}", run_name="__main__")
    assert status.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{module}: ")
    assert error.count("\n") == 1
