from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lightning_methods.core.contrastive import contrastive_log_probs, masked_contrastive_loss
from tests.ddp import assert_two_processes_agree


def loop_loss(anchors, candidates, weights, temperature, exclude, eps=0.0):
    """The definition, one anchor and one candidate at a time."""
    losses = []
    for i in range(len(anchors)):
        t = temperature if isinstance(temperature, float) else temperature[i]
        logits = [(anchors[i] * c).sum() / t for c in candidates]
        shift = torch.stack(logits).max()
        left = [j for j in range(len(candidates)) if not exclude[i, j]]
        total = sum((logits[j] - shift).exp() for j in left) + eps
        mass = sum(weights[i, j] for j in left)
        if mass > 0:
            losses.append(-sum(weights[i, j] * (logits[j] - shift - total.log()) for j in left) / mass)
    return torch.stack(losses).mean()


@pytest.fixture
def problem():
    g = torch.Generator().manual_seed(0)
    anchors = F.normalize(torch.randn(7, 5, dtype=torch.float64, generator=g), dim=1)
    candidates = torch.cat([anchors, F.normalize(torch.randn(6, 5, dtype=torch.float64, generator=g), dim=1)])
    weights = torch.rand(7, 13, dtype=torch.float64, generator=g) * (torch.rand(7, 13, generator=g) < 0.4)
    weights[2] = 0  # an anchor without a positive
    exclude = torch.eye(7, 13, dtype=torch.bool)
    return anchors, candidates, weights, exclude


@pytest.mark.parametrize("eps", [0.0, 1e-3])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_is_the_loop(problem, chunk_size, eps):
    anchors, candidates, weights, exclude = problem
    for temperature in (0.1, torch.linspace(0.05, 0.5, 7, dtype=torch.float64)):
        ours = masked_contrastive_loss(
            anchors, candidates, weights, temperature=temperature, exclude=exclude, eps=eps, chunk_size=chunk_size
        )
        torch.testing.assert_close(ours, loop_loss(anchors, candidates, weights, temperature, exclude, eps))


def test_gradient_with_and_without_chunks(problem):
    anchors, candidates, weights, exclude = problem
    gradients = []
    for chunk_size in (None, 2):
        a, c = anchors.clone().requires_grad_(), candidates.clone().requires_grad_()
        masked_contrastive_loss(a, c, weights, temperature=0.1, exclude=exclude, chunk_size=chunk_size).backward()
        gradients.append((a.grad, c.grad))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert torch.autograd.gradcheck(
        lambda a, c: masked_contrastive_loss(a, c, weights, temperature=0.3, exclude=exclude),
        (anchors.clone().requires_grad_(), candidates.clone().requires_grad_()),
    )


def test_without_any_positive_the_loss_and_its_gradient_are_zero(problem):
    anchors, candidates, weights, _ = problem
    a = anchors.clone().requires_grad_()
    everything = torch.ones(7, 13, dtype=torch.bool)
    for exclude in (None, everything):
        loss = masked_contrastive_loss(a, candidates, torch.zeros_like(weights), temperature=0.1, exclude=exclude)
        loss.backward()
        assert loss.item() == 0
        assert a.grad.abs().max() == 0
    assert masked_contrastive_loss(a[:0], candidates, weights[:0], temperature=0.1).item() == 0


def test_log_probs_sum_to_one_over_what_is_not_excluded(problem):
    anchors, candidates, _, exclude = problem
    log_probs = contrastive_log_probs(anchors @ candidates.T / 0.1, exclude)
    torch.testing.assert_close(log_probs.exp().masked_fill(exclude, 0).sum(dim=1), torch.ones(7, dtype=torch.float64))
    huge = contrastive_log_probs(torch.tensor([[1e4, 0.0, -1e4]]))
    assert torch.isfinite(huge).all()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"candidates": torch.zeros(13, 4)}, "candidates must have shape"),
        ({"positives": torch.zeros(7, 12)}, "positives must have shape"),
        ({"exclude": torch.zeros(6, 13, dtype=torch.bool)}, "exclude must have shape"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"temperature": torch.ones(6)}, "temperature must have shape"),
    ],
)
def test_bad_input(problem, change, match):
    anchors, candidates, weights, exclude = problem
    arguments = {"candidates": candidates, "positives": weights, "exclude": exclude, "temperature": 0.1} | change
    with pytest.raises(ValueError, match=match):
        masked_contrastive_loss(anchors, **arguments)


def _supervised():
    from lightning_methods.core.distributed import gather

    torch.manual_seed(0)
    network = torch.nn.Linear(6, 4).double()

    def loss_of(module, x, y):
        z = gather(F.normalize(module(x), dim=1))
        y = gather(y)
        return masked_contrastive_loss(
            z, z, y[:, None] == y, temperature=0.1, exclude=torch.eye(len(z), dtype=torch.bool)
        )

    return network, loss_of, (torch.randn(10, 6).double(), torch.arange(10) % 3)


def test_two_processes():
    assert_two_processes_agree(_supervised, sizes=(4, 6))
