"""Offline distillation data as the trainer reads it: rows of feature folders, split and put into batches."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.trainer_pt_utils import LengthGroupedSampler

from osprey.train.features import HEAD_FILE, INDEX_FILE


class FeatureDataset(torch.utils.data.Dataset):
    """Rows of one or more feature folders, read from disk as they are asked for.

    An item has `input_ids` int64 `[T]`, `response_mask` `[T]`, `taps` `[T, 3H]`, `hidden` `[T, H]`, `logsumexp`
    `[T]`, `top1` int64 `[T]`; `rows[i]` has its `id`, `language`, `temperature`, `finish`, `length`, `prompt_length`.

    Raises:
        ValueError: a folder is no finished feature folder, or folders differ in target or taps.
    """

    def __init__(self, folders: list[str | os.PathLike[str]]):
        self.settings: dict[str, Any] = {}
        self.sources: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
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
        for key in ("target_layer_ids", "target_hidden_size", "target_vocab_size", "target_num_hidden_layers"):
            if self.settings and self.settings[key] != index["settings"][key]:
                raise ValueError(f"{folder} was made with another {key} than {self.head_path.parent}.")
        self.settings = self.settings or index["settings"]
        self.sources += index["settings"]["data"]
        for name in index["shards"]:
            shard = safe_open(folder / name, framework="pt")
            begin = 0
            for row in json.loads(shard.metadata()["rows"]):
                self.rows.append(row)
                self._places.append((shard, begin, begin + row["length"]))
                begin += row["length"]

    def head(self) -> Tensor:
        """The target's head, `[V, H]` in the stored precision."""
        with safe_open(self.head_path, framework="pt") as file:
            return file.get_tensor("weight")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        shard, begin, end = self._places[index]
        item = {name: shard.get_slice(name)[begin:end] for name in shard.keys()}  # noqa: SIM118
        return item | {"input_ids": item["input_ids"].long(), "top1": item["top1"].long()}


class FeatureSubset(torch.utils.data.Subset):
    """Some rows of a `FeatureDataset`."""

    def __init__(self, features: FeatureDataset, indices: list[int]):
        super().__init__(features, indices)
        self.features = features
        self.rows = [features.rows[i] for i in indices]

    def lengths(self) -> list[int]:
        return [row["length"] for row in self.rows]


def split_rows(features: FeatureDataset, held_out_percent: int) -> tuple[FeatureSubset, FeatureSubset]:
    """Training rows, and held-out rows chosen by the hash of the prompt's id; of these only greedy ones are used.

    Plain text is always trained on: the target did not write it, so that no acceptance can be read off it.
    """
    train, held_out = [], []
    for index, row in enumerate(features.rows):
        if row.get("kind") == "text":
            train.append(index)
            continue
        bucket = int(hashlib.sha1(str(row["id"]).encode()).hexdigest(), 16) % 100
        if bucket >= held_out_percent:
            train.append(index)
        elif not row["temperature"]:
            held_out.append(index)
    return FeatureSubset(features, train), FeatureSubset(features, held_out)


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


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Right-pads items of a `FeatureDataset` to their longest; padding is zero everywhere."""
    return {name: nn.utils.rnn.pad_sequence([item[name] for item in items], batch_first=True) for name in items[0]}
