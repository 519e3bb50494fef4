"""The comparison of pruning strategies goes on where it was; the throughput's figures fit together."""

import json

import pytest
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_target

from osprey.cli import compare_pruning as command
from osprey.cli import throughput
from osprey.train import compare_pruning as stage
from osprey.train.cost import flops_per_token


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
    assert f"| source |  | {results['source']['en']:.2f} | {results['source']['fr']:.2f} |" in printed
    assert not list((tmp_path / "out").glob("*.run"))
    with pytest.raises(ValueError, match="was made with .*: give the same settings, or another --out"):
        command.main([*flags, "--tokens", "1024"])


def test_throughput(flags, capsys):
    assert throughput.main([*flags, "--measured_steps", "3"]) == 0
    result = json.loads(capsys.readouterr().out)
    config = tiny_target(vocab_size=VOCABULARY).config
    assert result["step_gflops"] == round(3 * 64 * flops_per_token(config, 64) / 1e9, 2)
    for name in ("wall", "cpu"):
        found = result[name]
        assert found["tokens_per_second"] == pytest.approx(64 / found["seconds_per_step"], rel=0.05)
        assert 0 < found["share_of_bound"] < 1
        assert found["gflops"] < min(found["matmul_gflops"])
