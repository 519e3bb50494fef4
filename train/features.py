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

import json
import logging
import os
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
from osprey.train.checkpoints import file_sha256, public_name, write_json
from osprey.train.data import check_file
from osprey.train.examples import Example, tokenize_row
from osprey.train.jsonl import read_rows
from osprey.train.precision import autocast

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
HEAD_FILE = "head.safetensors"
NO_TOKEN = -1


@dataclass
class FeatureArguments:
    """Arguments of `prepare_features`."""

    target: str = field(metadata={"help": "target model: Hub id or folder"})
    data: list[str] = field(metadata={"help": "responses of the target, chats or texts: .jsonl or .jsonl.gz files"})
    features: str = field(metadata={"help": "feature folder to write, or to go on with"})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "tapped layers (default: DESIGN §2)"})
    max_length: int = field(
        default=2048, metadata={"help": "tokens that are kept of prompt and response; window of a text"}
    )
    tokens_per_batch: int = field(default=4096, metadata={"help": "padded tokens in a forward of the target"})
    tokens_per_shard: int = field(default=65536, metadata={"help": "tokens in a shard file, about"})
    dtype: str = field(default="float16", metadata={"help": "stored precision: float16 or bfloat16"})
    precision: str = field(default="auto", metadata={"help": "bf16 autocast: auto, bf16 or fp32"})


def prepare_features(arguments: FeatureArguments) -> Path:
    """Runs the target over its responses and writes the feature folder; returns its path.

    Raises:
        ValueError: bad rows, taps or settings, or the folder holds features of other settings.
    """
    folder = Path(arguments.features)
    for path in arguments.data:
        check_file(Path(path))
    tokenizer = load_tokenizer(arguments.target)
    rows = [row for path in arguments.data for row in read_rows(path)]
    if tokenizer.chat_template is None and any("text" not in row for row in rows):
        raise ValueError(f"The target {arguments.target} has no chat template to put its responses in.")
    settings = {
        "format_version": FORMAT_VERSION,
        "target": public_name(arguments.target),
        "data": [{"file": Path(path).name, "sha256": file_sha256(path)} for path in arguments.data],
        "max_length": arguments.max_length,
        "tokens_per_shard": arguments.tokens_per_shard,
        "dtype": arguments.dtype,
        "precision": arguments.precision,
    }
    examples = [example for row in rows for example in tokenize_row(tokenizer, row, arguments.max_length)]
    examples = [example for example in examples if len(example.input_ids) > example.prompt_length + 1]
    if not examples:
        raise ValueError(
            f"No response of two or more tokens was found in {', '.join(map(str, arguments.data))}: give rows with "
            "`prompt` and `response`, `messages`, or `text`."
        )

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval().to(device)
    text_config = target.config.get_text_config()
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
    index = _open_index(folder, settings)
    stored_dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[arguments.dtype]
    head = _check_head(target, examples[0]).to(stored_dtype)  # [V, H]
    if not (folder / HEAD_FILE).exists():
        _write_safetensors({"weight": head.cpu()}, folder / HEAD_FILE)

    shards = _split(sorted(examples, key=lambda example: len(example.input_ids)), arguments.tokens_per_shard)
    start, done = time.perf_counter(), 0
    with tqdm(total=sum(len(e.input_ids) for e in examples), unit="tok", desc="features") as bar:
        for number, shard in enumerate(shards):
            tokens = sum(len(example.input_ids) for example in shard)
            name = f"features-{number:05d}.safetensors"
            if name not in index["shards"]:
                tensors = run_target(target, head, shard, layer_ids, arguments)
                rows = [{**e.meta, "length": len(e.input_ids), "prompt_length": e.prompt_length} for e in shard]
                _write_safetensors(tensors, folder / name, {"rows": json.dumps(rows)})
                index["shards"][name] = {"rows": len(rows), "tokens": tokens, "sha256": file_sha256(folder / name)}
                write_json(folder / INDEX_FILE, index)
                done += tokens
            bar.update(tokens)
    index["complete"] = True
    write_json(folder / INDEX_FILE, index)
    logger.info("%d new tokens in %.0f s, features in %s", done, time.perf_counter() - start, folder)
    return folder


@torch.inference_mode()
def run_target(
    target: PreTrainedModel, head: Tensor, examples: list[Example], layer_ids: list[int], arguments: FeatureArguments
) -> dict[str, Tensor]:
    """The stored tensors of some examples (rising in length), concatenated: N tokens in all.

    Returns:
        `input_ids` int32 `[N]`, `response_mask` bool `[N]`, `taps` `[N, 3H]`, `hidden` `[N, H]`, `logsumexp` fp32
        `[N]`, `top1` int32 `[N]` (the last two describe the token at the next position; 0 and -1 in the prompt).
    """
    weight = head.float()  # fp32 products of the stored numbers: what the distillation loss computes too
    parts: list[dict[str, Tensor]] = []
    for batch in _split(examples, arguments.tokens_per_batch, padded=True):
        longest = len(batch[-1].input_ids)
        input_ids = torch.zeros(len(batch), longest, dtype=torch.long)  # right-padded: causal attention never sees it
        for row, example in enumerate(batch):
            input_ids[row, : len(example.input_ids)] = torch.tensor(example.input_ids)
        with autocast(arguments.precision, target.device.type):
            outputs = target(input_ids.to(target.device), output_hidden_states=True, use_cache=False, logits_to_keep=1)
        states = outputs.hidden_states
        taps = torch.cat([states[i + 1] for i in layer_ids], dim=-1).to(head.dtype)  # [B, T, 3H]
        hidden = states[-1].to(head.dtype)  # [B, T, H], after the final norm
        for row, example in enumerate(batch):
            length, first = len(example.input_ids), example.prompt_length - 1
            logsumexp = torch.zeros(length)
            top1 = torch.full((length,), NO_TOKEN, dtype=torch.int32)
            for begin in range(first, length, 512):  # chunks: full-vocabulary logits are large
                piece = slice(begin, min(begin + 512, length))
                logits = hidden[row, piece].float() @ weight.T  # [chunk, V]
                logsumexp[piece] = logits.logsumexp(-1).cpu()
                top1[piece] = logits.argmax(-1).int().cpu()
            part = {
                "input_ids": input_ids[row, :length].int(),
                "response_mask": torch.arange(length) >= example.prompt_length,
                "taps": taps[row, :length].cpu(),
                "hidden": hidden[row, :length].cpu(),
                "logsumexp": logsumexp,
                "top1": top1,
            }
            if not all(part[name].isfinite().all() for name in ("taps", "hidden", "logsumexp")):
                raise ValueError(
                    f"Hidden states of row {example.meta['id']!r} do not fit {arguments.dtype}: prepare with "
                    "--dtype bfloat16."
                )
            parts.append(part)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _check_head(target: PreTrainedModel, example: Example) -> Tensor:
    """The head's weight `[V, H]`, after making sure that the logits are just `hidden · W`."""
    head = target.get_output_embeddings()
    with torch.inference_mode():
        ids = torch.tensor([example.input_ids], device=target.device)
        outputs = target(ids, output_hidden_states=True, use_cache=False, logits_to_keep=1)
        plain = outputs.hidden_states[-1][:, -1] @ head.weight.T
    if not torch.allclose(plain, outputs.logits[:, -1], rtol=1e-3, atol=1e-2):
        raise ValueError(
            f"{target.name_or_path} changes its logits behind the head (a bias, a scale or soft-capping), which "
            "offline features cannot express yet: use a target without it."
        )
    return head.weight.detach()


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
    differing = [key for key in settings if index["settings"].get(key) != settings[key]]
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
