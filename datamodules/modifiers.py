"""Modifiers: what a paper does to a training set, as small picklable callables ``dataset -> dataset``.

Give them to a data module in the order selection, labels, index, pixels, views. They change an
:class:`~datamodules.base.ArrayDataset` without reading or copying an image: what concerns pixels is done when a sample
is fetched. Each has its own seed and leaves the global generators alone.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_methods.core import batches
from lightning_methods.core.checks import check_choice, check_range

from .base import ArrayDataset, check_size, stratified_parts
from .long_tail import class_counts, imbalanced_class_counts, long_tail_indices

__all__ = [
    "Classes",
    "LabelNoise",
    "LongTail",
    "PermutedPixels",
    "PixelNoise",
    "RandomLabels",
    "SoftLabels",
    "SpuriousBackground",
    "SpuriousPatch",
    "Subset",
    "TwoViews",
    "Views",
    "WithIndex",
]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _require_classes(name: str, dataset: ArrayDataset) -> None:
    if not dataset.num_classes or dataset.targets.is_floating_point() or dataset.targets.dim() != 1:
        raise ValueError(f"{name} needs class labels; the targets of this set are not class indices.")


def load_array(path: str | Path | Tensor | np.ndarray | Sequence) -> Tensor:
    """A tensor as it is, or the one in a ``.npy`` or ``.pt`` file (read without running code).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another ending, or the file holds something else than a tensor.
    """
    if not isinstance(path, (str, Path)):
        return torch.as_tensor(path)
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path, allow_pickle=False))
    if path.suffix in (".pt", ".pth"):
        value = torch.load(path, weights_only=True, map_location="cpu")
        if isinstance(value, Tensor):
            return value
        raise ValueError(f"{path} must hold one tensor, got {type(value).__name__}.")
    raise ValueError(f"{path} must end in .npy or .pt.")


# selection


class Subset:
    """Keep part of the samples.

    Args:
        size: number (int) or share (float) of samples; drawn with the classes in proportion.
        per_class: number of samples of every class.
        indices: the rows to keep, in this order; a list, or the path of a ``.npy`` or ``.pt`` file.
        order: "random", or "first" for the first ones of the set.
        seed: seed of the draw.

    Raises:
        ValueError: not exactly one of ``size``, ``per_class`` and ``indices`` is given, or there are fewer samples.
    """

    def __init__(
        self,
        size: int | float | None = None,
        per_class: int | None = None,
        indices: str | Sequence[int] | None = None,
        order: Literal["random", "first"] = "random",
        seed: int = 0,
    ) -> None:
        if sum(option is not None for option in (size, per_class, indices)) != 1:
            raise ValueError("give exactly one of size, per_class and indices.")
        check_size("size", size)
        if size is not None:
            check_range("size", size, 0, low_open=True)
        if per_class is not None:
            check_range("per_class", per_class, 1)
        check_choice("order", order, ("random", "first"))
        self.size = size
        self.per_class = per_class
        self.indices = indices
        self.order = order
        self.seed = seed

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Select rows."""
        return dataset.select(self.rows(dataset))

    def rows(self, dataset: ArrayDataset) -> Tensor:
        """The rows that are kept, int64."""
        n = len(dataset)
        if self.indices is not None:
            rows = load_array(self.indices)
            if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
                raise ValueError(f"indices must be a vector of integers, got {rows.dtype} {list(rows.shape)}.")
            if rows.numel() and (rows.min() < 0 or rows.max() >= n):
                raise ValueError(f"indices must be in 0..{n - 1}, got {int(rows.min())}..{int(rows.max())}.")
            return rows.long()
        if self.per_class is not None:
            _require_classes("per_class", dataset)
            labeled = (dataset.targets >= 0).nonzero().flatten()
            if self.order == "random":
                return labeled[
                    stratified_parts(dataset.targets[labeled], [self.per_class], seed=self.seed, per_class=True)[0]
                ]
            return labeled[_first_of_each_class(dataset.targets[labeled], self.per_class)]
        count = self.size if isinstance(self.size, int) else round(self.size * n)
        if not 1 <= count <= n:
            raise ValueError(f"size={self.size} asks for {count} of {n} samples.")
        if self.order == "first":
            return torch.arange(count)
        return stratified_parts(dataset.targets, [count], seed=self.seed)[0]


def _first_of_each_class(targets: Tensor, k: int) -> Tensor:
    """Rows of the first ``k`` samples of every class, ascending."""
    classes, stratum = targets.unique(return_inverse=True)
    counts = torch.bincount(stratum, minlength=len(classes))
    if (counts < k).any():
        short = int(counts.argmin())
        raise ValueError(f"{k} samples per class were asked, but class {classes[short]} has {counts[short]}.")
    order = torch.argsort(stratum, stable=True)
    rank = torch.arange(len(targets)) - (counts.cumsum(0) - counts)[stratum[order]]
    return order[rank < k].sort().values


class Classes:
    """Keep the samples of some classes.

    Args:
        keep: the classes.
        remap: renumber them 0, 1, ... in the order of ``keep``; else labels and ``num_classes`` stay.

    Raises:
        ValueError: ``keep`` is empty, has repeats, or names a class that does not exist.
    """

    def __init__(self, keep: Sequence[int], remap: bool = False) -> None:
        if len(keep) == 0 or len(set(keep)) != len(keep):
            raise ValueError(f"keep must name different classes, got {list(keep)}.")
        self.keep = tuple(int(k) for k in keep)
        self.remap = remap

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Select the classes."""
        _require_classes("Classes", dataset)
        if min(self.keep) < 0 or max(self.keep) >= dataset.num_classes:
            raise ValueError(f"keep must be in 0..{dataset.num_classes - 1}, got {list(self.keep)}.")
        kept = dataset.select(torch.isin(dataset.targets, torch.tensor(self.keep)).nonzero().flatten())
        if not self.remap:
            return kept
        number = torch.full((dataset.num_classes,), -1)
        number[list(self.keep)] = torch.arange(len(self.keep))
        return kept.replace(targets=number[kept.targets], num_classes=len(self.keep))


class LongTail:
    """Make the class sizes fall off, from ``max_count`` to ``max_count * imbalance_factor``.

    See :func:`~datamodules.long_tail.imbalanced_class_counts` and :func:`~datamodules.long_tail.long_tail_indices`.

    Args:
        imbalance_factor: smallest over largest class, in (0, 1]; an imbalance ratio of 100 is 0.01.
        profile: "exp"; "step": half of the classes are large and half small; "balanced".
        max_count: samples of the largest class; None for the size that the set's smallest class has.
        rounding: of the counts, "floor" or "round".
        class_order: the rank of each class, 0 the most frequent; "random" by ``seed``; None: class k has rank k.
        seed: seed of which samples are kept; None keeps the first ones of each class.

    Raises:
        ValueError: an option is out of range, or a class has too few samples.
    """

    def __init__(
        self,
        imbalance_factor: float = 0.01,
        profile: Literal["exp", "step", "balanced"] = "exp",
        max_count: int | None = None,
        rounding: Literal["floor", "round"] = "floor",
        class_order: Sequence[int] | Literal["random"] | None = None,
        seed: int | None = None,
    ) -> None:
        imbalanced_class_counts(1, max_count or 1, imbalance_factor, profile, rounding)  # checks
        if max_count is not None:
            check_range("max_count", max_count, 1)
        if isinstance(class_order, str):
            check_choice("class_order", class_order, ("random",))
        self.imbalance_factor = imbalance_factor
        self.profile = profile
        self.max_count = max_count
        self.rounding = rounding
        self.class_order = class_order
        self.seed = seed

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Select rows."""
        _require_classes("LongTail", dataset)
        k = dataset.num_classes
        largest = self.max_count
        if largest is None:
            largest = int(class_counts(dataset.targets, k).min())
        counts = imbalanced_class_counts(k, largest, self.imbalance_factor, self.profile, self.rounding)
        order = self.class_order
        if isinstance(order, str):
            order = torch.randperm(k, generator=_generator(self.seed or 0))
        return dataset.select(long_tail_indices(dataset.targets, counts, self.seed, order))


# labels


class LabelNoise:
    """Give a share of the samples a wrong label.

    Exactly ``round(rate * N)`` samples get one. "symmetric" draws it uniformly from the other classes of the set;
    "pairflip" takes the next class. The classes are those that occur in the set.

    Args:
        rate: share of wrong labels, in [0, 1].
        kind: "symmetric" or "pairflip".
        seed: seed of the draw.
    """

    def __init__(self, rate: float, kind: Literal["symmetric", "pairflip"] = "symmetric", seed: int = 0) -> None:
        check_range("rate", rate, 0, 1)
        check_choice("kind", kind, ("symmetric", "pairflip"))
        self.rate = rate
        self.kind = kind
        self.seed = seed

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Change labels; unknown ones stay unknown."""
        _require_classes("LabelNoise", dataset)
        labeled = (dataset.targets >= 0).nonzero().flatten()
        classes, position = dataset.targets[labeled].unique(return_inverse=True)
        k = len(classes)
        if k < 2:
            raise ValueError("LabelNoise needs at least two classes.")
        generator = _generator(self.seed)
        wrong = torch.randperm(len(labeled), generator=generator)[: round(self.rate * len(labeled))]
        step = torch.ones_like(wrong)
        if self.kind == "symmetric":
            step = torch.randint(1, k, wrong.shape, generator=generator)
        targets = dataset.targets.clone()
        targets[labeled[wrong]] = classes[(position[wrong] + step) % k]
        return dataset.replace(targets=targets)


class RandomLabels:
    """Labels that have nothing to do with the samples, uniform over the classes.

    Args:
        num_classes: number of classes; None for that of the set.
        seed: seed of the draw.
    """

    def __init__(self, num_classes: int | None = None, seed: int = 0) -> None:
        if num_classes is not None:
            check_range("num_classes", num_classes, 2)
        self.num_classes = num_classes
        self.seed = seed

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Replace all labels."""
        k = self.num_classes or dataset.num_classes
        if not k:
            raise ValueError("RandomLabels needs num_classes: the targets of this set are not class indices.")
        labels = torch.randint(0, k, (len(dataset),), generator=_generator(self.seed))
        return dataset.replace(targets=labels, num_classes=k)


class SoftLabels:
    """Add stored soft labels; batches become ``SoftLabelBatch``.

    Args:
        path: a ``.npy`` or ``.pt`` file of a float tensor, or the tensor: one row of [C] per sample of the set that the
            modifier is given, or else per raw item of its source.

    Raises:
        ValueError: another shape or number of rows.
    """

    def __init__(self, path: str | Path | Any) -> None:
        self.path = path

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Attach them."""
        soft = load_array(self.path)
        if soft.dim() != 2 or not soft.is_floating_point():
            raise ValueError(
                f"soft labels must be floats of shape [samples, classes], got {soft.dtype} {list(soft.shape)}."
            )
        if dataset.num_classes and soft.shape[1] != dataset.num_classes:
            raise ValueError(f"soft labels must have {dataset.num_classes} columns, got {soft.shape[1]}.")
        if len(soft) != len(dataset):
            if len(soft) != len(dataset.source):
                raise ValueError(
                    f"soft labels must have a row for each of the {len(dataset)} samples or of the "
                    f"{len(dataset.source)} raw items, got {len(soft)} rows."
                )
            soft = soft[dataset.indices]
        return dataset.with_extras(soft_labels=soft).replace(batch_type=batches.SoftLabelBatch)


class WithIndex:
    """Batches tell the row of each sample: ``(x, y)`` becomes ``IndexedBatch``; types with an index stay.

    Raises:
        ValueError: batches are of a type without an index.
    """

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Change the batch type."""
        if dataset.batch_type is None:
            return dataset.replace(batch_type=batches.IndexedBatch)
        if "index" not in dataset.batch_type._fields:
            raise ValueError(f"WithIndex cannot add an index to {dataset.batch_type.__name__}.")
        return dataset


# pixels


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 bits (the finalizer of splitmix64), so that a counter gives independent looking numbers."""

    def shifted(bits: int) -> Tensor:
        return (x >> bits) & ((1 << (64 - bits)) - 1)

    x = (x ^ shifted(30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ shifted(27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ shifted(31)


def counter_normal(keys: Tensor, shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal numbers that are a function of (seed, key, position): noise that is stored without storing it.

    Args:
        keys: one int64 key per sample, [B].
        shape: shape of one sample.
        seed: seed.

    Returns:
        float32 [B, *shape].
    """
    step = 0x9E3779B97F4A7C15 - (1 << 64)
    size = math.prod(shape)
    start = _mix(_mix(torch.tensor(seed, device=keys.device) * step + 1) + keys * step)
    bits = _mix(start[:, None] + torch.arange(1, (size + 1) // 2 + 1, device=keys.device) * step)
    # Box and Muller: two uniform halves of the bits give two normal numbers.
    radius = (((bits >> 32) & 0xFFFFFFFF).float() + 0.5).div_(2.0**32).log_().mul_(-2).clamp_(min=0).sqrt_()
    angle = (bits & 0xFFFFFFFF).float().mul_(2 * math.pi / 2.0**32)
    normal = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
    return normal[:, :size].view(len(keys), *shape)


class PixelNoise:
    """Add Gaussian noise to the pixels; they are not clipped.

    Args:
        std: deviation of the noise, where pixels are in [0, 1].
        fixed: True for noise that belongs to the image, the same in every epoch; False for a new draw each time.
        seed: seed of the fixed noise.
    """

    def __init__(self, std: float, fixed: bool = True, seed: int = 0) -> None:
        check_range("std", std, 0)
        self.std = std
        self.fixed = fixed
        self.seed = seed

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Add the operation."""
        return dataset.with_pixel_op(self.apply)

    def apply(self, x: Tensor, dataset: ArrayDataset, rows: Tensor) -> Tensor:
        """Add noise to a batch."""
        noise = counter_normal(dataset.indices[rows], x.shape[1:], self.seed) if self.fixed else torch.randn_like(x)
        return x + self.std * noise


class PermutedPixels:
    """Put the pixels of every image into one random order; the channels of a pixel stay together.

    Args:
        seed: seed of the permutation.
        cumulative: permute on top of a permutation that the set has already; else replace it.
    """

    def __init__(self, seed: int = 0, cumulative: bool = False) -> None:
        self.seed = seed
        self.cumulative = cumulative

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Add the operation."""
        if not self.cumulative:
            others = tuple(op for op in dataset.pixel_ops if not isinstance(op, _Permute))
            dataset = dataset.replace(pixel_ops=others)
        return dataset.with_pixel_op(_Permute(self.seed))


class _Permute:
    """The permutation of :class:`PermutedPixels`; drawn for the size of the first batch and then fixed to it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._order: Tensor | None = None

    def __call__(self, x: Tensor, dataset: ArrayDataset, rows: Tensor) -> Tensor:
        pixels = x.flatten(2) if x.dim() >= 4 else x.flatten(1)
        if self._order is None:
            self._order = torch.randperm(pixels.shape[-1], generator=_generator(self.seed))
        if len(self._order) != pixels.shape[-1]:
            raise ValueError(
                f"PermutedPixels needs images of one size, got {len(self._order)} and {pixels.shape[-1]} pixels."
            )
        return pixels[..., self._order].view_as(x)


def _spurious_attributes(targets: Tensor, k: int, correlation: float, generator: torch.Generator) -> Tensor:
    """Attributes in 0 .. k-1 that equal the label with this probability and are else uniform over the others."""
    agrees = torch.rand(len(targets), generator=generator) < correlation
    other = (targets + torch.randint(1, k, targets.shape, generator=generator)) % k
    return torch.where(agrees, targets, other)


def _palette(k: int) -> list[list[float]]:
    """Colours that are easy to tell apart: the two of the two-class problem, else evenly spaced hues."""
    if k == 2:
        return [[0.1, 0.6, 0.3], [0.3, 0.1, 0.7]]
    return [list(colorsys.hsv_to_rgb(i / k, 0.85, 0.7)) for i in range(k)]


class _Spurious:
    """Shared by background and patch: draws the attribute and sets the batch type."""

    def __init__(self, correlation: float, seed: int) -> None:
        check_range("correlation", correlation, 0, 1)
        self.correlation = correlation
        self.seed = seed

    def _attributes(self, dataset: ArrayDataset, generator: torch.Generator) -> Tensor:
        _require_classes(type(self).__name__, dataset)
        if dataset.num_classes < 2:
            raise ValueError(f"{type(self).__name__} needs at least two classes.")
        return _spurious_attributes(dataset.targets, dataset.num_classes, self.correlation, generator)

    def _finish(self, dataset: ArrayDataset, **extras: Tensor) -> ArrayDataset:
        dataset = dataset.with_extras(**extras)
        if dataset.batch_type is None or dataset.batch_type is batches.IndexedBatch:
            dataset = dataset.replace(batch_type=batches.GroupBatch)
        return dataset


class SpuriousBackground(_Spurious):
    """Put dark images on a coloured background whose colour goes with the label; batches become ``GroupBatch``.

    ``x = image + (1 - image) * (colour + jitter) + noise``; a grey image becomes a colour image, values are not
    clipped. Every image keeps its colour, jitter and noise. The colour's index is the ``group``.

    Args:
        correlation: probability that colour and label agree; else the colour is one of the others, uniformly.
        noise: deviation of the pixel noise.
        colors: one RGB triple in [0, 1] per class; None for a default palette.
        jitter: deviation of the colour of each image, per channel.
        seed: seed of colours, jitter and noise.
    """

    def __init__(
        self,
        correlation: float = 0.9,
        noise: float = 0.15,
        colors: Sequence[Sequence[float]] | None = None,
        jitter: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(correlation, seed)
        check_range("noise", noise, 0)
        check_range("jitter", jitter, 0)
        if colors is not None and any(len(color) != 3 for color in colors):
            raise ValueError(f"colors must be RGB triples, got {colors}.")
        self.noise = noise
        self.colors = None if colors is None else [list(color) for color in colors]
        self.jitter = jitter

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Draw the attributes and add the operation."""
        generator = _generator(self.seed)
        group = self._attributes(dataset, generator)
        palette = torch.tensor(self.colors or _palette(dataset.num_classes))
        if len(palette) != dataset.num_classes:
            raise ValueError(
                f"colors must have one colour for each of {dataset.num_classes} classes, got {len(palette)}."
            )
        colors = palette[group] + self.jitter * torch.randn(len(dataset), 3, generator=generator)
        return self._finish(dataset, group=group, background=colors).with_pixel_op(self.apply)

    def apply(self, x: Tensor, dataset: ArrayDataset, rows: Tensor) -> Tensor:
        """Colour a batch [B, 1 or 3, H, W]."""
        if x.dim() != 4 or x.shape[1] not in (1, 3):
            raise ValueError(f"SpuriousBackground needs images [B, 1 or 3, H, W], got {list(x.shape)}.")
        x = x + (1 - x) * dataset.extras["background"][rows][:, :, None, None]
        return x + self.noise * counter_normal(dataset.indices[rows], x.shape[1:], self.seed)


class SpuriousPatch(_Spurious):
    """Paste a small square that goes with the label into every image; batches become ``GroupBatch``.

    The attribute is the square's colour (its brightness in grey images) and the ``group``.

    Args:
        correlation: probability that attribute and label agree; else it is one of the others, uniformly.
        size: side of the square in pixels.
        position: "corner" (upper left), "center", or "random" (anywhere, fixed for each image).
        seed: seed of attributes and places.
    """

    def __init__(
        self,
        correlation: float = 0.9,
        size: int = 4,
        position: Literal["corner", "center", "random"] = "corner",
        seed: int = 0,
    ) -> None:
        super().__init__(correlation, seed)
        check_range("size", size, 1)
        check_choice("position", position, ("corner", "center", "random"))
        self.size = size
        self.position = position

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Draw the attributes and add the operation."""
        generator = _generator(self.seed)
        group = self._attributes(dataset, generator)
        place = torch.rand(len(dataset), 2, generator=generator)
        if self.position != "random":
            place = torch.full_like(place, 0.0 if self.position == "corner" else 0.5)
        return self._finish(dataset, group=group, patch_place=place).with_pixel_op(self.apply)

    def apply(self, x: Tensor, dataset: ArrayDataset, rows: Tensor) -> Tensor:
        """Paste the squares into a batch [B, C, H, W]."""
        if x.dim() != 4 or min(x.shape[2:]) < self.size:
            raise ValueError(
                f"SpuriousPatch needs images [B, C, H, W] of at least {self.size} pixels, got {list(x.shape)}."
            )
        k = dataset.num_classes
        colors = torch.tensor(_palette(k)) if x.shape[1] == 3 else (torch.arange(k)[:, None] + 1.0) / k
        ink = colors[dataset.extras["group"][rows]]
        room = torch.tensor(x.shape[2:]) - self.size
        top_left = (dataset.extras["patch_place"][rows] * (room + 1)).long().minimum(room)
        inside = [
            (torch.arange(length) >= start[:, None]) & (torch.arange(length) < start[:, None] + self.size)
            for length, start in zip(x.shape[2:], top_left.T, strict=True)
        ]
        mask = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return torch.where(mask, ink[:, :, None, None].to(x.dtype), x)


# views


class TwoViews:
    """Two independent draws of one transform; batches become ``TwoViewBatch``.

    Args:
        transform: random transform of an image.
    """

    def __init__(self, transform: Callable) -> None:
        self.transform = transform

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Change the views."""
        views = {"view1": self.transform, "view2": self.transform}
        return dataset.replace(transforms=views, batch_type=batches.TwoViewBatch)


_VIEW_TYPES = {frozenset(("clean", "weak", "strong")): "MultiViewBatch", frozenset(("view1", "view2")): "TwoViewBatch"}


class Views:
    """Several named views of every image, each with its own transform.

    Args:
        batch_type: the ``NamedTuple`` class of a batch, or its name in ``lightning_methods.core.batches``; None finds
        it by
            the views' names: clean, weak and strong give ``MultiViewBatch``.
        **transforms: one transform per view.

    Raises:
        ValueError: no batch type is known for these names, or it lacks a field for one of them.
    """

    def __init__(self, batch_type: str | type | None = None, **transforms: Callable | None) -> None:
        if batch_type is None:
            batch_type = _VIEW_TYPES.get(frozenset(transforms))
            if batch_type is None:
                raise ValueError(f"no batch type has the views {', '.join(transforms) or '(none)'}: give batch_type.")
        if isinstance(batch_type, str):
            check_choice("batch_type", batch_type, batches.__all__)
            batch_type = getattr(batches, batch_type)
        missing = set(transforms) - set(batch_type._fields)
        if missing:
            raise ValueError(f"{batch_type.__name__} has no field for the views {', '.join(sorted(missing))}.")
        self.batch_type = batch_type
        self.transforms = transforms

    def __call__(self, dataset: ArrayDataset) -> ArrayDataset:
        """Change the views."""
        return dataset.replace(transforms=dict(self.transforms), batch_type=self.batch_type)
