"""Training of the source, for who has none."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from rich.progress import track
from torch import nn

from ..core.checks import check_range
from ..core.distributed import broadcast
from .module import ExpansionModule

__all__ = ["SourceTraining"]


class SourceTraining(Callback):
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

    def __init__(
        self,
        data: LightningDataModule,
        epochs: int = 20,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=0.05),
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int | None = None,
    ) -> None:
        check_range("epochs", epochs, 1)
        self.data = data
        self.epochs = epochs
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.seed = seed

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
        if trainer.local_rank == 0:
            self.data.prepare_data()
        trainer.strategy.barrier("SourceTraining")
        device = trainer.strategy.root_device
        shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        epochs = range(1 if trainer.fast_dev_run else self.epochs)
        with isolate_rng(), torch.enable_grad():
            self._set_seed()
            self.data.setup("fit")
            self._train(
                pl_module,
                source.to(device),
                self.data.train_dataloader(),
                track(epochs, description="Training the source", disable=not shown, transient=True),
            )
            for value in source.state_dict().values():
                value.copy_(broadcast(value))
        source.cpu()
        rank_zero_info(f"The source is trained: {len(epochs)} epochs.")

    def _set_seed(self) -> None:
        seed = self.seed if self.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - transforms of other people draw from it

    def _train(self, module: ExpansionModule, source: nn.Module, loader: Iterable, epochs: Iterable[int]) -> None:
        source.train()
        parameter = next(source.parameters())
        optimizer = self.optimizer_factory(list(source.parameters()))
        scheduler = self.lr_scheduler_factory(optimizer) if self.lr_scheduler_factory is not None else None
        for _ in epochs:
            for batch in loader:
                module.network_loss(source, move_data_to_device(batch, parameter.device)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
