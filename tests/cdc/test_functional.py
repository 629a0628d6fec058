"""CDC's functions: the test vectors, loops, gradients, invariances, edge cases and bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lightning_methods.cdc import (
    calibration_loss,
    clustering_metrics,
    prototype_initialization,
    region_targets,
    select_confident_samples,
    separate_prototypes,
)
from lightning_methods.cdc.functional import negative_entropy
from lightning_methods.cdc.modules import ClusteringHead
from tests.vectors import load_cases


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# vectors

FUNCTIONS = {
    "select_confident_samples": select_confident_samples,
    "region_targets": region_targets,
    "calibration_loss": calibration_loss,
    "separate_prototypes": separate_prototypes,
    "clustering_metrics": clustering_metrics,
}


def test_the_vectors_cover_every_function():
    assert {case.function for case in load_cases("cdc")} == set(FUNCTIONS)


@pytest.mark.parametrize("case", load_cases("cdc"), ids=repr)
def test_vectors(case):
    result = FUNCTIONS[case.function](**case.inputs)
    if not isinstance(result, dict):
        result = dict(zip(case.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    rtol = 1e-4 if case.function == "separate_prototypes" else 1e-6
    for name, expected in case.outputs.items():
        expected = torch.as_tensor(expected, dtype=None if isinstance(expected, Tensor) else torch.float64)
        exact = not expected.is_floating_point()
        torch.testing.assert_close(result[name], expected, rtol=0 if exact else rtol, atol=0 if exact else 1e-12)


@pytest.mark.parametrize("case", load_cases("cdc", "calibration_loss"), ids=repr)
def test_vectors_in_float32(case):
    inputs = {k: v.float() if isinstance(v, Tensor) else v for k, v in case.inputs.items()}
    assert calibration_loss(**inputs).item() == pytest.approx(case.outputs["value"], rel=1e-4)


# selection


def select_loop(probs: Tensor, m: int) -> list[bool]:
    rows, classes = probs.shape
    chosen = [False] * rows
    for c in range(classes):
        order = sorted(range(rows), key=lambda i: (-probs[i, c].item(), i))[: min(m, rows)]
        quota = math.floor(len(order) * sum(probs[i].max().item() for i in order) / len(order))
        for i in order[:quota]:
            chosen[i] = True
    return chosen


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(2, 6), st.integers(1, 40), st.integers(0, 10_000))
def test_selection_equals_a_loop_over_classes(rows, classes, m, seed):
    probs = (2 * randn(rows, classes, seed=seed)).softmax(1)
    mask, labels = select_confident_samples(probs, m)
    assert mask.tolist() == select_loop(probs, m)
    assert torch.equal(labels, probs.argmax(1))


def test_ties_go_to_the_lower_row():
    probs = torch.tensor([[0.75, 0.25]]).repeat(8, 1)
    mask, labels = select_confident_samples(probs, 4)
    assert mask.tolist() == [True] * 3 + [False] * 5  # floor(4 * 0.75) of the first four, under both classes
    assert (labels == 0).all()


def test_sure_predictions_are_all_selected_and_flat_ones_hardly():
    sure = F.one_hot(torch.arange(20) % 4, 4).double()
    assert select_confident_samples(sure, 5)[0].all()
    flat = torch.full((20, 4), 0.25).double()
    assert select_confident_samples(flat, 5)[0].sum() == 1  # floor(5 / 4), the same row for every class


def test_a_class_nobody_predicts_selects_by_the_confidence_of_its_candidates():
    probs = torch.tensor([[0.6, 0.4, 0.0], [0.3, 0.7, 0.0], [0.9, 0.1, 0.0]])
    mask, labels = select_confident_samples(probs, 1)
    assert mask.tolist() == select_loop(probs, 1)
    assert 2 not in labels


def test_more_candidates_than_rows_are_all_rows():
    probs = randn(6, 3).softmax(1)
    for ours, cut in zip(select_confident_samples(probs, 99), select_confident_samples(probs, 6), strict=True):
        assert torch.equal(ours, cut)


def test_selection_follows_the_rows():
    probs = randn(30, 4).softmax(1)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    mask, labels = select_confident_samples(probs, 7)
    shuffled_mask, shuffled_labels = select_confident_samples(probs[order], 7)
    assert torch.equal(shuffled_mask, mask[order])
    assert torch.equal(shuffled_labels, labels[order])


# regions


def test_region_targets_equal_a_loop_and_ignore_empty_regions():
    probs, regions = randn(50, 4).softmax(1), torch.randint(9, (50,), generator=torch.Generator().manual_seed(0))
    regions[regions == 3] = 4
    expected = torch.stack([probs[regions == r].mean(0) for r in regions])
    torch.testing.assert_close(region_targets(probs, regions, 12), expected)


def test_one_region_per_sample_changes_nothing_and_one_region_is_the_mean():
    probs = randn(8, 3).softmax(1)
    torch.testing.assert_close(region_targets(probs, torch.arange(8), 8), probs)
    one = region_targets(probs, torch.zeros(8, dtype=torch.int64), 1)
    torch.testing.assert_close(one, probs.mean(0).expand(8, 3))


def test_regions_lower_the_confidence():
    probs, regions = randn(60, 5).softmax(1), torch.arange(60) % 7
    assert region_targets(probs, regions, 7).max(1).values.mean() < probs.max(1).values.mean()
    assert not region_targets(probs.requires_grad_(), regions, 7).requires_grad


def test_region_means_are_float32_under_autocast():
    probs, regions = randn(40, 4, dtype=torch.float32).softmax(1), torch.arange(40) % 3
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(region_targets(probs, regions, 3), region_targets(probs, regions, 3), rtol=0, atol=0)
        inside = region_targets(probs, regions, 3)
    torch.testing.assert_close(inside, region_targets(probs, regions, 3), rtol=0, atol=0)
    assert region_targets(probs.bfloat16().float().softmax(1).bfloat16(), regions, 3).dtype == torch.float32


# loss


def test_calibration_loss_is_its_formula():
    logits, targets = randn(6, 4), randn(6, 4, seed=1).softmax(1)
    p = logits.softmax(1)
    expected = -(targets * p.log()).sum(1).mean() + 0.7 * (p.mean(0) * p.mean(0).log()).sum()
    torch.testing.assert_close(calibration_loss(logits, targets, 0.7), expected)


def test_gradcheck():
    targets = randn(5, 3, seed=1).softmax(1)
    logits = randn(5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: calibration_loss(x, targets, 0.5), logits)
    assert torch.autograd.gradcheck(lambda x: calibration_loss(x, targets, 0.0), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dead_class_gives_no_nan(dtype):
    logits = torch.zeros(4, 3, dtype=dtype)
    logits[:, 2] = -1e4  # softmax underflows to exactly zero
    logits.requires_grad_()
    targets = torch.tensor([[0.5, 0.5, 0.0]], dtype=dtype).repeat(4, 1)
    loss = calibration_loss(logits, targets)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)  # log 2 - log 2
    assert torch.isfinite(logits.grad).all()


def test_the_entropy_term_spreads_the_clusters():
    uniform, peaked = torch.full((4,), 0.25), torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert negative_entropy(uniform).item() == pytest.approx(-math.log(4))
    assert negative_entropy(peaked) == 0
    logits = (torch.eye(4)[0] * 3).repeat(8, 1).requires_grad_()
    calibration_loss(logits, logits.detach().softmax(1), entropy_weight=1.0).backward()
    assert (logits.grad[:, 0] > 0).all(), "a step down takes weight from the crowded cluster"


def test_no_gradient_to_the_targets():
    targets = randn(5, 3).softmax(1).requires_grad_()
    logits = randn(5, 3, seed=1).requires_grad_()
    calibration_loss(logits, targets).backward()
    assert targets.grad is None
    assert logits.grad is not None


def test_half_precision_logits_compute_in_float32():
    logits, targets = randn(8, 3, dtype=torch.float32).bfloat16(), randn(8, 3, seed=1, dtype=torch.float32).softmax(1)
    assert calibration_loss(logits, targets).dtype == torch.float32
    torch.testing.assert_close(calibration_loss(logits, targets), calibration_loss(logits.float(), targets))


# initialisation


def test_separation_equals_torch_optimisers_and_schedule():
    w = randn(6, 5)
    z, v = w.clone().requires_grad_(), w.clone().requires_grad_()
    optimizer = torch.optim.SGD([z, v], lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    for _ in range(40):
        logits = 5 * F.normalize(z.relu(), dim=1) @ F.normalize(v, dim=1).t()
        optimizer.zero_grad()
        F.cross_entropy(logits, torch.arange(6)).backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(separate_prototypes(w, steps=40), v.detach(), rtol=1e-8, atol=1e-10)


def test_separation_pushes_apart_and_keeps_order():
    w = F.normalize(randn(8, 16).abs(), dim=1)
    apart = separate_prototypes(w, steps=300)

    def closest(x: Tensor) -> float:
        cosines = F.normalize(x, dim=1) @ F.normalize(x, dim=1).t()
        return (cosines - 2 * torch.eye(len(x), dtype=x.dtype)).max().item()

    assert closest(apart) < closest(w) - 0.2
    assert torch.equal((F.normalize(w, dim=1) @ F.normalize(apart, dim=1).t()).argmax(1), torch.arange(8))


def test_separation_keeps_dtype_and_grad_mode():
    assert separate_prototypes(randn(3, 4).bfloat16(), steps=3).dtype == torch.bfloat16
    with torch.no_grad():
        moved = separate_prototypes(randn(3, 4), steps=3)
    assert not torch.equal(moved, randn(3, 4))
    assert not moved.requires_grad
    assert torch.equal(separate_prototypes(randn(3, 4), steps=0), randn(3, 4))


def blobs(k: int = 5, each: int = 40, d: int = 16) -> tuple[Tensor, Tensor]:
    centres = 4 * randn(k, d, seed=3)
    labels = torch.arange(k * each) % k
    return centres[labels] + randn(k * each, d, seed=4), labels


def test_initial_head_is_a_nearest_prototype_classifier():
    features, labels = blobs()
    head = ClusteringHead(16, 5, hidden_dim=24).double()
    head.load_prototypes(*prototype_initialization(features, 5, 24, steps=300, seed=0))
    metrics = clustering_metrics(head.eval()(features).softmax(1), labels)
    assert metrics["acc"] > 0.95
    untrained = ClusteringHead(16, 5, hidden_dim=24).double().eval()
    assert clustering_metrics(untrained(features).softmax(1), labels)["acc"] < 0.8


def test_initialisation_is_reproducible_and_seeded():
    features, _ = blobs()
    first = prototype_initialization(features, 5, 8, steps=5, n_init=1, seed=1)
    again = prototype_initialization(features, 5, 8, steps=5, n_init=1, seed=1)
    other = prototype_initialization(features, 5, 8, steps=5, n_init=1, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert [w.shape for w in first] == [(8, 16), (5, 8)]


def test_constant_and_zero_rows_are_finite():
    features, _ = blobs()
    features[:3], features[3:6] = 0, 7.5
    for weights in prototype_initialization(features, 5, 8, steps=20):
        assert torch.isfinite(weights).all()


def test_first_layer_ignores_shift_and_scale_of_a_row():
    features, _ = blobs()
    plain = prototype_initialization(features, 5, 8, steps=0, n_init=2)[0]
    moved = prototype_initialization(3 * features + 2, 5, 8, steps=0, n_init=2)[0]
    torch.testing.assert_close(plain, moved)


# bad input

PROBS = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]])
IDS = torch.tensor([0, 1, 1])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select_confident_samples(PROBS[0], 1), r"cal_probs must have shape \[batch, classes\]"),
        (lambda: select_confident_samples(PROBS * 1.01, 1), "sum to 1"),
        (lambda: select_confident_samples(PROBS - 0.2, 1), "probabilities"),
        (lambda: select_confident_samples(PROBS, 0), "num_per_class"),
        (lambda: select_confident_samples(PROBS.long(), 1), "floating"),
        (lambda: region_targets(PROBS[0], IDS, 2), "probs must have shape"),
        (lambda: region_targets(PROBS * 2, IDS, 2), "sum to 1"),
        (lambda: region_targets(PROBS, IDS, 1), "region_ids must be in 0..0, got 1"),
        (lambda: region_targets(PROBS, IDS - 1, 2), "region_ids must be in 0..1, got -1"),
        (lambda: region_targets(PROBS, IDS[:2], 2), "region_ids must have shape"),
        (lambda: region_targets(PROBS, IDS, 0), "num_regions"),
        (lambda: region_targets(PROBS, IDS.float(), 2), "integer"),
        (lambda: calibration_loss(PROBS, PROBS[:2]), "targets must have shape"),
        (lambda: calibration_loss(PROBS, PROBS * 2), "sum to 1"),
        (lambda: calibration_loss(PROBS[0], PROBS[0]), "logits must have shape"),
        (lambda: calibration_loss(PROBS, PROBS, -1.0), "entropy_weight"),
        (lambda: separate_prototypes(PROBS[0]), "prototypes must have shape"),
        (lambda: separate_prototypes(PROBS, steps=-1), "steps"),
        (lambda: separate_prototypes(PROBS, scale=0.0), "scale"),
        (lambda: separate_prototypes(PROBS / 0), "finite"),
        (lambda: prototype_initialization(PROBS, 2, 4), "hidden_dim must be at most the number of rows .* 4 > 3"),
        (lambda: prototype_initialization(PROBS, 4, 2), "num_clusters must be at most the number of rows .* 4 > 3"),
        (lambda: prototype_initialization(PROBS, 1, 2), "num_clusters"),
        (lambda: prototype_initialization(PROBS, 2, 1), "hidden_dim"),
        (lambda: prototype_initialization(PROBS[:, :1], 2, 2), "two columns"),
        (lambda: prototype_initialization(PROBS / 0, 2, 2), "finite"),
        (lambda: ClusteringHead(4, 1), "num_clusters"),
        (
            lambda: ClusteringHead(2, 3, 5).load_prototypes(torch.zeros(5, 3), torch.zeros(3, 5)),
            "first must have shape",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
