"""Losses that several methods share, against their plain forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_methods.core.losses import logit_adjusted_cross_entropy, soft_target_cross_entropy, softmax_kl


def test_logit_adjustment():
    logits, target, counts = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([10, 5, 1])
    expected = F.cross_entropy(logits + 0.7 * (counts / counts.sum()).log(), target)
    torch.testing.assert_close(logit_adjusted_cross_entropy(logits, target, counts, 0.7), expected)
    torch.testing.assert_close(logit_adjusted_cross_entropy(logits, target, counts, 0), F.cross_entropy(logits, target))
    assert logit_adjusted_cross_entropy(logits.bfloat16(), target, counts).dtype == torch.float32


def test_soft_targets_with_zero_probability_and_infinite_logits():
    logits = torch.tensor([[0.0, -float("inf"), 1.0]], requires_grad=True)
    probs = torch.tensor([[0.5, 0.0, 0.5]])
    loss = soft_target_cross_entropy(logits, probs)
    torch.testing.assert_close(loss, -(F.log_softmax(torch.tensor([0.0, 1.0]), 0) * 0.5).sum())
    dense = torch.randn(5, 4)
    p = torch.rand(5, 4).softmax(-1)
    torch.testing.assert_close(soft_target_cross_entropy(dense, p), F.cross_entropy(dense, p))
    assert soft_target_cross_entropy(dense, p, reduction="none").shape == (5,)


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 100])
def test_kl(chunk_size):
    student, teacher = (
        torch.randn(7, 5, dtype=torch.float64, requires_grad=True),
        torch.randn(7, 5, dtype=torch.float64),
    )
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1).mean()
    torch.testing.assert_close(softmax_kl(student, teacher, 2.0, chunk_size=chunk_size), expected)
    torch.testing.assert_close(softmax_kl(student, teacher, 2.0, scale=True, chunk_size=chunk_size), expected * 4)
    assert torch.autograd.gradcheck(lambda s: softmax_kl(s, teacher, 2.0, chunk_size=chunk_size), (student,))


@pytest.mark.bad_input
def test_bad_input():
    logits, target = torch.randn(2, 3), torch.tensor([0, 1])
    for arguments in ((logits, target, [1, 2]), (logits, target, [1, 0, 2]), (logits, target, [1, 2, 3], -1.0)):
        with pytest.raises(ValueError):
            logit_adjusted_cross_entropy(*arguments)
    with pytest.raises(ValueError, match="probs must have shape"):
        soft_target_cross_entropy(logits, torch.ones(2, 4) / 4)
    with pytest.raises(ValueError, match="temperature"):
        softmax_kl(logits, logits, 0.0)
    with pytest.raises(ValueError, match="reduction"):
        soft_target_cross_entropy(logits, logits.softmax(-1), reduction="avg")
