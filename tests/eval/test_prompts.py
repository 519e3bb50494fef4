"""Prompt files, good and bad; the shipped ones."""

import json
from pathlib import Path

import pytest

import osprey.cli
import osprey.eval
from osprey.eval.prompts import Prompt, load_prompts

ROW = {"id": "a", "domain": "chat", "language": "en", "turns": ["Hello?", "And then?"], "reference": "ignored"}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_rows_in_order(tmp_path):
    path = write(tmp_path / "p.jsonl", json.dumps(ROW), "", json.dumps(ROW | {"id": "b", "turns": ["¿Qué?"]}))
    assert load_prompts(path) == [
        Prompt("a", "chat", "en", ("Hello?", "And then?")),
        Prompt("b", "chat", "en", ("¿Qué?",)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": ', r"line 2: not JSON"),
        (
            "[1]",
            r"line 2: a prompt needs the texts 'id', 'domain', 'language' and .* 'turns', or only 'id' and 'prompt'; "
            r"'id' is missing or no text",
        ),
        (json.dumps({"id": "b", "turns": ["x"]}), r"line 2: a prompt needs .*; 'domain' is missing or no text"),
        (json.dumps({"prompt": "x"}), r"line 2: a prompt needs the texts"),
        (json.dumps({"id": "b", "prompt": " \n\t"}), r"line 2: .* 'prompt' a text, none of them blank"),
        (json.dumps(ROW | {"turns": ["x", " \u00a0"]}), r"line 2: 'turns' must be .* none of them blank"),
        (json.dumps(ROW | {"id": 3}), r"line 2: a prompt needs the texts"),
        (json.dumps(ROW | {"turns": []}), r"line 2: 'turns' must be a list of one or more texts"),
        (json.dumps(ROW | {"turns": "Hello?"}), r"line 2: 'turns' must be"),
        (json.dumps(ROW | {"turns": ["", "x"]}), r"line 2: 'turns' must be"),
        (json.dumps(ROW), r"the id 'a' stands on several lines"),
    ],
)
def test_bad_rows_are_named(tmp_path, line, message):
    path = write(tmp_path / "p.jsonl", json.dumps(ROW), line)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_encodings(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\r\n")
    assert load_prompts(path) == [Prompt("a", "chat", "en", ("Hello?", "And then?"))]
    path.write_bytes(json.dumps(ROW).encode() + b'\n{"id": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"p.jsonl, line 2: not UTF-8 \(at byte 12 of it\); convert the file"):
        load_prompts(path)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(OSError, match="there is no prompt file"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl", ""))


def test_shipped_prompts():
    demo = load_prompts(Path(osprey.cli.__path__[0]) / "prompts" / "demo.jsonl")
    assert [prompt.language for prompt in demo].count("en") == 4
    assert len({prompt.language for prompt in demo}) == 5 and len(demo) == 8
    more = load_prompts(Path(osprey.eval.__path__[0]) / "suites" / "lossless_50.jsonl")
    assert len(more) == 50
    assert not {prompt.turns for prompt in demo} & {prompt.turns for prompt in more}
