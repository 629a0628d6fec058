"""Uniformity on the sphere as a Wasserstein distance between Gaussians."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ..core.checks import check_floating, check_range, check_shape
from ..core.losses import at_least_float32, float64_if_possible
from ..ssl.losses import alignment_loss, uniformity_loss

__all__ = [
    "alignment_loss",
    "covariance_log_spectrum",
    "uniformity_loss",
    "wasserstein_to_uniform",
    "wasserstein_uniformity",
]

_NULL = 1e-12  # eigenvalues below this share of the largest are zero: their root has sub-gradient 0


def _checked(z: Tensor) -> tuple[int, int]:
    check_floating("z", z)
    check_shape("z", z, "samples width")
    if z.numel() == 0:
        raise ValueError(f"z must have at least one sample and one column, got {list(z.shape)}.")
    return z.shape[0], z.shape[1]


def _root_trace(symmetric: Tensor, floor: float = 0.0) -> Tensor:
    """Sum of the square roots of the eigenvalues, with gradient 0 for those that are numerically zero."""
    finite = symmetric.isfinite().all()  # where not, the solver would fail with "ill-conditioned" or return anything
    eigenvalues = torch.linalg.eigvalsh(torch.where(finite, symmetric + symmetric.T, 0) / 2)
    largest = eigenvalues.detach()[-1].clamp_min(torch.finfo(eigenvalues.dtype).tiny)
    alive = eigenvalues > (_NULL * largest).clamp_min(floor)
    total = torch.where(alive, torch.where(alive, eigenvalues, 1).sqrt(), 0).sum()
    return torch.where(finite, total, torch.nan)


def _distance(mean: Tensor, trace: Tensor, root_trace: Tensor) -> Tensor:
    """W2 from ``||mu||^2 + 1 + tr(Sigma) - 2 / sqrt(m) tr(Sigma^{1/2})``; at 0 the value is 1e-6 and the gradient 0."""
    squared = mean.square().sum() + 1 + trace - 2 / math.sqrt(mean.shape[0]) * root_trace
    return torch.where(squared <= 1e-12, 1e-12, squared).sqrt()


def wasserstein_uniformity(
    z: Float[Tensor, "samples width"], *, eps: float = 0.0, normalize: bool = True
) -> Float[Tensor, ""]:
    r"""Quadratic Wasserstein distance between a Gaussian fitted to the samples and N(0, I/m); lower is more uniform.

    ``W2 = sqrt(||mu||^2 + 1 + tr(Sigma) - 2/sqrt(m) tr(Sigma^{1/2}))`` with the mean and the biased covariance of
    the rows. The uniform law on the unit sphere of m dimensions is close to N(0, I/m). For rows of unit norm W2 lies
    in [0, sqrt(2)]; sqrt(2) means that all rows are equal. The paper's *uniformity metric* is ``-W2``.

    Only eigenvalues enter, so the gradient is finite for equal ones; null directions get the sub-gradient 0. The
    covariance (or the smaller Gram matrix when there are fewer samples than dimensions) is computed in float64 where
    the device has it: in float32 rounding would turn collapsed dimensions into small living ones.

    Source: Fang et al., "Rethinking the Uniformity Metric in Self-Supervised Learning", ICLR 2024, section 4.

    Args:
        z: embeddings, [samples, width]. With fewer samples than dimensions the distance is bounded away from 0.
        eps: added to the covariance's diagonal.
        normalize: scale the rows to unit norm first.

    Returns:
        W2, a scalar in z's dtype (float32 for half precision); nan where z is not finite.

    Raises:
        ValueError: z is not a floating point matrix or is empty, or ``eps`` is negative.

    Example:
        >>> circle = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> round(wasserstein_uniformity(circle).item(), 3), round(wasserstein_uniformity(circle[:1]).item(), 3)
        (0.0, 1.414)
    """
    samples, width = _checked(z)
    check_range("eps", eps, 0)
    dtype = at_least_float32(z[:0]).dtype
    with torch.autocast(z.device.type, enabled=False):
        z = float64_if_possible(z)
        if normalize:
            z = F.normalize(z, dim=1, eps=1e-12)
        mean = z.mean(dim=0)
        centred = z - mean
        trace = centred.square().sum() / samples + width * eps
        if samples < width and eps == 0:
            matrix = centred @ centred.T / samples
        else:
            matrix = centred.T @ centred / samples + eps * torch.eye(width, dtype=z.dtype, device=z.device)
        return _distance(mean, trace, _root_trace(matrix)).to(dtype)


def wasserstein_to_uniform(
    mean: Float[Tensor, " width"], covariance: Float[Tensor, "width width"], floor: float = 0.0
) -> Float[Tensor, ""]:
    """:func:`wasserstein_uniformity` from the two moments.

    Args:
        mean: mean of the rows, [width].
        covariance: biased covariance, symmetric, [width, width].
        floor: eigenvalues up to here are rounding noise and count as 0.

    Returns:
        W2, a scalar; float32 or wider.

    Raises:
        ValueError: shapes do not fit, or not floating point.

    Example:
        >>> wasserstein_to_uniform(torch.zeros(4), torch.eye(4) / 4).item() < 1e-3
        True
    """
    width = check_shape("mean", mean, "width")["width"]
    check_shape("covariance", covariance, "width width2", width=width, width2=width)
    check_floating("mean", mean)
    check_floating("covariance", covariance)
    mean, covariance = at_least_float32(mean), at_least_float32(covariance)
    return _distance(mean, covariance.trace(), _root_trace(covariance, floor))


@torch.no_grad()
def covariance_log_spectrum(z: Float[Tensor, "samples width"], normalize: bool = True) -> Float[Tensor, " width"]:
    """Natural logarithm of the covariance's eigenvalues, descending: the picture of dimensional collapse.

    Source: the collapse plots of Fang et al., ICLR 2024.

    Args:
        z: embeddings, [samples, width].
        normalize: scale the rows to unit norm first.

    Returns:
        [width]; eigenvalues below 1e-20 count as 1e-20. No gradient.

    Raises:
        ValueError: z is not a floating point matrix or is empty.

    Example:
        >>> covariance_log_spectrum(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).exp().round(decimals=3)
        tensor([1., 0.])
    """
    _checked(z)
    dtype = at_least_float32(z[:0]).dtype
    with torch.autocast(z.device.type, enabled=False):
        z = float64_if_possible(z)
        if normalize:
            z = F.normalize(z, dim=1, eps=1e-12)
        centred = z - z.mean(dim=0)
        eigenvalues = torch.linalg.eigvalsh(centred.T @ centred / z.shape[0])
        return eigenvalues.flip(0).clamp_min(1e-20).log().to(dtype)
