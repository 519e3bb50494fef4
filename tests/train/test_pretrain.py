"""Stage 2 on a tiny model: it learns, it goes on exactly where it was stopped, and what is refused."""

import json
import math

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_target
from transformers import AutoModelForCausalLM, TrainerCallback

from osprey.cli.main import main
from osprey.train import pretrain as stage
from osprey.train.calibration import SCALES, calibrate_norm
from osprey.train.data import parse_sources
from osprey.train.perplexity import held_out_losses
from osprey.train.pretrain import PretrainArguments, pretrain

PHRASE = "the quick brown fox jumps over the lazy dog. "


@pytest.fixture
def files(tmp_path):
    model = tiny_target("llama", vocab_size=VOCABULARY, num_hidden_layers=2, initializer_range=0.1)
    model.save_pretrained(tmp_path / "pruned")
    bytes_tokenizer().save_pretrained(tmp_path / "pruned")
    rows = [{"text": PHRASE * (1 + n % 4)} for n in range(40)]
    (tmp_path / "en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_en.jsonl").write_text(json.dumps({"text": PHRASE * 2}) + "\n")
    (tmp_path / "held_fr.jsonl").write_text(json.dumps({"text": "le renard brun"}) + "\n")
    return tmp_path


def arguments(files, **changes):
    settings = {
        "model": str(files / "pruned"),
        "out": str(files / "backbone"),
        "data": ["en.jsonl"],
        "data_root": str(files),
        "tokens": 64 * 2 * 12,
        "length": 64,
        "batch_rows": 2,
        "learning_rate": 0.01,
        "precision": "fp32",
        "log_steps": 1,
    }
    return PretrainArguments(**{**settings, **changes})


def test_learns_and_writes_a_whole_checkpoint_with_its_record(files):
    record = pretrain(arguments(files, held_out=["held_en.jsonl", "held_fr.jsonl"], tokens=64 * 2 * 60, eval_steps=25))
    assert record["steps"] == 60
    assert record["tokens"] == 64 * 2 * 60
    assert record["perplexity_before"]["en"] > 50
    assert record["perplexity_after"]["en"] < 10
    assert record["perplexity_after"]["fr"] > record["perplexity_after"]["en"]
    training = (files / "backbone" / "training.json").read_text()
    assert str(files) not in training
    assert json.loads(training)["stages"][-1]["data"][0]["file"] == "en.jsonl"
    backbone = AutoModelForCausalLM.from_pretrained(files / "backbone")
    assert backbone.config.use_cache
    losses = held_out_losses(backbone, bytes_tokenizer(), [files / "held_en.jsonl"], 64)
    assert math.exp(losses["en"]) == pytest.approx(record["perplexity_after"]["en"], rel=1e-3)


def test_held_out_loss_is_the_models_own(files):
    model = AutoModelForCausalLM.from_pretrained(files / "pruned")
    ids = torch.tensor([[*bytes_tokenizer()("le renard brun")["input_ids"], 2]])
    losses = held_out_losses(model, bytes_tokenizer(), [files / "held_fr.jsonl"], 64)
    assert losses["fr"] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-4)


@pytest.mark.parametrize("softmax_ids", [None, 100])
def test_resumed_run_equals_an_uninterrupted_one(files, monkeypatch, softmax_ids):
    losses = {}

    class Watch(TrainerCallback):
        def __init__(self, stop):
            self.stop = stop

        def on_log(self, args, state, control, logs, **kwargs):
            if "loss" in logs:
                losses[state.global_step] = logs["loss"]

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == self.stop:
                raise KeyboardInterrupt

    make = stage.make_trainer

    def watched(stop):
        def build(*args):
            trainer = make(*args)
            trainer.add_callback(Watch(stop))
            return trainer

        monkeypatch.setattr(stage, "make_trainer", build)

    monkeypatch.setattr(stage, "COUNTED_TOKENS", 1000)
    settings = {"save_steps": 5, "softmax_ids": softmax_ids}
    watched(None)
    pretrain(arguments(files, out=str(files / "whole"), **settings))
    expected = dict(losses)
    losses.clear()
    watched(7)
    with pytest.raises(KeyboardInterrupt):
        pretrain(arguments(files, **settings))
    assert not (files / "backbone").exists()
    for step in (6, 7):  # lost with the interruption; must be done again
        losses.pop(step, None)
    watched(None)
    pretrain(arguments(files, resume=True, **settings))
    assert losses == pytest.approx(expected, rel=1e-5)
    whole, resumed = (
        AutoModelForCausalLM.from_pretrained(files / name).state_dict() for name in ("whole", "backbone")
    )
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-5, atol=1e-6)


def test_frozen_embeddings_do_not_move(files):
    pretrain(arguments(files, freeze_embeddings=True))
    before, after = (AutoModelForCausalLM.from_pretrained(files / name) for name in ("pruned", "backbone"))
    assert torch.equal(before.get_input_embeddings().weight, after.get_input_embeddings().weight)
    assert not torch.equal(before.model.layers[0].mlp.up_proj.weight, after.model.layers[0].mlp.up_proj.weight)


def test_norm_is_scaled_to_the_least_loss(files):
    model = AutoModelForCausalLM.from_pretrained(files / "pruned")
    with torch.no_grad():
        model.model.norm.weight.mul_(16)  # so that the smallest scale is best
    before = model.model.norm.weight.clone()
    row = {"input_ids": list(range(40, 60)), "labels": list(range(40, 60)), "position_ids": list(range(20))}
    assert calibrate_norm(model, [row]) == min(SCALES)
    torch.testing.assert_close(model.model.norm.weight, before * min(SCALES))


def test_recipe_and_flags(files, capsys):
    recipe = files / "recipe.yaml"
    recipe.write_text("data: [en.jsonl=2]\ntokens: 1.28e+2\nlength: 64\nbatch_rows: 1\nprecision: fp32\n")
    run = ["pretrain", "--config", str(recipe), "--model", str(files / "pruned"), "--data_root", str(files)]
    assert main([*run, "--out", str(files / "backbone"), "--batch_rows", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert record["steps"] == 1
    assert record["data"][0]["weight"] == 2
    recipe.write_text("data: [en.jsonl]\nlenght: 64\n")
    assert main([*run, "--out", str(files / "other")]) == 1
    assert "unknown options: lenght" in capsys.readouterr().err


def test_refusals_leave_nothing_behind(files, capsys):
    (files / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    tiny_target("gemma3").save_pretrained(files / "gemma")
    names = sorted(path.name for path in files.iterdir())
    run = ["pretrain", "--model", str(files / "pruned"), "--out", str(files / "backbone"), "--data_root", str(files)]
    cases = {
        ("--data", "none.jsonl"): "there is no data file",
        ("--data", "cut.jsonl.gz"): "is truncated or damaged",
        ("--data", "en.jsonl", "--held_out", "none.jsonl"): "there is no data file",
        ("--data", "en.jsonl", "--tokens", "0"): "--tokens must be at least 1",
        ("--data", "en.jsonl", "--resume"): "to go on from; run without --resume",
        ("--data", "en.jsonl", "--model", str(files / "gemma")): "is a 'gemma3_text' model",
        ("--data", "en.jsonl", "--precision", "fp8"): "The precision 'fp8' is unknown",
    }
    for options, message in cases.items():
        assert main([*run, *options]) == 1
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in files.iterdir()) == names
    assert parse_sources(["en.jsonl"], str(files))
