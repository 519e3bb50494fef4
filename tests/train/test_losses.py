"""The divergences, their gradients and their chunks are what the formulas say."""

import math

import pytest
import torch

from osprey.train.distillation_trainer import GKDTrainer
from osprey.train.losses import divergence, normalised_head, normalised_teacher


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_loss_and_gradients_are_the_formulas(beta, chunk):
    torch.manual_seed(0)
    rows, h, H, V, D = 10, 6, 5, 30, 12
    student = torch.randn(rows, h, requires_grad=True)
    head = torch.randn(D, h, requires_grad=True)
    hidden, target_head = torch.randn(rows, H), torch.randn(V, H)
    ids = torch.randperm(V)[:D]
    weights = torch.rand(rows)
    logsumexp = (hidden @ target_head.T).logsumexp(-1)
    best = (student.detach() @ head.detach().T).argmax(-1)
    labels = torch.where(torch.arange(rows) % 2 == 0, best, (best + 1) % D)
    labels[0] = -1
    loss, losses, hits = divergence(
        student,
        head,
        normalised_teacher(hidden, logsumexp),
        normalised_head(target_head[ids]),
        labels,
        weights,
        beta,
        chunk,
    )
    (3 * loss).backward()  # a factor, as gradient accumulation has one

    p = (hidden @ target_head.T).softmax(-1)[:, ids]  # not renormalised
    other, other_head = student.detach().clone().requires_grad_(), head.detach().clone().requires_grad_()
    log_q = (other @ other_head.T).log_softmax(-1)
    q = log_q.exp()
    if beta == 0:
        expected = -(p * log_q).sum(-1)
    elif beta == 1:
        expected = (q * (log_q - p.log())).sum(-1)
    else:
        m = beta * p + (1 - beta) * q
        expected = (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)
    (3 * (expected * weights).sum()).backward()
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(loss, (expected * weights).sum())
    torch.testing.assert_close(student.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.grad, other_head.grad, rtol=1e-4, atol=1e-5)
    assert hits.tolist() == [False] + [row % 2 == 0 for row in range(1, rows)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_are_trls(beta):
    """Over the whole vocabulary, against TRL's own function; its forward KL lacks the entropy of the teacher."""
    torch.manual_seed(0)
    student, head = torch.randn(7, 6, requires_grad=True), torch.randn(20, 6)
    hidden, target_head = torch.randn(7, 5), torch.randn(20, 5)
    teacher_logits = hidden @ target_head.T
    loss, *_ = divergence(
        student,
        head,
        normalised_teacher(hidden, teacher_logits.logsumexp(-1)),
        normalised_head(target_head),
        torch.full((7,), -1),
        torch.full((7,), 1 / 7),
        beta,
        3,
    )
    (ours,) = torch.autograd.grad(loss, student)
    expected = GKDTrainer.generalized_jsd_loss((student @ head.T)[None], teacher_logits[None], beta=beta) / 7
    (theirs,) = torch.autograd.grad(expected, student)
    entropy = torch.distributions.Categorical(logits=teacher_logits).entropy().mean() if beta == 0 else 0.0
    torch.testing.assert_close(loss - entropy, expected)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_loss_in_bf16_is_close_for_large_logits():
    """Folding the log-sum-exp into the product keeps likely tokens' probabilities accurate to a few percent."""
    torch.manual_seed(0)
    hidden, target_head = torch.randn(64, 32), torch.randn(50, 32)
    logits = hidden @ target_head.T
    assert logits.max() > 16
    exact = logits.log_softmax(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        teacher = normalised_teacher(hidden, logits.logsumexp(-1))
        approximate = (teacher.bfloat16() @ normalised_head(target_head).bfloat16().T).float()
    likely = exact > math.log(0.5)
    assert likely.any()
    assert (approximate - exact)[likely].abs().max() < 0.06
