"""The target's answers: the same as `generate` gives, resumable, whole lines only."""

import json

import pytest
import torch
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_target

from osprey.cli.main import main
from osprey.eval.prompts import Prompt, load_prompts
from osprey.train import responses
from osprey.train.responses import RespondArguments, loop_end, respond, sample, temperature_of

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def files(tmp_path):
    # Small weights: a flat distribution, whose greedy texts neither loop nor end at once.
    target = tiny_target("llama", vocab_size=VOCABULARY, eos_token_id=2)
    target.save_pretrained(tmp_path / "target")
    bytes_tokenizer(TEMPLATE).save_pretrained(tmp_path / "target")
    rows = [{"id": f"p-{n}", "language": "en", "prompt": "question " * (n % 4) + str(n)} for n in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def arguments(files, **changes):
    settings = {
        "target": str(files / "target"),
        "prompts": [str(files / "prompts.jsonl")],
        "out": str(files / "out.jsonl"),
        "max_new_tokens": 20,
        "batch": 4,
        "greedy_share": 1.0,
        "precision": "fp32",
    }
    return RespondArguments(**{**settings, **changes})


def read(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_greedy_answers_are_those_of_generate(files, monkeypatch):
    monkeypatch.setattr(responses, "loop_end", lambda token_ids: None)
    target, tokenizer = tiny_target("llama", vocab_size=VOCABULARY, eos_token_id=2), bytes_tokenizer(TEMPLATE)
    counts = respond(arguments(files))
    rows = read(files / "out.jsonl")
    assert counts["prompts"] == len(rows) == 10
    assert counts["tokens"] == sum(row["tokens"] for row in rows.values())
    for row in rows.values():
        ids = tokenizer(f"[{row['prompt']}]>", add_special_tokens=False, return_tensors="pt")["input_ids"]
        new = target.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
        ended = 2 in new
        assert row["response_ids"] == (new[: new.index(2) + 1] if ended else new)
        new = new[: new.index(2)] if ended else new
        assert row["response"] == tokenizer.decode(new, skip_special_tokens=True)
        assert (row["finish"], row["tokens"]) == ("stop" if ended else "length", len(new))
        assert row["temperature"] == 0
        assert row["language"] == "en"


def test_goes_on_after_a_half_written_line(files):
    respond(arguments(files))
    whole = (files / "out.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (files / "out.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:17])
    assert respond(arguments(files))["prompts"] == 6
    assert read(files / "out.jsonl") == read_bytes(whole)
    assert respond(arguments(files))["prompts"] == 0


def read_bytes(content):
    return {row["id"]: row for row in map(json.loads, content.decode().splitlines())}


def test_reads_the_prompts_of_generate_and_bench(files):
    turns = [{"id": "a", "domain": "chat", "language": "en", "turns": ["question 1"]}]
    (files / "turns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    respond(arguments(files, prompts=[str(files / "turns.jsonl")]))
    (files / "prompts.jsonl").write_text(json.dumps({"id": "a", "prompt": "question 1"}) + "\n")
    respond(arguments(files, out=str(files / "same.jsonl")))
    rows = read(files / "out.jsonl")
    assert rows["a"]["prompt"] == "question 1" and "turns" not in rows["a"]
    assert rows["a"]["response_ids"] == read(files / "same.jsonl")["a"]["response_ids"]
    assert load_prompts(files / "prompts.jsonl") == [Prompt("a", "any", "any", ("question 1",))]


def test_stops_at_the_asked_number_of_tokens(files):
    counts = respond(arguments(files, max_tokens=1))
    assert 1 <= counts["prompts"] <= 4


def test_share_of_greedy_prompts_and_seed():
    settings = RespondArguments(target="", prompts=[], out="", greedy_share=0.6, temperature=0.8)
    temperatures = [temperature_of(f"p-{n}", settings) for n in range(4000)]
    assert set(temperatures) == {0.0, 0.8}
    assert temperatures.count(0.0) / 4000 == pytest.approx(0.6, abs=4 * (0.24 / 4000) ** 0.5)
    settings.seed = 1
    assert [temperature_of(f"p-{n}", settings) for n in range(4000)] != temperatures


def test_samples_from_the_tempered_softmax():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0])
    probabilities = (logits / 0.8).softmax(0)
    temperatures = torch.tensor([0.8] * 6000 + [0.0] * 10)
    tokens = sample(logits.expand(6010, 3), temperatures, generator)
    assert tokens[6000:].tolist() == [2] * 10
    shares = tokens[:6000].bincount(minlength=3) / 6000
    error = (probabilities * (1 - probabilities) / 6000).sqrt()
    assert ((shares - probabilities).abs() < 4 * error).all()


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        (list(range(100)), None),
        ([1, 2, 3] + [7] * 24, 7),
        ([1, 2, 3] + [7] * 23, None),  # too short to be sure
        ([9] + [1, 2, 3, 4, 5, 6] * 4, 25),
        ([9] + [1, 2, 3, 4, 5, 6] * 4 + [1, 2], 25),  # stopped in the middle of a copy
        ([1, 2, 3, 4, 5, 6] * 3 + [9], None),
        (list(range(48)) * 4, 192),
        (list(range(49)) * 4, None),
    ],
)
def test_loops_are_cut_after_their_fourth_copy(tokens, end):
    assert loop_end(tokens) == end


def test_a_loop_ends_the_answer(files, monkeypatch):
    monkeypatch.setattr(responses, "sample", lambda logits, *_: torch.full((len(logits),), 70))
    respond(arguments(files, max_new_tokens=64))
    for row in read(files / "out.jsonl").values():
        assert (row["finish"], row["tokens"]) == ("loop", 4)


def test_refusals(files, capsys):
    (files / "bad.jsonl").write_text('{"id": "a", "prompt": "b"}\n{"id": "c"}\n')
    (files / "blank.jsonl").write_text('{"id": "a", "prompt": "b"}\n{"id": "b", "prompt": " \\n"}\n')
    (files / "latin.jsonl").write_bytes(b'{"id": "a", "prompt": "b"}\n{"id": "caf\xe9"}\n')
    (files / "two.jsonl").write_text('{"id": "d", "turns": ["one", "two"]}\n')
    (files / "text.jsonl").write_text("no response\n")
    run = ["respond", "--target", str(files / "target"), "--out", str(files / "new.jsonl")]
    cases = {
        ("--prompts", str(files / "none.jsonl")): "there is no data file",
        ("--prompts", str(files / "bad.jsonl")): "line 2: the row has no `prompt`: rows hold `id` and `prompt`, or",
        ("--prompts", str(files / "blank.jsonl")): "line 2: the prompt of the row 'b' is blank, or no text",
        ("--prompts", str(files / "latin.jsonl")): "latin.jsonl, line 2: not UTF-8 (at byte 12 of it)",
        ("--prompts", str(files / "prompts.jsonl"), "--temperature", "nan"): "must be more than zero, and finite",
        (
            "--prompts",
            str(files / "two.jsonl"),
        ): "line 1: the row 'd' has not one turn in `turns`: leave the later ones out",
        ("--prompts", str(files / "prompts.jsonl"), "--batch", "0"): "must be more than zero",
        ("--prompts", str(files / "prompts.jsonl"), "--out", str(files / "text.jsonl")): "is not a file of responses",
    }
    for options, message in cases.items():
        assert main([*run, *options]) == 1
        assert message in capsys.readouterr().err
    assert not (files / "new.jsonl").exists()
