"""The paper's learning-rate schedule."""

from __future__ import annotations

from torch.optim import Optimizer

from ..core.checks import check_range
from ..core.schedules import WarmupSchedule
from .functional import ramp_up_factor

__all__ = ["RampUp"]


class RampUp(WarmupSchedule):
    """Linear warm-up, then a stair down by a factor at each hundredth of the run: :func:`ramp_up_factor`.

    Step it every optimiser step (``lr_interval: step``)::

        lr_scheduler:
          class_path: RampUp
          init_args: {gamma: 0.99}
        lr_interval: step

    Args:
        optimizer: the optimiser.
        warmup: share of the run, in [0, 1).
        gamma: factor of a stair; the paper has 0.99 for pretraining and 0.95 for fine-tuning.
        total_steps: length of the run; None is filled in from the trainer.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, optimizer: Optimizer, warmup: float = 0.025, gamma: float = 0.99, total_steps: int | None = None
    ) -> None:
        check_range("warmup", warmup, 0, 1, high_open=True)
        check_range("gamma", gamma, 0, 1, low_open=True)
        self.gamma = gamma
        super().__init__(optimizer, "constant", warmup, total_steps)

    def factor(self, step: int) -> float:
        """What the initial learning rates are multiplied by after ``step`` steps."""
        if step == 0 and self.total_steps is None:  # asked for before the trainer has told the length of the run
            return 0.0 if self.warmup else 1.0
        return ramp_up_factor(step, int(self._total()), self.warmup, self.gamma)
