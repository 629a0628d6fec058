"""A first stage in the same run: one network of the module is trained before the module's own training starts."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.seed import isolate_rng
from rich.progress import track
from torch import Tensor, nn

from .checks import check_range
from .distributed import broadcast

__all__ = ["FirstStage"]


class FirstStage(Callback):
    """Base of callbacks that train a network with an optimiser and data of their own.

    The run's own random numbers, loops and optimisers do not notice. Every process of a distributed run trains the same
    network, and the weights of the first are taken, so that all agree to the last bit.

    Args:
        data: where the network learns.
        epochs: passes over it; a ``fast_dev_run`` makes one.
        optimizer: makes the optimiser from the network's parameters.
        lr_scheduler: makes the scheduler from the optimiser; steps every epoch.
        seed: seed of the training; None takes the run's.

    Attributes:
        network_name: what the progress bar calls the network.
    """

    network_name: ClassVar[str] = "network"

    def __init__(
        self,
        data: LightningDataModule,
        epochs: int,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        seed: int | None,
    ) -> None:
        check_range("epochs", epochs, 1)
        self.data = data
        self.epochs = epochs
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.seed = seed

    def prepare_data(self, trainer: Trainer) -> None:
        """Fetch the data, once on each machine."""
        if trainer.local_rank == 0:
            self.data.prepare_data()
        trainer.strategy.barrier(type(self).__name__)

    @contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        """Seeded generators inside; afterwards those of the run go on where they were."""
        seed = self.seed if self.seed is not None else int(os.environ.get("PL_GLOBAL_SEED", 0))
        with isolate_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 - transforms of other people draw from it
            yield

    @torch.enable_grad()
    def train(self, trainer: Trainer, network: nn.Module, loss: Callable[[Any], Tensor], loader: Iterable) -> int:
        """Train the network; it is left in train mode, with the same weights on all processes.

        Args:
            trainer: of the run.
            network: changed in place.
            loss: of a batch of the loader, a scalar.
            loader: gives the batches of an epoch.

        Returns:
            How many epochs it was.
        """
        shown = trainer.is_global_zero and trainer.progress_bar_callback is not None
        epochs = range(1 if trainer.fast_dev_run else self.epochs)
        network.train()
        optimizer = self.optimizer_factory(list(network.parameters()))
        scheduler = self.lr_scheduler_factory(optimizer) if self.lr_scheduler_factory is not None else None
        for _ in track(epochs, description=f"Training the {self.network_name}", disable=not shown, transient=True):
            for batch in loader:
                loss(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        for value in network.state_dict().values():
            value.copy_(broadcast(value))
        return len(epochs)
