from __future__ import annotations

import math

import pytest
import torch

from lightning_methods.metrics import GroupAccuracy, WorstGroupAccuracy, group_accuracy


def draw(n=500, classes=3, groups=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=g)
    return logits, torch.randint(classes, (n,), generator=g), torch.randint(-1, groups, (n,), generator=g)


def test_against_a_loop():
    logits, target, group = draw()
    result = group_accuracy(logits, target, group, num_groups=6, group_counts=torch.tensor([500, 101, 100, 20, 19, 3]))
    right = logits.argmax(1) == target
    loop = [right[group == g].float().mean().item() for g in range(5)]
    assert result["per_group"][:5].tolist() == pytest.approx(loop)
    assert math.isnan(result["per_group"][5])  # absent, and left out of everything else
    assert result["worst"].item() == pytest.approx(min(loop))
    assert result["average"].item() == pytest.approx(sum(loop) / 5)
    assert result["many"].item() == pytest.approx((loop[0] + loop[1]) / 2)
    assert result["medium"].item() == pytest.approx((loop[2] + loop[3]) / 2)
    assert result["few"].item() == pytest.approx(loop[4])


def test_metric_over_batches_equals_function():
    logits, target, group = draw()
    metric = GroupAccuracy(5)
    for part in torch.arange(500).split(64):
        metric.update(logits[part], target[part], group[part])
    for key, value in group_accuracy(logits.argmax(1), target, group, 5).items():
        torch.testing.assert_close(metric.compute()[key], value)


def test_merging_ranks_is_a_sum_of_states():
    logits, target, group = draw()
    whole, first, second = GroupAccuracy(5), GroupAccuracy(5), GroupAccuracy(5)
    whole.update(logits, target, group)
    first.update(logits[:100], target[:100], group[:100])
    second.update(logits[100:], target[100:], group[100:])
    first.correct += second.correct
    first.total += second.total
    first._computed = None
    assert torch.equal(first.compute()["per_group"], whole.compute()["per_group"])


def test_worst_group_numbers_class_times_attribute():
    preds = torch.tensor([0, 0, 0, 1, 1, 1, 0])
    target = torch.tensor([0, 0, 1, 1, 1, 1, 0])
    attribute = torch.tensor([0, 1, 0, 0, 1, 1, -1])
    metric = WorstGroupAccuracy(2, 3)
    metric.update(preds, target, attribute)
    assert metric.compute().item() == 0.5  # class 1 with attribute 0
    assert metric.per_group().tolist()[:2] == [1, 1]
    assert metric.per_group().tolist()[3:5] == [0.5, 1]
    assert metric.per_group()[[2, 5]].isnan().all()


def test_no_sample_is_nan():
    assert math.isnan(group_accuracy(torch.zeros(0, 2), torch.zeros(0).long(), torch.zeros(0).long(), 2)["worst"])


@pytest.mark.bad_input
def test_bad_input():
    with pytest.raises(ValueError, match="same number of rows"):
        group_accuracy(torch.zeros(3, 2), torch.zeros(4).long(), torch.zeros(3).long(), 2)
    with pytest.raises(ValueError, match="num_groups=2, got 5"):
        group_accuracy(torch.zeros(3, 2), torch.zeros(3).long(), torch.tensor([0, 1, 5]), 2)
    with pytest.raises(ValueError, match="group_counts must have shape"):
        GroupAccuracy(3, group_counts=[1, 2])
