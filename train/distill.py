"""Stage 4: train the drafter to match its target's distribution, unrolled over the draft steps."""

import json
import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from osprey.modeling.modeling_osprey import OspreyDrafterForCausalLM
from osprey.train.align import load_tokenizer
from osprey.train.checkpoints import TRAINING_FILE, atomic_folder, provenance, versions, write_json
from osprey.train.feature_data import EpochSampler, FeatureDataset, FeatureSubset, collate, split_rows
from osprey.train.losses import normalised_head, normalised_teacher, soft_cross_entropy
from osprey.train.muon import MuonAdamW
from osprey.train.precision import autocast, refuse_many_devices, use_bf16
from osprey.train.unroll import Chains, accepted_lengths, find_chains, unroll, walk_rounds

TRAINER_DEFAULT_OUTPUT = "trainer_output"  # what TrainingArguments makes of None


@dataclass
class DistillArguments:
    """What is distilled from what; how is in `OspreyDistillationConfig`."""

    drafter: str = field(metadata={"help": "drafter folder, from `osprey convert` or an earlier distillation"})
    features: list[str] = field(metadata={"help": "feature folders of the target (`osprey distill --prepare`)"})
    out: str = field(metadata={"help": "drafter folder to write at the end; checkpoints go to --output_dir"})
    held_out_percent: int = field(default=5, metadata={"help": "share of the rows, by hash of the id, kept for MAL"})
    overwrite: bool = field(default=False, metadata={"help": "replace the drafter folder if it exists"})


@dataclass
class OspreyDistillationConfig(TrainingArguments):
    """Trainer settings with the paper's defaults for clipping, warm-up, unroll and decay.

    Args:
        learning_rate: of the matrices of the blocks and `fc`, by Muon (`MuonAdamW`).
        other_learning_rate: of the embedding and the norms, by AdamW.
        unroll_steps: draft steps in training, K.
        unroll_decay: the loss of step k (from 0 on) weighs `unroll_decay ** k`.
        unroll_fraction: share of the positions of each row, at random in each step, at which a chain goes past its
            step 0. The expected loss does not depend on it.
        loss_chunk_size: positions whose logits exist at a time.
        freeze_embeddings: keep the embedding, and a head that is tied to it, as they are.
        precision: `auto`, `bf16` (autocast) or `fp32`; loss and softmax are fp32 always.
    """

    output_dir: str | None = field(
        default=None, metadata={"help": "checkpoints, kept to go on from (default: OUT.run)"}
    )
    learning_rate: float = field(default=2e-3)
    lr_scheduler_type: str = field(default="cosine")
    warmup_steps: float = field(default=0.04)
    max_grad_norm: float = field(default=1.0)
    adam_beta2: float = field(default=0.95)
    per_device_train_batch_size: int = field(default=16)
    per_device_eval_batch_size: int = field(default=16)
    logging_steps: float = field(default=20)
    save_steps: float = field(default=500)
    save_total_limit: int | None = field(default=2)
    eval_strategy: str = field(default="steps")
    eval_steps: float | None = field(default=500)
    remove_unused_columns: bool = field(default=False)
    other_learning_rate: float = field(default=3e-4, metadata={"help": "of embedding and norms, by AdamW"})
    unroll_steps: int = field(default=5, metadata={"help": "draft steps in training"})
    unroll_decay: float = field(default=0.8, metadata={"help": "weight of draft step k: decay ** k"})
    unroll_fraction: float = field(default=1.0, metadata={"help": "share of positions with steps past the first"})
    loss_chunk_size: int = field(default=256, metadata={"help": "positions whose logits exist at a time"})
    freeze_embeddings: bool = field(default=True, metadata={"help": "keep the embedding, and a tied head, fixed"})
    precision: str = field(default="auto", metadata={"help": "bf16 autocast: auto, bf16 or fp32"})

    def __post_init__(self):
        if self.unroll_steps < 1 or not 0.0 < self.unroll_fraction <= 1.0:
            raise ValueError(
                f"unroll_steps must be at least 1 and unroll_fraction in (0, 1], but they are {self.unroll_steps} and "
                f"{self.unroll_fraction}."
            )
        self.use_cpu = self.use_cpu or not torch.cuda.is_available()
        self.bf16 = use_bf16(self.precision, "cpu" if self.use_cpu else "cuda")
        super().__post_init__()
        refuse_many_devices(self)  # the unrolled steps call the drafter past a DDP wrapper: gradients would not meet


class OspreyDistillationTrainer(Trainer):
    """Distils an `OspreyDrafterForCausalLM` on `FeatureDataset` rows of its target."""

    def __init__(
        self,
        model: OspreyDrafterForCausalLM,
        args: OspreyDistillationConfig,
        train_dataset: "FeatureSubset",
        eval_dataset: "FeatureSubset | None" = None,
        **kwargs: Any,
    ):
        refuse_other_target(model, train_dataset.features)
        model.embed_tokens.requires_grad_(not args.freeze_embeddings)
        if model.config.tie_word_embeddings:  # the head is the embedding, or a copy of its rows that is made at load
            model.lm_head.requires_grad_(not args.freeze_embeddings and not model.has_tied_shortlist)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=collate,
            **kwargs,
        )
        self.model_accepts_loss_kwargs = False  # the loss is a mean: gradient accumulation has to average it
        draft_ids = model.draft_ids.cpu()
        self.teacher_head = normalised_head(train_dataset.features.head()[draft_ids]).to(args.device)  # [D, H+2]
        self.draft_index = torch.full((model.config.vocab_size + 1,), -1)  # target id (-1 too) to row of the head
        self.draft_index[draft_ids] = torch.arange(len(draft_ids))
        self.draft_index = self.draft_index.to(args.device)
        self._sums: dict[str, Tensor] = {}  # of the steps since the last log

    def create_optimizer(self, model: nn.Module | None = None) -> MuonAdamW:
        if self.optimizer is None:
            args = self.args
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = MuonAdamW(self.model, args.learning_rate, args.other_learning_rate, betas, fused=True)
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        rows = self.args.train_batch_size * self.args.gradient_accumulation_steps
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(rows, self.train_dataset.lengths(), seed)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        args = self.args
        chains = find_chains(inputs["response_mask"], args.unroll_steps, args.unroll_fraction)
        with autocast(args.precision, args.device.type):
            results = self.draft(inputs, chains, inputs["top1"], first_step_everywhere=True)
        if not torch.isfinite(results.loss):
            raise ValueError(
                f"The loss of step {self.state.global_step + 1} is {float(results.loss)}: go on from the last "
                f"checkpoint in {args.output_dir} with a lower learning rate."
            )
        steps = torch.arange(args.unroll_steps, device=results.row_step.device)
        counts = (results.row_step[:, None] == steps).sum(0)  # [K]
        self._track("step_loss", results.sums(results.losses), counts)
        self._track("top1", results.sums(results.hits), counts)
        return (results.loss, {"loss": results.loss}) if return_outputs else results.loss

    def draft(
        self, inputs: dict[str, Tensor], chains: Chains, labels: Tensor, first_step_everywhere: bool
    ) -> "DraftResults":
        """Runs the unrolled drafter on a batch and compares every draft with the target's distribution.

        Args:
            inputs: a collated batch.
            chains: the anchors; steps k >= 1 are compared at these only.
            labels: `[B, T]`, for every position the token after it that counts as a hit; -1: none does.
            first_step_everywhere: compare step 0 wherever it predicts a response token, not only at anchors.
        """
        args, drafter = self.args, self.accelerator.unwrap_model(self.model)
        outputs = unroll(drafter, inputs["input_ids"], inputs["taps"].float(), chains, args.unroll_steps)
        length = inputs["input_ids"].shape[1]
        device = outputs[0].device
        students, places, row_steps, weights = [], [], [], []
        for step, hidden in enumerate(outputs):
            if step == 0 and first_step_everywhere:
                batch, position = inputs["response_mask"][:, 2:].nonzero(as_tuple=True)  # position t predicts t + 2
                students.append(hidden[batch, position])  # [P_0, h]
            else:
                batch, column = (chains.num_steps > step).nonzero(as_tuple=True)
                position = chains.anchors[batch, column]
                students.append(hidden[batch, position if step == 0 else column])  # [P_k, h]
            places.append(batch * length + position + 1 + step)  # where the target predicts the same token
            rows = len(position)
            row_steps.append(torch.full((rows,), step, device=device))
            weights.append(torch.full((rows,), args.unroll_decay**step / max(rows, 1), device=device))
        place = torch.cat(places)  # [P]
        loss, losses, hits = soft_cross_entropy(
            drafter.norm(torch.cat(students)),
            drafter.head_weight,
            normalised_teacher(inputs["hidden"].flatten(0, 1)[place], inputs["logsumexp"].flatten()[place]),
            self.teacher_head,
            self.draft_index[labels.flatten()[place]],
            torch.cat(weights),
            args.loss_chunk_size,
        )
        return DraftResults(loss, losses, hits, torch.cat(row_steps), args.unroll_steps)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval") -> dict[str, float]:
        """Loss, agreement by draft step, and the simulated mean acceptance length on the held-out rows.

        The simulation drafts at every position of a response that the target wrote greedily and walks through it as
        generation would: a draft token is accepted if it is the response's own. What it leaves out is only the
        target's rounding. MAL counts the bonus token and not the prefill (DESIGN §3).
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        start = time.perf_counter()
        self.model.eval()
        emitted: dict[str, list[list[int]]] = {}
        depth_hits = torch.zeros(self.args.unroll_steps)
        depth_tries = torch.zeros(self.args.unroll_steps)
        loss, batches = 0.0, 0
        order = sorted(range(len(dataset)), key=lambda i: dataset.rows[i]["length"])
        for begin in range(0, len(order), self.args.eval_batch_size):
            indices = order[begin : begin + self.args.eval_batch_size]
            inputs = self._prepare_inputs(collate([dataset[i] for i in indices]))
            chains = find_chains(inputs["response_mask"], self.args.unroll_steps)
            with autocast(self.args.precision, self.args.device.type):
                own_tokens = nn.functional.pad(inputs["input_ids"][:, 1:], (0, 1), value=-1)  # [B, T]
                results = self.draft(inputs, chains, own_tokens, first_step_everywhere=False)
            loss, batches = loss + float(results.loss), batches + 1
            correct = self._correct(chains, results)  # [B, A, K]
            lengths = accepted_lengths(correct)  # [B, A]
            for k in range(self.args.unroll_steps):
                tried = (chains.num_steps > k) & (lengths >= k)
                depth_tries[k] += tried.sum().cpu()
                depth_hits[k] += (tried & (lengths > k)).sum().cpu()
            for row, index in enumerate(indices):
                accepted = lengths[row][chains.num_steps[row] > 0].tolist()
                language = dataset.rows[index]["language"] or "?"
                emitted.setdefault(language, []).append(walk_rounds(accepted))
        metrics = {f"{metric_key_prefix}_loss": loss / max(batches, 1)}
        everything = [rounds for rows in emitted.values() for rounds in rows]
        metrics[f"{metric_key_prefix}_mal"] = pooled(everything)
        for k in range(self.args.unroll_steps):
            metrics[f"{metric_key_prefix}_acceptance_{k}"] = float(depth_hits[k] / depth_tries[k].clamp(min=1))
        for language, rows in sorted(emitted.items(), key=lambda item: -len(item[1])):
            metrics[f"{metric_key_prefix}_mal_{language}"] = pooled(rows)
        metrics[f"{metric_key_prefix}_runtime"] = time.perf_counter() - start
        metrics = {name: round(value, 4) for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.model.train()
        return metrics

    def _correct(self, chains: Chains, results: "DraftResults") -> Tensor:
        """Whether each draft token is the response's own, bool `[B, A, K]`; False past a chain's end."""
        steps = torch.arange(self.args.unroll_steps, device=chains.anchors.device)
        drafted = chains.num_steps > steps[:, None, None]  # [K, B, A], the order of the results' rows
        return torch.zeros_like(drafted).masked_scatter(drafted, results.hits).permute(1, 2, 0)

    def _track(self, name: str, sums: Tensor, counts: Tensor) -> None:
        entry = torch.stack([sums.detach(), counts.to(sums.dtype)])  # [2, K]
        self._sums[name] = self._sums[name] + entry if name in self._sums else entry

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training log, not an evaluation or the summary
            for name, (sums, counts) in self._sums.items():
                for step, mean in enumerate((sums / counts.clamp(min=1)).tolist()):
                    logs[f"{name}_{step}"] = round(mean, 4)
            self._sums.clear()
        super().log(logs, start_time)


@dataclass
class DraftResults:
    """Comparison of P drafts with the target; the rows of a step stand together, steps rising."""

    loss: Tensor  # scalar: sum over steps of decay^k x mean loss
    losses: Tensor  # [P], nats
    hits: Tensor  # [P], whether the drafter's most likely token is the label
    row_step: Tensor  # [P], draft step
    num_steps: int

    def sums(self, values: Tensor) -> Tensor:
        """Sum of `values` `[P]` by draft step, `[K]`."""
        return torch.zeros(self.num_steps, device=values.device).index_add_(0, self.row_step, values.float())


def pooled(rows: list[list[int]]) -> float:
    """Tokens emitted by verification rounds over their number."""
    rounds = sum(map(len, rows))
    return sum(map(sum, rows)) / rounds if rounds else math.nan


def refuse_other_target(drafter: OspreyDrafterForCausalLM, features: FeatureDataset) -> None:
    """Raises `ValueError` if the features come from a target of another shape or from other taps."""
    pairs = {
        "target_layer_ids": drafter.config.target_layer_ids,
        "target_hidden_size": drafter.config.target_hidden_size,
        "target_num_hidden_layers": drafter.config.target_num_hidden_layers,
        "target_vocab_size": drafter.config.vocab_size,
    }
    for name, wanted in pairs.items():
        if features.settings[name] != wanted:
            raise ValueError(
                f"The features have {name} {features.settings[name]} but the drafter has {wanted}: prepare features "
                "of the drafter's own target and taps."
            )


def distill(arguments: DistillArguments, config: OspreyDistillationConfig) -> dict[str, Any]:
    """Trains, writes the drafter folder and returns its training record; goes on from the last checkpoint, if any.

    Raises:
        ValueError: drafter and features do not fit, or the loss is not finite.
        OSError: the folder exists.
    """
    with atomic_folder(arguments.out, arguments.overwrite) as work:
        drafter = OspreyDrafterForCausalLM.from_pretrained(arguments.drafter, dtype=torch.float32)
        tokenizer = load_tokenizer(arguments.drafter)
        features = FeatureDataset(arguments.features)
        train, held_out = split_rows(features, arguments.held_out_percent)
        if not train.rows:
            raise ValueError("No row is left to train on: lower --held_out_percent or give more features.")
        if not held_out.rows:
            config.eval_strategy = "no"
        if config.output_dir == TRAINER_DEFAULT_OUTPUT:  # a run must not go on from another drafter's
            config.output_dir = f"{arguments.out}.run"
        trainer = OspreyDistillationTrainer(drafter, config, train, held_out if held_out.rows else None)

        checkpoint = get_last_checkpoint(config.output_dir) if os.path.isdir(config.output_dir) else None
        start = time.perf_counter()
        result = trainer.train(resume_from_checkpoint=checkpoint)
        record = {
            "stage": "distill",
            "features": features.settings | {"data": features.sources},
            "rows": {"train": len(train.rows), "held_out": len(held_out.rows)},
            "tokens_per_epoch": sum(train.lengths()),
            "recipe": recipe(config),
            "steps": trainer.state.global_step,
            "epochs": round(trainer.state.epoch or 0.0, 3),
            "seconds": round(time.perf_counter() - start, 1),
            "train_loss": result.training_loss,
            "held_out": trainer.evaluate() if held_out.rows else {},
            "versions": versions(),
        }
        drafter.save_pretrained(work)
        tokenizer.save_pretrained(work)
        write_json(work / TRAINING_FILE, {"stages": [*provenance(arguments.drafter), record]})
    return record


def recipe(config: OspreyDistillationConfig) -> dict[str, Any]:
    """The settings that decide what is learnt."""
    names = (
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "weight_decay", "adam_beta1"),
        *("adam_beta2", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
        *(
            "unroll_steps",
            "unroll_decay",
            "unroll_fraction",
            "freeze_embeddings",
            "precision",
            "bf16",
            "seed",
            "other_learning_rate",
        ),
    )
    return json.loads(json.dumps({name: getattr(config, name) for name in names}, default=str))
