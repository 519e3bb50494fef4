"""`osprey bench` from end to end on tiny models, and what it refuses."""

import json
import re
import subprocess

import pytest
from bytes_tokenizer import VOCABULARY, bytes_tokenizer
from tiny import tiny_drafter, tiny_target

from osprey.cli import bench
from osprey.cli.main import main
from osprey.eval.baselines import make_eagle3

TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
ROWS = [
    {"id": "one", "domain": "chat", "language": "en", "turns": ["Hello?", "And?"]},
    {"id": "two", "domain": "code", "language": "de", "turns": ["Schreibe"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    target = tiny_target(vocab_size=VOCABULARY)
    target.save_pretrained(root / "target")
    bytes_tokenizer(TEMPLATE).save_pretrained(root / "target")
    drafter = tiny_drafter(target)
    drafter.save_pretrained(root / "drafter")
    make_eagle3(target, drafter, 1, 0).save_pretrained(root / "eagle3")
    tiny_target(vocab_size=VOCABULARY, num_hidden_layers=4).save_pretrained(root / "small")
    bytes_tokenizer().save_pretrained(root / "small")
    (root / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return root


@pytest.fixture
def osprey(folder, capsys, monkeypatch):
    monkeypatch.delenv("OSPREY_DEBUG", raising=False)

    def run(*flags):
        status = main(["bench", *map(str, flags)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def usual(folder, out, tokens=6):
    return [
        "--target",
        folder / "target",
        "--drafter",
        f"osprey={folder / 'drafter'}",
        "--suite",
        folder / "suite.jsonl",
        "--out",
        out,
        "--max-new-tokens",
        tokens,
    ]


def test_a_benchmark_and_its_plots(osprey, folder, tmp_path):
    out = tmp_path / "r.json"
    peers = ["--baseline", "prompt-lookup", f"eagle={folder / 'eagle3'}", folder / "small", "--without-copies"]
    flags = [*usual(folder, out), *peers, "--draft-lengths", "default", "2", "--temperatures", 0, 1]
    status, text, err = osprey(*flags)
    assert status == 0, err
    result = json.loads(out.read_text())
    settings = result["settings"]
    assert settings["peers"] == ["plain", "osprey", "osprey without copies", "prompt-lookup", "eagle", "small"]
    assert settings["kinds"]["small"] == "assistant" and settings["kinds"]["eagle"] == "drafter"
    assert settings["draft_lengths"] == ["default", "2"]
    assert result["requests"] == 3 and result["peak_memory_bytes"] > 0
    greedy = [row for row in result["groups"] if row["temperature"] == 0 and row["peer"] != "plain"]
    assert greedy and all(row["identical"] == row["requests"] for row in greedy)
    assert str(folder) not in out.read_text() and str(tmp_path) not in out.read_text()
    assert text == (tmp_path / "r.md").read_text() + "\n" and "Sampled at temperature 1" in text
    assert "bench: 100%" in err
    runs = (tmp_path / "r.runs.jsonl").read_bytes()
    again = osprey(*flags, "--json")
    assert again[0] == 0 and json.loads(again[1])["groups"] == result["groups"]  # nothing was run anew
    assert (tmp_path / "r.runs.jsonl").read_bytes() == runs
    status, text, _ = osprey("--plots", out, "--out", tmp_path / "plots")
    assert status == 0 and len(text.split()) == 4 * len(("domain", "language", "position", "draft length"))


def test_runs_of_other_code_or_packages_are_not_gone_on_with(osprey, folder, tmp_path, monkeypatch):
    assert osprey(*usual(folder, tmp_path / "r.json"))[0] == 0
    settings = json.loads((tmp_path / "r.json").read_text())["settings"]
    assert len(settings["code_sha256"]) == 64 and settings["versions"] == bench.versions()
    assert settings["models"]["osprey"]["revision"] is None  # a folder's weights are known by their hash
    monkeypatch.setattr(bench, "code_sha256", lambda: "0" * 64)
    monkeypatch.setattr(bench, "versions", lambda: {"torch": "0"})
    status, _, err = osprey(*usual(folder, tmp_path / "r.json"))
    assert status == 1 and "other settings (code_sha256, versions changed)" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new-tokens", "300"], "every prompt of the suite is longer than the target's context"),
        (["--context-lengths", "8"], "no prompt of the suite fits into 8 tokens together with 6 new ones"),
    ],
)
def test_nothing_fits(osprey, folder, tmp_path, flags, message):
    status, _, err = osprey(*usual(folder, tmp_path / "r.json"), *flags)
    assert status == 1 and message in err and not (tmp_path / "r.json").exists()


def test_other_settings_and_schemas_are_refused(osprey, folder, tmp_path):
    out = tmp_path / "r.json"
    assert osprey(*usual(folder, out))[0] == 0
    status, _, err = osprey(*usual(folder, out, tokens=7))
    assert status == 1 and "holds runs under other settings (max_new_tokens changed)" in err
    result = json.loads(out.read_text())
    out.write_text(json.dumps(result | {"schema_version": 99}))
    status, _, err = osprey("--plots", out, "--out", tmp_path / "plots")
    assert status == 1 and "has schema version 99" in err.splitlines()[-1]


def test_a_matrix(osprey, folder, tmp_path):
    flags = ["--target", folder / "target", "--suite", folder / "suite.jsonl", "--max-new-tokens", 3]
    matrix = ["--matrix", f"chat={folder / 'drafter'}", f"code={folder / 'eagle3'}"]
    status, text, err = osprey(*flags, *matrix, "--out", tmp_path / "r.json")
    assert status == 0, err
    assert json.loads((tmp_path / "r.json").read_text())["settings"]["peers"] == ["plain", "chat", "code"]
    assert "| trained on | chat | code |" in text
    status, text, _ = osprey("--plots", tmp_path / "r.json", "--out", tmp_path / "plots")
    assert "matrix-dark.svg" in text


def test_long_prompts(osprey, folder, tmp_path):
    rows = [ROWS[1] | {"id": str(index), "turns": [f"{index}" * 120]} for index in range(3)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [*usual(folder, tmp_path / "r.json", tokens=4), "--suite", tmp_path / "long.jsonl"]
    status, text, err = osprey(*flags, "--context-lengths", 220, 250, 270)
    assert status == 0, err
    result = json.loads((tmp_path / "r.json").read_text())
    assert {row["context_length"] for row in result["groups"]} == {220, 250}
    assert result["skipped"]["longer_than_context"] == ["0@270", "1@270", "2@270"]  # the target has 256 positions
    assert "MAL by context length" in text and "longer than the target's context: 3 requests" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "r.txt"], "--out names the result file, and must end in .json"),
        (["--out", "/nowhere/r.json"], "there is no folder /nowhere"),
        (["--draft-lengths", "0"], "'0' is neither default, adaptive, a number nor a range"),
        (["--draft-lengths", "5-2"], "'5-2' is neither"),
        (["--temperatures", "0", "nan"], "--temperatures is nan, but must be at least 0 and finite"),
        (["--temperatures", "-1"], "--temperatures is -1.0, but must be at least 0 and finite"),
        (["--weights", "int4"], "--weights is int4"),
        (["--suite", "nothing"], "unknown suite 'nothing'"),
        (["--limit", "0"], "--limit is 0"),
        (["--matrix", "drafter"], "--matrix takes drafters as DOMAIN=DIR"),
        (["--baseline", "/nowhere/at/all"], "unknown drafter '/nowhere/at/all'"),
        (["--plots", "r.json"], "there is no result file r.json"),
        (["--frobnicate"], "there is no option --frobnicate"),
    ],
)
def test_refusals(osprey, folder, tmp_path, flags, message):
    status, out, err = osprey(*usual(folder, tmp_path / "r.json"), *flags)
    assert status == 1 and out == ""
    assert message in err and len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_text_of_somebody_elses_is_not_replaced(osprey, folder, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    status, _, err = osprey(*usual(folder, tmp_path / "README.json"))
    assert status == 1 and "README.md would be replaced" in err and "choose another --out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_two_peers_of_one_name(osprey, folder, tmp_path):
    status, _, err = osprey(*usual(folder, tmp_path / "r.json"), "--baseline", f"osprey={folder / 'eagle3'}")
    assert status == 1 and "two peers are called 'osprey'" in err


def test_lengths():
    assert bench.expand_lengths(["default", "1-3", "3", "adaptive"]) == ["default", "1", "2", "3", "adaptive"]


def test_commands_name_no_folders(tmp_path):
    environment = bench.environment(["--drafter", f"a={tmp_path}", "--suite", str(tmp_path), "--limit", "8"])
    assert environment["command"] == f"osprey bench --drafter a={tmp_path.name} --suite {tmp_path.name} --limit 8"


def test_the_commit_is_that_of_the_code(tmp_path):
    """Not that of a repository in which a wheel happens to be installed."""

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    own, other = tmp_path / "own.py", tmp_path / "installed.py"
    own.write_text("1\n")
    other.write_text("2\n")
    git("init")
    git("add", "own.py")
    git("commit", "-m", "first")
    commit = bench.own_commit(own)
    assert re.fullmatch("[0-9a-f]{12}", commit) and bench.own_commit(other) is None
    own.write_text("3\n")
    assert bench.own_commit(own) == f"{commit}-dirty"
