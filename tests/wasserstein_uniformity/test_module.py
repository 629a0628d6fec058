from __future__ import annotations

import csv
import math

import pytest
import torch
from lightning import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_methods.core import Classifier
from lightning_methods.metrics import effective_rank
from lightning_methods.wasserstein_uniformity import (
    SpectrumWriter,
    UniformityPenalty,
    WassersteinUniformity,
    WassersteinUniformityLoss,
    covariance_log_spectrum,
    plot_collapse,
    plot_spectra,
    wasserstein_uniformity,
)
from lightning_methods.wasserstein_uniformity.figures import figure
from tests.ddp import run_two_processes


def data(rows: int = 96) -> DataLoader:
    g = torch.Generator().manual_seed(0)
    y = torch.arange(rows) % 3
    x = 2 * torch.randn(3, 8, generator=g)[y] + torch.randn(rows, 8, generator=g)
    return DataLoader(TensorDataset(x, y), 32)


def classifier() -> Classifier:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    return Classifier(network, 3, optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))


def trainer_for(epochs: int = 1, **options) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **(quiet | options))


def features(module: Classifier) -> torch.Tensor:
    x = data().dataset.tensors[0]
    with torch.no_grad():
        return module.network[1](module.network[0](x))


def test_penalty_spreads_a_layer_of_any_module():
    spread = {}
    for weight in (0.0, 1.0):
        module = classifier()
        penalty = UniformityPenalty(WassersteinUniformityLoss(), weight, layer="network.1")
        trainer_for(15, callbacks=[penalty]).fit(module, data())
        spread[weight] = wasserstein_uniformity(features(module)).item(), effective_rank(features(module)).item()
    assert spread[1.0][0] < spread[0.0][0] - 0.1
    assert spread[1.0][1] > spread[0.0][1] + 1


def test_penalty_is_weight_times_loss_of_the_layer():
    module = classifier()
    losses = []
    module.on_before_backward = lambda loss: losses.append(loss.item())
    x, y = next(iter(data()))
    with torch.no_grad():
        expected = module.loss(module(x), y) + 0.7 * wasserstein_uniformity(module.network[1](module.network[0](x)))
    penalty = UniformityPenalty(WassersteinUniformityLoss(), 0.7, layer="network.1")
    trainer_for(max_steps=1, callbacks=[penalty]).fit(module, data())
    assert losses[0] == pytest.approx(expected.item(), rel=1e-6)
    assert "training_step" not in module.__dict__  # nothing is left


def test_spectrum_is_that_of_the_evaluation_set(tmp_path):
    module = classifier()
    trainer = trainer_for(callbacks=[SpectrumWriter("network.1")], default_root_dir=tmp_path)
    trainer.validate(module, data(), verbose=False)
    with (tmp_path / "spectrum.csv").open() as file:
        written = [float(row["log_eigenvalue"]) for row in csv.DictReader(file)]
    torch.testing.assert_close(torch.tensor(written), covariance_log_spectrum(features(module)), rtol=1e-4, atol=1e-4)
    assert not module.network[1]._forward_hooks
    trainer.test(module, data(), verbose=False)
    assert not module.network[1]._forward_hooks


class LooksElsewhere(Callback):
    """Runs other samples through the module between the evaluation's last batch and its end."""

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module(100 * torch.ones(50, 8))

    def on_validation_epoch_start(self, trainer, pl_module):
        pl_module(-100 * torch.ones(50, 8))


def test_spectrum_leaves_out_what_other_callbacks_compute(tmp_path):
    module = classifier()
    callbacks = [LooksElsewhere(), SpectrumWriter("network.1"), LooksElsewhere()]
    trainer_for(callbacks=callbacks, default_root_dir=tmp_path).validate(module, data(), verbose=False)
    with (tmp_path / "spectrum.csv").open() as file:
        written = [float(row["log_eigenvalue"]) for row in csv.DictReader(file)]
    torch.testing.assert_close(torch.tensor(written), covariance_log_spectrum(features(module)), rtol=1e-4, atol=1e-4)


def test_spectrum_says_what_layer_is_missing(tmp_path):
    with pytest.raises(ValueError, match="no submodule 'projector'"):
        trainer_for(callbacks=[SpectrumWriter()], default_root_dir=tmp_path).validate(classifier(), data())


def test_pictures(tmp_path):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(50, 6, generator=g)
    axes = plot_spectra({"features": z, "two seeds": [z, covariance_log_spectrum(z)]})
    drawn = [line.get_ydata() for line in axes.get_lines()]
    assert len(drawn) == 1 + 3  # one curve; a mean with two seeds
    for values in drawn:
        assert list(values) == pytest.approx(covariance_log_spectrum(z).tolist(), rel=1e-5)
    curves = [line.get_ydata() for line in plot_collapse(samples=500, width=16).get_lines()]
    assert curves[0][0] == curves[1][0] == 0
    assert curves[0][8] > 0.4  # half of the dimensions are dead: half of the way for W2
    assert 0 < curves[1][8] < 0.2
    for run in ("byol", "byol_w2"):
        folder = tmp_path / run / "seed0"
        folder.mkdir(parents=True)
        (folder / "spectrum.csv").write_text("rank,log_eigenvalue\n1,-1.0\n2,-3.0\n")
    metrics = {"test/wasserstein_uniformity": {"values": [0.9]}, "test/knn_acc": {"values": [0.95]}}
    drawn = figure({"runs": {"byol": metrics, "byol_w2": metrics}, "seeds": [0]}, tmp_path)
    assert len(drawn.axes[0].get_lines()) == 2
    drawn.savefig(tmp_path / "figure.png")


def _metric_and_penalty(rank: int, world: int) -> tuple[float, float]:
    z = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    part = z[: 8 + rank] if rank == 0 else z[8:]  # unequal parts
    metric = WassersteinUniformity()
    metric.update(part)
    penalty = UniformityPenalty(WassersteinUniformityLoss(), 1.0, "x").penalty(part, None)
    return metric.compute().item(), penalty.item()


def test_two_processes():
    z = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    expected = wasserstein_uniformity(z).item()
    for metric, penalty in run_two_processes(_metric_and_penalty):
        assert metric == pytest.approx(expected, rel=1e-5)
        assert penalty == pytest.approx(expected, rel=1e-5)


def test_the_paper_in_one_number():
    """A collapsed encoder is at sqrt(2), a whitened one near 0."""
    metric = WassersteinUniformity()
    metric.update(torch.ones(64, 16))
    assert metric.compute().item() == pytest.approx(math.sqrt(2), rel=1e-6)
    metric.reset()
    metric.update(torch.cat([torch.eye(16), -torch.eye(16)]))
    assert metric.compute().item() < 1e-3
