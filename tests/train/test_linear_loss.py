"""The cross-entropy from hidden states against torch's own, and the sampled softmax against the whole one."""

import pytest
import torch
from tiny import tiny_target

from osprey.train import linear_loss
from osprey.train.linear_loss import IGNORE, SampledVocabulary, Teacher, linear_cross_entropy, use_linear_cross_entropy


def inputs(tokens=37, width=8, vocabulary=19, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    labels[::5] = IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize("rows", [4, 1000])  # many pieces, the last one shorter, and one
def test_loss_and_gradients_are_torchs(monkeypatch, rows):
    monkeypatch.setattr(linear_loss, "ROWS", rows)
    hidden, weight, labels = inputs(dtype=torch.float32)
    bias = torch.randn(len(weight))
    expected = torch.nn.functional.cross_entropy(
        hidden @ weight.t() + bias, labels, ignore_index=IGNORE, reduction="sum"
    )
    gradients = torch.autograd.grad(3 * expected, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels, bias)
    torch.testing.assert_close(loss, expected)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, bias), expected)
    for ours, theirs in zip(torch.autograd.grad(3 * loss, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_teachers_part_of_loss_and_gradients(monkeypatch, share):
    monkeypatch.setattr(linear_loss, "ROWS", 10)
    hidden, weight, labels = inputs(dtype=torch.float32)
    bias = torch.randn(len(weight))
    taught, head = torch.randn(len(hidden), 5), torch.randn(len(weight), 5)
    kept = labels != IGNORE
    scores = hidden @ weight.t() + bias
    lesson = (taught @ head.t() + bias).log_softmax(-1)
    divergence = torch.nn.functional.kl_div(
        scores[kept].log_softmax(-1), lesson[kept], reduction="sum", log_target=True
    )
    cross_entropy = torch.nn.functional.cross_entropy(scores, labels, ignore_index=IGNORE, reduction="sum")
    expected = (1 - share) * cross_entropy + share * divergence
    loss = linear_cross_entropy(hidden, weight, labels, bias, Teacher(taught, head, share))
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(3 * expected, (hidden, weight))
    for ours, theirs in zip(torch.autograd.grad(3 * loss, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_no_label_at_all_is_zero():
    hidden, weight, labels = inputs(dtype=torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE))
    loss.backward()
    assert loss.item() == 0
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE)).item() == 0
    assert hidden.grad.count_nonzero() == 0
    assert weight.grad.count_nonzero() == 0


def test_a_model_returns_the_loss_of_its_logits():
    model = tiny_target("qwen3")
    ids = torch.randint(3, 48, (2, 9))
    expected = model(input_ids=ids, labels=ids).loss
    use_linear_cross_entropy(model)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


def test_sampled_softmax_over_all_ids_is_the_softmax():
    model = tiny_target()
    ids = torch.randint(3, 48, (2, 9))
    expected = model(input_ids=ids, labels=ids).loss
    use_linear_cross_entropy(model, SampledVocabulary(torch.tensor([40, 3]), random=1000, vocab_size=48))
    model.train()  # evaluation is over the whole vocabulary
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


def test_sampled_normaliser_is_right_on_average():
    torch.manual_seed(0)
    logits = torch.randn(200)
    sampled = SampledVocabulary(torch.arange(5), random=30, vocab_size=200)
    sums = []
    for _ in range(3000):  # labels that differ, since they seed the draw
        labels = torch.cat([torch.tensor([7, IGNORE, 9]), torch.randint(200, (4,))])
        ids, bias, places = sampled.sample(labels)
        assert len(set(ids.tolist())) == len(ids)
        kept = labels != IGNORE
        assert torch.equal(ids[places[kept]], labels[kept])
        assert places[1] == IGNORE
        sums.append((logits[ids] + bias).exp().sum())
    sums = torch.stack(sums)
    error = sums.std() / len(sums) ** 0.5
    assert abs(sums.mean() - logits.exp().sum()) < 4 * error
