"""Stages 3 and 4 in one: a backbone becomes a trained drafter of one target. What is done is not done again."""

import logging
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from osprey.train.checkpoints import check_out, file_sha256, write_json
from osprey.train.convert import ConvertArguments, convert
from osprey.train.data import check_file
from osprey.train.distill import TRAINER_DEFAULT_OUTPUT, DistillArguments, distill, drafter_sha256, refuse_changes
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.features import FeatureArguments, prepare_features

logger = logging.getLogger(__name__)

SETTINGS_FILE = "adapt.json"


@dataclass
class AdaptationSettings:
    """What a recipe of an adaptation says beside `OspreyDistillationConfig`."""

    backbone: str = field(metadata={"help": "backbone: Hub id or folder of a llama, qwen2 or qwen3 model"})
    target: str = field(metadata={"help": "target model: Hub id or folder"})
    target_name: str | None = field(default=None, metadata={"help": "name of the target in the drafter's config"})
    target_revision: str | None = field(default=None, metadata={"help": "revision of the target on the Hub"})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "three tapped layers, from 0"})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "size of the shortlist (default: all)"})
    frequencies: list[str] = field(
        default_factory=list, metadata={"help": "files that choose the shortlist (default: those of --data)"}
    )
    ctx_norm_weight: float | None = field(
        default=None, metadata={"help": "start of every weight of `ctx_norm` (default: those of `input_layernorm`)"}
    )
    untie: bool = field(default=False, metadata={"help": "give the drafter its own head instead of a tied one"})
    online: bool = field(default=False, metadata={"help": "the target runs in every step; nothing is prepared"})
    features_dtype: str = field(default="float16", metadata={"help": "offline: precision of the features"})
    tokens_per_batch: int = field(default=4096, metadata={"help": "offline: tokens in a forward of the target"})
    held_out_percent: int = field(default=5, metadata={"help": "share of the rows, by hash of the id, kept for MAL"})


@dataclass
class AdaptArguments(AdaptationSettings):
    """Arguments of `adapt`."""

    data: list[str] = field(
        default_factory=list, metadata={"help": "responses of the target, chats or texts: .jsonl or .jsonl.gz files"}
    )
    out: str = field(default="", metadata={"help": "drafter folder to write; what leads to it is kept in OUT.adapt"})
    force: bool = field(default=False, metadata={"help": "go on where fewer than half of the tokens are mapped"})
    overwrite: bool = field(default=False, metadata={"help": "replace the drafter folder if it exists"})


def adapt(arguments: AdaptArguments, config: OspreyDistillationConfig) -> dict[str, Any]:
    """Converts, prepares features (unless online) and distils; returns the records of the stages.

    Raises:
        ValueError: a setting or file is not usable, or OUT.adapt belongs to other settings.
        OSError: a file is missing, or the folder exists.
    """
    if not arguments.data or not arguments.out:
        raise ValueError("--data and --out are needed.")
    inputs = (arguments.backbone, arguments.target, *arguments.data, *arguments.frequencies)
    check_out(arguments.out, arguments.overwrite, inputs)  # now, not when there is something to write
    if config.output_dir != TRAINER_DEFAULT_OUTPUT:
        raise ValueError(
            "--output_dir has no effect on adapt, which keeps its checkpoints in OUT.adapt: leave it out."
        )
    work = Path(f"{arguments.out}.adapt")
    drafter, features, run = work / "untrained", work / "features", work / "run"
    if not features.exists() and not run.exists():
        shutil.rmtree(work, ignore_errors=True)  # of a run that was refused: it may have been mended
    work.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in asdict(arguments).items() if name not in ("data", "out", "overwrite")}
    settings["data"] = [file_sha256(check_file(Path(path))) for path in arguments.data]
    # A folder may hold another model tomorrow; a target is too large to be read for that.
    settings["backbone_sha256"] = drafter_sha256(arguments.backbone)
    target_config = cached_file(arguments.target, "config.json", revision=arguments.target_revision or "main")
    settings["target_config_sha256"] = file_sha256(target_config)
    refuse_changes(work / SETTINGS_FILE, settings)
    write_json(work / SETTINGS_FILE, settings)

    records: dict[str, Any] = {}
    if not drafter.exists():
        shared = ("backbone", "target", "target_name", "target_revision", "target_layer_ids", "draft_vocab_size")
        shared += ("ctx_norm_weight", "untie", "force")
        records["convert"] = convert(
            ConvertArguments(
                out=str(drafter),
                frequencies=(arguments.frequencies or arguments.data) if arguments.draft_vocab_size else [],
                **{name: getattr(arguments, name) for name in shared},
            )
        )
    source: dict[str, Any] = {"target": arguments.target, "data": arguments.data}
    if not arguments.online:
        prepare_features(
            FeatureArguments(
                features=str(features),
                target_revision=arguments.target_revision,
                target_layer_ids=arguments.target_layer_ids and sorted(arguments.target_layer_ids),
                max_length=config.max_length,
                tokens_per_batch=arguments.tokens_per_batch,
                dtype=arguments.features_dtype,
                precision=config.precision,
                device_map=(config.teacher_model_init_kwargs or {}).get("device_map"),
                **source,
            )
        )
        source = {"features": [str(features)]}
    config.output_dir = str(run)
    records["distill"] = distill(
        DistillArguments(
            drafter=str(drafter),
            out=arguments.out,
            held_out_percent=arguments.held_out_percent,
            overwrite=arguments.overwrite,
            **source,
        ),
        config,
    )
    return records
