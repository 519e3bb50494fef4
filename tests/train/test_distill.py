"""The unrolled training forward is what drafting computes, and the loss is what its formula says."""

import json
import math

import pytest
import torch
from bytes_tokenizer import VOCABULARY as BYTES
from bytes_tokenizer import bytes_tokenizer
from tiny import DraftLog, oracle, tiny_drafter, tiny_prompt, tiny_target
from transformers.cache_utils import DynamicCache

from osprey.cli.distill import main
from osprey.modeling import OspreyDrafter
from osprey.train.features import FeatureArguments, prepare_features
from osprey.train.losses import normalised_head, normalised_teacher, soft_cross_entropy
from osprey.train.unroll import Chains, accepted_lengths, find_chains, unroll, walk_rounds

STEPS = 4
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


def target_taps(target, drafter, ids):
    states = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)


def draft_by_hand(drafter, ids, taps, anchor, steps):
    """One chain as in generation: true contexts up to the anchor, then token by token on the drafter's own output."""
    cache = DynamicCache(config=drafter.config)
    context = drafter.project_taps(taps[:, : anchor + 1])
    hidden = drafter.run_layers(ids[:, 1 : anchor + 2], context, cache=cache)
    outputs = [hidden[:, -1]]
    for step in range(1, steps):
        token, position = ids[:, anchor + 1 + step, None], torch.tensor([[anchor + step]])
        hidden = drafter.run_layers(token, outputs[-1][:, None], position_ids=position, cache=cache)
        outputs.append(hidden[:, -1])
    return outputs


@pytest.mark.parametrize("fraction", [1.0, 0.4])
@torch.no_grad()
def test_unrolled_steps_are_draft_steps(fraction):
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids, lengths, prompt = torch.cat([tiny_prompt(13, 0), tiny_prompt(13, 1)]), [13, 10], [5, 3]
    taps = target_taps(target, drafter, ids)
    mask = torch.stack([(torch.arange(13) >= prompt[row]) & (torch.arange(13) < lengths[row]) for row in range(2)])
    ids[1, lengths[1] :] = 0  # padding must not matter
    taps[1, lengths[1] :] = 1e3

    torch.manual_seed(0)
    chains = find_chains(mask, STEPS, fraction)
    outputs = unroll(drafter, ids, taps, chains, STEPS)
    compared = 0
    for row in range(2):
        for column, anchor in enumerate(chains.anchors[row].tolist()):
            num_steps = int(chains.num_steps[row, column])
            if num_steps == 0:
                continue
            expected = draft_by_hand(drafter, ids[row : row + 1], taps[row : row + 1], anchor, num_steps)
            for step in range(num_steps):
                actual = outputs[step][row, anchor if step == 0 else column]
                torch.testing.assert_close(actual, expected[step][0], rtol=1e-4, atol=1e-5)
                compared += 1
    assert compared == int(chains.num_steps.sum()) > 0


def test_unrolled_steps_are_the_generators(monkeypatch):
    """The same against assisted generation itself, whose drafts are steered to the target's own text."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.generation_config.update(num_assistant_tokens=STEPS, assistant_confidence_threshold=0.0)
    prompt = tiny_prompt()
    truth = target.generate(prompt, max_new_tokens=16, do_sample=False)
    oracle(monkeypatch, truth, rate=1.0)
    log = DraftLog().start(monkeypatch)
    target.generate(prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter)

    with torch.no_grad():
        taps = target_taps(target, drafter, truth)
        anchors = torch.arange(truth.shape[1] - STEPS - 1)[None]
        outputs = unroll(drafter, truth, taps, Chains(anchors, torch.full_like(anchors, STEPS)), STEPS)
        deepest = 0
        for verified, ids, logits in log.steps:
            step = ids.shape[1] - verified
            anchor = verified - 2  # the state before the last verified token
            if anchor >= anchors.shape[1]:
                continue
            expected = drafter.draft_logits(outputs[step][:, anchor])
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            deepest = max(deepest, step)
    assert deepest == STEPS - 1


def test_chains_start_and_end_inside_the_response():
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    chains = find_chains(mask, steps=2)
    # Row 0: state 2 precedes the first response token 3 and predicts 4; state 4 predicts the last, 6.
    assert chains.anchors[0].tolist() == [2, 3, 4]
    assert chains.num_steps.tolist() == [[2, 2, 1], [2, 1, 0], [0, 0, 0]]
    assert chains.anchors[1, :2].tolist() == [0, 1]
    torch.manual_seed(0)
    some = find_chains(mask, steps=2, fraction=0.5)
    assert (some.num_steps > 0).sum(1).tolist() == [2, 1, 0]
    assert set(some.anchors[0].tolist()) < {2, 3, 4}


def test_accepted_lengths_and_rounds():
    correct = torch.tensor([[True, True, False, True], [False, True, True, True], [True] * 4])
    assert accepted_lengths(correct).tolist() == [2, 0, 4]
    # Round 1 at state 0 emits 3 tokens, the next starts at state 3.
    assert walk_rounds([2, 9, 9, 0, 1, 9]) == [3, 1, 2]
    assert walk_rounds([3, 2, 1]) == [3]  # the draft would go on, the response does not


@pytest.mark.parametrize("chunk", [3, 100])
def test_loss_and_gradients_are_the_formulas(chunk):
    torch.manual_seed(0)
    rows, h, H, V, D = 10, 6, 5, 30, 12
    student = torch.randn(rows, h, requires_grad=True)
    head = torch.randn(D, h, requires_grad=True)
    hidden, target_head = torch.randn(rows, H), torch.randn(V, H)
    ids = torch.randperm(V)[:D]
    weights = torch.rand(rows)
    labels = torch.randint(-1, D, (rows,))
    logsumexp = (hidden @ target_head.T).logsumexp(-1)
    loss, losses, hits = soft_cross_entropy(
        student,
        head,
        normalised_teacher(hidden, logsumexp),
        normalised_head(target_head[ids]),
        labels,
        weights,
        chunk,
    )
    (3 * loss).backward()  # a factor, as gradient accumulation has one

    p = (hidden @ target_head.T).softmax(-1)[:, ids]  # not renormalised
    other, other_head = student.detach().clone().requires_grad_(), head.detach().clone().requires_grad_()
    expected = -(p * (other @ other_head.T).log_softmax(-1)).sum(-1)
    (3 * (expected * weights).sum()).backward()
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(loss, (expected * weights).sum())
    torch.testing.assert_close(student.grad, other.grad)
    torch.testing.assert_close(head.grad, other_head.grad)
    assert torch.equal(hits, (other @ other_head.T).argmax(-1) == labels)
    assert hits.any() or (labels == -1).any()


def test_loss_in_bf16_is_close_for_large_logits():
    """Folding the log-sum-exp into the product keeps likely tokens' probabilities accurate to a few percent."""
    torch.manual_seed(0)
    hidden, target_head = torch.randn(64, 32), torch.randn(50, 32)
    logits = hidden @ target_head.T
    assert logits.max() > 16
    exact = logits.log_softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        teacher = normalised_teacher(hidden, logits.logsumexp(-1))
        approximate = (teacher.bfloat16() @ normalised_head(target_head).bfloat16().T).float()
    likely = exact > math.log(0.5)
    assert likely.any()
    assert (approximate - exact)[likely].abs().max() < 0.06


@pytest.fixture
def line(tmp_path):
    """A target folder, its responses, their features, and a drafter folder."""
    tokenizer = bytes_tokenizer(TEMPLATE)
    target = tiny_target(vocab_size=BYTES, eos_token_id=2, bos_token_id=1)
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    with open(tmp_path / "responses.jsonl", "w") as file:
        for number in range(24):
            row = {
                "id": f"p-{number}",
                "language": "en",
                "prompt": f"say {number}",
                "response": f"well, {number * 7}!",
            }
            file.write(json.dumps(row | {"temperature": 0.0, "finish": "stop"}) + "\n")
    prepare_features(
        FeatureArguments(
            target=str(tmp_path / "target"),
            data=[str(tmp_path / "responses.jsonl")],
            features=str(tmp_path / "features"),
            precision="fp32",
        )
    )
    drafter = tiny_drafter(target, tie_word_embeddings=True, shortlist=list(range(0, BYTES, 2)), eos_token_id=2)
    drafter.save_pretrained(tmp_path / "drafter")
    tokenizer.save_pretrained(tmp_path / "drafter")
    return tmp_path


def flags(line, out, checkpoints, **changes):
    settings = {
        "features": line / "features",
        "out": line / out,
        "output_dir": line / checkpoints,
        "held_out_percent": 20,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "unroll_steps": 3,
        "unroll_fraction": 0.5,
        "logging_steps": 1,
        "eval_steps": 3,
        "save_steps": 3,
        "precision": "fp32",
        "disable_tqdm": True,
    } | changes
    return [str(line / "drafter"), *(str(part) for name, value in settings.items() for part in (f"--{name}", value))]


def test_training_lowers_the_held_out_loss(line):
    command = flags(line, "out", "a", max_steps=60, learning_rate=0.02, eval_steps=1, logging_steps=20, save_steps=60)
    assert main(command) == 0
    history = json.loads((line / "a" / "checkpoint-60" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert len(losses) == 60
    assert losses[-1] < 0.9 * losses[0]
    record = json.loads((line / "out" / "training.json").read_text())["stages"][-1]
    assert 1.0 <= record["held_out"]["eval_mal"] <= 4.0


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


def test_recipe_and_refusals(line, tmp_path):
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
    with pytest.raises(ValueError, match="not a feature folder"):
        main(flags(line, "other", "d", features=line / "drafter"))
    other = tiny_drafter(tiny_target(vocab_size=BYTES), target_layer_ids=[0, 2, 3])
    other.save_pretrained(line / "drafter")
    with pytest.raises(ValueError, match="target_layer_ids"):
        main(flags(line, "other", "d"))
