"""The fixed classifier of neural collapse, and the table network of the paper."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..core.checks import check_range
from .functional import simplex_etf

__all__ = ["ETFClassifier", "TableMLP"]


class ETFClassifier(nn.Module):
    """Linear classifier whose weight is a fixed simplex: unit rows at equal angles, never trained. The bias is trained.

    Args:
        num_features: D, at least K.
        num_classes: K, at least 2.
        bias: whether there is a bias; it starts uniform in ``(-1/D, 1/D)``, as the authors' does.
        generator: of the simplex' position and the bias.

    Raises:
        ValueError: fewer features than classes, or fewer than 2 classes.

    Example:
        >>> classifier = ETFClassifier(16, 10)
        >>> classifier(torch.zeros(4, 16)).shape, [name for name, _ in classifier.named_parameters()]
        (torch.Size([4, 10]), ['bias'])
    """

    weight: Tensor

    def __init__(
        self, num_features: int, num_classes: int, bias: bool = True, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.num_classes = num_classes
        self.register_buffer("weight", simplex_etf(num_classes, num_features, generator))
        if bias:
            start = torch.empty(num_classes).uniform_(-1 / num_features, 1 / num_features, generator=generator)
            self.bias = nn.Parameter(start)
        else:
            self.register_parameter("bias", None)

    def forward(self, features: Float[Tensor, "batch features"]) -> Float[Tensor, "batch classes"]:
        """Logits, [batch, classes]."""
        return nn.functional.linear(features, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_features={self.num_features}, num_classes={self.num_classes}, bias={self.bias is not None}"


class _Block(nn.Module):
    """Linear without bias, BatchNorm, perhaps the input added, ReLU, dropout."""

    def __init__(self, in_features: int, width: int, dropout: float, skip: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.linear(x))
        return self.dropout(nn.functional.relu(out + x if self.skip else out))


class TableMLP(nn.Module):
    """Encoder of a table's rows, as the paper uses for Helena: a first block and ``num_blocks`` of equal width.

    Args:
        in_features: number of columns.
        width: of all layers.
        num_blocks: blocks after the first one.
        dropout: rate after every block, in [0, 1).
        skip: whether the blocks of equal width, except the last, add their input before the activation.

    Attributes:
        num_features: ``width``.

    Raises:
        ValueError: a size below 1, or a rate outside [0, 1).

    Example:
        >>> TableMLP(27, width=32, num_blocks=2)(torch.zeros(4, 27)).shape
        torch.Size([4, 32])
    """

    def __init__(
        self, in_features: int = 27, width: int = 512, num_blocks: int = 8, dropout: float = 0.0, skip: bool = False
    ) -> None:
        super().__init__()
        for name, value in {"in_features": in_features, "width": width, "num_blocks": num_blocks}.items():
            check_range(name, value, 1)
        check_range("dropout", dropout, 0, 1, high_open=True)
        self.blocks = nn.Sequential(
            _Block(in_features, width, dropout, skip=False),
            *(_Block(width, width, dropout, skip=skip and i < num_blocks - 1) for i in range(num_blocks)),
        )
        self.num_features = width

    def forward(self, x: Float[Tensor, "batch columns"]) -> Float[Tensor, "batch features"]:
        """Features, [batch, width]."""
        return self.blocks(x)
