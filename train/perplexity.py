"""Held-out perplexity of a causal language model, file by file."""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from osprey.train.data import Source, documents, encode
from osprey.train.linear_loss import IGNORE
from osprey.train.packing import pack
from osprey.train.precision import autocast


@torch.no_grad()
def held_out_losses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    files: list[Path],
    length: int,
    max_tokens: int | None = None,
    precision: str = "fp32",
) -> dict[str, float]:
    """Mean loss per token, in nats, of each file by its name (`held_fr.jsonl` → `fr`).

    Documents are read alone, in pieces of at most `length` tokens. `max_tokens` stops after about that many tokens
    of a file, which is enough to watch a run. Several processes share the rows, and each returns the whole result.
    """
    was_training = model.training
    model.eval()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = {}
    for path in files:
        sums = torch.zeros(2, dtype=torch.float64, device=model.device)  # loss, tokens
        rows = packed_documents(path, tokenizer, length, max_tokens)
        while turn := list(islice(rows, world)):
            # Every process computes, one without a row of its own for nothing: sharded weights are gathered by all.
            row = turn[rank] if rank < len(turn) else turn[0] | {"labels": [IGNORE] * len(turn[0]["labels"])}
            batch = {name: torch.tensor([ids], device=model.device) for name, ids in row.items()}  # [1, T]
            with autocast(precision, model.device.type):
                # Divided by one: the sum. Without a cache, see `use_linear_cross_entropy`.
                loss = model(**batch, num_items_in_batch=1, use_cache=False).loss
            sums += torch.stack([loss.double(), (batch["labels"][:, 1:] != IGNORE).sum()])
        if world > 1:
            dist.all_reduce(sums)
        total, tokens = sums.tolist()
        if tokens == 0:
            raise ValueError(f"the held-out file {path} has no tokens to predict.")
        losses[held_out_name(path)] = total / tokens
    model.train(was_training)
    return losses


def packed_documents(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, max_tokens: int | None
) -> Iterator[dict[str, list[int]]]:
    buffer: list[tuple[int, int]] = []
    seen = 0
    for row in documents(Source(path)):
        token_ids = encode(row, tokenizer, path.name)
        seen += len(token_ids)
        buffer += [(token_id, position) for position, token_id in enumerate(token_ids)]
        while len(buffer) >= length:
            yield pack(buffer[:length])
            buffer = buffer[length:]
        if max_tokens is not None and seen >= max_tokens:
            break
    if buffer:
        yield pack(buffer)


def held_out_name(path: Path) -> str:
    return path.name.split(".")[0].removeprefix("held_")


def perplexities(losses: dict[str, float]) -> dict[str, float]:
    """exp of the mean loss of each file, and `mean`: exp of the mean over files (their geometric mean)."""
    losses = {**losses, "mean": sum(losses.values()) / len(losses)}
    return {name: float(f"{math.exp(loss):.5g}") for name, loss in losses.items()}
