"""Suites: files, folders, parts of them, public ones, and what is refused."""

import gzip
import json
import sys
import types

import pytest

from osprey.eval.public_suites import PUBLIC, fetch_prompts
from osprey.eval.suites import is_language_tag, load_suite, spread

ROW = {"id": "a", "domain": "chat", "language": "en", "turns": ["Hello?"]}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_file(tmp_path):
    (item,) = load_suite(write(tmp_path / "mine.jsonl", ROW))
    assert item.prompt.id == "a" and item.file == "mine" and item.context_length is None


def test_a_line_ends_where_json_lines_do(tmp_path):
    """U+2028 and the like, which Python counts among line ends, may stand in a JSON text as they are."""
    text = "one\u2028two\u0085three"
    (tmp_path / "mine.jsonl").write_text(json.dumps(ROW | {"turns": [text]}, ensure_ascii=False), encoding="utf-8")
    assert load_suite(str(tmp_path / "mine.jsonl"))[0].prompt.turns == (text,)


def test_a_folder_takes_part_of_each_file(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / f"{name}.jsonl", *(ROW | {"id": str(index)} for index in range(10)))
    (tmp_path / "SOURCES.md").write_text("not a suite")
    items = load_suite(str(tmp_path), limit=2)
    assert [item.prompt.id for item in items] == ["one/2", "one/7", "two/2", "two/7"]
    assert len(load_suite(str(tmp_path))) == 20


def test_compressed_files(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / f"{name}.jsonl", ROW)
    text = (tmp_path / "two.jsonl").read_bytes()
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(text))
    with pytest.raises(ValueError, match="has a file both compressed and not"):
        load_suite(str(tmp_path))
    (tmp_path / "two.jsonl").unlink()
    assert [item.prompt.id for item in load_suite(str(tmp_path))] == ["one/a", "two/a"]
    assert [item.file for item in load_suite(str(tmp_path / "two.jsonl.gz"))] == ["two"]
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(text)[:-9])
    with pytest.raises(ValueError, match="two.jsonl.gz is truncated or damaged .*; fetch it again"):
        load_suite(str(tmp_path / "two.jsonl.gz"))


def test_a_part_is_spread():
    assert spread(list(range(100)), 4) == [12, 37, 62, 87]
    assert spread([1, 2, 3], 2) == [1, 3]  # middles of the halves, at 0.75 and 2.25
    assert spread([1, 2], 2) == spread([1, 2], 5) == spread([1, 2], None) == [1, 2]


@pytest.mark.parametrize(
    ("tag", "known"),
    [("en", True), ("zh-Hant", True), ("fil", True), ("qu", True), ("xx", False), ("EN", False), ("english", False)],
)
def test_language_tags(tag, known):
    assert is_language_tag(tag) is known


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="unknown suite 'nothing'.*builtin, mt-bench, humaneval"):
        load_suite("nothing")
    with pytest.raises(ValueError, match="without .jsonl and .jsonl.gz files"):
        load_suite(str(tmp_path))
    bad = write(tmp_path / "bad.jsonl", ROW, ROW | {"id": "b", "language": "xx"})
    with pytest.raises(ValueError, match=r"bad.jsonl, prompt 'b': the language tag 'xx' is unknown"):
        load_suite(bad)
    with pytest.raises(ValueError, match="--limit is 0"):
        load_suite(bad, limit=0)
    (tmp_path / "bad.jsonl").write_text(json.dumps(ROW) + "\nnonsense\n")
    with pytest.raises(ValueError, match="bad.jsonl, line 2: not JSON"):
        load_suite(bad)
    (tmp_path / "bad.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        load_suite(bad)


class Rows(list):
    @property
    def column_names(self):
        return list(self[0])


@pytest.fixture
def hub(monkeypatch):
    """A Hub that serves what the test gives it; `asked` are the calls."""

    def serve(answer):
        asked = []

        def load_dataset(path, **arguments):
            asked.append((path, arguments))
            if isinstance(answer, Exception):
                raise answer
            return Rows(answer)

        fake, quiet = types.ModuleType("datasets"), types.ModuleType("datasets.utils.logging")
        fake.load_dataset, quiet.disable_progress_bar = load_dataset, lambda: None
        monkeypatch.setitem(sys.modules, "datasets", fake)
        monkeypatch.setitem(sys.modules, "datasets.utils", types.ModuleType("datasets.utils"))
        monkeypatch.setitem(sys.modules, "datasets.utils.logging", quiet)
        return asked

    return serve


def test_public_suites_by_name(hub):
    asked = hub([{"question": "What is 1 + 1?\n", "answer": "2"}] * 3)
    items = load_suite("GSM8K", limit=1)
    assert asked == [("openai/gsm8k", {"name": "main", "split": "test"})]
    assert [(item.file, item.prompt.id, item.prompt.language) for item in items] == [("gsm8k", "gsm8k/2", "en")]
    assert items[0].prompt.turns == ("What is 1 + 1?",)


def test_public_suites_of_several_languages(hub):
    asked = hub([{"question": "1 + 1?"}])
    sources = fetch_prompts("mgsm")
    assert [arguments["data_files"] for _, arguments in asked][1].endswith("mgsm_de.tsv")
    assert sources["mgsm-de"][0].language == "de" and len(sources) == 11


def test_turns_categories_and_options(hub):
    hub([{"turns": ["one", "two"], "category": "writing"}])
    (prompt,) = fetch_prompts("spec-bench")["spec-bench"]
    assert prompt.turns == ("one", "two") and prompt.domain == "writing"
    hub([{"question": "Which?"} | {f"option_{letter}": letter * 2 for letter in "abcd"}])
    assert fetch_prompts("global-mmlu")["global-mmlu-fr"][0].turns == ("Which?\nA. aa\nB. bb\nC. cc\nD. dd",)


def test_no_hub_is_one_sentence(hub):
    hub(ConnectionError("[Errno -2] Name or service not known"))
    for name in PUBLIC:
        with pytest.raises(OSError, match=f"the suite {name} could not be fetched .* the Hub cannot be reached"):
            load_suite(name)
    hub([{"other": 1}])
    with pytest.raises(OSError, match="has no column 'question' any more"):
        load_suite("gsm8k")


def test_public_languages_are_known():
    assert all(is_language_tag(language) for suite in PUBLIC.values() for language in suite.configs.values())
