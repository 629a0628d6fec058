"""Streams of tasks for continual learning: permuted pixels, random labels, new classes, permuted words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_methods.core.checks import check_choice, check_range

from .base import ArrayDataset, BaseDataModule, EpochSampler
from .modifiers import Classes, PermutedPixels, RandomLabels, Subset

__all__ = ["ContinualDataModule"]

Problem = Literal[
    "permuted_digits",
    "random_label_digits",
    "permuted_mnist",
    "random_label_mnist",
    "random_label_cifar",
    "continual_imagenet",
    "cifar100_5plus1",
    "permuted_shakespeare",
]
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


class _Defaults(NamedTuple):
    """What a problem's definition fixes."""

    num_samples: int
    batch_size: int
    epochs_per_task: int
    steps_per_epoch: int | None = None


DEFAULTS = {
    "permuted_digits": _Defaults(800, 16, 1),
    "random_label_digits": _Defaults(200, 16, 40),
    "permuted_mnist": _Defaults(10_000, 16, 1),
    "random_label_mnist": _Defaults(1200, 16, 400),
    "random_label_cifar": _Defaults(1200, 16, 400),
    "continual_imagenet": _Defaults(600, 100, 10),
    "cifar100_5plus1": _Defaults(500, 16, 1, 780),
    "permuted_shakespeare": _Defaults(256, 8, 100),
}


class _Passes(Sampler[int]):
    """Passes over a data set in random order, one after the other, until there are ``length`` rows."""

    def __init__(self, dataset: Dataset, length: int) -> None:
        self.dataset = dataset
        self.length = length

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)
        passes = [torch.randperm(size) for _ in range(-(-self.length // size))]
        return iter(torch.cat(passes)[: self.length].tolist())

    def __len__(self) -> int:
        return self.length


class _Tokens(Dataset):
    """Windows of a token stream: ``(x [T], y [T])`` with y the next tokens."""

    def __init__(self, tokens: Tensor, starts: Tensor, context: int) -> None:
        self.windows = tokens[starts[:, None] + torch.arange(context + 1)]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.windows[row, :-1], self.windows[row, 1:]

    def set_epoch(self, epoch: int) -> None:
        """Nothing here depends on the epoch."""

    def share_epoch(self) -> None:
        """Nothing here depends on the epoch."""


def split_words(text: str) -> list[str]:
    """Words, and every other visible character by itself."""
    return re.findall(r"\w+(?:'\w+)?|[^\w\s]", text)


def encode(units: Sequence[Any], size: int | None = None) -> tuple[Tensor, int]:
    """Number the units that occur, the most frequent first (ties by first occurrence).

    Args:
        units: words or token ids of a text, in order.
        size: largest vocabulary; rarer units share its last number.

    Returns:
        ids int64 [N], and the size of the vocabulary.
    """
    vocabulary = [unit for unit, _ in Counter(units).most_common()]
    limit = len(vocabulary) if size is None else min(size, len(vocabulary))
    number = {unit: min(i, limit - 1) for i, unit in enumerate(vocabulary)}
    return torch.tensor([number[unit] for unit in units], dtype=torch.long), limit


class ContinualDataModule(BaseDataModule):
    """A stream of tasks: the task is ``trainer.current_epoch // epochs_per_task``, and everything follows from it.

    Needs ``Trainer(reload_dataloaders_every_n_epochs=1)``. A task is a function of (seed, task): a resumed run goes on
    where it was. Nothing in a batch tells the task. Validation, test and prediction see the data of the current task
    (after a fit: the last one) in order; where a checkpoint is loaded, those of its task.

    ==========================  ========================================================================  ======  ======
    problem                     a task                                                                    batch   epochs
    ==========================  ========================================================================  ======  ======
    ``permuted_digits``         one permutation of the pixels of 800 images of scikit-learn's digits       16      1
    ``random_label_digits``     new uniform labels for 200 of them                                        16      40
    ``permuted_mnist``          one permutation of the pixels of 10 000 images                            16      1
    ``random_label_mnist``      new uniform labels for 1200 images                                        16      400
    ``random_label_cifar``      new uniform labels for 1200 images of CIFAR-10                            16      400
    ``continual_imagenet``      two classes that were not used before, 600 images each, labels 0 and 1    100     10
    ``cifar100_5plus1``         five new classes, then one, in turn (500 images each, 780 steps)          16      1
    ``permuted_shakespeare``    one permutation of the vocabulary; 256 windows of a text                  8       100
    ==========================  ========================================================================  ======  ======

    The images of the permuted and random-label problems are drawn once. When the classes are used up they are drawn
    anew.
    Sources: Goodfellow et al. (2013), Lyle et al. (2023), Dohare et al. (2024), Kumar et al. (2023), in the definitions
    of Kumar et al. (2023); Permuted Shakespeare: Farias and Jozefiak (2025).

    Files: MNIST and CIFAR are downloaded into ``root`` by torchvision. For ``continual_imagenet`` ``path`` is a folder
    with one entry per class: a folder of 32x32 images, or a ``.npy`` or ``.npz`` array of uint8 images, [N, 3, 32, 32]
    or [N, 32, 32, 3]. For ``permuted_shakespeare`` ``path`` is a text file; ``tokenizer`` is a name or folder that
    transformers knows (``gpt2`` in the paper; numbers are given to the tokens that occur), None splits into words.

    Args:
        problem: the stream.
        epochs_per_task: epochs that a task lasts; None for the table's.
        root: folder of downloaded sets.
        path: the folder of ImageNet classes, or the text file.
        batch_size: None for the table's.
        num_samples: images drawn once; for new classes the images of each class; for text the windows of each task (the
            paper takes 256 times scale^0.74). None for the table's.
        steps_per_epoch: batches in an epoch, as passes over the task one after the other; None for one pass (780 in
            ``cifar100_5plus1``).
        tokenizer: of the text.
        vocab_size: keeps the most frequent tokens; the others share the last number. None keeps all.
        context: tokens that the learner sees.
        flatten: images as vectors.
        train_transform: what is done to the images of the training stream, see :class:`BaseDataModule`.
        modifiers: what is done to the set before there are tasks.
        num_workers: processes that load.
        seed: seed of images, tasks and order.
        download: whether MNIST and CIFAR may be fetched.

    Raises:
        ValueError: an unknown problem, a bad number, or more samples than there are.
        FileNotFoundError: the files are missing; the message says where they come from.
    """

    @property
    def downloads(self) -> bool:
        """Whether the problem's files have to be fetched: for all but the digits."""
        return "digits" not in self.problem

    def __init__(
        self,
        problem: Problem = "permuted_digits",
        epochs_per_task: int | None = None,
        root: str = "data",
        path: str | None = None,
        batch_size: int | None = None,
        num_samples: int | None = None,
        steps_per_epoch: int | None = None,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
        context: int = 128,
        flatten: bool = False,
        train_transform: Callable | None = None,
        modifiers: Sequence[Callable] = (),
        num_workers: int = 0,
        seed: int = 0,
        download: bool = True,
    ) -> None:
        check_choice("problem", problem, get_args(Problem))
        defaults = DEFAULTS[problem]
        super().__init__(
            root=root,
            batch_size=defaults.batch_size if batch_size is None else batch_size,
            num_workers=num_workers,
            seed=seed,
            download=download,
            train_transform=train_transform,
            modifiers=modifiers,
        )
        self.problem = problem
        self.epochs_per_task = defaults.epochs_per_task if epochs_per_task is None else epochs_per_task
        self.num_samples = defaults.num_samples if num_samples is None else num_samples
        self.steps_per_epoch = defaults.steps_per_epoch if steps_per_epoch is None else steps_per_epoch
        for name in ("epochs_per_task", "num_samples", "context"):
            check_range(name, context if name == "context" else getattr(self, name), 1)
        for name, value, low in (("steps_per_epoch", self.steps_per_epoch, 1), ("vocab_size", vocab_size, 2)):
            if value is not None:
                check_range(name, value, low)
        needs_path = problem in ("continual_imagenet", "permuted_shakespeare")
        if needs_path != (path is not None):
            raise ValueError(f"problem {problem!r} {'needs' if needs_path else 'does not take'} a path.")
        self.path = path
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.context = context
        self.flatten = flatten
        self._task = 0
        self._current: tuple[int, Dataset] | None = None

    # raw data

    def fetch(self) -> None:
        """Download MNIST or CIFAR."""
        self._torchvision(download=True)

    def _torchvision(self, download: bool) -> Any:
        name = {"mnist": "MNIST", "cifar": "CIFAR10", "5plus1": "CIFAR100"}.get(self.problem.rpartition("_")[2])
        if name is None:
            return None
        from torchvision import datasets

        try:
            return getattr(datasets, name)(self.root, train=True, download=download)
        except RuntimeError as error:
            raise FileNotFoundError(
                f"{name} was not found in {self.root!r}. Give download=True, or put torchvision's files of it there."
            ) from error

    @cached_property
    def _images(self) -> ArrayDataset:
        """The images from which tasks are made."""
        if self.problem.endswith("digits"):
            from sklearn.datasets import load_digits

            digits = load_digits()
            images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
            whole = ArrayDataset(images, digits.target, num_classes=10)
        else:
            found = self._torchvision(download=False)
            images = torch.as_tensor(found.data)
            images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
            whole = ArrayDataset(images, torch.as_tensor(found.targets), num_classes=len(found.classes))
        if self.problem == "cifar100_5plus1":
            chosen = whole.select(Subset(per_class=self.num_samples, order="first").rows(whole))
        elif self.num_samples > len(whole):
            raise ValueError(f"num_samples={self.num_samples} exceeds the {len(whole)} images there are.")
        else:
            chosen = Subset(size=self.num_samples, seed=self.seed)(whole)
        for modifier in self.modifiers:
            chosen = modifier(chosen)
        return chosen.replace(transforms={"x": self._transform()}, training=True, seed=self.seed)

    def _transform(self) -> Callable | None:
        from .transforms import Chain, Flatten

        chain = Chain(self.train_transform, Flatten() if self.flatten else None)
        return chain if chain.transforms else None

    @cached_property
    def _class_paths(self) -> list[Path]:
        folder = Path(self.path)
        found = sorted(
            entry
            for entry in (folder.iterdir() if folder.is_dir() else ())
            if entry.is_dir() or entry.suffix in (".npy", ".npz")
        )
        if len(found) < 2:
            raise FileNotFoundError(
                f"{folder} must have one folder of 32x32 images, or one .npy or .npz array, for each class. "
                "Downsampled ImageNet (32x32) is offered by image-net.org after registration; sort its images by class."
            )
        return found

    def _class_images(self, entry: Path) -> Tensor:
        """The first images of a class, uint8 [num_samples, 3, 32, 32]."""
        if entry.is_dir():
            from PIL import Image

            files = sorted(file for file in entry.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES)
            decoded = [np.asarray(Image.open(file).convert("RGB")) for file in files[: self.num_samples]]
            array = np.stack(decoded) if decoded else np.empty(0)
            images = torch.from_numpy(array)
        else:
            array = np.load(entry, allow_pickle=False)
            if isinstance(array, np.lib.npyio.NpzFile):
                if len(array.files) != 1:
                    raise ValueError(f"{entry} must hold one array, got {array.files}.")
                array = array[array.files[0]]
            images = torch.from_numpy(array[: self.num_samples])
        if images.dim() == 4 and images.shape[-1] == 3:
            images = images.permute(0, 3, 1, 2).contiguous()
        if len(images) < self.num_samples:
            raise ValueError(f"{self.num_samples} images per class were asked, but {entry} has {len(images)}.")
        if images.dim() != 4 or images.shape[1] != 3 or images.dtype != torch.uint8:
            raise ValueError(f"{entry} must hold uint8 images [N, 3, H, W], got {images.dtype} {list(images.shape)}.")
        return images

    @cached_property
    def _tokens(self) -> tuple[Tensor, int]:
        """The text as numbers, and the size of the vocabulary."""
        path = Path(self.path)
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no text file {path}. Any plain text will do; the paper's is the works of Shakespeare, "
                "free at gutenberg.org (ebook 100)."
            )
        text = path.read_text(encoding="utf-8")
        if self.tokenizer is None:
            units: Sequence[Any] = split_words(text)
        else:
            from transformers import AutoTokenizer

            units = AutoTokenizer.from_pretrained(self.tokenizer)(text, add_special_tokens=False)["input_ids"]
        if len(units) <= self.context + 1:
            raise ValueError(f"{path} has {len(units)} tokens, too few for windows of {self.context} + 1.")
        return encode(units, self.vocab_size)

    # tasks

    def setup(self, stage: str | None = None) -> None:
        """Read the data; a second call changes nothing."""
        if self.problem == "continual_imagenet":
            _ = self._class_paths
        elif self.problem == "permuted_shakespeare":
            _ = self._tokens
        else:
            _ = self._images

    def _task_seed(self, task: int) -> int:
        return hash((self.seed, task)) & 0x7FFF_FFFF_FFFF_FFFF

    def _new_classes(self, task: int, total: int, sizes: tuple[int, ...]) -> list[int]:
        """Classes of a task, none used twice before all are: tasks take turns in ``sizes``."""
        rounds, turn = divmod(task, len(sizes))
        per_deck = total // sum(sizes)
        if per_deck == 0:
            raise ValueError(f"{total} classes are too few for tasks of {sizes}.")
        deck, place = divmod(rounds, per_deck)
        # Three numbers: not the seed of any task. (No negative number would do: hash(-1) is hash(-2).)
        seed = hash((self.seed, deck, 1)) & 0x7FFF_FFFF_FFFF_FFFF
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        start = place * sum(sizes) + sum(sizes[:turn])
        return order[start : start + sizes[turn]].tolist()

    def task_dataset(self, task: int) -> Dataset:
        """The data of a task, a function of (seed, task).

        Args:
            task: 0, 1, 2, ...
        """
        check_range("task", task, 0)
        if self._current is not None and self._current[0] == task:
            return self._current[1]
        seed = self._task_seed(task)
        dataset: Dataset
        if self.problem == "permuted_shakespeare":
            tokens, size = self._tokens
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(size, generator=generator)
            starts = torch.randint(0, len(tokens) - self.context, (self.num_samples,), generator=generator)
            dataset = _Tokens(order[tokens], starts, self.context)
        elif self.problem == "continual_imagenet":
            pair = self._new_classes(task, len(self._class_paths), (2,))
            images = torch.cat([self._class_images(self._class_paths[c]) for c in pair])
            labels = torch.arange(2).repeat_interleave(self.num_samples)
            made = ArrayDataset(
                images, labels, num_classes=2, transforms={"x": self._transform()}, training=True, seed=self.seed
            )
            for modifier in self.modifiers:
                made = modifier(made)
            dataset = made
        elif self.problem == "cifar100_5plus1":
            dataset = Classes(self._new_classes(task, self._images.num_classes, (5, 1)))(self._images)
        elif self.problem.startswith("permuted"):
            dataset = PermutedPixels(seed=seed)(self._images)
        else:
            dataset = RandomLabels(seed=seed)(self._images)
        self._current = (task, dataset)
        return dataset

    @property
    def task(self) -> int:
        """The current task."""
        trainer = self.trainer
        if trainer is not None and trainer.training:
            self._task = trainer.current_epoch // self.epochs_per_task
        return self._task

    @property
    def train_set(self) -> Dataset:
        """The data of the current task."""
        return self.task_dataset(self.task)

    @property
    def num_classes(self) -> int:
        """Number of classes, or of tokens."""
        if self.problem == "permuted_shakespeare":
            return self._tokens[1]
        return 2 if self.problem == "continual_imagenet" else self._images.num_classes

    def state_dict(self) -> dict[str, int]:
        """The task, so that a checkpoint is tested on its own."""
        return {"task": self.task}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go to the checkpoint's task."""
        self._task = state_dict["task"]

    # loaders

    def _check_reload(self) -> None:
        trainer = self.trainer
        if trainer is None or not trainer.training or trainer.reload_dataloaders_every_n_epochs == 1:
            return
        last = trainer.max_epochs
        if last is None or last < 0 or last > self.epochs_per_task:
            raise ValueError(
                "the stream needs Trainer(reload_dataloaders_every_n_epochs=1): without it every epoch would be the "
                f"first task; got {trainer.reload_dataloaders_every_n_epochs}."
            )

    def make_sampler(self, dataset: Any) -> EpochSampler:
        """Random order by (seed, epoch)."""
        inner = None if self.steps_per_epoch is None else _Passes(dataset, self.steps_per_epoch * self.batch_size)
        return EpochSampler(dataset, inner, self.seed)

    def train_dataloader(self) -> DataLoader:
        """The current task, shuffled."""
        self._check_reload()
        dataset = self.train_set
        return self._loader(dataset, self.batch_size, sampler=self.make_sampler(dataset))

    def val_dataloader(self) -> DataLoader:
        """The current task, in order."""
        return self._loader(self.train_set, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """The current task, in order."""
        return self._loader(self.train_set, self.batch_size)

    def train_eval_dataloader(self) -> DataLoader:
        """The current task, in order."""
        return self._loader(self.train_set, self.batch_size)
