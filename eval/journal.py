"""The runs of a benchmark, one JSON line each, so that it goes on where it was stopped.

The first line holds the schema version and the settings; a run under other settings cannot go on with the file.
"""

import json
import os
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1  # of this file and of the results that are made from it
Key = tuple[str, float, str, str]  # request, temperature, peer, draft length


def key_of(run: dict[str, Any]) -> Key:
    return run["request"], run["temperature"], run["peer"], run["draft_length"]


def check_schema(path: str | Path, content: Any) -> None:
    """Raises `ValueError` where `content`, read from `path`, is of another schema version, or of none."""
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        found = "no schema version" if version is None else f"schema version {version}"
        raise ValueError(
            f"{path} has {found}, and this osprey reads version {SCHEMA_VERSION}: measure again, or use the osprey "
            "that wrote it."
        )


def read_result(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file that should be a result of `osprey bench` (or what stands in for one).

    Raises `OSError` where there is no such file, and `ValueError` where it holds something else.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OSError(f"there is no result file {path}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON, so no result of `osprey bench`: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no result of `osprey bench`.")
    return content


class Journal:
    """The runs in `path`, those of an earlier start included.

    Args:
        settings: whatever the figures depend on.
        notes: what is kept with them without being compared.

    Attributes:
        runs: what was measured, by key.
        notes: those of the first start.

    Raises:
        ValueError: the file is of another schema version or has other settings, or one of its lines is damaged. The
            last line may be cut short, as a killed process leaves it: it is dropped.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], notes: dict[str, Any] | None = None):
        self.path, self.runs, self.notes = Path(path), {}, notes or {}
        settings = json.loads(json.dumps(settings))  # as it will be read
        if self.path.exists():
            self.read(settings)
        if not self.path.exists():
            self.write({"schema_version": SCHEMA_VERSION, "settings": settings, "notes": self.notes})

    def read(self, settings: dict[str, Any]) -> None:
        whole, _, cut = self.path.read_bytes().rpartition(b"\n")
        if cut:  # only shortened: a write of the whole file could lose it all
            os.truncate(self.path, len(whole) + 1 if whole else 0)
        if not whole:  # killed while the first line was written
            self.path.unlink()
            return
        rows = []
        for number, line in enumerate(whole.decode("utf-8").split("\n"), 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{self.path}, line {number}: not JSON; delete the line, or the file.") from error
        head, *runs = rows
        check_schema(self.path, head)
        changed = sorted(
            name for name in {*head["settings"], *settings} if head["settings"].get(name) != settings.get(name)
        )
        if changed:
            raise ValueError(
                f"{self.path} holds runs under other settings ({', '.join(changed)} changed): give the old ones to go "
                "on, choose another --out, or delete the file."
            )
        self.notes = head["notes"]
        self.runs = {key_of(run): run for run in runs}

    def append(self, run: dict[str, Any]) -> None:
        self.runs[key_of(run)] = run
        self.write(run)

    def write(self, row: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
