"""A learner on a stream of tasks: it is told the batches, never the task."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from ..core import distributed
from ..core.module import Classifier, MethodModule

__all__ = ["ContinualClassifier"]


class ContinualClassifier(MethodModule):
    """Cross-entropy learner on a stream of tasks, measured by its online accuracy.

    Batches are ``(x, y)`` or have these fields; logits may have positions, as in next-token prediction. A task is the
    data module's ``epochs_per_task`` epochs (1 if it has no such attribute); the learner itself never sees where one
    ends.

    Online accuracy is the accuracy on a batch before the update on it. Task accuracy is its mean over a task; the
    headline is the mean task accuracy over the last tenth of the tasks.

    Logs ``train/loss`` and ``train/online_acc`` (of single batches, every ``log_every_n_steps``), ``train/task_acc``
    and ``train/task_loss`` (when a task ends), ``train/first_tasks_acc`` and ``train/last_tasks_acc`` (at the end; over
    a tenth of the tasks each); ``test/acc`` and ``test/loss`` on the data module's test set, which is the last task's
    data, and beside them ``test/first_tasks_acc`` and ``test/last_tasks_acc``: the online accuracies of the training,
    for whoever reads the test's results.

    Methods that keep the network plastic are callbacks: :class:`~lightning_methods.snr.SelfNormalizedResets` and its
    competitors.

    Args:
        network: returns logits, [B, ...] -> [B, num_classes] or [B, T] -> [B, T, num_classes].
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Attributes:
        task_accuracies: online accuracy of every task that has ended.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=1e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        self.network = network
        self.task_accuracies: list[float] = []
        # Right predictions, summed losses and predictions of the running task. Every process counts its own batches;
        # what ended epochs have counted is with the first one, whose buffers are in the checkpoint.
        self.register_buffer("task_sums", torch.zeros(3, dtype=torch.float64))
        self._ddp_params_and_buffers_to_ignore = ["task_sums"]  # else each step would overwrite the others' counts

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.network(x)

    def _losses(self, batch: Any) -> tuple[Tensor, Tensor, int, int]:
        """Mean loss, number of right predictions, number of predictions, batch size."""
        x, y = Classifier.inputs_and_target(batch)
        logits = self(x)
        flat = logits.reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(flat, y.reshape(-1))
        return loss, (flat.detach().argmax(dim=-1) == y.reshape(-1)).sum(), y.numel(), len(y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy; the accuracy is that before the update."""
        loss, correct, count, size = self._losses(batch)
        self.task_sums += torch.stack(
            [correct.double(), loss.detach().double() * count, correct.new_tensor(count).double()]
        )
        # On networks as small as these, logging every step would cost as much as the step.
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0 or self.trainer.is_last_batch:
            self.log("train/loss", loss, prog_bar=True, batch_size=size)
            self.log("train/online_acc", correct / count, prog_bar=True, batch_size=size)
        return loss

    @property
    def epochs_per_task(self) -> int:
        """How many epochs the data module stays at one task."""
        return getattr(self.trainer.datamodule, "epochs_per_task", 1)

    def on_train_start(self) -> None:
        """Leave what a checkpoint has counted to the first process."""
        if distributed.rank() > 0:
            self.task_sums.zero_()

    def on_train_epoch_end(self) -> None:
        """Gather the counts, and close the task if it ends here."""
        total = distributed.sum_over_ranks(self.task_sums, grad=False).clone()
        ended = (self.trainer.current_epoch + 1) % self.epochs_per_task == 0
        if ended or distributed.rank() > 0:
            self.task_sums.zero_()
        else:
            self.task_sums.copy_(total)
        correct, loss, count = total.tolist()
        if not ended or count == 0:
            return
        self.task_accuracies.append(correct / count)
        self.log("train/task_acc", correct / count)
        self.log("train/task_loss", loss / count)
        self._log_summary("train")

    def _log_summary(self, stage: str) -> None:
        tenth = max(1, round(0.1 * len(self.task_accuracies)))
        for name, tasks in (("first", self.task_accuracies[:tenth]), ("last", self.task_accuracies[-tenth:])):
            self.log(f"{stage}/{name}_tasks_acc", sum(tasks) / len(tasks))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Accuracy on the last task."""
        loss, correct, count, size = self._losses(batch)
        self.log("test/loss", loss, batch_size=size, sync_dist=True)
        self.log("test/acc", correct / count, prog_bar=True, batch_size=size, sync_dist=True)

    def on_test_epoch_end(self) -> None:
        """Repeat what the training has measured."""
        if self.task_accuracies:
            self._log_summary("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Class probabilities."""
        x = batch.x if hasattr(batch, "x") else batch[0] if isinstance(batch, (tuple, list)) else batch
        return self(x).softmax(dim=-1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the finished tasks."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["task_accuracies"] = list(self.task_accuracies)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the finished tasks up again."""
        super().on_load_checkpoint(checkpoint)
        self.task_accuracies = list(checkpoint.get("task_accuracies", []))
