"""Soft cross-entropy against the target's distribution, without ever holding the logits of all positions."""

import torch
from torch import Tensor


class ChunkedSoftCrossEntropy(torch.autograd.Function):
    """Weighted sum over rows of `-sum_{v in D} p(v) log q(v)`, computed a chunk of rows at a time.

    `q` is the softmax of the student's logits over the draft vocabulary D. `p(v) = exp(hidden · W_v - logsumexp)` is
    the target's probability under its full vocabulary: not renormalised over D, so that a position whose likely
    tokens cannot be drafted weighs less. The gradient of each chunk is taken in the forward pass,
    `d loss / d logits = (sum_v p(v)) q - p`, and only the gradients of the inputs are kept for the backward pass.

    Logits, softmax and loss are fp32. Under autocast the student's products are taken in its dtype; the target's are
    always fp32.
    """

    @staticmethod
    def forward(ctx, student, head, teacher, teacher_head, logsumexp, weights, chunk_size):
        if torch.is_autocast_enabled(student.device.type):
            dtype = torch.get_autocast_dtype(student.device.type)
        else:
            dtype = student.dtype
        rows = student.shape[0]
        head_product = head.to(dtype)  # [D, h]
        losses = torch.empty(rows, device=student.device)  # [P]
        predicted = torch.empty(rows, dtype=torch.long, device=student.device)  # [P]
        wants_gradient = student.requires_grad or head.requires_grad
        grad_student = torch.empty_like(student) if wants_gradient else None
        grad_head = torch.zeros_like(head) if head.requires_grad else None
        with torch.autocast(student.device.type, enabled=False):
            for begin in range(0, rows, chunk_size):
                piece = slice(begin, begin + chunk_size)
                x = student[piece].to(dtype)  # [C, h]
                p = teacher[piece].float() @ teacher_head.T  # [C, D]
                p.sub_(logsumexp[piece, None]).exp_()
                logits = (x @ head_product.T).float()  # [C, D]
                predicted[piece] = logits.argmax(-1)
                log_z = logits.logsumexp(-1)  # [C]
                mass = p.sum(-1)  # [C]
                losses[piece] = mass * log_z - torch.linalg.vecdot(p, logits)
                if not wants_gradient:
                    continue
                grad = logits.sub_(log_z[:, None]).exp_().mul_(mass[:, None]).sub_(p)  # [C, D]
                grad = grad.mul_(weights[piece, None]).to(dtype)
                grad_student[piece] = grad @ head_product
                if grad_head is not None:
                    grad_head += grad.T @ x
        ctx.save_for_backward(grad_student, grad_head)
        ctx.mark_non_differentiable(losses, predicted)
        return (losses * weights).sum(), losses, predicted

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_student, grad_head = ctx.saved_tensors
        return (
            grad_student * grad_loss if grad_student is not None else None,
            grad_head * grad_loss if grad_head is not None else None,
            *(None,) * 5,
        )


def soft_cross_entropy(
    student: Tensor,
    head: Tensor,
    teacher: Tensor,
    teacher_head: Tensor,
    logsumexp: Tensor,
    weights: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Distillation loss of P rows.

    Args:
        student: `[P, h]`, the drafter's last hidden states behind the final norm.
        head: `[D, h]`, the drafter's head.
        teacher: `[P, H]`, the target's last hidden states behind its final norm.
        teacher_head: `[D, H]` fp32, the target's head, rows of the draft vocabulary.
        logsumexp: `[P]`, of the target's full-vocabulary logits.
        weights: `[P]`, the weight of each row in the sum.
        chunk_size: rows whose logits exist at a time.

    Returns:
        The weighted sum (a scalar with gradient), and without gradient: the loss of each row `[P]` in nats and the
        most likely index into the draft vocabulary of each row `[P]`.
    """
    return ChunkedSoftCrossEntropy.apply(student, head, teacher, teacher_head, logsumexp, weights, chunk_size)
