"""Exports: a drafter in the files that other engines read, each loaded back and compared before it counts as done.

- `vllm`: what the plugin reads (it reads a drafter folder as well), without remote code, with a head of its own.
- `sglang`: the keys and names of EAGLE-3 checkpoints with several widened layers (`swap_h_and_emb`).
- `causal-lm`: the backbone in the target's vocabulary, without taps, as an ordinary checkpoint of its family.
- `gguf`: the same as one GGUF file, for llama.cpp.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from osprey.modeling import OspreyConfig, OspreyDrafter
from osprey.serving.causal_lm import check_causal_lm, write_causal_lm
from osprey.serving.gguf_file import GGUF_NAME, check_gguf, write_gguf
from osprey.serving.layout import vllm_tap_ids
from osprey.serving.rebuild import check_rebuilt

FORMATS = ("vllm", "sglang", "causal-lm", "gguf")
SGLANG_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Qwen3ForCausalLMEagle3"}
NOT_FOR_ENGINES = ("auto_map", "transformers_version", "_name_or_path", "name_or_path")


@dataclass
class ExportArguments:
    """Arguments of `osprey export`."""

    drafter: str = field(metadata={"help": "drafter: Hub id or folder"})
    out: str = field(metadata={"help": "folder to write"})
    to: str = field(metadata={"help": "what to write", "choices": FORMATS})
    tokenizer_pre: str = field(
        default="default",
        metadata={"help": "gguf: llama.cpp's name of the target's pre-tokenizer (smollm, qwen2, llama-bpe, ...)"},
    )
    overwrite: bool = field(default=False, metadata={"help": "replace the folder if it exists"})


def export(drafter_path: str, to: str, folder: Path, tokenizer_pre: str = "default") -> dict[str, Any]:
    """Writes the export into the empty `folder` and returns what was compared; the weights keep their stored dtype.

    Raises:
        ValueError: the format cannot express this drafter, or what was loaded back computes something else.
        OSError: the drafter, or its tokenizer, cannot be read.
    """
    dtype = OspreyConfig.from_pretrained(drafter_path).dtype or torch.float32
    drafter = OspreyDrafter.from_pretrained(drafter_path, dtype=torch.float32).eval()
    if to == "vllm":
        write_checkpoint(*vllm_layout(drafter), folder, dtype)
        difference = check_rebuilt(drafter, folder)
    elif to == "sglang":
        write_checkpoint(*sglang_layout(drafter), folder, dtype)
        difference = check_rebuilt(drafter, folder)
    elif to == "causal-lm":
        write_causal_lm(drafter, drafter_path, folder, dtype)
        difference = check_causal_lm(drafter, folder)
    else:  # gguf: the command line takes `FORMATS` only
        write_gguf(drafter, drafter_path, folder / GGUF_NAME, dtype, tokenizer_pre)
        difference = check_gguf(drafter, drafter_path, folder)
    return {"to": to, "dtype": str(dtype).removeprefix("torch."), "largest_logit_difference": difference}


def vllm_layout(drafter: OspreyDrafter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A drafter folder's config and tensors, with vLLM's tap ids and the head of a tied shortlist stored."""
    config = {key: value for key, value in drafter.config.to_dict().items() if key not in NOT_FOR_ENGINES}
    config |= {
        "architectures": ["OspreyDrafterForCausalLM"],
        "eagle_aux_hidden_state_layer_ids": vllm_tap_ids(drafter.config.target_layer_ids),
        "tie_word_embeddings": drafter.config.tie_word_embeddings and not drafter.has_tied_shortlist,
    }
    tensors = dict(drafter.state_dict())
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return config, tensors


def sglang_layout(drafter: OspreyDrafter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """EAGLE-3 names and keys as the published Osprey checkpoints have them.

    With `swap_h_and_emb` the two inputs of a layer change places, and with them the norms' names: `hidden_norm` is
    over the residual stream, `input_layernorm` over the context.
    """
    ours = drafter.config
    family = ours.backbone_model_type
    obstacles = {
        f"of family {family}": family not in SGLANG_ARCHITECTURES,
        "with biases in some of the attention's projections only": ours.attention_bias != ours.attention_output_bias,
        "without rotary positions in some layers": 0 in (ours.no_rope_layers or ()),
    }
    found = [name for name, there in obstacles.items() if there]
    if found:
        raise ValueError(
            f"This drafter's blocks are {', '.join(found)}, but EAGLE-3 checkpoints for SGLang hold plain llama and "
            "qwen3 blocks: serve it with vLLM, or export it as causal-lm."
        )
    rope = dict(ours.rope_parameters)
    theta = rope.pop("rope_theta")
    kept = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "initializer_range", "vocab_size"),
        *("attention_bias", "mlp_bias", "target_hidden_size", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    draft_ids = drafter.draft_ids  # [D]; without a shortlist all but the rows that only pad the vocabulary
    config = {key: getattr(ours, key) for key in kept} | {
        "architectures": [SGLANG_ARCHITECTURES[family]],
        "model_type": family,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "draft_vocab_size": len(draft_ids),
        "tie_word_embeddings": False,
        "swap_h_and_emb": True,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(ours.target_layer_ids),
            "use_aux_hidden_state": True,
        },
    }
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        name = name.replace(".input_layernorm.", ".hidden_norm.").replace(".ctx_norm.", ".input_layernorm.")
        if ours.num_hidden_layers == 1:
            name = name.replace("layers.0.", "midlayer.")
        tensors[name] = tensor
    tensors["lm_head.weight"] = drafter.head_weight.detach()
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(ours.vocab_size, dtype=torch.bool).index_fill_(0, draft_ids, True)
    return config, tensors


def write_checkpoint(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """`config.json` and `model.safetensors`; floating-point tensors are stored as `dtype`."""
    config = config | {"dtype": str(dtype).removeprefix("torch.")}
    stored = {n: t.detach().to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    save_file({n: t.clone().contiguous() for n, t in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
