"""Differentiable augmentation (DiffAug) of image batches, as dataset distillation trains its students with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..core.checks import check_choice, check_floating, check_shape
from ..core.losses import at_least_float32
from ..nn.convnets import ConvNet

__all__ = ["ConvNet", "DiffAugment"]

CROP, SCALE, ROTATE, CUTOUT = 0.125, 1.2, 15.0, 0.5
PARTS = ("color", "crop", "cutout", "flip", "scale", "rotate")


class DiffAugment(nn.Module):
    """Random flip, colour, one geometric transform and cutout on a batch of images, with a draw per image.

    In this order: a horizontal flip with probability 1/2; brightness (up to +-0.5), saturation (factor 0 to 2) and
    contrast (factor 0.5 to 1.5); one of crop (shift by up to 12.5 % of the side), scale (factor 1/1.2 to 1.2 per axis)
    and rotate (up to +-15 degrees), the kind drawn once for the batch; cutout of a square of half the side. Images are
    usually normalised already; what is moved in or cut out is 0. In eval mode the images pass unchanged.

    Source: Zhao and Bilen, "Dataset condensation with differentiable siamese augmentation", ICML 2021.

    Args:
        strategy: the parts to use, joined by underscores, out of color, crop, cutout, flip, scale and rotate.

    Raises:
        ValueError: an unknown part.

    Example:
        >>> augment = DiffAugment("crop")
        >>> augment(torch.ones(2, 3, 32, 32)).shape
        torch.Size([2, 3, 32, 32])
    """

    batched = True  # as the transform of a data module it gets whole batches

    def __init__(self, strategy: str = "color_crop_cutout_flip_scale_rotate") -> None:
        super().__init__()
        self.strategy = strategy
        self.parts = tuple(strategy.split("_"))
        for part in self.parts:
            check_choice("every part of strategy", part, PARTS)

    def extra_repr(self) -> str:
        """The strategy."""
        return f"strategy={self.strategy!r}"

    def forward(
        self, x: Float[Tensor, "batch channels height width"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "batch channels height width"]:
        """Augment a batch.

        Args:
            x: images, [batch, channels, height, width].
            generator: source of the random numbers, on the device of ``x``; the global one by default.

        Returns:
            Images of the same shape and dtype; gradients flow through.
        """
        check_shape("x", x, "batch channels height width")
        check_floating("x", x)
        if not self.training:
            return x
        dtype, x = x.dtype, at_least_float32(x)
        if "flip" in self.parts:
            x = torch.where(_uniform(x, generator) < 0.5, x.flip(3), x)
        if "color" in self.parts:
            x = _color(x, generator)
        geometric = [transform for part, transform in GEOMETRIC.items() if part in self.parts]
        if geometric:
            maps = torch.stack([transform(x, generator) for transform in geometric])
            kind = torch.randint(len(maps), (1,), generator=generator, device=x.device)
            x = _warp(x, maps.index_select(0, kind)[0])
        if "cutout" in self.parts:
            x = _cutout(x, generator)
        return x.to(dtype)


def _uniform(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """One number of U(0, 1) per image, [B, 1, 1, 1]."""
    return torch.rand(x.shape[0], 1, 1, 1, generator=generator, device=x.device, dtype=x.dtype)


def _integers(x: Tensor, low: int, high: int, generator: torch.Generator | None) -> Tensor:
    """One integer of low .. high per image, [B]."""
    return torch.randint(low, high + 1, (x.shape[0],), generator=generator, device=x.device)


def _color(x: Tensor, generator: torch.Generator | None) -> Tensor:
    x = x + (_uniform(x, generator) - 0.5)
    gray = x.mean(dim=1, keepdim=True)
    x = (x - gray) * (2 * _uniform(x, generator)) + gray
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return (x - mean) * (_uniform(x, generator) + 0.5) + mean


# Affine maps from output to input coordinates, both in [-1, 1]: [B, 2, 3].


def _affine(xx: Tensor, xy: Tensor, x0: Tensor, yx: Tensor, yy: Tensor, y0: Tensor) -> Tensor:
    return torch.stack([torch.stack([xx, xy, x0], dim=1), torch.stack([yx, yy, y0], dim=1)], dim=1)


def _crop(x: Tensor, generator: torch.Generator | None) -> Tensor:
    height, width = x.shape[2:]
    down, right = int(height * CROP + 0.5), int(width * CROP + 0.5)
    dy = _integers(x, -down, down, generator) * (2 / height)
    dx = _integers(x, -right, right, generator) * (2 / width)
    one, zero = torch.ones_like(dx), torch.zeros_like(dx)
    return _affine(one, zero, dx, zero, one, dy)


def _scale(x: Tensor, generator: torch.Generator | None) -> Tensor:
    low = 1 / SCALE
    sx, sy = (low + (SCALE - low) * _uniform(x, generator).flatten() for _ in range(2))
    zero = torch.zeros_like(sx)
    return _affine(sx, zero, zero, zero, sy, zero)


def _rotate(x: Tensor, generator: torch.Generator | None) -> Tensor:
    height, width = x.shape[2:]
    angle = torch.deg2rad((2 * _uniform(x, generator).flatten() - 1) * ROTATE)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    return _affine(cos, -sin * height / width, zero, sin * width / height, cos, zero)


GEOMETRIC = {"crop": _crop, "scale": _scale, "rotate": _rotate}


def _warp(x: Tensor, maps: Tensor) -> Tensor:
    grid = F.affine_grid(maps.to(x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _cutout(x: Tensor, generator: torch.Generator | None) -> Tensor:
    height, width = x.shape[2:]
    rows = _inside(x, height, int(height * CUTOUT + 0.5), generator)
    columns = _inside(x, width, int(width * CUTOUT + 0.5), generator)
    cut = rows[:, None, :, None] & columns[:, None, None, :]
    return x.masked_fill(cut, 0)


def _inside(x: Tensor, side: int, length: int, generator: torch.Generator | None) -> Tensor:
    """Which positions of a side lie in a stretch around a random centre, cut at the border; bool [B, side]."""
    start = _integers(x, 0, side - length % 2, generator) - length // 2
    position = torch.arange(side, device=x.device)
    return (position >= start[:, None]) & (position < start[:, None] + length)
