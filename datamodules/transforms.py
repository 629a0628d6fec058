"""Transforms of image tensors in whole batches, in torch alone.

They have a true attribute ``batched``: a data set calls them on [B, C, H, W] floats and every image gets its own draw.
On one image [C, H, W] they work as well, so that they can stand at the end of a pipeline of torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_methods.core.checks import check_choice, check_range, check_shape

__all__ = [
    "ZCA",
    "Chain",
    "Clip",
    "Cutout",
    "Flatten",
    "RandomAffineNoise",
    "RandomColor",
    "RandomCropFlip",
    "RandomFactorResizedCrop",
    "RandomResizedCrop",
    "Resize",
    "ScaleToNorm",
    "Standardize",
    "StrongAugment",
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


class Clip(nn.Module):
    """Cut values off at 0 and 1."""

    batched = True

    def forward(self, x: Tensor) -> Tensor:
        """Clip, any shape."""
        return x.clamp(0, 1)


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


class RandomResizedCrop(_BatchTransform):
    """Crop a random part of random shape, resize it to a square, and perhaps mirror it left to right.

    Area and shape are drawn as torchvision's transform of this name draws them; the resize is the same as its
    antialiased one (for tensors), done as two products with matrices of weights.

    Args:
        size: height and width of the result.
        scale: smallest and largest share of the area.
        ratio: smallest and largest ratio of width to height.
        interpolation: "bilinear" or "bicubic".
        flip: probability of the mirror image.
    """

    def __init__(
        self,
        size: int,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        interpolation: Literal["bilinear", "bicubic"] = "bilinear",
        flip: float = 0.5,
    ) -> None:
        super().__init__()
        check_range("size", size, 1)
        check_choice("interpolation", interpolation, ("bilinear", "bicubic"))
        check_range("flip", flip, 0, 1)
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"scale must be shares 0 < smallest <= largest <= 1, got {scale}.")
        if not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"ratio must be 0 < smallest <= largest, got {ratio}.")
        self.size = size
        self.scale = tuple(scale)
        self.ratio = tuple(ratio)
        self.interpolation = interpolation
        self.flip = flip

    def transform(self, x: Tensor) -> Tensor:
        """Crop a batch."""
        top, left, height, width = self.boxes(len(x), x.shape[2], x.shape[3], x.device)
        x = self.resized(x, top, left, height, width)
        if not self.flip:
            return x
        mirrored = torch.rand(len(x), device=x.device) < self.flip
        return torch.where(mirrored[:, None, None, None], x.flip(3), x)

    def boxes(self, n: int, height: int, width: int, device: Any = None) -> Tensor:
        """Draw top, left, height and width of ``n`` crops, int64 [4, n]."""
        tries = 10
        area = height * width * torch.empty(n, tries, device=device).uniform_(*self.scale)
        logs = [math.log(value) for value in self.ratio]
        ratio = torch.empty(n, tries, device=device).uniform_(*logs).exp()
        w, h = (area * ratio).sqrt().round().long(), (area / ratio).sqrt().round().long()
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first = fits.int().argmax(dim=1, keepdim=True)
        w, h, found = w.gather(1, first)[:, 0], h.gather(1, first)[:, 0], fits.any(dim=1)
        top = (torch.rand(n, device=device) * (height - h + 1)).long()
        left = (torch.rand(n, device=device) * (width - w + 1)).long()
        # None fits (rare, very long images): the largest crop of an allowed shape, from the middle.
        shape = min(max(width / height, self.ratio[0]), self.ratio[1])
        largest_h, largest_w = min(height, round(width / shape)), min(width, round(height * shape))
        fallback = ((height - largest_h) // 2, (width - largest_w) // 2, largest_h, largest_w)
        drawn = (top, left, h, w)
        return torch.stack([torch.where(found, value, other) for value, other in zip(drawn, fallback, strict=True)])

    def resized(self, x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
        """Resize one crop of every image."""
        rows = self._weights(top, height, x.shape[2], x.dtype)
        columns = self._weights(left, width, x.shape[3], x.dtype)
        return torch.einsum("bsh,bchw,btw->bcst", rows, x, columns)

    def _weights(self, start: Tensor, extent: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Weight of every input position for every output position, [B, size, length]."""
        start, extent = start.to(dtype)[:, None, None], extent.to(dtype)[:, None, None]
        position = torch.arange(length, device=start.device, dtype=dtype) + 0.5
        output = torch.arange(self.size, device=start.device, dtype=dtype)[:, None] + 0.5
        step = extent / self.size
        distance = ((position - start - output * step) / step.clamp(min=1)).abs()
        if self.interpolation == "bilinear":
            weight = (1 - distance).clamp(min=0)
        else:  # Keys' cubic with a = -1/2
            near = (1.5 * distance - 2.5) * distance**2 + 1
            far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
            weight = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
        weight = weight * ((position > start) & (position < start + extent))
        return weight / weight.sum(dim=2, keepdim=True)

    def extra_repr(self) -> str:
        """The options."""
        return f"size={self.size}, scale={self.scale}, interpolation={self.interpolation!r}, flip={self.flip}"


# colours, [B, C, H, W] in [0, 1] with one factor per image


def _column(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (_column(factor) * x + _column(1 - factor) * other).clamp(0, 1)


def grey(x: Tensor) -> Tensor:
    """Brightness of the pixels, [B, 1, H, W]."""
    if x.shape[1] == 1:
        return x
    return (x * x.new_tensor([0.2989, 0.587, 0.114])[:, None, None]).sum(dim=1, keepdim=True)


def adjust_brightness(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply by a factor."""
    return (x * _column(factor)).clamp(0, 1)


def adjust_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Move away from (factor > 1) or towards the image's mean brightness."""
    return _blend(x, grey(x).mean(dim=(1, 2, 3), keepdim=True), factor)


def adjust_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """Move away from (factor > 1) or towards the grey image."""
    return x if x.shape[1] == 1 else _blend(x, grey(x), factor)


def adjust_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by a share of the circle."""
    if x.shape[1] == 1:
        return x
    high, low = x.amax(dim=1), x.amin(dim=1)
    spread = high - low
    safe = torch.where(spread == 0, 1.0, spread)
    r, g, b = x.unbind(dim=1)
    hue = torch.where(high == r, (g - b) / safe, torch.where(high == g, 2 + (b - r) / safe, 4 + (r - g) / safe))
    hue = (hue / 6 + shift[:, None, None]) % 1.0
    # Every channel is high - spread * a tent function of the hue around its own place on the circle.
    k = (x.new_tensor([5.0, 3.0, 1.0])[:, None, None] + 6 * hue[:, None]) % 6
    return (high[:, None] - spread[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)).clamp(0, 1)


def gaussian_blur(x: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Blur with one deviation (in pixels) per image; the border is mirrored."""
    b, c, h, w = x.shape
    radius = min(radius, h - 1, w - 1)
    position = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.softmax(-0.5 * (position / sigma[:, None]) ** 2, dim=1).repeat_interleave(c, dim=0)
    x = F.pad(x, [radius] * 4, mode="reflect").view(1, b * c, h + 2 * radius, w + 2 * radius)
    x = F.conv2d(x, kernel[:, None, :, None], groups=b * c)
    return F.conv2d(x, kernel[:, None, None, :], groups=b * c).view(b, c, h, w)


def solarize(x: Tensor, threshold: Tensor) -> Tensor:
    """Invert the pixels above a threshold."""
    return torch.where(x >= _column(threshold), 1 - x, x)


class RandomColor(_BatchTransform):
    """Jitter of brightness, contrast, saturation and hue in random order, then grey, blur and solarize, each by chance.

    Args:
        jitter: largest relative change of brightness, contrast and saturation, and largest turn of the hue (up to .5).
        jitter_p: probability of the jitter.
        grey_p: probability of a grey image.
        blur_p: probability of a Gaussian blur with a deviation uniform in (.1, 2) pixels.
        solarize_p: probability of inverting the pixels above one half.
    """

    def __init__(
        self,
        jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1),
        jitter_p: float = 0.8,
        grey_p: float = 0.2,
        blur_p: float = 0.0,
        solarize_p: float = 0.0,
    ) -> None:
        super().__init__()
        for value in jitter:
            check_range("jitter", value, 0)
        check_range("jitter of the hue", jitter[3], 0, 0.5)
        for name, p in (("jitter_p", jitter_p), ("grey_p", grey_p), ("blur_p", blur_p), ("solarize_p", solarize_p)):
            check_range(name, p, 0, 1)
        self.jitter = tuple(jitter)
        self.jitter_p = jitter_p
        self.grey_p = grey_p
        self.blur_p = blur_p
        self.solarize_p = solarize_p

    def transform(self, x: Tensor) -> Tensor:
        """Change a batch with values in [0, 1]."""
        x = self._jittered(x)
        x = _some(x, self.grey_p, lambda part: grey(part).expand_as(part))
        x = _some(x, self.blur_p, lambda part: gaussian_blur(part, _uniform(part, 0.1, 2.0), radius=6))
        return _some(x, self.solarize_p, lambda part: solarize(part, torch.full_like(part[:, 0, 0, 0], 0.5)))

    def _jittered(self, x: Tensor) -> Tensor:
        operations = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
        ranges = [(max(0.0, 1 - limit), 1 + limit) for limit in self.jitter[:3]] + [(-self.jitter[3], self.jitter[3])]
        order = torch.rand(len(x), 4, device=x.device).argsort(dim=1)
        order[torch.rand(len(x), device=x.device) >= self.jitter_p] = -1
        x = x.clone()
        for place in order.T:  # every image in its own order
            for i, (operation, (low, high)) in enumerate(zip(operations, ranges, strict=True)):
                rows = (place == i).nonzero().flatten()
                if len(rows):
                    x[rows] = operation(x[rows], _uniform(x[rows], low, high))
        return x

    def extra_repr(self) -> str:
        """The options."""
        names = ("jitter", "jitter_p", "grey_p", "blur_p", "solarize_p")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _uniform(x: Tensor, low: float, high: float) -> Tensor:
    """One number per image."""
    return torch.empty(len(x), device=x.device, dtype=x.dtype).uniform_(low, high)


def _some(x: Tensor, p: float, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """Change each image with probability ``p``."""
    if p == 0:
        return x
    rows = (torch.rand(len(x), device=x.device) < p).nonzero().flatten()
    return x.index_copy(0, rows, operation(x[rows])) if len(rows) else x


# strong operations, with one strength u in [0, 1] per image


def _identity(x: Tensor, u: Tensor) -> Tensor:
    return x


def _autocontrast(x: Tensor, u: Tensor) -> Tensor:
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    flat = high == low
    return torch.where(flat, x, (x - low) / torch.where(flat, 1.0, high - low)).clamp(0, 1)


def _equalize(x: Tensor, u: Tensor) -> Tensor:
    b, c, h, w = x.shape
    level = (x * 255).round().long().clamp(0, 255).view(b * c, h * w)
    counts = torch.zeros(b * c, 256, dtype=torch.long, device=x.device).scatter_add_(1, level, torch.ones_like(level))
    brightest = counts.gather(1, level.amax(dim=1, keepdim=True))
    step = (h * w - brightest) // 255
    below = counts.cumsum(dim=1) - counts  # pixels that are darker
    table = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    equalized = table.gather(1, level).view_as(x).to(x.dtype) / 255
    return torch.where(step.view(b, c, 1, 1) == 0, x, equalized)


def _sharpness(x: Tensor, u: Tensor) -> Tensor:
    c, h, w = x.shape[1:]
    if h <= 2 or w <= 2:
        return x
    kernel = x.new_ones(3, 3)
    kernel[1, 1] = 5.0
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(x, (kernel / 13).expand(c, 1, 3, 3), groups=c)
    return _blend(x, smooth, _factor(u))


def _posterize(x: Tensor, u: Tensor) -> Tensor:
    bits = (4 + 5 * u).floor().clamp(max=8)
    step = _column(2 ** (8 - bits))
    return ((x * 255).round() / step).floor() * step / 255


def _factor(u: Tensor) -> Tensor:
    return 0.05 + 0.9 * u


def _warp(x: Tensor, a: Any, b: Any, c: Any, d: Any, dx: Any = 0.0, dy: Any = 0.0) -> Tensor:
    """Read pixel (x, y), seen from the centre, at (a x + b y + dx, c x + d y + dy); black comes in from outside."""
    n, _, h, w = x.shape
    columns, rows = (torch.arange(length, device=x.device, dtype=x.dtype) - (length - 1) / 2 for length in (w, h))
    a, b, c, d, dx, dy = (
        torch.as_tensor(value, device=x.device, dtype=x.dtype).expand(n)[:, None, None]
        for value in (a, b, c, d, dx, dy)
    )
    at_x = a * columns + b * rows[:, None] + dx
    at_y = c * columns + d * rows[:, None] + dy
    # To the coordinates of grid_sample, in which the outer edges of the image are -1 and 1.
    grid = torch.stack([2 * at_x / w, 2 * at_y / h], dim=3)
    return F.grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def _rotate(x: Tensor, u: Tensor) -> Tensor:
    angle = (2 * u - 1) * math.radians(30)
    return _warp(x, angle.cos(), -angle.sin(), angle.sin(), angle.cos())


class StrongAugment(_BatchTransform):
    """A number of operations drawn from the list that SCAN uses, with replacement, each with its own uniform strength.

    The list: identity, autocontrast, equalize, rotate (-30 to 30 degrees), solarize (threshold 0 to 256/255), color,
    contrast, brightness and sharpness (factor .05 to .95), shear in x or y (-.1 to .1), translate in x or y (-.1 to .1
    of the side, whole pixels), posterize (4 to 8 bits). Black comes in from outside.

    Args:
        num_ops: how many are applied to each image.
    """

    operations: ClassVar[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
        "identity": _identity,
        "autocontrast": _autocontrast,
        "equalize": _equalize,
        "rotate": _rotate,
        "solarize": lambda x, u: solarize(x, u * 256 / 255),
        "color": lambda x, u: adjust_saturation(x, _factor(u)),
        "contrast": lambda x, u: adjust_contrast(x, _factor(u)),
        "brightness": lambda x, u: adjust_brightness(x, _factor(u)),
        "sharpness": _sharpness,
        "shear_x": lambda x, u: _warp(x, 1.0, 0.1 * (2 * u - 1), 0.0, 1.0),
        "translate_x": lambda x, u: _warp(x, 1.0, 0.0, 0.0, 1.0, dx=(0.1 * (2 * u - 1) * x.shape[3]).round()),
        "translate_y": lambda x, u: _warp(x, 1.0, 0.0, 0.0, 1.0, dy=(0.1 * (2 * u - 1) * x.shape[2]).round()),
        "posterize": _posterize,
        "shear_y": lambda x, u: _warp(x, 1.0, 0.0, 0.1 * (2 * u - 1), 1.0),
    }

    def __init__(self, num_ops: int = 4) -> None:
        super().__init__()
        check_range("num_ops", num_ops, 0)
        self.num_ops = num_ops

    def transform(self, x: Tensor) -> Tensor:
        """Augment a batch with values in [0, 1]."""
        x = x.clone()
        for _ in range(self.num_ops):
            choice = torch.randint(len(self.operations), (len(x),), device=x.device)
            strength = _uniform(x, 0.0, 1.0)
            for i, operation in enumerate(self.operations.values()):
                rows = (choice == i).nonzero().flatten()
                if len(rows):
                    x[rows] = operation(x[rows], strength[rows])
        return x

    def extra_repr(self) -> str:
        """The number of operations."""
        return f"num_ops={self.num_ops}"


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
