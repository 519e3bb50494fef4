"""Divergence from the target's distribution, without ever holding the logits of all positions."""

import math

import torch
from torch import Tensor


class ChunkedDivergence(torch.autograd.Function):
    """Weighted sum over rows of the divergence between p (teacher) and q (student), a chunk of rows at a time.

    The gradient of each chunk is taken in the forward pass, and only the gradients of the inputs are kept for the
    backward pass.
    """

    @staticmethod
    def forward(ctx, student, head, teacher, teacher_head, labels, weights, beta, chunk_size):
        device_type = student.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else student.dtype
        wants_gradient = student.requires_grad or head.requires_grad
        losses = torch.empty(len(student), device=student.device)  # [P]
        hits = torch.empty(len(student), dtype=torch.bool, device=student.device)  # [P]
        grad_student = torch.empty_like(student) if wants_gradient else None
        grad_head = torch.zeros_like(head) if head.requires_grad else None
        weight, teacher_head = head.to(dtype), teacher_head.to(dtype)  # [D, h], [D, H+2]
        row_divergence = soft_cross_entropy if beta == 0 else jensen_shannon
        with torch.autocast(device_type, enabled=False):
            for begin in range(0, len(student), chunk_size):
                piece = slice(begin, begin + chunk_size)
                x = student[piece].to(dtype)  # [C, h]
                log_p = (teacher[piece].to(dtype) @ teacher_head.T).float()  # [C, D]
                logits = (x @ weight.T).float()  # [C, D]
                hits[piece] = logits.argmax(-1) == labels[piece]  # one choice among ties, as drafting makes; never -1
                losses[piece], grad = row_divergence(logits, log_p, beta, wants_gradient)
                if not wants_gradient:
                    continue
                grad = grad.to(dtype)  # [C, D]
                grad_student[piece] = (grad @ weight) * weights[piece, None]
                if grad_head is not None:
                    grad_head += grad.T @ (x * weights[piece, None].to(dtype))
        ctx.save_for_backward(grad_student, grad_head)
        ctx.mark_non_differentiable(losses, hits)
        return (losses * weights).sum(), losses, hits

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grads = [None if grad is None else grad * grad_loss for grad in ctx.saved_tensors]
        return *grads, None, None, None, None, None, None


def soft_cross_entropy(logits: Tensor, log_p: Tensor, beta: float, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """`-sum p log q` by row, `[C]`, and its gradient in the logits, `(sum p) q - p`; overwrites its arguments."""
    p = log_p.exp_()  # [C, D]
    highest = logits.amax(-1, keepdim=True)  # [C, 1]
    mass = p.sum(-1)  # [C]
    expected = torch.linalg.vecdot(p, logits)  # [C], sum of p times logit
    q = logits.sub_(highest).exp_()  # [C, D], not yet normalised
    z = q.sum(-1)  # [C]
    losses = mass * (highest[:, 0] + z.log()) - expected
    return losses, q.mul_((mass / z)[:, None]).sub_(p) if gradient else None


def jensen_shannon(logits: Tensor, log_p: Tensor, beta: float, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """`beta KL(p | m) + (1 - beta) KL(q | m)` with `m = beta p + (1 - beta) q` by row; `KL(q | p)` where beta is 1.

    As TRL's `generalized_jsd_loss` (arXiv 2306.13649, eq. 1). With `r = log q - log m` (or `- log p`), the gradient in
    the logits is `(1 - beta) q (r - sum q r)`, without that factor where beta is 1.
    """
    log_q = logits.log_softmax(-1)  # [C, D]
    q = log_q.exp()  # [C, D]
    if beta == 1:
        log_m, share = log_p, 1.0
        losses = torch.zeros(len(logits), device=logits.device)  # [C]
    else:
        log_m = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))  # [C, D]
        share = 1.0 - beta
        losses = beta * torch.linalg.vecdot(log_p.exp(), log_p - log_m)  # [C]
    ratio = log_q - log_m  # [C, D]
    mean = torch.linalg.vecdot(q, ratio)  # [C]
    return losses + share * mean, share * q * (ratio - mean[:, None]) if gradient else None


def normalised_teacher(hidden: Tensor, logsumexp: Tensor) -> Tensor:
    """Rows whose product with `normalised_head(W)` is the target's log-probability, `[P, H + 2]`.

    Subtracting the log-sum-exp inside the product keeps bf16 products accurate where it matters: a likely token's
    log-probability is near zero, where its logit would be rounded to an eighth. Two columns hold it to 16 bits.
    """
    high = logsumexp.bfloat16().float()
    return torch.cat([hidden.float(), -high[:, None], (high - logsumexp)[:, None]], dim=-1)


def normalised_head(weight: Tensor) -> Tensor:
    """The target's head `[D, H]` with the two columns that `normalised_teacher` needs, `[D, H + 2]` fp32."""
    return torch.cat([weight.float(), weight.new_ones(len(weight), 2, dtype=torch.float32)], dim=-1)


def divergence(
    student: Tensor,
    head: Tensor,
    teacher: Tensor,
    teacher_head: Tensor,
    labels: Tensor,
    weights: Tensor,
    beta: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Distillation loss of P rows.

    `q` is the softmax of the student's logits over the draft vocabulary D. `p` is the target's probability under its
    full vocabulary, not renormalised over D, so that a position whose likely tokens cannot be drafted weighs less.
    What lies outside of D adds a constant to each divergence, which is left out. Softmax and loss are fp32; the
    products with the heads are in autocast's dtype.

    Args:
        student: `[P, h]`, the drafter's last hidden states behind the final norm.
        head: `[D, h]`, the drafter's head.
        teacher: `[P, H + 2]` from `normalised_teacher`.
        teacher_head: `[D, H + 2]` from `normalised_head`, rows of the draft vocabulary.
        labels: `[P]`, an index into the draft vocabulary to compare the student's most likely one with; -1: none.
        weights: `[P]`, the weight of each row in the sum.
        beta: 0: forward KL up to the constant entropy of p (soft cross-entropy); 1: reverse KL; between: JSD.
        chunk_size: rows whose logits exist at a time.

    Returns:
        The weighted sum (a scalar with gradient), and without gradient: the loss of each row `[P]` in nats, and
        whether the label is the student's most likely token `[P]`.
    """
    return ChunkedDivergence.apply(student, head, teacher, teacher_head, labels, weights, beta, chunk_size)
