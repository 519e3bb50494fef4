"""What an engine has to know of a drafter's files: tap ids, config keys, tensor names and shapes.

Needs no package at all, so that it works in an engine's own environment, whatever transformers that has.
"""

from collections.abc import Iterable, Mapping
from typing import Any

# What defines the computation. An engine would fill a missing key with a default of its own, and draft noise.
REQUIRED_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm", "tie_word_embeddings"),
    *("target_hidden_size", "target_num_hidden_layers", "target_layer_ids"),
)
FORMAT_VERSIONS = (1, 2)  # 2 added a hash of the target's vocabulary


def vllm_tap_ids(target_layer_ids: Iterable[int]) -> list[int]:
    """Tap ids as vLLM counts them (`eagle_aux_hidden_state_layer_ids`): 0 is the embedding, `i + 1` layer i's output.

    `target_layer_ids` counts decoder layers from 0, as transformers' DFlash and SGLang do.
    """
    return [i + 1 for i in target_layer_ids]


def from_vllm_tap_ids(layer_ids: Iterable[int]) -> list[int]:
    """The inverse of `vllm_tap_ids`."""
    return [i - 1 for i in layer_ids]


def check_config(config: Mapping[str, Any]) -> None:
    """Raise `ValueError` where a drafter's `config.json` leaves open, or contradicts, what it computes."""
    missing = [key for key in REQUIRED_KEYS if config.get(key) is None]
    if missing:
        raise ValueError(
            f"The drafter's config.json has no {', '.join(missing)}, which an engine would fill with a default of its "
            "own: save the drafter again with a current osprey-drafter."
        )
    version = config.get("format_version", 1)
    if version not in FORMAT_VERSIONS:
        raise ValueError(
            f"The drafter's format_version is {version}, but this code reads up to {max(FORMAT_VERSIONS)}: "
            "update osprey-drafter."
        )
    taps, num_layers = list(config["target_layer_ids"]), config["target_num_hidden_layers"]
    if len(taps) != 3 or sorted(set(taps)) != taps or taps[0] < 0 or taps[-1] > num_layers - 2:
        raise ValueError(
            f"The drafter's target_layer_ids are {taps}, but they must be three different layers in rising order from "
            f"0 to {num_layers - 2} (its target has {num_layers} layers): correct config.json."
        )
    written = config.get("eagle_aux_hidden_state_layer_ids")
    if written is not None and list(written) != vllm_tap_ids(taps):
        raise ValueError(
            f"The drafter's eagle_aux_hidden_state_layer_ids are {list(written)}, but its target_layer_ids {taps} are "
            f"{vllm_tap_ids(taps)} as vLLM counts: correct config.json, or leave the first key out."
        )
    no_rope = config.get("no_rope_layers")
    if no_rope is not None and len(no_rope) != config["num_hidden_layers"]:
        raise ValueError(
            f"The drafter's no_rope_layers has {len(no_rope)} entries for {config['num_hidden_layers']} layers: "
            "correct config.json."
        )


def check_target(config: Mapping[str, Any], vocab_size: int, hidden_size: int, num_hidden_layers: int) -> None:
    """Raise `ValueError` where the drafter was made for a target of another shape."""
    for name, expected, found in (
        ("vocabulary size", config["vocab_size"], vocab_size),
        ("hidden size", config["target_hidden_size"], hidden_size),
        ("number of layers", config["target_num_hidden_layers"], num_hidden_layers),
    ):
        if expected != found:
            raise ValueError(
                f"This drafter was made for {config.get('target') or 'a target'} with a {name} of {expected}, but the "
                f"served model has {found}: serve that model, or make a drafter for this one with `osprey convert`."
            )


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor in a drafter's weights; a tied head has none of its own."""
    h, vocab_size, head_dim = config["hidden_size"], config["vocab_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    intermediate, draft_vocab_size = config["intermediate_size"], config.get("draft_vocab_size")
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab_size, h),
        "fc.weight": (h, 3 * config["target_hidden_size"]),
        "norm.weight": (h,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (draft_vocab_size or vocab_size, h)
    if draft_vocab_size is not None:
        shapes |= {"d2t": (draft_vocab_size,), "t2d": (vocab_size,)}
    linears = {
        "self_attn.q_proj": (q, 2 * h, config["attention_bias"]),
        "self_attn.k_proj": (kv, 2 * h, config["attention_bias"]),
        "self_attn.v_proj": (kv, 2 * h, config["attention_bias"]),
        "self_attn.o_proj": (h, q, config["attention_output_bias"]),
        "mlp.gate_proj": (intermediate, h, config["mlp_bias"]),
        "mlp.up_proj": (intermediate, h, config["mlp_bias"]),
        "mlp.down_proj": (h, intermediate, config["mlp_bias"]),
    }
    norms = {"ctx_norm": h, "input_layernorm": h, "post_attention_layernorm": h}
    if config["qk_norm"]:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    for layer in range(config["num_hidden_layers"]):
        for name, (out_features, in_features, bias) in linears.items():
            shapes[f"layers.{layer}.{name}.weight"] = (out_features, in_features)
            if bias:
                shapes[f"layers.{layer}.{name}.bias"] = (out_features,)
        shapes |= {f"layers.{layer}.{name}.weight": (size,) for name, size in norms.items()}
    return shapes


def check_tensors(config: Mapping[str, Any], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ValueError` for a missing, unexpected or misshapen tensor, of names and shapes that were `found`."""
    expected = tensor_shapes(config)
    faults = {
        "missing": sorted(set(expected) - set(found)),
        "unexpected": sorted(set(found) - set(expected)),
        "of another shape": [n for n in sorted(set(expected) & set(found)) if tuple(found[n]) != expected[n]],
    }
    if any(faults.values()):
        listed = "; ".join(f"{kind}: {', '.join(names[:4])}" for kind, names in faults.items() if names)
        raise ValueError(
            f"The drafter's weights do not fit its config.json (tensors {listed}): fetch or make the drafter again."
        )
