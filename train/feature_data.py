"""Distillation data as the trainer reads it: rows of feature folders, or tokens alone, split and put into batches."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.trainer_pt_utils import LengthGroupedSampler

from osprey.train.checkpoints import file_sha256
from osprey.train.examples import Example
from osprey.train.features import HEAD_FILE, INDEX_FILE, tensor_sha256

SAME_IN_ALL_FOLDERS = (
    *("target_layer_ids", "target_hidden_size", "target_vocab_size", "target_num_hidden_layers", "dtype"),
    "head_sha256",
)


class FeatureDataset(torch.utils.data.Dataset):
    """Offline data: rows of one or more feature folders of one target, read from disk as they are asked for.

    An item has `id`, `input_ids` int64 `[T]`, `response_mask` `[T]`, `taps` `[T, 3H]`, `hidden` `[T, H]`, `logsumexp`
    `[T]`, `top1` int64 `[T]`; `rows[i]` has its `id`, `language`, `temperature`, `finish`, `kind`, `length`,
    `prompt_length`.

    Raises:
        ValueError: a folder is no finished feature folder, or folders differ in target or taps.
    """

    def __init__(self, folders: list[str | os.PathLike[str]]):
        self.settings: dict[str, Any] = {}
        self.sources: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.checksums: dict[Path, str] = {}
        self._places: list[tuple[Any, int, int]] = []
        self.head_path = Path(folders[0]) / HEAD_FILE
        for folder in map(Path, folders):
            self._add_folder(folder)

    def _add_folder(self, folder: Path) -> None:
        path = folder / INDEX_FILE
        if not path.exists():
            raise ValueError(f"{folder} is not a feature folder (no {INDEX_FILE}): run `osprey distill --prepare`.")
        index = json.loads(path.read_text())
        if not index["complete"]:
            raise ValueError(f"The features in {folder} are not finished: run `osprey distill --prepare` again.")
        settings = index["settings"]
        if "head_sha256" not in settings:  # a folder of an earlier version: the stored head says which target it was
            settings["head_sha256"] = tensor_sha256(read_head(folder / HEAD_FILE))
        for key in SAME_IN_ALL_FOLDERS:
            if self.settings and self.settings[key] != settings[key]:
                what = "target (its head differs)" if key == "head_sha256" else key
                raise ValueError(
                    f"{folder} was made with another {what} than {self.head_path.parent}: features of one target go "
                    "together."
                )
        self.settings = self.settings or settings
        self.sources += settings["data"]
        for name, entry in index["shards"].items():
            self.checksums[folder / name] = entry["sha256"]
            shard = safe_open(folder / name, framework="pt")
            begin = 0
            for row in json.loads(shard.metadata()["rows"]):
                self.rows.append(row)
                self._places.append((shard, begin, begin + row["length"]))
                begin += row["length"]

    def verify(self) -> None:
        """Raises `OSError` where a shard is not what was written."""
        for path, sha256 in self.checksums.items():
            if file_sha256(path) != sha256:
                raise OSError(
                    f"{path} is damaged (its checksum differs): delete that feature folder and prepare again."
                )

    def identity(self) -> str:
        """A hash of everything that is in the folders, in their order."""
        return hashlib.sha256("".join(self.checksums.values()).encode()).hexdigest()

    def head(self) -> Tensor:
        """The target's head, `[V, H]` in the stored precision."""
        return read_head(self.head_path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, begin, end = self._places[index]
        item = {name: shard.get_slice(name)[begin:end] for name in shard.keys()}  # noqa: SIM118
        return item | {
            "id": self.rows[index]["id"],
            "input_ids": item["input_ids"].long(),
            "top1": item["top1"].long(),
        }


def read_head(path: Path) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("weight")


class ExampleDataset(torch.utils.data.Dataset):
    """Online data: `id`, `input_ids` int64 `[T]` and `response_mask` `[T]`; the rest is the target's in the step."""

    def __init__(self, examples: list[Example]):
        self.examples = examples
        self.rows = [
            {**example.meta, "length": len(example.input_ids), "prompt_length": example.prompt_length}
            for example in examples
        ]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        input_ids = torch.tensor(example.input_ids)
        mask = torch.arange(len(input_ids)) >= example.prompt_length
        return {"id": example.meta["id"], "input_ids": input_ids, "response_mask": mask}


class RowSubset(torch.utils.data.Subset):
    """Some rows of a dataset."""

    def __init__(self, dataset: FeatureDataset | ExampleDataset, indices: list[int]):
        super().__init__(dataset, indices)
        self.rows = [dataset.rows[i] for i in indices]

    def lengths(self) -> list[int]:
        return [row["length"] for row in self.rows]


def split_rows(dataset: FeatureDataset | ExampleDataset, held_out_percent: int) -> tuple[RowSubset, RowSubset]:
    """Training rows, and held-out rows chosen by the hash of the prompt's id; of these only greedy ones are used.

    Greedy are rows that say so (temperature 0), and prompts, whose answer is yet to be written. Plain text is always
    trained on: the target did not write it, so that no acceptance can be read off it.
    """
    train, held_out = [], []
    for index, row in enumerate(dataset.rows):
        if row.get("kind") == "text":
            train.append(index)
            continue
        bucket = int(hashlib.sha1(str(row["id"]).encode()).hexdigest(), 16) % 100
        if bucket >= held_out_percent:
            train.append(index)
        elif row["temperature"] == 0 or row.get("kind") == "prompt":
            held_out.append(index)
    return RowSubset(dataset, train), RowSubset(dataset, held_out)


class EpochSampler(LengthGroupedSampler):
    """Batches of rows of similar length, drawn anew in each epoch from the seed and the epoch's number alone.

    So a run that goes on from a checkpoint sees the rows that it would have seen.
    """

    def __init__(self, rows_per_batch: int, lengths: list[int], seed: int):
        super().__init__(rows_per_batch, lengths=lengths, generator=torch.Generator())
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(self.seed + epoch)


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Right-pads items to their longest, padding is zero everywhere; `ids` of the rows and their `lengths` `[B]`."""
    batch = {
        name: nn.utils.rnn.pad_sequence([item[name] for item in items], batch_first=True)
        for name in items[0]
        if name != "id"
    }
    return batch | {
        "ids": [item["id"] for item in items],
        "lengths": torch.tensor([len(item["input_ids"]) for item in items]),
    }
