"""Training of the source, for who has none."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from ..core.first_stage import FirstStage
from .module import ExpansionModule

__all__ = ["SourceTraining"]


class SourceTraining(FirstStage):
    """Train the small network of a :class:`~lightning_methods.lemon.LEMON` module before it is expanded.

    It acts once, when the fit is set up, with an optimiser and data of its own and the module's loss; the run's own
    random numbers do not notice. Every process of a distributed run trains the same source, and the weights of the
    first are taken. ``method="scratch"`` needs no source and trains none, nor does a module that is expanded already. A
    resumed run trains it once more, because it reads its checkpoint later: a source that takes long is better trained
    in a run of its own and given as ``source_checkpoint``.

    Args:
        data: where the source learns, usually the data of the run.
        epochs: passes over it; a ``fast_dev_run`` makes one.
        optimizer: makes the optimiser from the source's parameters.
        lr_scheduler: makes the scheduler from the optimiser; steps every epoch.
        seed: seed of the training; None takes the run's.

    Raises:
        ValueError: the module has no source to train.
    """

    network_name = "source"

    def __init__(
        self,
        data: LightningDataModule,
        epochs: int = 20,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=0.05),
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(data, epochs, optimizer, lr_scheduler, seed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Train the source; the module expands it right afterwards."""
        if stage != "fit":
            return
        if not isinstance(pl_module, ExpansionModule):
            raise ValueError(f"SourceTraining needs a module with a source; {type(pl_module).__name__} has none.")
        if bool(pl_module.expanded) or pl_module.method == "scratch":
            return
        source = pl_module.source
        if source is None:
            raise ValueError("SourceTraining needs a source, and the module was built without one.")
        self.prepare_data(trainer)
        device = trainer.strategy.root_device
        source.to(device)
        with self.own_random_numbers():
            self.data.setup("fit")
            epochs = self.train(
                trainer,
                source,
                lambda batch: pl_module.network_loss(source, move_data_to_device(batch, device)),
                self.data.train_dataloader(),
            )
        source.cpu()
        rank_zero_info(f"The source is trained: {epochs} epochs.")
