"""What an adaptation needs before it starts: parameters, memory by part, disk, and time.

Models are built on the meta device, from their configs alone. Memory is counted, not guessed, where it can be: the
activations of the unrolled drafter are the tensors that autograd keeps for its backward pass. What an allocator adds
(fragmentation, workspaces) is not counted: `MARGIN` stands for it.
"""

import copy
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.masking_utils import sdpa_mask

from osprey.modeling.configuration_osprey import OspreyConfig
from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM
from osprey.train.adapt import AdaptationSettings
from osprey.train.convert import drafter_config
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.features import LOGIT_ROWS, STORED_DTYPES, feature_bytes
from osprey.train.losses import divergence
from osprey.train.precision import autocast, use_bf16
from osprey.train.unroll import Chains, find_chains, unroll

MARGIN = 1.1  # of all that is counted
MEASURED_TOKENS = 256
BACKWARD = 3  # forward and backward cost three forwards


@dataclass
class PlanArguments(AdaptationSettings):
    """Arguments of `plan`: a recipe, and the machine that it shall run on."""

    gpus: int = field(default=1, metadata={"help": "cards; the target is spread over them, the drafter is on one"})
    memory: float | None = field(default=None, metadata={"help": "GB of a card (default: what this machine has)"})
    data_tokens: float = field(default=0.0, metadata={"help": "tokens of the data, for disk and time"})
    measure: bool = field(default=True, metadata={"help": "time a short step here with random weights"})


def plan(arguments: PlanArguments, config: OspreyDistillationConfig) -> dict[str, Any]:
    """Sizes in bytes and times in seconds of an adaptation, and what to change if it does not fit.

    Returns:
        `parameters`, `memory` by phase (`prepare`, `distill_offline`, `distill_online`) and part, `fits` by phase,
        `disk`, `step_tokens`, `measured` (None without a measurement) and `advice`, sentences.

    Raises:
        ValueError, OSError: a config cannot be read, or backbone and target do not go together.
    """
    revision = arguments.target_revision or "main"
    target_config = AutoConfig.from_pretrained(arguments.target, revision=revision)
    ours = plan_drafter_config(arguments, target_config.get_text_config())
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config)
        drafter = OspreyDrafterForCausalLM(ours)
    drafter.embed_tokens.requires_grad_(not config.freeze_embeddings)
    if ours.tie_word_embeddings:
        drafter.lm_head.requires_grad_(not config.freeze_embeddings and not drafter.has_tied_shortlist)
    trained = [parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad]
    matrices = sum(
        parameter.numel()
        for name, parameter in drafter.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and name.startswith(("fc.", "layers."))
    )
    parameters = {
        "target": count(target),
        "drafter": count(drafter),
        "drafter_trained": sum(trained),
        "drafter_body": sum(
            p.numel() for name, p in drafter.named_parameters() if name.startswith(("layers.", "fc."))
        ),
    }
    memory = memory_by_phase(arguments, config, target_config, drafter, parameters, matrices)
    limit = arguments.memory * 1e9 if arguments.memory else device_memory()
    totals = {phase: MARGIN * sum(parts.values()) for phase, parts in memory.items()}
    shares = {phase: per_card(parts, arguments.gpus) * MARGIN for phase, parts in memory.items()}
    fits = {phase: share <= limit for phase, share in shares.items()}
    step_tokens = config.per_device_train_batch_size * config.max_length * config.gradient_accumulation_steps
    text = target_config.get_text_config()
    item = STORED_DTYPES[arguments.features_dtype].itemsize
    disk = (
        feature_bytes(int(arguments.data_tokens), text.hidden_size, item) + text.vocab_size * text.hidden_size * item
    )
    return {
        "parameters": parameters,
        "memory": {phase: parts | {"total": int(totals[phase])} for phase, parts in memory.items()},
        "memory_per_card": {phase: int(share) for phase, share in shares.items()},
        "card": int(limit),
        "gpus": arguments.gpus,
        "fits": fits,
        "disk": disk,
        "bytes_per_token_on_disk": feature_bytes(1, text.hidden_size, item),
        "step_tokens": step_tokens,
        "measured": measure(ours, target_config, config, arguments, step_tokens) if arguments.measure else None,
        "advice": advice(arguments, config, memory, shares, limit),
    }


def plan_drafter_config(arguments: AdaptationSettings, target: PreTrainedConfig) -> OspreyConfig:
    no_tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return drafter_config(AutoConfig.from_pretrained(arguments.backbone), target, no_tokenizer, arguments)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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


def device_memory() -> float:
    """Bytes of the first card, or of the machine where there is none."""
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    with open("/proc/meminfo") as file:
        return float(file.readline().split()[1]) * 1024


def measure(
    ours: OspreyConfig,
    target_config: PreTrainedConfig,
    config: OspreyDistillationConfig,
    arguments: PlanArguments,
    step_tokens: int,
) -> dict[str, float]:
    """Seconds of a training step and of the whole, from a short step here: the drafter with random weights, and one
    layer of the target times its layers."""
    device = config.device
    generator = torch.Generator().manual_seed(0)
    drafter = OspreyDrafterForCausalLM(ours).to(device)
    drafter.embed_tokens.requires_grad_(not config.freeze_embeddings)
    length = min(MEASURED_TOKENS, config.max_length)
    ids = torch.randint(0, ours.vocab_size, (1, length), generator=generator).to(device)
    taps = torch.randn(1, length, 3 * ours.target_hidden_size, generator=generator).to(device)
    chains = find_chains(torch.ones(1, length, dtype=torch.bool, device=device), config.unroll_steps)
    head = torch.randn(len(drafter.draft_ids), ours.target_hidden_size + 2, generator=generator).to(device) / 100

    def train_step() -> None:
        with autocast(config.precision, device.type):
            states = unroll(drafter, ids, taps, chains, config.unroll_steps)
            student = drafter.norm(torch.cat([state.flatten(0, 1) for state in states]))  # [P, h]
            teacher = head.new_zeros(len(student), head.shape[1])
            labels = torch.full((len(student),), -1, device=device)
            weights = torch.ones(len(student), device=device)
            chunk = config.loss_chunk_size
            loss, *_ = divergence(student, drafter.head_weight, teacher, head, labels, weights, config.beta, chunk)
        loss.backward()

    seconds = timed(train_step, device) / length
    target_seconds = target_forward(target_config, ids, config) / length
    tokens = arguments.data_tokens
    epochs = config.num_train_epochs if config.max_steps <= 0 else config.max_steps * step_tokens / max(tokens, 1)
    return {
        "drafter_tokens_per_second": round(1 / seconds, 1),
        "target_tokens_per_second": round(1 / target_seconds, 1),
        "step_seconds_offline": round(seconds * step_tokens, 3),
        "step_seconds_online": round((seconds + target_seconds) * step_tokens, 3),
        "prepare_seconds": round(target_seconds * tokens, 1),
        "distill_seconds_offline": round(seconds * tokens * epochs, 1),
        "distill_seconds_online": round((seconds + target_seconds) * tokens * epochs, 1),
    }


@torch.no_grad()
def target_forward(target_config: PreTrainedConfig, ids: Tensor, config: OspreyDistillationConfig) -> float:
    """Seconds of the target's layers over `ids`: one layer's time, times their number (no embedding, no head)."""
    text = type(target_config.get_text_config()).from_dict(target_config.get_text_config().to_dict())
    layers, text.num_hidden_layers = text.num_hidden_layers, 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[-1:]
    text.vocab_size, text.pad_token_id = 1, None
    dtype = torch.bfloat16 if use_bf16(config.precision, ids.device.type) else torch.float32
    layer = AutoModelForCausalLM.from_config(text, dtype=dtype).eval().to(ids.device).base_model
    return layers * timed(lambda: layer(torch.zeros_like(ids)), ids.device)


def timed(step: Any, device: torch.device) -> float:
    """Seconds of the second call; the first warms up."""
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def advice(
    arguments: PlanArguments,
    config: OspreyDistillationConfig,
    memory: dict[str, dict[str, int]],
    shares: dict[str, float],
    limit: float,
) -> list[str]:
    """One sentence for each phase that does not fit, with the change that would make it fit."""
    sentences = []
    for phase, share in shares.items():
        if share <= limit:
            continue
        parts = memory[phase]
        fixed = MARGIN * (sum(parts.values()) - parts.get("target_weights", 0) - batch_parts(parts))
        text = f"{phase} needs {share / 1e9:.1f} GB on a card, {share / limit:.1f} times what it has: "
        weights = MARGIN * parts.get("target_weights", 0)
        room = limit - fixed - MARGIN * batch_parts(parts)
        if weights and weights / arguments.gpus > limit - fixed:
            cards = int(-(-weights // room)) if room > 0 else None
            text += f"spread the target over {cards} cards (--gpus)" if cards else "take larger cards"
            text += ", or take a quantized target"
            if phase == "distill_online":
                text += ", or prepare features first, which needs the target without the drafter"
        else:
            factor = (limit - fixed - weights / arguments.gpus) / max(MARGIN * batch_parts(parts), 1)
            name, value = "tokens_per_batch", arguments.tokens_per_batch
            if phase != "prepare":
                rows = config.per_device_train_batch_size
                name, value = ("per_device_train_batch_size", rows) if rows > 1 else ("max_length", config.max_length)
            fitting = int(value * factor)
            text += f"lower --{name} from {value} to {fitting}" if fitting > 0 else "take larger cards"
            if name == "per_device_train_batch_size" and fitting > 0:
                text += f" (and --gradient_accumulation_steps {-(-value // fitting)} keeps the step as it is)"
        sentences.append(text + ".")
    return sentences


def batch_parts(parts: dict[str, int]) -> int:
    """Bytes that grow with the batch."""
    return sum(
        parts.get(name, 0) for name in ("activations", "loss_rows", "batch", "target_taps", "target_activations")
    )
