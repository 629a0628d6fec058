from __future__ import annotations

import pytest
import torch

from datamodules import DigitsLTDataModule, LongTail
from datamodules.base import ArrayDataset
from datamodules.long_tail import (
    ClassBalancedSampler,
    PowerSampler,
    ProgressivelyBalancedSampler,
    SquareRootSampler,
    class_counts,
    imbalanced_class_counts,
    long_tail_indices,
)


def test_the_usual_sizes():
    assert sum(imbalanced_class_counts(100, 500, 0.01)) == 10847
    assert sum(imbalanced_class_counts(10, 5000, 0.01)) == 12406
    assert imbalanced_class_counts(10, 100, 0.02, rounding="round") == [100, 65, 42, 27, 18, 11, 7, 5, 3, 2]
    assert imbalanced_class_counts(5, 100, 0.1, "step") == [100, 100, 10, 10, 10]  # five classes, not four
    assert imbalanced_class_counts(3, 7, 0.1, "balanced") == [7, 7, 7]
    assert imbalanced_class_counts(1, 7, 0.1) == [7]
    assert imbalanced_class_counts(4, 5, 0.01)[-1] == 1  # nobody is left out


def test_indices():
    targets = torch.tensor([2, 0, 1, 1, 0, 2, -1, 2, 0, 1])
    assert long_tail_indices(targets, [3, 2, 1]).tolist() == [1, 4, 8, 2, 3, 0]
    # class 2 is the most frequent, class 0 the rarest
    assert long_tail_indices(targets, [3, 2, 1], class_order=[2, 1, 0]).tolist() == [1, 2, 3, 0, 5, 7]
    # class 0 has rank 1, class 1 rank 2, class 2 rank 0
    assert class_counts(targets[long_tail_indices(targets, [3, 2, 1], None, [1, 2, 0])], 3).tolist() == [2, 1, 3]
    drawn = {tuple(long_tail_indices(targets, [1, 1, 1], seed=seed).tolist()) for seed in range(30)}
    assert len(drawn) > 5
    assert all(targets[list(rows)].tolist() == [0, 1, 2] for rows in drawn)
    assert torch.equal(long_tail_indices(targets, [2, 2, 2], seed=3), long_tail_indices(targets, [2, 2, 2], seed=3))


def test_counts_leave_unknown_labels_out():
    assert class_counts(torch.tensor([0, 2, 2, -1]), 4).tolist() == [1, 0, 2, 0]


TARGETS = torch.tensor([3] * 900 + [0] * 90 + [5] * 10 + [-1] * 50)


@pytest.mark.bad_input
def test_counts_of_a_class_that_there_is_not():
    with pytest.raises(ValueError, match="targets must be below num_classes=3, got 5"):
        class_counts(torch.tensor([0, 5]), 3)


def shares(sampler, epochs: int = 20) -> list[float]:
    drawn = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        drawn += list(sampler)
    return [float((TARGETS[drawn] == label).float().mean()) for label in (3, 0, 5, -1)]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (ClassBalancedSampler(TARGETS), (1 / 3, 1 / 3, 1 / 3, 0)),
        (SquareRootSampler(TARGETS), (0.6976, 0.2206, 0.0735, 0)),
        (PowerSampler(TARGETS, 1.0), (0.9, 0.09, 0.01, 0)),
    ],
)
def test_samplers_draw_classes_as_they_say(sampler, expected):
    assert len(sampler) == len(TARGETS)
    assert shares(sampler) == pytest.approx(expected, abs=0.015)


def test_samples_of_a_class_are_uniform():
    sampler = ClassBalancedSampler(TARGETS, num_samples=30000)
    counts = torch.bincount(torch.tensor(list(sampler)))[990:1000]
    assert counts.sum() > 9000
    assert (counts / counts.sum() - 0.1).abs().max() < 0.015


def test_progressively_balanced():
    sampler = ProgressivelyBalancedSampler(TARGETS, num_epochs=4, num_samples=6000)
    for epoch, expected in (
        (0, (0.9, 0.09, 0.01)),
        (2, (0.6167, 0.2117, 0.1717)),
        (4, (1 / 3,) * 3),
        (9, (1 / 3,) * 3),
    ):
        sampler.set_epoch(epoch)
        assert sampler.class_probabilities().tolist() == pytest.approx(
            (expected[1], expected[0], expected[2]), abs=1e-4
        )
        rows = torch.tensor(list(sampler))
        assert float((TARGETS[rows] == 3).float().mean()) == pytest.approx(expected[0], abs=0.03)


def test_ranks_share_one_list_by_epoch():
    def rows(epoch, **options):
        sampler = ClassBalancedSampler(TARGETS, num_samples=101, **options)
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
        return list(sampler)

    whole = ClassBalancedSampler(TARGETS, num_samples=102)
    parts = [rows(0, rank=rank, world_size=2) for rank in range(2)]
    assert [row for pair in zip(*parts, strict=True) for row in pair] == list(whole)
    assert rows(1) != rows(0)
    assert rows(1) == rows(1)
    assert rows(0, seed=1) != rows(0)
    state = torch.random.get_rng_state()
    rows(0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_modifier():
    targets = torch.arange(400) % 4
    dataset = ArrayDataset(torch.arange(400), targets)
    assert class_counts(LongTail(0.1)(dataset).targets, 4).tolist() == [100, 46, 21, 10]
    assert class_counts(LongTail(0.1, "step", 50, class_order=[3, 2, 1, 0])(dataset).targets, 4).tolist() == [
        5, 5, 50, 50,
    ]  # fmt: skip
    assert LongTail(0.1)(dataset).indices[:100].tolist() == list(range(0, 400, 4))  # the first ones
    orders = {
        tuple(class_counts(LongTail(0.1, class_order="random", seed=s)(dataset).targets, 4).tolist()) for s in range(9)
    }
    assert len(orders) > 3


def test_digits():
    data = DigitsLTDataModule()
    data.setup("fit")
    assert data.class_counts.tolist() == [100, 65, 42, 27, 18, 11, 7, 5, 3, 2]
    assert data.num_classes == 10
    assert len(data.train_targets) == 280
    assert class_counts(data.test_set.targets, 10).tolist() == [60] * 10
    assert class_counts(data.val_set.targets, 10).tolist() == [10] * 10
    chosen = [set(part.indices.tolist()) for part in (data.train_set, data.val_set, data.test_set)]
    assert len(set.union(*chosen)) == sum(map(len, chosen))
    balanced = DigitsLTDataModule(sampler="class_balanced", class_order="random", batch_size=None, flatten=True, seed=1)
    balanced.setup("fit")
    assert sorted(balanced.class_counts.tolist(), reverse=True) == data.class_counts.tolist()
    x, y = next(iter(balanced.train_dataloader()))
    assert x.shape == (280, 64)
    assert class_counts(y, 10).min() > 10


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: imbalanced_class_counts(0, 10, 0.1), "num_classes"),
        (lambda: imbalanced_class_counts(2, 0, 0.1), "max_count"),
        (lambda: imbalanced_class_counts(2, 10, 0.0), "imbalance_factor"),
        (lambda: imbalanced_class_counts(2, 10, 1.1), "imbalance_factor"),
        (lambda: imbalanced_class_counts(2, 10, 0.1, "linear"), "profile"),
        (lambda: imbalanced_class_counts(2, 10, 0.1, rounding="ceil"), "rounding"),
        (
            lambda: long_tail_indices(torch.tensor([0, 0, 1]), [2, 2]),
            "2 samples of class 1 were asked, but there are 1",
        ),
        (lambda: long_tail_indices(torch.tensor([0, 1]), [1, 1], class_order=[0, 0]), "permutation"),
        (lambda: long_tail_indices(torch.tensor([0, 2]), [1, 1]), "below the 2 classes"),
        (lambda: long_tail_indices(torch.tensor([0, 1]), [1, -1]), "negative"),
        (lambda: ClassBalancedSampler(torch.tensor([-1])), "at least one label"),
        (lambda: ClassBalancedSampler(torch.tensor([0.5])), "class indices"),
        (lambda: ClassBalancedSampler(TARGETS, rank=2, world_size=2), "rank"),
        (lambda: ClassBalancedSampler(TARGETS, num_samples=0), "num_samples"),
        (lambda: ProgressivelyBalancedSampler(TARGETS, 0), "num_epochs"),
        (lambda: LongTail(0.0), "imbalance_factor"),
        (lambda: LongTail(class_order="sorted"), "class_order"),
        (lambda: LongTail(max_count=0), "max_count"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
