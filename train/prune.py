"""Stage 1: cut a small language model to a few of its blocks, and these, if wanted, to a part of their width.

Kept are the embedding, the final norm, the LM head and N blocks, as they are (Osprey, arXiv 2609.09338, §3). The
result is an ordinary checkpoint of the same family; stage 2 (`pretrain`) restores what the cut has cost.
"""

import struct
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

from osprey.train.checkpoints import (
    TRAINING_FILE,
    atomic_folder,
    provenance,
    public_name,
    reading_weights,
    versions,
    write_json,
)
from osprey.train.data import check_source
from osprey.train.importance import Importance, measure_importance
from osprey.train.perplexity import packed_documents
from osprey.train.prune_report import REPORT_FILE, prune_report
from osprey.train.width import narrow, narrow_config

SUPPORTED_FAMILIES = ("llama", "qwen2", "qwen3", "smollm3")
STRATEGIES = ("first", "uniform", "ends", "influence", "angular")
CALIBRATED = ("influence", "angular")
CALIBRATION_LENGTH = 512  # tokens in a row


@dataclass
class PruneArguments:
    """Arguments of `prune`."""

    source: str = field(metadata={"help": "model to prune: folder, Hub id or .gguf file"})
    out: str = field(metadata={"help": "folder to write"})
    layers: int | None = field(default=None, metadata={"help": "number of blocks to keep"})
    strategy: str = field(
        default="first",
        metadata={
            "help": "which blocks: the first ones, evenly spread ones, both ends, those that turn the residual stream "
            "most (influence), or all but the contiguous run that turns it least (angular)",
            "choices": STRATEGIES,
        },
    )
    keep: str | None = field(default=None, metadata={"help": "the blocks themselves instead, from 0, such as 0,29"})
    num_key_value_heads: int | None = field(
        default=None, metadata={"help": "key-value heads to keep in a block, each with its query heads (default: all)"}
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "FFN channels to keep in a block (default: all)"}
    )
    calibration: list[str] = field(
        default_factory=list,
        metadata={"help": "text files for influence, angular and the width (types as in pretrain's --data)"},
    )
    calibration_tokens: int = field(default=16_384, metadata={"help": "tokens of them in all"})
    report: bool = field(
        default=False, metadata={"help": "measure what each block is worth, on the files of --held_out"}
    )
    held_out: list[str] = field(default_factory=list, metadata={"help": "text files for the report's perplexities"})
    report_tokens: int = field(default=2048, metadata={"help": "tokens of each of them"})
    precision: str = field(default="auto", metadata={"help": "autocast of what is measured: auto, bf16 or fp32"})
    revision: str | None = field(default=None, metadata={"help": "revision of the source on the Hub"})
    overwrite: bool = field(default=False, metadata={"help": "replace the folder if it exists"})


def prune(arguments: PruneArguments) -> dict[str, Any]:
    """Writes the shallow checkpoint and returns what its `training.json` says about this stage.

    Raises:
        ValueError: the family is not supported, sizes are out of range, or text is missing.
        OSError: the source is not there, or the folder exists.
    """
    by_width = arguments.num_key_value_heads is not None or arguments.intermediate_size is not None
    calibrated = by_width or (arguments.keep is None and arguments.strategy in CALIBRATED)
    if calibrated and not arguments.calibration:
        raise ValueError(
            f"{'pruning the width' if by_width else 'the strategy ' + arguments.strategy} is decided on text: give "
            "files with --calibration."
        )
    if arguments.report and not arguments.held_out:
        raise ValueError("--report measures perplexities: give text files with --held_out.")
    calibration, held_out = (
        [check_source(Path(path)) for path in paths] for paths in (arguments.calibration, arguments.held_out)
    )

    inputs = (arguments.source, *calibration, *held_out)
    with atomic_folder(arguments.out, arguments.overwrite, inputs) as work:
        config = load_config(arguments.source, arguments.revision)
        depth = config.num_hidden_layers
        narrow_config(config, arguments.num_key_value_heads, arguments.intermediate_size)  # refuses impossible sizes
        check_layers(depth, arguments.layers, arguments.strategy, arguments.keep)
        model, tokenizer = load_source(arguments.source, arguments.revision)
        importance = None
        if calibrated or (arguments.report and calibration):
            share = arguments.calibration_tokens // len(calibration)
            rows = (
                row for path in calibration for row in packed_documents(path, tokenizer, CALIBRATION_LENGTH, share)
            )
            importance = measure_importance(model, rows, arguments.precision)
        layer_ids = choose_layers(depth, arguments.layers, arguments.strategy, arguments.keep, importance)
        refuse_windows(config, layer_ids)
        shallow = keep_layers(model, layer_ids)
        if by_width:
            shallow = narrow(
                shallow, importance, layer_ids, arguments.num_key_value_heads, arguments.intermediate_size
            )
        shallow.save_pretrained(work)
        tokenizer.save_pretrained(work)
        record = {
            "stage": "prune",
            "source": public_name(arguments.source),
            "revision": arguments.revision,
            "strategy": arguments.strategy if arguments.keep is None else "keep",
            "source_layers": depth,
            "layer_ids": layer_ids,
            "num_key_value_heads": shallow.config.num_key_value_heads,
            "intermediate_size": shallow.config.intermediate_size,
            "calibration": [path.name for path in calibration],
            "influence": importance.influence if importance is not None else None,
            "parameters": shallow.num_parameters(),
            "versions": versions(),
        }
        write_json(work / TRAINING_FILE, {"stages": [*provenance(arguments.source), record]})
        if arguments.report:
            report = prune_report(
                model, shallow, layer_ids, tokenizer, held_out, arguments.report_tokens, arguments.precision
            )
            write_json(work / REPORT_FILE, report)
            record = {**record, "report": report}
    return record


def check_layers(total: int, layers: int | None, strategy: str, keep: str | None) -> None:
    """Raises `ValueError` where these do not name blocks of a model with `total` blocks."""
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
    elif not 1 <= layers <= total:
        raise ValueError(f"--layers {layers} is out of range: the source has {total} layers.")
    elif strategy not in STRATEGIES:
        raise ValueError(f"the strategy {strategy!r} is unknown: choose one of {', '.join(STRATEGIES)}.")


def choose_layers(
    total: int,
    layers: int | None,
    strategy: str = "first",
    keep: str | None = None,
    importance: Importance | None = None,
) -> list[int]:
    """Ids of the blocks to keep, ascending, of a model with `total` blocks; `importance` for calibrated strategies."""
    check_layers(total, layers, strategy, keep)
    if keep is not None:
        return [int(part) for part in keep.split(",")]
    if strategy == "first":
        return list(range(layers))
    if strategy == "uniform":
        return [index * total // layers for index in range(layers)]
    if strategy == "ends":
        first = (layers + 1) // 2
        return [*range(first), *range(total - layers + first, total)]
    if strategy == "influence":
        ranked = sorted(range(total), key=lambda layer: importance.influence[layer], reverse=True)
        return sorted(ranked[:layers])
    # The run of blocks whose input and output are nearest (arXiv 2403.17887, §3, over all tokens, not the last alone).
    run = total - layers
    start = min(range(layers + 1), key=lambda first: importance.angle[first, first + run].item())
    return [*range(start), *range(start + run, total)]


def keep_layers(model: PreTrainedModel, layer_ids: list[int]) -> PreTrainedModel:
    """A new model of the same family with copies of the blocks `layer_ids` and all that is around the blocks."""
    config = type(model.config)(**model.config.to_dict())
    config.num_hidden_layers = len(layer_ids)
    for name in ("layer_types", "no_rope_layers"):  # one entry a block; the latter is smollm3's
        if getattr(config, name, None):
            setattr(config, name, [getattr(config, name)[layer] for layer in layer_ids])
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


def refuse_windows(config: PreTrainedConfig, layer_ids: list[int]) -> None:
    """Raises `ValueError` for blocks that a drafter cannot take over."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = [layer for layer in layer_ids if kinds[layer] != "full_attention"]
    if windows:
        raise ValueError(
            f"layers {', '.join(map(str, windows))} of the source attend in a sliding window, as a drafter's blocks "
            "cannot: prune it to others (`osprey prune --keep`)."
        )


def load_config(source: str, revision: str | None = None) -> PreTrainedConfig:
    folder, options = locate(source, revision)
    try:
        config = AutoConfig.from_pretrained(folder, **options)
    except (struct.error, KeyError, UnicodeDecodeError) as error:  # of transformers' GGUF reader
        raise ValueError(f"{source} cannot be read as a GGUF file ({error}); fetch it again.") from error
    refuse_family(source, config.model_type)
    return config


def refuse_family(source: str, model_type: str | None) -> None:
    """Raises `ValueError` for a `model_type` whose blocks cannot be pruned; `source` is what the message calls it."""
    if model_type not in SUPPORTED_FAMILIES:
        raise ValueError(
            f"{source} is a {model_type!r} model; blocks can be pruned from {', '.join(SUPPORTED_FAMILIES)}."
        )


def load_source(source: str, revision: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder, options = locate(source, revision)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if "gguf_file" in options:
        # Without `dequantize` the blocks may stay packed (where the `kernels` package is installed).
        options["quantization_config"] = GgufConfig(dequantize=True)
    with reading_weights(source):
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options), tokenizer


def locate(source: str, revision: str | None) -> tuple[str, dict[str, Any]]:
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
