"""Stage 2: restore a pruned model by next-token pretraining on broad text; gives a backbone.

The target plays no part (Osprey, arXiv 2609.09338, §3): a backbone is made once and serves every target. The length
of a run is given in tokens, since time means little on a shared machine.
"""

import json
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from osprey.train.calibration import calibrate_norm
from osprey.train.checkpoints import (
    TRAINING_FILE,
    atomic_folder,
    file_sha256,
    provenance,
    versions,
    write_json,
)
from osprey.train.data import PackedRows, check_file, parse_sources
from osprey.train.linear_loss import SampledVocabulary, use_linear_cross_entropy
from osprey.train.perplexity import held_out_losses, perplexities
from osprey.train.precision import refuse_many_devices, use_bf16
from osprey.train.prune import load_config

logger = logging.getLogger(__name__)

DATA_STATE_FILE = "data_state.json"
CALIBRATION_ROWS = 8
COUNTED_TOKENS = 500_000  # for the most frequent ids


@dataclass
class PretrainArguments:
    """Arguments of `pretrain`."""

    model: str = field(metadata={"help": "pruned model: folder or Hub id (of any causal LM of a supported family)"})
    out: str = field(metadata={"help": "folder to write; checkpoints of the run are kept in OUT.run"})
    data: list[str] = field(metadata={"help": ".jsonl or .txt files, also .gz: path or path=weight (share of tokens)"})
    data_root: str = field(default=".", metadata={"help": "folder that the paths of --data and --held-out start from"})
    exclude: list[str] = field(
        default_factory=list, metadata={"help": "leave out training rows whose `source` contains one of these"}
    )
    held_out: list[str] = field(default_factory=list, metadata={"help": "files for perplexity, never trained on"})
    tokens: float = field(default=3e6, metadata={"help": "training tokens"})
    length: int = field(default=512, metadata={"help": "tokens in a packed row"})
    batch_rows: int = field(default=8, metadata={"help": "rows in a forward pass"})
    accumulation: int = field(default=1, metadata={"help": "forward passes in an optimizer step"})
    learning_rate: float = field(default=1e-3, metadata={"help": "peak of the cosine schedule"})
    min_learning_rate_ratio: float = field(default=0.1, metadata={"help": "its end, as a share of the peak"})
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
    freeze_embeddings: bool = field(default=False, metadata={"help": "leave embeddings and head as they are"})
    precision: str = field(default="auto", metadata={"help": "autocast: auto, bf16 or fp32"})
    seed: int = field(default=0, metadata={"help": "random seed"})
    log_steps: int = field(default=10, metadata={"help": "steps between lines of the log"})
    save_steps: int = field(default=200, metadata={"help": "steps between checkpoints"})
    eval_steps: int = field(default=200, metadata={"help": "steps between perplexities while training"})
    eval_tokens: int = field(default=4096, metadata={"help": "tokens of each file for those"})
    final_eval_tokens: int | None = field(
        default=None, metadata={"help": "tokens of each file for the perplexities before and after (default: all)"}
    )
    resume: bool = field(default=False, metadata={"help": "go on from the last checkpoint in OUT.run"})
    overwrite: bool = field(default=False, metadata={"help": "replace the folder if it exists"})


def pretrain(arguments: PretrainArguments) -> dict[str, Any]:
    """Trains, writes the backbone, and returns what its `training.json` says about this stage.

    Raises:
        ValueError: the model's family, a data file or a setting is not usable.
        OSError: a file is missing, or the folder exists.
    """
    sources = parse_sources(arguments.data, arguments.data_root)
    held_out = [check_file(Path(arguments.data_root) / path) for path in arguments.held_out]
    load_config(arguments.model)  # refuses an unsupported family
    step_tokens = arguments.length * arguments.batch_rows * arguments.accumulation
    steps = math.ceil(arguments.tokens / step_tokens)
    if steps < 1 or arguments.length < 2:
        raise ValueError("--tokens must be at least 1 and --length at least 2.")
    run = Path(f"{arguments.out}.run")
    checkpoint = last_checkpoint(run) if arguments.resume else None

    with atomic_folder(arguments.out, arguments.overwrite) as work:
        set_seed(arguments.seed)
        start = time.time()
        # fp32 master weights whatever the checkpoint holds: AdamW's small steps vanish in bf16.
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        if arguments.freeze_embeddings:
            model.get_input_embeddings().requires_grad_(False)
            model.get_output_embeddings().requires_grad_(False)

        def evaluate(tokens: int | None) -> dict[str, float]:
            return held_out_losses(model, tokenizer, held_out, arguments.length, tokens, arguments.precision)

        before = perplexities(evaluate(arguments.final_eval_tokens)) if held_out else {}
        if before:
            logger.info("held-out perplexity before: %s", before)
        rows = PackedRows(sources, tokenizer, arguments.length, tuple(arguments.exclude))
        scale = None
        if checkpoint is None and arguments.calibrate_norm:
            calibration = PackedRows(sources, tokenizer, arguments.length, tuple(arguments.exclude))
            scale = calibrate_norm(model, islice(calibration, CALIBRATION_ROWS), arguments.precision)
            logger.info("final norm scaled by %g", scale)
        trainer = make_trainer(arguments, model, tokenizer, rows, run, steps)
        if held_out:
            trainer.add_callback(_HeldOut(evaluate, arguments.eval_steps, arguments.eval_tokens))
        if checkpoint is not None:
            rows.load_state_dict(json.loads((Path(checkpoint) / DATA_STATE_FILE).read_text()))
        trainer.train(resume_from_checkpoint=checkpoint)
        after = perplexities(evaluate(arguments.final_eval_tokens)) if held_out else {}
        if after:
            logger.info("held-out perplexity after: %s", after)

        model.config.use_cache = True  # the Trainer turns it off
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        record = {
            "stage": "pretrain",
            "recipe": _recipe(arguments),
            "data": [_describe(source.path, weight=source.weight) for source in sources],
            "held_out": [_describe(path) for path in held_out],
            "steps": trainer.state.global_step,
            "tokens": trainer.state.global_step * step_tokens,
            "source_tokens": {cursor.source.path.name: cursor.tokens for cursor in rows.cursors},
            "norm_scale": scale,
            "bf16": use_bf16(arguments.precision, model.device.type),
            "seconds": round(time.time() - start, 1),
            "perplexity_before": before,
            "perplexity_after": after,
            "versions": versions(),
        }
        write_json(work / TRAINING_FILE, {"stages": [*provenance(arguments.model), record]})
    return record


def make_trainer(
    arguments: PretrainArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: PackedRows,
    run: Path,
    steps: int,
) -> Trainer:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    use_linear_cross_entropy(model, sampled_vocabulary(rows, model.config.vocab_size, arguments.softmax_ids))
    settings = TrainingArguments(
        output_dir=str(run),
        max_steps=steps,
        per_device_train_batch_size=arguments.batch_rows,
        gradient_accumulation_steps=arguments.accumulation,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": arguments.min_learning_rate_ratio},
        warmup_steps=math.ceil(arguments.warmup * steps),
        weight_decay=arguments.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=arguments.max_grad_norm,
        bf16=use_bf16(arguments.precision, device_type),
        use_cpu=device_type == "cpu",
        seed=arguments.seed,
        logging_steps=arguments.log_steps,
        save_steps=arguments.save_steps,
        save_total_limit=2,
        ignore_data_skip=True,  # PackedRows goes on by itself
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    refuse_many_devices(settings)
    trainer = Trainer(model, settings, train_dataset=rows, data_collator=default_data_collator)
    # One line a log instead of the Trainer's dictionaries; and the data position in every checkpoint.
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Progress(arguments.length * arguments.batch_rows * arguments.accumulation))
    trainer.add_callback(_DataState(rows, arguments.batch_rows * arguments.accumulation))
    return trainer


def sampled_vocabulary(rows: PackedRows, vocab_size: int, size: int | None) -> SampledVocabulary | None:
    """The most frequent ids of the beginning of the mixture, and room for random ones; None for the whole softmax."""
    if size is None or size >= vocab_size:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.long)
    fresh = PackedRows([cursor.source for cursor in rows.cursors], rows.tokenizer, rows.length, rows.excluded)
    for row in islice(fresh, math.ceil(COUNTED_TOKENS / rows.length)):
        counts += torch.bincount(torch.tensor(row["input_ids"]), minlength=vocab_size)
    frequent = size * 2 // 3
    return SampledVocabulary(counts.topk(frequent).indices, size - frequent, vocab_size)


class _DataState(TrainerCallback):
    def __init__(self, rows: PackedRows, step_rows: int):
        self.rows, self.step_rows = rows, step_rows

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_json(folder / DATA_STATE_FILE, self.rows.state_dict(state.global_step * self.step_rows))


class _Progress(TrainerCallback):
    def __init__(self, step_tokens: int):
        self.step_tokens = step_tokens

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.last = (time.time(), state.global_step)

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        now, (then, step) = time.time(), self.last
        self.last = (now, state.global_step)
        speed = (state.global_step - step) * self.step_tokens / (now - then)
        left = (state.max_steps - state.global_step) * self.step_tokens / speed
        logger.info(
            "step %d/%d  %.3fM tokens  loss %.4f  lr %.2e  grad %.2f  %.0f tokens/s  %.0f min left",
            state.global_step,
            state.max_steps,
            state.global_step * self.step_tokens / 1e6,
            logs["loss"],
            logs["learning_rate"],
            logs["grad_norm"],
            speed,
            left / 60,
        )


class _HeldOut(TrainerCallback):
    def __init__(self, evaluate: Any, every: int, tokens: int):
        self.evaluate, self.every, self.tokens = evaluate, every, tokens

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            logger.info("held-out perplexity: %s", perplexities(self.evaluate(self.tokens)))


def last_checkpoint(run: Path) -> str:
    checkpoint = get_last_checkpoint(str(run)) if run.is_dir() else None
    if checkpoint is None:
        raise FileNotFoundError(f"there is no checkpoint in {run} to go on from; run without --resume.")
    return checkpoint


def _recipe(arguments: PretrainArguments) -> dict[str, Any]:
    """The settings without this machine's paths."""
    places = ("model", "out", "data", "data_root", "held_out", "resume", "overwrite")
    return {name: value for name, value in asdict(arguments).items() if name not in places}


def _describe(path: Path, **more: Any) -> dict[str, Any]:
    return {"file": path.name, "sha256": file_sha256(path), **more}
