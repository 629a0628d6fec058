"""DeiT's augmentation, with which the paper trains ViTs: on single images by timm, on batches by MixUp and CutMix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from ..core.checks import check_range

__all__ = ["DeiTTransform", "MixUpOrCutMix"]


class DeiTTransform:
    """Training transform of DeiT: random resized crop, mirror image, RandAugment, random erasing, ImageNet's mean.

    Source: Touvron et al., "Training data-efficient image transformers", ICML 2021, table 9.

    Args:
        image_size: height and width.
        auto_augment: policy in timm's notation.
        erasing: probability of random erasing.
    """

    def __init__(
        self, image_size: int = 224, auto_augment: str = "rand-m9-mstd0.5-inc1", erasing: float = 0.25
    ) -> None:
        from timm.data import create_transform

        check_range("image_size", image_size, 1)
        check_range("erasing", erasing, 0, 1)
        self.transform = create_transform(
            image_size,
            is_training=True,
            auto_augment=auto_augment,
            re_prob=erasing,
            re_mode="pixel",
            interpolation="bicubic",
        )

    def __call__(self, image: Any) -> Tensor:
        """A PIL image as a normalised tensor, [3, image_size, image_size]."""
        return self.transform(image)


class MixUpOrCutMix(nn.Module):
    """MixUp or CutMix on a batch, each with probability 1/2; targets become class probabilities.

    Source: Touvron et al., "Training data-efficient image transformers", ICML 2021, table 9.

    Args:
        num_classes: number of classes.
        mixup_alpha: of MixUp's Beta distribution.
        cutmix_alpha: of CutMix's.

    Raises:
        ValueError: an alpha is not positive.

    Example:
        >>> x, y = MixUpOrCutMix(10)(torch.zeros(4, 3, 8, 8), torch.arange(4))
        >>> x.shape, y.shape
        (torch.Size([4, 3, 8, 8]), torch.Size([4, 10]))
    """

    def __init__(self, num_classes: int, mixup_alpha: float = 0.8, cutmix_alpha: float = 1.0) -> None:
        super().__init__()
        check_range("num_classes", num_classes, 2)
        check_range("mixup_alpha", mixup_alpha, 0, low_open=True)
        check_range("cutmix_alpha", cutmix_alpha, 0, low_open=True)
        self.mixes = nn.ModuleList(
            [
                v2.MixUp(alpha=mixup_alpha, num_classes=num_classes),
                v2.CutMix(alpha=cutmix_alpha, num_classes=num_classes),
            ]
        )

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mix a batch.

        Args:
            x: images, [B, C, H, W].
            y: class indices, [B].

        Returns:
            Images of the same shape, class probabilities [B, num_classes].
        """
        return self.mixes[int(torch.rand(()) < 0.5)](x, y)
