"""Learning-rate schedules with a warm-up, for steps or for epochs.

In YAML::

    lr_scheduler:
      class_path: warmup_cosine
      init_args: {warmup: 0.02, min_ratio: 0.001}
    lr_interval: step
"""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .checks import check_choice, check_range

__all__ = ["WarmupSchedule", "warmup_constant", "warmup_cosine", "warmup_linear"]


class WarmupSchedule(LRScheduler):
    """Linear warm-up from ``start_factor`` to 1, then "cosine" or "linear" decay to ``min_ratio``, or "constant".

    Every group's rate is its initial rate times the factor. The scheduler counts its own calls: whether these are
    optimiser steps or epochs is the caller's choice (``lr_interval`` of our modules).

    Args:
        optimizer: the optimiser.
        shape: what follows the warm-up.
        warmup: calls of warm-up if at least 1, a share of ``total_steps`` if below 1.
        total_steps: length of the run in calls. None: it is read when it is first needed, after the owner has set
            the attribute (:class:`~lightning_methods.core.MethodModule` does so from its trainer).
        min_ratio: factor at the end.
        start_factor: factor of the very first call when there is a warm-up.

    Raises:
        ValueError: an argument is out of range, or ``total_steps`` is still None when it is needed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shape: Literal["cosine", "linear", "constant"] = "cosine",
        warmup: float = 0,
        total_steps: int | None = None,
        min_ratio: float = 0.0,
        start_factor: float = 0.0,
    ) -> None:
        check_choice("shape", shape, ("cosine", "linear", "constant"))
        check_range("warmup", warmup, 0)
        check_range("min_ratio", min_ratio, 0)
        check_range("start_factor", start_factor, 0)
        if warmup > 1 and warmup != int(warmup):
            raise ValueError(f"warmup must be a whole number of steps, or a share below 1; got {warmup}.")
        if total_steps is not None:
            check_range("total_steps", total_steps, 1)
        self.shape = shape
        self.warmup = warmup
        self.total_steps = total_steps
        self.min_ratio = min_ratio
        self.start_factor = start_factor
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        """What the initial learning rates are multiplied by after ``step`` calls."""
        if step == 0:  # needs no total: it is asked for before the trainer has told it
            return self.start_factor if self.warmup > 0 else 1.0
        warmup = self.warmup if self.warmup >= 1 else self.warmup * self._total() if self.warmup else 0
        if step < warmup:
            return self.start_factor + (1 - self.start_factor) * step / warmup
        if self.shape == "constant":
            return 1.0
        progress = min((step - warmup) / max(self._total() - warmup, 1), 1.0)
        left = (1 + math.cos(math.pi * progress)) / 2 if self.shape == "cosine" else 1 - progress
        return self.min_ratio + (1 - self.min_ratio) * left

    def _total(self) -> float:
        if self.total_steps is None or math.isinf(self.total_steps):
            raise ValueError(
                "this schedule needs the length of the run: give total_steps, or set the Trainer's max_epochs or "
                "max_steps."
            )
        return self.total_steps

    def get_lr(self) -> list[float]:
        """The rates of all groups."""
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]


class warmup_cosine(WarmupSchedule):  # noqa: N801 - called like a function; a class, so that YAML can give it arguments
    """Linear warm-up, then half a cosine down to ``min_ratio`` of the initial rate; see :class:`WarmupSchedule`.

    Args:
        optimizer: the optimiser.
        warmup: calls of warm-up if at least 1, a share of the run if below 1.
        total_steps: length of the run in calls; None is filled in from the trainer.
        min_ratio: factor at the end.
        start_factor: factor of the very first call.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = warmup_cosine(optimizer, warmup=2, total_steps=6)
        >>> [round(schedule.factor(step), 2) for step in range(7)]
        [0.0, 0.5, 1.0, 0.85, 0.5, 0.15, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float = 0,
        total_steps: int | None = None,
        min_ratio: float = 0.0,
        start_factor: float = 0.0,
    ) -> None:
        super().__init__(optimizer, "cosine", warmup, total_steps, min_ratio, start_factor)


class warmup_linear(WarmupSchedule):  # noqa: N801
    """Linear warm-up, then a line down to ``min_ratio`` of the initial rate; see :class:`WarmupSchedule`.

    Args:
        optimizer: the optimiser.
        warmup: calls of warm-up if at least 1, a share of the run if below 1.
        total_steps: length of the run in calls; None is filled in from the trainer.
        min_ratio: factor at the end.
        start_factor: factor of the very first call.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float = 0,
        total_steps: int | None = None,
        min_ratio: float = 0.0,
        start_factor: float = 0.0,
    ) -> None:
        super().__init__(optimizer, "linear", warmup, total_steps, min_ratio, start_factor)


class warmup_constant(WarmupSchedule):  # noqa: N801
    """Linear warm-up, then the initial rate; see :class:`WarmupSchedule`.

    Args:
        optimizer: the optimiser.
        warmup: calls of warm-up if at least 1, a share of the run if below 1.
        total_steps: length of the run in calls; needed for a share only, None is filled in from the trainer.
        start_factor: factor of the very first call.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: float = 0,
        total_steps: int | None = None,
        start_factor: float = 0.0,
    ) -> None:
        super().__init__(optimizer, "constant", warmup, total_steps, start_factor=start_factor)
