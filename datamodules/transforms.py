"""Transforms of image tensors in whole batches, in torch alone.

They have a true attribute ``batched``: a data set calls them on [B, C, H, W] floats and every image gets its own draw.
On one image [C, H, W] they work as well, so that they can stand at the end of a pipeline of torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_methods.core.checks import check_choice, check_range, check_shape

__all__ = [
    "ZCA",
    "Chain",
    "Cutout",
    "Flatten",
    "RandomAffineNoise",
    "RandomCropFlip",
    "RandomFactorResizedCrop",
    "Resize",
    "ScaleToNorm",
    "Standardize",
]


class _BatchTransform(nn.Module):
    """Base: accepts one image [C, H, W] as a batch of one."""

    batched = True

    def forward(self, x: Tensor) -> Tensor:
        """Transform a batch [B, C, H, W], or one image [C, H, W]."""
        return self.transform(x[None])[0] if x.dim() == 3 else self.transform(x)

    def transform(self, x: Tensor) -> Tensor:
        """Transform a batch."""
        raise NotImplementedError


class Standardize(nn.Module):
    """Subtract a mean and divide by a deviation: of all pixels, of each channel [C], or of each pixel [C, H, W]."""

    batched = True

    def __init__(self, mean: Any, std: Any) -> None:
        super().__init__()
        mean, std = (torch.as_tensor(value, dtype=torch.float32) for value in (mean, std))
        if mean.shape != std.shape:
            raise ValueError(f"mean and std must have one shape, got {list(mean.shape)} and {list(std.shape)}.")
        if not (std > 0).all():
            raise ValueError(f"std must be positive, got {std.tolist()}.")
        self.register_buffer("mean", mean[:, None, None] if mean.dim() == 1 else mean, persistent=False)
        self.register_buffer("std", std[:, None, None] if std.dim() == 1 else std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Standardise, [..., C, H, W]."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Mean and deviation."""
        return f"mean={self.mean.flatten()[:3].tolist()}, std={self.std.flatten()[:3].tolist()}"


class ScaleToNorm(nn.Module):
    """Subtract a mean and scale every sample [B, ...] to one Euclidean norm (a zero sample stays zero)."""

    batched = True

    def __init__(self, mean: Tensor, norm: float) -> None:
        super().__init__()
        self.register_buffer("mean", mean, persistent=False)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Centre and scale, [B, ...]."""
        return self.norm * F.normalize((x - self.mean).flatten(1), dim=1).view_as(x)


class Flatten(nn.Module):
    """[B, ...] -> [B, D]."""

    batched = True

    def forward(self, x: Tensor) -> Tensor:
        """Flatten all but the batch."""
        return x.flatten(1)


class Resize(_BatchTransform):
    """Bilinear resize to a square, smoothed when it shrinks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def transform(self, x: Tensor) -> Tensor:
        """Resize a batch."""
        if x.shape[-2:] == (self.size, self.size):
            return x
        return F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=True)


class Chain:
    """Transforms one after the other; works on batches if all of them do, else on single samples.

    Args:
        *transforms: the transforms; None is left out.
    """

    def __init__(self, *transforms: Callable | None) -> None:
        self.transforms = tuple(transform for transform in transforms if transform is not None)
        self.batched = all(getattr(transform, "batched", False) for transform in self.transforms)

    def __call__(self, x: Any) -> Any:
        """Apply all of them."""
        for transform in self.transforms:
            one = not self.batched and getattr(transform, "batched", False)
            x = transform(x[None])[0] if one else transform(x)
        return x

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.transforms))})"


# random


class RandomCropFlip(_BatchTransform):
    """Pad, crop to the old size at a random place, and mirror left to right with probability one half.

    Without ``flip`` it is a random shift by up to ``padding`` pixels, as digits can bear it.

    Args:
        padding: pixels on every side.
        pad_mode: "constant" pads with zeros, "reflect" mirrors the border.
        flip: whether images are mirrored.
    """

    def __init__(
        self, padding: int = 4, pad_mode: Literal["constant", "reflect"] = "constant", flip: bool = True
    ) -> None:
        super().__init__()
        check_range("padding", padding, 0)
        check_choice("pad_mode", pad_mode, ("constant", "reflect"))
        self.padding = padding
        self.pad_mode = pad_mode
        self.flip = flip

    def transform(self, x: Tensor) -> Tensor:
        """Crop and mirror a batch."""
        b, _, h, w = x.shape
        padded = F.pad(x, [self.padding] * 4, mode=self.pad_mode)
        top, left = torch.randint(0, 2 * self.padding + 1, (2, b, 1), device=x.device)
        rows = top + torch.arange(h, device=x.device)
        columns = left + torch.arange(w, device=x.device)
        if self.flip:
            mirrored = torch.rand(b, 1, device=x.device) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        image = torch.arange(b, device=x.device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()

    def extra_repr(self) -> str:
        """The options."""
        return f"padding={self.padding}, pad_mode={self.pad_mode!r}, flip={self.flip}"


class RandomAffineNoise(_BatchTransform):
    """Random rotation, shift and scale, brightness and Gaussian noise; pixels that come in from outside are 0.

    Args:
        degrees: largest rotation.
        translate: largest shift as a share of the side.
        scale: largest relative change of size.
        brightness: largest relative change of brightness.
        noise: deviation of the noise.
    """

    def __init__(
        self,
        degrees: float = 15.0,
        translate: float = 0.125,
        scale: float = 0.15,
        brightness: float = 0.0,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        check_range("degrees", degrees, 0, 180)
        check_range("translate", translate, 0)
        check_range("scale", scale, 0, 1, high_open=True)
        check_range("brightness", brightness, 0, 1)
        check_range("noise", noise, 0)
        self.degrees = degrees
        self.translate = translate
        self.scale = scale
        self.brightness = brightness
        self.noise = noise

    def transform(self, x: Tensor) -> Tensor:
        """Transform a batch."""
        b = len(x)

        def uniform(limit: float) -> Tensor:
            return (2 * torch.rand(b, device=x.device, dtype=x.dtype) - 1) * limit

        angle = uniform(math.radians(self.degrees))
        size = 1 + uniform(self.scale)
        cos, sin = angle.cos() / size, angle.sin() / size
        # Grid coordinates run from -1 to 1: a share s of the side is 2 s.
        theta = torch.stack([cos, -sin, 2 * uniform(self.translate), sin, cos, 2 * uniform(self.translate)], dim=1)
        grid = F.affine_grid(theta.view(b, 2, 3), list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        if self.brightness:
            x = x * (1 + uniform(self.brightness))[:, None, None, None]
        return x + self.noise * torch.randn_like(x) if self.noise else x

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(
            f"{name}={getattr(self, name)}" for name in ("degrees", "translate", "scale", "brightness", "noise")
        )


class Cutout(_BatchTransform):
    """Set one square to 0 (after normalisation: the mean colour); its part outside the image is cut off.

    Args:
        length: longest side; each image draws its side uniformly from 1 .. ``length`` and the centre anywhere.
        random_side: False for a side of ``length`` always.
    """

    def __init__(self, length: int, random_side: bool = True) -> None:
        super().__init__()
        check_range("length", length, 1)
        self.length = length
        self.random_side = random_side

    def transform(self, x: Tensor) -> Tensor:
        """Cut a batch."""
        b, _, h, w = x.shape
        side = torch.full((b, 1), self.length, device=x.device)
        if self.random_side:
            side = torch.randint(1, self.length + 1, (b, 1), device=x.device)

        def inside(length: int) -> Tensor:
            start = torch.randint(0, length, (b, 1), device=x.device) - side // 2
            position = torch.arange(length, device=x.device)
            return (position >= start) & (position < start + side)

        hole = inside(h)[:, None, :, None] & inside(w)[:, None, None, :]
        return x.masked_fill(hole, 0.0)

    def extra_repr(self) -> str:
        """The options."""
        return f"length={self.length}, random_side={self.random_side}"


class RandomFactorResizedCrop(_BatchTransform):
    """For images that are mosaics of f x f images: one tile, enlarged to full size, or the mosaic itself.

    The mosaic stays with probability 1 / f^2; else every tile is as likely.

    Args:
        factor: tiles per side; 1 changes nothing.
    """

    def __init__(self, factor: int) -> None:
        super().__init__()
        check_range("factor", factor, 1)
        self.factor = factor

    def transform(self, x: Tensor) -> Tensor:
        """Crop a batch whose height and width are multiples of the factor."""
        f = self.factor
        if f == 1:
            return x
        b, c, h, w = x.shape
        if h % f or w % f:
            raise ValueError(f"height and width must be multiples of factor={f}, got {h} x {w}.")
        tiles = x.view(b, c, f, h // f, f, w // f).permute(0, 2, 4, 1, 3, 5).reshape(b, f * f, c, h // f, w // f)
        chosen = tiles[torch.arange(b, device=x.device), torch.randint(0, f * f, (b,), device=x.device)]
        tile = F.interpolate(chosen, size=(h, w), mode="bilinear")
        whole = torch.rand(b, device=x.device) < 1 / f**2
        return torch.where(whole[:, None, None, None], x, tile)

    def extra_repr(self) -> str:
        """The factor."""
        return f"factor={self.factor}"


class ZCA(_BatchTransform):
    """Whitening that stays closest to the images: W = U (S + eps)^(-1/2) U^T with the covariance U S U^T of all pixels.

    Args:
        images: what mean and covariance are measured on, float [N, C, H, W], N > 1.
        eps: added to the eigenvalues.
        chunk_size: images at a time.

    Raises:
        ValueError: another shape, or one image only.
    """

    def __init__(self, images: Tensor, eps: float = 0.1, chunk_size: int = 4096) -> None:
        super().__init__()
        check_shape("images", images, "samples channels height width")
        check_range("eps", eps, 0, low_open=True)
        n = len(images)
        if n < 2:
            raise ValueError("images must be at least two to measure their covariance.")
        flat = images.flatten(1)
        mean = torch.stack([chunk.double().sum(0) for chunk in flat.split(chunk_size)]).sum(0) / n
        covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
        for chunk in flat.split(chunk_size):
            centred = chunk.double() - mean
            covariance.addmm_(centred.T, centred)
        values, vectors = torch.linalg.eigh(covariance / (n - 1))
        whitening = (vectors * (values.clamp(min=0) + eps).rsqrt()) @ vectors.T
        self.register_buffer("mean", mean.float(), persistent=False)
        self.register_buffer("whitening", whitening.float(), persistent=False)

    def transform(self, x: Tensor) -> Tensor:
        """Whiten a batch."""
        return ((x.flatten(1) - self.mean) @ self.whitening).view_as(x)
