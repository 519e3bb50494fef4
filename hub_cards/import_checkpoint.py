"""The authors' released checkpoints: what their config means, and which tensor is which of a drafter's.

They are laid out as EAGLE-3 checkpoints, with a residual stream that starts from the embedding (`swap_h_and_emb`).
Their two input norms are named for EAGLE-3's stream: `hidden_norm` is over x, and `input_layernorm` over the context.
"""

import json
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from osprey.modeling import OspreyDrafter

REPO = "BobbieBieee/Osprey-Speculative-Decoding"
TARGETS = {  # by the first folder of a checkpoint in REPO
    "qwen3-8b": "Qwen/Qwen3-8B",
    "llama33-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "minimax-m25": "MiniMaxAI/MiniMax-M2.5",
}
ARCHITECTURES = {"Qwen3ForCausalLMEagle3": "qwen3", "LlamaForCausalLMEagle3": "llama"}
NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "rms_norm_eps", "target_hidden_size"),
)
READ = {  # keys that are no setting of the blocks' own family
    *("architectures", "model_type", "target_hidden_size", "draft_vocab_size", "swap_h_and_emb", "eagle_config"),
    *("rope_theta", "rope_scaling", "torch_dtype", "transformers_version"),
}


@dataclass(frozen=True)
class ReleasedCheckpoint:
    """A released checkpoint's folder and what its `config.json` says.

    Attributes:
        blocks: config of the blocks, as one of their own family (qwen3 or llama).
        target_layer_ids: tapped layers of the target, from 0; `None` for the default ones.
        ignored: config keys that say nothing about what the drafter computes, as far as is known.
    """

    folder: Path
    blocks: PreTrainedConfig
    target_hidden_size: int
    draft_vocab_size: int
    target_layer_ids: list[int] | None
    ignored: list[str] = field(default_factory=list)

    @property
    def has_shortlist(self) -> bool:
        return self.draft_vocab_size < self.blocks.vocab_size


def read_checkpoint(folder: str | Path) -> ReleasedCheckpoint:
    """What the config of a released checkpoint says; its weights are read by `load_weights`.

    Raises:
        ValueError: the folder has no readable config, or one of another kind of model.
    """
    folder = Path(folder)
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is no checkpoint, it has no config.json: name the folder that has one.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): fetch the checkpoint again.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object: fetch the checkpoint again.")
    refuse_other_kinds(folder, config)
    if missing := [key for key in NEEDED if key not in config]:
        raise ValueError(f"{path} lacks {', '.join(missing)}: fetch the checkpoint again, nothing is guessed.")
    if not ("rope_theta" in config or "rope_theta" in (config.get("rope_parameters") or {})):
        raise ValueError(f"{path} lacks rope_theta: fetch the checkpoint again, nothing is guessed.")

    own = {key: value for key, value in config.items() if key not in READ or key.startswith("rope_")}
    try:
        blocks = AutoConfig.for_model(config["model_type"], **own)
    except StrictDataclassError as error:  # a value of another type
        raise ValueError(f"{path} is no {config['model_type']} config: {' '.join(str(error).split())}.") from error
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return ReleasedCheckpoint(
        folder=folder,
        blocks=blocks,
        target_hidden_size=config["target_hidden_size"],
        draft_vocab_size=config.get("draft_vocab_size", config["vocab_size"]),
        target_layer_ids=ids,
        ignored=sorted(set(config) - READ - set(type(blocks)().to_dict())),
    )


def refuse_other_kinds(folder: Path, config: dict[str, Any]) -> None:
    """Raise `ValueError` for the config of anything but one of the authors' drafters."""
    named = config.get("architectures") or ["a model without `architectures`"]
    if named[0] not in ARCHITECTURES:
        advice = (
            "a model of its own family needs no import, hand it to `osprey convert` as the backbone"
            if named[0].endswith("ForCausalLM")
            else "only the authors' drafters can be imported"
        )
        raise ValueError(f"{folder} holds {named[0]}, not one of {' or '.join(ARCHITECTURES)}: {advice}.")
    if not config.get("swap_h_and_emb"):
        raise ValueError(
            f"{folder} is an ordinary EAGLE-3 drafter, its config does not say `swap_h_and_emb: true`: its residual "
            "stream starts from the target's state and not from the embedding, which Osprey's blocks do not compute; "
            "run it with an engine for EAGLE-3."
        )
    if config.get("model_type") != ARCHITECTURES[named[0]]:
        raise ValueError(
            f"{folder} is a {named[0]} with model_type {config.get('model_type')!r}, but "
            f"{ARCHITECTURES[named[0]]!r} belongs to it: correct its config.json."
        )


def load_weights(checkpoint: ReleasedCheckpoint, drafter: OspreyDrafter) -> int:
    """Fill `drafter`, made for the checkpoint's shape, and return how many tensors the checkpoint has.

    The drafter takes the checkpoint's dtype, the wider one where there are two.

    Raises:
        ValueError: a file is missing or damaged, or a tensor missing, unknown, or of another shape or kind.
    """
    folder, weights = checkpoint.folder, read_tensors(checkpoint.folder)
    source = {ours: released_name(ours, len(drafter.layers)) for ours in drafter.state_dict()}
    vocabulary = {"d2t": (checkpoint.draft_vocab_size,), "t2d": (checkpoint.blocks.vocab_size,)}
    expected = vocabulary | {source[ours]: tuple(tensor.shape) for ours, tensor in drafter.state_dict().items()}
    for kind, names in (("lacks", expected.keys() - weights.keys()), ("also holds", weights.keys() - expected.keys())):
        if names:
            listed = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ValueError(f"The checkpoint {folder} {kind} {listed}: it is damaged, or of another format.")
    for name, shape in expected.items():
        found = tuple(weights[name].shape)
        if found != shape:
            raise ValueError(
                f"{name} in {folder} has the shape {list(found)}, but its config makes it {list(shape)}: the "
                "checkpoint is damaged, or its config.json of another one."
            )
        if name not in vocabulary and weights[name].dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name} in {folder} is stored as {weights[name].dtype}: import a checkpoint that is not quantized."
            )

    ids = draft_ids(checkpoint, weights)
    dtype = reduce(torch.promote_types, (weights[name].dtype for name in expected.keys() - vocabulary.keys()))
    drafter.to(dtype).load_state_dict({ours: weights[name] for ours, name in source.items()})
    if checkpoint.has_shortlist:
        drafter.set_draft_ids(ids)
    return len(weights)


def released_name(name: str, num_layers: int) -> str:
    """What the checkpoint calls the tensor `name` of a drafter with `num_layers` blocks."""
    if num_layers == 1:
        name = name.replace("layers.0.", "midlayer.")
    return name.replace("input_layernorm", "hidden_norm").replace("ctx_norm", "input_layernorm")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, one or several with an index."""
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise ValueError(f"{index} is no index of weights: fetch the checkpoint again.") from error
    tensors: dict[str, Tensor] = {}
    for name in files:
        try:
            tensors |= load_file(folder / name)
        except FileNotFoundError:
            raise ValueError(
                f"The checkpoint {folder} has no {name}: fetch it again (weights in other formats than safetensors "
                "are not read)."
            ) from None
        except SafetensorError as error:
            raise ValueError(
                f"{folder / name} cannot be read ({error}): the file is truncated or damaged, fetch it again."
            ) from error
    return tensors


def draft_ids(checkpoint: ReleasedCheckpoint, weights: dict[str, Tensor]) -> Tensor:
    """Target ids of the head's rows, rising, `[D]`: those that `d2t` gives and `t2d` marks, which must be the same."""
    ids = torch.arange(checkpoint.draft_vocab_size) + weights["d2t"].long()
    if not torch.equal(ids, weights["t2d"].nonzero()[:, 0]):
        raise ValueError(
            f"d2t and t2d in {checkpoint.folder} do not name the same {checkpoint.draft_vocab_size} of "
            f"{checkpoint.blocks.vocab_size} tokens: the checkpoint is damaged, or of another format."
        )
    return ids
