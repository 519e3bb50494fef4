"""Folders are written whole or not at all, and an old one goes only when the new one stands."""

import os

import pytest

from osprey.train.checkpoints import atomic_folder


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture
def old(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("1")
    return tmp_path / "out"


def test_replaces_the_old_folder(old):
    with pytest.raises(FileExistsError, match="--overwrite"), atomic_folder(old):
        pass
    with atomic_folder(old, overwrite=True) as work:
        (work / "new").write_text("2")
        assert content(old) == {"old": "1"}
    assert content(old) == {"new": "2"}
    assert os.listdir(old.parent) == ["out"]


def test_the_old_folder_survives_a_failure(old):
    with pytest.raises(RuntimeError), atomic_folder(old, overwrite=True) as work:
        (work / "new").write_text("2")
        raise RuntimeError
    assert content(old) == {"old": "1"}
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
    assert content(old) == {"old": "1"}
    assert os.listdir(old.parent) == ["out"]
