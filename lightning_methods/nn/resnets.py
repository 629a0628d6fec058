"""ResNets with the stem for small images, on torchvision's implementation."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ..core.checks import check_range, nearest

__all__ = ["CIFARResNet18", "cifar_resnet"]


def cifar_resnet(name: str, padding: int = 1, in_channels: int = 3, num_classes: int = 0, **kwargs: Any) -> nn.Module:
    """A torchvision ResNet for small images: 3x3 stem of stride 1, no max-pooling.

    Args:
        name: a torchvision ResNet, e.g. "resnet18", "resnet34", "resnet101", "wide_resnet50_2".
        padding: padding of the stem; 1 keeps the size, 2 is what some self-supervised code has.
        in_channels: channels of the images.
        num_classes: width of the linear layer; 0 for none, then the pooled features are returned.
        **kwargs: passed to torchvision, e.g. ``zero_init_residual=True``.

    Returns:
        The network, with an attribute ``num_features`` (512 for resnet18 and resnet34, else 2048).

    Raises:
        ValueError: torchvision has no ResNet of this name, or a number is out of range.

    Example:
        >>> import torch
        >>> network = cifar_resnet("resnet18")
        >>> network(torch.zeros(2, 3, 32, 32)).shape, network.num_features
        (torch.Size([2, 512]), 512)
    """
    from torchvision.models import get_model, list_models

    check_range("padding", padding, 0)
    check_range("in_channels", in_channels, 1)
    check_range("num_classes", num_classes, 0)
    known = [model for model in list_models() if "resne" in model and "/" not in model and "_resnet50_fpn" not in model]
    if name not in known:
        raise ValueError(f"name must be a torchvision ResNet: {', '.join(known)}; got {name!r}.{nearest(name, known)}")
    network = get_model(name, num_classes=max(num_classes, 1), **kwargs)
    stem = nn.Conv2d(in_channels, network.conv1.out_channels, kernel_size=3, stride=1, padding=padding, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    network.conv1 = stem
    network.maxpool = nn.Identity()
    network.num_features = network.fc.in_features
    if num_classes == 0:
        network.fc = nn.Identity()
    return network


class CIFARResNet18(nn.Module):
    """ResNet-18 encoder of self-supervised learning on small images: ``cifar_resnet`` with padding 2 and no classifier.

    Args:
        in_channels: channels of the images.
        zero_init_residual: start every residual branch at zero.

    Attributes:
        num_features: 512.
    """

    def __init__(self, in_channels: int = 3, zero_init_residual: bool = True) -> None:
        super().__init__()
        self.network = cifar_resnet(
            "resnet18", padding=2, in_channels=in_channels, zero_init_residual=zero_init_residual
        )
        self.num_features: int = self.network.num_features

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """Features [batch, 512]."""
        return self.network(x)
