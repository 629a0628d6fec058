"""Manual optimisation gives what the automatic one gives: clipping, accumulation, schedulers, two optimisers."""

import copy

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_methods.core.manual import ManualOptimization


class Automatic(LightningModule):
    def __init__(self, network: nn.Module, scheduler: str | None = None) -> None:
        super().__init__()
        self.network = network
        self.scheduler = scheduler
        self.rates = []

    def loss(self, batch):
        return (self.network(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def scheduler_config(self, scheduler):
        return {"scheduler": scheduler, "monitor": scheduler.monitor}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.scheduler is None:
            return optimizer
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
            plateau.monitor = "train/loss"
            return {"optimizer": optimizer, "lr_scheduler": self.scheduler_config(plateau)}
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.scheduler}}


class Manual(ManualOptimization, Automatic):
    def training_step(self, batch, batch_idx):
        self.optimize(super().training_step(batch, batch_idx), batch_idx=batch_idx)


def data(rows: int = 50) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator)
    return DataLoader(TensorDataset(x, x @ torch.randn(4, 2, generator=generator)), batch_size=10)


def fit(module, epochs: int = 3, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **quiet, **options).fit(module, data())
    return module


def pair(scheduler=None):
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    return Automatic(copy.deepcopy(network), scheduler), Manual(network, scheduler)


def assert_same(a, b):
    assert a.rates == b.rates
    for name, value in a.state_dict().items():
        torch.testing.assert_close(b.state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("scheduler", [None, "step", "epoch", "plateau"])
def test_equals_automatic_optimisation(scheduler):
    automatic, manual = pair(scheduler)
    assert_same(fit(automatic), fit(manual))
    assert len(set(manual.rates)) > 1 or scheduler is None


@pytest.mark.parametrize("scheduler", [None, "step", "epoch"])
def test_accumulation_equals_the_trainers_with_a_short_last_window(scheduler):
    automatic, manual = pair(scheduler)
    manual.accumulate_batches = 2  # five batches: 2 + 2 + 1
    assert_same(fit(automatic, accumulate_grad_batches=2), fit(manual))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_equals_the_trainers(algorithm):
    automatic, manual = pair()
    manual.gradient_clip_val, manual.gradient_clip_algorithm = 0.05, algorithm
    fit(automatic, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
    assert_same(automatic, fit(manual))
    unclipped = fit(pair()[1])
    assert not torch.equal(unclipped.network.weight, manual.network.weight)


def test_a_plateau_scheduler_names_what_it_misses():
    manual = pair("plateau")[1]
    manual.log = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="monitors 'train/loss', which was not logged"):
        fit(manual)


class TwoOptimisers(ManualOptimization, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = (self.a(batch[0]) - batch[1]).square().mean() + (self.b(batch[0]) - batch[1]).square().mean()
        self.optimize(loss, *((first, second) if batch_idx % 2 else (second,)))

    def configure_optimizers(self):
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.a, self.b)]


def test_only_the_named_optimisers_step_and_stale_gradients_do_not_enter():
    torch.manual_seed(0)
    module = TwoOptimisers()
    reference = copy.deepcopy(module)
    for _ in range(2):
        for i, (x, y) in enumerate(data()):
            for network, steps in ((reference.a, i % 2), (reference.b, True)):
                grads = torch.autograd.grad((network(x) - y).square().mean(), list(network.parameters()))
                for p, g in zip(network.parameters(), grads, strict=True):
                    p.data -= 0.1 * g * bool(steps)
    fit(module, epochs=2)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value)
