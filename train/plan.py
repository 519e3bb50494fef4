"""What an adaptation needs before it starts: parameters, memory by part, disk, and time.

Models are built on the meta device, from their configs alone. What an allocator adds to the memory that is counted
(fragmentation, workspaces) is not known: `MARGIN` stands for it.
"""

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from osprey.modeling.configuration_osprey import OspreyConfig
from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM
from osprey.train.adapt import AdaptationSettings
from osprey.train.convert import drafter_config
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.features import STORED_DTYPES, feature_bytes
from osprey.train.losses import divergence
from osprey.train.memory import batch_parts, memory_by_phase, per_card
from osprey.train.precision import autocast, compute_dtype
from osprey.train.unroll import find_chains, unroll

MARGIN = 1.1  # of all that is counted
MEASURED_TOKENS = 256


@dataclass
class PlanArguments(AdaptationSettings):
    """Arguments of `plan`: a recipe, and the machine that it shall run on."""

    gpus: int = field(default=1, metadata={"help": "cards; the target is spread over them, the drafter is on one"})
    memory: float | None = field(default=None, metadata={"help": "GB of a card (default: what this machine has)"})
    data_tokens: float | None = field(default=None, metadata={"help": "tokens of the data, for disk and time"})
    measure: bool = field(default=True, metadata={"help": "time a short step here with random weights"})


def plan(arguments: PlanArguments, config: OspreyDistillationConfig) -> dict[str, Any]:
    """Sizes in bytes and times in seconds of an adaptation, and what to change if it does not fit.

    Returns:
        `parameters`, `memory` by phase (`prepare`, `distill_offline`, `distill_online`) and part, `fits` by phase,
        `disk`, `step_tokens`, `measured` (None without a measurement) and `advice`, sentences. Sizes and times that
        depend on the data are None where its size is unknown.

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
    disk = None
    if arguments.data_tokens is not None:
        disk = feature_bytes(int(arguments.data_tokens), text.hidden_size, item)
        disk += text.vocab_size * text.hidden_size * item
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
) -> dict[str, float | None]:
    """Seconds of a training step and of the whole, from a short step here: the drafter with random weights, and one
    layer of the target times its layers. The whole is `max_steps` full batches where the recipe has them, else its
    epochs of the data (None where the data's size is unknown)."""
    device = config.device
    generator = torch.Generator().manual_seed(0)
    drafter = OspreyDrafterForCausalLM(ours).to(device)
    drafter.embed_tokens.requires_grad_(not config.freeze_embeddings)
    length = min(MEASURED_TOKENS, config.max_length)
    ids = torch.randint(0, ours.vocab_size, (1, length), generator=generator).to(device)
    taps = torch.randn(1, length, 3 * ours.target_hidden_size, generator=generator).to(device)
    everything = torch.ones(1, length, dtype=torch.bool, device=device)
    chains = find_chains(everything, config.unroll_steps, config.unroll_fraction)
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
    trained = None if tokens is None else tokens * config.num_train_epochs
    if config.max_steps > 0:
        trained = config.max_steps * step_tokens
    return {
        "drafter_tokens_per_second": round(1 / seconds, 1),
        "target_tokens_per_second": round(1 / target_seconds, 1),
        "step_seconds_offline": round(seconds * step_tokens, 3),
        "step_seconds_online": round((seconds + target_seconds) * step_tokens, 3),
        "prepare_seconds": None if tokens is None else round(target_seconds * tokens, 1),
        "distill_seconds_offline": None if trained is None else round(seconds * trained, 1),
        "distill_seconds_online": None if trained is None else round((seconds + target_seconds) * trained, 1),
    }


@torch.no_grad()
def target_forward(target_config: PreTrainedConfig, ids: Tensor, config: OspreyDistillationConfig) -> float:
    """Seconds of the target's layers over `ids`: one layer's time, times their number (no embedding, no head)."""
    text = type(target_config.get_text_config()).from_dict(target_config.get_text_config().to_dict())
    layers, text.num_hidden_layers = text.num_hidden_layers, 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[-1:]
    text.vocab_size, text.pad_token_id = 1, None
    dtype = compute_dtype(config.precision, ids.device.type)
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
