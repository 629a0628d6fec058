"""SNR: what watching and resetting adds to a training step; one packed look at the units against one per layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_methods.snr import ContinualClassifier, SelfNormalizedResets, reset_units

PLAIN, OURS, PER_LAYER = "plain", "ours", "per_layer"


class StandIn(Trainer):
    """What the callback asks a trainer, so that Lightning's own cost is in none of the forms."""

    global_step = 0
    strategy = None
    optimizers = ()

    def __init__(self, optimizers: list) -> None:
        self.optimizers = optimizers


def mlp(width: int, layers: int) -> nn.Sequential:
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


class PerLayer:
    """The same algorithm written layer by layer: a dense histogram, and a look at the mask for every layer."""

    def __init__(self, network: nn.Sequential, optimizer: Any, tau: int = 20_000) -> None:
        self.layers = [layer for layer in network if isinstance(layer, nn.Linear)]
        self.optimizer = optimizer
        device = self.layers[0].weight.device
        units = self.layers[0].out_features
        self.fired: list[Tensor] = []
        self.ages = [torch.zeros(units, dtype=torch.long, device=device) for _ in self.layers[:-1]]
        self.taus = [torch.full((units,), tau, device=device) for _ in self.layers[:-1]]
        self.histograms = [torch.zeros(units, tau + 1, dtype=torch.int32, device=device) for _ in self.layers[:-1]]
        for layer in self.layers[:-1]:
            layer.register_forward_hook(lambda module, args, z: self.fired.append((z.detach() > 0).any(dim=0)))

    def step(self, batch: int) -> None:
        for i, fired in enumerate(self.fired):
            ages, histogram = self.ages[i], self.histograms[i]
            rows = fired.nonzero().flatten()
            histogram[rows, ages[rows].clamp_max(histogram.shape[1] - 1)] += 1
            self.ages[i] = torch.where(fired, 0, ages + batch)
            due = self.ages[i] >= self.taus[i]
            if due.any():
                reset_units(self.layers[i], self.layers[i + 1], due, optimizer=self.optimizer)
                self.ages[i][due] = 0
        self.fired.clear()


@pytest.mark.shapes(
    paper={"batch": 16, "width": 100, "layers": 2},
    deep={"batch": 64, "width": 128, "layers": 16},
    wide={"batch": 256, "width": 2048, "layers": 2},
)
@pytest.mark.parametrize("form", [PLAIN, OURS, PER_LAYER])
def test_training_step(measure, shape: dict[str, int], form: str, device: torch.device):
    network = mlp(shape["width"], shape["layers"]).to(device)
    model = ContinualClassifier(network).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    x = torch.randn(shape["batch"], shape["width"], device=device)
    y = torch.randint(10, (shape["batch"],), device=device)
    trainer = StandIn([optimizer])
    callback = SelfNormalizedResets()
    if form == OURS:
        callback.on_train_start(trainer, model)
    loops = PerLayer(network, optimizer) if form == PER_LAYER else None

    def step() -> None:
        if form == OURS:
            callback.on_train_batch_start(trainer, model, None, 0)
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
        if form == OURS:
            trainer.global_step += 1
            callback.on_train_batch_end(trainer, model, None, None, 0)
        elif loops is not None:
            loops.step(len(x))

    measure(step)


@pytest.mark.shapes(small={"width": 512, "share": 0.05}, large={"width": 4096, "share": 0.01})
@pytest.mark.parametrize("form", [OURS, "loop"])
def test_reset(measure, shape: dict[str, int], form: str, device: torch.device):
    width = shape["width"]
    first, second = (nn.Linear(width, width).to(device) for _ in range(2))
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    (first.weight.sum() + second.weight.sum() + first.bias.sum()).backward()
    optimizer.step()
    units = torch.rand(width, device=device) < shape["share"]

    @torch.no_grad()
    def loop() -> None:
        fresh = nn.Linear(width, width).to(device).weight
        for unit in units.nonzero().flatten().tolist():
            first.weight[unit] = fresh[unit]
            first.bias[unit] = 0
            second.weight[:, unit] = 0
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[first.weight][key][unit] = 0
                optimizer.state[first.bias][key][unit] = 0
                optimizer.state[second.weight][key][:, unit] = 0

    measure(loop if form == "loop" else lambda: reset_units(first, second, units, optimizer=optimizer))
