"""Manual optimisation with the conveniences of the automatic one.

Lightning leaves zeroing, backward, clipping, accumulation and schedulers to a module that has several optimisers. They
are written here once, so that such a module says only which loss goes to which optimisers.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

__all__ = ["ManualOptimization"]


class ManualOptimization:
    """Mixin for a LightningModule that steps its optimisers itself; put it before the LightningModule in the bases.

    * :meth:`optimize` does zero_grad, backward, clipping and the step, at their place in an accumulation window.
    * Schedulers step by themselves at the interval that ``configure_optimizers`` gave them: "step" is once per training
      batch (per accumulation window), however many optimiser steps the batch made, "epoch" is the epoch's end. One that
      waits for a plateau needs an attribute ``monitor`` (Lightning's ``ReduceLROnPlateau`` of the command line has it).
    * The Trainer refuses its own ``gradient_clip_val`` and ``accumulate_grad_batches`` for such a module: set the
      attributes below instead, in the constructor or on the instance.

    ``trainer.global_step`` counts the steps of all optimisers. Under DDP every backward has to reach every parameter
    (add losses whose parameters are disjoint and call :meth:`optimize` once) unless ``find_unused_parameters`` is set.

    Attributes:
        gradient_clip_val: largest norm (or absolute value) of the gradients of an optimiser; None does not clip.
        gradient_clip_algorithm: "norm" or "value".
        accumulate_batches: number of batches whose gradients are averaged before a step.
    """

    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    accumulate_batches: int = 1

    @property
    def automatic_optimization(self) -> bool:
        """False: the module steps its optimisers itself."""
        return False

    def optimize(self, loss: Tensor, *optimizers: LightningOptimizer, batch_idx: int | None = None) -> bool:
        """Backward of the loss and one step of the optimisers.

        Args:
            loss: a scalar.
            *optimizers: those that step, as ``self.optimizers()`` gives them; all of them if none is named.
            batch_idx: index of the batch, to accumulate over ``accumulate_batches``; without it every call steps.

        Returns:
            Whether the optimisers stepped; False inside an accumulation window.
        """
        if not optimizers:
            everyone = self.optimizers()
            optimizers = tuple(everyone) if isinstance(everyone, list) else (everyone,)
        window = self.accumulate_batches if batch_idx is not None else 1
        if window == 1 or batch_idx % window == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        ends = window == 1 or self._window_ends(batch_idx)
        # Inside a window DDP need not talk: the last backward reduces the sum.
        quiet = nullcontext if ends else getattr(self.trainer.strategy, "block_backward_sync", nullcontext)
        with quiet():
            self.manual_backward(loss / window if window > 1 else loss)
        if ends:
            for optimizer in optimizers:
                optimizer.step()
        return ends

    def _window_ends(self, batch_idx: int) -> bool:
        return (batch_idx + 1) % self.accumulate_batches == 0 or self.trainer.is_last_batch

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Clip: Lightning calls this when a gradient scaler has already undone its scale."""
        super().on_before_optimizer_step(optimizer)
        if self.gradient_clip_val is not None:
            self.clip_gradients(
                optimizer,
                gradient_clip_val=self.gradient_clip_val,
                gradient_clip_algorithm=self.gradient_clip_algorithm,
            )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Step the schedulers of interval "step"."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self._window_ends(batch_idx):
            self._step_schedulers("step", batch_idx // self.accumulate_batches + 1)

    def on_train_epoch_end(self) -> None:
        """Step the schedulers of interval "epoch"."""
        super().on_train_epoch_end()
        self._step_schedulers("epoch", self.current_epoch + 1)

    def scheduler_config(self, scheduler: Any) -> dict[str, Any]:
        """Lightning's description of a scheduler; without the key that manual optimisation ignores."""
        config = super().scheduler_config(scheduler)
        config.pop("monitor", None)
        return config

    def _step_schedulers(self, interval: str, count: int) -> None:
        for config in self.trainer.lr_scheduler_configs:
            if config.interval != interval or count % config.frequency:
                continue
            value = None
            if isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                monitor = getattr(config.scheduler, "monitor", None)
                value = self.trainer.callback_metrics.get(monitor)
                if value is None:
                    known = ", ".join(sorted(self.trainer.callback_metrics)) or "nothing"
                    raise ValueError(f"the scheduler monitors {monitor!r}, which was not logged. Logged: {known}.")
            self.lr_scheduler_step(config.scheduler, value)
