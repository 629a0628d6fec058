"""Trajectories of dynamical systems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_methods.core.checks import check_choice, check_range

from .base import ArrayDataset, BaseDataModule, BatchDataset

__all__ = ["MoonWindows", "ThreeMoonsDataModule", "moon_periods", "moon_positions"]

TRAJECTORY = 10_000  # samples of a trajectory that windows are cut from
PHASE = 0.3


def moon_periods() -> tuple[list[tuple[float, ...]], tuple[float, ...]]:
    """Periods of the moons: the triples to train on, and the one that is held out.

    Of the 35 triples out of 0.5, 1, ..., 3.5 the authors keep the nine that numpy sorts first by their least common
    multiple, and hold the last one out. Five triples share the multiple 6 for three places, and which of them numpy
    takes is an accident of its unstable sort: the triples are therefore written out.

    Source: Zhang et al., "Memory Mosaics", ICLR 2025 (authors' released code).

    Example:
        >>> train, held_out = moon_periods()
        >>> [common_period(triple) for triple in train], common_period(held_out)
        ([2.0, 3.0, 3.0, 3.0, 3.0, 5.0, 6.0, 6.0], 6.0)
    """
    train = [
        (0.5, 1.0, 2.0),
        (0.5, 1.0, 1.5),
        (0.5, 1.0, 3.0),
        (0.5, 1.5, 3.0),
        (1.0, 1.5, 3.0),
        (0.5, 1.0, 2.5),
        (1.0, 1.5, 2.0),
        (0.5, 1.5, 2.0),
    ]
    return train, (1.0, 2.0, 3.0)


def common_period(periods: Sequence[float]) -> float:
    """The least common multiple of periods in halves: after it the whole configuration returns."""
    return math.lcm(*(round(2 * period) for period in periods)) / 2


def moon_positions(time: Tensor, periods: Tensor, observer: str = "sun") -> Tensor:
    """Positions of moons on unit circles, (sin, cos) of each one after the other.

    Args:
        time: [B, T].
        periods: of the moons, [B, M].
        observer: "sun", or "planet": positions relative to the last moon, whose own stays as it is.

    Returns:
        float32 [B, T, 2 M].
    """
    angle = 2 * math.pi * time.double()[:, :, None] / periods.double()[:, None] + PHASE
    position = torch.stack([angle.sin(), angle.cos()], dim=-1)
    if observer == "planet":
        position = torch.cat([position[:, :, :-1] - position[:, :, -1:], position[:, :, -1:]], dim=2)
    return position.flatten(2).float()


class MoonWindows(BatchDataset):
    """Windows of trajectories: ``(x, y)``, float32 [T, 6] both, y one step later.

    A training window has a random triple of periods and a random start, drawn anew in every epoch.

    Args:
        size: windows in an epoch.
        periods: triples to draw from, [K, 3].
        block_size: T.
        rate: samples in a unit of time.
        observer: see :func:`moon_positions`.
        seed: seed of the draws; the data module sets its own.
        first: number of the first window; windows with other numbers are other draws.
    """

    def __init__(
        self,
        size: int,
        periods: Tensor,
        block_size: int,
        rate: float,
        observer: str = "sun",
        seed: int = 0,
        first: int = 0,
    ) -> None:
        numbers = torch.arange(first, first + size)
        super().__init__(numbers, torch.zeros(size), num_classes=0, indices=numbers, seed=seed)
        self.periods = periods
        self.block_size = block_size
        self.rate = rate
        self.observer = observer

    def make(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Windows; each batch has its own periods and starts."""
        triple = torch.randint(len(self.periods), (len(rows),))
        start = torch.randint(TRAJECTORY - 2 * self.block_size - 1, (len(rows), 1))
        time = (start + torch.arange(self.block_size + 1)) / self.rate
        position = moon_positions(time, self.periods[triple], self.observer)
        return position[:, :-1], position[:, 1:]


class ThreeMoonsDataModule(BaseDataModule):
    """Three moons on circular orbits: predict the next positions of a configuration that was never seen.

    Training draws windows of eight triples of periods; validation and test are windows of the held-out triple (1, 2,
    3), always the same. Batches are ``(x, y)``, float32 [B, block_size, 6] with (sin, cos) of each moon.

    Source: Zhang et al., "Memory Mosaics", ICLR 2025, section on the three moons (authors' released code).

    Args:
        block_size: positions in a window; at most 4998, since starts are drawn from 10,000 samples.
        min_periods: common periods of the held-out triple in a window: it sets how densely time is sampled.
        observer: "sun" or "planet", see :func:`moon_positions`.
        steps_per_epoch: batches in an epoch.
        num_val: windows in validation and in the test.
        batch_size: windows in a training batch.
        **kwargs: arguments of :class:`BaseDataModule`.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        block_size: int = 800,
        min_periods: float = 3,
        observer: Literal["sun", "planet"] = "sun",
        steps_per_epoch: int = 100,
        num_val: int = 64,
        batch_size: int = 64,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        check_range("block_size", block_size, 2, TRAJECTORY // 2 - 2)
        check_range("min_periods", min_periods, 0, low_open=True)
        check_choice("observer", observer, ("sun", "planet"))
        check_range("steps_per_epoch", steps_per_epoch, 1)
        check_range("num_val", num_val, 1)
        self.block_size = block_size
        self.observer = observer
        self.train_periods, self.held_out = moon_periods()
        self.rate = block_size / common_period(self.held_out) / min_periods
        self.sizes = {"train": steps_per_epoch * batch_size, "val": num_val, "test": num_val}

    @property
    def before_lcm(self) -> tuple[int, int]:
        """Positions at which each held-out moon has come round (1.1 times the longest period), but not all together."""
        return round(1.1 * max(self.held_out) * self.rate), round(common_period(self.held_out) * self.rate)

    def load_split(self, split: str) -> ArrayDataset:
        """Windows of the training triples, or of the held-out one."""
        periods = self.train_periods if split == "train" else [self.held_out]
        # Validation goes on where the test ends: both are drawn with the seed of the data module.
        first = self.sizes["test"] if split == "val" else 0
        return MoonWindows(
            self.sizes[split], torch.tensor(periods), self.block_size, self.rate, self.observer, self.seed, first
        )
