"""Training text for stage 4: what the target itself answers to a set of prompts.

Batches of prompts of similar length, one static cache a batch; rows that have ended leave the batch, and a response
that repeats itself is cut. Finished responses are appended as they come, and a run that was stopped goes on where it
was: what is in the output file is not asked again.
"""

import hashlib
import json
import logging
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, StaticCache

from osprey.train.data import check_file
from osprey.train.examples import user_prompt_ids
from osprey.train.jsonl import read_rows
from osprey.train.precision import compute_dtype, default_device_type

logger = logging.getLogger(__name__)

POOL_BATCHES = 8  # batches that are sorted by length together: little padding, and still a mixture at any time
CHECK_STEPS = 8  # steps between looks for ended and looping rows
LOOP_PERIODS = 48  # a loop is at most so many tokens, and is seen
LOOP_COPIES = 4  # so many times, which is also what is kept of it,
LOOP_TOKENS = 24  # and over at least so many tokens


@dataclass
class RespondArguments:
    """Arguments of `respond`."""

    target: str = field(metadata={"help": "target model: folder or Hub id"})
    prompts: list[str] = field(
        metadata={"help": ".jsonl or .jsonl.gz files with `id` and `prompt`, or one of `turns`"}
    )
    out: str = field(metadata={"help": ".jsonl file to append the responses to"})
    max_new_tokens: int = field(default=224, metadata={"help": "longest response"})
    max_prompt_tokens: int = field(default=512, metadata={"help": "longer prompts (with chat template) are left out"})
    batch: int = field(default=64, metadata={"help": "prompts answered at a time"})
    greedy_share: float = field(default=0.6, metadata={"help": "share of the prompts that are answered greedily"})
    temperature: float = field(default=0.8, metadata={"help": "of the others, which are sampled"})
    max_tokens: int | None = field(default=None, metadata={"help": "stop after so many new tokens (default: never)"})
    precision: str = field(default="auto", metadata={"help": "the target's weights: auto, bf16 or fp32"})
    seed: int = field(default=0, metadata={"help": "seed of the order, of who is sampled, and of the sampling"})


def respond(arguments: RespondArguments) -> dict[str, Any]:
    """Appends responses to `out` and returns counts.

    Raises:
        ValueError, OSError: a file of prompts, or `out`, is not usable.
    """
    if arguments.batch < 1 or arguments.max_new_tokens < 1 or not 0 < arguments.temperature < math.inf:
        raise ValueError("--batch, --max_new_tokens and --temperature must be more than zero, and finite.")
    out = Path(arguments.out)
    answered = answered_ids(out)
    prompts = [row for path in arguments.prompts for row in prompt_rows(Path(path))]
    rows = [row for row in prompts if row["id"] not in answered]
    random.Random(arguments.seed).shuffle(rows)
    device = default_device_type()
    dtype = compute_dtype(arguments.precision, device)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target, padding_side="left")
    generator = torch.Generator(device).manual_seed(arguments.seed + len(answered))

    counts: dict[str, Any] = {"prompts": 0, "tokens": 0, "stop": 0, "length": 0, "loop": 0}
    start = time.time()
    progress = tqdm(total=len(rows), unit="prompt", desc="responses")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab") as file:
        for batch in batches(rows, tokenizer, arguments):
            results = answer(model, tokenizer, batch, arguments, generator)
            # One write of whole lines: a reader, or a run that goes on, meets no half row of a running writer.
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in results).encode())
            file.flush()
            os.fsync(file.fileno())
            for row in results:
                counts["prompts"] += 1
                counts["tokens"] += row["tokens"]
                counts[row["finish"]] += 1
            progress.update(len(results))
            progress.set_postfix_str(f"{counts['tokens'] / (time.time() - start):.0f} tokens/s")
            if arguments.max_tokens is not None and counts["tokens"] >= arguments.max_tokens:
                break
    progress.close()
    return {**counts, "seconds": round(time.time() - start, 1)}


def prompt_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows with `id` and `prompt`; a prompt of `osprey generate` and `osprey bench` is the only one of its `turns`."""
    return read_rows(check_file(path), convert=with_prompt)


def with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `id` and a `prompt`; raises `ValueError` where it has none.

    Nor may there be several turns: the later ones follow answers that nobody has given yet.
    """
    turns = row.get("turns")
    if "prompt" not in row and turns is not None:
        if not isinstance(turns, list) or len(turns) != 1:
            raise ValueError(f"the row {row.get('id')!r} has not one turn in `turns`: leave the later ones out.")
        row = {name: value for name, value in row.items() if name != "turns"} | {"prompt": turns[0]}
    if missing := [name for name in ("id", "prompt") if name not in row]:
        raise ValueError(
            f"the row has no `{missing[0]}`: rows hold `id` and `prompt`, or `id`, `domain`, `language` and `turns`."
        )
    if not isinstance(row["prompt"], str) or not row["prompt"].strip():
        raise ValueError(f"the prompt of the row {row['id']!r} is blank, or no text.")
    return row


def answered_ids(out: Path) -> set[str]:
    """Ids in `out`; a last line without its end, of a run that was killed, is cut off."""
    if not out.exists():
        return set()
    content = out.read_bytes()
    whole = content.rfind(b"\n") + 1
    try:
        ids = {json.loads(line)["id"] for line in content[:whole].splitlines()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{out} is not a file of responses to go on with; choose another --out.") from error
    if whole < len(content):
        os.truncate(out, whole)
    return ids


def batches(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, arguments: RespondArguments
) -> Iterator[list[tuple[dict[str, Any], list[int]]]]:
    """Batches of (row, ids of its prompt in the chat template), each of similar lengths."""
    pool_size = arguments.batch * POOL_BATCHES
    for start in range(0, len(rows), pool_size):
        pool = []
        for row in rows[start : start + pool_size]:
            ids = user_prompt_ids(tokenizer, row["prompt"])
            if len(ids) <= arguments.max_prompt_tokens:
                pool.append((row, ids))
        pool.sort(key=lambda item: len(item[1]))
        cut = [pool[first : first + arguments.batch] for first in range(0, len(pool), arguments.batch)]
        random.Random(arguments.seed).shuffle(cut)  # short prompts must not all come first
        yield from cut


def temperature_of(row_id: str, arguments: RespondArguments) -> float:
    """0 (greedy) or the sampling temperature: a property of the prompt and the seed, not of the batch."""
    digest = hashlib.sha256(f"{arguments.seed}:{row_id}".encode()).digest()
    return 0.0 if int.from_bytes(digest[:8], "big") < arguments.greedy_share * 2**64 else arguments.temperature


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[tuple[dict[str, Any], list[int]]],
    arguments: RespondArguments,
    generator: torch.Generator,
) -> list[dict[str, Any]]:
    """The responses to one batch, in its order; `response_ids` are the very tokens, with the one that ended them."""
    device = model.device
    temperatures = torch.tensor([temperature_of(row["id"], arguments) for row, _ in batch], device=device)  # [B]
    padded = tokenizer.pad({"input_ids": [ids for _, ids in batch]}, return_tensors="pt").to(device)
    width = padded["input_ids"].shape[1]
    mask = torch.nn.functional.pad(padded["attention_mask"], (0, arguments.max_new_tokens), value=1)  # [B, P + new]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # [B, P + new]
    cache = StaticCache(config=model.config, max_cache_len=width + arguments.max_new_tokens)
    end_ids = _end_ids(model)

    alive = list(range(len(batch)))  # rows of the batch that are still being answered
    responses: list[list[int]] = [[] for _ in batch]
    end_tokens: list[list[int]] = [[] for _ in batch]  # the token that ended a response, where one did
    finish = ["length"] * len(batch)
    tokens, pending = padded["input_ids"], []
    past = 0
    for step in range(1, arguments.max_new_tokens + 1):
        logits = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions[:, past : past + tokens.shape[1]],
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        past += tokens.shape[1]
        tokens = sample(logits.float(), temperatures, generator)[:, None]  # [b, 1]
        pending.append(tokens)
        if step % CHECK_STEPS and step < arguments.max_new_tokens:
            continue
        staying = []
        for slot, (row, new) in enumerate(zip(alive, torch.cat(pending, 1).tolist(), strict=True)):
            responses[row] += new
            if (end := next((at for at, token in enumerate(responses[row]) if token in end_ids), None)) is not None:
                end_tokens[row] = responses[row][end : end + 1]
                responses[row], finish[row] = responses[row][:end], "stop"
            elif (end := loop_end(responses[row])) is not None:
                responses[row], finish[row] = responses[row][:end], "loop"
            else:
                staying.append(slot)
        pending = []
        if not staying:
            break
        if len(staying) < len(alive):
            keep = torch.tensor(staying, device=device)
            alive = [alive[slot] for slot in staying]
            tokens, mask, positions, temperatures = (x[keep] for x in (tokens, mask, positions, temperatures))
            select_rows(cache, keep)
    return [
        {
            **row,
            "response": tokenizer.decode(response, skip_special_tokens=True),
            "response_ids": response + end,
            "temperature": temperature_of(row["id"], arguments),
            "finish": reason,
            "tokens": len(response),
        }
        for (row, _), response, end, reason in zip(batch, responses, end_tokens, finish, strict=True)
    ]


def sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Next tokens `[B]` of logits `[B, V]`: the likeliest where the temperature is 0, else drawn."""
    tokens = logits.argmax(-1)
    drawn = temperatures > 0
    if drawn.any():
        probabilities = (logits[drawn] / temperatures[drawn, None]).softmax(-1)
        tokens[drawn] = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return tokens


def select_rows(cache: StaticCache, keep: Tensor) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[keep], layer.values[keep]


def loop_end(token_ids: list[int]) -> int | None:
    """Where to cut a response that ends in a loop, or None: a drafter shall see loops, since targets loop, but few."""
    for period in range(1, LOOP_PERIODS + 1):
        copies = max(LOOP_COPIES, -(-LOOP_TOKENS // period))
        span = period * copies
        if span > len(token_ids):
            continue
        tail = token_ids[-span:]
        if tail[period:] == tail[:-period]:
            start = len(token_ids) - span
            while start > 0 and token_ids[start - 1] == token_ids[start - 1 + period]:
                start -= 1
            return start + LOOP_COPIES * period
    return None


def _end_ids(model: PreTrainedModel) -> set[int]:
    end = model.generation_config.eos_token_id
    return set(end) if isinstance(end, list) else {end}
