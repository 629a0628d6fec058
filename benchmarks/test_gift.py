"""GIFT's loss against the same loss image by image, and its training step against a bare PyTorch loop."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_methods.gift import GIFT, ConvNet, DiffAugment, gift_loss

STEPS = 10


def plain(logits: Tensor, soft_labels: Tensor, target: Tensor, weight: float = 0.1, smoothing: float = 0.1) -> Tensor:
    """The loss image by image."""
    cosines = []
    classes = logits.shape[1]
    for student, teacher, label in zip(logits, soft_labels, target.tolist(), strict=True):
        smoothed = torch.full_like(teacher, smoothing / (classes - 1))
        smoothed[label] = 1 - smoothing
        refined = weight * smoothed / smoothed.norm() + (1 - weight) * teacher / teacher.norm()
        cosines.append(student @ refined / (student.norm() * refined.norm()))
    return 1 - torch.stack(cosines).mean()


@pytest.mark.shapes(cifar10={"batch": 50, "classes": 10}, imagenet={"batch": 200, "classes": 1000})
@pytest.mark.parametrize("form", [gift_loss, plain], ids=["ours", "plain"])
def test_gift_loss(forward_backward, shape, form, device):
    logits = torch.randn(shape["batch"], shape["classes"], device=device, requires_grad=True)
    soft_labels = torch.randn_like(logits)
    target = torch.randint(shape["classes"], (shape["batch"],), device=device)
    torch.testing.assert_close(gift_loss(logits, soft_labels, target), plain(logits, soft_labels, target))
    forward_backward(form, logits, soft_labels, target)


def bare(student: ConvNet, teacher: ConvNet, loader: DataLoader, device: torch.device) -> None:
    """Ten steps of GIFT in PyTorch alone."""
    student, teacher, augment = student.to(device), teacher.to(device).requires_grad_(False).eval(), DiffAugment()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=1e-4)
    for x, y in loader:
        x, y = augment(x.to(device)), y.to(device)
        with torch.no_grad():
            soft_labels = teacher(x)
        optimizer.zero_grad()
        gift_loss(student(x), soft_labels, y).backward()
        optimizer.step()


def ours(student: ConvNet, teacher: ConvNet, loader: DataLoader, device: torch.device) -> None:
    """Ten steps of GIFT by the Trainer."""
    trainer = Trainer(
        max_epochs=1,
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GIFT(student, teacher, augment=DiffAugment()), loader)


@pytest.mark.shapes(conv3={"batch": 50})
@pytest.mark.parametrize("form", [ours, bare])
def test_ten_steps(measure, shape: dict[str, int], form: Callable, device: torch.device):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    n = STEPS * shape["batch"]
    loader = DataLoader(TensorDataset(torch.rand(n, 3, 32, 32), torch.randint(10, (n,))), batch_size=shape["batch"])
    measure(lambda: form(ConvNet(), ConvNet(), loader, device))
