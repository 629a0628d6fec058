"""Several random views of an image: pipelines by name, data modules for two views and for clean, weak, strong views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

from lightning_methods.core.checks import check_choice, check_range, check_same_rows, check_shape

from .base import ArrayDataset, BaseDataModule
from .modifiers import TwoViews, Views
from .transforms import (
    Chain,
    Clip,
    Cutout,
    RandomAffineNoise,
    RandomColor,
    RandomFactorResizedCrop,
    RandomResizedCrop,
    Resize,
    Standardize,
    StrongAugment,
)

__all__ = [
    "Cutout",
    "MultiViewDataModule",
    "RandomFactorResizedCrop",
    "StrongAugment",
    "TwoViewDataModule",
    "build_transform",
    "render_shapes",
]

AUGMENTATIONS = ("crop", "cifar", "moco_v2", "simclr", "simclr_hypersphere", "digits")


# pipelines


def build_transform(
    name: Literal["crop", "cifar", "moco_v2", "simclr", "simclr_hypersphere", "digits"],
    size: int,
    channels: int = 3,
    *,
    scale: tuple[float, float] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    batched: bool = True,
) -> Callable:
    """A random augmentation by name, ending in a float tensor [channels, size, size].

    * "crop": crop (.08, 1), mirror: the usual training of classifiers and linear probes;
    * "cifar": crop (.08, 1), mirror, jitter (.4, .4, .2, .1) p .8, grey p .2, blur p .5, solarize p .2;
    * "moco_v2": crop (.08, 1), jitter (.4, .4, .4, .1) p .8, grey p .2, blur p .5, mirror;
    * "simclr": crop (.08, 1), mirror, jitter (.8, .8, .8, .2) s p .8, grey p .2, blur p .5; below 64 pixels s = .5 and
      no blur, as the authors do on CIFAR, else s = 1;
    * "simclr_hypersphere": crop (.2, 1), mirror, jitter (.4, .4, .4, .4) always, grey p .2;
    * "digits": rotation by up to 15 degrees, shift by up to an eighth, scale .85 to 1.15, brightness .7 to 1.3,
      noise .1; no mirror images.

    Jitter is brightness, contrast, saturation and hue; the deviation of the blur is uniform in (.1, 2) pixels.

    Args:
        name: the name.
        size: height and width.
        channels: 3, or 1 for grey images, where what concerns colour has no effect.
        scale: smallest and largest share of the area that a crop takes, instead of the name's own.
        mean: mean of the channels; None for no normalisation.
        std: deviation of the channels.
        batched: True for a transform of float tensors [B, channels, H, W] in [0, 1], each image with its own draw, as
            data sets in memory use it; False for one of single images of any size: PIL, or tensors [channels, H, W].

    Returns:
        The transform; its attribute ``batched`` tells data sets how to call it.
    """
    check_choice("name", name, AUGMENTATIONS)
    check_range("size", size, 1)
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}.")
    if (mean is None) != (std is None):
        raise ValueError("give both mean and std, or none of them.")
    if scale is not None and not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"scale must be shares 0 < smallest <= largest <= 1, got {scale}.")
    if scale is not None and name == "digits":
        raise ValueError("scale is of crops; the digits pipeline has none.")
    normalize = None if mean is None else Standardize(mean, std)
    if name == "digits":
        return Chain(Resize(size), RandomAffineNoise(15.0, 0.125, 0.15, brightness=0.3, noise=0.1), normalize)
    s = 1.0 if size >= 64 else 0.5
    color = {
        "crop": None,
        "cifar": RandomColor((0.4, 0.4, 0.2, 0.1), blur_p=0.5, solarize_p=0.2),
        "moco_v2": RandomColor((0.4, 0.4, 0.4, 0.1), blur_p=0.5),
        "simclr": RandomColor((0.8 * s, 0.8 * s, 0.8 * s, 0.2 * s), blur_p=0.5 if size >= 64 else 0.0),
        "simclr_hypersphere": RandomColor((0.4, 0.4, 0.4, 0.4), jitter_p=1.0),
    }[name]
    smallest = (0.2, 1.0) if name == "simclr_hypersphere" else (0.08, 1.0)
    interpolation = "bicubic" if name == "cifar" else "bilinear"
    return Chain(*_crop(size, batched, scale or smallest, interpolation), color, normalize)


def _crop(
    size: int, batched: bool, scale: tuple[float, float] = (0.08, 1.0), interpolation: str = "bilinear"
) -> list[Callable]:
    """A random resized crop and mirror image: of a batch, or of one image of any size and kind."""
    if batched:
        # Bicubic weights overshoot; images stay in [0, 1].
        clip = [Clip()] if interpolation == "bicubic" else []
        return [RandomResizedCrop(size, scale, interpolation=interpolation), *clip]
    mode = InterpolationMode(interpolation)
    steps = [v2.RandomResizedCrop(size, scale=scale, interpolation=mode), v2.RandomHorizontalFlip()]
    return [v2.Compose([*steps, *to_float()]), Clip()]


def to_float() -> list[nn.Module]:
    """Steps that make a float tensor in [0, 1] of a PIL image or a tensor."""
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()]


# drawn images


def render_shapes(
    shape: Tensor,
    color: Tensor,
    radius: Tensor,
    center: Tensor,
    angle: Tensor | None = None,
    size: int = 32,
) -> Tensor:
    """Draw one coloured shape per image on black, with smooth edges.

    Args:
        shape: 0 disk, 1 square, 2 triangle, 3 cross; int64 [N].
        color: RGB in [0, 1], [N, 3].
        radius: half the size of the shape as a share of the side, [N].
        center: its place (x, y) in [0, 1], [N, 2].
        angle: its turn in radians, [N]; None for upright.
        size: height and width in pixels.

    Returns:
        float32 [N, 3, size, size] in [0, 1].
    """
    n = check_same_rows(shape=shape, color=color, radius=radius, center=center)
    check_shape("color", color, "images rgb", rgb=3)
    check_shape("center", center, "images xy", xy=2)
    if n and (shape.min() < 0 or shape.max() > 3):
        raise ValueError(f"shape must be in 0..3, got {int(shape.min())}..{int(shape.max())}.")
    pixel = (torch.arange(size, device=color.device) + 0.5) / size
    # Coordinates in the frame of the shape, in units of its radius.
    dx = pixel[None, None, :] - center[:, 0, None, None]
    dy = pixel[None, :, None] - center[:, 1, None, None]
    turn = torch.zeros_like(radius) if angle is None else angle
    cos, sin = turn.cos()[:, None, None], turn.sin()[:, None, None]
    u = (cos * dx + sin * dy) / radius[:, None, None]
    v = (cos * dy - sin * dx) / radius[:, None, None]
    # How far a pixel is outside (negative: inside), per shape.
    disk = torch.hypot(u, v) - 1
    square = torch.maximum(u.abs(), v.abs()) - 0.85
    triangle = torch.maximum(v - 0.5, 0.8660254 * u.abs() - 0.5 * v - 0.5)
    cross = torch.maximum(torch.minimum(u.abs(), v.abs()) - 0.3, torch.maximum(u.abs(), v.abs()) - 1)
    distance = torch.stack([disk, square, triangle, cross], dim=1)[torch.arange(n), shape]
    coverage = (0.5 - distance * radius[:, None, None] * size).clamp(0, 1)
    return (coverage[:, None] * color[:, :, None, None]).float()


# data modules


def make_dataset(name: str | BaseDataModule, **options: Any) -> BaseDataModule:
    """An image data module by name; one that is given passes through.

    Args:
        name: "digits", "cifar10", "cifar20", "cifar100", "stl10", "imagefolder", "tinyimagenet" or "synthetic_shapes".
        **options: arguments; ``class_ids`` and ``image_size`` count only where they are not None.
    """
    if isinstance(name, BaseDataModule):
        return name
    from . import vision as sets

    check_choice("dataset", name, DATASETS)
    options = {key: value for key, value in options.items() if value is not None}
    if "class_ids" in options and name not in ("imagefolder", "tinyimagenet"):
        raise ValueError(f"class_ids names folders; {name!r} has none.")
    if name in ("cifar10", "cifar20", "cifar100", "stl10"):
        return sets.TorchvisionDataModule(name, **options)
    kind = {
        "digits": sets.DigitsDataModule,
        "imagefolder": sets.ImageFolderDataModule,
        "tinyimagenet": sets.TinyImageNetDataModule,
        "synthetic_shapes": sets.SyntheticShapesDataModule,
    }[name]
    return kind(**options)


DATASETS = ("digits", "cifar10", "cifar20", "cifar100", "stl10", "imagefolder", "tinyimagenet", "synthetic_shapes")


class _ViewsDataModule(BaseDataModule):
    """Another data module's images under several views: its splits and formats, our views."""

    dataset: BaseDataModule

    def _adopt(self, dataset: BaseDataModule) -> None:
        from .vision import DigitsDataModule

        self.dataset = dataset
        self.is_digits = isinstance(dataset, DigitsDataModule)
        self.in_memory = self.is_digits or getattr(dataset, "in_memory", False)
        self.downloads = dataset.downloads
        self.available_splits = dataset.available_splits
        self.classes = dataset.classes
        self.val_per_class = dataset.val_per_class
        self.test_per_class = dataset.test_per_class

    def _with_transform(self, dataset: ArrayDataset, training: bool) -> ArrayDataset:
        return self.add_views(dataset) if training else super()._with_transform(dataset, training)

    def add_views(self, dataset: ArrayDataset) -> ArrayDataset:
        """Give the training set its views; everything is measured at this time."""
        raise NotImplementedError

    def _complete(self, transform: Callable, *last: nn.Module | None) -> Callable:
        """A view's transform with the set's normalisation."""
        if self.is_digits:
            return self.dataset.finish_view(Chain(transform, *last))
        return Chain(transform, getattr(self.dataset, "normalizer", lambda: None)(), *last)

    def fetch(self) -> None:
        """Download the set, if it can be."""
        self.dataset.fetch()

    def load_split(self, split: str) -> ArrayDataset | None:
        """A part of the set."""
        part = self.dataset.load_split(split)
        self.default_val_size = self.dataset.default_val_size
        self.default_test_size = self.dataset.default_test_size
        return part

    def fit_transforms(self, train: ArrayDataset) -> None:
        """Let the set measure what its own transform needs."""
        self.dataset._parts = self._parts
        self.dataset.fit_transforms(train)
        self._parts = self.dataset._parts

    def fit_pixels(self, train: ArrayDataset) -> None:
        """Let the set measure what its own transform needs."""
        self.dataset.fit_pixels(train)

    def default_eval_transform(self) -> Callable | None:
        """That of the set."""
        return self.dataset.make_transform(training=False)


class TwoViewDataModule(_ViewsDataModule):
    """Two random views of every training image, as ``TwoViewBatch``.

    Validation and test give ``(x, y)`` without augmentation.
    ``memory_dataloader()`` gives the training images without augmentation, for neighbours and probes. Normalisation is
    the set's own; digits and other sets in [0, 1] stay there.

    Args:
        dataset: "digits", "cifar10", "cifar20", "cifar100", "stl10" (training images and, by default, the unlabeled
            ones), "imagefolder", "tinyimagenet", "synthetic_shapes", or an image data module.
        augmentation: name of :func:`build_transform`, or a transform of an image; None for "digits" on digits and
            "cifar" elsewhere.
        image_size: height and width; None for the set's own.
        crop_scale: smallest and largest area of a crop, instead of the augmentation's own.
        normalize: (mean, std) instead of the set's own, or False.
        class_ids: class folders of an image folder.
        val_fraction: share of the training images that is held out for validation; where the set has no test split of
            its own, also for the test, and then a quarter unless sizes are given.
        splits: parts of the set to train on; None for all of STL10's training images, and "train" elsewhere.
        drop_last: whether an incomplete last training batch is left out.
        **kwargs: arguments of :class:`BaseDataModule`.
    """

    def __init__(
        self,
        dataset: str | BaseDataModule = "digits",
        augmentation: str | Callable | None = None,
        image_size: int | None = None,
        crop_scale: tuple[float, float] | None = None,
        normalize: bool | tuple[Sequence[float], Sequence[float]] | None = None,
        class_ids: Sequence[str] | None = None,
        val_fraction: float | None = None,
        splits: str | None = None,
        drop_last: bool = True,
        **kwargs: Any,
    ) -> None:
        if isinstance(augmentation, str):
            check_choice("augmentation", augmentation, AUGMENTATIONS)
        options = {key: kwargs[key] for key in ("root", "seed", "download") if key in kwargs}
        given = {"image_size": image_size, "normalize": normalize, "class_ids": class_ids}
        if isinstance(dataset, BaseDataModule) and any(value is not None for value in given.values()):
            raise ValueError("image_size, normalize and class_ids are options of the dataset that is given.")
        inner = make_dataset(dataset, **options, **given)
        self._adopt(inner)
        if splits is None:
            splits = "train+unlabeled" if dataset == "stl10" else "train"
        super().__init__(splits=splits, drop_last=drop_last, **kwargs)
        if val_fraction is not None:
            check_range("val_fraction", val_fraction, 0, 1, low_open=True, high_open=True)
            if self.val_size is not None or self.test_size is not None:
                raise ValueError("val_fraction stands for val_size and test_size: give one of them.")
        self.val_fraction = val_fraction
        self.augmentation = augmentation
        self.crop_scale = crop_scale
        if augmentation is None or isinstance(augmentation, str):
            name = augmentation or ("digits" if self.is_digits else "cifar")
            channels = inner.channels if self.is_digits else len(inner.mean)
            self._view = build_transform(name, _size(inner), channels, scale=crop_scale, batched=self.in_memory)
        elif crop_scale is not None:
            raise ValueError("crop_scale is of an augmentation that is given by name.")

    def add_views(self, dataset: ArrayDataset) -> ArrayDataset:
        """Two draws of the augmentation; one that was given as a callable is not normalised after it."""
        if callable(self.augmentation):
            return TwoViews(self.dataset.finish_view(self.augmentation))(dataset)
        return TwoViews(self._complete(self._view))(dataset)

    def _sizes(self, pool: ArrayDataset, *, test: bool, val: bool) -> dict[str, Any]:
        if self.val_size is self.test_size is None and not (self.val_per_class or self.test_per_class):
            if test and val:  # one part is held out; validation and test both see it
                self.val_size, self.test_size = 0, 0.25 if self.val_fraction is None else self.val_fraction
            elif val:
                self.val_size = self.val_fraction
        return super()._sizes(pool, test=test, val=val)


def _size(dataset: BaseDataModule) -> int:
    """Height and width of what a data module gives."""
    return getattr(dataset, "size", None) or dataset.image_size


class MultiViewDataModule(_ViewsDataModule):
    """A clean, a weak and a strong view of every training image (``MultiViewBatch``), for clustering and self-training.

    By default all images, also those of the test split, are for training and for evaluation, which sees them clean as
    ``(x, y)``: the protocol of clustering, where labels are only looked at in evaluation.

    Clean: the set's evaluation transform. Weak: random resized crop and mirror image. Strong: random resized crop and
    mirror image, ``num_strong_ops`` operations of :class:`StrongAugment`, normalisation, one cut-out square. Digits are
    turned, shifted, scaled instead (strongly: twice as much) and, in the strong view, get another brightness and noise.

    Args:
        dataset: "digits", "cifar10", "cifar20", "cifar100", "stl10", "imagefolder", "tinyimagenet", "synthetic_shapes",
            or an image data module.
        size: height and width; None for the set's own.
        cutout: longest side of the square, 0 for none; None for 32 or half of the size, if that is less, and 0 on
            digits.
        num_strong_ops: operations in the strong view.
        strong: "scan" for :class:`StrongAugment`, "randaugment" for torchvision's RandAugment with as many operations.
        normalize: (mean, std) instead of the set's own, or False.
        class_ids: class folders of an image folder; labels follow this order.
        splits: parts of the set to train on; with "test" among them evaluation sees the same images.
        drop_last: whether an incomplete last training batch is left out.
        **kwargs: arguments of :class:`BaseDataModule`.
    """

    def __init__(
        self,
        dataset: str | BaseDataModule = "digits",
        size: int | None = None,
        cutout: int | None = None,
        num_strong_ops: int = 4,
        strong: Literal["scan", "randaugment"] = "scan",
        normalize: bool | tuple[Sequence[float], Sequence[float]] | None = None,
        class_ids: Sequence[str] | None = None,
        splits: str = "train+test",
        drop_last: bool = True,
        **kwargs: Any,
    ) -> None:
        check_choice("strong", strong, ("scan", "randaugment"))
        check_range("num_strong_ops", num_strong_ops, 0)
        if cutout is not None:
            check_range("cutout", cutout, 0)
        options = {key: kwargs[key] for key in ("root", "seed", "download") if key in kwargs}
        given = {"image_size": size, "normalize": normalize, "class_ids": class_ids}
        if isinstance(dataset, BaseDataModule) and any(value is not None for value in given.values()):
            raise ValueError("size, normalize and class_ids are options of the dataset that is given.")
        inner = make_dataset(dataset, **options, **given)
        self._adopt(inner)
        super().__init__(splits=splits, drop_last=drop_last, **kwargs)
        self.num_strong_ops = num_strong_ops
        self.strong = strong
        self.size = _size(inner)
        if cutout is None:
            cutout = 0 if self.is_digits else min(32, self.size // 2)
        self.cutout = cutout

    def add_views(self, dataset: ArrayDataset) -> ArrayDataset:
        """The three views."""
        clean = self.make_transform(training=False)
        return Views(clean=clean, weak=self.weak_transform(), strong=self.strong_transform())(dataset)

    def weak_transform(self) -> Callable:
        """The weak view."""
        if self.is_digits:
            return self._complete(RandomAffineNoise(degrees=10.0, translate=0.125, scale=0.1))
        return self._complete(Chain(*_crop(self.size, self.in_memory)))

    def strong_transform(self) -> Callable:
        """The strong view."""
        cut = Cutout(self.cutout) if self.cutout else None
        if self.is_digits:
            affine = RandomAffineNoise(degrees=20.0, translate=0.125, scale=0.2, brightness=0.3, noise=0.1)
            return self._complete(affine, cut)
        if self.strong == "scan":
            return self._complete(Chain(*_crop(self.size, self.in_memory), StrongAugment(self.num_strong_ops)), cut)
        strong = v2.Compose([v2.ToDtype(torch.uint8, scale=True), v2.RandAugment(self.num_strong_ops), *to_float()])
        return self._complete(Chain(*_crop(self.size, batched=False), strong), cut)
