"""Stage 2 on a tiny model: it learns, it goes on exactly where it was stopped, and what is refused."""

import json
import math
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from pretrain_line import PHRASE, arguments, make_files
from tiny import tiny_target
from transformers import AutoModelForCausalLM, TrainerCallback

from osprey.cli.main import main
from osprey.train import pretrain as stage
from osprey.train.calibration import SCALES, calibrate_norm
from osprey.train.perplexity import held_out_losses
from osprey.train.pretrain import pretrain
from osprey.train.pretrain_trainer import make_trainer


@pytest.fixture
def files(tmp_path):
    return make_files(tmp_path)


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


class Watch(TrainerCallback):
    """Notes the losses, and interrupts a run after step `stop`."""

    def __init__(self, losses, stop=None):
        self.losses, self.stop = losses, stop

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.losses[state.global_step] = (logs["loss"], logs["grad_norm"], logs["learning_rate"])

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.stop:
            raise KeyboardInterrupt


def watched(monkeypatch, stop=None):
    """Losses by step of the `pretrain` calls from now on."""
    losses = {}

    def build(*args):
        trainer = make_trainer(*args)
        trainer.add_callback(Watch(losses, stop))
        return trainer

    monkeypatch.setattr(stage, "make_trainer", build)
    return losses


@pytest.mark.parametrize("own", [{}, {"softmax_ids": 100}, {"matrix_learning_rate": 0.02}])
def test_resumed_run_equals_an_uninterrupted_one(files, monkeypatch, own):
    settings = {"save_steps": 5, "held_out": ["held_en.jsonl"], "eval_steps": 3, **own}
    expected = watched(monkeypatch)
    whole = pretrain(arguments(files, out=str(files / "whole"), **settings))
    lost = watched(monkeypatch, stop=7)
    with pytest.raises(KeyboardInterrupt):
        pretrain(arguments(files, **settings))
    assert not (files / "backbone").exists()
    resumed = watched(monkeypatch)
    record = pretrain(arguments(files, resume=True, **settings))
    assert sorted(resumed) == list(range(6, 13))
    assert {**lost, **resumed} == expected  # every loss, gradient norm and learning rate, to the last bit
    weights, again = (
        AutoModelForCausalLM.from_pretrained(files / name).state_dict() for name in ("whole", "backbone")
    )
    for name, weight in weights.items():
        assert torch.equal(again[name], weight)
    # The record is that of the whole run, not of its last part.
    assert record["norm_scale"] == whole["norm_scale"] is not None
    for name in ("perplexity_before", "perplexity_during", "perplexity_after", "source_tokens", "tokens", "steps"):
        assert record[name] == whole[name]
    assert [entry["tokens"] for entry in record["perplexity_during"]] == [3 * 128, 6 * 128, 9 * 128]
    assert record["seconds"] > 0


KILLED = """
import os, signal, sys
from transformers import TrainerCallback
from osprey.train import pretrain as stage
from osprey.train import pretrain_trainer
from osprey.cli.main import main

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

make = stage.make_trainer

def make_trainer(*args):
    trainer = make(*args)
    trainer.add_callback(Kill())
    return trainer

stage.make_trainer = make_trainer
main(sys.argv[1:])
"""


def test_killed_run_goes_on_as_if_it_had_not_been(files, monkeypatch):
    flags = ["--tokens", "1536", "--length", "64", "--batch_rows", "2", "--learning_rate", "0.01", "--log_steps", "1"]
    flags += ["--precision", "fp32", "--save_steps", "5", "--model", str(files / "pruned"), "--data", "en.jsonl"]
    flags += ["--data_root", str(files), "--out", str(files / "backbone")]
    killed = subprocess.run([sys.executable, "-c", KILLED, "pretrain", *flags], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert not (files / "backbone").exists()
    expected = watched(monkeypatch)
    pretrain(arguments(files, out=str(files / "whole"), save_steps=5))
    resumed = watched(monkeypatch)
    assert main(["pretrain", *flags, "--resume"]) == 0
    assert resumed == {step: expected[step] for step in range(6, 13)}


def test_only_the_same_recipe_is_resumed_and_it_may_grow(files, monkeypatch, capsys):
    (files / "fr.jsonl").write_text((files / "en.jsonl").read_text())
    pretrain(arguments(files, save_steps=6))
    folder = str(files / "backbone.run" / "checkpoint-12")
    refused = {
        ("matrix_learning_rate", 0.01): "(matrix_learning_rate was None, is 0.01)",
        ("learning_rate", 0.02): f"{folder} belongs to another recipe (learning_rate was 0.01, is 0.02)",
        ("data", ("en.jsonl=2",)): "(data was {'en.jsonl': 1.0}, is {'en.jsonl': 2.0})",
        ("data", ("fr.jsonl",)): "(data was {'en.jsonl': 1.0}, is {'fr.jsonl': 1.0})",
        ("batch_rows", 1): "(step_rows was 2, is 1)",
        ("tokens", 1000): f"{folder} belongs to a run of 1536 tokens: --tokens 1000 is fewer.",
    }
    for (name, value), message in refused.items():
        value = list(value) if isinstance(value, tuple) else value
        with pytest.raises(ValueError) as refusal:
            pretrain(arguments(files, resume=True, overwrite=True, **{name: value}))
        assert message in str(refusal.value)
    # A checkpoint from before there were such settings: their defaults are what it did.
    state_file = files / "backbone.run" / "checkpoint-12" / "data_state.json"
    state = state_file.read_text()
    older = json.loads(state)
    del older["recipe"]["matrix_learning_rate"], older["recipe"]["schedule"]
    state_file.write_text(json.dumps(older))
    with pytest.raises(ValueError, match=r"\(matrix_learning_rate was None, is 0.01; schedule was cosine, is wsd\)"):
        pretrain(arguments(files, resume=True, overwrite=True, matrix_learning_rate=0.01, schedule="wsd"))
    state_file.write_text(state)
    (files / "en.jsonl").write_text((files / "en.jsonl").read_text() + '{"text": "more"}\n')
    with pytest.raises(ValueError, match="was trained on other data"):
        pretrain(arguments(files, resume=True, overwrite=True))
    (files / "en.jsonl").write_text((files / "fr.jsonl").read_text())
    losses = watched(monkeypatch)
    record = pretrain(arguments(files, resume=True, overwrite=True, tokens=128 * 15, log_steps=1, eval_steps=7))
    assert (record["steps"], record["recipe"]["tokens"], sorted(losses)) == (15, 128 * 15, [13, 14, 15])


def test_a_half_written_checkpoint_is_never_picked_up(files, monkeypatch):
    expected = watched(monkeypatch)
    pretrain(arguments(files, out=str(files / "whole"), save_steps=5))
    # No file may grow past 100 kB, as if the disk were full from there on: the optimizer's state does not fit.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = []

    class FillDisk(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 9:
                full.append(True)
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))

    def build(*args):
        trainer = make_trainer(*args)
        trainer.add_callback(FillDisk())
        return trainer

    monkeypatch.setattr(stage, "make_trainer", build)
    try:
        with pytest.raises(
            OSError, match=r"the checkpoint .*checkpoint-10 cannot be written .*: make room and --resume"
        ):
            pretrain(arguments(files, save_steps=5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full
    assert [path.name for path in (files / "backbone.run").iterdir()] == ["checkpoint-5"]
    # A process that dies while it writes leaves the folder without its last file.
    shutil.copytree(files / "backbone.run" / "checkpoint-5", files / "backbone.run" / "checkpoint-11")
    (files / "backbone.run" / "checkpoint-11" / "data_state.json").unlink()
    resumed = watched(monkeypatch)
    pretrain(arguments(files, save_steps=5, resume=True))
    assert resumed == {step: expected[step] for step in range(6, 13)}


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedules(files, monkeypatch, schedule):
    losses = watched(monkeypatch)
    decay = {"decay": 0.5} if schedule == "wsd" else {}
    pretrain(arguments(files, tokens=128 * 20, schedule=schedule, warmup=0.2, min_learning_rate_ratio=0.1, **decay))
    rates = [losses[step][2] for step in range(1, 21)]
    for step in range(20):
        if step < 4:
            expected = step / 4 if schedule == "cosine" else 0.1 + 0.9 * step / 4
        else:
            start = 4 if schedule == "cosine" else 10
            turn = max(0, (step - start) / (20 - start))
            expected = 0.1 + 0.9 * (1 + math.cos(math.pi * turn)) / 2
        assert rates[step] == pytest.approx(0.01 * expected, rel=1e-6), step


def test_restoring_from_the_source_learns_its_distribution(files):
    """With the whole loss on the divergence, a copy of the source has nothing to learn, another model comes nearer."""
    unchanged = {"calibrate_norm": False, "distill_share": 1.0, "weight_decay": 0.0}
    record = pretrain(arguments(files, distill_from=str(files / "pruned"), **unchanged))
    before, after = (AutoModelForCausalLM.from_pretrained(files / name) for name in ("pruned", "backbone"))
    for name, weight in before.state_dict().items():
        torch.testing.assert_close(after.state_dict()[name], weight, rtol=1e-3, atol=1e-3)
    assert record["recipe"]["distill_from"] == "pruned"
    teacher = tiny_target("llama", vocab_size=VOCABULARY, seed=5)
    teacher.save_pretrained(files / "teacher")
    bytes_tokenizer().save_pretrained(files / "teacher")
    unchanged["out"] = str(files / "taught")
    pretrain(arguments(files, distill_from=str(files / "teacher"), tokens=128 * 60, **unchanged))
    student = AutoModelForCausalLM.from_pretrained(files / "taught")
    ids = torch.tensor([bytes_tokenizer()(PHRASE)["input_ids"]])
    with torch.no_grad():
        lesson, old, new = (model(ids).logits.log_softmax(-1) for model in (teacher, before, student))
    untaught, taught = (
        torch.nn.functional.kl_div(ours, lesson, reduction="sum", log_target=True) for ours in (old, new)
    )
    assert taught < 0.5 * untaught


def test_logs_for_tensorboard(files):
    event_file = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pretrain(arguments(files, report_to="tensorboard", held_out=["held_en.jsonl"], eval_steps=5))
    (events,) = (files / "backbone.run").rglob("events.out.tfevents*")
    scalars = event_file.EventAccumulator(str(events.parent)).Reload()
    assert len(scalars.Scalars("train/loss")) == 12
    assert [point.step for point in scalars.Scalars("eval/perplexity_en")] == [5, 10]


def test_bar_on_a_terminal_has_speed_and_time_left(files, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    pretrain(arguments(files))
    bar = [part for part in capsys.readouterr().err.split("\r") if "tokens/s" in part][-1]
    assert "1.54k/1.54k" in bar
    assert "loss=" in bar


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
