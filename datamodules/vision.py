"""Images: digits, the sets of torchvision, image folders, lists and tables of images, distilled sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_methods.core.checks import check_choice, check_range

from .base import ArrayDataset, BaseDataModule
from .modifiers import SpuriousBackground, Subset

__all__ = ["DigitsDataModule", "SpuriousDigitsDataModule"]


# transforms of whole batches


class Standardize(nn.Module):
    """Subtract a mean and divide by a deviation; both broadcast against [B, C, H, W]."""

    batched = True

    def __init__(self, mean: Any, std: Any) -> None:
        super().__init__()
        self.mean = torch.as_tensor(mean, dtype=torch.float32)
        self.std = torch.as_tensor(std, dtype=torch.float32)
        if self.mean.dim() == 1:
            self.mean, self.std = self.mean[:, None, None], self.std[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        """Standardise, [B, ...]."""
        return (x - self.mean) / self.std


class ScaleToNorm(nn.Module):
    """Subtract a mean and scale every sample to one Euclidean norm (a zero sample stays zero)."""

    batched = True

    def __init__(self, mean: Tensor, norm: float) -> None:
        super().__init__()
        self.mean = mean
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


class Chain:
    """Transforms one after the other; works on batches if all of them do, else on single samples."""

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


# digits


class DigitsDataModule(BaseDataModule):
    """Scikit-learn's 1797 digits of 8x8 pixels: no download, [1, 8, 8] floats in [0, 1] (pixels / 16).

    Without sizes 60 % train, 20 % are for validation and 20 % for the test. ``splits="train+test"`` trains and
    evaluates on all of them. A ``train_transform`` or ``eval_transform`` gets float tensors; ``normalize`` and
    ``flatten`` come after it.

    Args:
        normalize: False for pixels in [0, 1]; True for one mean and deviation over all pixels of the training part;
            "standardize" for one per pixel (constant pixels become 0); a number centres by the mean training image and
            scales every image to this norm.
        flatten: vectors [64] instead of images.
        image_size: bilinear resize to this height and width.
        channels: 1, or 3 for copies of the grey channel.
        classes: keep these digits in all splits; labels stay.
        images_per_class: random training images per class; None for all.
        val_per_class: validation images per class, instead of ``val_size``.
        test_per_class: test images per class, instead of ``test_size``.
        **kwargs: arguments of :class:`BaseDataModule`.
    """

    available_splits = ("train", "val", "test")

    def __init__(
        self,
        normalize: bool | Literal["standardize"] | float = False,
        flatten: bool = False,
        image_size: int = 8,
        channels: int = 1,
        classes: Sequence[int] | None = None,
        images_per_class: int | None = None,
        val_per_class: int | None = None,
        test_per_class: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(normalize, str):
            check_choice("normalize", normalize, ("standardize",))
        elif not isinstance(normalize, bool):
            check_range("normalize", normalize, 0, low_open=True)
        check_range("image_size", image_size, 1)
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {channels}.")
        for name, value in (
            ("images_per_class", images_per_class),
            ("val_per_class", val_per_class),
            ("test_per_class", test_per_class),
        ):
            if value is not None:
                check_range(name, value, 1)
        self.normalize = normalize
        self.flatten = flatten
        self.image_size = image_size
        self.channels = channels
        self.classes = classes
        self.val_per_class = val_per_class
        self.test_per_class = test_per_class
        self.images_per_class = images_per_class
        if images_per_class is not None:
            self.modifiers = (Subset(per_class=images_per_class, seed=self.seed), *self.modifiers)
        self._normalizer: nn.Module | None = None

    def load_split(self, split: str) -> ArrayDataset | None:
        """All digits as the training part; validation and test are taken out of it."""
        if split != "train":
            return None
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
        if self.image_size != 8:
            images = F.interpolate(images, size=(self.image_size, self.image_size), mode="bilinear", antialias=True)
        return ArrayDataset(images.repeat(1, self.channels, 1, 1), digits.target, num_classes=10)

    def fit_pixels(self, train: ArrayDataset) -> None:
        """Measure mean and deviation of the training pixels."""
        if self.normalize is False:
            return
        pixels = train.items(torch.arange(len(train)))
        if self.normalize is True:
            self._normalizer = Standardize(pixels.mean(), pixels.std())
        elif self.normalize == "standardize":
            std = pixels.std(dim=0, correction=0)
            self._normalizer = Standardize(pixels.mean(dim=0), torch.where(std > 0, std, 1.0))
        else:
            self._normalizer = ScaleToNorm(pixels.mean(dim=0), self.normalize)

    def make_transform(self, training: bool) -> Callable | None:
        """The given transform, then normalisation and flattening."""
        chain = Chain(super().make_transform(training), self._normalizer, Flatten() if self.flatten else None)
        return chain if chain.transforms else None


class SpuriousDigitsDataModule(DigitsDataModule):
    """Digits on a coloured background that goes with the label in training but not in evaluation.

    The label is whether the digit is at least 5; the background colour equals it with probability ``correlation`` in
    training and .5 in validation and test. Batches are ``GroupBatch`` with the colour as the group; images [3, 8, 8].

    Args:
        correlation: probability that colour and label agree in training.
        noise: deviation of the pixel noise.
        **kwargs: arguments of :class:`DigitsDataModule`.
    """

    def __init__(self, correlation: float = 0.9, noise: float = 0.15, **kwargs: Any) -> None:
        super().__init__(channels=3, **kwargs)
        self.correlation = correlation
        self.noise = noise
        self.modifiers = (SpuriousBackground(correlation, noise, seed=self.seed), *self.modifiers)
        self.eval_modifiers = (SpuriousBackground(0.5, noise, seed=self.seed + 1), *self.eval_modifiers)

    def load_split(self, split: str) -> ArrayDataset | None:
        """The digits with the label digit >= 5."""
        digits = super().load_split(split)
        if digits is None:
            return None
        return digits.replace(targets=(digits.targets >= 5).long(), num_classes=2)
