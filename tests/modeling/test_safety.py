"""What travels as remote code: torch, transformers and the standard library, no file, no process, no network."""

import ast
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from tiny import tiny_drafter, tiny_prompt, tiny_target

import osprey.modeling.modeling_osprey as modeling_osprey

FOLDER = Path(modeling_osprey.__file__).parent
REMOTE_CODE = sorted([*FOLDER.glob("*_osprey.py"), FOLDER / "custom_generate" / "generate.py"])
# Of the standard library, what neither reads nor starts anything; of `os` the questions about paths alone.
HARMLESS = {
    *("torch", "transformers", "bisect", "collections", "contextlib", "contextvars", "copy", "dataclasses", "enum"),
    *("functools", "hashlib", "itertools", "json", "math", "operator", "os", "re", "statistics", "threading", "time"),
    *("types", "typing", "warnings", "weakref"),
}
OF_OS = {"os.path.isdir", "os.path.isfile", "os.path.join"}
NAMES = {"open", "exec", "eval", "compile", "input", "breakpoint", "__import__", "__builtins__", "__loader__"}
ATTRIBUTES = {
    *("open", "load", "save", "load_library", "load_file", "save_file", "read_text", "read_bytes", "write_text"),
    *("write_bytes", "hub", "cpp_extension", "system", "popen", "__globals__", "__builtins__", "__subclasses__"),
}
FROM_TRANSFORMERS = {"cached_file", "hf_hub_download", "snapshot_download", "has_file", "load_state_dict"}


def faults(source: str) -> list[str]:
    """What `source` does that remote code may not."""
    found = []
    tree = ast.parse(source)
    allowed_os = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in OF_OS:
            allowed_os.add(node.value.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] not in HARMLESS]
            found += [alias.name for alias in node.names if alias.name.startswith("os.")]
            found += [f"{alias.name} as" for alias in node.names if alias.name == "os" and alias.asname]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 0 and (module.split(".")[0] not in HARMLESS or module.split(".")[0] == "os"):
                found.append(module)
            if node.level > 0 and not module.endswith("_osprey"):
                found.append(f".{module}")
            names = {alias.name for alias in node.names}
            found += sorted(names & (FROM_TRANSFORMERS | ATTRIBUTES | {"*"}))
        elif isinstance(node, ast.Name) and (node.id in NAMES or (node.id == "os" and node not in allowed_os)):
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", REMOTE_CODE, ids=lambda path: path.name)
def test_remote_code_reads_and_starts_nothing(path):
    assert faults(path.read_text()) == []


def test_all_remote_code_is_looked_at():
    assert {"modeling_osprey.py", "generate.py"} < {path.name for path in REMOTE_CODE}
    assert {path.name for path in FOLDER.rglob("*.py")} - {path.name for path in REMOTE_CODE} == {
        "__init__.py",
        "cpu_linears.py",
    }


@pytest.mark.parametrize(
    "source",
    [
        *("import subprocess", "import urllib.request", "from osprey.train import align", "from .other import x"),
        *("from os import system", "import os; os.system('x')", "import os as o", "import os.path", "x = os"),
        *("open('x')", "f = open", "eval('1')", "__import__('x')", "import torch; torch.load('x')", "p.read_text()"),
        *("from torch import load", "torch.hub.load('x')", "from transformers.utils import cached_file"),
        *("from transformers import *", "from pathlib import Path", "import pickle", "json.load(f)", "import numpy"),
    ],
)
def test_the_look_finds(source):
    assert faults(source) != []


class Audit:
    """Audit events of the interpreter, which no later code can hide, while `recording`."""

    def __init__(self):
        self.recording, self.events = False, []
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if self.recording and event.split(".")[0] in ("open", "socket", "subprocess", "urllib", "shutil", "ctypes"):
            self.events.append((event, str(arguments[0])))
        elif self.recording and event in (
            "os.system",
            "os.exec",
            "os.fork",
            "os.posix_spawn",
            "os.remove",
            "os.rename",
        ):
            self.events.append((event, str(arguments)))


@pytest.fixture(scope="module")
def audit():
    return Audit()


def test_importing_it_opens_nothing_but_itself(audit, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = tmp_path / "copied_code"
    folder.mkdir()
    for path in FOLDER.glob("*_osprey.py"):
        shutil.copy(path, folder)
    (folder / "__init__.py").write_text("from . import modeling_osprey\n")
    spec = importlib.util.spec_from_file_location("copied_code", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied_code", module)
    audit.events, audit.recording = [], True
    try:
        spec.loader.exec_module(module)
    finally:
        audit.recording = False
    assert len(audit.events) >= len(list(folder.glob("*_osprey.py")))
    assert [event for event in audit.events if event[0] != "open" or folder not in Path(event[1]).parents] == []


def test_drafting_opens_nothing(audit):
    target = tiny_target()
    drafter = tiny_drafter(target)
    for recording in (False, True):  # transformers and torch import parts of themselves when they first need them
        audit.events, audit.recording = [], recording
        try:
            target.generate(tiny_prompt(), assistant_model=drafter, max_new_tokens=12)
        finally:
            audit.recording = False
    assert audit.events == []


def test_the_audit_sees(audit, tmp_path):
    audit.events, audit.recording = [], True
    try:
        (tmp_path / "file").write_text("")
    finally:
        audit.recording = False
    assert audit.events == [("open", str(tmp_path / "file"))]
