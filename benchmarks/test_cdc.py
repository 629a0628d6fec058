"""CDC's own cost: k-means with its restarts, region means, the selection, the calibration loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_methods.cdc import calibration_loss, region_targets, select_confident_samples
from lightning_methods.core.clustering import kmeans, kmeans_plusplus

SHAPES = pytest.mark.shapes(
    small={"batch": 200, "classes": 10, "regions": 40, "features": 64},
    paper={"batch": 1000, "classes": 10, "regions": 500, "features": 512},
)
RESTARTS = 10


def kmeans_one_restart_at_a_time(x: Tensor, k: int) -> Tensor:
    """Full distance matrices, one restart after the other."""
    generator = torch.Generator(device=x.device).manual_seed(0)
    tolerance = 1e-4 * x.var(dim=0, correction=0).mean()
    best, best_labels = None, None
    for start in kmeans_plusplus(x, k, n_init=RESTARTS, generator=generator):
        centroids = start
        for _ in range(300):
            labels = torch.cdist(x, centroids).argmin(dim=1)
            sums = torch.zeros_like(centroids).index_add_(0, labels, x)
            counts = torch.bincount(labels, minlength=k)[:, None]
            new = torch.where(counts > 0, sums / counts.clamp_min(1), centroids)
            shift, centroids = (new - centroids).square().sum(), new
            if shift <= tolerance:
                break
        distances = torch.cdist(x, centroids)
        inertia = distances.amin(dim=1).square().sum()
        if best is None or inertia < best:
            best, best_labels = inertia, distances.argmin(dim=1)
    return best_labels


def kmeans_batched(x: Tensor, k: int) -> Tensor:
    generator = torch.Generator(device=x.device).manual_seed(0)
    return kmeans(x, k, n_init=RESTARTS, generator=generator)[1]


@SHAPES
@pytest.mark.parametrize("form", [kmeans_batched, kmeans_one_restart_at_a_time], ids=["ours", "plain"])
def test_kmeans(measure, shape: dict[str, int], form: Any, device: torch.device):
    x = F.normalize(torch.randn(shape["batch"], shape["features"], device=device), p=1, dim=1)
    measure(lambda: form(x, shape["regions"]))


def region_means_in_a_loop(probs: Tensor, regions: Tensor, num_regions: int) -> Tensor:
    targets = torch.empty_like(probs)
    for region in range(num_regions):
        members = regions == region
        if members.any():
            targets[members] = probs[members].mean(dim=0)
    return targets


@SHAPES
@pytest.mark.parametrize("form", [region_targets, region_means_in_a_loop], ids=["ours", "plain"])
def test_region_targets(measure, shape: dict[str, int], form: Any, device: torch.device):
    probs = torch.randn(shape["batch"], shape["classes"], device=device).softmax(dim=1)
    regions = torch.randint(shape["regions"], (shape["batch"],), device=device)
    torch.testing.assert_close(form(probs, regions, shape["regions"]), region_targets(probs, regions, shape["regions"]))
    measure(lambda: form(probs, regions, shape["regions"]))


def selection_in_a_loop(probs: Tensor, num_per_class: int) -> tuple[Tensor, Tensor]:
    confidence, labels = probs.max(dim=1)
    mask = torch.zeros(len(probs), dtype=torch.bool, device=probs.device)
    for c in range(probs.shape[1]):
        order = probs[:, c].sort(descending=True, stable=True).indices[:num_per_class]
        quota = int(num_per_class * confidence[order].mean())
        for i in order[:quota].tolist():
            mask[i] = True
    return mask, labels


@SHAPES
@pytest.mark.parametrize("form", [select_confident_samples, selection_in_a_loop], ids=["ours", "plain"])
def test_selection(measure, shape: dict[str, int], form: Any, device: torch.device):
    probs = torch.randn(shape["batch"], shape["classes"], device=device).softmax(dim=1)
    per_class = shape["batch"] // shape["classes"]
    torch.testing.assert_close(form(probs, per_class), select_confident_samples(probs, per_class))
    measure(lambda: form(probs, per_class))


def calibration_loss_in_a_loop(logits: Tensor, targets: Tensor) -> Tensor:
    rows = [-(t * row.log_softmax(dim=0)).sum() for row, t in zip(logits, targets, strict=True)]
    mean = torch.stack([row.softmax(dim=0) for row in logits]).mean(dim=0)
    return torch.stack(rows).mean() + (mean * mean.log()).sum()


@SHAPES
@pytest.mark.parametrize("form", [calibration_loss, calibration_loss_in_a_loop], ids=["ours", "plain"])
def test_calibration_loss(forward_backward, shape: dict[str, int], form: Any, device: torch.device):
    logits = torch.randn(shape["batch"], shape["classes"], device=device, requires_grad=True)
    targets = torch.randn(shape["batch"], shape["classes"], device=device).softmax(dim=1)
    torch.testing.assert_close(form(logits, targets), calibration_loss(logits, targets))
    forward_backward(form, logits, targets)
