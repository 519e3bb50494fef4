"""What the loopback Hub keeps: repos with commits of files, kept as the Hub keeps them."""

import hashlib
import re
from dataclasses import dataclass, field

import yaml

WRITE_TOKEN, READ_TOKEN = "hf_loopbackWriteTokenForTestsOnly0001", "hf_loopbackReadTokenForTestsOnly00002"
ORG = "loop"


@dataclass
class File:
    content: bytes
    large: bool

    @property
    def etag(self) -> str:
        return hashlib.sha256(self.content).hexdigest() if self.large else git_hash(self.content)


@dataclass
class Repo:
    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, File], branch: str = "main") -> str:
        parent = self.branches.get(branch, "")
        listing = "".join(f"{path}{file.etag}" for path, file in sorted(files.items()))
        oid = hashlib.sha1(f"{parent}{len(self.commits)}{listing}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        return oid if oid in self.commits else None

    @property
    def head(self) -> dict[str, File]:
        return self.commits[self.branches["main"]]


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def describe(repo: Repo, oid: str, files: dict[str, File]) -> dict:
    """What the Hub says about a repo: its card's metadata, and tags made from it."""
    card = files["README.md"].content.decode() if "README.md" in files else ""
    head = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    data = yaml.safe_load(head[1]) if head else {}
    base = data.get("base_model") or []
    bases = base if isinstance(base, list) else [base]
    return {
        "id": repo.name,
        "sha": oid,
        "private": repo.private,
        "gated": "manual" if repo.gated else False,
        "tags": [*(data.get("tags") or []), *(f"base_model:{one}" for one in bases)],
        "cardData": {key: value for key, value in data.items() if key != "model-index"},
        "model-index": data.get("model-index"),
        "siblings": [{"rfilename": path} for path in files],
    }
