"""Settings of stage 4: TRL's for knowledge distillation, and those of the unrolled draft steps."""

import math
import warnings
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch

from osprey.train.precision import use_bf16

with warnings.catch_warnings():  # of TRL, about all that lives in `trl.experimental`
    warnings.simplefilter("ignore")
    from trl.experimental.gkd import GKDConfig

MUON_OTHER_LEARNING_RATE = 3e-4


@dataclass
class OspreyDistillationConfig(GKDConfig):
    """Trainer settings with the paper's defaults for clipping, warm-up, unroll and decay.

    Of `GKDConfig`, with TRL's meaning (Agarwal et al. 2024, arXiv 2306.13649): `beta`, the divergence (0: forward KL,
    as a soft cross-entropy; 1: reverse KL; between: generalised Jensen-Shannon); `lmbda`, the share of the batches
    whose completions the student wrote; `seq_kd`, completions by the target for the others; `temperature` and
    `max_new_tokens` of these completions. The last four need the target in the step (online). What a drafter "writes"
    is a draft, so student-written text is assisted generation that keeps every draft unverified
    (`osprey.train.completions`). Its default is 0: what follows a wrong draft is never verified, so that states behind
    the drafter's own mistakes do not occur in use.

    Args:
        learning_rate: with Muon that of the matrices of the blocks and `fc`, without it that of everything.
        other_learning_rate: with Muon that of the embedding, the head and the norms, by AdamW.
        context_learning_rate: with Muon that of `fc` and the context halves: new, where the rest is pretrained.
        muon: Muon for the matrices (`MuonAdamW`); without it `optim` decides.
        unroll_steps: draft steps in training, K.
        unroll_decay: the loss of step k (from 0 on) weighs `unroll_decay ** k`.
        unroll_fraction: share of the positions of each row, at random in each step, at which a chain goes past its
            step 0. The expected loss does not depend on it.
        loss_chunk_size: positions whose logits exist at a time.
        freeze_embeddings: keep the embedding, and a head that is tied to it, as they are.
        precision: `auto`, `bf16` (autocast) or `fp32`; loss and softmax are fp32 always.
        whiten_context: a drafter as converted starts from an `fc` that whitens the deepest tap (`train/whiten.py`).
        max_length: online, tokens of prompt and response that are kept.
    """

    # Settings that GKDConfig inherits and that have no meaning here: a value that changes nothing would mislead.
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        *("packing", "packing_strategy", "eval_packing", "padding_free", "pad_to_multiple_of", "truncation_mode"),
        *("assistant_only_loss", "completion_only_loss", "loss_type", "label_smoothing_factor", "eos_token"),
        *("pad_token", "chat_template_path", "dataset_text_field", "dataset_kwargs", "dataset_num_proc"),
        *("shuffle_dataset", "model_init_kwargs", "teacher_model_name_or_path", "trust_remote_code"),
        *("router_aux_loss_coef", "gradient_checkpointing", "activation_checkpointing", "activation_offloading"),
        *("use_liger_kernel", "disable_dropout", "fp16"),
    )

    output_dir: str | None = field(
        default=None, metadata={"help": "checkpoints, kept to go on from (default: OUT.run)"}
    )
    learning_rate: float = field(default=2e-3, metadata={"help": "with Muon: of the matrices"})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "cosine, linear, constant, ..."})
    warmup_steps: float = field(default=0.04, metadata={"help": "below 1 a share of all steps"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm"})
    adam_beta2: float = field(default=0.95)
    per_device_train_batch_size: int = field(default=16, metadata={"help": "rows at a time"})
    per_device_eval_batch_size: int = field(default=16)
    logging_steps: float = field(default=20, metadata={"help": "steps between two lines of the log"})
    save_steps: float = field(default=500, metadata={"help": "steps between two checkpoints"})
    save_total_limit: int | None = field(default=2, metadata={"help": "checkpoints that are kept"})
    eval_strategy: str = field(default="steps")
    eval_steps: float | None = field(default=500, metadata={"help": "steps between two measurements of MAL"})
    remove_unused_columns: bool = field(default=False)
    gradient_checkpointing: bool | None = field(default=None)
    beta: float = field(default=0.0, metadata={"help": "divergence: 0 forward KL, 1 reverse KL, between: JSD"})
    lmbda: float = field(default=0.0, metadata={"help": "online: share of batches with text of the drafter's own"})
    temperature: float = field(default=1.0, metadata={"help": "online: sampling temperature of completions"})
    max_length: int | None = field(default=2048, metadata={"help": "online: tokens kept of prompt and response"})
    muon: bool = field(default=True, metadata={"help": "Muon for the matrices; without it --optim for everything"})
    other_learning_rate: float | None = field(
        default=None, metadata={"help": f"with Muon: of embedding, head, norms (default: {MUON_OTHER_LEARNING_RATE})"}
    )
    context_learning_rate: float | None = field(
        default=None, metadata={"help": "with Muon: of fc and the context halves (default: that of the others)"}
    )
    unroll_steps: int = field(default=5, metadata={"help": "draft steps in training"})
    unroll_decay: float = field(default=0.8, metadata={"help": "weight of draft step k: decay ** k"})
    unroll_fraction: float = field(default=1.0, metadata={"help": "share of positions with steps past the first"})
    loss_chunk_size: int = field(default=256, metadata={"help": "positions whose logits exist at a time"})
    freeze_embeddings: bool = field(default=True, metadata={"help": "keep the embedding, and a tied head, fixed"})
    whiten_context: bool = field(default=True, metadata={"help": "offline: start fc from the taps' own statistics"})
    precision: str = field(default="auto", metadata={"help": "bf16 autocast: auto, bf16 or fp32"})

    def __post_init__(self):
        if self.unroll_steps < 1 or not 0.0 < self.unroll_fraction <= 1.0:
            raise ValueError(
                f"unroll_steps must be at least 1 and unroll_fraction in (0, 1], but they are {self.unroll_steps} and "
                f"{self.unroll_fraction}."
            )
        if not 0 < self.temperature < math.inf:  # completions are sampled, which 0 leaves no way to do
            raise ValueError(f"temperature is {self.temperature}, but must be more than 0 and finite.")
        self._refuse_numbers_that_cannot_be()
        self._refuse_settings_without_effect()
        if self.muon and self.other_learning_rate is None:
            self.other_learning_rate = MUON_OTHER_LEARNING_RATE
        self.use_cpu = self.use_cpu or not torch.cuda.is_available()
        bf16 = use_bf16(self.precision, "cpu" if self.use_cpu else "cuda")
        if self.bf16 not in (None, bf16):
            raise ValueError("--bf16 has no effect on distillation: use --precision bf16 or fp32.")
        self.bf16 = bf16
        super().__post_init__()
        if self.world_size > 1:  # the unrolled steps call the drafter past a DDP wrapper: gradients would not meet
            raise ValueError(
                f"distillation trains in one process, but there are {self.world_size}: start it without a launcher "
                '(a large target can be spread over cards by --teacher_model_init_kwargs \'{"device_map": "auto"}\').'
            )
        self._n_gpu = min(self._n_gpu, 1)  # further cards are the target's: no DataParallel

    def _refuse_numbers_that_cannot_be(self) -> None:
        for name in ("learning_rate", "other_learning_rate", "context_learning_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"--{name} is {rate}, but must be more than 0 and finite.")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}, but must be at least 1.")
        if self.max_steps < 1 and (self.max_steps != -1 or not 0 < self.num_train_epochs < math.inf):
            raise ValueError(
                f"--max_steps is {self.max_steps} and --num_train_epochs {self.num_train_epochs}: give at least one "
                "step, or more than 0 epochs and no steps."
            )

    def _refuse_settings_without_effect(self) -> None:
        own = {entry.name: entry for entry in fields(self)}
        for name in self.WITHOUT_EFFECT:
            if getattr(self, name) != own[name].default:
                raise ValueError(f"--{name} has no effect on distillation: leave it out.")
        if self.muon and self.optim != own["optim"].default:
            raise ValueError(f"--optim {self.optim} has no effect beside Muon: give --muon false with it.")
        for name in ("other_learning_rate", "context_learning_rate"):
            if not self.muon and getattr(self, name) is not None:
                raise ValueError(f"--{name} has no effect without Muon: leave it out.")
