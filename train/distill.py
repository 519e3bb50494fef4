"""Stage 4: train the drafter to match its target's distribution, unrolled over the draft steps."""

import hashlib
import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM
from osprey.modeling.target_osprey import check_tokenizer
from osprey.train.align import load_tokenizer
from osprey.train.checkpoints import (
    TRAINING_FILE,
    atomic_folder,
    file_sha256,
    provenance,
    public_name,
    save_drafter,
    versions,
    write_json,
)
from osprey.train.completions import greedy_answer
from osprey.train.data import check_file
from osprey.train.distillation_config import OspreyDistillationConfig
from osprey.train.distillation_trainer import OspreyDistillationTrainer, refuse_other_target
from osprey.train.examples import Example, tokenize_row
from osprey.train.feature_data import ExampleDataset, FeatureDataset, split_rows
from osprey.train.features import refuse_longer_than_context
from osprey.train.jsonl import read_rows
from osprey.train.precision import use_bf16
from osprey.train.whiten import whiten_context

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
STATE_FILE = "trainer_state.json"  # of a checkpoint; the Trainer writes it last
TRAINER_DEFAULT_OUTPUT = "trainer_output"  # what TrainingArguments makes of None


@dataclass
class DistillArguments:
    """What is distilled from what; how is in `OspreyDistillationConfig`."""

    drafter: str = field(metadata={"help": "drafter folder, from `osprey convert` or an earlier distillation"})
    out: str = field(metadata={"help": "drafter folder to write at the end; checkpoints go to --output_dir"})
    features: list[str] = field(
        default_factory=list, metadata={"help": "offline: feature folders of the target (`osprey distill --prepare`)"}
    )
    target: str | None = field(default=None, metadata={"help": "online: the target, which runs in every step"})
    data: list[str] = field(
        default_factory=list,
        metadata={"help": "online: .jsonl or .jsonl.gz files of responses, chats, texts, prompts"},
    )
    held_out_percent: int = field(default=5, metadata={"help": "share of the rows, by hash of the id, kept for MAL"})
    overwrite: bool = field(default=False, metadata={"help": "replace the drafter folder if it exists"})


def distill(arguments: DistillArguments, config: OspreyDistillationConfig) -> dict[str, Any]:
    """Trains, writes the drafter folder and returns its training record; goes on from the last checkpoint, if any.

    Raises:
        ValueError: drafter, target and data do not fit, the run folder is of another run, or the loss is not finite.
        OSError: the folder exists, or features are damaged.
    """
    offline = bool(arguments.features)
    if offline == bool(arguments.target or arguments.data) or bool(arguments.target) != bool(arguments.data):
        raise ValueError("give either --features (offline), or --target and --data (online).")
    inputs = (arguments.drafter, arguments.target, *arguments.features, *arguments.data)
    with atomic_folder(arguments.out, arguments.overwrite, inputs) as work:
        drafter = load_drafter(arguments.drafter)
        tokenizer = load_tokenizer(arguments.drafter)
        if offline:
            target, dataset = None, FeatureDataset(arguments.features)
            dataset.verify()
            refuse_other_target(drafter, dataset)
            refuse_other_head(arguments.drafter, dataset.settings["head_sha256"])
            source, data_hash = dataset.settings | {"data": dataset.sources}, dataset.identity()
        else:
            target = load_target(arguments.target, drafter.config.target_revision, config)
            target_tokenizer = load_tokenizer(arguments.target, drafter.config.target_revision)
            check_tokenizer(drafter, target_tokenizer)
            examples = read_examples(arguments, config, target_tokenizer)
            refuse_longer_than_context(examples, target)
            dataset = with_answers(examples, arguments.held_out_percent, target, drafter, config.max_new_tokens)
            files = [{"file": Path(path).name, "sha256": file_sha256(path)} for path in arguments.data]
            source = {"target": public_name(arguments.target), "data": files}
            data_hash = hashlib.sha256(json.dumps(source).encode()).hexdigest()
        train, held_out = split_rows(dataset, arguments.held_out_percent)
        if not train.rows:
            raise ValueError("No row is left to train on: lower --held_out_percent or give more data.")
        whitened = offline and config.whiten_context and whiten_context(drafter, train)
        if config.output_dir == TRAINER_DEFAULT_OUTPUT:  # a run must not go on from another drafter's
            config.output_dir = f"{arguments.out}.run"
        if not held_out.rows:
            logger.info("No held-out row was written greedily (`temperature` 0): acceptance is not measured.")
            config.eval_strategy = "no"
        trainer = OspreyDistillationTrainer(drafter, config, train, held_out if held_out.rows else None, target)

        run = {
            "drafter": drafter_sha256(arguments.drafter),
            "data": data_hash,
            "held_out_percent": arguments.held_out_percent,
            "recipe": recipe(config),
        }
        checkpoint = own_checkpoint(Path(config.output_dir), run)
        start = time.perf_counter()
        train_loss = run_or_load(trainer, checkpoint)
        record = {
            "stage": "distill",
            "features": source,
            "mode": "offline" if offline else "online",
            "rows": {"train": len(train.rows), "held_out": len(held_out.rows)},
            "tokens_per_epoch": sum(train.lengths()),
            "recipe": recipe(config),
            "whitened": whitened,
            "steps": trainer.state.global_step,
            "epochs": round(trainer.state.epoch or 0.0, 3),
            "seconds": round(time.perf_counter() - start, 1),
            "train_loss": train_loss,
            "held_out": trainer.evaluate() if held_out.rows else {},
            "versions": versions(),
        }
        save_drafter(drafter, tokenizer, work)
        write_json(work / TRAINING_FILE, {"stages": [*provenance(arguments.drafter), record]})
    return record


def run_or_load(trainer: OspreyDistillationTrainer, checkpoint: str | None) -> float | None:
    """Trains, from `checkpoint` on if there is one, and returns the mean loss.

    Of a run that has taken all its steps the weights are loaded (and no loss is known): the Trainer would take one
    more step.
    """
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(Path(checkpoint) / STATE_FILE))
        steps = trainer.args.max_steps if trainer.args.max_steps > 0 else state.max_steps
        if state.global_step >= steps:
            trainer._load_from_checkpoint(checkpoint)
            trainer.model.tie_weights()
            trainer.state = state
            return None
    return trainer.train(resume_from_checkpoint=checkpoint).training_loss


def load_drafter(name_or_path: str) -> OspreyDrafterForCausalLM:
    """A drafter with fp32 weights, whichever of the registered kinds it is."""
    drafter = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=torch.float32)
    if not isinstance(drafter, OspreyDrafterForCausalLM):
        raise ValueError(
            f"{name_or_path} is no drafter but a {type(drafter).__name__}: make one with `osprey convert`."
        )
    return drafter


def load_target(name_or_path: str, revision: str | None, config: OspreyDistillationConfig) -> PreTrainedModel:
    """The target for online training, in bf16 where the precision says so; `teacher_model_init_kwargs` go first."""
    bf16 = use_bf16(config.precision, config.device.type)
    settings = {"dtype": torch.bfloat16 if bf16 else torch.float32} | (config.teacher_model_init_kwargs or {})
    target = AutoModelForCausalLM.from_pretrained(name_or_path, revision=revision or "main", **settings)
    return target if "device_map" in settings else target.to(config.device)


def with_answers(
    examples: list[Example],
    held_out_percent: int,
    target: PreTrainedModel,
    drafter: OspreyDrafterForCausalLM,
    new: int,
) -> ExampleDataset:
    """The examples; prompts that are held out get the target's greedy answer, to be measured on."""
    dataset = ExampleDataset(examples)
    for index in split_rows(dataset, held_out_percent)[1].indices:
        if dataset.rows[index]["length"] == dataset.rows[index]["prompt_length"]:
            examples[index] = greedy_answer(target, drafter, examples[index], new)
    return ExampleDataset(examples)


def read_examples(
    arguments: DistillArguments, config: OspreyDistillationConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Example]:
    """The rows of `--data` as tokens; prompts without an answer only where all completions are written in training."""
    rows = [row for path in arguments.data for row in read_rows(check_file(Path(path)))]
    if tokenizer.chat_template is None and any("text" not in row for row in rows):
        raise ValueError(f"The target {arguments.target} has no chat template to put its responses in.")
    all_written = config.seq_kd or config.lmbda == 1.0
    examples = [example for row in rows for example in tokenize_row(tokenizer, row, config.max_length, all_written)]
    if not all_written:
        examples = [example for example in examples if len(example.input_ids) > example.prompt_length + 1]
    if not examples:
        raise ValueError(f"No response of two or more tokens was found in {', '.join(arguments.data)}.")
    return examples


def refuse_other_head(drafter: str, head_sha256: str) -> None:
    """Raises `ValueError` if the drafter was distilled before, from a target with another head."""
    for stage in provenance(drafter):
        before = stage.get("features", {}).get("head_sha256", head_sha256)
        if before != head_sha256:
            raise ValueError(
                f"{drafter} was distilled from another target (or revision) than these features: their heads differ."
            )


def drafter_sha256(folder: str) -> str:
    """Hash of a drafter's, or another model's, config and weights; of a Hub id its name."""
    files = sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("config.json")])
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest() if files else folder


def own_checkpoint(folder: Path, run: dict[str, Any]) -> str | None:
    """The checkpoint to go on from, after making sure that the folder is this very run's; writes `run.json`.

    Raises:
        ValueError: the folder holds checkpoints of another drafter, other data or another recipe.
    """
    checkpoint = last_checkpoint(folder)
    if checkpoint is not None:
        refuse_changes(folder / RUN_FILE, run)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RUN_FILE, run)
    return checkpoint


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint, if any; one whose writing was cut short is passed over."""
    found = {}
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/{STATE_FILE}"):
        with suppress(ValueError, KeyError):
            found[json.loads(path.read_text(encoding="utf-8"))["global_step"]] = path.parent
    return str(found[max(found)]) if found else None


def refuse_changes(path: Path, settings: dict[str, Any]) -> None:
    """Raises `ValueError` if `path` is there with other settings.

    A folder of an earlier version has no such file, or lacks settings that are recorded only since: they are not
    compared.
    """
    if not path.exists():
        return
    before, settings = json.loads(path.read_text()), json.loads(json.dumps(settings))
    differing = []
    for key in settings.keys() & before.keys():
        new, old = settings[key], before[key]
        if isinstance(new, dict) and isinstance(old, dict):
            inner = [name for name in new if name in old and old[name] != new[name]]
            differing += [f"{key} ({', '.join(sorted(inner))})"] if inner else []
        elif new != old:
            differing.append(key)
    if differing:
        raise ValueError(
            f"{path.parent} belongs to a run with another {', '.join(sorted(differing))}: choose another folder "
            "(--output_dir, --out), or delete it to start anew."
        )


def recipe(config: OspreyDistillationConfig) -> dict[str, Any]:
    """The settings that decide what is learnt; `bf16` is what `precision` means on this machine."""
    names = (
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "weight_decay", "adam_beta1"),
        *("adam_beta2", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
        *("unroll_steps", "unroll_decay", "unroll_fraction", "freeze_embeddings", "bf16", "seed"),
        *(
            "muon",
            "optim",
            "other_learning_rate",
            "context_learning_rate",
            "beta",
            "lmbda",
            "seq_kd",
            "temperature",
            "max_new_tokens",
        ),
        *("whiten_context", "max_length", "data_seed", "lr_scheduler_kwargs", "adam_epsilon"),
    )
    return json.loads(json.dumps({name: getattr(config, name) for name in names}, default=str))
