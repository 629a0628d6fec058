"""The 1-vs-1 adjuster against its plain forms, and logit adjustment, which costs nothing beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_methods.mla import multiplicative_logit_adjustment, one_vs_one_scores, optimal_boundary_angles


def by_class(logits: Tensor, angles: Tensor) -> Tensor:
    """One class after the other."""
    cosines = angles.cos()
    votes = [(logits[:, i : i + 1] * cosines[:, i] > logits * cosines[i]).sum(1) for i in range(logits.shape[1])]
    return torch.stack(votes, dim=1) / logits.shape[1]


def at_once(logits: Tensor, angles: Tensor) -> Tensor:
    """All pairs of all samples in one table."""
    cosines = angles.cos()
    return (logits[:, :, None] * cosines.T > logits[:, None, :] * cosines).sum(2) / logits.shape[1]


def inputs(shape: dict[str, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.randn(shape["batch"], shape["classes"], device=device)
    counts = torch.linspace(500, 5, shape["classes"]).long().to(device)
    return logits, counts, optimal_boundary_angles(counts)


@pytest.mark.shapes(cifar100={"batch": 256, "classes": 100}, imagenet={"batch": 64, "classes": 1000})
@pytest.mark.parametrize("form", [one_vs_one_scores, by_class, at_once], ids=["ours", "by_class", "at_once"])
def test_one_vs_one(measure, shape, form, device):
    logits, _, angles = inputs(shape, device)
    torch.testing.assert_close(form(logits[:8], angles), by_class(logits[:8], angles))
    measure(lambda: form(logits, angles))


@pytest.mark.shapes(inaturalist={"batch": 32, "classes": 8142})
def test_one_vs_one_of_many_classes(measure, shape, device):
    logits, _, angles = inputs(shape, device)
    measure(lambda: one_vs_one_scores(logits, angles))


@pytest.mark.shapes(cifar100={"batch": 256, "classes": 100}, imagenet={"batch": 64, "classes": 1000})
def test_multiplicative(measure, shape, device):
    logits, counts, _ = inputs(shape, device)
    measure(lambda: multiplicative_logit_adjustment(logits, counts, 0.5))
