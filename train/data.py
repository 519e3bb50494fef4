"""Text to train on: local files and data sets on the Hub, document by document, as token ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from datasets import IterableDataset, load_dataset
from transformers import PreTrainedTokenizerBase

from osprey.train.errors import first_line
from osprey.train.jsonl import text_lines

HUB = "hub:"
FILE_TYPES = ".jsonl, .jsonl.gz, .txt, .txt.gz and .parquet"


@dataclass(frozen=True)
class Source:
    """One part of a mixture; `weight` is its share of the tokens, before all shares are scaled to sum to one.

    A file (`path`) or a data set of the Hub (`repo`, with its `config` and `split`), never both.
    """

    path: Path | None = None
    weight: float = 1.0
    repo: str | None = None
    config: str | None = None
    split: str = "train"

    @property
    def name(self) -> str:
        """What records and messages call it: a file's name without its place, or the data set."""
        return self.path.name if self.path is not None else ":".join(filter(None, (self.repo, self.config)))


def parse_sources(entries: list[str], root: str = ".") -> list[Source]:
    """`FILE` below `root`, or `hub:REPO[:CONFIG[:SPLIT]]`, each with `=WEIGHT` if wanted; every file is checked."""
    sources = []
    for entry in entries:
        place, _, weight = entry.partition("=")
        try:
            share = float(weight or 1)
        except ValueError as error:
            raise ValueError(f"--data {entry}: the weight after = must be a number.") from error
        if not 0 < share < float("inf"):
            raise ValueError(f"--data {entry}: the weight must be more than zero.")
        if place.startswith(HUB):
            repo, config, split, *rest = [*place.removeprefix(HUB).split(":"), "", "", ""][:4]
            if not repo or any(rest):
                raise ValueError(f"--data {entry}: a data set of the Hub is named hub:REPO[:CONFIG[:SPLIT]].")
            sources.append(Source(None, share, repo, config or None, split or "train"))
        else:
            sources.append(Source(check_source(Path(root) / place), share))
    if not sources:
        raise ValueError(f"no training data: give --data with {FILE_TYPES} files or hub:REPO data sets.")
    return sources


def check_source(path: Path) -> Path:
    """`path` if it is a file of one of `FILE_TYPES` that can be read to its end and is not empty."""
    if path.suffix != ".parquet":
        return check_file(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no data file {path}.")
    try:
        rows = pyarrow.parquet.read_metadata(path).num_rows
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"the data file {path} is no Parquet file or a damaged one ({error}).") from error
    if rows == 0:
        raise ValueError(f"the data file {path} is empty.")
    return path


def check_file(path: Path) -> Path:
    """`path` if it is there, JSON lines or text by its name, UTF-8, not empty and, where compressed, whole."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no data file {path}.")
    if not path.name.removesuffix(".gz").endswith((".jsonl", ".txt")):
        raise ValueError(f"{path} is not a data file: {FILE_TYPES} are read.")
    # Now, not hours into the run.
    blank = True
    for _, text in text_lines(path):
        blank = blank and not text.strip()
    if blank:
        raise ValueError(f"the data file {path} is empty.")
    return path


def documents(source: Source) -> IterableDataset:
    """A streaming dataset of the rows of a source, or of the paragraphs of a text file.

    Raises:
        OSError: the data set cannot be found on the Hub, or the Hub cannot be reached.
    """
    if source.path is None:
        try:
            return load_dataset(source.repo, source.config, split=source.split, streaming=True)
        except Exception as error:  # connection, name, configuration and split each have an error of their own
            raise OSError(
                f"the data set {source.name} cannot be streamed from the Hub ({first_line(error)}): check its name "
                "and the network, or give local files."
            ) from error
    name = source.path.name.removesuffix(".gz")
    kind = "text" if name.endswith(".txt") else "parquet" if name.endswith(".parquet") else "json"
    options = {"sample_by": "paragraph"} if kind == "text" else {}
    return load_dataset(kind, data_files=str(source.path), split="train", streaming=True, **options)


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    """Token ids of a row of `name`: its `text` or `content`, or its `prompt` and `response` in the chat template.

    An end-of-sequence token follows, but for a response that was cut (its `finish` is not `stop`).
    """
    text = row.get("text", row.get("content"))
    if row.get("response") is not None and row.get("prompt") is not None:
        messages = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer(prompt + row["response"], add_special_tokens=False)["input_ids"]
        whole = row.get("finish") in (None, "stop")
    elif isinstance(text, str):
        token_ids = tokenizer(text)["input_ids"]
        whole = True
    else:
        raise ValueError(
            f"{name} has a row with neither `text` (or `content`) nor `prompt` and `response`: {sorted(row)}."
        )
    if whole and tokenizer.eos_token_id is not None and token_ids[-1:] != [tokenizer.eos_token_id]:
        token_ids.append(tokenizer.eos_token_id)
    return token_ids
