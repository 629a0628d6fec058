"""The covariance spectrum of a cloud of features: how many dimensions are alive."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from ..core.checks import check_finite, check_floating, check_shape
from ..core.losses import at_least_float32, float64_if_possible

__all__ = ["EffectiveRank", "FeatureMoments", "effective_rank"]


def _spectrum_rank(covariance: Tensor) -> Tensor:
    """Exponential of the entropy of the eigenvalues' shares; 1 for a zero matrix."""
    eigenvalues = torch.linalg.eigvalsh((covariance + covariance.T) / 2).clamp_min(0)
    shares = eigenvalues / eigenvalues.sum().clamp_min(torch.finfo(eigenvalues.dtype).tiny)
    return torch.special.entr(shares).sum().exp()


@torch.no_grad()
def effective_rank(z: Float[Tensor, "samples width"], normalize: bool = False) -> Float[Tensor, ""]:
    """Effective rank: exponential of the entropy of the normalised covariance spectrum.

    Between 1 (one direction carries all variance) and the width (all directions carry the same).

    Source: Roy & Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007, on covariance
    eigenvalues.

    Args:
        z: features, [samples, width].
        normalize: scale the rows to unit norm first.

    Returns:
        A scalar; no gradient.

    Raises:
        ValueError: z is not a floating point matrix or is empty.

    Example:
        >>> effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
        tensor(2.)
    """
    check_floating("z", z)
    check_shape("z", z, "samples width")
    if z.numel() == 0:
        raise ValueError(f"z must have at least one sample and one column, got {list(z.shape)}.")
    dtype = at_least_float32(z[:0]).dtype
    with torch.autocast(z.device.type, enabled=False):
        z = float64_if_possible(z)
        if normalize:
            z = F.normalize(z, dim=1)
        centred = z - z.mean(dim=0)
        matrix = centred.T @ centred if z.shape[0] >= z.shape[1] else centred @ centred.T
        return _spectrum_rank(matrix).to(dtype)


class FeatureMoments(Metric):
    """Sums that give mean and covariance of all rows seen: exact over any number of batches and processes.

    The state is the sum of the rows, the sum of their outer products and their number, in float64 (float32 on
    devices without it). Subclasses compute something from :meth:`mean_and_covariance`.

    Args:
        normalize: scale the rows to unit norm first.
        **kwargs: those of :class:`torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, normalize: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.normalize = normalize
        # One column until the first batch tells the width: a scalar zero broadcasts in the sums.
        self.add_state("total", torch.zeros(1, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("outer", torch.zeros(1, 1, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, z: Float[Tensor, "samples width"]) -> None:
        """Add rows.

        Args:
            z: features, finite, [samples, width].

        Raises:
            ValueError: not a floating point matrix, another width than before, or not finite.
        """
        check_floating("z", z)
        width = check_shape("z", z, "samples width")["width"]
        check_finite("z", z, validate=True)
        if self.count and self.total.shape[0] != width:
            raise ValueError(
                f"z must have the width of the earlier batches, {self.total.shape[0]}, got {list(z.shape)}."
            )
        with torch.autocast(z.device.type, enabled=False):
            z = float64_if_possible(z.detach())
            if self.normalize:
                z = F.normalize(z, dim=1, eps=1e-12)
            self.total = self.total + z.sum(dim=0)
            self.outer = self.outer + z.T @ z
            self.count = self.count + z.shape[0]

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Mean [width] and biased covariance [width, width] of all rows.

        Raises:
            ValueError: no row was seen.
        """
        if self.count == 0:
            raise ValueError(f"{type(self).__name__} has seen no rows: call update before compute.")
        mean = self.total / self.count
        return mean, self.outer / self.count - torch.outer(mean, mean)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> FeatureMoments:
        # Devices without float64 get float32 sums; moving a double there would fail.
        if fn(torch.zeros(1)).device.type == "mps":
            self.total, self.outer = self.total.float(), self.outer.float()
            self._defaults.update(total=self._defaults["total"].float(), outer=self._defaults["outer"].float())
        return super()._apply(fn, *args, **kwargs)

    def set_dtype(self, dst_type: Any) -> FeatureMoments:
        """Keep the accumulators in double precision, whatever the module's dtype becomes."""
        return self


class EffectiveRank(FeatureMoments):
    """:func:`effective_rank` over all batches.

    Args:
        normalize: scale the rows to unit norm first.
        **kwargs: those of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = EffectiveRank()
        >>> metric.update(torch.tensor([[2.0, 0.0], [-1.0, 0.0]]))
        >>> metric.update(torch.tensor([[0.0, 1.0], [0.0, -1.0]]))
        >>> metric.compute()
        tensor(2.)
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """The effective rank, a float32 scalar."""
        return _spectrum_rank(self.mean_and_covariance()[1]).float()
