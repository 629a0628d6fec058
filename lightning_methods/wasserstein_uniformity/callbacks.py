"""Uniformity from outside: a penalty on, and the spectrum of, any layer of any LightningModule."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from ..core.callbacks import LossPenalty
from ..core.distributed import gather
from ..core.hooks import submodule
from ..core.losses import at_least_float32
from ..metrics.spectrum import FeatureMoments

__all__ = ["SpectrumWriter", "UniformityPenalty"]


class UniformityPenalty(LossPenalty):
    """Adds ``weight * loss(features)`` to the training loss of any LightningModule.

    Args:
        loss: e.g. ``WassersteinUniformityLoss()``; called with the features of the global batch, [B, D].
        weight: factor of the penalty.
        layer: name of the submodule whose output are the features (more dimensions are flattened). Where it runs
            several times in a step, the last output counts.
        gather_distributed: take the features of all processes.
    """

    def __init__(self, loss: nn.Module, weight: float, layer: str, gather_distributed: bool = True) -> None:
        super().__init__(weight, layer)
        self.loss = loss
        self.gather_distributed = gather_distributed

    def penalty(self, outputs: Tensor, batch: Any) -> Tensor:
        """The loss of the layer's output, a scalar.

        Args:
            outputs: what the layer returned.
            batch: not used.
        """
        features = outputs.flatten(1)
        return self.loss(gather(features) if self.gather_distributed else features)


class _Moments(FeatureMoments):
    def compute(self) -> Tensor:
        """Eigenvalues of the covariance, descending."""
        return torch.linalg.eigvalsh(self.mean_and_covariance()[1]).flip(0)


class SpectrumWriter(Callback):
    """Writes the covariance spectrum of a layer's features on the evaluation set: the picture of dimensional collapse.

    At the end of every validation and test, ``spectrum.csv`` in the run's log folder has the columns ``rank`` and
    ``log_eigenvalue`` (natural logarithm, descending). Draw several with
    :func:`~lightning_methods.wasserstein_uniformity.plot_spectra`.

    Args:
        layer: name of the submodule whose output are the features; all its outputs are taken.
        normalize: scale the rows to unit norm first.
        filename: name of the file.
    """

    def __init__(self, layer: str = "projector", normalize: bool = True, filename: str = "spectrum.csv") -> None:
        self.layer = layer
        self.normalize = normalize
        self.filename = filename
        self._moments: _Moments | None = None
        self._handle: Any = None

    def _start(self, pl_module: LightningModule) -> None:
        self._moments = _Moments(self.normalize).to(pl_module.device)

    def _watch(self, pl_module: LightningModule) -> None:
        """For one batch: what other callbacks run through the layer between batches is not of the evaluation set."""
        moments = self._moments
        self._remove()
        self._handle = submodule(pl_module, self.layer).register_forward_hook(
            lambda module, args, output: moments.update(at_least_float32(output.flatten(1)))
        )

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _finish(self, trainer: Trainer) -> None:
        self._remove()
        moments, self._moments = self._moments, None
        if moments is None or trainer.sanity_checking or moments.count == 0:
            return
        spectrum = moments.compute().clamp_min(1e-20).log()
        folder = trainer.log_dir or trainer.default_root_dir
        _write(Path(folder) / self.filename, spectrum.tolist())

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start collecting."""
        self._start(pl_module)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Watch the layer."""
        self._watch(pl_module)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Leave it."""
        self._remove()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the spectrum."""
        self._finish(trainer)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start collecting."""
        self._start(pl_module)

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Watch the layer."""
        self._watch(pl_module)

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Leave it."""
        self._remove()

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the spectrum."""
        self._finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hook."""
        self._remove()


@rank_zero_only
def _write(path: Path, spectrum: list[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("rank", "log_eigenvalue"))
        writer.writerows(enumerate(spectrum, start=1))
