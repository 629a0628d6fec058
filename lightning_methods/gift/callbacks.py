"""Training of the teacher, for who has none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.first_stage import FirstStage
from ..core.module import Classifier

__all__ = ["TeacherTraining"]


class TeacherTraining(FirstStage):
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

    network_name = "teacher"

    def __init__(
        self,
        data: LightningDataModule,
        epochs: int = 20,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=2e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(data, epochs, optimizer, lr_scheduler, seed)
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
        with self.own_random_numbers():
            train, evaluation = self._loaders(trainer)
            teacher.requires_grad_(True)
            try:
                self.train(trainer, teacher, lambda batch: _cross_entropy(teacher, batch), train)
            finally:
                teacher.requires_grad_(False).eval()
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
        self.prepare_data(trainer)
        self.data.setup("fit")
        if not is_overridden("test_dataloader", self.data, LightningDataModule):
            return self.data.train_dataloader(), self.data.val_dataloader()
        self.data.setup("test")
        return self.data.train_dataloader(), self.data.test_dataloader()

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


def _cross_entropy(network: nn.Module, batch: Any) -> Tensor:
    x, y = _inputs_and_target(batch, network)
    return F.cross_entropy(network(x), y)


@torch.no_grad()
def _accuracy(network: nn.Module, loader: Iterable) -> float:
    correct, count = 0, 0
    for batch in loader:
        x, y = _inputs_and_target(batch, network)
        correct += (network(x).argmax(dim=1) == y).sum()
        count += len(y)
    return float(correct / count)
