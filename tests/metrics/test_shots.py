from __future__ import annotations

import math

import pytest
import torch

from lightning_methods.metrics import ShotAccuracy, shot_accuracy
from tests.ddp import run_two_processes

COUNTS = [101, 100, 20, 19, 5]


def test_bounds_are_strict_and_classes_count_once():
    target = torch.tensor([0, 0, 0, 1, 2, 3, 4, 4])
    preds = torch.tensor([0, 0, 1, 1, 0, 3, 4, 0])
    result = shot_accuracy(preds, target, COUNTS)
    assert set(result) == {"many", "medium", "few", "average", "per_class"}
    assert result["many"] == pytest.approx(2 / 3)
    assert result["medium"] == pytest.approx((1 + 0) / 2)
    assert result["few"] == pytest.approx((1 + 0.5) / 2)
    assert result["average"] == pytest.approx((2 / 3 + 1 + 0 + 1 + 0.5) / 5)


def test_absent_classes_and_empty_groups_are_nan():
    result = shot_accuracy(torch.tensor([1, 2]), torch.tensor([1, 1]), COUNTS)
    assert math.isnan(result["many"])
    assert math.isnan(result["few"])
    assert result["medium"] == result["average"] == 0.5
    assert result["per_class"].isnan().tolist() == [True, False, True, True, True]


def test_the_metric_is_the_function_over_all_batches():
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(60, 5, generator=generator), torch.randint(5, (60,), generator=generator)
    metric = ShotAccuracy(COUNTS, many_threshold=50, few_threshold=10)
    for rows in (slice(0, 7), slice(7, 60)):
        metric.update(logits[rows], target[rows])
    expected = shot_accuracy(logits, target, COUNTS, 50, 10)
    torch.testing.assert_close(metric.compute(), expected)
    metric.reset()
    assert metric.total.sum() == 0


def _on_a_rank(rank: int, world: int) -> dict[str, torch.Tensor]:
    metric = ShotAccuracy(COUNTS)
    target = torch.tensor([0, 1, 2, 3, 4, 0, 0])
    preds = torch.tensor([0, 1, 0, 3, 4, 1, 1])
    rows = slice(0, 2) if rank == 0 else slice(2, 7)
    metric.update(preds[rows], target[rows])
    return metric.compute()


def test_ranks_are_summed():
    expected = shot_accuracy(torch.tensor([0, 1, 0, 3, 4, 1, 1]), torch.tensor([0, 1, 2, 3, 4, 0, 0]), COUNTS)
    for result in run_two_processes(_on_a_rank):
        torch.testing.assert_close(result, expected)


@pytest.mark.bad_input
def test_bad_input():
    with pytest.raises(ValueError, match="below num_groups=5"):
        shot_accuracy(torch.tensor([1]), torch.tensor([5]), COUNTS)
    with pytest.raises(ValueError, match="same number of rows"):
        shot_accuracy(torch.tensor([1, 2]), torch.tensor([1]), COUNTS)
    with pytest.raises(ValueError, match="class_counts must have shape"):
        ShotAccuracy([[1, 2]])
