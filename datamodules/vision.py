"""Images: digits, the sets of torchvision, image folders, lists and tables of images, distilled sets."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning import LightningDataModule
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset
from torchvision.datasets.utils import download_and_extract_archive
from torchvision.transforms import v2

from lightning_methods.core.batches import GroupBatch, SoftLabelBatch
from lightning_methods.core.checks import check_choice, check_range, nearest
from lightning_methods.core.io import safe_unpickle

from .base import ArrayDataset, BaseDataModule
from .modifiers import LongTail, SpuriousBackground, Subset
from .transforms import ZCA, Chain, Flatten, RandomCropFlip, RandomFactorResizedCrop, Resize, ScaleToNorm, Standardize
from .views import render_shapes, to_float

__all__ = [
    "CIFARDataModule",
    "DigitsDataModule",
    "DigitsLTDataModule",
    "DistilledDataModule",
    "ImageDataModule",
    "ImageFiles",
    "ImageFolderDataModule",
    "ImageNetDataModule",
    "ImageTableDataModule",
    "SpuriousDigitsDataModule",
    "SyntheticShapesDataModule",
    "TinyImageNetDataModule",
    "TorchvisionDataModule",
    "WaterbirdsDataModule",
]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# digits


class DigitsDataModule(BaseDataModule):
    """Scikit-learn's 1797 digits of 8x8 pixels: no download, [1, 8, 8] floats in [0, 1] (pixels / 16).

    Without sizes 60 % train, 20 % are for validation and 20 % for the test. ``splits="train+test"`` trains and
    evaluates on all of them. A ``train_transform`` or ``eval_transform`` gets float tensors; ``normalize`` and
    ``flatten`` come after it, and after the transforms of views.

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
        elif not isinstance(normalize, (bool, int, float)):
            raise ValueError(f"normalize must be true, false, 'standardize' or a norm, got {normalize!r}.")
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

    def normalizer(self) -> nn.Module | None:
        """The normalisation of float images, or None; ready after ``setup``."""
        return self._normalizer

    def finish_view(self, transform: Callable | None) -> Callable | None:
        """Normalisation and flattening follow every transform."""
        chain = Chain(transform, self._normalizer, Flatten() if self.flatten else None)
        return chain if chain.transforms else None


class DigitsLTDataModule(DigitsDataModule):
    """Digits with a long-tailed training part; validation and test are balanced.

    60 images of each class are for the test and 10 for validation; the others are cut down to 100, 65, ..., 2.

    Args:
        imbalance_factor: smallest over largest class, in (0, 1].
        profile: "exp", "step" or "balanced", see :class:`LongTail`.
        max_count: training images of the most frequent digit.
        rounding: of the counts, "floor" or "round".
        class_order: the rank of each digit, 0 the most frequent; "random" by ``seed``; None: digit k has rank k.
        val_per_class: validation images per class.
        test_per_class: test images per class.
        **kwargs: arguments of :class:`DigitsDataModule`.
    """

    def __init__(
        self,
        imbalance_factor: float = 0.02,
        profile: Literal["exp", "step", "balanced"] = "exp",
        max_count: int = 100,
        rounding: Literal["floor", "round"] = "round",
        class_order: Sequence[int] | Literal["random"] | None = None,
        val_per_class: int = 10,
        test_per_class: int = 60,
        **kwargs: Any,
    ) -> None:
        super().__init__(val_per_class=val_per_class, test_per_class=test_per_class, **kwargs)
        tail = LongTail(imbalance_factor, profile, max_count, rounding, class_order, self.seed)
        self.modifiers = (tail, *self.modifiers)


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


# images in general


class ImageFiles:
    """Image files by position, read as RGB when asked for; the paths take little memory even for millions of them."""

    def __init__(self, paths: Sequence[str | os.PathLike]) -> None:
        self._paths = np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, row: int) -> str:
        """The path of a file."""
        return os.fsdecode(self._paths[row])

    def __getitem__(self, row: int) -> Image.Image:
        with Image.open(self.path(row)) as image:
            return image.convert("RGB")


class ImageDataModule(BaseDataModule):
    """Base of the image sets: normalisation, the usual augmentation, sizes.

    Images of one small size are kept in memory and transformed in whole batches: random crop of the padded image and
    mirror image, then a resize if ``image_size`` says so. Files are read one by one: a random resized crop and mirror
    image in training; otherwise a resize of the short side to 8/7 ``image_size`` and the crop of the middle. A
    ``train_transform`` or ``eval_transform`` replaces all of it, the normalisation too; it gets PIL images (float
    tensors if modifiers change pixels), or float batches if it has a true attribute ``batched``.

    Args:
        normalize: True for the set's usual mean and deviation, (mean, std) for others, False for pixels in [0, 1].
        augment: whether training images are augmented.
        pad_mode: how crops of small images are padded: "constant" with black, "reflect" with the mirrored border.
        image_size: height and width of what the loaders give; None for the set's own.
        classes: keep these classes in all splits; labels stay.
        val_per_class: validation images per class, instead of ``val_size``.
        test_per_class: test images per class, instead of ``test_size``.
        **kwargs: arguments of :class:`BaseDataModule`.
    """

    downloads = True
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    in_memory = False
    own_size: int | None = None
    padding = 4
    mirror = True

    def __init__(
        self,
        normalize: bool | tuple[Sequence[float], Sequence[float]] = True,
        augment: bool = True,
        pad_mode: Literal["constant", "reflect"] = "constant",
        image_size: int | None = None,
        classes: Sequence[int] | None = None,
        val_per_class: int | None = None,
        test_per_class: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_choice("pad_mode", pad_mode, ("constant", "reflect"))
        for name, value in (
            ("image_size", image_size),
            ("val_per_class", val_per_class),
            ("test_per_class", test_per_class),
        ):
            if value is not None:
                check_range(name, value, 1)
        if not isinstance(normalize, bool):
            self.mean, self.std = _mean_std(normalize)
        self.normalize = normalize
        self.augment = augment
        self.pad_mode = pad_mode
        self.image_size = image_size
        self.classes = classes
        self.val_per_class = val_per_class
        self.test_per_class = test_per_class

    def normalizer(self) -> Standardize | None:
        """The normalisation of float images, or None."""
        return None if self.normalize is False else Standardize(self.mean, self.std)

    @property
    def size(self) -> int:
        """Height and width of what the loaders give."""
        return self.image_size or self.own_size or 224

    def default_train_transform(self) -> Callable | None:
        """The usual augmentation, normalised."""
        if not self.augment:
            return self.default_eval_transform()
        if self.in_memory:
            crop = RandomCropFlip(self.padding, self.pad_mode, flip=self.mirror)
            return Chain(crop, self._resize(), self.normalizer())
        flip = [v2.RandomHorizontalFlip()] if self.mirror else []
        if self.own_size is not None:
            crop = [v2.RandomCrop(self.own_size, padding=self.padding, padding_mode=self.pad_mode), *flip]
            crop += [] if self.size == self.own_size else [v2.Resize((self.size, self.size))]
        else:
            crop = [v2.RandomResizedCrop(self.size), *flip]
        return v2.Compose([*crop, *to_float(), *filter(None, [self.normalizer()])])

    def default_eval_transform(self) -> Callable | None:
        """Resized and normalised."""
        if self.in_memory:
            chain = Chain(self._resize(), self.normalizer())
            return chain if chain.transforms else None
        resize = [v2.Resize((self.size, self.size))]
        if self.own_size is None:
            resize = [v2.Resize(self.size * 8 // 7), v2.CenterCrop(self.size)]
        return v2.Compose([*resize, *to_float(), *filter(None, [self.normalizer()])])

    def _resize(self) -> Resize | None:
        return None if self.image_size in (None, self.own_size) else Resize(self.image_size)


def _mean_std(normalize: Any) -> tuple[Sequence[float], Sequence[float]]:
    """Check the pair (mean, std)."""
    try:
        mean, std = normalize
        Standardize(mean, std)
    except (TypeError, ValueError) as error:
        raise ValueError(f"normalize must be true, false or (mean, std) of the channels, got {normalize!r}.") from error
    return mean, std


def _missing(what: Path, advice: str) -> FileNotFoundError:
    return FileNotFoundError(f"{what} is missing. {advice}")


# sets of torchvision


@dataclass(frozen=True)
class _Set:
    """What is known about a set."""

    mean: Sequence[float]
    std: Sequence[float]
    splits: tuple[str, ...] = ("train", "test")
    size: int | None = None  # of images that are kept in memory
    padding: int = 4
    mirror: bool = True


_CIFAR10 = _Set((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), size=32)
_CIFAR100 = _Set((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), size=32)
_SETS = {
    "cifar10": _CIFAR10,
    "cifar100": _CIFAR100,
    "cifar20": _CIFAR100,
    "stl10": _Set(
        (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713), ("train", "test", "unlabeled"), size=96, padding=12
    ),
    "mnist": _Set((0.1307,), (0.3081,), size=28, padding=2, mirror=False),
    "fashion_mnist": _Set((0.2860,), (0.3530,), size=28, padding=2),
    "dtd": _Set(IMAGENET_MEAN, IMAGENET_STD, ("train", "val", "test")),
    "fgvc_aircraft": _Set(IMAGENET_MEAN, IMAGENET_STD, ("train", "val", "test")),
    "stanford_cars": _Set(IMAGENET_MEAN, IMAGENET_STD),
}
_CIFAR_FILES = {
    "cifar10": ("cifar-10", "cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"], "labels"),
    "cifar100": ("cifar-100", "cifar-100-python", ["train"], ["test"], "fine_labels"),
    "cifar20": ("cifar-100", "cifar-100-python", ["train"], ["test"], "coarse_labels"),
}
_CLASSES = {"cifar10": 10, "cifar100": 100, "cifar20": 20, "stl10": 10, "mnist": 10, "fashion_mnist": 10}


class TorchvisionDataModule(ImageDataModule):
    """A set that torchvision knows, from the files that torchvision downloads.

    Without ``val_size`` or ``val_per_class`` validation sees the official validation split, or where there is none
    (CIFAR, STL10, MNIST, cars) the test split. "cifar20" is CIFAR-100 with its 20 coarse labels. STL10 also has
    unlabeled images: ``splits="train+unlabeled"``, their label is -1. Stanford Cars cannot be downloaded any more.

    Args:
        name: "cifar10", "cifar100", "cifar20", "stl10", "mnist", "fashion_mnist", "dtd", "fgvc_aircraft" or
            "stanford_cars".
        **kwargs: arguments of :class:`ImageDataModule`.
    """

    available_splits = ("train", "val", "test", "unlabeled")
    default_val_size = 0

    def __init__(self, name: str, **kwargs: Any) -> None:
        check_choice("name", name, tuple(_SETS))
        known = _SETS[name]
        self.mean, self.std, self.own_size, self.padding = known.mean, known.std, known.size, known.padding
        self.mirror = known.mirror
        self.in_memory = known.size is not None
        self.available_splits = (*dict.fromkeys((*known.splits, "val")),)
        super().__init__(**kwargs)
        self.name = name

    def fetch(self) -> None:
        """Let torchvision download what is not there yet."""
        if self.name in _CIFAR_FILES:
            cls = datasets.CIFAR10 if self.name == "cifar10" else datasets.CIFAR100
            if self._cifar_missing() is not None:
                cls(self.root, download=True)
        elif self.name == "stl10":
            if not (Path(self.root) / "stl10_binary" / "train_X.bin").is_file():
                datasets.STL10(self.root, download=True)
        elif self.name != "stanford_cars":
            for split in _SETS[self.name].splits:
                self._torchvision(split, download=True)

    def load_split(self, split: str) -> ArrayDataset | None:
        """A part of the set."""
        if split not in _SETS[self.name].splits:
            return None
        if self.name in _CIFAR_FILES:
            return self._cifar(split)
        if self.name == "stl10":
            return self._stl10(split)
        try:
            dataset = self._torchvision(split, download=False)
        except (RuntimeError, FileNotFoundError) as error:
            advice = "It is fetched with download=True."
            if self.name == "stanford_cars":
                advice = (
                    "Its original address is gone; fetch images, devkit and annotations from a mirror "
                    "(see https://github.com/pytorch/vision/issues/7545) and put cars_train, cars_test, devkit and "
                    "cars_test_annos_withlabels.mat into this folder."
                )
            raise _missing(Path(self.root) / self.name, advice) from error
        if self.in_memory:
            return ArrayDataset(dataset.data[:, None], dataset.targets, _CLASSES[self.name])
        if self.name == "stanford_cars":
            paths, labels = zip(*dataset._samples, strict=True)
        else:
            paths, labels = dataset._image_files, dataset._labels
        return ArrayDataset(ImageFiles(paths), list(labels), len(dataset.classes))

    def _torchvision(self, split: str, download: bool) -> Any:
        if self.name in ("mnist", "fashion_mnist"):
            cls = datasets.MNIST if self.name == "mnist" else datasets.FashionMNIST
            return cls(self.root, train=split == "train", download=download)
        if self.name == "stanford_cars":
            return datasets.StanfordCars(self.root, split=split)
        cls = datasets.DTD if self.name == "dtd" else datasets.FGVCAircraft
        return cls(self.root, split=split, download=download)

    def _cifar_missing(self) -> Path | None:
        _, folder, train, test, _ = _CIFAR_FILES[self.name]
        files = (Path(self.root) / folder / file for file in (*train, *test))
        return next((file for file in files if not file.is_file()), None)

    def _cifar(self, split: str) -> ArrayDataset:
        archive, folder, train, test, key = _CIFAR_FILES[self.name]
        missing = self._cifar_missing()
        if missing is not None:
            raise _missing(
                missing,
                "It is fetched with download=True, or by hand: unpack "
                f"https://www.cs.toronto.edu/~kriz/{archive}-python.tar.gz in {self.root!r} (it makes {folder!r}).",
            )
        batches = [safe_unpickle(Path(self.root) / folder / file) for file in (train if split == "train" else test)]
        images = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([batch[key] for batch in batches])
        return ArrayDataset(torch.from_numpy(images), labels, _CLASSES[self.name])

    def _stl10(self, split: str) -> ArrayDataset:
        folder = Path(self.root) / "stl10_binary"
        images_file, labels_file = folder / f"{split}_X.bin", folder / f"{split}_y.bin"
        for file in [images_file] + ([labels_file] if split != "unlabeled" else []):
            if not file.is_file():
                raise _missing(
                    file,
                    "It is fetched with download=True, or by hand: unpack "
                    f"http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz in {self.root!r}.",
                )
        # Images are stored column by column.
        images = torch.from_numpy(np.fromfile(images_file, dtype=np.uint8).reshape(-1, 3, 96, 96)).transpose(2, 3)
        labels = torch.full((len(images),), -1)
        if split != "unlabeled":
            labels = torch.from_numpy(np.fromfile(labels_file, dtype=np.uint8)).long() - 1
        return ArrayDataset(images.contiguous(), labels, 10)


class CIFARDataModule(TorchvisionDataModule):
    """CIFAR-10, CIFAR-100, or CIFAR-100 with its 20 coarse labels; 50 000 training and 10 000 test images of 32 x 32.

    Without ``val_size`` or ``val_per_class`` validation sees the test images.

    Args:
        name: "cifar10", "cifar100" or "cifar20".
        **kwargs: arguments of :class:`ImageDataModule`.
    """

    def __init__(self, name: Literal["cifar10", "cifar100", "cifar20"] = "cifar10", **kwargs: Any) -> None:
        check_choice("name", name, tuple(_CIFAR_FILES))
        super().__init__(name=name, **kwargs)


class SyntheticShapesDataModule(ImageDataModule):
    """Coloured disks, squares, triangles and crosses, drawn on the fly: no download.

    Place, size, colour and turn are random; the label is the shape. 60 % train, 20 % are for validation, 20 % for the
    test.

    Args:
        num_images: number of images.
        **kwargs: arguments of :class:`ImageDataModule`; ``image_size`` is 32 unless given.
    """

    downloads = False
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    in_memory = True

    def __init__(self, num_images: int = 2000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("num_images", num_images, 4)
        self.num_images = num_images
        self.own_size = self.image_size or 32

    def load_split(self, split: str) -> ArrayDataset | None:
        """All images as the training part."""
        if split != "train":
            return None
        g = torch.Generator().manual_seed(self.seed)
        n = self.num_images
        shape = torch.arange(n) % 4
        images = render_shapes(
            shape,
            color=torch.rand(n, 3, generator=g) * 0.8 + 0.2,
            radius=torch.rand(n, generator=g) * 0.2 + 0.15,
            center=torch.rand(n, 2, generator=g) * 0.4 + 0.3,
            angle=torch.rand(n, generator=g) * 2 * torch.pi,
            size=self.own_size,
        )
        return ArrayDataset(images, shape, 4)


# folders, lists, tables


class ImageFolderDataModule(ImageDataModule):
    """Images in a tree of folders, one per class: ``<root>/<train_folder>/<class>/...``.

    With a validation folder and no test folder, as in ImageNet, the validation folder is the test split, and validation
    sees it too unless ``val_size`` or ``val_per_class`` takes images out of training. If none of the three folders
    exists, the class folders are looked for in ``root`` itself, and validation and test images are taken out of them.

    Args:
        train_folder: folder of the training images, in ``root``.
        val_folder: folder of the validation images, if any.
        test_folder: folder of the test images, if any.
        class_ids: names of the class folders to use; labels follow this order. None for all, sorted.
        list_files: text files with lines ``path label`` by split ("train", "val", "test") instead of folders; both the
            files and the paths in them are relative to ``root``.
        **kwargs: arguments of :class:`ImageDataModule`; images are 224 x 224 unless ``image_size`` is given.
    """

    instructions = "Put the images of each class into a folder of its own there."

    def __init__(
        self,
        train_folder: str = "train",
        val_folder: str = "val",
        test_folder: str = "test",
        class_ids: Sequence[str] | None = None,
        list_files: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if list_files is not None:
            for split in list_files:
                check_choice("list_files", split, ("train", "val", "test"))
            if "train" not in list_files:
                raise ValueError(f"list_files must have a list for 'train', got {sorted(list_files)}.")
            if class_ids is not None:
                raise ValueError("class_ids selects folders; with list_files select by classes.")
        if class_ids is not None and (len(class_ids) == 0 or len(set(class_ids)) != len(class_ids)):
            raise ValueError(f"class_ids must name different folders, got {list(class_ids)}.")
        self.folders = {"train": train_folder, "val": val_folder, "test": test_folder}
        self.class_ids = None if class_ids is None else list(class_ids)
        self.list_files = list_files

    @property
    def base_folder(self) -> Path:
        """The folder in which the splits' folders are."""
        return Path(self.root)

    def load_split(self, split: str) -> ArrayDataset | None:
        """A part of the set."""
        if self.list_files is not None:
            there = set(self.list_files)
        else:
            there = {name for name, folder in self.folders.items() if folder and (self.base_folder / folder).is_dir()}
            if not there:
                there = {"train"}
        evaluated = there & {"val", "test"}
        if evaluated:
            self.default_val_size = 0
        if evaluated == {"val"}:
            split = {"val": "none", "test": "val"}.get(split, split)
        if split not in there:
            if split == "train":
                raise _missing(self.base_folder / self.folders["train"], self.instructions)
            return None
        return self._from_list(split) if self.list_files is not None else self._from_folder(split)

    def _folder(self, split: str) -> Path:
        folder = self.base_folder / self.folders[split]
        pool = split == "train" and not any(
            (self.base_folder / name).is_dir() for name in self.folders.values() if name
        )
        return self.base_folder if pool else folder

    def class_folders(self) -> list[str]:
        """Names of the class folders in the order of their labels."""
        folder = self._folder("train")
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()) if folder.is_dir() else []
        if not names:
            raise _missing(folder / "<class>", self.instructions)
        for wanted in self.class_ids or ():
            if wanted not in names:
                raise FileNotFoundError(f"{folder / wanted} is missing: class_ids names it.{nearest(wanted, names)}")
        return self.class_ids or names

    def _from_folder(self, split: str) -> ArrayDataset:
        folder = self._folder(split)
        if not folder.is_dir():
            raise _missing(folder, self.instructions)
        names = self.class_folders()
        label = {name: i for i, name in enumerate(names)}
        unknown = (
            sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name not in label)
            if self.class_ids is None
            else []
        )
        if unknown:
            raise ValueError(f"{folder} has folders of classes without training images: {', '.join(unknown[:3])}.")
        present = {name: i for name, i in label.items() if (folder / name).is_dir()}
        samples = make_dataset(str(folder), present, extensions=IMG_EXTENSIONS, allow_empty=True)
        if not samples:
            raise _missing(folder / "<class>" / "<image>", self.instructions)
        paths, labels = zip(*samples, strict=True)
        return ArrayDataset(ImageFiles(paths), list(labels), len(names))

    def _from_list(self, split: str) -> ArrayDataset:
        file = self.base_folder / self.list_files[split]
        if not file.is_file():
            raise _missing(file, "It is a text file with lines 'path label'; see list_files.")
        paths, labels = [], []
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            path, _, label = line.strip().rpartition(" ")
            if not path or not label.isdigit():
                raise ValueError(f"{file}, line {number}: expected 'path label', got {line!r}.")
            paths.append(self.base_folder / path)
            labels.append(int(label))
        if not paths:
            raise ValueError(f"{file} lists no images.")
        if not paths[0].is_file():
            raise _missing(
                paths[0], f"It is the first image of {file}; its paths are relative to {str(self.base_folder)!r}."
            )
        num_classes = max(labels) + 1 if split == "train" else max(max(labels) + 1, self._train_classes())
        return ArrayDataset(ImageFiles(paths), labels, num_classes)

    def _train_classes(self) -> int:
        return self._from_list("train").num_classes


class ImageNetDataModule(ImageFolderDataModule):
    """ImageNet (ILSVRC 2012) or a subset of it, as folders of WordNet ids: ``<root>/{train,val}/<wnid>/*.JPEG``.

    The 50 000 validation images are the test split. ImageNet-LT: ``list_files={"train": "ImageNet_LT_train.txt", "val":
    "ImageNet_LT_val.txt", "test": "ImageNet_LT_test.txt"}``.

    Args:
        root: the folder with ``train`` and ``val``.
        **kwargs: arguments of :class:`ImageFolderDataModule`; ``class_ids`` selects WordNet ids.
    """

    instructions = (
        "ImageNet cannot be downloaded freely: get ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar from "
        "https://image-net.org/challenges/LSVRC/2012/2012-downloads.php and unpack them into train/<wnid>/ and "
        "val/<wnid>/ there."
    )

    def __init__(self, root: str = "data/imagenet", **kwargs: Any) -> None:
        super().__init__(root=root, **kwargs)


class TinyImageNetDataModule(ImageFolderDataModule):
    """Tiny ImageNet: 200 classes, 100 000 training images of 64 x 64; its 10 000 validation images are the test split.

    Reads the archive as it is: ``<root>/tiny-imagenet-200/train/<wnid>/images/*.JPEG`` and ``val/images`` with
    ``val_annotations.txt``; or as :class:`ImageFolderDataModule` if ``val`` was sorted into class folders.

    Args:
        **kwargs: arguments of :class:`ImageFolderDataModule`.
    """

    own_size = 64
    url = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    instructions = f"It is fetched with download=True, or by hand: unpack {url} in the folder root."

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(test_folder="", **kwargs)

    @property
    def base_folder(self) -> Path:
        """``<root>/tiny-imagenet-200``, or ``root`` if it is that folder."""
        root = Path(self.root)
        return root if (root / "train").is_dir() else root / "tiny-imagenet-200"

    def fetch(self) -> None:
        """Download and unpack 240 MB."""
        if not (self.base_folder / "train").is_dir():
            download_and_extract_archive(self.url, self.root)

    def _from_folder(self, split: str) -> ArrayDataset:
        annotations = self.base_folder / self.folders["val"] / "val_annotations.txt"
        if split == "train" or not annotations.is_file():
            return super()._from_folder(split)
        names = self.class_folders()
        label = {name: i for i, name in enumerate(names)}
        paths, labels = [], []
        for line in annotations.read_text(encoding="utf-8").splitlines():
            image, name = line.split("\t")[:2]
            if name in label:
                paths.append(annotations.parent / "images" / image)
                labels.append(label[name])
        if not paths:
            raise ValueError(f"{annotations} names no image of the classes {', '.join(names[:3])}, ...")
        if not paths[0].is_file():
            raise _missing(paths[0], f"It is the first image of {annotations.name}.")
        return ArrayDataset(ImageFiles(paths), labels, len(names))


class ImageTableDataModule(ImageDataModule):
    """Images listed in a CSV file with a header: a path, a label, perhaps an attribute and a split.

    With ``group_column`` batches are ``GroupBatch``, in evaluation too. Values of the label and of the group are
    numbered in sorted order (as numbers if they are numbers) over the whole table. Without ``split_column`` all rows
    are one pool, out of which validation and test samples are taken.

    Args:
        table: the CSV file, relative to ``root``.
        path_column: column of the image paths.
        label_column: column of the labels.
        group_column: column of the attribute, or None.
        split_column: column of the split, or None.
        split_values: what that column says for "train", "val" and "test".
        image_folder: folder of the paths, relative to ``root``.
        **kwargs: arguments of :class:`ImageDataModule`; images are 224 x 224 unless ``image_size`` is given.
    """

    instructions = "It is a CSV file with a header; see the arguments table, path_column and label_column."

    def __init__(
        self,
        table: str = "metadata.csv",
        path_column: str = "path",
        label_column: str = "label",
        group_column: str | None = None,
        split_column: str | None = None,
        split_values: dict[str, str | int] | None = None,
        image_folder: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.path_column = path_column
        self.label_column = label_column
        self.group_column = group_column
        self.split_column = split_column
        given = {"train": "train", "val": "val", "test": "test"} if split_values is None else split_values
        for split in given:
            check_choice("split_values", split, ("train", "val", "test"))
        self.split_values = {split: str(value) for split, value in given.items()}
        self.image_folder = image_folder
        self._columns: dict[str, list[str]] | None = None

    @property
    def base_folder(self) -> Path:
        """The folder of the table."""
        return Path(self.root)

    def _read(self) -> dict[str, list[str]]:
        if self._columns is not None:
            return self._columns
        file = self.base_folder / self.table
        if not file.is_file():
            raise _missing(file, self.instructions)
        with file.open(newline="", encoding="utf-8") as handle:
            reader = csv.DictReader(handle)
            header = reader.fieldnames or []
            names = [self.path_column, self.label_column, self.group_column, self.split_column]
            wanted = [name for name in names if name is not None]
            for name in wanted:
                if name not in header:
                    raise ValueError(f"{file} has no column {name!r}, only {', '.join(header)}.{nearest(name, header)}")
            rows = list(reader)
        if not rows:
            raise ValueError(f"{file} has no rows.")
        self._columns = {name: [row[name] for row in rows] for name in wanted}
        return self._columns

    def load_split(self, split: str) -> ArrayDataset | None:
        """The rows of a split."""
        columns = self._read()
        n = len(columns[self.path_column])
        rows = np.arange(n)
        if self.split_column is not None:
            if split not in self.split_values:
                return None
            rows = np.flatnonzero(np.array(columns[self.split_column]) == self.split_values[split])
            if len(rows) == 0:
                if split != "train":
                    return None
                raise ValueError(
                    f"no row of {self.base_folder / self.table} has {self.split_column}={self.split_values[split]!r}; "
                    f"it has {', '.join(sorted(set(columns[self.split_column])))}."
                )
        elif split != "train":
            return None
        folder = self.base_folder / self.image_folder
        paths = [folder / columns[self.path_column][row] for row in rows]
        if not paths[0].is_file():
            raise _missing(paths[0], f"It is the first image of {self.base_folder / self.table}. {self.instructions}")
        labels, num_classes = _numbered(columns[self.label_column])
        dataset = ArrayDataset(ImageFiles(paths), labels[rows], num_classes)
        if self.group_column is None:
            return dataset
        groups, _ = _numbered(columns[self.group_column])
        return dataset.with_extras(group=groups[rows]).replace(batch_type=GroupBatch)


def _numbered(values: Sequence[str]) -> tuple[Tensor, int]:
    """Numbers 0, 1, ... of the different values in sorted order, and how many there are."""
    different = sorted(
        set(values), key=lambda value: (0, int(value), "") if value.lstrip("-").isdigit() else (1, 0, value)
    )
    number = {value: i for i, value in enumerate(different)}
    return torch.tensor([number[value] for value in values]), len(different)


class WaterbirdsDataModule(ImageTableDataModule):
    """Waterbirds: land birds (0) and water birds (1) in front of land (group 0) or water (group 1).

    In training 95 % of the birds are where they belong; in validation and test half of them. Images are resized to 256,
    cropped to the middle 224 and normalised, without augmentation unless ``augment``.

    Args:
        root: the folder ``waterbird_complete95_forest2water2`` or the one it is in.
        augment: random resized crops and mirror images in training.
        **kwargs: arguments of :class:`ImageDataModule`.
    """

    folder = "waterbird_complete95_forest2water2"
    instructions = (
        f"Fetch https://nlp.stanford.edu/data/dro/{folder}.tar.gz and unpack it in the folder root, which gives "
        f"'{folder}' with metadata.csv and the images there."
    )

    def __init__(self, root: str = "data", augment: bool = False, **kwargs: Any) -> None:
        super().__init__(
            table="metadata.csv",
            path_column="img_filename",
            label_column="y",
            group_column="place",
            split_column="split",
            split_values={"train": 0, "val": 1, "test": 2},
            root=root,
            augment=augment,
            **kwargs,
        )

    @property
    def base_folder(self) -> Path:
        """The folder with ``metadata.csv``."""
        root = Path(self.root)
        return root if (root / self.table).is_file() else root / self.folder


# distilled sets


class DistilledDataModule(BaseDataModule):
    """A distilled training set from a file; validation and test are those of the real set.

    The file is a ``torch.save`` of ``{"dataset": str, "data": float [N, C, H, W] in [0, 1], "label": int64 [N] or float
    [N, C]}``, usually ``<root>/<method>/<dataset>_<model>/ipc<k>/data.pt``; it is read without running code. With hard
    labels batches are ``(x, y)``; with soft labels they are ``SoftLabelBatch`` whose ``target`` is the largest. Images
    get the normalisation of the real set.

    Args:
        path: the file, or the folder with ``data.pt``.
        test_dataset: a data module, or a name of :class:`TorchvisionDataModule`, which is then read from ``root``.
        factor: training images are mosaics of ``factor x factor`` images, of which single tiles are taken (RDED).
        batch_size: "auto" for 10 up to 10 images, 50 up to 500, 100 up to 20 000, else 200.
        zca: whiten the test images by ZCA (eps 0.1) as measured on the real training images, in place of the
            normalisation; the stored images are whitened already and stay as they are (DATM).
        eval_batch_size: samples in a batch of validation and test.
        **kwargs: arguments of :class:`BaseDataModule` without sizes and splits.
    """

    downloads = True

    def __init__(
        self,
        path: str,
        test_dataset: LightningDataModule | str,
        factor: int = 1,
        batch_size: int | Literal["auto"] = "auto",
        zca: bool = False,
        eval_batch_size: int | None = 256,
        **kwargs: Any,
    ) -> None:
        if isinstance(batch_size, str):
            check_choice("batch_size", batch_size, ("auto",))
        super().__init__(
            batch_size=None if batch_size == "auto" else batch_size, eval_batch_size=eval_batch_size, **kwargs
        )
        check_range("factor", factor, 1)
        for name in ("train_size", "val_size", "test_size"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has no meaning for a distilled set: give it to test_dataset.")
        if self.splits != "train":
            raise ValueError("splits has no meaning for a distilled set: give it to test_dataset.")
        if isinstance(test_dataset, str):
            test_dataset = TorchvisionDataModule(
                test_dataset, root=self.root, download=self.download, num_workers=self.num_workers
            )
        if not isinstance(test_dataset, BaseDataModule):
            if zca:
                raise ValueError("zca needs a test_dataset of this library, to measure its training images.")
            if self.eval_modifiers or self.eval_transform is not None:
                raise ValueError("eval_modifiers and eval_transform need a test_dataset of this library.")
        self.path = str(path)
        self.test_dataset = test_dataset
        self.factor = factor
        self.auto_batch_size = batch_size == "auto"
        self.zca = zca
        self._whitening: ZCA | None = None

    @property
    def _foreign(self) -> bool:
        return not isinstance(self.test_dataset, BaseDataModule)

    def fetch(self) -> None:
        """Download the real set, if it is one that can be."""
        self.test_dataset.prepare_data()

    def _load(self) -> ArrayDataset:
        path = Path(self.path)
        path = path / "data.pt" if path.is_dir() else path
        if not path.is_file():
            raise _missing(
                path, "It is the file of a distilled set: a dict with dataset, data and label, by torch.save."
            )
        stored = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(stored, dict) or not {"data", "label"} <= set(stored):
            raise ValueError(f"{path} must hold a dict with data and label, got {_contents(stored)}.")
        images, label = stored["data"], stored["label"]
        if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
            raise ValueError(f"data of {path} must be a float tensor [N, C, H, W], got {_contents(images)}.")
        if not isinstance(label, Tensor) or label.dim() not in (1, 2) or len(label) != len(images):
            raise ValueError(
                f"label of {path} must be [N] or [N, classes] with N={len(images)}, got {_contents(label)}."
            )
        if label.dim() == 1:
            if label.is_floating_point():
                raise ValueError(f"label of {path} must hold class indices of an integer dtype, got {label.dtype}.")
            return ArrayDataset(images.float(), label)
        soft = ArrayDataset(images.float(), label.argmax(dim=1), num_classes=label.shape[1])
        return soft.with_extras(soft_labels=label.float()).replace(batch_type=SoftLabelBatch)

    def _split(self) -> dict[str, ArrayDataset]:
        train = self._load()
        if self.auto_batch_size:
            self.batch_size = next((size for limit, size in _AUTO_BATCH if len(train) <= limit), 200)
        if self._foreign:  # its own loaders are used; nothing is taken from here
            return {"train": train, "val": train, "test": train}
        self.test_dataset.setup("fit")
        num_classes = self.test_dataset.num_classes
        if train.num_classes > num_classes:
            raise ValueError(f"{self.path} has {train.num_classes} classes, the test set {num_classes}.")
        if self.zca:
            real = self.test_dataset.train_set
            if not isinstance(real.source, Tensor):
                raise ValueError("zca needs a test_dataset that is kept in memory.")
            self._whitening = ZCA(real.items(torch.arange(len(real))))
        return {
            "train": train.replace(num_classes=num_classes),
            "val": self.test_dataset.val_set,
            "test": self.test_dataset.test_set,
        }

    def default_train_transform(self) -> Callable | None:
        """A random tile, and the normalisation of the real set."""
        tile = RandomFactorResizedCrop(self.factor) if self.factor > 1 else None
        normalizer = getattr(self.test_dataset, "normalizer", lambda: None)
        chain = Chain(tile, None if self.zca else normalizer())
        return chain if chain.transforms else None

    def default_eval_transform(self) -> Callable | None:
        """That of the real set."""
        if self._foreign:
            return None
        return self._whitening if self.zca else self.test_dataset.make_transform(training=False)

    def setup(self, stage: str | None = None) -> None:
        """Read the file and set up the real set; a second call changes nothing."""
        super().setup(stage)
        if self._foreign:
            self.test_dataset.setup(stage)

    def val_dataloader(self) -> DataLoader:
        """The validation set of the real set."""
        return self.test_dataset.val_dataloader() if self._foreign else super().val_dataloader()

    def test_dataloader(self) -> DataLoader:
        """The test set of the real set."""
        return self.test_dataset.test_dataloader() if self._foreign else super().test_dataloader()


_AUTO_BATCH = ((10, 10), (500, 50), (20_000, 100))


def _contents(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"keys {', '.join(map(str, value))}" if isinstance(value, dict) else type(value).__name__
