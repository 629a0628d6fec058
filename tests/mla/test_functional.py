from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from datamodules.long_tail import imbalanced_class_counts
from lightning_methods.mla import (
    additive_boundary_angles,
    additive_logit_adjustment,
    logit_adjusted_cross_entropy,
    multiplicative_boundary_angles,
    multiplicative_logit_adjustment,
    one_vs_one_scores,
    optimal_boundary_angles,
    search_strength,
    shot_accuracy,
    simplex_etf,
)
from lightning_methods.mla.functional import adjust
from tests.vectors import load_cases

CASES = load_cases("mla")
COUNTS = [400, 100, 50, 10, 3]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_of(batch: int = 16, classes: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch, classes, generator=generator(seed), dtype=dtype)


def run_case(case):
    """The function's result, and the expected one."""
    if case.function == "simplex_etf":
        w = simplex_etf(**case.inputs)
        return w @ w.T, case.outputs["gram"]
    if case.function == "imbalanced_class_counts":
        return torch.tensor(imbalanced_class_counts(**case.inputs)), case.outputs["counts"]
    result = {**globals()}[case.function](**case.inputs)
    return result, next(iter(case.outputs.values())) if len(case.outputs) == 1 else case.outputs


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_vectors(case):
    actual, expected = run_case(case)
    if case.function == "imbalanced_class_counts":
        assert torch.equal(actual, expected)
    elif case.function == "one_vs_one_scores":
        classes = expected.shape[1]
        votes = (actual - expected).abs().mul(classes).round()
        torch.testing.assert_close(actual.mul(classes), actual.mul(classes).round(), rtol=0, atol=1e-4)
        assert votes.max() <= 1
        assert (votes > 0).float().mean() <= 0.002
    elif case.function == "shot_accuracy":
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name].double(), torch.as_tensor(value).double(), rtol=1e-5, atol=1e-6, equal_nan=True
            )
    else:
        atol = 1e-5 if case.function.endswith("angles") else 1e-6
        torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-5, atol=atol, equal_nan=True)


def test_all_vectors_are_there():
    assert len(CASES) == 33
    assert len({case.function for case in CASES}) == 9


# adjustments


@pytest.mark.parametrize("as_counts", [list, np.array, torch.tensor, lambda c: torch.tensor(c, dtype=torch.int32)])
def test_counts_in_any_form_and_any_order(as_counts):
    x = logits_of()
    order = torch.tensor([3, 0, 4, 1, 2])
    counts = as_counts([COUNTS[i] for i in order])
    for adjusted in (multiplicative_logit_adjustment, additive_logit_adjustment):
        torch.testing.assert_close(adjusted(x[:, order], counts, 0.7), adjusted(x, COUNTS, 0.7)[:, order])
    angles = optimal_boundary_angles(COUNTS)
    torch.testing.assert_close(optimal_boundary_angles(counts), angles[order][:, order])
    assert logit_adjusted_cross_entropy(x[:, order], torch.zeros(16, dtype=torch.long), counts).isfinite()


def test_only_ratios_of_counts_matter():
    x = logits_of()
    scaled = [7 * count for count in COUNTS]
    torch.testing.assert_close(additive_logit_adjustment(x, COUNTS, 1.0), additive_logit_adjustment(x, scaled, 1.0))
    by_ratio = x * (COUNTS[0] / torch.tensor(COUNTS).double()) ** 0.5
    assert torch.equal(multiplicative_logit_adjustment(x, COUNTS, 0.5).argmax(1), by_ratio.argmax(1))


def test_scale_of_the_logits_changes_ala_only():
    x = logits_of(2000)
    angles = optimal_boundary_angles(COUNTS)
    for scale in (0.01, 100.0):
        mla = multiplicative_logit_adjustment(scale * x, COUNTS, 0.5)
        assert torch.equal(mla.argmax(1), multiplicative_logit_adjustment(x, COUNTS, 0.5).argmax(1))
        assert torch.equal(one_vs_one_scores(scale * x, angles), one_vs_one_scores(x, angles))
        ala = additive_logit_adjustment(scale * x, COUNTS, 1.0)
        assert not torch.equal(ala.argmax(1), additive_logit_adjustment(x, COUNTS, 1.0).argmax(1))


def test_strength_zero_and_equal_counts_change_nothing():
    x = logits_of()
    torch.testing.assert_close(multiplicative_logit_adjustment(x, COUNTS, 0.0), x)
    torch.testing.assert_close(additive_logit_adjustment(x, COUNTS, 0.0), x)
    for name in ("multiplicative", "additive", "one_vs_one"):
        assert torch.equal(adjust(name, x, [20] * 5, 1.0).argmax(1), x.argmax(1))
    assert adjust("none", x, COUNTS) is x


def test_a_negative_logit_of_a_rare_class_goes_down():
    adjusted = multiplicative_logit_adjustment(torch.tensor([-1.0, -1.0]), [90, 10], 0.5)
    assert adjusted[1] < adjusted[0] < -1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    counts = [10**9, 1]  # the factor of the rare class, 5.6e6, does not fit into float16
    x = torch.tensor([[1.0, 1e-3]]).to(dtype)
    out = multiplicative_logit_adjustment(x, counts, 0.75)
    assert out.dtype == dtype
    expected = (x.double() * (torch.tensor([1e9, 1.0]).double() / (1e9 + 1)) ** -0.75).to(dtype)
    torch.testing.assert_close(out, expected)
    assert one_vs_one_scores(logits_of(dtype=torch.float32).to(dtype), optimal_boundary_angles(COUNTS)).isfinite().all()


def test_any_leading_shape():
    x = logits_of(24).view(2, 3, 4, 5)
    for adjusted in (multiplicative_logit_adjustment, additive_logit_adjustment):
        torch.testing.assert_close(adjusted(x, COUNTS, 0.5)[1, 2], adjusted(x[1, 2], COUNTS, 0.5))


def test_gradients():
    x = logits_of(3).requires_grad_()
    target = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: multiplicative_logit_adjustment(x, COUNTS, 0.5), x)
    assert torch.autograd.gradcheck(lambda x: additive_logit_adjustment(x, COUNTS, 0.5), x)
    assert torch.autograd.gradcheck(lambda x: logit_adjusted_cross_entropy(x, target, COUNTS, 0.8), x)


def test_the_loss_is_cross_entropy_of_what_ala_takes_away():
    x, target = logits_of(), torch.arange(16) % 5
    prior = torch.tensor(COUNTS).double() / sum(COUNTS)
    loss = logit_adjusted_cross_entropy(x, target, COUNTS, 0.7)
    torch.testing.assert_close(loss, F.cross_entropy(x + 0.7 * prior.log(), target))
    undone = additive_logit_adjustment(x + 0.7 * prior.log(), COUNTS, 0.7)
    torch.testing.assert_close(undone, x)


@pytest.mark.bad_input  # the run-time shape checks are not made for the compiler
def test_compiles_without_graph_breaks():
    x, counts = logits_of(dtype=torch.float32), torch.tensor(COUNTS)
    compiled = torch.compile(multiplicative_logit_adjustment, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, counts, 0.5), multiplicative_logit_adjustment(x, counts, 0.5))


# angles


def test_angles_of_a_pair_add_up_and_the_rarer_class_has_the_larger():
    counts = torch.tensor(COUNTS)
    rho = math.acos(-1 / 4)
    norms = torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0])
    tables = {
        "optimal": optimal_boundary_angles(counts),
        "multiplicative": multiplicative_boundary_angles(counts),
        "additive": additive_boundary_angles(counts, 10 * torch.ones(5), 1.0),
        "with norms": optimal_boundary_angles(counts, 0.5, norms),
    }
    for name, theta in tables.items():
        torch.testing.assert_close(theta + theta.T, torch.full((5, 5), rho), msg=name)
        torch.testing.assert_close(theta.diagonal(), torch.full((5,), rho / 2), msg=name)
        if name != "with norms":
            rarer = counts[:, None] < counts[None, :]
            assert (theta[rarer] > rho / 2).all()
            assert (theta[rarer.T] < rho / 2).all()
    # A longer mean feature means a narrower class.
    assert (tables["with norms"][0, 1] / rho - 2 * 10 / (20 * 1 + 10 * 2)).abs() < 1e-6


def test_on_the_boundary_adjusted_logits_are_equal():
    counts = torch.tensor([500, 20, 100, 7]).double()
    rho = math.acos(-1 / 3)
    w = simplex_etf(4, 4, generator(), torch.float64)
    theta = multiplicative_boundary_angles(counts, 0.8).double()
    length = 6.0
    norms = torch.full((4,), length)
    ala = additive_boundary_angles(counts, norms, 1.3).double()
    for i, j in ((0, 1), (1, 0), (2, 3)):
        second = (w[j] - math.cos(rho) * w[i]) / math.sin(rho)
        feature = math.cos(theta[i, j]) * w[i] + math.sin(theta[i, j]) * second
        adjusted = multiplicative_logit_adjustment((w @ feature)[None], counts, 0.8)[0]
        torch.testing.assert_close(adjusted[i], adjusted[j], rtol=1e-5, atol=1e-5)
        feature = length * (math.cos(ala[i, j]) * w[i] + math.sin(ala[i, j]) * second)
        adjusted = additive_logit_adjustment((w @ feature)[None], counts, 1.3)[0]
        torch.testing.assert_close(adjusted[i], adjusted[j], rtol=1e-5, atol=1e-5)


def test_additive_angles_are_nan_where_there_is_no_boundary():
    theta = additive_boundary_angles([10000, 1, 1], torch.full((3,), 0.5), 5.0)
    assert theta[0, 1].isnan()
    assert theta[1, 0].isnan()
    torch.testing.assert_close(theta[1, 2], torch.tensor(math.pi / 3))


def angle_gap(classes: int, gamma: float) -> float:
    """Largest difference of the optimal and the multiplicative angle, in degrees, for count ratios in [.01, 100]."""
    gaps = []
    for ratios in torch.logspace(-2, 2, 401, dtype=torch.float64).split(classes - 1):
        counts = torch.ones(classes, dtype=torch.float64)
        counts[1 : len(ratios) + 1] = ratios
        gap = optimal_boundary_angles(counts, gamma)[0] - multiplicative_boundary_angles(counts, gamma)[0]
        gaps.append(gap.abs().rad2deg().max().item())
    return max(gaps)


@pytest.mark.parametrize(
    ("classes", "gamma", "degrees"), [(10, 0.25, 0.57), (10, 0.5, 3.23), (10, 1.0, 5.99), (100, 0.5, 3.69)]
)
def test_how_far_mla_is_from_the_optimum(classes, gamma, degrees):
    assert angle_gap(classes, gamma) == pytest.approx(degrees, abs=0.01)


def test_how_far_mla_is_from_the_optimum_with_very_many_classes():
    assert angle_gap(2000, 0.5) == pytest.approx(4.07, abs=0.03)


# 1-vs-1


def loop_scores(logits: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    batch, classes = logits.shape
    scores = torch.zeros_like(logits)
    for b in range(batch):
        for i in range(classes):
            wins = [
                logits[b, i] * torch.cos(angles[j, i]) > logits[b, j] * torch.cos(angles[i, j])
                for j in range(classes)
                if j != i
            ]
            scores[b, i] = sum(map(int, wins)) / classes
    return scores


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3, 5, 50])
def test_one_vs_one_is_the_loop(chunk_size):
    x = logits_of(9)
    # Angles beyond 90 degrees: only products, not quotients, of cosines are right there.
    angles = optimal_boundary_angles(COUNTS, 1.0).double()
    assert (angles > math.pi / 2).any()
    assert torch.equal(one_vs_one_scores(x, angles, chunk_size), loop_scores(x, angles))


def test_every_pair_has_one_winner_and_ties_go_to_the_first():
    scores = one_vs_one_scores(logits_of(50), optimal_boundary_angles(COUNTS))
    torch.testing.assert_close(scores.sum(1), torch.full((50,), 10 / 5, dtype=torch.float64))
    zero = one_vs_one_scores(torch.zeros(2, 5), optimal_boundary_angles(COUNTS))
    assert (zero == 0).all()
    assert (zero.argmax(1) == 0).all()


def test_one_vs_one_of_many_classes():
    x = logits_of(3, 1000, dtype=torch.float32)
    angles = optimal_boundary_angles(torch.arange(1, 1001))
    cosines = angles.cos()
    at_once = (x[:, :, None] * cosines.T > x[:, None, :] * cosines).sum(dim=2) / 1000
    assert torch.equal(one_vs_one_scores(x, angles), at_once)


def test_class_order_carries_over():
    x, order = logits_of(50), torch.tensor([4, 2, 0, 1, 3])
    angles = optimal_boundary_angles(COUNTS)
    permuted = one_vs_one_scores(x[:, order], angles[order][:, order])
    assert torch.equal(permuted, one_vs_one_scores(x, angles)[:, order])


@pytest.mark.bad_input  # the run-time shape checks are not made for the compiler
def test_one_vs_one_compiles():
    x, angles = logits_of(7), optimal_boundary_angles(COUNTS).double()
    compiled = torch.compile(one_vs_one_scores, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, angles, 2), one_vs_one_scores(x, angles))


def test_one_vs_one_of_no_sample_and_of_huge_batches():
    angles = optimal_boundary_angles(COUNTS)
    assert one_vs_one_scores(torch.zeros(0, 5), angles).shape == (0, 5)
    x = logits_of(60_000, dtype=torch.float32)  # more than a chunk's entries in one class
    assert torch.equal(one_vs_one_scores(x, angles)[-9:], one_vs_one_scores(x[-9:], angles))


def test_no_gradient_through_scores():
    x = logits_of().requires_grad_()
    assert not one_vs_one_scores(x, optimal_boundary_angles(COUNTS)).requires_grad


# strength


@pytest.mark.parametrize("method", ["multiplicative", "additive", "one_vs_one"])
def test_search_is_the_loop_over_strengths(method):
    x, target = logits_of(200), torch.randint(4, (200,), generator=generator(1))  # class 4 does not occur
    strengths = [0.0, 0.3, 1.0, 2.0]
    norms = torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0])
    best, accuracy = search_strength(x, target, COUNTS, strengths, method, norms)
    expected = []
    for strength in strengths:
        preds = adjust(method, x, COUNTS, strength, norms).argmax(1)
        expected.append(shot_accuracy(preds, target, COUNTS)["average"])
    torch.testing.assert_close(accuracy.float(), torch.stack(expected))
    assert best == strengths[int(accuracy.argmax())]


def test_of_equal_strengths_the_smallest_wins():
    x = 10 * torch.eye(5)
    best, accuracy = search_strength(x, torch.arange(5), COUNTS, torch.tensor([1.0, 0.25, 0.5]))
    assert best == 0.25
    assert (accuracy == 1).all()


# simplex


@pytest.mark.parametrize(("classes", "features"), [(2, 2), (5, 8), (10, 10), (100, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_simplex(classes, features, dtype):
    w = simplex_etf(classes, features, generator(), dtype)
    assert w.shape == (classes, features)
    assert w.dtype == dtype
    gram = torch.full((classes, classes), -1 / (classes - 1), dtype=dtype).fill_diagonal_(1)
    torch.testing.assert_close(w @ w.T, gram, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(w.sum(0), torch.zeros(features, dtype=dtype), rtol=0, atol=1e-5)
    assert torch.equal(w, simplex_etf(classes, features, generator(), dtype))
    assert not torch.equal(w, simplex_etf(classes, features, generator(1), dtype))


# bad input


@pytest.mark.bad_input
@pytest.mark.parametrize("counts", [[5, 0, 1, 2, 3], [5, -1, 1, 2, 3], torch.tensor([5, 0, 1, 2, 3])])
def test_counts_that_are_not_positive(counts):
    x, target = logits_of(), torch.zeros(16, dtype=torch.long)
    for call in (
        lambda: multiplicative_logit_adjustment(x, counts, 0.5),
        lambda: additive_logit_adjustment(x, counts, 0.5),
        lambda: logit_adjusted_cross_entropy(x, target, counts),
        lambda: optimal_boundary_angles(counts),
        lambda: multiplicative_boundary_angles(counts),
        lambda: additive_boundary_angles(counts, torch.ones(5)),
        lambda: search_strength(x, target, counts, [0.5]),
        lambda: adjust("one_vs_one", x, counts),
    ):
        with pytest.raises(ValueError, match="class_counts must be positive"):
            call()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: multiplicative_logit_adjustment(logits_of(), COUNTS[:4], 0.5), r"class_counts must have shape"),
        (lambda: additive_logit_adjustment(logits_of(), COUNTS[:4], 0.5), r"class_counts must have shape"),
        (lambda: adjust("one_vs_one", logits_of(), COUNTS[:4]), r"class_counts must have shape"),
        (lambda: multiplicative_logit_adjustment(logits_of(), COUNTS, -0.5), "gamma"),
        (lambda: additive_logit_adjustment(logits_of(), COUNTS, -0.5), "tau"),
        (lambda: additive_logit_adjustment(logits_of(), COUNTS, math.nan), "tau"),
        (lambda: multiplicative_logit_adjustment(logits_of().long(), COUNTS, 0.5), "floating point"),
        (lambda: optimal_boundary_angles(COUNTS, -1.0), "gamma"),
        (lambda: multiplicative_boundary_angles(COUNTS, -1.0), "gamma"),
        (lambda: additive_boundary_angles(COUNTS, torch.ones(5), -1.0), "tau"),
        (lambda: optimal_boundary_angles([5, 3]), "at least 3 classes"),
        (lambda: multiplicative_boundary_angles([5, 3]), "at least 3 classes"),
        (lambda: additive_boundary_angles([5, 3], torch.ones(2)), "at least 3 classes"),
        (lambda: one_vs_one_scores(torch.zeros(1, 2), torch.ones(2, 2)), "at least 3 classes"),
        (lambda: optimal_boundary_angles(COUNTS, 0.5, torch.ones(4)), r"feature_norms must have shape \[classes=5\]"),
        (lambda: optimal_boundary_angles(COUNTS, 0.5, torch.zeros(5)), "feature_norms must be positive and finite"),
        (lambda: additive_boundary_angles(COUNTS, torch.full((5,), math.inf)), "feature_norms must be positive"),
        (lambda: optimal_boundary_angles(COUNTS, 0.5, torch.full((5,), math.nan)), "feature_norms must be positive"),
        (lambda: one_vs_one_scores(logits_of(), torch.ones(5, 4)), r"angles must have shape \[classes=5, classes=5\]"),
        (lambda: one_vs_one_scores(logits_of(), torch.ones(5, 5), 0), "chunk_size"),
        (lambda: simplex_etf(5, 4), "num_features must be at least num_classes=5, got 4"),
        (lambda: simplex_etf(1, 4), "num_classes"),
        (lambda: search_strength(logits_of(), torch.zeros(16).long(), COUNTS, []), "number of strengths"),
        (lambda: search_strength(logits_of(), torch.full((16,), 5), COUNTS, [0.5]), r"target must be in 0\.\.4"),
        (lambda: search_strength(logits_of(), torch.zeros(16).long(), COUNTS, [-0.5]), "gamma"),
        (lambda: search_strength(logits_of(), torch.zeros(16).long(), COUNTS, [0.5], "none"), "method must be one of"),
        (lambda: search_strength(torch.zeros(0, 5), torch.zeros(0).long(), COUNTS, [0.5]), "number of samples"),
        (lambda: adjust("multiplicativ", logits_of(), COUNTS), "Did you mean 'multiplicative'"),
        (lambda: logit_adjusted_cross_entropy(logits_of(), torch.zeros(16).long(), COUNTS, -1.0), "tau"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
