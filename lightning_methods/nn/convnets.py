"""Plain convolutional networks: ConvNet-D of dataset distillation, and a small one for digit-sized images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from ..core.checks import check_choice, check_range

__all__ = ["ConvNet", "SmallConvNet"]


class ConvNet(nn.Module):
    """ConvNet-D, the usual student of dataset distillation.

    ``depth`` blocks of [3x3 convolution, norm, ReLU, 2x2 average pooling], then a linear layer on the flattened map.
    Depth 3 is for 32x32 images, 4 for 64x64, 5 for 128x128.

    Source: Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting", CVPR 2018, as used by the
    distillation literature.

    Args:
        depth: number of blocks.
        width: channels of every block.
        norm: "batch", or "instance" (GroupNorm with one channel per group, affine).
        in_channels: channels of the images.
        num_classes: width of the linear layer; 0 for none, then the flattened map is returned.
        image_size: height and width of the images; every block halves them, rounding down.

    Attributes:
        num_features: size of the flattened map.

    Raises:
        ValueError: the image is too small for the depth, or another argument is out of range.

    Example:
        >>> import torch
        >>> ConvNet(depth=3, num_classes=10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int = 3,
        width: int = 128,
        norm: Literal["batch", "instance"] = "batch",
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int = 32,
    ) -> None:
        super().__init__()
        for name, value in {"depth": depth, "width": width, "in_channels": in_channels}.items():
            check_range(name, value, 1)
        check_range("num_classes", num_classes, 0)
        check_choice("norm", norm, ("batch", "instance"))
        side = image_size >> depth
        if side < 1:
            raise ValueError(f"image_size {image_size} is too small for depth {depth}: it needs at least {2**depth}.")
        layers: list[nn.Module] = []
        for block in range(depth):
            layers += [
                nn.Conv2d(width if block else in_channels, width, kernel_size=3, padding=1),
                nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(width, width),
                nn.ReLU(inplace=True),
                nn.AvgPool2d(2),
            ]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.num_features = width * side * side
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch outputs"]:
        """Logits [batch, num_classes], or features [batch, num_features]."""
        return self.head(self.features(x))


class SmallConvNet(nn.Module):
    """Small network for small images: [3x3 convolution, norm, ReLU] blocks, global average pooling, a linear head.

    Accepts images of any size, since the head sees one vector per image.

    Args:
        channels: output channels of the blocks.
        in_channels: channels of the images.
        num_classes: width of the head; 0 for none, then the network is an encoder.
        norm: "batch" or None.
        pool: 2x2 pooling between the blocks ("max" or "avg"), or None to keep the resolution.

    Attributes:
        num_features: width of the features before the head.

    Raises:
        ValueError: no blocks, or another argument is out of range.

    Example:
        >>> import torch
        >>> encoder = SmallConvNet(channels=(16, 32))
        >>> encoder(torch.zeros(5, 1, 8, 8)).shape, encoder.num_features
        (torch.Size([5, 32]), 32)
    """

    def __init__(
        self,
        channels: Sequence[int] = (32, 64, 64),
        in_channels: int = 1,
        num_classes: int = 0,
        norm: Literal["batch"] | None = "batch",
        pool: Literal["max", "avg"] | None = "max",
    ) -> None:
        super().__init__()
        if not channels:
            raise ValueError("channels must name at least one block.")
        widths = [in_channels, *channels]
        for width in widths:
            check_range("in_channels and channels", width, 1)
        check_range("num_classes", num_classes, 0)
        if norm is not None:
            check_choice("norm", norm, ("batch",))
        if pool is not None:
            check_choice("pool", pool, ("max", "avg"))
        layers: list[nn.Module] = []
        for block, (before, after) in enumerate(pairwise(widths)):
            if pool is not None and block:
                layers.append(nn.MaxPool2d(2) if pool == "max" else nn.AvgPool2d(2))
            layers.append(nn.Conv2d(before, after, kernel_size=3, padding=1, bias=norm is None))
            if norm is not None:
                layers.append(nn.BatchNorm2d(after))
            layers.append(nn.ReLU(inplace=True))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.num_features = widths[-1]
        self.head = nn.Linear(widths[-1], num_classes) if num_classes else nn.Identity()

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch outputs"]:
        """Logits [batch, num_classes], or features [batch, num_features]."""
        return self.head(self.features(x))
