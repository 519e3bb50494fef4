"""Folders are written whole or not at all; an old one goes only when the new one stands, and is one of ours."""

import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from osprey.cli import pull
from osprey.cli.main import main
from osprey.train.checkpoints import atomic_folder, refuse_input

CONFIG = {"config.json": '{"model_type": "llama"}'}  # by which a folder of ours is known


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture
def old(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("1")
    (tmp_path / "out" / "config.json").write_text(CONFIG["config.json"])
    return tmp_path / "out"


def test_replaces_the_old_folder(old):
    with pytest.raises(FileExistsError, match="--overwrite"), atomic_folder(old):
        pass
    with atomic_folder(old, overwrite=True) as work:
        (work / "new").write_text("2")
        assert content(old) == {"old": "1", **CONFIG}
    assert content(old) == {"new": "2"}
    assert os.listdir(old.parent) == ["out"]


def test_the_old_folder_survives_a_failure(old):
    with pytest.raises(RuntimeError), atomic_folder(old, overwrite=True) as work:
        (work / "new").write_text("2")
        raise RuntimeError
    assert content(old) == {"old": "1", **CONFIG}
    assert os.listdir(old.parent) == ["out"]


def test_the_old_folder_survives_a_failed_rename(old, monkeypatch):
    rename = os.rename

    def failing(source, target):
        if (os.path.basename(target), os.path.exists(old)) == ("out", False) and not str(source).endswith(".old"):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="no"), atomic_folder(old, overwrite=True) as work:
        (work / "new").write_text("2")
    assert content(old) == {"old": "1", **CONFIG}
    assert os.listdir(old.parent) == ["out"]


def test_only_folders_of_ours_are_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("1")
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("photos", "notes.txt"):
        with pytest.raises(FileExistsError, match="is no folder of a model"), atomic_folder(tmp_path / name, True):
            pass
    for text in ('{"name": "site"}', '["model_type"]', "{"):  # of another program
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / "config.json").write_text(text)
        with (
            pytest.raises(FileExistsError, match="no config.json with a `model_type`"),
            atomic_folder(tmp_path / "site", True),
        ):
            pass
        assert content(tmp_path / "site") == {"config.json": text}
    assert content(tmp_path / "photos") == {"one.jpg": "1"} and (tmp_path / "notes.txt").read_text() == "mine"
    for name, file in (("empty", None), ("exported", "model.gguf")):
        (tmp_path / name).mkdir()
        if file is not None:
            (tmp_path / name / file).write_text("0")
        with atomic_folder(tmp_path / name, overwrite=True) as work:
            (work / "new").write_text("2")
        assert content(tmp_path / name) == {"new": "2"}


def test_a_git_checkout_is_not_replaced(old):
    (old / ".git").mkdir()
    with pytest.raises(FileExistsError, match="a git checkout"), atomic_folder(old, overwrite=True):
        pass
    assert sorted(path.name for path in old.iterdir()) == [".git", "config.json", "old"]


def test_a_strangers_folder_inside_is_not_replaced(old):
    (old / "custom_generate").mkdir()
    with atomic_folder(old, overwrite=True) as work:
        (work / "config.json").write_text(CONFIG["config.json"])
    (old / "notes").mkdir()
    with pytest.raises(FileExistsError, match="the folder notes"), atomic_folder(old, overwrite=True):
        pass
    assert (old / "notes").is_dir()


def test_weights_may_be_read_by_others(tmp_path):
    with atomic_folder(tmp_path / "out") as work:
        save_file({"a": torch.zeros(2)}, work / "model.safetensors")
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_has_come_meanwhile_is_not_replaced(tmp_path, overwrite):
    out = tmp_path / "out"
    with pytest.raises(FileExistsError) as refusal, atomic_folder(out, overwrite) as work:
        (work / "new").write_text("2")
        out.mkdir()
        (out / "notes").write_text("mine")
    assert content(out) == {"notes": "mine"}
    (kept,) = (path for path in tmp_path.iterdir() if path != out)
    assert content(kept) == {"new": "2"} and kept.name.startswith("out-")
    assert str(refusal.value).endswith(f"What was to stand there is finished, and kept as {kept}.")


def test_an_input_under_another_case_is_the_input(tmp_path, monkeypatch):
    """As on a file system where case does not count, which `resolve` does not know."""
    for name in ("in", "IN"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os.path, "samefile", lambda one, other: str(one).lower() == str(other).lower())
    with pytest.raises(ValueError, match="is the input itself"):
        refuse_input(tmp_path / "IN", [tmp_path / "in"])


def test_an_input_is_never_replaced(tmp_path, old, monkeypatch):
    (tmp_path / "link").symlink_to(old)
    monkeypatch.chdir(tmp_path)
    for out, source, sentence in (
        (old, str(old), "is the input itself"),
        ("out", old / "old", "holds the input"),
        (tmp_path, old, "holds the input"),
        (tmp_path / "link", old, "is the input itself"),
        ("out", "link", "is the input itself"),
    ):
        with (
            pytest.raises(ValueError, match=f"{sentence}.*, which would be lost: choose another --out"),
            atomic_folder(out, True, ["org/model", None, source]),
        ):
            pass
        assert content(old) == {"old": "1", **CONFIG}
    refuse_input(old / "new", [old])  # beside what is read, or in it, is no loss
    refuse_input("other", ["out"])


def test_the_cache_is_no_place_for_results(tmp_path, monkeypatch):
    monkeypatch.setenv("OSPREY_CACHE", str(tmp_path / "cache"))
    fetched = tmp_path / "cache" / "targets" / "smollm2"
    fetched.mkdir(parents=True)
    (fetched / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="lies in the cache, .*: choose another --out"), atomic_folder(fetched, True):
        pass
    assert (fetched / "config.json").is_file()


# By verb: its arguments, `IN` for the folder that is both read and written, `DATA` for a file in it.
COMMANDS = {
    "prune": "IN --layers 1",
    "prune --calibration": "OTHER --layers 1 --strategy influence --calibration DATA",
    "pretrain": "IN --data OTHER/text.jsonl",
    "pretrain --data": "OTHER --data DATA",
    "convert": "IN --target OTHER",
    "convert --target": "OTHER --target IN",
    "distill": "IN --features OTHER",
    "distill --features": "OTHER --features IN",
    "adapt": "IN --target OTHER --data OTHER/text.jsonl",
    "adapt --data": "OTHER --target OTHER --data DATA",
    "baseline": "OTHER --like IN",
    "export": "IN --to vllm",
    "import": "IN --target OTHER",
    "pull": "org/name",
}


@pytest.mark.parametrize("case", COMMANDS)
def test_no_command_replaces_what_it_reads(case, tmp_path, monkeypatch, capsys):
    for folder in ("in", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / folder / "text.jsonl").write_text('{"id": "a", "text": "b", "response": "b", "prompt": "a"}\n')
    places = {"IN": tmp_path / "in", "OTHER": tmp_path / "other", "DATA": tmp_path / "in" / "text.jsonl"}
    pulled = SimpleNamespace(path=places["IN"], **dict.fromkeys(("repo", "revision", "kind", "base_model"), "a"))
    pulled.mean_acceptance_length, pulled.own_code = None, True
    monkeypatch.setattr(pull, "pull", lambda *arguments: pulled)
    monkeypatch.setattr(pull, "go_offline_without_network", lambda: None)
    words = COMMANDS[case]
    for name, place in places.items():
        words = words.replace(name, str(place))
    before = sorted(tmp_path.rglob("*"))
    assert main([case.split()[0], *words.split(), "--out", str(places["IN"]), "--overwrite"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "which would be lost: choose another --out" in error
    assert sorted(tmp_path.rglob("*")) == before
