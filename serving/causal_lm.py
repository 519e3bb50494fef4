"""A drafter without its taps: an ordinary causal LM of the backbone's family, in the target's vocabulary.

Any engine serves it as a plain draft model. With zeros for contexts the drafter computes the same: `ctx_norm` of zero
is zero, so that the context half of the widened projections has no part.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from osprey.modeling import OspreyConfig, OspreyDrafter
from osprey.serving.rebuild import logit_difference

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "smollm3": SmolLM3Config}


def causal_lm_config(ours: OspreyConfig) -> PreTrainedConfig:
    """The config of the backbone's family, with the target's vocabulary.

    Raises:
        ValueError: the family is unknown, or its head cannot be narrowed to the drafter's.
    """
    family = ours.backbone_model_type
    if family not in FAMILIES:
        raise ValueError(
            f"The drafter's blocks are of family {family!r}, but only {', '.join(FAMILIES)} ones can be exported as a "
            "causal LM: correct backbone_model_type in its config.json."
        )
    if ours.draft_vocab_size is not None and not ours.tie_word_embeddings:
        raise ValueError(
            f"The drafter has a head of its own for {ours.draft_vocab_size} of {ours.vocab_size} tokens, which an "
            "ordinary causal LM cannot have: convert the backbone without a draft vocabulary, or with a tied head."
        )
    kept = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
        *("rope_parameters", "initializer_range", "tie_word_embeddings", "attention_bias", "mlp_bias"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
    values = {key: getattr(ours, key) for key in kept}
    if family == "smollm3":
        values["no_rope_layers"] = ours.no_rope_layers
    return FAMILIES[family](**values)


def causal_lm_state(drafter: OspreyDrafter) -> dict[str, Tensor]:
    """The drafter's tensors under the family's names, without the context half."""
    hidden_size = drafter.config.hidden_size
    state = {}
    for name, tensor in drafter.state_dict().items():
        if name in ("fc.weight", "d2t", "t2d", "lm_head.weight") or ".ctx_norm." in name:
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor = tensor[:, hidden_size:]  # [out, 2h]: [context | x]
        state[f"model.{name}"] = tensor
    tied = drafter.config.tie_word_embeddings
    state["lm_head.weight"] = drafter.embed_tokens.weight if tied else drafter.lm_head.weight
    return state


def causal_lm(drafter: OspreyDrafter) -> PreTrainedModel:
    """The drafter without its taps, with the drafter's own tensors where they fit."""
    model = AutoModelForCausalLM.from_config(causal_lm_config(drafter.config), dtype=torch.float32)
    model.load_state_dict(causal_lm_state(drafter))
    model.generation_config.update(do_sample=False)
    return model.eval()


def write_causal_lm(drafter: OspreyDrafter, drafter_path: str, folder: Path, dtype: torch.dtype) -> None:
    """A checkpoint folder with the target's tokenizer."""
    causal_lm(drafter).to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(drafter_path).save_pretrained(folder)


def check_causal_lm(drafter: OspreyDrafter, folder: Path, **kwargs) -> float:
    """Loads the folder back (`kwargs` as for `from_pretrained`): largest difference from the drafter's own logits.

    Raises:
        ValueError: the difference is more than float noise.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(drafter.config.num_draftable, (2, 16), generator=generator)
    with torch.no_grad():
        return logit_difference(drafter(tokens).logits, model(tokens).logits)
