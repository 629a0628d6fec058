"""W2 against the same distance with the matrix root formed; pairwise uniformity against all distances at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_methods.wasserstein_uniformity import uniformity_loss, wasserstein_uniformity


def plain(z: Tensor) -> Tensor:
    """The formula as it is written: covariance row by row, the root of the matrix by eigenvectors, its trace."""
    z = F.normalize(z, dim=1)
    mean = z.mean(dim=0)
    covariance = torch.zeros(z.shape[1], z.shape[1], dtype=z.dtype, device=z.device)
    for row in z:
        covariance = covariance + torch.outer(row - mean, row - mean) / len(z)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors @ torch.diag(values.clamp_min(1e-12).sqrt()) @ vectors.T
    squared = mean @ mean + 1 + covariance.trace() - 2 / math.sqrt(z.shape[1]) * root.trace()
    return squared.sqrt()


@pytest.mark.shapes(small={"rows": 256, "width": 64}, cifar10={"rows": 512, "width": 256})
@pytest.mark.parametrize("form", [wasserstein_uniformity, plain], ids=["ours", "plain"])
def test_wasserstein_uniformity(forward_backward, shape, form, device):
    z = torch.randn(shape["rows"], shape["width"], device=device, requires_grad=True)
    torch.testing.assert_close(wasserstein_uniformity(z), plain(z), rtol=1e-3, atol=1e-4)
    forward_backward(form, z)


def plain_pairs(z: Tensor) -> Tensor:
    """All differences at once, [rows, rows, width]."""
    z = F.normalize(z, dim=1)
    squared = (z[:, None] - z).square().sum(dim=2)
    first, second = torch.triu_indices(len(z), len(z), offset=1, device=z.device)
    return (-2 * squared[first, second]).exp().mean().log()


@pytest.mark.shapes(small={"rows": 128, "width": 64}, cifar10={"rows": 512, "width": 256})
@pytest.mark.parametrize("form", [uniformity_loss, plain_pairs], ids=["ours", "plain"])
def test_uniformity_loss(forward_backward, shape, form, device):
    z = torch.randn(shape["rows"], shape["width"], device=device, requires_grad=True)
    torch.testing.assert_close(uniformity_loss(z), plain_pairs(z), rtol=1e-4, atol=1e-4)
    forward_backward(form, z)
