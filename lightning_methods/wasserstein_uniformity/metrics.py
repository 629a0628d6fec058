"""Uniformity metrics over a whole evaluation set."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ..core.checks import check_floating, check_range, check_shape
from ..core.losses import at_least_float32
from ..metrics.spectrum import FeatureMoments
from .functional import uniformity_loss, wasserstein_to_uniform

__all__ = ["PairwiseUniformity", "WassersteinUniformity"]


class WassersteinUniformity(FeatureMoments):
    """:func:`wasserstein_uniformity` over all batches, from sums: exact for any number of batches and processes.

    Lower is more uniform; sqrt(2) is full collapse. The paper reports ``-W2``.

    Source: Fang et al., ICLR 2024, section 4.

    Args:
        normalize: scale the rows to unit norm first.
        **kwargs: those of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = WassersteinUniformity()
        >>> metric.update(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.7654)
        >>> metric.update(torch.tensor([[0.0, 1.0], [0.0, -1.0]]))
        >>> bool(metric.compute() < 1e-5)
        True
    """

    higher_is_better = False
    plot_lower_bound = 0.0

    def compute(self) -> Tensor:
        """W2, a float32 scalar."""
        mean, covariance = self.mean_and_covariance()
        # The covariance is a difference of two sums: below this its eigenvalues are their rounding.
        second_moment = covariance.trace() + mean.square().sum()
        floor = 16 * torch.finfo(covariance.dtype).eps * float(second_moment)
        return wasserstein_to_uniform(mean, covariance, floor).float()


class PairwiseUniformity(Metric):
    """:func:`uniformity_loss` over all batches; keeps every row.

    Args:
        t: inverse width of the kernel, positive.
        normalize: scale the rows to unit norm first.
        chunk_size: rows at a time when the pairs are compared.
        **kwargs: those of :class:`torchmetrics.Metric`.

    Example:
        >>> metric = PairwiseUniformity()
        >>> metric.update(torch.tensor([[1.0, 0.0]]))
        >>> metric.update(torch.tensor([[-1.0, 0.0]]))
        >>> metric.compute()
        tensor(-8.)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    def __init__(self, t: float = 2.0, normalize: bool = True, chunk_size: int = 1024, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("t", t, 0, low_open=True)
        check_range("chunk_size", chunk_size, 1)
        self.t, self.normalize, self.chunk_size = t, normalize, chunk_size
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, z: Float[Tensor, "samples width"]) -> None:
        """Add rows, [samples, width]."""
        check_floating("z", z)
        check_shape("z", z, "samples width")
        z = at_least_float32(z.detach())
        self.rows.append(F.normalize(z, dim=1) if self.normalize else z)

    def compute(self) -> Tensor:
        """L_U of all rows; nan with fewer than two."""
        rows = dim_zero_cat(self.rows) if len(self.rows) else torch.zeros(0, 1, device=self.device)
        if rows.shape[0] < 2:
            return rows.new_tensor(float("nan"))
        return uniformity_loss(rows, self.t, normalize=False, chunk_size=self.chunk_size)
