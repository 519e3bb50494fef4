"""Offline distillation data: what the target saw and said over its own responses, written once to disk.

The target runs once over each example (`osprey.train.examples`: a response behind its prompt, an assistant turn behind
its chat, or plain text, where every token counts as response). Kept, for every position `t`: the tapped layer outputs
(the drafter's context), and, for the positions whose next token belongs to the response, the last hidden state after
the final norm, the log-sum-exp of the full-vocabulary logits, and the most likely token. With the target's head `W`
this is the whole distribution, for any draft vocabulary D and at no cost in accuracy:
`p(v) = exp(hidden · W_v - logsumexp)`, which is not renormalised over D.

A feature folder holds `features-00000.safetensors` …, `head.safetensors` (the target's head `[V, H]`) and
`index.json`. Shards are written whole or not at all, so that preparing again goes on where it was stopped.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from osprey.modeling.configuration_osprey import default_target_layer_ids
from osprey.train.align import load_tokenizer
from osprey.train.checkpoints import file_sha256, hub_commit, public_name, write_json
from osprey.train.data import check_file
from osprey.train.examples import Example, tokenize_row
from osprey.train.jsonl import read_rows
from osprey.train.precision import autocast, default_device_type, meaning, use_bf16

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
HEAD_FILE = "head.safetensors"
NO_TOKEN = -1
LOGIT_ROWS = 512  # positions whose full-vocabulary logits exist at a time
STORED_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class FeatureArguments:
    """Arguments of `prepare_features`."""

    target: str = field(metadata={"help": "target model: Hub id or folder"})
    data: list[str] = field(metadata={"help": "responses of the target, chats or texts: .jsonl or .jsonl.gz files"})
    features: str = field(metadata={"help": "feature folder to write, or to go on with"})
    target_revision: str | None = field(default=None, metadata={"help": "revision of the target on the Hub"})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "tapped layers (default: DESIGN §2)"})
    max_length: int = field(
        default=2048, metadata={"help": "tokens that are kept of prompt and response; window of a text"}
    )
    tokens_per_batch: int = field(default=4096, metadata={"help": "padded tokens in a forward of the target"})
    tokens_per_shard: int = field(default=65536, metadata={"help": "tokens in a shard file, about"})
    dtype: str = field(default="float16", metadata={"help": "stored precision: float16, bfloat16 or float32"})
    precision: str = field(default="auto", metadata={"help": "bf16 autocast: auto, bf16 or fp32"})
    device_map: str | None = field(default=None, metadata={"help": "`auto` spreads the target over all cards"})


def prepare_features(arguments: FeatureArguments) -> Path:
    """Runs the target over its responses and writes the feature folder; returns its path.

    Raises:
        ValueError: bad rows, taps or settings, or the folder holds features of other settings.
    """
    folder = Path(arguments.features)
    if arguments.dtype not in STORED_DTYPES:
        raise ValueError(f"--dtype {arguments.dtype} is unknown: choose {' or '.join(STORED_DTYPES)}.")
    for path in arguments.data:
        check_file(Path(path))
    tokenizer = load_tokenizer(arguments.target, arguments.target_revision)
    rows = [row for path in arguments.data for row in read_rows(path)]
    if tokenizer.chat_template is None and any("text" not in row for row in rows):
        raise ValueError(f"The target {arguments.target} has no chat template to put its responses in.")
    device = default_device_type()
    settings = {
        "format_version": FORMAT_VERSION,
        "target": public_name(arguments.target),
        "data": [{"file": Path(path).name, "sha256": file_sha256(path)} for path in arguments.data],
        "max_length": arguments.max_length,
        "tokens_per_shard": arguments.tokens_per_shard,
        "dtype": arguments.dtype,
        "precision": meaning(arguments.precision, device),
    }
    examples = [example for row in rows for example in tokenize_row(tokenizer, row, arguments.max_length)]
    examples = [example for example in examples if len(example.input_ids) > example.prompt_length + 1]
    if not examples:
        raise ValueError(
            f"No response of two or more tokens was found in {', '.join(map(str, arguments.data))}: give rows with "
            "`prompt` and `response`, `messages`, or `text`."
        )

    target = AutoModelForCausalLM.from_pretrained(
        arguments.target,
        revision=arguments.target_revision or "main",
        # On a card the weights themselves are bf16: in fp32 large targets would not fit.
        dtype=torch.bfloat16 if device == "cuda" and use_bf16(arguments.precision, device) else torch.float32,
        device_map=arguments.device_map,
    ).eval()
    if arguments.device_map is None:
        target = target.to(device)
    text_config = target.config.get_text_config()
    refuse_longer_than_context(examples, target)
    layer_ids = arguments.target_layer_ids or default_target_layer_ids(text_config.num_hidden_layers)
    if min(layer_ids) < 0 or max(layer_ids) > text_config.num_hidden_layers - 2:
        raise ValueError(
            f"Taps {layer_ids} are out of range: {arguments.target} has {text_config.num_hidden_layers} layers, and "
            f"the last tap allowed is {text_config.num_hidden_layers - 2}."
        )
    settings |= {
        "target_layer_ids": list(layer_ids),
        "target_num_hidden_layers": text_config.num_hidden_layers,
        "target_hidden_size": text_config.hidden_size,
        "target_vocab_size": text_config.vocab_size,
    }
    head = check_head(target, examples[0].input_ids).to(STORED_DTYPES[arguments.dtype])  # [V, H]
    # Two targets of one shape, or two revisions of one target, differ in their heads.
    commit = hub_commit(arguments.target, arguments.target_revision)
    settings |= {"head_sha256": tensor_sha256(head), "target_revision": commit}
    index = _open_index(folder, settings)
    if not (folder / HEAD_FILE).exists():
        _write_safetensors({"weight": head.cpu()}, folder / HEAD_FILE)

    shards = _split(sorted(examples, key=lambda example: len(example.input_ids)), arguments.tokens_per_shard)
    tokens = {
        f"features-{number:05d}.safetensors": sum(len(e.input_ids) for e in s) for number, s in enumerate(shards)
    }
    left = sum(count for name, count in tokens.items() if name not in index["shards"])
    _check_space(folder, left, feature_bytes(left, text_config.hidden_size, head.itemsize))
    start, done = time.perf_counter(), 0
    with tqdm(total=sum(tokens.values()), unit="tok", desc="features") as bar:
        for name, shard in zip(tokens, shards, strict=True):
            if name not in index["shards"]:
                tensors = run_target(target, head, shard, layer_ids, arguments)
                rows = [{**e.meta, "length": len(e.input_ids), "prompt_length": e.prompt_length} for e in shard]
                _write_safetensors(tensors, folder / name, {"rows": json.dumps(rows)})
                sha256 = file_sha256(folder / name)
                index["shards"][name] = {"rows": len(rows), "tokens": tokens[name], "sha256": sha256}
                write_json(folder / INDEX_FILE, index)
                done += tokens[name]
            bar.update(tokens[name])
    index["complete"] = True
    write_json(folder / INDEX_FILE, index)
    logger.info("%d new tokens in %.0f s, features in %s", done, time.perf_counter() - start, folder)
    return folder


def refuse_longer_than_context(examples: list[Example], target: PreTrainedModel) -> None:
    """Raises `ValueError` where an example has more tokens than the target has positions."""
    context = getattr(target.config.get_text_config(), "max_position_embeddings", None) or math.inf
    longest = max(examples, key=lambda example: len(example.input_ids))
    if len(longest.input_ids) > context:
        raise ValueError(
            f"Row {longest.meta['id']!r} has {len(longest.input_ids)} tokens, but the target's context is {context}: "
            f"give --max_length {context} or less."
        )


def feature_bytes(tokens: int, hidden_size: int, item_bytes: int = 2) -> int:
    """Size on disk of the features of so many tokens, without the head."""
    return tokens * (4 * hidden_size * item_bytes + 4 + 1 + 4 + 4)  # taps and hidden; ids, mask, logsumexp, top1


def _check_space(folder: Path, tokens: int, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    logger.info("%d tokens to go, %.2f GB of features", tokens, needed / 1e9)
    if needed > free:
        raise OSError(
            f"{folder}: {needed / 1e9:.1f} GB of features are to come, but {free / 1e9:.1f} GB are free: choose "
            "another disk, or give less data."
        )


@torch.no_grad()
def read_target(
    target: PreTrainedModel,
    head: Tensor,
    input_ids: Tensor,
    response_mask: Tensor,
    layer_ids: list[int],
    precision: str,
) -> dict[str, Tensor]:
    """What stage 4 needs of the target's forward over a right-padded batch.

    Args:
        target: the target, whose logits are `hidden · head`.
        head: `[V, H]`; its dtype is that in which taps and hidden states are kept.
        input_ids: `[B, T]`.
        response_mask: bool `[B, T]`.
        layer_ids: the tapped layers.
        precision: autocast of the target, as in `osprey.train.precision`.

    Returns:
        `taps` `[B, T, 3H]`, `hidden` `[B, T, H]` (after the final norm), `logsumexp` fp32 `[B, T]` and `top1` int64
        `[B, T]`. The last two describe the token at the next position, where that belongs to the response or where
        the response ends; they are 0 and -1 elsewhere.
    """
    with autocast(precision, target.device.type):
        outputs = target(
            input_ids.to(target.device),
            output_hidden_states=[*(i + 1 for i in layer_ids), -1],  # no other layer's are kept
            use_cache=False,
            logits_to_keep=1,
        )
    states = outputs.hidden_states
    # Layers of a target that is spread over cards answer on their own card.
    taps = torch.cat([states[i + 1].to(head.device, head.dtype) for i in layer_ids], dim=-1)  # [B, T, 3H]
    hidden = states[-1].to(head.device, head.dtype)  # [B, T, H]
    mask = response_mask.to(head.device)
    wanted = torch.cat([mask[:, 1:], mask[:, -1:]], dim=1) | mask  # [B, T]
    logsumexp = torch.zeros(wanted.shape, device=head.device)
    top1 = torch.full(wanted.shape, NO_TOKEN, device=head.device)
    rows, places = wanted.nonzero(as_tuple=True)
    weight = head.float()  # fp32 products of the numbers as they are kept: what the distillation loss computes too
    for begin in range(0, len(rows), LOGIT_ROWS):  # full-vocabulary logits are large
        piece = rows[begin : begin + LOGIT_ROWS], places[begin : begin + LOGIT_ROWS]
        logits = hidden[piece].float() @ weight.T  # [chunk, V]
        logsumexp[piece] = logits.logsumexp(-1)
        top1[piece] = logits.argmax(-1)
    return {"taps": taps, "hidden": hidden, "logsumexp": logsumexp, "top1": top1}


def run_target(
    target: PreTrainedModel, head: Tensor, examples: list[Example], layer_ids: list[int], arguments: FeatureArguments
) -> dict[str, Tensor]:
    """Features of N tokens, the examples one behind the other: `input_ids` int32 `[N]`, `response_mask` bool `[N]`,
    and those of `read_target` in one row (`top1` as int32)."""
    parts: list[dict[str, Tensor]] = []
    for batch in _split(examples, arguments.tokens_per_batch, padded=True):
        lengths = [len(example.input_ids) for example in batch]
        input_ids = torch.zeros(len(batch), max(lengths), dtype=torch.long)  # right-padded: causal attention never
        for row, example in enumerate(batch):  # sees the padding
            input_ids[row, : lengths[row]] = torch.tensor(example.input_ids)
        positions = torch.arange(max(lengths))
        starts = torch.tensor([example.prompt_length for example in batch])
        mask = (positions >= starts[:, None]) & (positions < torch.tensor(lengths)[:, None])  # [B, T]
        features = read_target(target, head, input_ids, mask, layer_ids, arguments.precision)
        features |= {"input_ids": input_ids.int(), "response_mask": mask, "top1": features["top1"].int()}
        for row, example in enumerate(batch):
            part = {name: tensor[row, : lengths[row]].cpu() for name, tensor in features.items()}
            if not all(part[name].isfinite().all() for name in ("taps", "hidden", "logsumexp")):
                raise ValueError(
                    f"Hidden states of row {example.meta['id']!r} do not fit {arguments.dtype}: prepare with "
                    "--dtype bfloat16."
                )
            parts.append(part)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def check_head(target: PreTrainedModel, input_ids: list[int]) -> Tensor:
    """The head's weight `[V, H]`, after making sure on some tokens that the logits are just `hidden · W`."""
    head = target.get_output_embeddings()
    with torch.inference_mode():
        ids = torch.tensor([input_ids], device=target.device)
        outputs = target(ids, output_hidden_states=True, use_cache=False, logits_to_keep=1)
        hidden, logits = outputs.hidden_states[-1][:, -1].to(head.weight.device), outputs.logits[:, -1]
        plain = (hidden @ head.weight.T).to(logits.device)
    # Neither rounds to more than an eighth what lies under 32.
    if not torch.allclose(plain, logits, rtol=1e-3, atol=1e-2 if logits.dtype == torch.float32 else 0.25):
        raise ValueError(
            f"{target.name_or_path} changes its logits behind the head (a bias, a scale or soft-capping), which "
            "distillation cannot express yet: use a target without it."
        )
    return head.weight.detach()


def tensor_sha256(tensor: Tensor) -> str:
    """Hash of a tensor's bytes."""
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


def _split(examples: list[Example], tokens: int, padded: bool = False) -> list[list[Example]]:
    """Consecutive groups of at most `tokens` tokens (counting padding to the longest: the last), at least one each."""
    groups: list[list[Example]] = [[]]
    count = 0
    for example in examples:
        length = len(example.input_ids)
        count = length * (len(groups[-1]) + 1) if padded else count + length
        if groups[-1] and count > tokens:
            groups.append([])
            count = length
        groups[-1].append(example)
    return groups


def _open_index(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / INDEX_FILE
    if not path.exists():
        return {"settings": settings, "shards": {}, "complete": False}
    index = json.loads(path.read_text())
    # A folder of an earlier version lacks the newer settings, or what its `auto` meant: it goes on without a check of
    # these.
    stored = {name: value for name, value in index["settings"].items() if (name, value) != ("precision", "auto")}
    differing = [key for key in settings if key in stored and stored[key] != settings[key]]
    if differing:
        raise ValueError(
            f"{folder} holds features made with another {', '.join(differing)}: give an empty folder, or the same "
            "settings to go on."
        )
    return index


def _write_safetensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
