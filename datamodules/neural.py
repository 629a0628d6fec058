"""Recordings of the brain: populations of electrodes."""

from __future__ import annotations

import csv
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_methods.core.checks import check_choice, check_range
from lightning_methods.core.random import make_generator
from lightning_methods.popt.data import PopulationPairs, PopulationWindows, Recording, WindowFiles, window_rows

from .base import EpochSampler, check_size, collate

__all__ = ["PopulationEmbeddingDataModule", "SyntheticPopulationDataModule"]

PopulationSet = PopulationPairs | PopulationWindows


def _share(size: int | float, n: int) -> int:
    return size if isinstance(size, int) else round(size * n)


class _PopulationDataModule(LightningDataModule):
    """Splits and loaders of populations; subclasses implement :meth:`make_sets`."""

    def __init__(
        self,
        mode: Literal["pretrain", "finetune"],
        ensemble_sizes: Sequence[int],
        replace_probability: float,
        scored: Literal["balanced", "all"],
        gaussian_blur: bool,
        blur_std: float,
        max_position: int,
        pad_to_multiple: int,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        seed: int,
        drop_last: bool,
        persistent_workers: bool,
    ) -> None:
        super().__init__()
        check_choice("mode", mode, ("pretrain", "finetune"))
        check_choice("scored", scored, ("balanced", "all"))
        check_range("replace_probability", replace_probability, 0, 1)
        check_range("blur_std", blur_std, 0)
        check_range("max_position", max_position, 2)
        check_range("pad_to_multiple", pad_to_multiple, 1)
        check_range("batch_size", batch_size, 1)
        check_range("num_workers", num_workers, 0)
        if eval_batch_size is not None:
            check_range("eval_batch_size", eval_batch_size, 1)
        if not len(ensemble_sizes) or min(ensemble_sizes) < 2:
            raise ValueError(f"ensemble_sizes must be at least 2 channels each, got {list(ensemble_sizes)}.")
        self.mode = mode
        self.ensemble_sizes = tuple(ensemble_sizes)
        self.replace_probability = replace_probability
        self.scored = scored
        self.blur_std = blur_std if gaussian_blur else 0.0
        self.max_position = max_position
        self.pad_to_multiple = pad_to_multiple
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.drop_last = drop_last
        self.persistent_workers = persistent_workers
        self._sets: dict[str, PopulationSet] = {}

    @abstractmethod
    def make_sets(self) -> dict[str, PopulationSet]:
        """The sets "train", "val" and "test"."""

    def pairs(
        self,
        recordings: Sequence[Recording],
        rows: Tensor | None = None,
        pairs: Tensor | None = None,
        *,
        training: bool = False,
        ensemble_sizes: Sequence[int] | None = None,
    ) -> PopulationPairs:
        """A pretraining set with this module's options."""
        return PopulationPairs(
            recordings,
            rows,
            pairs,
            ensemble_sizes=ensemble_sizes or self.ensemble_sizes,
            replace_probability=self.replace_probability,
            scored=self.scored,
            blur_std=self.blur_std,
            max_position=self.max_position,
            pad_to_multiple=self.pad_to_multiple,
            training=training,
            seed=self.seed,
        )

    def windows(self, recordings: Sequence[Recording], rows: Tensor | None = None) -> PopulationWindows:
        """A decoding set with this module's options."""
        return PopulationWindows(recordings, rows, pad_to_multiple=self.pad_to_multiple)

    def setup(self, stage: str | None = None) -> None:
        """Read or draw the recordings and split them; a second call changes nothing."""
        if self._sets:
            return
        sets = self.make_sets()
        for name, part in sets.items():
            if not len(part):
                raise ValueError(f"the {name} set is empty: give other sizes, or more recordings.")
        self._sets = sets

    def _set(self, name: str) -> PopulationSet:
        if not self._sets:
            raise RuntimeError(f"{type(self).__name__}: call setup() before asking for its {name} set.")
        return self._sets[name]

    @property
    def train_set(self) -> PopulationSet:
        """The training set; ready after ``setup``."""
        return self._set("train")

    @property
    def val_set(self) -> PopulationSet:
        """The validation set; ready after ``setup``."""
        return self._set("val")

    @property
    def test_set(self) -> PopulationSet:
        """The test set; ready after ``setup``."""
        return self._set("test")

    @property
    def num_features(self) -> int:
        """Width of a channel's embedding; ready after ``setup``."""
        return int(self._set("train").recordings[0].embeddings.shape[-1])

    def _loader(self, dataset: PopulationSet, batch_size: int, **options: Any) -> DataLoader:
        if self.num_workers:
            dataset.share_epoch()
        return DataLoader(
            dataset,
            batch_size=batch_size,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.persistent_workers and self.num_workers > 0,
            generator=torch.Generator().manual_seed(self.seed),
            **options,
        )

    def train_dataloader(self) -> DataLoader:
        """The training set, shuffled by (seed, epoch)."""
        train = self.train_set
        if self.drop_last and len(train) < self.batch_size:
            raise ValueError(f"drop_last with batch_size={self.batch_size} leaves no batch of {len(train)} samples.")
        sampler = EpochSampler(train, None, self.seed)
        return self._loader(train, self.batch_size, sampler=sampler, drop_last=self.drop_last)

    def train_eval_dataloader(self) -> DataLoader:
        """The training set in order; in pretraining its samples are still drawn by the epoch."""
        return self._loader(self.train_set, self.eval_batch_size or self.batch_size)

    def val_dataloader(self) -> DataLoader:
        """The validation set, in order; its samples are the same every time."""
        return self._loader(self.val_set, self.eval_batch_size or self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """The test set, in order; its samples are the same every time."""
        return self._loader(self.test_set, self.eval_batch_size or self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """The test set, in order."""
        return self.test_dataloader()


class SyntheticPopulationDataModule(_PopulationDataModule):
    """Generated subjects with electrodes at random places that record a few common slow signals.

    A subject has ``num_latents`` AR(1) signals of its own. What a channel sees of each is a smooth function of its
    position, a sum of Gaussian bumps in a cube, and this function is common to all subjects: so position says what two
    channels share. Every channel has a private AR(1) signal besides. The embedding of a channel in a window is
    ``tanh(A u + b)`` plus noise, with u its mixed signals; A and b are common too.

    ``mode="pretrain"``: train and validate on ``num_subjects`` subjects, test on the two pretraining tasks on one that
    none of them is. ``mode="finetune"``: decode the sign of the first signal of such a new subject from ``train_size``
    labelled windows; training, validation and test windows are stretches of time that follow each other.

    Batches are :class:`~lightning_methods.core.PopTBatch`.

    Args:
        mode: "pretrain" or "finetune".
        num_subjects: subjects to pretrain on.
        num_channels: channels of each, and of the new subject.
        num_windows: windows of each recording; in fine-tuning the stretch that training windows are drawn from.
        input_dim: width of an embedding.
        num_latents: common signals.
        persistence: correlation of a signal from one window to the next, in [0, 1).
        noise: deviation of the noise on the embeddings.
        subject: which new subject is tested or decoded; any number, each is another one.
        train_size: labelled training windows, for fine-tuning; None takes all.
        val_size: validation samples.
        test_size: test samples.
        ensemble_sizes: numbers of channels to draw from in pretraining.
        test_ensemble_sizes: the same for the test.
        replace_probability: see :func:`~lightning_methods.popt.corrupt_channels`.
        scored: likewise.
        gaussian_blur: put noise on the coordinates in pretraining.
        blur_std: its deviation.
        pad_to_multiple: number of channels in a batch, rounded up to a multiple of this.
        batch_size: samples in a training batch.
        eval_batch_size: samples in a batch elsewhere; None for ``batch_size``.
        num_workers: processes that load.
        seed: seed of the world, of the order and of the samples.
        drop_last: leave an incomplete last training batch out.
        persistent_workers: whether workers live on between epochs.

    Raises:
        ValueError: an option is out of range.
    """

    cube = 200
    bumps = 12
    bump_width = 60.0

    def __init__(
        self,
        mode: Literal["pretrain", "finetune"] = "pretrain",
        num_subjects: int = 6,
        num_channels: int = 40,
        num_windows: int = 1000,
        input_dim: int = 16,
        num_latents: int = 3,
        persistence: float = 0.95,
        noise: float = 0.5,
        subject: int = 0,
        train_size: int | None = None,
        val_size: int = 240,
        test_size: int = 960,
        ensemble_sizes: Sequence[int] = (8, 12, 16, 20),
        test_ensemble_sizes: Sequence[int] = (20,),
        replace_probability: float = 0.1,
        scored: Literal["balanced", "all"] = "balanced",
        gaussian_blur: bool = False,
        blur_std: float = 5.0,
        pad_to_multiple: int = 1,
        batch_size: int = 48,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        drop_last: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        super().__init__(
            mode,
            ensemble_sizes,
            replace_probability,
            scored,
            gaussian_blur,
            blur_std,
            self.cube,
            pad_to_multiple,
            batch_size,
            eval_batch_size,
            num_workers,
            seed,
            drop_last,
            persistent_workers,
        )
        check_range("num_subjects", num_subjects, 1)
        check_range("num_channels", num_channels, 2)
        check_range("num_windows", num_windows, 3)
        check_range("input_dim", input_dim, 1)
        check_range("num_latents", num_latents, 1)
        check_range("persistence", persistence, 0, 1, high_open=True)
        check_range("noise", noise, 0)
        check_range("subject", subject, 0)
        check_range("val_size", val_size, 1)
        check_range("test_size", test_size, 1)
        if train_size is not None:
            check_range("train_size", train_size, 1, num_windows)
        if not len(test_ensemble_sizes) or min(test_ensemble_sizes) < 2:
            raise ValueError(f"test_ensemble_sizes must be at least 2 channels each, got {list(test_ensemble_sizes)}.")
        self.num_subjects = num_subjects
        self.num_channels = num_channels
        self.num_windows = num_windows
        self.input_dim = input_dim
        self.num_latents = num_latents
        self.persistence = persistence
        self.noise = noise
        self.subject = subject
        self.train_size = train_size
        self.val_size = val_size
        self.test_size = test_size
        self.test_ensemble_sizes = tuple(test_ensemble_sizes)

    def mixing(self, coords: Tensor) -> Tensor:
        """What channels at these positions see of each common signal, [..., 3] -> [..., num_latents]."""
        generator = make_generator(self.seed, "population world")
        centres = torch.rand(self.bumps, 3, generator=generator) * self.cube
        heights = torch.randn(self.bumps, self.num_latents, generator=generator)
        distance = (coords.float()[..., None, :] - centres).square().sum(dim=-1)
        return torch.exp(-distance / (2 * self.bump_width**2)) @ heights

    def draw_subject(self, number: int, n_windows: int) -> Recording:
        """A recording of the subject with this number; its labels are 1 where the first signal is positive."""
        world = make_generator(self.seed, "population embedding")
        columns = torch.randn(self.num_latents + 1, self.input_dim, generator=world)
        offset = torch.randn(self.input_dim, generator=world)
        generator = make_generator(self.seed, "population subject", number)
        coords = torch.randint(self.cube, (self.num_channels, 3), generator=generator)
        common = self._signals(n_windows, self.num_latents, generator)
        private = self._signals(n_windows, self.num_channels, generator)
        mixed = common[:, None] * self.mixing(coords)
        inside = torch.cat([mixed, private[..., None]], dim=-1) @ columns + offset
        noise = torch.randn(n_windows, self.num_channels, self.input_dim, generator=generator)
        labels = (common[:, 0] > 0).float()
        return Recording(inside.tanh() + self.noise * noise, coords, labels, f"subject {number}")

    def _signals(self, length: int, count: int, generator: torch.Generator) -> Tensor:
        """Stationary AR(1) signals of variance 1, [length, count]."""
        from scipy.signal import lfilter

        shocks = torch.randn(length, count, generator=generator, dtype=torch.float64)
        shocks[1:] *= (1 - self.persistence**2) ** 0.5
        return torch.from_numpy(lfilter([1.0], [1.0, -self.persistence], shocks.numpy(), axis=0)).float()

    def make_sets(self) -> dict[str, PopulationSet]:
        """Draw the subjects."""
        new = self.num_subjects + self.subject
        if self.mode == "pretrain":
            recordings = [self.draw_subject(number, self.num_windows) for number in range(self.num_subjects)]
            rows = window_rows(recordings, leave_out=1)
            rows = rows[torch.randperm(len(rows), generator=make_generator(self.seed, "population split"))]
            if self.val_size >= len(rows):
                raise ValueError(f"val_size={self.val_size} leaves nothing of the {len(rows)} samples to train on.")
            test = [self.draw_subject(new, self.test_size + 1)]
            return {
                "train": self.pairs(recordings, rows[self.val_size :], training=True),
                "val": self.pairs(recordings, rows[: self.val_size]),
                "test": self.pairs(test, ensemble_sizes=self.test_ensemble_sizes),
            }
        recording = self.draw_subject(new, self.num_windows + self.val_size + self.test_size)
        rows = window_rows([recording])
        train, val, test = rows.split([self.num_windows, self.val_size, self.test_size])
        if self.train_size is not None:
            labels = recording.labels[: self.num_windows]
            chosen = torch.randperm(len(train), generator=make_generator(self.seed, "population labels", self.subject))
            # As many of each label as possible: with few labels a draw may have one of them only.
            order = [chosen[labels[chosen] == label] for label in (0, 1)]
            half = min(self.train_size // 2, len(order[0]), len(order[1]))
            rest = torch.cat([order[0][half:], order[1][half:]])[: self.train_size - 2 * half]
            train = train[torch.cat([order[0][:half], order[1][:half], rest]).sort().values]
        return {
            name: self.windows([recording], part) for name, part in {"train": train, "val": val, "test": test}.items()
        }


# files


def _read_tsv(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.reader(file, delimiter="\t") if row]


class PopulationEmbeddingDataModule(_PopulationDataModule):
    """Embeddings of electrodes on disk, for pretraining or decoding (Brain Treebank, or any set in this form).

    A folder for pretraining and one for each decoding task, with

    * ``all_ordered_electrodes.json``: ``{subject: [names]}``, in the order of the channels in the arrays;
    * ``localization/<subject>.csv``: columns ``Electrode``, ``L``, ``I``, ``P`` (integer-truncated positions) and, if
      known, ``DesikanKilliany`` (the region);

    and the embeddings in one of two layouts:

    * one array a recording: ``recordings/<subject>/<recording>.npy``, float [n_windows, n_channels, d] in the order of
      time, memory-mapped (write them with :func:`~lightning_methods.popt.embed_recording`, or from the other layout
      with :func:`~lightning_methods.popt.pack_recordings`); for decoding a ``<recording>.tsv`` beside it with one label
      a row;
    * the authors': ``manifest.tsv`` (pretraining: three paths and the subject a row; decoding: a path and the subject)
      and ``labels.tsv`` (one label a row, perhaps followed by the time), one ``.npy`` [n_channels, d] a window. Paths
      that do not exist are looked for under ``root``.

    In pretraining, pairs of windows are drawn on the fly; ``dynamic_pairs=False`` takes those of the authors' manifest.
    Binary labels are numbered in alphabetical order ("False" is 0, "True" is 1).

    Splits: "random" is the papers', but windows that overlap in time fall on both sides of it; "blocked" gives every
    split its own stretch of each recording, train, validation, test in the order of time (where ``labels.tsv`` has the
    times, else in the order of the rows). ``test_subjects`` are tested on and nothing else.

    Batches are :class:`~lightning_methods.core.PopTBatch`, padded where subjects differ.

    Args:
        root: the folder.
        mode: "pretrain" or "finetune".
        task: "binary" or "regression", for decoding.
        subjects: use only these; None for all.
        test_subjects: subjects held out for the test; empty splits the samples of all.
        recordings: use only these, as ``<subject>/<recording>``; None for all. In the authors' layout a recording is a
            folder of windows.
        electrodes: a JSON file ``{subject: [names]}``; only these subjects and channels are used.
        num_channels: of these (or of all) the first so many of each subject, e.g. the best ones; None for all.
        dynamic_pairs: draw pairs in pretraining, or take them from the manifest.
        split: "random" or "blocked".
        train_size: number or share of training samples, for learning from few labels; None for all that are left.
        val_size: number or share of validation samples; None is 0.01 in pretraining and 0.1 in decoding.
        test_size: number or share of test samples.
        ensemble_sizes: numbers of channels to draw from in pretraining.
        replace_probability: see :func:`~lightning_methods.popt.corrupt_channels`.
        scored: likewise.
        gaussian_blur: put noise on the coordinates in pretraining (the paper does; the authors' configuration not).
        blur_std: its deviation.
        coordinate_columns: columns of the localisation that hold the position.
        coordinate_offset: added to the coordinates before they are truncated; for coordinates that can be negative.
        max_position: coordinates must be in ``[0, max_position)``.
        pad_to_multiple: number of channels in a batch, rounded up to a multiple of this, for compiled code.
        batch_size: samples in a training batch.
        eval_batch_size: samples in a batch elsewhere; None for ``batch_size``.
        num_workers: processes that load.
        seed: seed of split, order and samples.
        drop_last: leave an incomplete last training batch out.
        persistent_workers: whether workers live on between epochs.

    Raises:
        ValueError: an option is out of range, or the files do not fit each other (in ``setup``).
        FileNotFoundError: files are missing (in ``setup``); the message says which.
    """

    #: Recordings are made available on request by their owners; the files are put there by hand.
    downloads = True

    def __init__(
        self,
        root: str = "data/popt",
        mode: Literal["pretrain", "finetune"] = "pretrain",
        task: Literal["binary", "regression"] = "binary",
        subjects: Sequence[str] | None = None,
        test_subjects: Sequence[str] = (),
        recordings: Sequence[str] | None = None,
        electrodes: str | None = None,
        num_channels: int | None = None,
        dynamic_pairs: bool = True,
        split: Literal["random", "blocked"] = "random",
        train_size: int | float | None = None,
        val_size: int | float | None = None,
        test_size: int | float = 0.1,
        ensemble_sizes: Sequence[int] = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100),
        replace_probability: float = 0.1,
        scored: Literal["balanced", "all"] = "balanced",
        gaussian_blur: bool = True,
        blur_std: float = 5.0,
        coordinate_columns: Sequence[str] = ("L", "I", "P"),
        coordinate_offset: float = 0.0,
        max_position: int = 5000,
        pad_to_multiple: int = 1,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 42,
        drop_last: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        super().__init__(
            mode,
            ensemble_sizes,
            replace_probability,
            scored,
            gaussian_blur,
            blur_std,
            max_position,
            pad_to_multiple,
            batch_size,
            eval_batch_size,
            num_workers,
            seed,
            drop_last,
            persistent_workers,
        )
        check_choice("task", task, ("binary", "regression"))
        check_choice("split", split, ("random", "blocked"))
        for name, size in {"train_size": train_size, "val_size": val_size, "test_size": test_size}.items():
            check_size(name, size)
        if num_channels is not None:
            check_range("num_channels", num_channels, 1)
        if len(coordinate_columns) != 3:
            raise ValueError(f"coordinate_columns must name three columns, got {list(coordinate_columns)}.")
        if split == "blocked" and mode == "pretrain" and not dynamic_pairs:
            raise ValueError("split='blocked' needs dynamic_pairs: the manifest's pairs reach across a recording.")
        self.root = Path(root)
        self.task = task
        self.subjects = None if subjects is None else tuple(subjects)
        self.test_subjects = tuple(test_subjects)
        self.recording_names = None if recordings is None else set(recordings)
        self.electrodes = electrodes
        self.num_channels = num_channels
        self.dynamic_pairs = dynamic_pairs
        self.split = split
        self.train_size = train_size
        self.val_size = (0.01 if mode == "pretrain" else 0.1) if val_size is None else val_size
        self.test_size = test_size
        self.coordinate_columns = tuple(coordinate_columns)
        self.coordinate_offset = coordinate_offset
        #: Region of each used channel, by subject; ready after ``setup``. None where the table has none.
        self.regions: dict[str, list[str] | None] = {}

    # reading

    def _need(self, path: Path) -> Path:
        if not path.exists():
            raise FileNotFoundError(
                f"{path} is missing. {type(self).__name__} reads all_ordered_electrodes.json, "
                "localization/<subject>.csv and either recordings/<subject>/<recording>.npy or manifest.tsv with "
                f"labels.tsv, all under {self.root} (recordings: https://braintreebank.dev; embeddings are made by a "
                "temporal encoder such as BrainBERT)."
            )
        return path

    def _read_electrodes(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The used channels of every subject: their columns in the arrays and their coordinates."""
        ordered = json.loads(self._need(self.root / "all_ordered_electrodes.json").read_text(encoding="utf-8"))
        chosen = ordered
        if self.electrodes is not None:
            chosen = json.loads(self._need(Path(self.electrodes)).read_text(encoding="utf-8"))
        found = {}
        for subject, names in chosen.items():
            if subject not in ordered or (self.subjects is not None and subject not in self.subjects):
                continue
            column = {name: index for index, name in enumerate(ordered[subject])}
            names = list(names)[: self.num_channels]
            unknown = [name for name in names if name not in column]
            if unknown:
                raise ValueError(f"{self.electrodes}: {subject} has no electrodes {unknown[:5]}.")
            table = self._read_localization(subject)
            missing = [name for name in names if name not in table]
            if missing:
                raise ValueError(f"localization/{subject}.csv has no electrodes {missing[:5]}.")
            position = [[float(table[name][axis]) for axis in self.coordinate_columns] for name in names]
            coords = (torch.tensor(position, dtype=torch.float64) + self.coordinate_offset).long()
            if ((coords < 0) | (coords >= self.max_position)).any():
                raise ValueError(
                    f"the coordinates of {subject} go from {int(coords.min())} to {int(coords.max())}; they must be in "
                    f"[0, {self.max_position}). Set coordinate_offset (MNI: 150)."
                )
            regions = [table[name].get("DesikanKilliany") for name in names]
            self.regions[subject] = None if None in regions else regions
            found[subject] = torch.tensor([column[name] for name in names]), coords
        if not found:
            raise ValueError(f"none of the subjects {sorted(ordered)} is used: look at subjects and electrodes.")
        return found

    def _read_localization(self, subject: str) -> dict[str, dict[str, str]]:
        path = self._need(self.root / "localization" / f"{subject}.csv")
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for column in ("Electrode", *self.coordinate_columns):
            if not rows or column not in rows[0]:
                raise ValueError(f"{path} has no column {column!r}, or no rows.")
        return {row["Electrode"]: row for row in rows}

    def _labels(self, rows: list[str], numbering: dict[str, int]) -> Tensor:
        if self.task == "regression":
            return torch.tensor([float(label) for label in rows])
        return torch.tensor([float(numbering[label]) for label in rows])

    def _numbering(self, labels: Sequence[str]) -> dict[str, int]:
        """Numbers of the labels of a binary task, in alphabetical order."""
        if self.task == "regression" or self.mode == "pretrain":
            return {}
        names = sorted(set(labels))
        if len(names) != 2:
            raise ValueError(f"task='binary' needs two different labels, the files have {names[:5]}.")
        return {name: index for index, name in enumerate(names)}

    def _used(self, subject: str, recording: str) -> bool:
        wanted = self.recording_names is None or f"{subject}/{recording}" in self.recording_names
        return wanted and (self.subjects is None or subject in self.subjects)

    def _recording(
        self,
        name: str,
        subject: str,
        embeddings: Any,
        channels: tuple[Tensor, Tensor],
        labels: Tensor | None,
    ) -> Recording:
        columns, coords = channels
        shape = tuple(embeddings.shape)
        if len(shape) != 3 or int(columns.max()) >= shape[1]:
            raise ValueError(
                f"{name} has shape {list(shape)}, expected [n_windows, n_channels, d] with the "
                f"{int(columns.max()) + 1} or more channels that all_ordered_electrodes.json names."
            )
        everything = torch.equal(columns, torch.arange(shape[1]))
        return Recording(embeddings, coords, labels, subject, None if everything else columns)

    def _read_arrays(self, channels: dict[str, tuple[Tensor, Tensor]]) -> list[Recording]:
        """The layout with one array a recording."""
        paths = [
            path
            for path in sorted((self.root / "recordings").glob("*/*.npy"))
            if path.parent.name in channels and self._used(path.parent.name, path.stem)
        ]
        rows = {}
        if self.mode == "finetune":
            rows = {path: [row[0] for row in _read_tsv(self._need(path.with_suffix(".tsv")))] for path in paths}
        numbering = self._numbering([label for labels in rows.values() for label in labels])
        found = []
        for path in paths:
            labels = self._labels(rows[path], numbering) if rows else None
            embeddings = np.load(path, mmap_mode="r")
            if labels is not None and len(labels) != len(embeddings):
                raise ValueError(f"{path} has {len(embeddings)} windows, its .tsv {len(labels)} labels.")
            found.append(self._recording(str(path), path.parent.name, embeddings, channels[path.parent.name], labels))
        return found

    def _find(self, path: str) -> Path:
        """A path of the manifest: as it is, else under the root by as much of its end as exists there."""
        direct = Path(path)
        if direct.is_file():
            return direct
        for start in range(len(direct.parts)):
            candidate = self.root.joinpath(*(part for part in direct.parts[start:] if part != direct.anchor))
            if candidate.is_file():
                return candidate
        return self._need(self.root / path)

    def _read_manifest(
        self, channels: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[list[Recording], Tensor | None, Tensor | None]:
        """The authors' layout: recordings, and in pretraining the rows and pairs of the manifest."""
        manifest = _read_tsv(self._need(self.root / "manifest.tsv"))
        labels = _read_tsv(self._need(self.root / "labels.tsv"))
        width = 4 if self.mode == "pretrain" else 2
        if len(labels) != len(manifest) or any(len(row) != width for row in manifest):
            raise ValueError(
                f"manifest.tsv must have {width} columns for mode={self.mode!r} and as many rows as labels.tsv; got "
                f"{sorted({len(row) for row in manifest})} columns, {len(manifest)} rows and {len(labels)} labels."
            )
        used = [
            (paths, subject, label)
            for (*paths, subject), label in zip(manifest, labels, strict=True)
            if subject in channels and self._used(subject, Path(paths[0]).parent.name)
        ]
        # A recording is the folder that its windows are in.
        folders: dict[tuple[str, str], set[str]] = {}
        for paths, subject, _ in used:
            folders.setdefault((subject, str(Path(paths[0]).parent)), set()).update(paths)
        numbering = self._numbering([label[0] for _, _, label in used])
        place: dict[str, tuple[int, int]] = {}
        found = []
        times = {paths[0]: float(label[1]) for paths, _, label in used if self.mode == "finetune" and len(label) > 1}
        label_of = {paths[0]: label[0] for paths, _, label in used} if self.mode == "finetune" else {}
        for index, ((subject, folder), paths) in enumerate(folders.items()):
            key: Callable[[str], Any] = times.__getitem__ if times.keys() >= paths else _window_number
            ordered = sorted(paths, key=key)
            place.update({path: (index, window) for window, path in enumerate(ordered)})
            values = self._labels([label_of[path] for path in ordered], numbering) if label_of else None
            files = WindowFiles([self._find(path) for path in ordered])
            found.append(self._recording(folder, subject, files, channels[subject], values))
        if self.mode == "finetune" or self.dynamic_pairs:
            return found, None, None
        foreign = [paths for paths, _, _ in used if len({place[path][0] for path in paths}) > 1]
        if foreign:
            raise ValueError(f"manifest.tsv: the windows {foreign[0]} are of different recordings.")
        rows = torch.tensor([place[paths[0]] for paths, _, _ in used])
        pairs = torch.tensor([[place[paths[1]][1], place[paths[2]][1], int(label[0])] for paths, _, label in used])
        return found, rows, pairs

    # splitting

    def make_sets(self) -> dict[str, PopulationSet]:
        """Read the files and split the samples."""
        channels = self._read_electrodes()
        rows = pairs = None
        if (self.root / "recordings").is_dir():
            if self.mode == "pretrain" and not self.dynamic_pairs:
                raise ValueError("dynamic_pairs=False needs the pairs of a manifest.tsv; recordings/ has none.")
            recordings = self._read_arrays(channels)
        else:
            recordings, rows, pairs = self._read_manifest(channels)
        if not recordings:
            raise ValueError(f"{self.root} has no recording of the subjects and recordings that are used.")
        unknown = set(self.test_subjects) - {recording.subject for recording in recordings}
        if unknown:
            raise ValueError(f"test_subjects {sorted(unknown)} have no recording here.")
        make = self.pairs if self.mode == "pretrain" else self.windows
        if self.split == "blocked" and self.mode == "pretrain":
            # Every stretch is a recording of its own, so that no pair reaches into another split.
            parts = self._stretches(recordings)
            return {name: make(part, **({"training": True} if name == "train" else {})) for name, part in parts.items()}
        if rows is None:
            rows = window_rows(recordings, leave_out=1 if self.mode == "pretrain" else 0)
        chosen = self._split(recordings, rows)
        sets = {}
        for name, index in chosen.items():
            if self.mode == "pretrain":
                fixed = None if pairs is None else pairs[index]
                sets[name] = self.pairs(recordings, rows[index], fixed, training=name == "train")
            else:
                sets[name] = self.windows(recordings, rows[index])
        return sets

    def _sizes(self, n: int) -> tuple[int, int]:
        """Numbers of validation and test samples out of n; no test samples where whole subjects are held out."""
        return _share(self.val_size, n), 0 if self.test_subjects else _share(self.test_size, n)

    def _split(self, recordings: Sequence[Recording], rows: Tensor) -> dict[str, Tensor]:
        """Indices of the rows of each split."""
        held_out = torch.tensor([recording.subject in self.test_subjects for recording in recordings])[rows[:, 0]]
        pool = (~held_out).nonzero().flatten()
        generator = make_generator(self.seed, "population split")
        shuffled = torch.randperm(len(pool), generator=generator)
        if self.split == "random":
            pool = pool[shuffled]
            groups = [pool]
        else:
            order = (rows[pool, 0] * (rows[:, 1].max() + 1) + rows[pool, 1]).argsort()
            pool = pool[order]
            groups = pool.split(rows[pool, 0].unique_consecutive(return_counts=True)[1].tolist())
        parts: dict[str, list[Tensor]] = {"train": [], "val": [], "test": []}
        for group in groups:
            share = len(group) / max(len(pool), 1)
            n_val, n_test = (size if len(groups) == 1 else round(size * share) for size in self._sizes(len(pool)))
            if n_val + n_test > len(group):
                raise ValueError(
                    f"val_size={self.val_size} and test_size={self.test_size} ask for more than {len(group)} samples."
                )
            n_train = len(group) - n_val - n_test
            for name, part in zip(parts, group.split([n_train, n_val, n_test]), strict=True):
                parts[name].append(part)
        found = {name: torch.cat(part) for name, part in parts.items()}
        if self.test_subjects:
            found["test"] = held_out.nonzero().flatten()
        if self.train_size is not None:
            keep = _share(self.train_size, len(found["train"]))
            if keep > len(found["train"]):
                raise ValueError(
                    f"train_size={self.train_size} asks for more than the {len(found['train'])} there are."
                )
            order = torch.randperm(len(found["train"]), generator=generator)[:keep]
            found["train"] = found["train"][order]
        return {name: index.sort().values for name, index in found.items()}

    def _stretches(self, recordings: Sequence[Recording]) -> dict[str, list[Recording]]:
        """Train, validation and test stretches of every recording."""
        if any(isinstance(size, int) for size in (self.val_size, self.test_size)) or self.train_size is not None:
            raise ValueError(
                "split='blocked' in pretraining takes val_size and test_size as shares, and no train_size."
            )
        parts: dict[str, list[Recording]] = {"train": [], "val": [], "test": []}
        for recording in recordings:
            if recording.subject in self.test_subjects:
                parts["test"].append(recording)
                continue
            n = recording.n_windows
            n_val, n_test = self._sizes(n)
            ends = {"train": n - n_val - n_test, "val": n - n_test, "test": n}
            start = 0
            for name, end in ends.items():
                if end - start >= 2:  # a pretraining sample needs two windows
                    parts[name].append(recording.between(start, end))
                start = end
        return parts


def _window_number(path: str) -> tuple[int, str]:
    """Order of a window's file in its recording: by number where its name is one."""
    stem = Path(path).stem
    return (int(stem) if stem.isdigit() else -1, stem)
