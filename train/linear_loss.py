"""Cross-entropy straight from hidden states, for a small body under a large vocabulary.

With two blocks and 49k tokens of vocabulary nearly all of the time and memory of a training step is the head's.
Computing the gradient of the logits together with the logits, as Liger's fused linear cross-entropy does, saves the
passes over fp32 logits that autograd makes (torch 2.13's own chunked `linear_cross_entropy` is slower than those on
CPUs, and sums the loss in bf16).
"""

import math
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

IGNORE = -100  # the label that counts for nothing, as in torch and transformers
ROWS = 256  # fp32 logits that are held at a time: 50 MB at 49k tokens


class Teacher(NamedTuple):
    """Whose distribution is learnt beside the labels: its head's input and its head, and its share of the loss."""

    hidden: Tensor  # [T, h']
    weight: Tensor  # [V, h']
    share: float  # 0: labels alone, 1: the teacher alone


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, teacher: Teacher | None
    ) -> Tensor:
        kept = labels != IGNORE  # [T]
        rows, targets = hidden[kept], labels[kept]  # [n, h], [n]
        lessons = teacher.hidden[kept] if teacher is not None else None  # [n, h']
        grad_logits = rows.new_empty(rows.shape[0], weight.shape[0])  # [n, V]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, rows.shape[0], ROWS):
            piece = slice(start, start + ROWS)
            logits = torch.mm(rows[piece], weight.t(), out=grad_logits[piece])
            part, log_probs = _piece(logits, targets[piece], bias)
            share = 1.0
            if teacher is not None:
                share = 1 - teacher.share
                lesson = torch.log_softmax(_scores(lessons[piece] @ teacher.weight.t(), bias), dim=-1)  # [rows, V]
                taught = lesson.exp()
                part = share * part + teacher.share * (taught * (lesson - log_probs)).sum()
            loss += part
            # d loss / d logits = softmax - one hot, or - the mixture of the one hot and the teacher's softmax
            probs = log_probs.exp_()
            target = targets[piece, None]
            probs.scatter_add_(1, target, torch.full_like(target, -share, dtype=torch.float32))
            if teacher is not None:
                probs.sub_(taught, alpha=teacher.share)
            logits.copy_(probs)
        ctx.save_for_backward(rows, weight, grad_logits, kept)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weight, grad_logits, kept = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = rows.new_zeros(kept.shape[0], rows.shape[1])
            grad_hidden[kept] = (grad_logits @ weight) * grad
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_logits.t() @ rows) * grad
        return grad_hidden, grad_weight, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, teacher: Teacher | None = None
) -> Tensor:
    """Sum over `labels != -100` of the cross-entropy of `hidden @ weight.T`, in nats.

    Args:
        hidden: `[T, h]`, the states that the head sees.
        weight: `[V, h]`, the head.
        labels: `[T]`, the id that each row predicts (not shifted), -100 for none.
        bias: `[V]`, added to the logits (to a teacher's as well); a constant.
        teacher: with one, the loss is `(1 - share)` times that cross-entropy plus `share` times the KL divergence of
            the student's distribution from the teacher's; only where gradients are computed.

    Under autocast all factors are cast to its type; the softmax is fp32 in any case.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        if teacher is not None:
            teacher = Teacher(teacher.hidden.to(dtype), teacher.weight.to(dtype), teacher.share)
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.is_grad_enabled():
            return _LinearCrossEntropy.apply(hidden, weight, labels, bias, teacher)
        kept = labels != IGNORE
        rows, targets = hidden[kept].split(ROWS), labels[kept].split(ROWS)
        pieces = [_piece(part @ weight.t(), target, bias)[0] for part, target in zip(rows, targets, strict=True)]
        return torch.stack(pieces).sum()


def _piece(logits: Tensor, targets: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Loss of a few rows and their fp32 log-probabilities `[rows, V]`."""
    log_probs = torch.log_softmax(_scores(logits, bias), dim=-1)
    return -log_probs.gather(1, targets[:, None]).sum(), log_probs


def _scores(logits: Tensor, bias: Tensor | None) -> Tensor:
    return logits.float() if bias is None else logits.float().add_(bias)


class SampledVocabulary:
    """A smaller softmax with, in expectation, the same normaliser: sampled softmax (Jean et al. 2015, §3).

    A batch is scored against its own labels, the ids `frequent`, and `random` of the other M ids, which stand for all
    of them: their logits are raised by log(M / random).
    """

    def __init__(self, frequent: Tensor, random: int, vocab_size: int):
        self.frequent, self.random, self.vocab_size = frequent, random, vocab_size

    def sample(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The ids `[S]`, the bias of their logits `[S]`, and the labels as places among the ids `[T]`."""
        device = labels.device
        known = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
        known[self.frequent.to(device)] = True
        known[labels[labels != IGNORE]] = True
        sure, others = known.nonzero().flatten(), (~known).nonzero().flatten()
        # Seeded by the batch itself: a run that was stopped and goes on draws the same ids.
        generator = torch.Generator().manual_seed(labels.clamp(min=0).sum().item())
        drawn = others[torch.randperm(len(others), generator=generator)[: self.random].to(device)]
        ids = torch.cat([sure, drawn])
        bias = torch.zeros(len(ids), device=device)
        if len(drawn):
            bias[len(sure) :] = math.log(len(others) / len(drawn))
        places = torch.full((self.vocab_size,), IGNORE, device=device)
        places[ids] = torch.arange(len(ids), device=device)
        return ids, bias, torch.where(labels == IGNORE, IGNORE, places[labels.clamp(min=0)])


def use_linear_cross_entropy(
    model: PreTrainedModel,
    sampled: SampledVocabulary | None = None,
    teacher: PreTrainedModel | None = None,
    teacher_share: float = 0.0,
) -> None:
    """Lets `model(input_ids, labels=...)` return the loss alone, without logits (see the module's docstring).

    Only for heads that are nothing but a matrix (no bias, no scaled or capped logits): the families of
    `prune.SUPPORTED_FAMILIES`. In training, with `sampled`, the loss is that of the smaller softmax, and with
    `teacher`, a model of the same vocabulary, a share of it is the divergence from the teacher's distribution.
    """

    def forward(
        self: PreTrainedModel,
        input_ids: Tensor,
        labels: Tensor,
        num_items_in_batch: Any = None,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        # Without a cache: with one, transformers takes no notice of position ids that start again (packed documents).
        hidden = self.base_model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state.flatten(0, 1)
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE).flatten()  # [B * T], shifted
        items = (labels != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
        weight, bias, lesson = self.get_output_embeddings().weight, None, None
        if teacher is not None and self.training:
            with torch.no_grad():
                taught = teacher.base_model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state
            lesson = Teacher(taught.flatten(0, 1), teacher.get_output_embeddings().weight, teacher_share)
        if sampled is not None and self.training:
            ids, bias, labels = sampled.sample(labels)
            weight = weight[ids]
            if lesson is not None:
                lesson = lesson._replace(weight=lesson.weight[ids])
        return CausalLMOutputWithPast(loss=linear_cross_entropy(hidden, weight, labels, bias, lesson) / items)

    model.forward = types.MethodType(forward, model)
