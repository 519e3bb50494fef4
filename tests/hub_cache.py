"""Repositories in the Hub's local cache, as `huggingface_hub` lays it out, for tests without a Hub."""

import hashlib
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest


def cache_repo(cache: Path, repo: str, folder: Path, revision: str = "main") -> str:
    """Put the files of `folder` into the cache as a commit of `repo` that `revision` points to; returns the commit."""
    content = "".join(f"{path}:{path.read_bytes()!r}" for path in sorted(folder.rglob("*")) if path.is_file())
    commit = hashlib.sha1(content.encode()).hexdigest()
    place = cache / f"models--{repo.replace('/', '--')}"
    shutil.copytree(folder, place / "snapshots" / commit, dirs_exist_ok=True)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / revision).write_text(commit)
    return commit


def put_into_hub_cache(cache: Path, repo: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """`cache_repo`, with this process's Hub client offline and on that cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache_repo(cache, repo, folder)
