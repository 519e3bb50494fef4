"""Held-out perplexity of a causal language model, file by file."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from osprey.train.data import documents, encode, pack
from osprey.train.linear_loss import IGNORE, linear_cross_entropy
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
    of a file, which is enough to watch a run.
    """
    was_training = model.training
    model.eval()
    device, head = model.device, model.get_output_embeddings()
    losses = {}
    for path in files:
        total, tokens = 0.0, 0
        with autocast(precision, device.type):
            for row in packed_documents(path, tokenizer, length, max_tokens):
                batch = {name: torch.tensor([ids], device=device) for name, ids in row.items()}  # [1, T]
                labels = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORE)
                hidden = model.base_model(**batch, use_cache=False).last_hidden_state
                total += linear_cross_entropy(hidden[0], head.weight, labels[0]).item()
                tokens += (labels != IGNORE).sum().item()
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
    for row in documents(path):
        token_ids = encode(row, tokenizer, path)
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
