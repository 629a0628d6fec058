"""Log-probabilities of tokens against an independent loop."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_methods.text import token_log_probs


def loop(logits, labels, shift):
    rows = []
    for b in range(logits.shape[0]):
        row = []
        for t in range(logits.shape[1] - int(shift)):
            label = int(labels[b, t + int(shift)])
            scores = logits[b, t].tolist()
            top = max(scores)
            total = top + math.log(sum(math.exp(s - top) for s in scores))
            row.append(0.0 if label == -100 else scores[label] - total)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 11, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(0, 11, (3, 6), generator=generator)
    labels[0, 4:] = -100
    labels[2, :3] = -100
    return logits, labels


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 100])
def test_it_equals_the_loop_whatever_the_chunk(case, shift, chunk_size):
    logits, labels = case
    log_prob, valid = token_log_probs(logits, labels, shift=shift, chunk_size=chunk_size)
    torch.testing.assert_close(log_prob, loop(logits, labels, shift), rtol=1e-12, atol=1e-12)
    assert torch.equal(valid, (labels[:, 1:] if shift else labels) != -100)


def test_chunks_have_the_same_gradient_and_it_is_right(case):
    logits, labels = case
    weights = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def total(x, chunk_size):
        return (token_log_probs(x, labels, chunk_size=chunk_size)[0] * weights).sum()

    gradients = []
    for chunk_size in (None, 4):
        x = logits.clone().requires_grad_()
        gradients.append(torch.autograd.grad(total(x, chunk_size), x)[0])
    torch.testing.assert_close(*gradients)
    assert gradients[0][:, -1].abs().max() == 0  # the last position scores nothing
    small = labels.clamp(max=2).where(labels != -100, -100)
    assert torch.autograd.gradcheck(
        lambda x: token_log_probs(x, small, chunk_size=4)[0], logits[:, :, :3].clone().requires_grad_()
    )


def test_half_precision_is_computed_in_float32(case):
    logits, labels = case
    half = logits.to(torch.bfloat16)
    log_prob, _ = token_log_probs(half, labels, chunk_size=4)
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob.double(), loop(half.double(), labels, True), rtol=1e-5, atol=1e-5)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3).long(), "logits must have shape"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4).long(), "labels must have shape"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3), "integer dtype"),
        (torch.zeros(2, 3, 4), torch.full((2, 3), 4), r"labels must be in 0\.\.3"),
        (torch.zeros(2, 1, 4), torch.zeros(2, 1).long(), "at least 2 positions"),
        (torch.zeros(2, 3, 4).long(), torch.zeros(2, 3).long(), "floating point"),
    ],
)
def test_bad_input(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        token_log_probs(logits, labels)
