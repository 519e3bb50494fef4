"""Stage 2: restore a pruned model by next-token pretraining on broad text; gives a backbone.

The target plays no part (Osprey, arXiv 2609.09338, §3): a backbone is made once and serves every target. The length
of a run is given in tokens, since time means little on a shared machine.
"""

import logging
import math
import os
import time
from contextlib import nullcontext
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from osprey.train.calibration import calibrate_norm
from osprey.train.checkpoints import (
    TRAINING_FILE,
    atomic_folder,
    check_out,
    file_sha256,
    provenance,
    public_name,
    refuse_input,
    versions,
    weights_sha256,
    write_json,
)
from osprey.train.data import Source, check_source, parse_sources
from osprey.train.dry_run import dry_run
from osprey.train.packing import PackedRows
from osprey.train.perplexity import held_out_losses, perplexities
from osprey.train.precision import compute_dtype, default_device_type, meaning, use_bf16
from osprey.train.pretrain_checks import refuse_collisions, refuse_settings
from osprey.train.pretrain_resume import (
    clear_checkpoints,
    last_checkpoint,
    read_checkpoint,
    refuse_another_recipe,
    refuse_checkpoints,
    to_clear,
)
from osprey.train.pretrain_trainer import make_settings, make_trainer
from osprey.train.prune import load_config, load_source

logger = logging.getLogger(__name__)

CALIBRATION_ROWS = 8


@dataclass
class PretrainArguments:
    """Arguments of `pretrain`."""

    model: str = field(metadata={"help": "pruned model: folder or Hub id (of any causal LM of a supported family)"})
    out: str = field(metadata={"help": "folder to write; checkpoints of the run are kept in OUT.run"})
    data: list[str] = field(
        metadata={
            "help": ".jsonl, .txt (both also .gz) and .parquet files, and hub:REPO[:CONFIG[:SPLIT]] data sets of the "
            "Hub, each also with =WEIGHT (share of the tokens)"
        }
    )
    data_root: str = field(default=".", metadata={"help": "folder that the paths of --data and --held_out start from"})
    exclude: list[str] = field(
        default_factory=list, metadata={"help": "leave out training rows whose `source` contains one of these"}
    )
    max_passes: int = field(default=4, metadata={"help": "refuse to read any of the data more often than this"})
    held_out: list[str] = field(
        default_factory=list, metadata={"help": "files for perplexity, one a language or domain, never trained on"}
    )
    tokens: float = field(default=3e6, metadata={"help": "training tokens"})
    length: int = field(default=512, metadata={"help": "tokens in a packed row"})
    batch_rows: int = field(default=8, metadata={"help": "rows in a forward pass of one process"})
    accumulation: int = field(default=1, metadata={"help": "forward passes in an optimizer step"})
    learning_rate: float = field(default=1e-3, metadata={"help": "peak of the schedule"})
    matrix_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Muon for the matrices of the blocks, at this peak; --learning_rate is then the rest's"},
    )
    schedule: str = field(
        default="cosine",
        metadata={"help": "cosine, or wsd: constant until a cosine decay at the end", "choices": ("cosine", "wsd")},
    )
    decay: float = field(default=0.2, metadata={"help": "share of the steps in the decay of wsd"})
    min_learning_rate_ratio: float = field(
        default=0.1, metadata={"help": "end of the schedule, as a share of the peak"}
    )
    warmup: float = field(default=0.04, metadata={"help": "share of the steps with a rising learning rate"})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW's"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm"})
    calibrate_norm: bool = field(
        default=True, metadata={"help": "scale the final norm before training, for the least loss"}
    )
    softmax_ids: int | None = field(
        default=None,
        metadata={"help": "train with a sampled softmax over about so many ids, two thirds the most frequent ones"},
    )
    distill_from: str | None = field(
        default=None,
        metadata={"help": "unpruned source, whose distribution is learnt as well: folder, Hub id or .gguf"},
    )
    distill_share: float = field(
        default=0.5, metadata={"help": "share of the KL divergence from it in the loss; the rest is the labels'"}
    )
    freeze_embeddings: bool = field(default=False, metadata={"help": "leave embeddings and head as they are"})
    precision: str = field(default="auto", metadata={"help": "autocast: auto, bf16 or fp32"})
    seed: int = field(default=0, metadata={"help": "random seed"})
    log_steps: int = field(default=10, metadata={"help": "steps between lines of the log"})
    report_to: str = field(
        default="none",
        metadata={"help": "also log to tensorboard or trackio", "choices": ("none", "tensorboard", "trackio")},
    )
    save_steps: int = field(default=200, metadata={"help": "steps between checkpoints"})
    eval_steps: int = field(default=200, metadata={"help": "steps between perplexities while training"})
    eval_tokens: int = field(default=4096, metadata={"help": "tokens of each file for those"})
    final_eval_tokens: int | None = field(
        default=None, metadata={"help": "tokens of each file for the perplexities before and after (default: all)"}
    )
    resume: bool = field(
        default=False, metadata={"help": "go on from the last checkpoint in OUT.run; --tokens may have grown since"}
    )
    dry_run: bool = field(
        default=False, metadata={"help": "only check the recipe: sizes, memory and time, and ten documents"}
    )
    model_config: dict | None = field(
        default=None, metadata={"help": "in a recipe: the model's config, for a dry run before the model is there"}
    )
    overwrite: bool = field(default=False, metadata={"help": "replace the folder if it exists, and OUT.run"})

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step, over all processes (torchrun and `accelerate launch` set WORLD_SIZE)."""
        return self.batch_rows * self.accumulation * int(os.environ.get("WORLD_SIZE", 1))

    @property
    def step_tokens(self) -> int:
        return self.step_rows * self.length

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.step_tokens)


def pretrain(arguments: PretrainArguments) -> dict[str, Any]:
    """Trains, writes the backbone, and returns what its `training.json` says about this stage.

    Under `accelerate launch` every process calls this, and returns the same; the first one writes. With `dry_run`
    nothing is trained or written, and the estimate is returned.

    Raises:
        ValueError: the model's family, a data file or a setting is not usable, or the checkpoint is of another recipe.
        OSError: a file is missing or cannot be written, or the folder exists.
    """
    sources = parse_sources(arguments.data, arguments.data_root)
    held_out = [check_source(Path(arguments.data_root) / path) for path in arguments.held_out]
    refuse_settings(arguments)
    refuse_collisions(sources, held_out)
    if arguments.dry_run:
        return dry_run(arguments, sources)
    load_config(arguments.model)  # refuses an unsupported family
    run = Path(f"{arguments.out}.run")
    checkpoint = last_checkpoint(run) if arguments.resume else None
    state = read_checkpoint(checkpoint) if checkpoint is not None else {}
    recipe = recipe_settings(arguments, sources)
    if checkpoint is not None:
        defaults = {option.name: option.default for option in fields(arguments) if option.default is not MISSING}
        refuse_another_recipe(recipe, state.get("recipe"), checkpoint, defaults)
    elif not arguments.overwrite:
        refuse_checkpoints(run)
    inputs = [arguments.model, arguments.distill_from, *(source.path for source in sources), *held_out]
    check_out(arguments.out, arguments.overwrite, inputs)  # in every process, not in the writing one alone
    if checkpoint is None:
        for folder in to_clear(run):
            refuse_input(folder, inputs)
    settings = make_settings(arguments, run)
    main = settings.process_index == 0
    if not main:
        logging.getLogger("osprey").setLevel(logging.WARNING)

    writing = atomic_folder(arguments.out, arguments.overwrite, inputs) if main else nullcontext()
    with writing as work, logging_redirect_tqdm():
        set_seed(arguments.seed)
        start = time.time()
        # fp32 master weights whatever the checkpoint holds: AdamW's small steps vanish in bf16.
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(settings.device)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        if arguments.freeze_embeddings:
            model.get_input_embeddings().requires_grad_(False)
            model.get_output_embeddings().requires_grad_(False)
        teacher = _teacher(arguments, model) if arguments.distill_from is not None else None

        def evaluate(tokens: int | None) -> dict[str, float]:
            return perplexities(
                held_out_losses(model, tokenizer, held_out, arguments.length, tokens, arguments.precision)
            )

        rows = PackedRows(sources, tokenizer, arguments.length, tuple(arguments.exclude), arguments.max_passes)
        # What happens once, before the first step; a resumed run has it from its checkpoint.
        begun = {key: state.get(key) for key in ("perplexity_before", "norm_scale", "seconds")}
        if held_out and begun["perplexity_before"] is None:
            begun["perplexity_before"] = evaluate(arguments.final_eval_tokens)
        if held_out:
            logger.info("held-out perplexity before: %s", begun["perplexity_before"])
        if checkpoint is None and arguments.calibrate_norm:
            begun["norm_scale"] = calibrate_norm(model, islice(rows.fresh(), CALIBRATION_ROWS), arguments.precision)
            logger.info("final norm scaled by %g", begun["norm_scale"])
        before = begun["seconds"] or 0.0

        def run_state() -> dict[str, Any]:
            return {**begun, "recipe": recipe, "seconds": round(before + time.time() - start, 1)}

        trainer = make_trainer(arguments, settings, model, teacher, rows, run_state, evaluate if held_out else None)
        if checkpoint is not None:
            rows.load_state_dict(state)
            trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        elif main:
            clear_checkpoints(run)  # of the run that --overwrite replaces
        if trainer.state.global_step < arguments.steps:
            trainer.train(resume_from_checkpoint=checkpoint)
        else:  # the Trainer would take one step more
            model.load_state_dict(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict())
        after = evaluate(arguments.final_eval_tokens) if held_out else {}
        if after:
            logger.info("held-out perplexity after: %s", after)

        done = trainer.state.global_step
        record = {
            "stage": "pretrain",
            "recipe": recipe,
            "data": [_describe(source) for source in sources],
            "held_out": [_describe(Source(path)) for path in held_out],
            "processes": settings.world_size,
            "steps": done,
            "tokens": done * arguments.step_tokens,
            "source_tokens": {cursor.source.name: cursor.tokens for cursor in rows.cursors},
            "norm_scale": begun["norm_scale"],
            "bf16": use_bf16(arguments.precision, model.device.type),
            "seconds": run_state()["seconds"],
            "perplexity_before": begun["perplexity_before"] or {},
            "perplexity_during": _history(trainer.state.log_history, arguments.step_tokens),
            "perplexity_after": after,
            "versions": versions(),
        }
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # of all processes, where they share them
        if main:
            model.config.use_cache = True  # the Trainer turns it off
            model.save_pretrained(work, state_dict=weights)
            tokenizer.save_pretrained(work)
            write_json(work / TRAINING_FILE, {"stages": [*provenance(arguments.model), record]})
    return record


def _teacher(arguments: PretrainArguments, model: PreTrainedModel) -> PreTrainedModel:
    teacher = load_source(arguments.distill_from)[0]
    if teacher.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"--distill_from {arguments.distill_from} has {teacher.config.vocab_size} tokens in its vocabulary, the "
            f"model {model.config.vocab_size}: give the model that it was pruned from."
        )
    dtype = compute_dtype(arguments.precision, model.device.type)
    return teacher.to(model.device, dtype).eval().requires_grad_(False)


def recipe_settings(arguments: PretrainArguments, sources: list[Source]) -> dict[str, Any]:
    """The settings without this machine's paths, with what tells the weights of the models apart."""
    places = ("data", "data_root", "held_out", "model", "out", "resume", "overwrite", "dry_run", "model_config")
    recipe = {name: value for name, value in asdict(arguments).items() if name not in places}
    if arguments.distill_from is not None:
        recipe["distill_from"] = public_name(arguments.distill_from)
        recipe["distill_from_sha256"] = weights_sha256(arguments.distill_from)
    return recipe | {
        "model": public_name(arguments.model),
        "model_sha256": weights_sha256(arguments.model),
        "data": {source.name: source.weight for source in sources},
        "step_rows": arguments.step_rows,
        "precision": meaning(arguments.precision, default_device_type()),
    }


def _describe(source: Source) -> dict[str, Any]:
    if source.path is None:
        return {"hub": source.name, "split": source.split, "weight": source.weight}
    return {"file": source.path.name, "sha256": file_sha256(source.path), "weight": source.weight}


def _history(log: list[dict[str, Any]], step_tokens: int) -> list[dict[str, Any]]:
    """Perplexities while training, by the tokens trained until then."""
    prefix = "eval_perplexity_"
    return [
        {"tokens": entry["step"] * step_tokens}
        | {name.removeprefix(prefix): value for name, value in entry.items() if name.startswith(prefix)}
        for entry in log
        if f"{prefix}mean" in entry
    ]
