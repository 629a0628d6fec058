"""Small networks and heads that several papers use; larger ones come by name from timm and torchvision."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .convnets import ConvNet as ConvNet
    from .convnets import SmallConvNet as SmallConvNet
    from .mlp import MLP as MLP
    from .mlp import MLPHead as MLPHead
    from .resnets import CIFARResNet18 as CIFARResNet18
    from .resnets import cifar_resnet as cifar_resnet

__getattr__, __dir__, __all__ = attach(__name__, __file__)
