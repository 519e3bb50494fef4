"""Cross-entropy straight from hidden states, for a small body under a large vocabulary.

With two blocks and 49k tokens of vocabulary nearly all of the time and memory of a training step is the head's.
Computing the gradient of the logits together with the logits, as Liger's fused linear cross-entropy does, saves the
passes over fp32 logits that autograd makes (torch 2.13's own chunked `linear_cross_entropy` is slower than those on
CPUs, and sums the loss in bf16).
"""

import types
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

IGNORE = -100  # the label that counts for nothing, as in torch and transformers
ROWS = 256  # fp32 logits that are held at a time: 50 MB at 49k tokens


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        kept = labels != IGNORE  # [T]
        rows, targets = hidden[kept], labels[kept]  # [n, h], [n]
        grad_logits = rows.new_empty(rows.shape[0], weight.shape[0])  # [n, V]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, rows.shape[0], ROWS):
            logits = torch.mm(rows[start : start + ROWS], weight.t(), out=grad_logits[start : start + ROWS])
            target = targets[start : start + ROWS, None]
            log_probs = torch.log_softmax(logits.float(), dim=-1)  # [rows, V]
            loss -= log_probs.gather(1, target).sum()
            # d loss / d logits = softmax - one hot
            probs = log_probs.exp_()
            probs.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
            logits.copy_(probs)
        ctx.save_for_backward(rows, weight, grad_logits, kept)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, grad_logits, kept = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = rows.new_zeros(kept.shape[0], rows.shape[1])
            grad_hidden[kept] = (grad_logits @ weight) * grad
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_logits.t() @ rows) * grad
        return grad_hidden, grad_weight, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum over `labels != -100` of the cross-entropy of `hidden @ weight.T`, in nats.

    Args:
        hidden: `[T, h]`, the states that the head sees.
        weight: `[V, h]`, the head.
        labels: `[T]`, the id that each row predicts (not shifted), -100 for none.

    Under autocast both factors are cast to its type; the softmax is fp32 in any case.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, labels)


def use_linear_cross_entropy(model: PreTrainedModel) -> None:
    """Lets `model(input_ids, labels=...)` return the loss alone, without logits (see the module's docstring).

    Only for heads that are nothing but a matrix (no bias, no scaled or capped logits): the families of
    `prune.SUPPORTED_FAMILIES`.
    """
    model.forward = types.MethodType(_forward, model)


def _forward(
    self: PreTrainedModel, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any
) -> CausalLMOutputWithPast:
    # Without a cache: with one, transformers takes no notice of position ids that start again (packed documents).
    hidden = self.base_model(input_ids=input_ids, use_cache=False, **kwargs).last_hidden_state  # [B, T, h]
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)  # [B, T]
    loss = linear_cross_entropy(hidden.flatten(0, 1), self.get_output_embeddings().weight, shifted.flatten())
    items = (shifted != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch
    return CausalLMOutputWithPast(loss=loss / items)
