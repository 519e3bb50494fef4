"""Stage 2 says no in one sentence, before it begins: to settings, to files, to another run's checkpoints."""

import json

import pytest
import torch
from bf16_machine import pretend_bf16
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from pretrain_line import arguments, make_files
from tiny import tiny_target
from transformers import AutoModelForCausalLM, TrainerCallback

from osprey.cli.main import main
from osprey.train import pretrain as stage
from osprey.train.data import parse_sources
from osprey.train.pretrain import pretrain
from osprey.train.pretrain_trainer import WholeCheckpoints, make_trainer


@pytest.fixture
def files(tmp_path):
    return make_files(tmp_path)


def test_refusals_leave_nothing_behind(files, capsys):
    (files / "cut.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00")
    (files / "latin.txt").write_bytes(b"caf\xe9")
    tiny_target("gemma3").save_pretrained(files / "gemma")
    tiny_target(vocab_size=300).save_pretrained(files / "larger")
    bytes_tokenizer().save_pretrained(files / "larger")
    (files / "b").mkdir()
    (files / "b" / "en.jsonl").write_text((files / "held_en.jsonl").read_text())
    names = sorted(path.name for path in files.iterdir())
    run = ["pretrain", "--model", str(files / "pruned"), "--out", str(files / "backbone"), "--data_root", str(files)]
    cases = {
        ("--data", "none.jsonl"): "there is no data file",
        ("--data", "cut.jsonl.gz"): "is truncated or damaged",
        ("--data", "en.jsonl", "--held_out", "none.jsonl"): "there is no data file",
        ("--data", "en.jsonl", "--tokens", "0"): "--tokens 0.0 must be at least 1 and finite.",
        ("--data", "en.jsonl", "--resume"): "to go on from; run without --resume",
        ("--data", "en.jsonl", "--model", str(files / "gemma")): "is a 'gemma3_text' model",
        ("--data", "en.jsonl", "--precision", "fp8"): "The precision 'fp8' is unknown",
        ("--data", "en.jsonl", "--distill_share", "1.5"): "--distill_share 1.5 must be more than 0 and at most 1.",
        ("--data", "en.jsonl", "--distill_from", str(files / "larger")): "has 300 tokens in its vocabulary, the model",
        ("--data", "en.jsonl", "--warmup", "0.9", "--schedule", "wsd"): "together they must not exceed 1.",
        ("--data", "latin.txt"): "not UTF-8",
        ("--data", "en.jsonl", "--tokens", "inf"): "--tokens inf must be at least 1 and finite.",
        ("--data", "en.jsonl", "--batch_rows", "0"): "--batch_rows 0 must be at least 1",
        ("--data", "en.jsonl", "--accumulation", "0"): "--accumulation 0 must be at least 1",
        ("--data", "en.jsonl", "--save_steps", "0"): "--save_steps 0 must be at least 1",
        ("--data", "en.jsonl", "--eval_steps", "0"): "--eval_steps 0 must be at least 1",
        ("--data", "en.jsonl", "--eval_tokens", "0"): "--eval_tokens 0 must be at least 1",
        ("--data", "en.jsonl", "--warmup", "-0.1"): "--warmup -0.1 is a share of the steps",
        ("--data", "en.jsonl", "--decay", "0.1"): "--decay 0.1 means nothing to --schedule cosine",
        ("--data", "en.jsonl", "b/en.jsonl"): "--data has two entries that records call 'en.jsonl'",
        ("--data", "en.jsonl", "--held_out", "held_en.jsonl", "b/en.jsonl"): "--held_out has two entries that records",
        ("--data", "en.jsonl", "--held_out", "b/../en.jsonl"): "is in --data and in --held_out",
    }
    for options, message in cases.items():
        assert main([*run, *options]) == 1
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in files.iterdir()) == names
    assert parse_sources(["en.jsonl"], str(files))
    assert main([*run, "--data", "en.jsonl", "--max_passes", "1", "--tokens", "9e5"]) == 1
    assert "the data en.jsonl ends early: 1 passes gave" in capsys.readouterr().err
    assert not (files / "backbone").exists()


def test_a_finished_run_takes_no_step_more(files):
    done = pretrain(arguments(files, held_out=["held_en.jsonl"]))
    (files / "backbone").rename(files / "done")
    again = pretrain(arguments(files, held_out=["held_en.jsonl"], resume=True))
    assert (done["steps"], again["steps"]) == (12, 12)
    assert again["perplexity_after"] == done["perplexity_after"]
    weights, expected = (
        AutoModelForCausalLM.from_pretrained(files / name).state_dict() for name in ("backbone", "done")
    )
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight)


def test_a_run_is_of_one_model_and_is_not_overwritten_by_chance(files):
    pretrain(arguments(files, distill_from=str(files / "pruned")))
    (files / "backbone").rename(files / "done")
    with pytest.raises(FileExistsError, match="backbone.run holds checkpoints of a run: give --resume .* or --overwr"):
        pretrain(arguments(files, distill_from=str(files / "pruned")))
    (files / "other").mkdir()
    tiny_target(vocab_size=VOCABULARY, num_hidden_layers=2, seed=7).save_pretrained(files / "other" / "pruned")
    bytes_tokenizer().save_pretrained(files / "other" / "pruned")
    for name in ("model", "distill_from"):
        models = {"distill_from": str(files / "pruned")} | {name: str(files / "other" / "pruned")}
        with pytest.raises(ValueError, match=rf"belongs to another recipe \({name}_sha256 was [0-9a-f]{{64}}, is"):
            pretrain(arguments(files, resume=True, **models))
    pretrain(arguments(files, overwrite=True, tokens=128))
    assert [path.name for path in (files / "backbone.run").iterdir()] == ["checkpoint-1"]


def test_what_auto_meant_is_kept(files, monkeypatch):
    pretend_bf16(monkeypatch, False)
    pretrain(arguments(files, tokens=128, precision="auto"))
    pretend_bf16(monkeypatch, True)
    again = {"tokens": 128, "resume": True, "overwrite": True}
    with pytest.raises(ValueError, match=r"another recipe \(precision was fp32, is bf16\): give the same settings"):
        pretrain(arguments(files, precision="auto", **again))
    pretrain(arguments(files, precision="fp32", **again))
    path = files / "backbone.run" / "checkpoint-1" / "data_state.json"
    state = json.loads(path.read_text())
    state["recipe"]["precision"] = "auto"  # as earlier versions kept it
    path.write_text(json.dumps(state))
    pretrain(arguments(files, precision="auto", **again))


def test_overwriting_clears_checkpoints_alone(files):
    """What else lies in OUT.run is not the run's; a model that is read from there is not cleared away."""
    pretrain(arguments(files, tokens=128))
    (files / "backbone.run" / "notes.txt").write_text("mine")
    (files / "backbone.run" / "checkpoint-9").mkdir()
    inside = {"model": str(files / "backbone.run" / "checkpoint-1"), "overwrite": True}
    with pytest.raises(ValueError, match="backbone.run/checkpoint-1, is the input itself, which would be lost"):
        pretrain(arguments(files, **inside))
    (files / "backbone.run" / "fr.jsonl").write_text((files / "en.jsonl").read_text())  # is read, and not cleared
    pretrain(arguments(files, overwrite=True, tokens=128, data=["backbone.run/fr.jsonl"]))
    left = sorted(path.name for path in (files / "backbone.run").iterdir())
    assert left == ["checkpoint-1", "fr.jsonl", "notes.txt"]


def test_a_sampled_softmax_keeps_the_shape_of_its_batches(files):
    pretrain(arguments(files, softmax_ids=100))
    message = r"\(accumulation was 1, is 2; batch_rows was 2, is 1\)"
    with pytest.raises(ValueError, match=message):
        pretrain(arguments(files, softmax_ids=100, batch_rows=1, accumulation=2, resume=True, overwrite=True))


def test_counting_the_frequent_ids_is_no_pass_over_the_data(files):
    """The data have about 4,500 tokens: far fewer than are counted, and enough for one pass of the run."""
    assert pretrain(arguments(files, softmax_ids=100, max_passes=1))["steps"] == 12


def test_gradients_that_are_not_finite_stop_the_run(files, monkeypatch):
    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 3:
                with torch.no_grad():
                    model.model.norm.weight.fill_(float("nan"))

    def build(*args):
        trainer = make_trainer(*args)
        trainer.add_callback(Spoil())
        return trainer

    monkeypatch.setattr(stage, "make_trainer", build)
    with pytest.raises(ValueError, match="gradients of step 4 are not finite: start again with --overwrite"):
        pretrain(arguments(files))
    assert not (files / "backbone").exists()


def test_muon_is_refused_where_matrices_are_shared_out(files, monkeypatch):
    create = WholeCheckpoints.create_accelerator_and_postprocess

    def sharded(self):
        create(self)
        self.is_fsdp_enabled = True  # as accelerate sets it on cards

    monkeypatch.setattr(WholeCheckpoints, "create_accelerator_and_postprocess", sharded)
    with pytest.raises(ValueError, match="FSDP shares them out: leave --matrix_learning_rate out"):
        pretrain(arguments(files, matrix_learning_rate=0.01))
