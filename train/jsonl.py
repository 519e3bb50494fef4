"""JSON-lines files, gzipped or not: how every stage reads its rows."""

import codecs
import gzip
import json
import os
from collections.abc import Callable, Iterator
from typing import Any


def read_rows(
    path: str | os.PathLike[str],
    needed: tuple[str, ...] = (),
    convert: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; empty lines, and a byte-order mark at the start, count for nothing.

    Args:
        path: the file; read as gzip if its name ends in `.gz`.
        needed: keys that every row must have.
        convert: what is made of a row before they are looked for; may raise `ValueError`.

    Raises:
        ValueError: a line is not UTF-8 or no JSON object, lacks a key or is not converted; names file and line.
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8").strip()
                if not text:
                    continue
                row = json.loads(text)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not UTF-8 (at byte {error.start + 1} of it); convert the file."
                ) from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}).") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a JSON object is due.")
            if convert is not None:
                try:
                    row = convert(row)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
            if missing := [key for key in needed if key not in row]:
                raise ValueError(f"{path}, line {number}: the row has no `{missing[0]}`.")
            yield row
