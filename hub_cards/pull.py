"""Fetching a drafter or a backbone into the Hub's local cache, at one commit, with every file checked."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from osprey.hub_cards.layout import CODE, FILES, differing_code
from osprey.hub_cards.sentences import hub_sentences
from osprey.hub_cards.zoo import best_drafter, folder_entry


@dataclass(frozen=True)
class Pulled:
    """`revision` is the commit hash; `path` the folder in the cache; `own_code` whether its remote code is ours."""

    repo: str
    revision: str
    path: Path
    kind: str
    base_model: str | None
    mean_acceptance_length: float | None
    own_code: bool


def pull(repo: str, revision: str | None = None) -> Pulled:
    """Fetches a repo at a branch, tag or commit (default: `main`); from the cache where the Hub cannot be reached.

    Only files that belong into a published folder are fetched: no pickled weights, whatever the repo holds.

    Raises:
        ValueError, OSError: no such repo or revision, nothing of ours in it, damaged files; one sentence.
    """
    api = HfApi()
    with hub_sentences(repo, revision):
        commit = api.resolve_revision(repo, revision=revision).resolved
        path = Path(api.snapshot_download(repo, revision=commit, allow_patterns=[*FILES, *CODE]))
    refuse_damaged(repo, path)
    entry = folder_entry(path)
    if entry is None:
        raise ValueError(f"{repo} holds no drafter and no backbone of Osprey: `osprey zoo` lists those there are.")
    own = entry.kind == "backbone" or not differing_code(path)
    return Pulled(repo, commit, path, entry.kind, entry.base_model, entry.mean_acceptance_length, own)


def pull_for_target(target: str, revision: str | None = None) -> Pulled:
    """Fetches the best drafter for a target (see `best_drafter`).

    Raises:
        ValueError, OSError: there is none, or it cannot be fetched; one sentence.
    """
    best = best_drafter(target)
    return pull(best.name, revision or (best.revision if best.place == "cache" else None))


def refuse_damaged(repo: str, snapshot: Path) -> None:
    """Compares every file with the hash that the cache keeps it under, and drops those that differ.

    The client checks sizes only. In the cache a file is a link to a blob named by its SHA-256 or, where it is a small
    file, by its git hash: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    damaged = []
    for path in sorted(snapshot.rglob("*")):
        expected = Path(os.readlink(path)).name if path.is_symlink() else ""
        if re.fullmatch("[0-9a-f]{64}|[0-9a-f]{40}", expected) and blob_hash(path, len(expected)) != expected:
            damaged.append(path.relative_to(snapshot).as_posix())
            path.resolve().unlink()
            path.unlink()
    if damaged:
        raise OSError(
            f"checksum mismatch: {', '.join(damaged)} of {repo} did not arrive as published; nothing damaged was "
            "kept, so run again."
        )


def blob_hash(path: Path, digits: int) -> str:
    if digits == 64:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def load_for_target(cls: type, target: str, revision: str | None = None, **kwargs: Any) -> Any:
    """What `OspreyDrafter.for_target` does: the best drafter for a target, fetched and loaded by our own code."""
    return cls.from_pretrained(pull_for_target(target, revision).path, **kwargs)
