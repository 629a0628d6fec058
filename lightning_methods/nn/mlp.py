"""Multi-layer perceptrons: the plain network, and the projection head of self-supervision."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from ..core.checks import check_choice, check_range

__all__ = ["MLP", "MLPHead"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
}


class MLP(nn.Module):
    """Fully connected network: [linear, norm, activation, dropout] per hidden layer, then a linear head.

    Inputs of any shape are flattened to [batch, in_features] first, so that small images need no extra module.

    Args:
        in_features: number of inputs, after flattening.
        hidden: widths of the hidden layers; empty for a linear model.
        out_features: width of the head; 0 for none, then the network is an encoder.
        norm: normalisation of the hidden layers.
        activation: "relu", "leaky_relu", "gelu", "silu", "elu", "tanh", "sigmoid" or "identity".
        dropout: rate after each hidden layer, in [0, 1).
        bias: whether the linear layers have a bias.

    Attributes:
        num_features: width of the features before the head.

    Raises:
        ValueError: a width that is not positive, or an unknown norm or activation.

    Example:
        >>> import torch
        >>> encoder = MLP(64, hidden=(32, 16))
        >>> encoder(torch.zeros(5, 1, 8, 8)).shape, encoder.num_features
        (torch.Size([5, 16]), 16)
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int = 0,
        norm: Literal["batch", "layer"] | None = "batch",
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        for width in widths:
            check_range("in_features and hidden", width, 1)
        check_range("out_features", out_features, 0)
        check_range("dropout", dropout, 0, 1, high_open=True)
        check_choice("activation", activation, tuple(ACTIVATIONS))
        if norm is not None:
            check_choice("norm", norm, ("batch", "layer"))
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers.append(nn.Linear(before, after, bias=bias))
            if norm is not None:
                layers.append(nn.BatchNorm1d(after) if norm == "batch" else nn.LayerNorm(after))
            layers.append(ACTIVATIONS[activation]())
            if dropout:
                layers.append(nn.Dropout(dropout))
        self.features = nn.Sequential(*layers)
        self.num_features = widths[-1]
        self.head = nn.Linear(widths[-1], out_features, bias=bias) if out_features else nn.Identity()

    def forward(self, x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch out_features"]:
        """Features [batch, num_features], or the head's outputs [batch, out_features]."""
        return self.head(self.features(x))


class MLPHead(nn.Sequential):
    """Projection or prediction head: [linear, BatchNorm, ReLU] x (num_layers - 1), then a linear layer.

    Hidden layers have no bias where BatchNorm follows. With ``num_layers=1`` it is a single linear layer.

    Args:
        in_dim: number of inputs.
        hidden_dim: width of the hidden layers.
        out_dim: number of outputs.
        num_layers: number of linear layers, at least 1.
        batch_norm: whether BatchNorm follows the hidden layers.
        bias_last: whether the last layer has a bias.

    Attributes:
        num_features: ``out_dim``.

    Raises:
        ValueError: a width or ``num_layers`` below 1.

    Example:
        >>> import torch
        >>> MLPHead(512, 2048, 256)(torch.zeros(4, 512)).shape
        torch.Size([4, 256])
    """

    def __init__(
        self,
        in_dim: int,
        hidden_dim: int,
        out_dim: int,
        num_layers: int = 3,
        batch_norm: bool = True,
        bias_last: bool = True,
    ) -> None:
        for name, value in {
            "in_dim": in_dim,
            "hidden_dim": hidden_dim,
            "out_dim": out_dim,
            "num_layers": num_layers,
        }.items():
            check_range(name, value, 1)
        widths = [in_dim] + [hidden_dim] * (num_layers - 1)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers.append(nn.Linear(before, after, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm1d(after))
            layers.append(nn.ReLU(inplace=True))
        super().__init__(*layers, nn.Linear(widths[-1], out_dim, bias=bias_last))
        self.num_features = out_dim
