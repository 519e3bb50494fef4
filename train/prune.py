"""Stage 1: cut a small language model to a few of its blocks.

Kept are the embedding, the final norm, the LM head and N blocks, as they are (Osprey, arXiv 2609.09338, §3). The
result is an ordinary checkpoint of the same family; stage 2 (`pretrain`) restores what the cut has cost.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from osprey.train.checkpoints import TRAINING_FILE, atomic_folder, provenance, public_name, versions, write_json

SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3")
STRATEGIES = ("first",)


@dataclass
class PruneArguments:
    """Arguments of `prune`."""

    source: str = field(metadata={"help": "model to prune: folder, Hub id or .gguf file"})
    out: str = field(metadata={"help": "folder to write"})
    layers: int | None = field(default=None, metadata={"help": "number of blocks to keep"})
    strategy: str = field(default="first", metadata={"help": "which blocks: first", "choices": STRATEGIES})
    keep: str | None = field(default=None, metadata={"help": "the blocks themselves instead, from 0, such as 0,29"})
    revision: str | None = field(default=None, metadata={"help": "revision of the source on the Hub"})
    overwrite: bool = field(default=False, metadata={"help": "replace the folder if it exists"})


def prune(arguments: PruneArguments) -> dict[str, Any]:
    """Writes the shallow checkpoint and returns what its `training.json` says about this stage.

    Raises:
        ValueError: the family is not supported, or the layers are out of range.
        OSError: the source is not there, or the folder exists.
    """
    with atomic_folder(arguments.out, arguments.overwrite) as work:
        config = load_config(arguments.source, arguments.revision)
        layer_ids = choose_layers(config.num_hidden_layers, arguments.layers, arguments.strategy, arguments.keep)
        model, tokenizer = load_source(arguments.source, arguments.revision)
        shallow = keep_layers(model, layer_ids)
        shallow.save_pretrained(work)
        tokenizer.save_pretrained(work)
        record = {
            "stage": "prune",
            "source": public_name(arguments.source),
            "revision": arguments.revision,
            "strategy": arguments.strategy if arguments.keep is None else "keep",
            "source_layers": config.num_hidden_layers,
            "layer_ids": layer_ids,
            "parameters": shallow.num_parameters(),
            "versions": versions(),
        }
        write_json(work / TRAINING_FILE, {"stages": [*provenance(arguments.source), record]})
    return record


def choose_layers(total: int, layers: int | None, strategy: str = "first", keep: str | None = None) -> list[int]:
    """Ids of the blocks to keep, ascending, of a model with `total` blocks."""
    if (layers is None) == (keep is None):
        raise ValueError("give either --layers N or --keep with a list of layers.")
    if keep is not None:
        try:
            layer_ids = [int(part) for part in keep.split(",")]
        except ValueError as error:
            raise ValueError(f"--keep takes layer numbers separated by commas, such as 0,29, not {keep!r}.") from error
        if any(not 0 <= layer < total for layer in layer_ids):
            raise ValueError(f"--keep {keep} is out of range: the source's layers are 0 to {total - 1}.")
        if sorted(set(layer_ids)) != layer_ids:
            raise ValueError(f"--keep {keep} must name each layer once, in ascending order.")
        return layer_ids
    if not 1 <= layers <= total:
        raise ValueError(f"--layers {layers} is out of range: the source has {total} layers.")
    if strategy not in STRATEGIES:
        raise ValueError(f"the strategy {strategy!r} is unknown: choose one of {', '.join(STRATEGIES)}.")
    return list(range(layers))


def keep_layers(model: PreTrainedModel, layer_ids: list[int]) -> PreTrainedModel:
    """A new model of the same family with copies of the blocks `layer_ids` and all that is around the blocks."""
    config = type(model.config)(**model.config.to_dict())
    config.num_hidden_layers = len(layer_ids)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layer_ids]
    if hasattr(config, "quantization_config"):  # a GGUF source: what is written is not quantized
        del config.quantization_config
    prefix = f"{model.base_model_prefix}.layers."
    new_ids = {old: new for new, old in enumerate(layer_ids)}
    weights = {}
    for name, weight in model.state_dict().items():
        if name.startswith(prefix):
            layer, rest = name.removeprefix(prefix).split(".", 1)
            if int(layer) not in new_ids:
                continue
            name = f"{prefix}{new_ids[int(layer)]}.{rest}"
        weights[name] = weight
    # A new model, not a shortened list of modules: each block knows its own number (the cache needs it).
    shallow = type(model)(config).to(model.dtype)
    shallow.load_state_dict(weights)
    shallow.generation_config = model.generation_config
    return shallow.eval()


def load_config(source: str, revision: str | None = None) -> PreTrainedConfig:
    folder, options = _locate(source, revision)
    config = AutoConfig.from_pretrained(folder, **options)
    if config.model_type not in SUPPORTED_FAMILIES:
        raise ValueError(
            f"{source} is a {config.model_type!r} model; blocks can be pruned from {', '.join(SUPPORTED_FAMILIES)}."
        )
    return config


def load_source(source: str, revision: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder, options = _locate(source, revision)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if "gguf_file" in options:
        # Without `dequantize` the blocks may stay packed (where the `kernels` package is installed).
        options["quantization_config"] = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options), tokenizer


def _locate(source: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` wants: a folder or Hub id, and options."""
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"there is no GGUF file {source}.")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{source} is a folder without config.json, so it holds no model.")
    # `org/model` may be a Hub id; anything deeper, or starting like a path, was meant as a folder.
    if not path.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise FileNotFoundError(f"there is no model folder {source}.")
    return source, {"revision": revision}
