"""The Trainer of stage 2: its settings, whole checkpoints that know their place in the data, progress, evaluation."""

from __future__ import annotations

import importlib.util
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from osprey.train.callbacks import StopAtNan
from osprey.train.checkpoints import write_json
from osprey.train.heap import keep_freed_memory
from osprey.train.linear_loss import SampledVocabulary, use_linear_cross_entropy
from osprey.train.muon import MuonAdamW
from osprey.train.packing import PackedRows
from osprey.train.precision import default_device_type, use_bf16
from osprey.train.pretrain_resume import STATE_FILE

if TYPE_CHECKING:
    from osprey.train.pretrain import PretrainArguments

logger = logging.getLogger(__name__)

COUNTED_TOKENS = 500_000  # for the most frequent ids


def make_settings(arguments: PretrainArguments, run: Path) -> TrainingArguments:
    """What the Trainer is told; joins the other processes, if there are any.

    Raises:
        ValueError: one process would train on several cards, or a package for logging is missing.
    """
    device_type = default_device_type()
    if arguments.report_to != "none" and importlib.util.find_spec(arguments.report_to) is None:
        raise ValueError(f"--report_to {arguments.report_to} needs a package: pip install {arguments.report_to}.")
    schedule, options = "cosine_with_min_lr", {"min_lr_rate": arguments.min_learning_rate_ratio}
    if arguments.schedule == "wsd":
        schedule = "warmup_stable_decay"
        options = {
            "num_decay_steps": math.ceil(arguments.decay * arguments.steps),
            "min_lr_ratio": arguments.min_learning_rate_ratio,
        }
    settings = TrainingArguments(
        output_dir=str(run),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_rows,
        gradient_accumulation_steps=arguments.accumulation,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=options,
        warmup_steps=math.ceil(arguments.warmup * arguments.steps),
        weight_decay=arguments.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=arguments.max_grad_norm,
        bf16=use_bf16(arguments.precision, device_type),
        use_cpu=device_type == "cpu",
        seed=arguments.seed,
        logging_steps=arguments.log_steps,
        logging_nan_inf_filter=False,
        save_steps=arguments.save_steps,
        save_total_limit=2,
        ignore_data_skip=True,  # PackedRows goes on by itself
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        report_to=arguments.report_to,
        disable_tqdm=True,
    )
    if settings.n_gpu > 1:
        raise ValueError(
            f"one process sees {settings.n_gpu} cards: start one for each with `accelerate launch`, or name one card "
            "in CUDA_VISIBLE_DEVICES."
        )
    return settings


def make_trainer(
    arguments: PretrainArguments,
    settings: TrainingArguments,
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    rows: PackedRows,
    run_state: Callable[[], dict[str, Any]],
    evaluate: Callable[[int], dict[str, float]] | None,
) -> Trainer:
    """Trains `model` on `rows`, which with several processes the first one reads for all.

    Args:
        teacher: unpruned source, for restoration distillation.
        run_state: what every checkpoint stores beside the position in the data.
        evaluate: perplexities by name of at most so many tokens of each held-out file.
    """
    if model.device.type == "cpu":
        keep_freed_memory()
    counted = min(COUNTED_TOKENS, arguments.steps * arguments.step_tokens)
    sampled = sampled_vocabulary(rows, model.config.vocab_size, arguments.softmax_ids, counted)
    use_linear_cross_entropy(model, sampled, teacher, arguments.distill_share)
    trainer = WholeCheckpoints(model, settings, train_dataset=rows, data_collator=default_data_collator)
    if arguments.matrix_learning_rate is not None:  # with DDP every process takes the same steps
        if trainer.is_fsdp_enabled:
            raise ValueError("Muon needs whole matrices, and FSDP shares them out: leave --matrix_learning_rate out.")
        betas = (settings.adam_beta1, settings.adam_beta2)
        trainer.optimizer = MuonAdamW(
            model, arguments.matrix_learning_rate, arguments.learning_rate, betas, arguments.weight_decay
        )
    trainer.remove_callback(PrinterCallback)  # one line a log instead of its dictionaries
    trainer.add_callback(_StopAtNan)
    if settings.process_index == 0:
        trainer.add_callback(_Progress(arguments.step_tokens))
    if evaluate is not None:
        trainer.add_callback(_HeldOut(trainer, evaluate, arguments.eval_steps, arguments.eval_tokens))
    trainer.add_callback(_DataState(rows, arguments.step_rows, run_state))
    return trainer


def sampled_vocabulary(rows: PackedRows, vocab_size: int, size: int | None, counted: int) -> SampledVocabulary | None:
    """The most frequent ids of the first `counted` tokens, and room for random ones; None for the whole softmax."""
    if size is None or size >= vocab_size:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in islice(rows.fresh(), math.ceil(counted / rows.length)):
        counts += torch.bincount(torch.tensor(row["input_ids"]), minlength=vocab_size)
    frequent = size * 2 // 3
    return SampledVocabulary(counts.topk(frequent).indices, size - frequent, vocab_size)


class WholeCheckpoints(Trainer):
    """A checkpoint that cannot be written goes away again, and the error is an `OSError` that says so."""

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:  # safetensors and torch.save have errors of their own for a full disk
            folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            shutil.rmtree(folder, ignore_errors=True)
            raise OSError(
                f"the checkpoint {folder} cannot be written ({' '.join(str(error).split())}): make room and --resume."
            ) from error


class _StopAtNan(StopAtNan):
    def on_pre_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        try:
            super().on_pre_optimizer_step(args, state, control, **kwargs)
        except ValueError as error:  # a run of this stage cannot go on with another learning rate
            raise ValueError(
                f"The gradients of step {state.global_step + 1} are not finite: start again with --overwrite and a "
                "lower --learning_rate."
            ) from error


class _DataState(TrainerCallback):
    def __init__(self, rows: PackedRows, step_rows: int, run_state: Callable[[], dict[str, Any]]):
        self.rows, self.step_rows, self.run_state = rows, step_rows, run_state

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            dist.barrier()  # the file says that all have written their parts
        if args.process_index == 0:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            position = self.rows.state_dict(state.global_step * self.step_rows)
            write_json(folder / STATE_FILE, {**self.run_state(), **position})


class _Progress(TrainerCallback):
    """A bar of tokens, their speed and the time left on a terminal; else a line a log."""

    def __init__(self, step_tokens: int):
        self.step_tokens = step_tokens
        self.bar: tqdm | None = None

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.last = (time.time(), state.global_step)
        if sys.stderr.isatty():
            self.bar = tqdm(
                total=state.max_steps * self.step_tokens,
                initial=state.global_step * self.step_tokens,
                unit="tokens",
                unit_scale=True,
                dynamic_ncols=True,
            )

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.step_tokens)

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{logs['loss']:.4f}", lr=f"{logs['learning_rate']:.2e}", refresh=False)
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
    def __init__(self, trainer: Trainer, evaluate: Callable[[int], dict[str, float]], every: int, tokens: int):
        self.trainer, self.evaluate, self.every, self.tokens = trainer, evaluate, every, tokens

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            found = self.evaluate(self.tokens)
            logger.info("held-out perplexity: %s", found)
            due = control.should_log  # the training loss's log, which one now would take for done
            self.trainer.log({f"eval_perplexity_{name}": value for name, value in found.items()})
            control.should_log = due
