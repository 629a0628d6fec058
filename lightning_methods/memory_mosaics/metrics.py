"""How the loss falls along a sequence: what a model learns from its context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from ..core.checks import check_range, check_same_rows, check_shape

__all__ = ["PositionLoss"]


class PositionLoss(Metric):
    """Mean loss at every position of the sequence; the sums are added over ranks.

    Args:
        length: positions that are kept; later ones are left out.

    Example:
        >>> metric = PositionLoss(length=3)
        >>> metric.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, True], [True, False]]))
        >>> metric.compute()
        tensor([2., 2., nan])
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    total: Tensor
    count: Tensor

    def __init__(self, length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("length", length, 1)
        self.length = length
        self.add_state("total", torch.zeros(length, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(length, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, valid: Tensor) -> None:
        """Add a batch.

        Args:
            loss: of every token, [B, T].
            valid: which tokens count, bool [B, T].

        Raises:
            ValueError: shapes differ.
        """
        check_shape("loss", loss, "batch time")
        check_same_rows(loss=loss, valid=valid)
        check_shape("valid", valid, "batch time", time=loss.shape[1])
        loss, valid = loss.detach()[:, : self.length], valid[:, : self.length]
        time = loss.shape[1]
        self.total = self.total.double()  # a module in half precision takes the state with it
        self.total[:time] += loss.double().masked_fill(~valid, 0).sum(dim=0)
        self.count[:time] += valid.sum(dim=0)

    def compute(self) -> Tensor:
        """The means, [length]; nan where no token was."""
        return (self.total / self.count).float()
