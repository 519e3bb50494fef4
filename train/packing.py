"""Documents mixed by weight and packed into rows of equal length, from a position that can be saved.

A row holds as many documents as fit; a document that does not fit goes on in the next row. Positions start again at 0
with every document, from which transformers derives attention that stays within documents (only without a cache and
without an attention mask), and the first token of a document is no label: it does not follow from its neighbour.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerBase

from osprey.train.data import Source, documents, encode
from osprey.train.errors import first_line
from osprey.train.linear_loss import IGNORE

SNAPSHOTS = 4096  # positions that can be saved: more than the rows a data loader fetches ahead

Piece = tuple[list[int], int, int]  # token ids of a document, the position of the first, how many are used already


class _Cursor:
    """Where a source stands: its stream, how often it has started again, and the tokens it has given."""

    def __init__(self, source: Source):
        self.source = source
        self.stream: IterableDataset | None = None
        self.rows: Iterator[dict[str, Any]] | None = None
        self.epoch = self.tokens = 0

    def open(self, state: dict[str, Any] | None = None) -> None:
        self.stream = documents(self.source)
        if state is not None:
            self.stream.load_state_dict(state)
        self.rows = iter(self.stream)

    def next_row(self, excluded: tuple[str, ...], max_passes: int | None) -> dict[str, Any]:
        if self.rows is None:
            self.open()
        for _ in range(2):
            try:
                for row in self.rows:
                    if not any(name in str(row.get("source")) for name in excluded):
                        return row
            except Exception as error:  # datasets wraps what the reader says in errors of its own
                raise ValueError(f"the data {self.source.name} cannot be read: {first_line(error)}") from error
            self.epoch += 1
            if max_passes is not None and self.epoch >= max_passes and self.tokens:
                raise ValueError(
                    f"the data {self.source.name} ends early: {self.epoch} passes gave {self.tokens} tokens, and its "
                    "share of the run is more; give more data, a smaller weight or a larger --max_passes."
                )
            self.open()
        raise ValueError(f"the data {self.source.name} has no rows that are not excluded.")

    def state(self) -> dict[str, Any]:
        return {
            **_identity(self.source),
            "epoch": self.epoch,
            "tokens": self.tokens,
            "stream": self.stream.state_dict() if self.stream is not None else None,
        }


class PackedRows(TorchIterableDataset):
    """Endless rows of `length` tokens: `input_ids`, `position_ids` and `labels`, each `[length]`.

    The next document always comes from the source that is furthest behind its share of the tokens: the mixture is
    kept exactly, and without a random state. A source is read in its own order, and again from its start when it ends,
    `max_passes` times at most; shuffle it beforehand if its order means something. Rows whose `source` contains one of
    `excluded` are left out.

    Raises:
        ValueError: a source cannot be read, has nothing to read, or ends early.
    """

    def __init__(
        self,
        sources: list[Source],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        excluded: tuple[str, ...] = (),
        max_passes: int | None = None,
    ):
        self.tokenizer, self.length, self.excluded, self.max_passes = tokenizer, length, excluded, max_passes
        self.cursors = [_Cursor(source) for source in sources]
        self.states = [cursor.state() for cursor in self.cursors]  # replaced, never changed: snapshots share them
        self.pieces: list[Piece] = []  # what the next row begins with
        self.row = 0  # rows given so far
        self.snapshots: deque[tuple[int, tuple[Piece, ...], list[dict[str, Any]]]] = deque(maxlen=SNAPSHOTS)

    def fresh(self) -> "PackedRows":
        """The same mixture from its beginning, for what is not training: as many passes as it takes."""
        sources = [cursor.source for cursor in self.cursors]
        return PackedRows(sources, self.tokenizer, self.length, self.excluded)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        shares = [cursor.source.weight for cursor in self.cursors]
        while True:
            held = sum(len(token_ids) - used for token_ids, _, used in self.pieces)
            while held < self.length:
                index = min(range(len(shares)), key=lambda index: self.cursors[index].tokens / shares[index])
                cursor = self.cursors[index]
                token_ids = encode(cursor.next_row(self.excluded, self.max_passes), self.tokenizer, cursor.source.name)
                cursor.tokens += max(len(token_ids), 1)  # an empty document moves on as well
                self.states[index] = cursor.state()
                self.pieces.append((token_ids, 0, 0))
                held += len(token_ids)
            row, self.pieces = _take(self.pieces, self.length)
            self.row += 1
            self.snapshots.append((self.row, tuple(self.pieces), list(self.states)))
            yield pack(row)

    def state_dict(self, row: int) -> dict[str, Any]:
        """The state after the first `row` rows: a data loader may have fetched more of them than were trained on."""
        _, pieces, states = next(state for state in reversed(self.snapshots) if state[0] == row)
        return {"row": row, "buffer": _take(pieces, None)[0], "sources": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state.

        Raises:
            ValueError: it is a state of other data.
        """
        ours, theirs = [_identity(cursor.source) for cursor in self.cursors], state["sources"]
        if len(ours) != len(theirs) or any(
            saved.get(key, our[key]) != our[key] for our, saved in zip(ours, theirs, strict=True) for key in our
        ):
            names = ", ".join(str(saved.get("name")) for saved in theirs)
            raise ValueError(f"the checkpoint was trained on other data ({names}), or on other versions of it.")
        self.row = state["row"]
        self.pieces = []
        for token_id, position in state["buffer"]:
            if position == 0 or not self.pieces:
                self.pieces.append(([], position, 0))
            self.pieces[-1][0].append(token_id)
        self.states = list(state["sources"])
        for cursor, saved in zip(self.cursors, state["sources"], strict=True):
            cursor.epoch, cursor.tokens = saved["epoch"], saved["tokens"]
            if saved["stream"] is not None:
                cursor.open(saved["stream"])


def _identity(source: Source) -> dict[str, Any]:
    """What tells one source from another, wherever its file lies now."""
    return {"name": source.name, "bytes": source.path.stat().st_size if source.path is not None else None}


def _take(pieces: Sequence[Piece], length: int | None) -> tuple[list[tuple[int, int]], list[Piece]]:
    """The first `length` (token id, position) pairs (None: all), and the pieces that are left."""
    row: list[tuple[int, int]] = []
    for index, (token_ids, first, used) in enumerate(pieces):
        end = len(token_ids) if length is None else min(len(token_ids), used + length - len(row))
        row += [(token_ids[place], first + place) for place in range(used, end)]
        if end < len(token_ids):
            return row, [(token_ids, first, end), *pieces[index + 1 :]]
    return row, []


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
