"""What a pretraining run will need, without its weights: sizes, memory, time, and whether its data can be read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from osprey.train.cost import flops_per_token, meta_parameters
from osprey.train.data import Source, documents, encode
from osprey.train.errors import first_line
from osprey.train.precision import default_device_type, use_bf16
from osprey.train.prune import load_config, refuse_family

if TYPE_CHECKING:
    from osprey.train.pretrain import PretrainArguments

DOCUMENTS = 10
EFFICIENCY = 0.6  # share of the machine's matrix-product speed that training is assumed to reach


def dry_run(arguments: PretrainArguments, sources: list[Source]) -> dict[str, Any]:
    """Builds the model on the meta device and reads ten documents.

    Memory is that of weights, gradients and AdamW's two moments in fp32, of the activations that the backward pass
    needs, and of the source that is distilled from, for each process; time is that of the matrix products at
    `EFFICIENCY` of what this machine does now.

    Raises:
        ValueError: the model's family is not supported, or its config is not there.
    """
    if Path(arguments.model).exists() or arguments.model_config is None:
        config = load_config(arguments.model)
    else:
        refuse_family("model_config", arguments.model_config.get("model_type"))
        config = AutoConfig.for_model(**arguments.model_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = model.num_parameters()
    tables = {
        id(table.weight): table.weight for table in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    frozen = sum(weight.numel() for weight in tables.values()) if arguments.freeze_embeddings else 0
    device_type = default_device_type()
    bf16 = use_bf16(arguments.precision, device_type)
    head_rows = min(arguments.softmax_ids or config.vocab_size, config.vocab_size)
    flops = 3 * flops_per_token(config, arguments.length, head_rows) * arguments.steps * arguments.step_tokens
    memory = 16 * parameters - 12 * frozen + activation_bytes(config, arguments, head_rows, bf16)
    if arguments.distill_from is not None:  # a forward pass of the source, frozen, without what a backward pass needs
        teacher = load_config(arguments.distill_from)
        memory += meta_parameters(teacher) * (2 if bf16 else 4)
        flops += flops_per_token(teacher, arguments.length, head_rows) * arguments.steps * arguments.step_tokens
    speed = matmul_flops(device_type, torch.bfloat16 if bf16 else torch.float32)
    processes = arguments.step_rows // (arguments.batch_rows * arguments.accumulation)
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "parameters": parameters,
        "body_parameters": sum(weight.numel() for weight in model.base_model.layers.parameters()),
        "processes": processes,
        "steps": arguments.steps,
        "step_tokens": arguments.step_tokens,
        "tokens": arguments.steps * arguments.step_tokens,
        "memory_bytes": memory,
        "flops": flops,
        "machine_flops_per_second": round(speed),
        "seconds": round(flops / (speed * EFFICIENCY * processes)),
        "data": _check_data(sources, arguments.model),
    }


def activation_bytes(config: PreTrainedConfig, arguments: PretrainArguments, head_rows: int, bf16: bool) -> int:
    """What a forward pass of one process keeps for its backward pass (without gradient checkpointing)."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    # In a block: the residual stream before and after each norm; q, k, v and the heads' output; four of the FFN's.
    block = 4 * config.hidden_size + 2 * queries + 2 * keys + 4 * config.intermediate_size
    elements = config.num_hidden_layers * block + 2 * config.hidden_size + head_rows
    return arguments.batch_rows * arguments.length * elements * (2 if bf16 else 4)


def matmul_flops(
    device_type: str,
    dtype: torch.dtype,
    size: int = 2048,
    seconds: float = 0.5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Floating-point operations a second of square matrix products, measured now for about `seconds` of `clock`."""
    left, right = (torch.randn(size, size, device=device_type).to(dtype) for _ in range(2))

    def timed(repeats: int) -> float:
        start = clock()
        for _ in range(repeats):
            left @ right
        if device_type == "cuda":
            torch.cuda.synchronize()
        return (clock() - start) / repeats

    timed(1)  # the first product chooses its kernel
    return 2 * size**3 / timed(max(1, math.ceil(seconds / timed(1))))


def _check_data(sources: list[Source], model: str) -> dict[str, Any]:
    """Reads ten documents or more, as many of each source; says in one sentence why it could not."""
    checked: dict[str, Any] = {"documents": 0, "characters": 0, "tokens": None, "not_checked": None}
    tokenizer = None
    if Path(model).exists():
        tokenizer, checked["tokens"] = AutoTokenizer.from_pretrained(model), 0
    for source in sources:
        try:
            rows = list(islice(documents(source), math.ceil(DOCUMENTS / len(sources))))
        except Exception as error:  # of the network, or of any reader
            checked["not_checked"] = (
                str(error) if isinstance(error, OSError) else f"{source.name}: {first_line(error)}"
            )
            break
        for row in rows:
            checked["documents"] += 1
            checked["characters"] += sum(len(text) for text in row.values() if isinstance(text, str))
            if tokenizer is not None:
                checked["tokens"] += len(encode(row, tokenizer, source.name))
    return checked
