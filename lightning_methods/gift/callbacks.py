"""Training of the teacher, for who has none."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.checks import check_range
from ..core.distributed import broadcast
from ..core.module import Classifier

__all__ = ["TeacherTraining"]


class TeacherTraining(Callback):
    """Train the module's ``teacher`` by cross-entropy on the full data before the student starts.

    It acts once, at the start of the fit: the teacher is thawed, trained with an optimiser and data of its own, frozen
    again and put back into eval mode. The run's own random numbers, loops and optimisers do not notice. Every process
    of a distributed run trains the same teacher, and the weights of the first are taken, so that all agree to the last
    bit.

    A resumed run finds the teacher in its checkpoint and does not train it again, provided that the module saves it
    (``save_teacher=True``); otherwise it is trained anew.

    Logs ``teacher/acc``, the teacher's accuracy on the test set of ``data`` (on its validation set if it has no other).

    Args:
        data: where the teacher learns: the full set that the student's is distilled from, with the same test split.
        epochs: passes over it; a ``fast_dev_run`` makes one.
        optimizer: makes the optimiser from the teacher's parameters.
        lr_scheduler: makes the scheduler from the optimiser; steps every epoch.
        seed: seed of the training; None takes the run's.

    Raises:
        ValueError: the module has no teacher, or the strategy splits it over the devices.
    """

    def __init__(
        self,
        data: LightningDataModule,
        epochs: int = 20,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=2e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int | None = None,
    ) -> None:
        check_range("epochs", epochs, 1)
        self.data = data
        self.epochs = epochs
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.seed = seed
        self.trained = False
        self.accuracy = float("nan")
        self._saved = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train the teacher unless a checkpoint brought it."""
        teacher = getattr(pl_module, "teacher", None)
        if not isinstance(teacher, nn.Module):
            raise ValueError(f"TeacherTraining needs a module with a teacher; {type(pl_module).__name__} has none.")
        self._saved = not "teacher.".startswith(tuple(getattr(pl_module, "checkpoint_excludes", ())))
        if self.trained:
            return
        if trainer.strategy.restore_checkpoint_after_setup:
            raise ValueError(
                f"TeacherTraining cannot train a teacher that {type(trainer.strategy).__name__} splits over the "
                "devices: train it in a run of its own and load it by `load_network`."
            )
        shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        epochs = range(1 if trainer.fast_dev_run else self.epochs)
        with isolate_rng():
            self._set_seed()
            train, evaluation = self._loaders(trainer)
            teacher.requires_grad_(True)
            try:
                self._train(
                    teacher, train, track(epochs, description="Training the teacher", disable=not shown, transient=True)
                )
            finally:
                teacher.requires_grad_(False).eval()
            for value in teacher.state_dict().values():
                value.copy_(broadcast(value))
            self.accuracy = _accuracy(teacher, evaluation)
        self.trained = True
        rank_zero_info(f"The teacher is trained: accuracy {self.accuracy:.4f}.")
        for logger in trainer.loggers:
            logger.log_metrics({"teacher/acc": self.accuracy}, step=trainer.global_step)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the teacher's accuracy beside the student's."""
        if self.trained:
            pl_module.log("teacher/acc", self.accuracy)

    def _loaders(self, trainer: Trainer) -> tuple[Iterable, Iterable]:
        if trainer.local_rank == 0:
            self.data.prepare_data()
        trainer.strategy.barrier("TeacherTraining")
        self.data.setup("fit")
        if not is_overridden("test_dataloader", self.data, LightningDataModule):
            return self.data.train_dataloader(), self.data.val_dataloader()
        self.data.setup("test")
        return self.data.train_dataloader(), self.data.test_dataloader()

    def _set_seed(self) -> None:
        seed = self.seed if self.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - transforms of other people draw from it

    def _train(self, teacher: nn.Module, loader: Iterable, epochs: Iterable[int]) -> None:
        teacher.train()
        optimizer = self.optimizer_factory(list(teacher.parameters()))
        scheduler = self.lr_scheduler_factory(optimizer) if self.lr_scheduler_factory is not None else None
        with torch.enable_grad():
            for _ in epochs:
                for batch in loader:
                    x, y = _inputs_and_target(batch, teacher)
                    F.cross_entropy(teacher(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Whether the checkpoint holds a trained teacher, and how good it is."""
        return {"trained": self.trained and self._saved, "accuracy": self.accuracy}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the teacher of the checkpoint."""
        self.trained = state_dict["trained"]
        self.accuracy = state_dict["accuracy"]


def _inputs_and_target(batch: Any, network: nn.Module) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a batch, where the network is and in its dtype."""
    parameter = next(network.parameters())
    x, y = move_data_to_device(Classifier.inputs_and_target(batch), parameter.device)
    return (x.to(parameter.dtype) if x.is_floating_point() else x), y


@torch.no_grad()
def _accuracy(network: nn.Module, loader: Iterable) -> float:
    correct, count = 0, 0
    for batch in loader:
        x, y = _inputs_and_target(batch, network)
        correct += (network(x).argmax(dim=1) == y).sum()
        count += len(y)
    return float(correct / count)
