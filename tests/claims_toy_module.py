"""A LightningModule and its data for the claim that tests/test_claims.py runs through the command line."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class ToyRegression(LightningModule):
    """Linear regression; ``lr=0`` leaves it as it was."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.linear = nn.Linear(2, 1)

    def error(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return (self.linear(x) - y).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.error(batch)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.error(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test/loss", self.error(batch))
        self.log("test/norm", self.linear.weight.norm())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ToyData(LightningDataModule):
    """y = x1 - x2, drawn from a seed."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def _loader(self) -> DataLoader:
        x = torch.randn(64, 2, generator=torch.Generator().manual_seed(self.seed))
        return DataLoader(TensorDataset(x, x[:, :1] - x[:, 1:]), batch_size=16)

    train_dataloader = val_dataloader = test_dataloader = _loader
