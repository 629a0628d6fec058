"""The coefficient over an epoch: how much the features tell of the target, or of what they should not."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ..core.checks import check_choice, check_labels, check_range, check_same_rows
from .functional import codec, diffoci_coefficient

__all__ = ["AttributeLeakage", "DependenceCoefficient"]


class _Samples(Metric):
    """Collects attribute, features and condition of an epoch."""

    is_differentiable = False
    full_state_update = False

    attribute: list[Tensor]
    features: list[Tensor]
    condition: list[Tensor]

    def __init__(self, num_groups: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_groups is not None:
            check_range("num_groups", num_groups, 1)
        self.num_groups = num_groups
        for name in ("attribute", "features", "condition"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def _add(self, attribute: Tensor, features: Tensor, condition: Tensor | None) -> None:
        check_same_rows(
            features=features, attribute=attribute, **({} if condition is None else {"condition": condition})
        )
        if self.num_groups is not None and self.num_groups > 2 and attribute.dim() == 1:
            check_labels("attribute", attribute, self.num_groups)
            attribute = F.one_hot(attribute.long(), self.num_groups)
        self.attribute.append(attribute.detach())
        self.features.append(features.detach().flatten(1) if features.dim() > 2 else features.detach())
        if condition is not None:
            self.condition.append(condition.detach())

    def _all(self) -> tuple[Tensor, Tensor, Tensor | None]:
        condition = dim_zero_cat(self.condition) if len(self.condition) else None
        return dim_zero_cat(self.attribute), dim_zero_cat(self.features), condition


class AttributeLeakage(_Samples):
    """How much features tell of an attribute: the exact coefficient T_n(attribute, features) over an epoch.

    0 is independence, 1 says that the attribute is a function of the features. Needs no model, unlike a probe.

    Args:
        num_groups: number of values of a nominal attribute; more than 2 are compared one-hot.
        neighbor_ties: see :func:`~lightning_methods.diffoci.codec`; "random" is left out, since a metric repeats.
        chunk_size: rows at a time.

    Example:
        >>> metric = AttributeLeakage()
        >>> z = torch.linspace(-1, 1, 200)
        >>> metric.update(z[:, None], (z > 0).long())
        >>> metric.compute().item() > 0.9
        True
    """

    higher_is_better = False

    def __init__(
        self,
        num_groups: int | None = None,
        neighbor_ties: Literal["average", "first"] = "average",
        chunk_size: int = 1024,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_groups, **kwargs)
        check_choice("neighbor_ties", neighbor_ties, ("average", "first"))
        check_range("chunk_size", chunk_size, 1)
        self.neighbor_ties = neighbor_ties
        self.chunk_size = chunk_size

    def update(self, features: Tensor, sensitive: Tensor) -> None:
        """Add a batch: features [n, ...], attribute [n] or [n, c]."""
        self._add(sensitive, features, None)

    def compute(self) -> Tensor:
        """T_n of all samples; nan for fewer than 2."""
        attribute, features, _ = self._all()
        if len(features) < 2:
            return torch.tensor(torch.nan, device=features.device)
        return codec(attribute, features, neighbor_ties=self.neighbor_ties, chunk_size=self.chunk_size)


class DependenceCoefficient(_Samples):
    """The coefficient T_{n,beta}(y, features | condition) over an epoch, with the temperature of the training.

    Args:
        beta: temperature.
        ties: ranks of equal values.
        num_neighbors: softmax over the k nearest only.
        distance_scale: "mean" divides distances by their mean.
        num_groups: number of classes of a nominal y; more than 2 are compared one-hot.
        chunk_size: rows at a time.

    Example:
        >>> metric = DependenceCoefficient(beta=0.01)
        >>> z = torch.linspace(-1, 1, 200)
        >>> metric.update(z[:, None], z.square())
        >>> metric.compute().item() > 0.9
        True
    """

    higher_is_better = True

    def __init__(
        self,
        beta: float = 0.2,
        ties: Literal["max", "ordinal"] = "max",
        num_neighbors: int | None = None,
        distance_scale: Literal["none", "mean"] = "none",
        num_groups: int | None = None,
        chunk_size: int = 1024,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_groups, **kwargs)
        check_range("beta", beta, 0, low_open=True)
        self.num_neighbors = num_neighbors
        self.options: dict[str, Any] = {
            "beta": beta,
            "ties": ties,
            "distance_scale": distance_scale,
            "chunk_size": chunk_size,
        }

    def update(self, features: Tensor, y: Tensor, condition: Tensor | None = None) -> None:
        """Add a batch: features [n, ...], target [n] or [n, c], variables that are given [n] or [n, s]."""
        self._add(y, features, condition)

    def compute(self) -> Tensor:
        """T_{n,beta} of all samples; nan for fewer than 2."""
        y, features, condition = self._all()
        n = len(features)
        if n < 2:
            return torch.tensor(torch.nan, device=features.device)
        k = None if self.num_neighbors is None else min(self.num_neighbors, n - 1)
        return diffoci_coefficient(y, features, condition, num_neighbors=k, **self.options)
