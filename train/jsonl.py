"""JSON-lines files, gzipped or not: how prompts, responses and texts are read. Needs the standard library alone."""

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any


def text_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """Where it stands, and its text, of each line of a file; a byte-order mark at the start is dropped.

    Raises:
        ValueError: a line is not UTF-8, or a file whose name ends in `.gz` is not whole; names the place.
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}, line {number}"
                try:
                    text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{where}: not UTF-8 (at byte {error.start + 1} of it); convert the file."
                    ) from error
                yield where, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"the file {path} is truncated or damaged ({error}); fetch it again.") from error


def json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Where it stands, and what it holds, of each line that is not empty.

    Raises:
        ValueError: as `text_lines` does, or a line is not JSON.
    """
    for where, text in text_lines(path):
        if text := text.strip():
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}).") from error
            yield where, value


def read_rows(
    path: str | os.PathLike[str],
    needed: tuple[str, ...] = (),
    convert: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file.

    Args:
        path: the file; read as gzip if its name ends in `.gz`.
        needed: keys that every row must have.
        convert: what is made of a row before they are looked for; may raise `ValueError`.

    Raises:
        ValueError: as `json_lines` does, or a line is no object, lacks a key or is not converted; names file and line.
    """
    for where, row in json_lines(path):
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a JSON object is due.")
        if convert is not None:
            try:
                row = convert(row)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        if missing := [key for key in needed if key not in row]:
            raise ValueError(f"{where}: the row has no `{missing[0]}`.")
        yield row
