"""The coefficient as a loss term, and the elementwise scale that selects variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.checks import check_choice, check_labels, check_range, check_same_rows
from ..core.distributed import gather
from .functional import diffoci_coefficient

__all__ = ["DifFOCIPenalty", "DigitEncoder", "ElementwiseScale"]


class DifFOCIPenalty(nn.Module):
    """``weight * T_{n,beta}(group, features)``: add it to a loss, and the features forget the group.

    A negative weight makes it an objective: the features learn to tell ``group``. Under distributed training the
    neighbours come from the batch of all ranks, whose sizes may differ; loss and gradient are those of one process with
    all samples.

    Source: Lehman Pavasovic et al. (2025), difFOCI as a regulariser; see
    :func:`~lightning_methods.diffoci.diffoci_coefficient`.

    Args:
        beta: temperature of the neighbours, > 0.
        weight: factor of the coefficient.
        ties: ranks of equal values, "max" or "ordinal".
        num_neighbors: softmax over the k nearest only; in a batch of fewer samples over all of them.
        distance_scale: "mean" divides distances by their mean.
        gather_distributed: take the coefficient over the batch of all ranks, not of each for itself.
        num_groups: number of values of a nominal attribute; more than 2 are compared one-hot. None: groups are ordered.

    Raises:
        ValueError: an option is out of range.

    Example:
        >>> penalty = DifFOCIPenalty(weight=0.1)
        >>> features = torch.randn(64, 8, requires_grad=True)
        >>> penalty(features, torch.randint(0, 2, (64,))).backward()
    """

    def __init__(
        self,
        beta: float = 0.2,
        weight: float = 1.0,
        ties: Literal["max", "ordinal"] = "max",
        num_neighbors: int | None = None,
        distance_scale: Literal["none", "mean"] = "none",
        gather_distributed: bool = True,
        num_groups: int | None = None,
    ) -> None:
        super().__init__()
        check_range("beta", beta, 0, low_open=True)
        check_range("weight", weight)
        check_choice("ties", ties, ("max", "ordinal"))
        check_choice("distance_scale", distance_scale, ("none", "mean"))
        for name, value in (("num_neighbors", num_neighbors), ("num_groups", num_groups)):
            if value is not None:
                check_range(name, value, 1)
        self.beta = beta
        self.weight = weight
        self.ties = ties
        self.num_neighbors = num_neighbors
        self.distance_scale = distance_scale
        self.gather_distributed = gather_distributed
        self.num_groups = num_groups

    def forward(self, features: Tensor, group: Tensor, condition: Tensor | None = None) -> Tensor:
        """The weighted coefficient of a batch.

        Args:
            features: [batch, ...], flattened to two dimensions.
            group: attribute of each sample: [batch], ordered values or classes, or [batch, c], columns.
            condition: variables that are given, [batch] or [batch, s].

        Returns:
            A scalar with gradient; 0 for fewer than 2 samples and for a constant attribute.

        Raises:
            ValueError: numbers of rows differ, or a class is not below ``num_groups``.
        """
        check_same_rows(features=features, group=group, **({} if condition is None else {"condition": condition}))
        features = features.flatten(1) if features.dim() > 2 else features
        group = self.columns(group)
        if self.gather_distributed:
            features, group = gather(features), gather(group, grad=False)
            condition = None if condition is None else gather(condition)
        n = len(features)
        if n < 2:
            return (0 * features).sum()
        coefficient = diffoci_coefficient(
            group,
            features,
            condition,
            beta=self.beta,
            ties=self.ties,
            num_neighbors=None if self.num_neighbors is None else min(self.num_neighbors, n - 1),
            distance_scale=self.distance_scale,
        )
        return self.weight * coefficient

    def columns(self, group: Tensor) -> Tensor:
        """The attribute as it is ranked: one-hot [batch, num_groups] for more than two classes, else as it is."""
        if self.num_groups is None or group.dim() != 1 or group.is_floating_point():
            return group
        check_labels("group", group, self.num_groups)
        return F.one_hot(group.long(), self.num_groups) if self.num_groups > 2 else group

    def extra_repr(self) -> str:
        """The options that matter."""
        return f"beta={self.beta}, weight={self.weight}, ties={self.ties!r}"


class ElementwiseScale(nn.Module):
    """``theta * x`` with one learned factor per variable, drawn from N(mean, std^2).

    Args:
        num_features: number of variables p.
        mean: mean of the initial factors.
        std: their standard deviation.

    Attributes:
        scale: theta, [p].

    Raises:
        ValueError: ``num_features`` below 1 or ``std`` negative.
    """

    def __init__(self, num_features: int, mean: float = 1.0, std: float = 0.1) -> None:
        super().__init__()
        check_range("num_features", num_features, 1)
        check_range("std", std, 0)
        self.num_features = num_features
        self.mean = mean
        self.std = std
        self.scale = nn.Parameter(torch.empty(num_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the factors anew."""
        nn.init.normal_(self.scale, self.mean, self.std)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the variables, [batch, p]."""
        return x * self.scale

    def extra_repr(self) -> str:
        """The number of variables."""
        return f"{self.num_features}, mean={self.mean}, std={self.std}"


class DigitEncoder(nn.Module):
    """Small encoder of small images: convolution, pooling, convolution, and a linear layer on the flattened map.

    Unlike a globally pooled network it keeps where things are, so that it can read a digit apart from its background.

    Args:
        channels: output channels of the two 3x3 convolutions.
        num_features: width of the features.
        in_channels: channels of the images.
        image_size: height and width of the images, even.

    Attributes:
        num_features: width of the features.

    Raises:
        ValueError: a size is out of range.

    Example:
        >>> DigitEncoder()(torch.zeros(2, 3, 8, 8)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self, channels: Sequence[int] = (16, 32), num_features: int = 64, in_channels: int = 3, image_size: int = 8
    ) -> None:
        super().__init__()
        if len(channels) != 2:
            raise ValueError(f"channels must be two numbers, got {list(channels)}.")
        for value in (*channels, in_channels, num_features):
            check_range("channels, in_channels and num_features", value, 1)
        check_range("image_size", image_size, 2)
        self.num_features = num_features
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, channels[0], 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels[0], channels[1], 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(channels[1] * (image_size // 2) ** 2, num_features),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Features, [batch, num_features]."""
        return self.layers(x)
