"""What every data module shares: splits, modifiers, loaders, and the data set that modifiers act on."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, default_collate

from lightning_methods.core.checks import check_choice, check_range

from . import long_tail

__all__ = [
    "ArrayDataset",
    "BaseDataModule",
    "BatchDataset",
    "EpochSampler",
    "as_float_image",
    "collate",
    "stratified_parts",
]

# dataset -> dataset. No argument types: with them jsonargparse would look for subclasses of the result.
Modifier = Callable
LABEL_FIELDS = ("y", "label", "target")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of torch, numpy and python inside the block and restore them afterwards."""
    state = torch.default_generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
    np.random.seed(seed & 0xFFFF_FFFF)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        random.setstate(state[2])


def as_float_image(item: Any) -> Tensor:
    """A raw item as a tensor: images (PIL, uint8) become float32 [C, H, W] in [0, 1]; tensors stay as they are."""
    if isinstance(item, Tensor):
        return item.float() / 255 if item.dtype == torch.uint8 else item
    if isinstance(item, np.ndarray):
        return torch.as_tensor(item)
    from torchvision.transforms.v2 import functional as vision

    return vision.to_dtype(vision.to_image(item), torch.float32, scale=True).as_subclass(Tensor)


def _as_image(item: Any) -> Any:
    """What a transform of single images gets: uint8 image tensors as PIL images, everything else as it is."""
    if isinstance(item, Tensor) and item.dtype == torch.uint8 and item.dim() == 3:
        from torchvision.transforms.v2 import functional as vision

        return vision.to_pil_image(item)
    return item


def _new_epoch() -> Tensor:
    return torch.zeros(1, dtype=torch.long)


def collate(data: Any) -> Any:
    """Collate a list of samples; what :class:`ArrayDataset` fetched as one batch passes through."""
    return default_collate(data) if isinstance(data, list) else data


class ArrayDataset(Dataset):
    """Raw items with targets, per-sample extras and one transform per view: what modifiers act on.

    A sample goes through three steps: the raw item is read from ``source``, the ``pixel_ops`` (spurious backgrounds,
    noise, permutations) are applied to it as a float tensor, and each view's transform is called on the result. The
    fields of ``batch_type`` are then filled by name: a view from ``transforms``; ``y``, ``label`` or ``target`` from
    ``targets``; ``index`` with the row in 0 .. N-1 (-1 in evaluation); anything else from ``extras``, and -1 where
    there is none. Without a ``batch_type`` a sample is ``(x, y)``.

    A transform of single samples sees what the set's usual loader gives: a PIL image for image sets, a tensor
    otherwise; after pixel operations always a float tensor. A transform with a true attribute ``batched`` is called on
    float tensors with a leading batch dimension. If the source is one tensor and every transform is ``batched`` or
    ``None``, a whole batch is fetched with tensor operations and no Python loop over its samples.

    A loader fetches batches under random numbers that depend only on the seed, the epoch and the rows in the batch: the
    same with any number of workers, different between samples and epochs, and without a trace in the global generators.
    ``dataset[i]`` itself draws from the global generators, as usual.

    Args:
        source: raw items by position: a tensor [M, ...] or any sequence.
        targets: class indices int64 [N], or float [N] or [N, O] for regression; -1 is unknown.
        num_classes: number of classes; 0 for regression; None counts them from the targets.
        indices: the row of ``source`` of each sample, int64 [N]; None for all rows in order.
        extras: further values per sample by field name, [N, ...] each.
        transforms: one callable or None per view.
        batch_type: the ``NamedTuple`` class of a sample, or None for ``(x, y)``.
        training: whether the field ``index`` is filled.
        seed: seed of the transforms' random numbers.

    Raises:
        ValueError: numbers of rows differ.
    """

    def __init__(
        self,
        source: Any,
        targets: Tensor | np.ndarray | Sequence,
        num_classes: int | None = None,
        *,
        indices: Tensor | None = None,
        extras: dict[str, Tensor] | None = None,
        transforms: dict[str, Callable | None] | None = None,
        batch_type: type | None = None,
        training: bool = False,
        seed: int = 0,
    ) -> None:
        self.source = source
        targets = torch.as_tensor(targets)
        self.targets = targets if targets.is_floating_point() else targets.long()
        self.indices = torch.arange(len(source)) if indices is None else torch.as_tensor(indices).long()
        self.extras = {key: torch.as_tensor(value) for key, value in (extras or {}).items()}
        for name, value in {"targets": self.targets, **self.extras}.items():
            if len(value) != len(self.indices):
                raise ValueError(f"{name} must have one row per sample ({len(self.indices)}), got {len(value)}.")
        if num_classes is None:
            known = self.targets.dtype == torch.long and self.targets.dim() == 1 and len(self.targets) > 0
            num_classes = max(int(self.targets.max()) + 1, 0) if known else 0
        self.num_classes = num_classes
        self.transforms = dict(transforms or {"x": None})
        self.pixel_ops: tuple[Callable[[Tensor, ArrayDataset, Tensor], Tensor], ...] = ()
        self.batch_type = batch_type
        self.training = training
        self.seed = seed
        self._epoch = _new_epoch()

    def __len__(self) -> int:
        return len(self.indices)

    # what modifiers use

    def replace(self, **changes: Any) -> ArrayDataset:
        """A shallow copy with other attributes; nothing is read or copied."""
        changed = copy.copy(self)
        for name, value in changes.items():
            if name not in changed.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
            changed.__dict__[name] = value
        return changed

    def select(self, rows: Tensor) -> ArrayDataset:
        """The samples at these rows (int64, any order, repeats allowed)."""
        rows = torch.as_tensor(rows).long()
        return self.replace(
            indices=self.indices[rows],
            targets=self.targets[rows],
            extras={key: value[rows] for key, value in self.extras.items()},
        )

    def with_extras(self, **extras: Tensor) -> ArrayDataset:
        """A copy with further values per sample."""
        for name, value in extras.items():
            if len(value) != len(self):
                raise ValueError(f"{name} must have one row per sample ({len(self)}), got {len(value)}.")
        return self.replace(extras={**self.extras, **extras})

    def with_pixel_op(self, op: Callable[[Tensor, ArrayDataset, Tensor], Tensor]) -> ArrayDataset:
        """A copy with a further operation on the pixels.

        Args:
            op: called with float items [B, ...], this data set and the rows [B]; returns the changed items.
        """
        return self.replace(pixel_ops=(*self.pixel_ops, op))

    # randomness

    @property
    def epoch(self) -> int:
        """The epoch from which random numbers of the transforms are derived."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; copies made by :meth:`replace`, and workers of a loader, follow."""
        self._epoch.fill_(epoch)

    def share_epoch(self) -> None:
        """Keep the epoch in shared memory, so that workers that outlive an epoch see it change."""
        self._epoch.share_memory_()

    # samples

    @property
    def batchable(self) -> bool:
        """Whether batches are fetched without a loop over samples."""
        return isinstance(self.source, Tensor) and all(
            transform is None or getattr(transform, "batched", False) for transform in self.transforms.values()
        )

    def __getitem__(self, row: int) -> Any:
        row = int(row)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a data set of {len(self)}.")
        row %= len(self)
        item = self.source[int(self.indices[row])]
        if self.pixel_ops:
            item = self._apply_pixel_ops(as_float_image(item)[None], torch.tensor([row]))[0]
        views = {name: self._view(item, transform) for name, transform in self.transforms.items()}
        return self._pack(views, row, self.targets[row] if self.targets.is_floating_point() else int(self.targets[row]))

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """A batch for a loader: a list of samples, or the collated batch itself where that is faster."""
        draws = bool(self.pixel_ops) or any(transform is not None for transform in self.transforms.values())
        context = seeded(hash((self.seed, self.epoch, *map(int, rows)))) if draws else contextlib.nullcontext()
        with context:
            return self._batch(torch.as_tensor(rows)) if self.batchable else [self[row] for row in rows]

    def items(self, rows: Tensor) -> Tensor:
        """Items of a tensor source as floats [B, ...], after the pixel operations and before the views."""
        return self._apply_pixel_ops(as_float_image(self.source[self.indices[rows]]), rows)

    def _batch(self, rows: Tensor) -> Any:
        x = self.items(rows)
        views = {name: x if transform is None else transform(x) for name, transform in self.transforms.items()}
        return self._pack(views, rows, self.targets[rows])

    def _apply_pixel_ops(self, x: Tensor, rows: Tensor) -> Tensor:
        for op in self.pixel_ops:
            x = op(x, self, rows)
        return x

    @staticmethod
    def _view(item: Any, transform: Callable | None) -> Any:
        if transform is None:
            return as_float_image(item)
        if getattr(transform, "batched", False):
            return transform(as_float_image(item)[None])[0]
        return transform(_as_image(item))

    def _pack(self, views: dict[str, Any], rows: int | Tensor, target: Any) -> Any:
        """Fill the batch type; ``rows`` is one row or all rows of a batch."""
        if self.batch_type is None:
            return views["x"], target
        fields = {}
        for name in self.batch_type._fields:
            if name in views:
                fields[name] = views[name]
            elif name in LABEL_FIELDS:
                fields[name] = target
            elif name == "index" and self.training:
                fields[name] = rows
            elif name in self.extras:
                fields[name] = self.extras[name][rows]
            else:
                fields[name] = torch.full_like(rows, -1) if isinstance(rows, Tensor) else -1
        return self.batch_type(**fields)


class BatchDataset(ArrayDataset):
    """Samples that are made a batch at a time: subclasses implement :meth:`make`.

    Random numbers in it depend on the seed, the epoch and the places of the samples in the source.
    """

    def make(self, rows: Tensor) -> Any:
        """A batch: a tuple or a mapping of tensors with the samples as rows.

        Args:
            rows: int64 [B].
        """
        raise NotImplementedError(f"{type(self).__name__} must implement make.")

    def __getitem__(self, row: int) -> Any:
        row = int(row)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a data set of {len(self)}.")
        batch = self.__getitems__([row % len(self)])
        if isinstance(batch, dict):
            return {name: value[0] for name, value in batch.items()}
        return tuple(value[0] for value in batch)

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """A batch for a loader."""
        rows = torch.as_tensor(rows)
        with seeded(hash((self.seed, self.epoch, *self.indices[rows].tolist()))):
            return self.make(rows)


def concatenate(datasets: Sequence[ArrayDataset]) -> ArrayDataset:
    """The samples of several data sets of one kind, one after the other.

    Raises:
        ValueError: there is none, or they have different extras.
    """
    if not datasets:
        raise ValueError("there is nothing to concatenate.")
    if len(datasets) == 1:
        return datasets[0]
    first = datasets[0]
    if any(set(part.extras) != set(first.extras) for part in datasets):
        raise ValueError("data sets with different extras cannot be merged.")
    sources = [part.source for part in datasets]
    starts = np.cumsum([0, *(len(source) for source in sources[:-1])])
    return first.replace(
        source=torch.cat(sources) if all(isinstance(s, Tensor) for s in sources) else ConcatDataset(sources),
        indices=torch.cat([part.indices + int(start) for part, start in zip(datasets, starts, strict=True)]),
        targets=torch.cat([part.targets for part in datasets]),
        extras={key: torch.cat([part.extras[key] for part in datasets]) for key in first.extras},
        num_classes=max(part.num_classes for part in datasets),
    )


def stratified_parts(
    targets: Tensor, sizes: Sequence[int], *, seed: int = 0, per_class: Sequence[bool] | bool = False
) -> list[Tensor]:
    """Disjoint random parts of a data set with the classes in proportion.

    Args:
        targets: class indices int64 [N]; anything else (regression) is split without strata.
        sizes: number of samples of each part, or of each class in each part.
        seed: seed of the draw. A part does not depend on the sizes of those after it.
        per_class: for each part whether its size counts samples of every class.

    Returns:
        The rows of each part in ascending order, and at the end those that are left.

    Raises:
        ValueError: there are not enough samples.
    """
    n = len(targets)
    strata = targets if targets.dim() == 1 and not targets.is_floating_point() else torch.zeros(n, dtype=torch.long)
    per_class = [per_class] * len(sizes) if isinstance(per_class, bool) else per_class
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    classes, stratum = strata[order].unique(return_inverse=True)
    by_class = torch.argsort(stratum, stable=True)
    order, stratum = order[by_class], stratum[by_class]
    counts = torch.bincount(stratum, minlength=len(classes))
    rank = torch.arange(n) - (counts.cumsum(0) - counts)[stratum]

    used = torch.zeros_like(counts)
    parts = []
    for size, each in zip(sizes, per_class, strict=True):
        free = counts - used
        if each:
            quota = torch.full_like(counts, size)
            if (free < size).any():
                short = int((free < size).nonzero()[0])
                raise ValueError(
                    f"{size} samples per class were asked, but class {classes[short]} has {free[short]} left."
                )
        else:
            if size > int(free.sum()):
                raise ValueError(f"{size} samples were asked, but only {int(free.sum())} of {n} are left.")
            # Largest remainders: the quotas sum to size and none exceeds what is there.
            exact = free.double() * size / max(int(free.sum()), 1)
            quota = exact.floor().long()
            top = torch.argsort(exact - quota, descending=True, stable=True)[: size - int(quota.sum())]
            quota[top] += 1
        taken = (rank >= used[stratum]) & (rank < (used + quota)[stratum])
        parts.append(order[taken].sort().values)
        used = used + quota
    parts.append(order[rank >= used[stratum]].sort().values)
    return parts


class EpochSampler(Sampler[int]):
    """Gives a sampler its random numbers from (seed, epoch) and tells the data set the epoch.

    Lightning calls :meth:`set_epoch`; in several processes it wraps this sampler, and every process draws the same list
    and takes its share. If nobody calls :meth:`set_epoch`, as in a plain loop, every pass counts as an epoch.

    Args:
        dataset: what is sampled.
        inner: the sampler, or None for a random permutation.
        seed: seed of the order.
    """

    def __init__(self, dataset: ArrayDataset, inner: Sampler[int] | None = None, seed: int = 0) -> None:
        self.dataset = dataset
        self.inner = inner
        self.seed = seed
        self.epoch = 0
        self._told = False
        self._passes = 0

    def set_epoch(self, epoch: int) -> None:
        """Fix the epoch of the next pass."""
        self._told = True
        self._start(epoch)

    def _start(self, epoch: int) -> None:
        self.epoch = epoch
        self.dataset.set_epoch(epoch)
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        if not self._told:
            self._start(self._passes)
            self._passes += 1
        with seeded(hash((self.seed, self.epoch))):
            rows = torch.randperm(len(self.dataset)).tolist() if self.inner is None else list(self.inner)
        return iter(rows)

    def __len__(self) -> int:
        return len(self.dataset if self.inner is None else self.inner)


class BaseDataModule(LightningDataModule):
    """Base of the data modules: splits, modifiers, reproducible loaders.

    **Splits.** A set has its own parts ("train", perhaps "val", "test", "unlabeled"); what it lacks is taken out of its
    training part at random (by ``seed``, with the classes in proportion): first the test, then the validation, then the
    training samples. A size counts samples (int) or is a share of the part it is taken from (float); sizes that are not
    given take the class's defaults, or what is left if that is less. With ``train_size`` alone the test set is all the
    rest. For parts that the set has itself, a size keeps that many of it. Samples without a label are always for
    training and count in no size. A ``val_size`` of 0 holds nothing out: the test split is then what validation sees,
    as in the code of many papers; it is the default of sets with an official test split and no validation split.
    ``splits="train+val"`` merges parts for training. With "test" among them (``"train+test"``, the protocol of
    clustering), validation and test see the same merged samples, without augmentation.

    **Modifiers** act on the training set (``modifiers``) or on validation and test (``eval_modifiers``) in the order
    given: selection, labels, index, pixels, views.

    **Order and random numbers** of the training loader depend on ``seed`` and the epoch only: a resumed run sees what
    the uninterrupted one would have seen, with any number of workers.

    Subclasses implement :meth:`load_split` and, where it applies, :meth:`fetch`, :meth:`fit_transforms`,
    :meth:`fit_pixels`, :meth:`default_train_transform` and :meth:`default_eval_transform`.

    Args:
        root: folder of the data.
        batch_size: samples in a training batch; None for all in one.
        eval_batch_size: samples in a batch elsewhere; None for ``batch_size``.
        num_workers: processes that load; 0 loads in the main process.
        seed: seed of splits, order and augmentation.
        download: whether a set with a public address is fetched into ``root``.
        splits: parts of the set to train on, joined by "+".
        train_size: number or share of training samples.
        val_size: number or share of validation samples.
        test_size: number or share of test samples.
        train_transform: replaces the class's own training transform.
        eval_transform: replaces the class's own transform elsewhere.
        modifiers: what is done to the training set.
        eval_modifiers: what is done to the validation and test sets.
        sampler: "instance" (every sample once), "class_balanced", "sqrt" (classes by the root of their size), or a
            callable that makes a sampler from the training set (an :class:`ArrayDataset`).
        drop_last: whether an incomplete last training batch is left out.
        persistent_workers: whether workers live on between epochs.

    Raises:
        ValueError: a bad size, split, sampler or batch size, or an empty part (the latter in ``setup``).
    """

    #: Whether the set's files have to be fetched, or put there by hand, before the first run.
    downloads: bool = False
    available_splits: tuple[str, ...] = ("train", "val", "test")
    default_val_size: int | float = 0.2
    default_test_size: int | float = 0.2
    # Options of some subclasses; they set them on the instance.
    classes: Sequence[int] | None = None
    val_per_class: int | None = None
    test_per_class: int | None = None

    def __init__(
        self,
        root: str = "data",
        batch_size: int | None = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        download: bool = True,
        splits: str = "train",
        train_size: int | float | None = None,
        val_size: int | float | None = None,
        test_size: int | float | None = None,
        train_transform: Callable | None = None,
        eval_transform: Callable | None = None,
        modifiers: Sequence[Modifier] = (),
        eval_modifiers: Sequence[Modifier] = (),
        sampler: Literal["instance", "class_balanced", "sqrt"] | Callable[[Any], Sampler] = "instance",
        drop_last: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        super().__init__()
        for name, value in {"batch_size": batch_size, "eval_batch_size": eval_batch_size}.items():
            if value is not None:
                check_range(name, value, 1)
        check_range("num_workers", num_workers, 0)
        for name, value in {"train_size": train_size, "val_size": val_size, "test_size": test_size}.items():
            check_size(name, value)
        if isinstance(sampler, str):
            check_choice("sampler", sampler, ("instance", "class_balanced", "sqrt"))
        elif not callable(sampler):
            raise ValueError(f"sampler must be a name or a callable that makes a sampler, got {sampler!r}.")
        self.split_names = tuple(splits.split("+"))
        for name in self.split_names:
            check_choice("splits", name, self.available_splits)
        if "train" not in self.split_names:
            raise ValueError(f"splits must contain 'train', got {splits!r}.")
        for name, given in {"modifiers": modifiers, "eval_modifiers": eval_modifiers}.items():
            wrong = [modifier for modifier in given if not callable(modifier)]
            if wrong:
                raise ValueError(f"{name} must be callables (dataset -> dataset), got {wrong[0]!r}.")
        self.root = str(root)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.download = download
        self.splits = splits
        self.train_size = train_size
        self.val_size = val_size
        self.test_size = test_size
        self.train_transform = train_transform
        self.eval_transform = eval_transform
        self.modifiers = tuple(modifiers)
        self.eval_modifiers = tuple(eval_modifiers)
        self.sampler = sampler
        self.drop_last = drop_last
        self.persistent_workers = persistent_workers
        self._parts: dict[str, ArrayDataset] = {}  # while setup runs
        self._train_set: ArrayDataset | None = None  # modified, before set_train_indices
        self._eval_sets: dict[str, ArrayDataset] = {}
        self._train_indices: Tensor | None = None
        self._reload_every: int | None = None

    # hooks of subclasses

    def fetch(self) -> None:
        """Download the set into ``root``; called on one process, only if ``download`` is true."""

    def load_split(self, split: str) -> ArrayDataset | None:
        """The set's own part of this name, or None if it has none.

        Args:
            split: one of ``available_splits``; "train" must exist.

        Raises:
            FileNotFoundError: files are missing; the message says what to fetch from where into which folder.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement load_split.")

    def fit_transforms(self, train: ArrayDataset) -> None:
        """Measure what the preparation needs (means, categories) on the training part, before any modifier.

        ``self._parts`` holds the parts "train", "val" and "test" at this time and may be replaced by prepared ones.
        """

    def fit_pixels(self, train: ArrayDataset) -> None:
        """Measure what the transforms need (mean, deviation) on the training images, as modifiers leave their pixels.

        Args:
            train: the training part before any modifier; the modified training set if its pixels are modified.
        """

    def default_train_transform(self) -> Callable | None:
        """The training transform where none is given; by default the one of evaluation."""
        return self.default_eval_transform()

    def default_eval_transform(self) -> Callable | None:
        """The transform of evaluation where none is given."""
        return None

    def make_transform(self, training: bool) -> Callable | None:
        """The transform of a view ``x``: the given one or the class's own."""
        given = self.train_transform if training else self.eval_transform
        if given is None:
            given = self.default_train_transform() if training else self.default_eval_transform()
        return self.finish_view(given)

    def finish_view(self, transform: Callable | None) -> Callable | None:
        """What the class does to every view after its transform; by default nothing."""
        return transform

    # splits

    def prepare_data(self) -> None:
        """Download, if asked."""
        if self.download:
            self.fetch()

    def setup(self, stage: str | None = None) -> None:
        """Split the set and apply the modifiers; a second call changes nothing."""
        if self._train_set is not None:
            return
        self._parts = self._split()
        self.fit_transforms(self._parts["train"])
        parts, self._parts = self._parts, {}
        fresh = {"transforms": {"x": None}, "seed": self.seed}
        train = parts["train"].replace(training=True, _epoch=_new_epoch(), **fresh)
        for modifier in self.modifiers:
            train = modifier(train)
        _check_not_empty("training", train)
        # What is measured on pixels is measured as they will be seen, but not on a selection of the training part.
        with seeded(self.seed):
            self.fit_pixels(train if train.pixel_ops else parts["train"])
        self._train_set = self._with_transform(train, training=True)
        for name in ("val", "test"):
            # Its own epoch, which stays 0: random transforms of evaluation are the same every time.
            part = parts[name].replace(training=False, _epoch=_new_epoch(), **fresh)
            for modifier in self.eval_modifiers:
                part = modifier(part)
            _check_not_empty(name, part)
            self._eval_sets[name] = self._with_transform(part, training=False)
        self._check_train_indices()

    def _with_transform(self, dataset: ArrayDataset, training: bool) -> ArrayDataset:
        """Give the view ``x`` its transform, unless modifiers made views of their own."""
        if dataset.transforms == {"x": None}:
            return dataset.replace(transforms={"x": self.make_transform(training)})
        return dataset.replace(transforms={name: self.finish_view(view) for name, view in dataset.transforms.items()})

    def _own(self, split: str) -> ArrayDataset | None:
        part = self.load_split(split)
        if part is None or self.classes is None:
            return part
        keep = torch.as_tensor(self.classes)
        if part.num_classes and ((keep < 0) | (keep >= part.num_classes)).any():
            raise ValueError(f"classes must be in 0..{part.num_classes - 1}, got {list(self.classes)}.")
        unlabeled = part.targets < 0
        return part.select((torch.isin(part.targets, keep) | unlabeled).nonzero().flatten())

    def _split(self) -> dict[str, ArrayDataset]:
        own = {name: self._own(name) for name in dict.fromkeys((*self.split_names, "val", "test"))}
        pool = concatenate([own[name] for name in self.split_names if own[name] is not None])
        _check_not_empty("training", pool)
        if "test" in self.split_names:
            sizes = (self.val_size, self.test_size, self.val_per_class, self.test_per_class)
            if any(size is not None for size in sizes):
                raise ValueError(
                    f"splits={self.splits!r} evaluates on the samples that are trained on; "
                    "val_size, test_size, val_per_class and test_per_class have no meaning there."
                )
            pool = self._keep("train_size", pool, self.train_size, None)
            return {"train": pool, "val": pool, "test": pool}

        if "val" in self.split_names and (self.val_size or self.val_per_class):
            raise ValueError(f"splits={self.splits!r} trains on the validation part; val_size has no meaning there.")
        parts: dict[str, ArrayDataset | None] = {"test": own["test"], "val": own["val"]}
        if "val" in self.split_names:
            parts["val"] = None
        for name, size, each in (
            ("test", self.test_size, self.test_per_class),
            ("val", self.val_size, self.val_per_class),
        ):
            if parts[name] is not None and size != 0:
                parts[name] = self._keep(f"{name}_size", parts[name], size, each)
        holds_out_val = parts["val"] is None and "val" not in self.split_names
        sizes = self._sizes(pool, test=parts["test"] is None, val=holds_out_val)
        labeled = _labeled(pool)
        test_rows, val_rows, rest = (
            labeled[rows]
            for rows in stratified_parts(
                pool.targets[labeled],
                sizes["counts"],
                seed=self.seed,
                per_class=[self.test_per_class is not None, self.val_per_class is not None],
            )
        )
        if sizes["train"] is not None and sizes["train"] < len(rest):
            rest = rest[stratified_parts(pool.targets[rest], [sizes["train"]], seed=self.seed + 1)[0]]
        if len(labeled) < len(pool):
            rest = torch.cat([rest, (pool.targets < 0).nonzero().flatten()]).sort().values
        train = pool.select(rest)
        if parts["test"] is None and len(test_rows):
            parts["test"] = pool.select(test_rows)
        if self.val_size == 0:
            parts["val"] = None
        elif parts["val"] is None and len(val_rows):
            parts["val"] = pool.select(val_rows)
        if parts["test"] is None and parts["val"] is None:
            raise ValueError(
                "nothing is left to evaluate on: give val_size or test_size, or splits='train+test' to evaluate on the "
                "training samples."
            )
        return {
            "train": train,
            "val": parts["test"] if parts["val"] is None else parts["val"],
            "test": parts["val"] if parts["test"] is None else parts["test"],
        }

    def _keep(self, name: str, part: ArrayDataset, size: int | float | None, per_class: int | None) -> ArrayDataset:
        """Part of one of the set's own parts."""
        if per_class is not None:
            return part.select(stratified_parts(part.targets, [per_class], seed=self.seed, per_class=True)[0])
        if size is None:
            return part
        count = _count(size, len(part))
        if count > len(part):
            raise ValueError(f"{name}={size} exceeds the {len(part)} samples of that split.")
        return part.select(stratified_parts(part.targets, [count], seed=self.seed)[0])

    def _sizes(self, pool: ArrayDataset, *, test: bool, val: bool) -> dict[str, Any]:
        """Numbers of samples to take out of the pool: [test, val], and how many to train on (None: the rest)."""
        targets = pool.targets[_labeled(pool)]
        n = len(targets)
        train = None if self.train_size is None else _count(self.train_size, n)
        classes = len(targets.unique()) if pool.num_classes else 1

        def wanted(active: bool, size: int | float | None, per_class: int | None) -> int | None:
            if not active:
                return 0
            if per_class is not None:
                return per_class * classes
            return None if size is None else _count(size, n)

        n_test = wanted(test, self.test_size, self.test_per_class)
        n_val = wanted(val, self.val_size, self.val_per_class)
        rest = n - (train or 0) - (n_test or 0) - (n_val or 0)
        given = f"train_size={self.train_size}, val_size={self.val_size}, test_size={self.test_size}"
        if rest < 0 or (train is None and rest == 0):
            raise ValueError(f"{given} ask for more than the {n} samples there are (training needs at least one).")
        if n_val is None:
            n_val = min(_count(self.default_val_size, n), rest)
            rest -= n_val
        if n_test is None:
            n_test = rest if train is not None else min(_count(self.default_test_size, n), rest)
            rest -= n_test
        if train is None and rest < 1:
            raise ValueError(f"{given} leave nothing of the {n} samples to train on.")
        per_class = [self.test_per_class if test else 0, self.val_per_class if val else 0]
        counts = [each if each is not None else count for each, count in zip(per_class, (n_test, n_val), strict=True)]
        return {"counts": counts, "train": train}

    # what modules ask about the training set

    @property
    def train_set(self) -> ArrayDataset:
        """The modified training set, of :meth:`set_train_indices` only the chosen rows."""
        if self._train_set is None:
            raise RuntimeError(f"{type(self).__name__}: call setup('fit') before asking about the training set.")
        if self._train_indices is None:
            return self._train_set
        return self._train_set.select(self._train_indices)

    @property
    def val_set(self) -> ArrayDataset:
        """The validation set."""
        return self._eval_set("val")

    @property
    def test_set(self) -> ArrayDataset:
        """The test set."""
        return self._eval_set("test")

    def _eval_set(self, name: str) -> ArrayDataset:
        if name not in self._eval_sets:
            raise RuntimeError(f"{type(self).__name__}: call setup() before asking for its {name} set.")
        return self._eval_sets[name]

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for regression. Ready after ``setup``."""
        return self.train_set.num_classes if self._train_set is not None else self._eval_set("test").num_classes

    @property
    def train_targets(self) -> Tensor:
        """Targets of the training set, [N]."""
        return self.train_set.targets

    @property
    def class_counts(self) -> Tensor:
        """Training samples of each class, int64 [K]; unknown labels are not counted."""
        train = self.train_set
        if not train.num_classes:
            raise RuntimeError(f"{type(self).__name__} has no classes to count: its targets are not class indices.")
        return long_tail.class_counts(train.targets, train.num_classes)

    @property
    def train_groups(self) -> Tensor | None:
        """Group of every training sample, or None."""
        return self.train_set.extras.get("group")

    @property
    def train_candidates(self) -> Tensor | None:
        """Candidate labels of every training sample, [N, K], or None."""
        return self.train_set.extras.get("candidates")

    def set_train_indices(self, indices: Tensor | Sequence[int] | None) -> None:
        """Keep only these rows of the modified training set from now on.

        Works before and after ``setup``. A trainer that runs makes its training loader anew at the next epoch.

        Args:
            indices: rows of the whole modified training set, int64; None for all.

        Raises:
            ValueError: empty, not integers, or outside the training set.
        """
        if indices is not None:
            indices = torch.as_tensor(indices)
            if indices.dim() != 1 or indices.numel() == 0 or indices.is_floating_point() or indices.dtype == torch.bool:
                raise ValueError(
                    f"indices must be a non-empty vector of integers, got {indices.dtype} {list(indices.shape)}."
                )
            indices = indices.long().cpu()
        self._train_indices = indices
        self._check_train_indices()
        if self.trainer is not None and self._reload_every is None:
            # Until train_dataloader is called next, which puts it back.
            self._reload_every = self.trainer.reload_dataloaders_every_n_epochs
            self.trainer.reload_dataloaders_every_n_epochs = 1

    def _check_train_indices(self) -> None:
        if self._train_indices is None or self._train_set is None:
            return
        low, high = int(self._train_indices.min()), int(self._train_indices.max())
        if low < 0 or high >= len(self._train_set):
            raise ValueError(f"indices must be in 0..{len(self._train_set) - 1}, got {low}..{high}.")

    # loaders

    def _loader(self, dataset: ArrayDataset, batch_size: int | None, **options: Any) -> DataLoader:
        if self.num_workers:
            dataset.share_epoch()
        return DataLoader(
            dataset,
            batch_size=len(dataset) if batch_size is None else batch_size,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.persistent_workers and self.num_workers > 0,
            # The loader's own generator: making an iterator leaves the global one alone.
            generator=torch.Generator().manual_seed(self.seed),
            **options,
        )

    def make_sampler(self, dataset: ArrayDataset) -> EpochSampler:
        """The training sampler, random numbers by (seed, epoch)."""
        if self.sampler == "instance":
            return EpochSampler(dataset, None, self.seed)
        if isinstance(self.sampler, str):
            kind = {"class_balanced": "ClassBalancedSampler", "sqrt": "SquareRootSampler"}[self.sampler]
            return EpochSampler(dataset, getattr(long_tail, kind)(dataset.targets, seed=self.seed), self.seed)
        return EpochSampler(dataset, self.sampler(dataset), self.seed)

    def train_dataloader(self) -> DataLoader:
        """The training set, shuffled, augmented."""
        if self.trainer is not None and self._reload_every is not None:
            self.trainer.reload_dataloaders_every_n_epochs = self._reload_every
            self._reload_every = None
        train = self.train_set
        sampler = self.make_sampler(train)
        if self.drop_last and self.batch_size is not None and len(sampler) < self.batch_size:
            raise ValueError(
                f"drop_last with batch_size={self.batch_size} leaves no batch of the {len(sampler)} training samples."
            )
        return self._loader(train, self.batch_size, sampler=sampler, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader:
        """The validation set, in order."""
        return self._loader(self.val_set, self.eval_batch_size or self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """The test set, in order."""
        return self._loader(self.test_set, self.eval_batch_size or self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """The test set, in order."""
        return self.test_dataloader()

    def train_eval_dataloader(self) -> DataLoader:
        """The training set in index order without augmentation; batches of several views become ``(x, y)``."""
        train = self.train_set
        single = train.batch_type is not None and set(train.transforms) == {"x"}
        plain = train.replace(
            transforms={"x": self.make_transform(training=False)},
            batch_type=train.batch_type if single else None,
            _epoch=_new_epoch(),
        )
        return self._loader(plain, self.eval_batch_size or self.batch_size)

    def feature_dataloader(self) -> DataLoader:
        """:meth:`train_eval_dataloader`, under the name that asks for class statistics."""
        return self.train_eval_dataloader()

    def memory_dataloader(self) -> DataLoader:
        """:meth:`train_eval_dataloader`, under the name that asks for a bank of neighbours."""
        return self.train_eval_dataloader()

    def score_dataloader(self) -> DataLoader:
        """:meth:`train_eval_dataloader`, under the name that asks for sample scores."""
        return self.train_eval_dataloader()


def check_size(name: str, size: int | float | None) -> None:
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, (int, float)):
        raise ValueError(f"{name} must be a number of samples or a share, got {size!r}.")
    if isinstance(size, int):
        check_range(name, size, 1 if name == "train_size" else 0)
    else:
        check_range(name, size, 0, 1, low_open=name == "train_size")


def _count(size: int | float, n: int) -> int:
    return size if isinstance(size, int) else round(size * n)


def _labeled(dataset: ArrayDataset) -> Tensor:
    """The rows with a known label; all of them where targets are not classes."""
    if not dataset.num_classes or dataset.targets.is_floating_point():
        return torch.arange(len(dataset))
    return (dataset.targets >= 0).nonzero().flatten()


def _check_not_empty(name: str, dataset: ArrayDataset) -> None:
    if len(dataset) == 0:
        raise ValueError(f"the {name} set is empty after its selection.")
