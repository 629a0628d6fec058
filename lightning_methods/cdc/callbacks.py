"""Pretraining of the encoder in the same run, and reliability diagrams of what was tested."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from ..core.checks import check_range
from ..core.distributed import broadcast
from ..core.hooks import submodule
from ..metrics.calibration import expected_calibration_error, plot_reliability, reliability_bins

__all__ = ["Pretraining", "ReliabilityDiagram"]


class _Joined(DDPStrategy):
    """DDP in the processes that are already there and joined: nothing is launched."""

    def _configure_launcher(self) -> None:
        pass


class Pretraining(Callback):
    """Train the encoder by self-supervision first, in the same run.

    It acts once, when a fit starts: ``module`` is trained by a Trainer of its own on the devices, in the precision and
    with the processes (DDP) of the run, then the weights of its part called ``part`` are copied into the part of the
    same name of the trained module. It comes before :class:`CDC` initialises its heads. The run's own random numbers do
    not notice, a resumed run does not repeat it, and a module that is told to take its encoder from a checkpoint
    (``init_from``) is left alone.

    Args:
        module: the self-supervised module, e.g. ``SimCLR``, whose part has the architecture of the trained module's.
        data: what it is trained on.
        max_epochs: length of the pretraining; a ``fast_dev_run`` makes one batch.
        part: name of the network that both modules have.

    Raises:
        ValueError: one of the modules has no such part, they do not fit each other, or the run's strategy splits the
            module over devices.
    """

    def __init__(
        self, module: LightningModule, data: LightningDataModule, max_epochs: int, part: str = "backbone"
    ) -> None:
        check_range("max_epochs", max_epochs, 1)
        self.module = module
        self.data = data
        self.max_epochs = max_epochs
        self.part = part
        self.done = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pretrain unless a checkpoint brought the result."""
        source, target = submodule(self.module, self.part), submodule(pl_module, self.part)
        self._check_fit(source, target)
        if self.done or getattr(pl_module, "init_from", None) is not None:
            return
        pretrainer = self._trainer(trainer)
        rank_zero_info(f"Pretraining {self.part} by {type(self.module).__name__} for {self.max_epochs} epochs.")
        with isolate_rng(), _environment():
            pretrainer.fit(self.module, datamodule=self.data)
        if pretrainer.interrupted:
            raise KeyboardInterrupt
        self.module.trainer = self.data.trainer = None  # lets its optimiser go
        for mine, theirs in zip(target.state_dict().values(), source.state_dict().values(), strict=True):
            mine.copy_(broadcast(theirs.to(mine.device)))
        self.done = True

    def _check_fit(self, source: nn.Module, target: nn.Module) -> None:
        mine = {name: tuple(value.shape) for name, value in target.state_dict().items()}
        theirs = {name: tuple(value.shape) for name, value in source.state_dict().items()}
        if mine != theirs:
            different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            raise ValueError(
                f"the pretrained {self.part} does not fit the module's: they differ in {', '.join(different[:5])}. "
                "Give both the same network."
            )

    def _trainer(self, trainer: Trainer) -> Trainer:
        bar = trainer.progress_bar_callback
        return Trainer(
            max_epochs=self.max_epochs,
            fast_dev_run=bool(trainer.fast_dev_run),
            precision=trainer.precision,
            strategy=_strategy(trainer.strategy),
            accelerator={"cuda": "gpu"}.get(trainer.strategy.root_device.type, trainer.strategy.root_device.type),
            devices=trainer.device_ids if trainer.strategy.root_device.type == "cuda" else trainer.num_devices,
            num_nodes=trainer.num_nodes,
            sync_batchnorm=isinstance(trainer.strategy, DDPStrategy) and trainer.strategy._layer_sync is not None,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=bar is not None,
            callbacks=[type(bar)()] if bar is not None else [],
        )

    def state_dict(self) -> dict[str, Any]:
        """Whether the encoder in the checkpoint is pretrained."""
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the encoder of the checkpoint."""
        self.done = state_dict["done"]


@contextmanager
def _environment() -> Iterator[None]:
    """The end of a distributed run removes what it thinks are its own variables: put them back."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _strategy(outer: Strategy) -> Strategy | str:
    """How the pretraining runs on what the run has."""
    if isinstance(outer, DDPStrategy):
        return _Joined(cluster_environment=outer.cluster_environment)
    if isinstance(outer, SingleDeviceStrategy):
        return "auto"
    raise ValueError(
        f"Pretraining cannot run under {type(outer).__name__}: pretrain in a run of its own and give its checkpoint "
        "as init_from."
    )


class ReliabilityDiagram(Callback):
    """Draw the reliability diagram of every head when a test ends, and save what it shows.

    For a module with ``rejection_metrics()`` (:class:`CDC`, :class:`FixedThresholdClustering`). Writes
    ``reliability_<head>.png`` and ``reliability.json`` (number of samples, mean confidence and accuracy by bin, and the
    calibration error, by head) into the run's folder.

    Args:
        num_bins: number of equal-width bins of the confidence on (0, 1].

    Raises:
        ValueError: the module does not keep the confidence of its test samples.
    """

    def __init__(self, num_bins: int = 15) -> None:
        check_range("num_bins", num_bins, 1)
        self.num_bins = num_bins

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw and save; before the module resets what it has gathered."""
        metrics = getattr(pl_module, "rejection_metrics", None)
        if metrics is None:
            raise ValueError(
                f"ReliabilityDiagram needs a module with rejection_metrics(), not {type(pl_module).__name__}."
            )
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        saved = {}
        for head, metric in metrics().items():
            if not metric.update_called:
                continue
            with metric.sync_context(should_unsync=True):
                confidence, correct = metric.assignments()
            if not trainer.is_global_zero:
                continue
            count, mean_confidence, accuracy = reliability_bins(confidence, correct, self.num_bins)
            saved[head] = {
                "count": count.tolist(),
                "confidence": mean_confidence.nan_to_num().tolist(),  # empty bins have count 0
                "accuracy": accuracy.nan_to_num().tolist(),
                "ece": expected_calibration_error(confidence, correct, self.num_bins).item(),
            }
            folder.mkdir(parents=True, exist_ok=True)
            figure = plot_reliability(confidence, correct, self.num_bins, title=head).figure
            figure.savefig(folder / f"reliability_{head}.png", dpi=150, bbox_inches="tight")
            _close(figure)
        if saved:
            (folder / "reliability.json").write_text(json.dumps(saved, indent=1), encoding="utf-8")


def _close(figure: Any) -> None:
    import matplotlib.pyplot as plt

    plt.close(figure)
