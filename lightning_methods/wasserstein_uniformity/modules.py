"""Uniformity losses with the calling convention of regularisers: ``loss(z1)`` or ``loss(z1, z2)``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.checks import check_range
from .functional import uniformity_loss, wasserstein_uniformity

__all__ = ["PairwiseUniformityLoss", "WassersteinUniformityLoss"]


class WassersteinUniformityLoss(nn.Module):
    """W2 to the uniform law of both views' embeddings together: the paper's auxiliary loss.

    The rows should be the global batch and more than their width: with 256 dimensions use at least 256 images,
    gathered over the processes (:class:`~lightning_methods.ssl.TwoViewSSL` gathers before it calls its regulariser).

    Source: Fang et al., ICLR 2024, section 4.

    Args:
        eps: added to the covariance's diagonal.
        normalize: scale the rows to unit norm first.

    Example:
        >>> loss = WassersteinUniformityLoss()
        >>> z = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        >>> bool(loss(z[:32], z[32:]) == loss(z))
        True
    """

    def __init__(self, eps: float = 0.0, normalize: bool = True) -> None:
        super().__init__()
        check_range("eps", eps, 0)
        self.eps = eps
        self.normalize = normalize

    def forward(self, z1: Tensor, z2: Tensor | None = None) -> Tensor:
        """W2 of z1 [n, m], or of z1 and z2 concatenated along the batch."""
        z = z1 if z2 is None else torch.cat([z1, z2])
        return wasserstein_uniformity(z, eps=self.eps, normalize=self.normalize)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"eps={self.eps}, normalize={self.normalize}"


class PairwiseUniformityLoss(nn.Module):
    """The pairwise-kernel uniformity of Wang & Isola, averaged over the views: the baseline.

    Args:
        t: inverse width of the kernel, positive.
    """

    def __init__(self, t: float = 2.0) -> None:
        super().__init__()
        check_range("t", t, 0, low_open=True)
        self.t = t

    def forward(self, z1: Tensor, z2: Tensor | None = None) -> Tensor:
        """L_U of z1 [n, m], or the mean of L_U of z1 and of z2."""
        losses = [uniformity_loss(z, self.t) for z in (z1, z2) if z is not None]
        return torch.stack(losses).mean()

    def extra_repr(self) -> str:
        """The arguments."""
        return f"t={self.t}"
