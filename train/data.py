"""Next-token data: local text files, mixed by weight and packed into rows of equal length.

A row holds as many documents as fit; a document that does not fit goes on in the next row. Positions start again at 0
with every document, from which transformers derives attention that stays within documents (only without a cache and
without an attention mask), and the first token of a document is no label: it does not follow from its neighbour.
"""

import gzip
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from osprey.train.linear_loss import IGNORE

SNAPSHOTS = 1024  # positions that can be saved: more than the rows a data loader fetches ahead


@dataclass(frozen=True)
class Source:
    """One file of a mixture; `weight` is its share of the tokens, before all shares are scaled to sum to one."""

    path: Path
    weight: float = 1.0


def parse_sources(entries: list[str], root: str = ".") -> list[Source]:
    """`path` or `path=weight`, below `root`; every file is checked."""
    sources = []
    for entry in entries:
        path, _, weight = entry.partition("=")
        try:
            share = float(weight or 1)
        except ValueError as error:
            raise ValueError(f"--data {entry}: the weight after = must be a number.") from error
        if not 0 < share < float("inf"):
            raise ValueError(f"--data {entry}: the weight must be more than zero.")
        sources.append(Source(check_file(Path(root) / path), share))
    if not sources:
        raise ValueError("no training data: give --data with .jsonl, .jsonl.gz, .txt or .txt.gz files.")
    return sources


def check_file(path: Path) -> Path:
    """`path` if it is there, of a known type, not empty and, where compressed, whole."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no data file {path}.")
    if not path.name.removesuffix(".gz").endswith((".jsonl", ".txt")):
        raise ValueError(f"{path} is not a data file: .jsonl, .jsonl.gz, .txt and .txt.gz are read.")
    if path.stat().st_size == 0:
        raise ValueError(f"the data file {path} is empty.")
    if path.suffix == ".gz":
        # Now, not hours into the run.
        try:
            with gzip.open(path) as file:
                while file.read(1 << 20):
                    pass
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"the data file {path} is truncated or damaged ({error}); fetch it again.") from error
    return path


def documents(path: Path) -> Any:
    """A streaming dataset of the rows of a file (JSON lines) or its paragraphs (text)."""
    if path.name.removesuffix(".gz").endswith(".txt"):
        return load_dataset("text", data_files=str(path), split="train", streaming=True, sample_by="paragraph")
    return load_dataset("json", data_files=str(path), split="train", streaming=True)


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, path: Path) -> list[int]:
    """Token ids of a row: its `text`, or its `prompt` and `response` in the tokenizer's chat template.

    An end-of-sequence token follows, but for a response that was cut (its `finish` is not `stop`).
    """
    if row.get("response") is not None and row.get("prompt") is not None:
        messages = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer(prompt + row["response"], add_special_tokens=False)["input_ids"]
        whole = row.get("finish") in (None, "stop")
    elif isinstance(row.get("text"), str):
        token_ids = tokenizer(row["text"])["input_ids"]
        whole = True
    else:
        raise ValueError(f"{path} has a row with neither `text` nor `prompt` and `response`: {sorted(row)}.")
    if whole and tokenizer.eos_token_id is not None and token_ids[-1:] != [tokenizer.eos_token_id]:
        token_ids.append(tokenizer.eos_token_id)
    return token_ids


@dataclass
class _Cursor:
    """Where a source stands: its stream, how often it has started again, and the tokens it has given."""

    source: Source
    stream: Any = None
    rows: Iterator[dict[str, Any]] | None = None
    epoch: int = 0
    tokens: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    def open(self, state: dict[str, Any] | None = None) -> None:
        self.stream = documents(self.source.path)
        if state is not None:
            self.stream.load_state_dict(state)
        self.rows = iter(self.stream)

    def next_row(self, excluded: tuple[str, ...]) -> dict[str, Any]:
        if self.rows is None:
            self.open()
        try:
            for _ in range(2):
                for row in self.rows:
                    if not any(name in str(row.get("source")) for name in excluded):
                        return row
                self.epoch += 1
                self.open()
        except Exception as error:  # datasets wraps what the reader says in errors of its own
            raise ValueError(f"the data file {self.source.path} cannot be read: {_first_line(error)}") from error
        raise ValueError(f"the data file {self.source.path} has no rows that are not excluded.")


class PackedRows(IterableDataset):
    """Endless rows of `length` tokens: `input_ids`, `position_ids` and `labels`, each `[length]`.

    The next document always comes from the source that is furthest behind its share of the tokens: the mixture is
    kept exactly, and without a random state. A file is read in its own order, and again from its start when it ends;
    shuffle it beforehand if its order means something. Rows whose `source` contains one of `excluded` are left out.
    """

    def __init__(
        self,
        sources: list[Source],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        excluded: tuple[str, ...] = (),
    ):
        self.tokenizer, self.length, self.excluded = tokenizer, length, excluded
        self.cursors = [_Cursor(source) for source in sources]
        self.buffer: list[tuple[int, int]] = []  # (token id, position) that the next row begins with
        self.row = 0  # rows given so far
        self.snapshots: deque[dict[str, Any]] = deque(maxlen=SNAPSHOTS)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        while True:
            while len(self.buffer) < self.length:
                cursor = min(self.cursors, key=lambda cursor: cursor.tokens / cursor.source.weight)
                token_ids = encode(cursor.next_row(self.excluded), self.tokenizer, cursor.source.path)
                cursor.tokens += max(len(token_ids), 1)  # an empty document moves on as well
                self.buffer += [(token_id, position) for position, token_id in enumerate(token_ids)]
            row, self.buffer = self.buffer[: self.length], self.buffer[self.length :]
            self.row += 1
            self.snapshots.append(self._state())
            yield pack(row)

    def _state(self) -> dict[str, Any]:
        sources = [
            {
                "path": str(cursor.source.path),
                "epoch": cursor.epoch,
                "tokens": cursor.tokens,
                "stream": cursor.stream.state_dict() if cursor.stream is not None else None,
            }
            for cursor in self.cursors
        ]
        return {"row": self.row, "buffer": list(self.buffer), "sources": sources}

    def state_dict(self, row: int) -> dict[str, Any]:
        """The state after the first `row` rows: a data loader may have fetched more of them than were trained on."""
        return next(state for state in reversed(self.snapshots) if state["row"] == row)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        paths = [source["path"] for source in state["sources"]]
        if paths != [str(cursor.source.path) for cursor in self.cursors]:
            raise ValueError(f"the checkpoint was trained on other data files: {', '.join(paths)}.")
        self.row = state["row"]
        self.buffer = [(token_id, position) for token_id, position in state["buffer"]]
        for cursor, source in zip(self.cursors, state["sources"], strict=True):
            cursor.epoch, cursor.tokens = source["epoch"], source["tokens"]
            if source["stream"] is not None:
                cursor.open(source["stream"])


def pack(row: list[tuple[int, int]]) -> dict[str, list[int]]:
    """A row from (token id, position) pairs; positions of a document that was cut start again at 0."""
    input_ids, position_ids, labels = [], [], []
    offset = row[0][1] if row else 0
    for token_id, position in row:
        if position == 0:
            offset = 0
        input_ids.append(token_id)
        position_ids.append(position - offset)
        labels.append(token_id if position > offset else IGNORE)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
