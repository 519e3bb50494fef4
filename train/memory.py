"""Bytes that stage 4 needs, by phase and part.

Counted, not guessed, where it can be: the activations of the unrolled drafter are the tensors that autograd keeps for
its backward pass, on the meta device.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import sdpa_mask

from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM
from osprey.train.adapt import AdaptationSettings
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.features import LOGIT_ROWS, STORED_DTYPES
from osprey.train.unroll import Chains, unroll


def memory_by_phase(
    arguments: AdaptationSettings,
    config: OspreyDistillationConfig,
    target_config: PreTrainedConfig,
    drafter: OspreyDrafterForCausalLM,
    parameters: dict[str, int],
    matrices: int,
) -> dict[str, dict[str, int]]:
    """Bytes of each part in each phase; what only one card holds is named in `per_card`."""
    text = target_config.get_text_config()
    hidden, vocabulary = text.hidden_size, text.vocab_size
    compute = 2 if config.bf16 else 4  # bytes of an activation
    rows, length = config.per_device_train_batch_size, config.max_length
    draft_vocabulary = drafter.config.draft_vocab_size or vocabulary
    trained = parameters["drafter_trained"]
    # Muon keeps one moment for each matrix element, AdamW two.
    moments = 2 * trained - (matrices if config.muon else 0)
    drafted = rows * length * (1 + config.unroll_fraction * (config.unroll_steps - 1))  # rows of the loss
    student = {
        "drafter_weights": 4 * parameters["drafter"],
        "drafter_gradients": 4 * trained,
        "optimizer": 4 * moments,
        "drafter_bf16_copies": 2 * (parameters["drafter_body"] if config.bf16 else 0),
        "activations": activations(drafter, config),
        # Student and teacher rows (fp32), their gradient, and the three wide pieces of one chunk.
        "loss_rows": int(drafted) * 4 * (3 * drafter.config.hidden_size + hidden),
        "logits_chunk": config.loss_chunk_size * draft_vocabulary * (3 * 4 + 2 * compute),
        "target_head": draft_vocabulary * hidden * (4 + (2 if config.bf16 else 0)),
        "batch": rows * length * 4 * hidden * (4 + STORED_DTYPES[arguments.features_dtype].itemsize),
    }
    weights = parameters["target"] * weight_bytes(target_config, config.bf16)
    # A few widened activations of one layer; the MLP's are the widest.
    wide = max(getattr(text, "intermediate_size", 0) or 0, 4 * hidden)
    forward = {"target_weights": int(weights), "target_taps": 0, "target_activations": 0}
    prepare = forward | {
        "target_taps": arguments.tokens_per_batch * 4 * hidden * compute,
        "target_activations": arguments.tokens_per_batch * (4 * hidden + 3 * wide) * compute,
        "target_logits_chunk": (LOGIT_ROWS * 2 + hidden) * vocabulary * 4,
    }
    online = forward | {
        "target_taps": rows * length * 4 * hidden * compute,
        "target_activations": rows * length * (4 * hidden + 3 * wide) * compute,
        "target_logits_chunk": (LOGIT_ROWS * 2 + hidden) * vocabulary * 4,
    }
    return {"prepare": prepare, "distill_offline": student, "distill_online": student | online}


def weight_bytes(target: PreTrainedConfig, bf16: bool) -> float:
    """Bytes a parameter of the target, as it is loaded."""
    quantization = getattr(target, "quantization_config", None) or {}
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if quantization.get("quant_method") == "fp8":
        return 1.0
    if quantization.get("bits"):
        return quantization["bits"] / 8
    return 2.0 if bf16 else 4.0


def activations(drafter: OspreyDrafterForCausalLM, config: OspreyDistillationConfig) -> int:
    """Bytes that autograd keeps of an unrolled forward over a whole batch, counted on one row of the meta device."""
    length, steps = config.max_length, config.unroll_steps
    anchors = max(1, int((length - 2) * config.unroll_fraction))
    kept: dict[int, tuple[Any, int]] = {}
    own: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in own and tensor.untyped_storage()._cdata not in kept:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = (storage, storage.nbytes())  # held, so that no other takes its place
        return tensor

    # In bf16 as a whole, which is what autocast makes of nearly everything that is kept.
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        working = OspreyDrafterForCausalLM._from_config(copy.deepcopy(drafter.config), dtype=dtype)
        working.config._attn_implementation = MEMORY_EFFICIENT
        ids = torch.zeros(1, length, dtype=torch.long)
        taps = torch.zeros(1, length, 3 * drafter.config.target_hidden_size, dtype=working.dtype)
        chains = Chains(torch.zeros(1, anchors, dtype=torch.long), torch.zeros(1, anchors, dtype=torch.long))
        own.update(map(id, working.parameters()))
        unroll(working, ids, taps, chains, steps)
    return config.per_device_train_batch_size * sum(size for _, size in kept.values())


class _MemoryEfficientAttention(torch.autograd.Function):
    """Keeps what the kernels of flash and memory-efficient attention keep; the meta device would do it by formula."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(query.shape[:3], dtype=torch.float32))
        return output


def _memory_efficient(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
):
    if mask is not None:
        groups = module.num_key_value_groups
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))  # [B, heads, S, head_dim]
        mask = torch.empty_like(mask, dtype=query.dtype)
    return _MemoryEfficientAttention.apply(query, key, value, mask).transpose(1, 2), None


MEMORY_EFFICIENT = "osprey_plan"
AttentionInterface.register(MEMORY_EFFICIENT, _memory_efficient)
AttentionMaskInterface.register(MEMORY_EFFICIENT, sdpa_mask)


def per_card(parts: dict[str, int], gpus: int) -> float:
    """Bytes of the fullest card: the target's weights are spread, all else is on the first."""
    spread = parts.get("target_weights", 0)
    return spread / gpus + sum(parts.values()) - spread


def batch_parts(parts: dict[str, int]) -> int:
    """Bytes that grow with the batch."""
    return sum(
        parts.get(name, 0) for name in ("activations", "loss_rows", "batch", "target_taps", "target_activations")
    )
