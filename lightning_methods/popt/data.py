"""Populations out of recordings: embeddings, pretraining pairs drawn on the fly, decoding windows, padding."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ..core.batches import PopTBatch
from ..core.checks import check_choice, check_range, check_shape
from ..core.random import make_generator
from .functional import corrupt_channels, lengths_to_pad_mask, sample_ensembles, sample_windows

__all__ = [
    "PopulationPairs",
    "PopulationWindows",
    "Recording",
    "WindowFiles",
    "collate_population",
    "embed_recording",
    "merge_populations",
    "pack_recordings",
]


# recordings


class WindowFiles:
    """Windows in one ``.npy`` file each, [n_channels, d], read when they are asked for.

    Args:
        paths: files in the order of time, of one shape.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.paths = [str(path) for path in paths]
        if not self.paths:
            raise ValueError("paths must name at least one file.")
        self.shape = (len(self.paths), *np.load(self.paths[0], mmap_mode="r").shape)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return WindowFiles(self.paths[key])
        windows, channels = (np.asarray(part) for part in key)
        found = np.empty((*windows.shape, self.shape[2]), dtype=np.float32)
        for window in np.unique(windows):  # every file is opened once
            here = windows == window
            found[here] = np.load(self.paths[window], mmap_mode="r")[channels[here]]
        return found


@dataclass(frozen=True)
class Recording:
    """One recording of one subject.

    Attributes:
        embeddings: [n_windows, n_channels, d] in the order of time: a tensor, an array (memory-mapped too) or
            :class:`WindowFiles`.
        coords: integer positions of the channels, int64 [n_channels, 3].
        labels: float [n_windows], for decoding.
        subject: its name.
        channels: the channels that are used, int64 [S]; None for all. ``coords`` has the same rows.
    """

    embeddings: Any
    coords: Tensor
    labels: Tensor | None = None
    subject: str = ""
    channels: Tensor | None = None

    @property
    def n_windows(self) -> int:
        """Number of windows."""
        return len(self.embeddings)

    @property
    def n_channels(self) -> int:
        """Number of channels that are used."""
        return len(self.coords)

    def read(self, windows: Tensor, channels: Tensor) -> Tensor:
        """Rows of the recording, float32 [..., d], for windows and channels of one shape [...]."""
        if self.channels is not None:
            channels = self.channels[channels]
        if isinstance(self.embeddings, Tensor):
            return self.embeddings[windows, channels].float()
        return torch.from_numpy(np.asarray(self.embeddings[windows.numpy(), channels.numpy()], dtype=np.float32))

    def between(self, start: int, stop: int) -> Recording:
        """The windows ``start .. stop - 1``; nothing is read."""
        labels = None if self.labels is None else self.labels[start:stop]
        return replace(self, embeddings=self.embeddings[start:stop], labels=labels)


@torch.no_grad()
def embed_recording(
    signal: Tensor,
    encoder: Callable[[Tensor], Tensor],
    sampling_rate: int = 2048,
    window: float = 5.0,
    step: float = 0.5,
    chunk_size: int = 16,
) -> Tensor:
    """Embeddings of all channels in windows over a whole recording, by a frozen temporal encoder.

    Args:
        signal: voltages, [n_channels, n_samples].
        encoder: maps [rows, samples] to [rows, d], e.g. :class:`~lightning_methods.popt.SpectrogramEncoder`; every row
            is one channel in one window.
        sampling_rate: samples per second.
        window: length of a window in seconds.
        step: seconds between the starts of neighbouring windows.
        chunk_size: windows that go through the encoder at a time.

    Returns:
        [n_windows, n_channels, d]: what a :class:`Recording` holds.

    Raises:
        ValueError: the recording is shorter than a window, or an option is out of range.

    Example:
        >>> embed_recording(torch.randn(3, 100), lambda x: x[:, :4], sampling_rate=10, window=2.0, step=1.0).shape
        torch.Size([9, 3, 4])
    """
    sizes = check_shape("signal", signal, "channels samples")
    check_range("window", window, 0, low_open=True)
    check_range("step", step, 0, low_open=True)
    check_range("chunk_size", chunk_size, 1)
    length, hop = round(window * sampling_rate), max(round(step * sampling_rate), 1)
    if sizes["samples"] < length:
        raise ValueError(f"signal has {sizes['samples']} samples, fewer than the {length} of a window.")
    windows = signal.unfold(1, length, hop).transpose(0, 1)
    parts = [encoder(part.flatten(0, 1)).unflatten(0, part.shape[:2]) for part in windows.split(chunk_size)]
    return torch.cat(parts)


def pack_recordings(source: str | Path, root: str | Path) -> list[Path]:
    """Turn folders of one ``.npy`` per window into one array per recording, which is memory-mapped when it is read.

    Args:
        source: the authors' layout, ``<source>/<subject>/<recording>/<number>.npy``, [n_channels, d] each.
        root: gets ``recordings/<subject>/<recording>.npy``, float32 [n_windows, n_channels, d].

    Returns:
        The files that were written.

    Raises:
        FileNotFoundError: there are no such files.
        ValueError: the windows of a recording differ in shape.
    """
    written = []
    for folder in sorted(path for path in Path(source).glob("*/*") if path.is_dir()):
        paths = sorted(folder.glob("[0-9]*.npy"), key=lambda path: int(path.stem))
        if not paths:
            continue
        shape = np.load(paths[0], mmap_mode="r").shape
        target = Path(root, "recordings", folder.parent.name, f"{folder.name}.npy")
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".part")
        array = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.float32, shape=(len(paths), *shape))
        for index, path in enumerate(paths):
            window = np.load(path)
            if window.shape != shape:
                raise ValueError(f"{path} has shape {window.shape}, {paths[0]} {shape}: not one recording.")
            array[index] = window
        array.flush()
        os.replace(unfinished, target)
        written.append(target)
    if not written:
        raise FileNotFoundError(f"{source} has no files <subject>/<recording>/<number>.npy.")
    return written


# batches


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def merge_populations(batches: Sequence[PopTBatch], pad_to_multiple: int = 1) -> PopTBatch:
    """One batch of several, padded to the largest population.

    Args:
        batches: batches, [B_i, S_i, ...].
        pad_to_multiple: the common number of channels is rounded up to a multiple of this, so that few different
            shapes occur (compiled code is made anew for each).

    Returns:
        [sum B_i, S, ...]. Padding has activity, position, ensemble and replace label 0.
    """
    size = _round_up(max(batch.x.shape[1] for batch in batches), pad_to_multiple)
    joined: dict[str, Tensor | None] = {}
    for name, filling in {"x": 0.0, "coords": 0, "seq_id": 0, "pad_mask": True, "replace_label": 0}.items():
        parts = [getattr(batch, name) for batch in batches]
        if parts[0] is None:
            joined[name] = None
            continue
        padded = [F.pad(part, (*(0, 0) * (part.dim() - 2), 0, size - part.shape[1]), value=filling) for part in parts]
        joined[name] = torch.cat(padded) if len(padded) > 1 else padded[0]
    return PopTBatch(label=torch.cat([batch.label for batch in batches]), **joined)


def collate_population(samples: Sequence[PopTBatch], pad_to_multiple: int = 1) -> PopTBatch:
    """Collate populations of different sizes.

    Args:
        samples: single samples, with x [S_i, d], coords [S_i, 3], seq_id [S_i], a label and perhaps replace_label
            [S_i]; their pad_mask is not read.
        pad_to_multiple: see :func:`merge_populations`.

    Returns:
        A batch, padded to the largest population.

    Example:
        >>> def sample(size):
        ...     zeros = torch.zeros(size, dtype=torch.long)
        ...     coords = torch.zeros(size, 3, dtype=torch.long)
        ...     return PopTBatch(torch.randn(size, 4), coords, zeros, zeros.bool(), torch.tensor(1.0))
        >>> collate_population([sample(2), sample(3)]).pad_mask
        tensor([[False, False,  True],
                [False, False, False]])
    """
    lengths = torch.tensor([len(sample.x) for sample in samples])
    size = _round_up(int(lengths.max()), pad_to_multiple)

    def padded(name: str) -> Tensor:
        rows = pad_sequence([getattr(sample, name) for sample in samples], batch_first=True)
        return F.pad(rows, (*(0, 0) * (rows.dim() - 2), 0, size - rows.shape[1]))

    return PopTBatch(
        padded("x"),
        padded("coords"),
        padded("seq_id"),
        lengths_to_pad_mask(lengths, size),
        torch.stack([torch.as_tensor(sample.label, dtype=torch.float32) for sample in samples]),
        None if samples[0].replace_label is None else padded("replace_label"),
    )


def _first(batch: PopTBatch) -> PopTBatch:
    """The single sample in a batch of one."""
    return PopTBatch(*(None if value is None else value[0] for value in batch))


class _Populations(Dataset):
    """Samples of several recordings, fetched a batch at a time: one read per recording in the batch.

    Args:
        recordings: where the samples are from.
        rows: recording and window of each sample, int64 [N, 2].
        pad_to_multiple: see :func:`merge_populations`.
        training: random numbers change with the epoch; otherwise they belong to the sample and never change.
        seed: seed of the random numbers.
    """

    def __init__(
        self, recordings: Sequence[Recording], rows: Tensor, pad_to_multiple: int, training: bool, seed: int
    ) -> None:
        check_shape("rows", rows, "samples two", two=2)
        check_range("pad_to_multiple", pad_to_multiple, 1)
        self.recordings = list(recordings)
        self.rows = rows
        self.pad_to_multiple = pad_to_multiple
        self.training = training
        self.seed = seed
        self._epoch = torch.zeros(1, dtype=torch.long)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """The epoch from which training samples take their random numbers."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; workers of a loader follow."""
        self._epoch.fill_(epoch)

    def share_epoch(self) -> None:
        """Keep the epoch in shared memory, so that workers that outlive an epoch see it change."""
        self._epoch.share_memory_()

    @abstractmethod
    def _draw(self, recording: int, rows: Tensor, generator: torch.Generator, sizes: Sequence[int]) -> PopTBatch:
        """The samples of some rows, all of one recording and of one size."""

    def _sizes(self, generator: torch.Generator) -> Sequence[int]:
        """What the sizes of the populations of one batch are drawn from."""
        return ()

    def __getitem__(self, row: int) -> PopTBatch:
        row = int(row)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a data set of {len(self)}.")
        return _first(self._one(row % len(self)))

    def _one(self, row: int) -> PopTBatch:
        """A sample whose random numbers are its own: those of its row, in training also of the epoch."""
        generator = make_generator(self.seed, "sample", row, *([self.epoch] if self.training else []))
        return self._draw(int(self.rows[row, 0]), torch.tensor([row]), generator, self._sizes(generator))

    def __getitems__(self, rows: Sequence[int]) -> PopTBatch:
        """A collated batch in the order of ``rows``."""
        if not self.training:
            return merge_populations([self._one(int(row)) for row in rows], self.pad_to_multiple)
        rows = torch.as_tensor(rows)
        generator = make_generator(self.seed, "batch", self.epoch, *rows.tolist())
        sizes = self._sizes(generator)
        recordings = self.rows[rows, 0]
        order = recordings.argsort(stable=True)
        groups = order.split(recordings.bincount()[recordings.unique()].tolist())
        drawn = [self._draw(int(recordings[group[0]]), rows[group], generator, sizes) for group in groups]
        batch = merge_populations(drawn, self.pad_to_multiple)
        back = order.argsort()
        return PopTBatch(*(None if value is None else value[back] for value in batch))


class PopulationPairs(_Populations):
    """Pretraining samples: two ensembles of channels at two times, with some channels replaced.

    Ensemble A is taken from the sample's window, ensemble B from the next one (label 0) or from any of the recording
    (label 1); see :func:`~lightning_methods.popt.sample_windows`. Replacements come from a third window and another
    channel. All samples of a training batch have one size, drawn anew for every batch, so that there is no padding but
    for subjects with fewer channels. Evaluation samples are the same every time, in batches of any kind.

    Args:
        recordings: recordings with at least two windows and two channels.
        rows: recording and first window of each sample, int64 [N, 2]; None for every window that has a next one.
        pairs: second window, third window and label of each sample, int64 [N, 3], where they are fixed beforehand; None
            draws them.
        ensemble_sizes: numbers of channels (of both ensembles together) to draw from.
        replace_probability: see :func:`~lightning_methods.popt.corrupt_channels`.
        scored: likewise.
        blur_std: deviation of the noise on the coordinates; 0 for none.
        max_position: noisy coordinates stay in ``[0, max_position)``.
        pad_to_multiple: see :func:`merge_populations`.
        training: random numbers change with the epoch.
        seed: seed of the random numbers.

    Raises:
        ValueError: an option is out of range, or a recording is too small.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        rows: Tensor | None = None,
        pairs: Tensor | None = None,
        *,
        ensemble_sizes: Sequence[int] = tuple(range(10, 101, 10)),
        replace_probability: float = 0.1,
        scored: Literal["balanced", "all"] = "balanced",
        blur_std: float = 0.0,
        max_position: int = 5000,
        pad_to_multiple: int = 1,
        training: bool = True,
        seed: int = 0,
    ) -> None:
        for recording in recordings:
            if recording.n_windows < 2 or recording.n_channels < 2:
                raise ValueError(
                    f"a recording of {recording.subject or 'a subject'} has {recording.n_windows} windows and "
                    f"{recording.n_channels} channels; pretraining samples need two of each."
                )
        if not len(ensemble_sizes) or min(ensemble_sizes) < 2:
            raise ValueError(f"ensemble_sizes must be at least 2 channels each, got {list(ensemble_sizes)}.")
        check_range("replace_probability", replace_probability, 0, 1)
        check_choice("scored", scored, ("balanced", "all"))
        check_range("blur_std", blur_std, 0)
        rows = window_rows(recordings, leave_out=1) if rows is None else rows
        super().__init__(recordings, rows, pad_to_multiple, training, seed)
        if pairs is not None:
            check_shape("pairs", pairs, "samples three", samples=len(rows), three=3)
        self.pairs = pairs
        self.ensemble_sizes = tuple(ensemble_sizes)
        self.replace_probability = replace_probability
        self.scored = scored
        self.blur_std = blur_std
        self.max_position = max_position

    def _sizes(self, generator: torch.Generator) -> Sequence[int]:
        return [self.ensemble_sizes[int(torch.randint(len(self.ensemble_sizes), (), generator=generator))]]

    def _draw(self, recording: int, rows: Tensor, generator: torch.Generator, sizes: Sequence[int]) -> PopTBatch:
        source = self.recordings[recording]
        window = self.rows[rows, 1]
        if self.pairs is None:
            second, third, label = sample_windows(window, source.n_windows, generator)
        else:
            second, third, label = self.pairs[rows].unbind(1)
        first, other = sample_ensembles(source.n_channels, sizes, generator, batch=len(rows))
        channel = torch.cat([first, other], dim=1)
        seq_id = torch.cat([torch.zeros_like(first), torch.ones_like(other)], dim=1)
        when = torch.where(seq_id == 0, window[:, None], second[:, None])
        # Where to read is corrupted, not what was read: replacements cost no second read.
        shuffled = torch.rand(len(rows), source.n_channels, generator=generator).argsort(dim=1).gather(1, channel)
        here = torch.stack([when, channel], dim=-1)
        elsewhere = torch.stack([third[:, None].expand_as(channel), shuffled], dim=-1)
        here, replace_label = corrupt_channels(here, elsewhere, self.replace_probability, self.scored, generator)
        coords = source.coords[channel]
        if self.blur_std:
            noise = torch.randn(coords.shape, generator=generator) * self.blur_std
            coords = (coords + noise).clamp(0, self.max_position - 1).long()
        return PopTBatch(
            source.read(here[..., 0], here[..., 1]),
            coords,
            seq_id,
            torch.zeros_like(seq_id, dtype=torch.bool),
            label.float(),
            replace_label,
        )


class PopulationWindows(_Populations):
    """Decoding samples: all used channels of a recording at one time, one ensemble, with a label.

    Args:
        recordings: recordings with labels.
        rows: recording and window of each sample, int64 [N, 2]; None for all windows.
        pad_to_multiple: see :func:`merge_populations`.

    Raises:
        ValueError: a recording has no labels.
    """

    def __init__(
        self, recordings: Sequence[Recording], rows: Tensor | None = None, *, pad_to_multiple: int = 1
    ) -> None:
        for recording in recordings:
            if recording.labels is None or len(recording.labels) != recording.n_windows:
                raise ValueError(f"the recordings need a label for every window; {recording.subject!r} has none.")
        rows = window_rows(recordings) if rows is None else rows
        # Nothing is random here, so batches are always read recording by recording.
        super().__init__(recordings, rows, pad_to_multiple, training=True, seed=0)

    @property
    def labels(self) -> Tensor:
        """Labels of all samples, float [N]."""
        label = torch.empty(len(self.rows))
        for index, recording in enumerate(self.recordings):
            mine = self.rows[:, 0] == index
            label[mine] = recording.labels[self.rows[mine, 1]].float()
        return label

    def _draw(self, recording: int, rows: Tensor, generator: torch.Generator, sizes: Sequence[int]) -> PopTBatch:
        source = self.recordings[recording]
        window = self.rows[rows, 1]
        shape = (len(rows), source.n_channels)
        zeros = torch.zeros(shape, dtype=torch.long)
        x = source.read(window[:, None].expand(shape), torch.arange(source.n_channels).expand(shape))
        label = source.labels[window].float()
        return PopTBatch(x, source.coords.expand(len(rows), -1, -1), zeros, zeros.bool(), label)


def window_rows(recordings: Sequence[Recording], leave_out: int = 0) -> Tensor:
    """Recording and window of every window, but for the last ``leave_out`` of each recording; int64 [N, 2]."""
    parts = []
    for index, recording in enumerate(recordings):
        windows = torch.arange(recording.n_windows - leave_out)
        parts.append(torch.stack([torch.full_like(windows, index), windows], dim=1))
    return torch.cat(parts) if parts else torch.empty(0, 2, dtype=torch.long)
