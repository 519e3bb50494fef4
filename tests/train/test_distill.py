"""Stage 4 offline: a run learns, resumes bitwise, and refuses what does not belong together."""

import json
import shutil

import pytest
import torch
from bf16_machine import pretend_bf16
from bytes_tokenizer import VOCABULARY as BYTES
from bytes_tokenizer import bytes_tokenizer
from distill_line import TEMPLATE, flags, make_line, prepare
from tiny import tiny_drafter, tiny_target
from transformers import AutoModelForCausalLM, TrainerState

from osprey.cli.distill import main
from osprey.modeling import OspreyDrafter, record_acceptance
from osprey.train.callbacks import StopAtNan
from osprey.train.distill import load_drafter, recipe
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.distillation_trainer import OspreyDistillationTrainer
from osprey.train.examples import user_prompt_ids
from osprey.train.feature_data import FeatureDataset, RowSubset


@pytest.fixture
def line(tmp_path):
    return make_line(tmp_path)


def test_training_lowers_the_held_out_loss(line):
    command = flags(
        line,
        "out",
        "a",
        max_steps=40,
        learning_rate=0.02,
        eval_steps=40,
        eval_on_start=True,
        logging_steps=20,
        save_steps=40,
    )
    assert main(command) == 0
    history = json.loads((line / "a" / "checkpoint-40" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert len(losses) == 2
    assert losses[-1] < 0.9 * losses[0]


def test_simulated_mal_is_the_generators(line):
    """On responses that the target wrote greedily: the same rounds as in assisted generation itself."""
    target = AutoModelForCausalLM.from_pretrained(line / "target")
    drafter = load_drafter(str(line / "drafter"))
    tokenizer = bytes_tokenizer(TEMPLATE)
    prompts = [torch.tensor([user_prompt_ids(tokenizer, f"ask {number}")]) for number in range(8)]
    with open(line / "greedy.jsonl", "w") as file:
        for number, prompt in enumerate(prompts):
            ids = target.generate(prompt, do_sample=False, max_new_tokens=24)[0, prompt.shape[1] :].tolist()
            row = {"id": f"a-{number}", "prompt": f"ask {number}", "response": "", "response_ids": ids}
            file.write(json.dumps(row | {"temperature": 0.0}) + "\n")
    prepare(line, "greedy.jsonl", "greedy")
    rows = RowSubset(FeatureDataset([line / "greedy"]), list(range(8)))
    config = OspreyDistillationConfig(
        output_dir=str(line / "x"),
        precision="fp32",
        unroll_steps=3,
        learning_rate=0.02,
        max_steps=40,
        save_steps=100,
        eval_strategy="no",
        disable_tqdm=True,
    )
    trainer = OspreyDistillationTrainer(drafter, config, rows, rows)
    trainer.train()
    found = trainer.evaluate()["eval_mal"]
    drafter.eval()
    drafter.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    with record_acceptance() as calls:
        for prompt in prompts:
            target.generate(prompt, do_sample=False, max_new_tokens=24, assistant_model=drafter)
    rounds = [pair for call in calls for pair in call.rounds]
    assert found == pytest.approx(sum(accepted + 1 for _, accepted in rounds) / len(rounds), abs=1e-4)
    assert found > 1.3  # the training above makes drafts right


def test_training_resumes_where_it_stopped(line):
    assert main(flags(line, "whole", "a", max_steps=9)) == 0
    record = json.loads((line / "whole" / "training.json").read_text())["stages"][-1]
    assert record["steps"] == 9
    assert record["epochs"] > 1.5
    # Stopped behind the checkpoint of step 6, in the second epoch, as by a kill: the same steps follow.
    (line / "b").mkdir()
    (line / "a" / "checkpoint-6").rename(line / "b" / "checkpoint-6")
    assert main(flags(line, "resumed", "b", max_steps=9)) == 0
    whole = OspreyDrafter.from_pretrained(line / "whole").state_dict()
    resumed = OspreyDrafter.from_pretrained(line / "resumed").state_dict()
    start = OspreyDrafter.from_pretrained(line / "drafter").state_dict()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    assert torch.equal(start["embed_tokens.weight"], whole["embed_tokens.weight"])  # frozen
    assert not torch.equal(start["fc.weight"], whole["fc.weight"])


def test_a_run_that_has_taken_all_its_steps_takes_no_more(line, monkeypatch):
    """As after a failure between the last checkpoint and the folder: the same drafter, without training."""
    assert main(flags(line, "first", "run")) == 0
    monkeypatch.setattr(OspreyDistillationTrainer, "training_step", lambda *_: pytest.fail("one more step"))
    assert main(flags(line, "again", "run")) == 0
    first = OspreyDrafter.from_pretrained(line / "first").state_dict()
    for name, tensor in OspreyDrafter.from_pretrained(line / "again").state_dict().items():
        assert torch.equal(tensor, first[name]), name
    records = [json.loads((line / out / "training.json").read_text())["stages"][-1] for out in ("first", "again")]
    assert [record["steps"] for record in records] == [6, 6]
    held_out = [record["held_out"]["eval_loss"] for record in records]
    assert held_out[0] == held_out[1]


@pytest.mark.parametrize("state", [None, '{"global_step": 6, "epo'])
def test_a_half_written_checkpoint_is_passed_over(line, state):
    assert main(flags(line, "whole", "a")) == 0
    shutil.copytree(line / "a", line / "b")
    (line / "b" / "checkpoint-6" / "trainer_state.json").unlink()
    (line / "b" / "checkpoint-6" / "optimizer.pt").unlink()
    if state is not None:
        (line / "b" / "checkpoint-6" / "trainer_state.json").write_text(state)
    assert main(flags(line, "resumed", "b")) == 0  # from step 3 on
    whole = OspreyDrafter.from_pretrained(line / "whole").state_dict()
    for name, tensor in OspreyDrafter.from_pretrained(line / "resumed").state_dict().items():
        assert torch.equal(tensor, whole[name]), name


def test_rows_of_unknown_temperature_are_not_held_out(line, caplog):
    """Who does not say how a response was written may have sampled it: nothing can be measured on it."""
    rows = [json.loads(text) for text in (line / "responses.jsonl").read_text().splitlines()]
    for row in rows:
        del row["temperature"]
    (line / "unknown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(line, "unknown.jsonl", "unknown")
    with caplog.at_level("INFO", logger="osprey"):
        assert main(flags(line, "out", "run", max_steps=1, features=line / "unknown")) == 0
    assert "No held-out row was written greedily" in caplog.text
    record = json.loads((line / "out" / "training.json").read_text())["stages"][-1]
    assert record["rows"]["held_out"] == 0 < record["rows"]["train"]


def test_recipe(line, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_steps: 1\nlearning_rate: 0.01\nunroll_steps: 2\n")
    command = flags(line, "out", "c")
    unset = command.index("--max_steps")
    assert main([*command[:unset], *command[unset + 2 :], "--config", str(recipe)]) == 0
    record = json.loads((line / "out" / "training.json").read_text())["stages"][-1]
    assert record["steps"] == 1
    assert record["recipe"]["learning_rate"] == 0.01
    assert record["recipe"]["unroll_steps"] == 3  # the flag goes before the recipe
    with pytest.raises(FileExistsError, match="exists already"):
        main(command)


def test_standard_output_is_the_record_alone(line, capsys):
    assert main([*flags(line, "out", "c", max_steps=2, disable_tqdm=False), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2


def test_a_run_folder_belongs_to_one_run(line, capsys):
    settings = {"max_steps": 3, "eval_strategy": "no"}
    assert main(flags(line, "out", "run", **settings)) == 0
    with pytest.raises(ValueError, match=r"another recipe \(learning_rate\): choose another folder"):
        main(flags(line, "other", "run", **settings, learning_rate=0.5))
    with pytest.raises(ValueError, match=r"another recipe \(adam_epsilon, data_seed, max_length\): choose"):
        main(flags(line, "other", "run", **settings, max_length=99, data_seed=1, adam_epsilon=1e-3))
    prepare(line, "responses.jsonl", "short", max_length=12)
    with pytest.raises(ValueError, match="another data: choose"):
        main(flags(line, "other", "run", **settings, features=line / "short"))
    (line / "out").rename(line / "drafter-2")
    command = flags(line, "other", "run", **settings)
    with pytest.raises(ValueError, match="another drafter: choose"):
        main([str(line / "drafter-2"), *command[1:]])
    run = json.loads((line / "run" / "run.json").read_text())
    for name in ("max_length", "data_seed", "adam_epsilon", "lr_scheduler_kwargs"):  # recorded only since
        del run["recipe"][name]
    (line / "run" / "run.json").write_text(json.dumps(run))
    assert main([*flags(line, "older", "run", **settings)]) == 0
    (line / "run" / "run.json").unlink()  # as before there were such files
    assert main(command) == 0


def test_what_auto_meant_is_recorded(tmp_path, monkeypatch):
    pretend_bf16(monkeypatch, False)
    auto, fp32, bf16 = (
        recipe(OspreyDistillationConfig(output_dir=str(tmp_path), precision=precision, use_cpu=True))
        for precision in ("auto", "fp32", "bf16")
    )
    assert auto == fp32 != bf16


def test_other_targets_features_are_refused(line):
    """Another target of the same shape: its head tells it apart."""
    assert main(flags(line, "out", "run", max_steps=1)) == 0
    tiny_target(seed=5, vocab_size=BYTES, eos_token_id=2, bos_token_id=1).save_pretrained(line / "target")
    prepare(line, "responses.jsonl", "others")
    with pytest.raises(ValueError, match=r"another target \(its head differs\)"):
        FeatureDataset([line / "features", line / "others"])
    command = flags(line, "new", "run-2", features=line / "others")
    with pytest.raises(ValueError, match="distilled from another target"):
        main([str(line / "out"), *command[1:]])
    index = json.loads((line / "features" / "index.json").read_text())
    del index["settings"]["head_sha256"]  # as before there were such hashes: the stored head is hashed
    (line / "features" / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"another target \(its head differs\)"):
        FeatureDataset([line / "features", line / "others"])


def test_damaged_features_are_refused(line):
    shard = next((line / "features").glob("features-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(OSError, match="is damaged"):
        main(flags(line, "out", "run"))


def test_refusals(line):
    cases = {
        "not a feature folder": {"features": line / "drafter"},
        "unroll_steps must be at least 1": {"unroll_steps": 0},
        "temperature is 0.0, but must be more than 0 and finite": {"temperature": 0},
        "--learning_rate is nan, but must be more than 0": {"learning_rate": "nan"},
        "--context_learning_rate is -1.0": {"context_learning_rate": -1},
        "--per_device_train_batch_size is 0, but must be at least 1": {"per_device_train_batch_size": 0},
        "--max_steps is -5 and --num_train_epochs 3.0": {"max_steps": -5},
        "--max_steps is -1 and --num_train_epochs 0.0": {"max_steps": -1, "num_train_epochs": 0},
        "--packing has no effect": {"packing": True},
        "--optim adafactor has no effect beside Muon": {"optim": "adafactor"},
        "--other_learning_rate has no effect without Muon": {"muon": False, "other_learning_rate": 0.1},
        "--context_learning_rate has no effect without Muon": {"muon": False, "context_learning_rate": 0.1},
        "use --precision bf16": {"bf16": True},
        "lmbda and seq_kd need the target": {"lmbda": 0.5},
        "there is no option --unrol_steps, did you mean --unroll_steps": {"unrol_steps": 2},
        "unroll_steps.*: invalid int value": {"unroll_steps": "two"},
    }
    for message, changes in cases.items():
        with pytest.raises(ValueError, match=message):
            main(flags(line, "out", "d", **changes))
    with pytest.raises(ValueError, match="either --features .* or --target"):
        main([str(line / "drafter"), "--out", str(line / "out")])
    with pytest.raises(ValueError, match="unexpected argument 'more'"):
        main([str(line / "drafter"), "more"])
    other = tiny_drafter(tiny_target(vocab_size=BYTES), target_layer_ids=[0, 2, 3])
    other.save_pretrained(line / "drafter")
    with pytest.raises(ValueError, match="target_layer_ids"):
        main(flags(line, "other", "d"))
    wider = tiny_drafter(tiny_target(vocab_size=BYTES, hidden_size=64))
    wider.save_pretrained(line / "drafter")
    with pytest.raises(ValueError, match="features have target_hidden_size 32 but the drafter has 64"):
        main(flags(line, "other", "d", whiten_context=True))
    assert not list(line.glob(".*"))


@pytest.mark.parametrize("settings", [{"muon": True}, {"muon": False, "optim": "adamw_torch"}])
def test_weight_decay_shrinks_the_matrices_and_spares_the_norms(line, settings):
    rows = RowSubset(FeatureDataset([line / "features"]), list(range(8)))
    norms = []
    for decay in (0.0, 0.5):
        drafter = load_drafter(str(line / "drafter"))
        config = OspreyDistillationConfig(
            output_dir=str(line / "x"),
            precision="fp32",
            max_steps=1,
            weight_decay=decay,
            learning_rate=0.1,
            eval_strategy="no",
            save_strategy="no",
            warmup_steps=0,
            disable_tqdm=True,
            **settings,
        )
        OspreyDistillationTrainer(drafter, config, rows).train()
        norms.append((drafter.fc.weight.detach().clone(), drafter.norm.weight.detach().clone()))
    start = load_drafter(str(line / "drafter")).fc.weight.detach()
    torch.testing.assert_close(norms[0][0] - norms[1][0], 0.1 * 0.5 * start)
    assert torch.equal(norms[0][1], norms[1][1])


def test_a_loss_that_is_not_finite_stops_the_run(line, monkeypatch):
    """It says where, and leaves the last good checkpoint, from which the run goes on."""
    draft, calls = OspreyDistillationTrainer.draft, []

    def spoilt(trainer, *arguments, **kwargs):
        results = draft(trainer, *arguments, **kwargs)
        calls.append(1)
        if len(calls) == 5:
            results.loss = results.loss * float("nan")
        return results

    monkeypatch.setattr(OspreyDistillationTrainer, "draft", spoilt)
    with pytest.raises(ValueError, match=r"loss of step 5 is nan, in the batch of the rows p-\d+, p-\d+"):
        main(flags(line, "out", "run", eval_strategy="no"))
    assert not (line / "out").exists()
    assert [path.name for path in (line / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    monkeypatch.undo()
    assert main(flags(line, "out", "run", eval_strategy="no")) == 0
    assert main(flags(line, "whole", "other", eval_strategy="no")) == 0
    whole = OspreyDrafter.from_pretrained(line / "whole").state_dict()
    for name, tensor in OspreyDrafter.from_pretrained(line / "out").state_dict().items():
        assert torch.equal(tensor, whole[name]), name


def test_gradients_that_are_not_finite_stop_before_the_step(line):
    callback = StopAtNan()
    drafter = load_drafter(str(line / "drafter"))
    drafter.fc.weight.grad = torch.full_like(drafter.fc.weight, float("inf"))
    state, config = TrainerState(global_step=6), OspreyDistillationConfig(output_dir=str(line / "x"))
    with pytest.raises(ValueError, match="gradients of step 7 are not finite"):
        callback.on_pre_optimizer_step(config, state, None, model=drafter)
