"""The networks of the continual problems: MLP, CNN, and a small causal transformer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.checks import check_choice, check_range
from .functional import INITS, LAYERS, lecun_normal_

__all__ = ["CausalTransformer", "ConcatReLU", "ContinualCNN", "ContinualMLP"]

ACTIVATIONS = ("relu", "crelu")


class ConcatReLU(nn.Module):
    """``relu(x)`` and ``relu(-x)`` of every channel, beside each other: [B, C, ...] -> [B, 2C, ...].

    Channel c becomes the channels 2c and 2c + 1, so that what leaves a unit stays one block of columns.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        return torch.stack([x, -x], dim=2).relu().flatten(1, 2)


def _init(network: nn.Module, init: str) -> None:
    """Re-initialise Linear and Conv layers; "module" leaves torch's defaults."""
    if init == "lecun_normal":
        for layer in network.modules():
            if isinstance(layer, LAYERS):
                with torch.no_grad():
                    lecun_normal_(layer.weight)
                    if layer.bias is not None:
                        layer.bias.zero_()


def _hidden(layers: list[nn.Module], activation: str, norm: nn.Module | None) -> list[nn.Module]:
    return [*layers, *([norm] if norm is not None else []), nn.ReLU() if activation == "relu" else ConcatReLU()]


def _check(hidden: Sequence[int], activation: str, init: str, **positive: int) -> None:
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("init", init, INITS)
    for name, value in positive.items():
        check_range(name, value, 1)
    for width in hidden:
        check_range("hidden", width, 2 if activation == "crelu" else 1)


class ContinualMLP(nn.Sequential):
    """Linear-ReLU-Linear-ReLU-Linear, as in the paper; inputs of any shape are flattened.

    Args:
        in_features: number of inputs.
        hidden: widths of the hidden layers.
        num_classes: number of logits.
        layer_norm: normalise before every non-linearity.
        activation: "relu", or "crelu" (concatenated; hidden layers have half the units, the same number of outputs).
        init: "module" (torch's defaults) or "lecun_normal" (flax's: truncated normal of variance 1 / fan_in, zero
            bias).

    Example:
        >>> ContinualMLP(64, num_classes=10)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden: Sequence[int] = (100, 100),
        num_classes: int = 10,
        layer_norm: bool = False,
        activation: Literal["relu", "crelu"] = "relu",
        init: Literal["module", "lecun_normal"] = "module",
    ) -> None:
        _check(hidden, activation, init, in_features=in_features, num_classes=num_classes)
        factor = 2 if activation == "crelu" else 1
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise([in_features, *(width // factor * factor for width in hidden)]):
            units = after // factor
            layers += _hidden([nn.Linear(before, units)], activation, nn.LayerNorm(units) if layer_norm else None)
        width = hidden[-1] // factor * factor if hidden else in_features
        super().__init__(*layers, nn.Linear(width, num_classes))
        _init(self, init)


class ContinualCNN(nn.Sequential):
    """Two 5x5 convolutions with max-pooling, then two hidden Linear layers and the head, as in the paper.

    Args:
        in_channels: channels of the images.
        image_size: their height and width, at least 16.
        channels: channels of both convolutions.
        hidden: widths of the hidden Linear layers.
        num_classes: number of logits.
        layer_norm: normalise before every non-linearity (convolutions: over channels and positions).
        activation: "relu", or "crelu" (concatenated; layers have half the units, the same number of outputs).
        init: "module" or "lecun_normal", see :class:`ContinualMLP`.

    Example:
        >>> ContinualCNN(num_classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        in_channels: int = 3,
        image_size: int = 32,
        channels: int = 16,
        hidden: Sequence[int] = (100, 100),
        num_classes: int = 10,
        layer_norm: bool = False,
        activation: Literal["relu", "crelu"] = "relu",
        init: Literal["module", "lecun_normal"] = "module",
    ) -> None:
        _check(hidden, activation, init, in_channels=in_channels, channels=channels, num_classes=num_classes)
        check_range("image_size", image_size, 16)
        factor = 2 if activation == "crelu" else 1
        units = max(channels // factor, 1)
        layers: list[nn.Module] = []
        for before in (in_channels, units * factor):
            norm = nn.GroupNorm(1, units) if layer_norm else None
            layers += [*_hidden([nn.Conv2d(before, units, 5)], activation, norm), nn.MaxPool2d(2)]
        side = ((image_size - 4) // 2 - 4) // 2
        head = ContinualMLP(units * factor * side**2, hidden, num_classes, layer_norm, activation)
        super().__init__(*layers, *head)
        _init(self, init)


class _Block(nn.Module):
    """Causal self-attention and an MLP, each with a normalisation before it and a residual sum around it."""

    def __init__(self, width: int, num_heads: int, mlp_units: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_units), nn.ReLU(), nn.Linear(mlp_units, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class CausalTransformer(nn.Module):
    """A small language model for Permuted Shakespeare: token ids [B, T] -> logits of the next token [B, T, vocabulary].

    Width and MLP units grow with the root of ``scale``. The MLP units (ReLU) are those that resets act on.

    Args:
        vocab_size: number of tokens.
        context: longest sequence.
        scale: 1, 4 or 16 in the paper.
        width: of the residual stream at scale 1.
        num_heads: attention heads.
        mlp_units: hidden units of each MLP at scale 1.
        num_layers: number of blocks.

    Raises:
        ValueError: the scaled width is not divisible by the heads.

    Example:
        >>> CausalTransformer(50, context=16)(torch.zeros(2, 16, dtype=torch.long)).shape
        torch.Size([2, 16, 50])
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 128,
        scale: float = 1.0,
        width: int = 32,
        num_heads: int = 2,
        mlp_units: int = 256,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        check_range("scale", scale, 0, low_open=True)
        for name, value in (("vocab_size", vocab_size), ("context", context), ("num_layers", num_layers)):
            check_range(name, value, 1)
        width, mlp_units = round(width * math.sqrt(scale)), round(mlp_units * math.sqrt(scale))
        check_range("num_heads", num_heads, 1)
        if width % num_heads:
            raise ValueError(f"the width {width} must be divisible by num_heads={num_heads}.")
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, num_heads, mlp_units) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, [B, T, vocabulary]."""
        x = self.token(x) + self.position.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))
