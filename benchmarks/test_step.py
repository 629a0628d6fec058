"""What a training step costs in Lightning, against a bare PyTorch loop on the same network and the same batches."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_methods.core import Classifier
from lightning_methods.nn import SmallConvNet

STEPS = 20


def bare(loader: DataLoader, device: torch.device) -> None:
    network = SmallConvNet(num_classes=10, in_channels=3).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()


def ours(loader: DataLoader, device: torch.device) -> None:
    model = Classifier(SmallConvNet(num_classes=10, in_channels=3), num_classes=10)
    trainer = Trainer(
        max_epochs=1,
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)


@pytest.mark.shapes(small={"batch": 64}, large={"batch": 256})
@pytest.mark.parametrize("form", [ours, bare])
def test_twenty_steps(measure, shape: dict[str, int], form: Any, device: torch.device):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    n = STEPS * shape["batch"]
    data = TensorDataset(torch.rand(n, 3, 32, 32), torch.randint(10, (n,)))
    loader = DataLoader(data, batch_size=shape["batch"])
    measure(lambda: form(loader, device))
