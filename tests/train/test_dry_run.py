"""`pretrain --dry_run`: the recipes load, what they will need, and what is said where data cannot be read."""

import gzip
import json
from pathlib import Path

import pytest
import yaml
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_target

from osprey.cli.main import main
from osprey.train.cost import flops_per_token

RECIPES = Path(__file__).parents[2] / "train" / "recipes"


@pytest.fixture
def offline(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach it on the Hub (ConnectError)")

    monkeypatch.setattr("osprey.train.data.load_dataset", unreachable)


def dry_run(capsys, *flags):
    assert main(["pretrain", *flags, "--dry_run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("recipe", "layers", "block", "embedding"),
    [
        # q and o, k and v, the FFN, norms; and a tied embedding
        ("qwen3-4b-2l", 2, 2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128, 151_936 * 2560),
        ("llama3.2-1b-4l", 4, 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048, 128_256 * 2048),
    ],
)
def test_the_papers_backbones(capsys, offline, recipe, layers, block, embedding):
    record = dry_run(capsys, "--config", str(RECIPES / f"{recipe}.yaml"))
    assert record["layers"] == layers
    assert record["body_parameters"] == layers * block
    norm = embedding // (151_936 if recipe.startswith("qwen3") else 128_256)
    assert record["parameters"] == layers * block + embedding + norm
    assert record["steps"] == 55_000
    assert record["tokens"] == 55_000 * 32_768
    assert record["memory_bytes"] > 16 * record["parameters"]
    assert record["data"]["not_checked"].startswith(
        "the data set HuggingFaceFW/fineweb:sample-100BT cannot be streamed"
    )
    if recipe.startswith("qwen3"):
        # The paper's 265M: the blocks, their widened q, k and v, and `fc` for a target of hidden size 4096.
        assert round((record["body_parameters"] + 2 * 2560 * 6144 + 3 * 4096 * 2560) / 1e6) == 265


def test_the_committed_backbones_recipe(tmp_path, capsys):
    recipe = yaml.safe_load((RECIPES / "smollm2-135m-2l.yaml").read_text())
    for name in [entry.partition("=")[0] for entry in recipe["data"]] + recipe["held_out"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        row = {"prompt": "p", "response": "r" * 300} if "responses" in name else {"text": "t" * 300}
        content = (json.dumps(row) + "\n").encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    tiny_target(vocab_size=VOCABULARY).save_pretrained(tmp_path / "pruned")
    bytes_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(tmp_path / "pruned")
    flags = ["--model", str(tmp_path / "pruned"), "--out", str(tmp_path / "out"), "--data_root", str(tmp_path)]
    record = dry_run(capsys, "--config", str(RECIPES / "smollm2-135m-2l.yaml"), *flags)
    assert record["data"]["documents"] == len(recipe["data"]) >= 10
    assert record["data"]["tokens"] > 300 * len(recipe["data"])
    assert record["data"]["not_checked"] is None


def test_text_output_and_nothing_is_written(tmp_path, capsys, offline):
    tiny_target(vocab_size=VOCABULARY).save_pretrained(tmp_path / "pruned")
    bytes_tokenizer().save_pretrained(tmp_path / "pruned")
    before = sorted(tmp_path.rglob("*"))
    flags = ["pretrain", str(tmp_path / "pruned"), "--out", str(tmp_path / "out"), "--tokens", "1e6", "--dry-run"]
    assert main([*flags, "--data", "hub:org/name"]) == 0
    printed = capsys.readouterr().out
    assert "NOT CHECKED: the data set org/name cannot be streamed from the Hub" in printed
    assert "1,003,520 in 245 steps of 4,096" in printed
    assert sorted(tmp_path.rglob("*")) == before
    assert main([*flags, "--data", "none.jsonl"]) == 1
    assert "there is no data file none.jsonl" in capsys.readouterr().err
    assert main(["pretrain", "nowhere/at/all", *flags[2:], "--data", "hub:org/name"]) == 1
    assert "there is no model folder nowhere/at/all" in capsys.readouterr().err


def test_a_source_that_is_distilled_from_counts(tmp_path, capsys, offline):
    tiny_target(vocab_size=VOCABULARY, num_hidden_layers=2).save_pretrained(tmp_path / "pruned")
    bytes_tokenizer().save_pretrained(tmp_path / "pruned")
    source = tiny_target(vocab_size=VOCABULARY, num_hidden_layers=6)
    source.save_pretrained(tmp_path / "source")
    flags = [str(tmp_path / "pruned"), "--out", str(tmp_path / "out"), "--tokens", "1e6", "--precision", "fp32"]
    flags += ["--data", "hub:org/name"]
    alone = dry_run(capsys, *flags)
    both = dry_run(capsys, *flags, "--distill_from", str(tmp_path / "source"))
    assert both["memory_bytes"] - alone["memory_bytes"] == 4 * source.num_parameters()
    assert both["flops"] - alone["flops"] == flops_per_token(source.config, 512) * alone["tokens"]


@pytest.mark.parametrize("config", ["{vocab_size: 300}", "{model_type: gemma3_text}"])
def test_the_family_of_a_config_in_the_recipe(tmp_path, capsys, offline, config):
    (tmp_path / "recipe.yaml").write_text(f"model: org/none\nout: out\ndata: [hub:org/name]\nmodel_config: {config}\n")
    assert main(["pretrain", "--config", str(tmp_path / "recipe.yaml"), "--dry_run"]) == 1
    assert "model; blocks can be pruned from llama, " in capsys.readouterr().err
