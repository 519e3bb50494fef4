"""Stage 4 online: the target in the step gives what prepared features give, and completions are written as asked."""

import json

import pytest
import torch
from bytes_tokenizer import VOCABULARY as BYTES
from bytes_tokenizer import bytes_tokenizer
from distill_line import TEMPLATE, flags, make_line, prepare
from tiny import DraftLog, tiny_drafter, tiny_prompt, tiny_target
from transformers import AutoModelForCausalLM, GenerationConfig

from osprey.cli.distill import main
from osprey.modeling import OspreyCandidateGenerator, OspreyDrafter
from osprey.train import distillation_trainer as module
from osprey.train.completions import drafter_completion, target_completion
from osprey.train.distill import load_drafter
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.distillation_trainer import OspreyDistillationTrainer
from osprey.train.examples import tokenize_row
from osprey.train.feature_data import ExampleDataset, FeatureDataset, RowSubset, collate
from osprey.train.jsonl import read_rows


@pytest.fixture
def line(tmp_path):
    return make_line(tmp_path)


def online(line, out, run, **changes):
    """A command line with the target in the step instead of features."""
    command = flags(line, out, run, **changes)
    place = command.index("--features")
    return [*command[:place], "--target", str(line / "target"), *command[place + 2 :]]


def test_offline_equals_online(line):
    """Losses and gradients of a batch, with features that are stored exactly."""
    prepare(line, "responses.jsonl", "exact", dtype="float32")
    offline = FeatureDataset([line / "exact"])
    tokenizer = bytes_tokenizer(TEMPLATE)
    examples = [tokenize_row(tokenizer, row, 99)[0] for row in read_rows(line / "responses.jsonl")]
    online = ExampleDataset(examples)
    target = AutoModelForCausalLM.from_pretrained(line / "target")
    order = [[row["id"] for row in dataset.rows] for dataset in (offline, online)]
    assert sorted(order[0]) == sorted(order[1])
    results = []
    for dataset, teacher in ((offline, None), (online, target)):
        drafter = load_drafter(str(line / "drafter"))
        config = OspreyDistillationConfig(output_dir=str(line / "x"), precision="fp32", eval_strategy="no")
        rows = RowSubset(dataset, [[row["id"] for row in dataset.rows].index(f"p-{number}") for number in range(6)])
        trainer = OspreyDistillationTrainer(drafter, config, rows, rows, teacher)
        loss = trainer.compute_loss(drafter, collate([rows[i] for i in range(6)]))
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])
        metrics = trainer.evaluate()
        metrics.pop("eval_runtime")
        results.append((loss, gradients, metrics))
    (loss, gradients, metrics), (other_loss, other_gradients, other_metrics) = results
    torch.testing.assert_close(loss, other_loss)
    torch.testing.assert_close(gradients, other_gradients, rtol=1e-3, atol=1e-4)
    assert metrics == pytest.approx(other_metrics, abs=2e-4)


@pytest.fixture
def pair():
    target = tiny_target(eos_token_id=None)
    drafter = tiny_drafter(target)
    drafter.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    return target, drafter


def settings(**changes):
    # So cold that sampling is taking the most likely token.
    return GenerationConfig(**{"do_sample": True, "temperature": 1e-4, "top_k": 0, "max_new_tokens": 13} | changes)


def test_the_target_writes_its_own_text(pair):
    target, drafter = pair
    expected = target.generate(tiny_prompt(), do_sample=False, max_new_tokens=13)
    assert torch.equal(target_completion(target, drafter, tiny_prompt(), settings()), expected)


@torch.no_grad()
def test_the_drafter_writes_drafts_that_nobody_verifies(pair, monkeypatch):
    target, drafter = pair
    log = DraftLog().start(monkeypatch)
    prompt = tiny_prompt()
    ids = drafter_completion(target, drafter, prompt, settings())
    assert ids.shape[1] == prompt.shape[1] + 13
    log.assert_follows_definition(target, drafter)
    drafted = {length.shape[1]: int(logits.argmax()) for _, length, logits in log.steps}
    logits = target(ids).logits[0]
    for place in range(prompt.shape[1], ids.shape[1]):
        own = place in drafted
        assert own == ((place - prompt.shape[1]) % 4 != 0)  # one of the target's, then three of the drafter's
        assert ids[0, place] == (drafted[place] if own else logits[place - 1].argmax())
    end = int(ids[0, prompt.shape[1] + 5])
    ended = drafter_completion(target, drafter, prompt, settings(eos_token_id=end))
    first = prompt.shape[1] + ids[0, prompt.shape[1] :].tolist().index(end)
    assert torch.equal(ended, ids[:, : first + 1])


def test_the_drafters_own_text_has_no_copies_in_it(pair, monkeypatch):
    """A text that repeats itself, from which the generator would copy if it were let."""
    target, drafter = pair
    drafter.generation_config.lookup_num_tokens = 8
    draft, seen = OspreyCandidateGenerator.get_candidates, []
    monkeypatch.setattr(
        OspreyCandidateGenerator,
        "get_candidates",
        lambda self, *args, **kwargs: seen.append(self.lookup_num_tokens) or draft(self, *args, **kwargs),
    )
    drafter_completion(target, drafter, tiny_prompt(6).repeat(1, 3), settings())
    assert set(seen) == {0}


def test_completions_are_written_with_the_head_as_it_is_now(line, monkeypatch):
    """A tied shortlist whose embedding is trained: the head is a copy, which every step leaves behind."""
    write, stale = module.drafter_completion, []

    def looking(target, drafter, *args):
        stale.append(not torch.equal(drafter.lm_head.weight, drafter.embed_tokens.weight[drafter.draft_ids]))
        return write(target, drafter, *args)

    monkeypatch.setattr(module, "drafter_completion", looking)
    changes = {"max_steps": 3, "lmbda": 1.0, "max_new_tokens": 4, "eval_strategy": "no", "other_learning_rate": 0.1}
    command = online(line, "out", "run", data=line / "responses.jsonl", freeze_embeddings=False, **changes)
    assert main(command) == 0
    start, end = (OspreyDrafter.from_pretrained(line / name).embed_tokens.weight for name in ("drafter", "out"))
    assert not torch.equal(start, end)
    assert len(stale) == 12 and not any(stale)


@pytest.mark.parametrize(
    ("changes", "drafters", "targets"),
    [({}, 0, 0), ({"seq_kd": True}, 0, 8), ({"lmbda": 1.0}, 8, 0), ({"lmbda": 1.0, "seq_kd": True}, 8, 0)],
)
def test_who_writes(line, monkeypatch, changes, drafters, targets):
    """As TRL: the student's share is `lmbda`, and `seq_kd` lets the teacher write the others; 2 steps of 4 rows."""
    written = []
    for name in ("drafter_completion", "target_completion"):
        write = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, write=write, name=name: written.append(name) or write(*args))
    command = online(line, "out", "run", max_steps=2, data=line / "responses.jsonl", max_new_tokens=6, **changes)
    assert main(command) == 0
    assert [written.count("drafter_completion"), written.count("target_completion")] == [drafters, targets]


def test_prompts_alone_are_answered_while_training(line):
    prompts = [{"id": f"q-{number}", "language": "en", "prompt": f"ask {number}"} for number in range(24)]
    (line / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    data = {"data": line / "prompts.jsonl", "max_new_tokens": 8}
    with pytest.raises(ValueError, match="lacks a text `prompt` or `response`"):
        main(online(line, "out", "run", **data))
    assert main(online(line, "out", "run", max_steps=2, seq_kd=True, **data)) == 0
    record = json.loads((line / "out" / "training.json").read_text())["stages"][-1]
    assert record["mode"] == "online"
    assert record["rows"]["held_out"] > 0
    assert record["held_out"]["eval_mal"] >= 1  # measured on greedy answers of the target


def test_an_online_run_resumes_bitwise(line):
    settings = {"max_steps": 4, "save_steps": 2, "lmbda": 0.5, "seq_kd": True, "max_new_tokens": 6, "beta": 0.5}
    settings |= {"data": line / "responses.jsonl", "eval_strategy": "no"}
    assert main(online(line, "whole", "a", **settings)) == 0
    (line / "b").mkdir()
    (line / "a" / "checkpoint-2").rename(line / "b" / "checkpoint-2")
    assert main(online(line, "resumed", "b", **settings)) == 0
    resumed = OspreyDrafter.from_pretrained(line / "resumed").state_dict()
    for name, tensor in OspreyDrafter.from_pretrained(line / "whole").state_dict().items():
        assert torch.equal(tensor, resumed[name]), name


def test_refusals(line):
    data = {"data": line / "responses.jsonl"}
    with pytest.raises(ValueError, match="lmbda must be in the range"):
        main(online(line, "out", "run", lmbda=1.5, **data))
    tiny_target(vocab_size=BYTES + 1, eos_token_id=2).save_pretrained(line / "target")
    with pytest.raises(ValueError, match="vocabulary size"):
        main(online(line, "out", "run", **data))
    bytes_tokenizer().save_pretrained(line / "target")
    (line / "target" / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="has no chat template"):
        main(online(line, "out", "run", **data))
    path = line / "drafter" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target": "t", "target_tokenizer_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="made for the tokenizer of t, but one with another vocabulary was given"):
        main(online(line, "out", "run", **data))
