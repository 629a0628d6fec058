"""Callbacks that every run gets, and the base of the penalties that methods add to another module's loss."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from typing import Any

import torch
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from .checks import check_range
from .hooks import capture_outputs

__all__ = ["FiniteGuard", "LossPenalty", "SeedEveryEpoch"]


class SeedEveryEpoch(Callback):
    """Seed the global random generators from (seed, epoch, rank) when an epoch starts.

    With it a run that was interrupted and resumed from a checkpoint at an epoch's end draws what the uninterrupted run
    would have drawn: dropout, augmentation on the batch, noise. It acts only after ``seed_everything`` was called (the
    command line does so by default); without a seed the generators are left alone.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remember the run's seed."""
        seed = os.environ.get("PL_GLOBAL_SEED")
        self._seed = int(seed) if seed is not None else None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed torch (all devices), numpy and python."""
        if self._seed is None:
            return
        text = f"{self._seed}/{trainer.current_epoch}/{trainer.global_rank}".encode()
        seed_everything(int.from_bytes(hashlib.sha256(text).digest()[:4], "little"), verbose=False)
        os.environ["PL_GLOBAL_SEED"] = str(self._seed)


def _float_tensors(batch: Any, name: str = "batch") -> list[tuple[str, Tensor]]:
    """The floating point tensors of a batch with a readable path to each."""
    if isinstance(batch, Tensor):
        return [(name, batch)]
    if hasattr(batch, "_asdict"):
        batch = batch._asdict()
    if isinstance(batch, dict):
        return [found for key, value in batch.items() for found in _float_tensors(value, f"{name}.{key}")]
    if isinstance(batch, (list, tuple)):
        return [found for i, value in enumerate(batch) for found in _float_tensors(value, f"{name}[{i}]")]
    return []


class FiniteGuard(Callback):
    """Stop with a clear error when the data or the loss are not finite, before such weights reach a checkpoint.

    The first training batch is looked at once (empty, NaN, infinite); the loss once per epoch and before validations.
    """

    def __init__(self) -> None:
        self._checked = False
        self._loss: Tensor | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Check the first batch of the fit."""
        if self._checked:
            return
        self._checked = True
        for name, x in _float_tensors(batch):
            if x.numel() == 0 and x.dim() and x.shape[0] == 0:
                raise ValueError(f"the first training batch is empty: {name} has shape {list(x.shape)}.")
            if x.is_floating_point() and not torch.isfinite(x).all():
                bad = int((~torch.isfinite(x)).sum())
                raise ValueError(
                    f"the training data are not finite: {bad} of {x.numel()} entries of {name} in the first batch "
                    "are NaN or infinite. Clean or impute the data before training."
                )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step's loss; it is read once per epoch, not here, where that would wait for the device."""
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the latest loss before a validation, after which checkpoints are written."""
        self._check_loss(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the epoch's latest loss."""
        self._check_loss(trainer)

    def _check_loss(self, trainer: Trainer) -> None:
        loss, self._loss = self._loss, None
        if isinstance(loss, Tensor) and not torch.isfinite(loss).all():
            raise ValueError(
                f"the training loss became {loss.item()} in epoch {trainer.current_epoch}. Earlier checkpoints "
                "are kept. Try a smaller learning rate, --trainer.gradient_clip_val 1.0 or full precision."
            )


class LossPenalty(Callback):
    """Base of callbacks that add ``weight * penalty(outputs, batch)`` to the training loss of any LightningModule.

    A forward hook keeps the output of one submodule during ``training_step``; the penalty is added to the loss that the
    step returns. Nothing is left on the module when training ends. Manual optimisation has no such loss: it is refused.

    Args:
        weight: factor of the penalty, finite; 0 switches it off.
        layer: name of the submodule whose output the penalty sees, as in ``named_modules()``.
    """

    def __init__(self, weight: float, layer: str) -> None:
        check_range("weight", weight)
        self.weight = weight
        self.layer = layer
        self._capture: capture_outputs | None = None

    @abstractmethod
    def penalty(self, outputs: Tensor, batch: Any) -> Tensor:
        """The penalty of one batch, a scalar with gradient.

        Args:
            outputs: what ``layer`` returned in this training step.
            batch: the training batch.
        """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the hook and wrap the training step."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(self).__name__} adds to the loss that training_step returns; {type(pl_module).__name__} "
                "optimises manually. Add the penalty inside its own step instead."
            )
        capture = capture_outputs(pl_module, [self.layer])
        step = pl_module.training_step

        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            capture.clear()
            result = step(batch, *args, **kwargs)
            if result is None or self.weight == 0:
                return result
            if self.layer not in capture.outputs:
                raise ValueError(f"{type(self).__name__}: layer {self.layer!r} was not used in training_step.")
            penalty = self.penalty(capture.outputs[self.layer], batch)
            pl_module.log(f"train/{type(self).__name__}", penalty.detach())
            capture.clear()
            if isinstance(result, dict):
                return {**result, "loss": result["loss"] + self.weight * penalty}
            return result + self.weight * penalty

        pl_module.training_step = training_step  # an instance attribute: the class stays as it is
        self._capture = capture.__enter__()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the hook and the wrapper."""
        self._remove(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hook and the wrapper."""
        self._remove(pl_module)

    def _remove(self, pl_module: LightningModule) -> None:
        if self._capture is not None:
            self._capture.__exit__(None, None, None)
            self._capture = None
            pl_module.__dict__.pop("training_step", None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_capture": None}
