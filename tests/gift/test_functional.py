from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lightning_methods.gift import (
    cosine_similarity_loss,
    gift_loss,
    kl_soft_label_loss,
    refine_soft_labels,
    smooth_hard_labels,
    soft_cross_entropy,
    soft_label_loss,
)
from tests.vectors import load_cases

CASES = load_cases("gift")
NAMES = ("ce", "kl", "softce", "mse", "mse_ce", "softce_ce", "cosine", "gift")
cases = pytest.mark.parametrize("case", CASES, ids=repr)


def assert_close(actual: torch.Tensor, expected: torch.Tensor | float, wide: bool) -> None:
    """Tolerance of the vectors: 1e-6 in float64 (their smoothing is float32), rtol 1e-5 and atol 1e-6 in float32."""
    expected = torch.as_tensor(expected).to(actual.dtype)
    rtol, atol = (1e-6, 1e-6) if wide else (1e-5, 1e-6)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def draw(batch: int = 6, classes: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, classes, generator=generator, dtype=dtype)
    soft_labels = torch.randn(batch, classes, generator=generator, dtype=dtype)
    return logits, soft_labels, torch.randint(classes, (batch,), generator=generator)


# the authors' results


@cases
@pytest.mark.parametrize("name", NAMES)
def test_losses_match_the_authors(case, name):
    logits, soft, target = (case.inputs[key] for key in ("logits", "soft_labels", "target"))
    loss = soft_label_loss(name, logits, soft, target, mode="additive")
    assert loss.dtype == logits.dtype
    assert_close(loss, case.outputs[name], logits.dtype == torch.float64)


@cases
@pytest.mark.parametrize("name", ["kl", "softce", "cosine", "gift"])
def test_gradients_match_the_authors(case, name):
    logits = case.inputs["logits"].clone().requires_grad_()
    soft_label_loss(name, logits, case.inputs["soft_labels"], case.inputs["target"], mode="additive").backward()
    assert_close(logits.grad, case.outputs[f"{name}_grad"], logits.dtype == torch.float64)


@cases
def test_labels_match_the_authors(case):
    soft, target = case.inputs["soft_labels"], case.inputs["target"]
    wide = soft.dtype == torch.float64
    assert_close(smooth_hard_labels(target, soft.shape[1]), case.outputs["smoothed"], wide)
    assert_close(refine_soft_labels(soft, target, mode="additive"), case.outputs["refined_additive"], wide)
    assert_close(refine_soft_labels(soft, target), case.outputs["refined_convex"], wide)
    assert_close(gift_loss(case.inputs["logits"], soft, target), case.outputs["gift_convex"], wide)


def test_there_are_vectors():
    assert len(CASES) == 9
    assert {case.inputs["logits"].dtype for case in CASES} == {torch.float32, torch.float64}


# labels


def test_smoothing_spreads_over_the_other_classes_only():
    smoothed = smooth_hard_labels(torch.tensor([3, 0]), 5, smoothing=0.2, dtype=torch.float64)
    assert smoothed.dtype == torch.float64
    torch.testing.assert_close(smoothed.sum(dim=1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(smoothed[0], torch.tensor([0.05, 0.05, 0.05, 0.8, 0.05], dtype=torch.float64))


def test_no_smoothing_is_one_hot_and_any_integer_dtype_will_do():
    target = torch.tensor([1, 0, 2])
    expected = F.one_hot(target, 3).float()
    for dtype in (torch.int64, torch.int32, torch.int16):
        torch.testing.assert_close(smooth_hard_labels(target.to(dtype), 3, smoothing=0.0), expected)


def test_both_labels_are_normalised_before_they_are_mixed():
    # A long soft label must not drown the hard one: refining t and 1000 t is the same.
    _, soft, target = draw()
    torch.testing.assert_close(refine_soft_labels(soft, target), refine_soft_labels(1000 * soft, target))


def test_weight_zero_and_one():
    _, soft, target = draw()
    torch.testing.assert_close(refine_soft_labels(soft, target, weight=0.0), F.normalize(soft, dim=1))
    hard = F.normalize(smooth_hard_labels(target, 5, dtype=soft.dtype), dim=1)
    torch.testing.assert_close(refine_soft_labels(soft, target, weight=1.0), hard)


@settings(deadline=None, max_examples=30)
@given(weight=st.floats(0, 3), smoothing=st.floats(0, 0.9), seed=st.integers(0, 10**6))
def test_additive_is_convex_with_another_weight(weight, smoothing, seed):
    logits, soft, target = draw(seed=seed)
    additive = gift_loss(logits, soft, target, weight, smoothing, "additive")
    torch.testing.assert_close(gift_loss(logits, soft, target, weight / (1 + weight), smoothing), additive)


def test_refined_labels_keep_dtype_and_are_detached():
    _, soft, target = draw(dtype=torch.float32)
    assert not refine_soft_labels(soft.requires_grad_(), target).requires_grad
    half = refine_soft_labels(soft.detach().bfloat16(), target)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), refine_soft_labels(soft.detach(), target), rtol=0.01, atol=0.01)


# losses


@settings(deadline=None, max_examples=30)
@given(scale=st.floats(1e-2, 1e4), seed=st.integers(0, 10**6), classes=st.integers(2, 40))
def test_the_scale_of_logits_and_soft_labels_is_free(scale, seed, classes):
    logits, soft, target = draw(classes=classes, seed=seed)
    loss = gift_loss(logits, soft, target)
    assert 0 <= loss <= 2
    torch.testing.assert_close(gift_loss(scale * logits, soft, target), loss)
    torch.testing.assert_close(gift_loss(logits, scale * soft, target), loss)


def test_an_offset_of_the_teacher_logits_matters():
    # Cosine is not shift invariant; centring the logits would be another method.
    logits, soft, target = draw()
    assert (gift_loss(logits, soft + 3, target) - gift_loss(logits, soft, target)).abs() > 0.01


def test_the_batch_is_averaged_and_its_order_does_not_matter():
    logits, soft, target = draw()
    rows = [gift_loss(logits[i : i + 1], soft[i : i + 1], target[i : i + 1]) for i in range(len(target))]
    loss = gift_loss(logits, soft, target)
    torch.testing.assert_close(loss, torch.stack(rows).mean())
    torch.testing.assert_close(gift_loss(logits.flip(0), soft.flip(0), target.flip(0)), loss)


def test_aligned_opposite_and_orthogonal():
    t = torch.tensor([[1.0, 2.0, 3.0]])
    for student, expected in ((5 * t, 0.0), (-t, 2.0), (torch.tensor([[3.0, 0.0, -1.0]]), 1.0)):
        torch.testing.assert_close(cosine_similarity_loss(student, t), torch.tensor(expected))


def test_kl_has_no_factor_of_the_squared_temperature():
    logits, soft, _ = draw()
    p, q = (soft / 20).softmax(1), (logits / 20).softmax(1)
    torch.testing.assert_close(kl_soft_label_loss(logits, soft), (p * (p / q).log()).sum(1).mean())
    assert kl_soft_label_loss(soft, soft) == 0


def test_mixed_losses_add_the_hard_label():
    logits, soft, target = draw()
    loss = partial(soft_label_loss, logits=logits, soft_labels=soft, target=target)
    ce = F.cross_entropy(logits, target)
    torch.testing.assert_close(loss("ce"), ce)
    torch.testing.assert_close(loss("softce_ce", hard_weight=0.5), soft_cross_entropy(logits, soft) + 0.5 * ce)
    torch.testing.assert_close(loss("mse_ce", hard_weight=0.5), F.mse_loss(logits, soft) + 0.5 * ce)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    logits, soft, target = draw(batch=3, classes=4)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda o: soft_label_loss(name, o, soft, target), logits)


def test_gradient_reaches_the_student_only():
    logits, soft, target = draw()
    gift_loss(logits.requires_grad_(), soft.requires_grad_(), target).backward()
    assert logits.grad.abs().sum() > 0
    assert soft.grad is None


def test_zero_rows_are_finite():
    logits, soft, target = draw(dtype=torch.float32)
    logits[0], soft[1] = 0, 0
    logits.requires_grad_()
    loss = gift_loss(logits, soft, target)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_computed_in_float32(name, dtype):
    logits, soft, target = draw(dtype=torch.float32)
    logits, soft = (1e-3 * logits).to(dtype), soft.to(dtype)  # float16 would underflow in the squares
    expected = soft_label_loss(name, logits.float(), soft.float(), target)
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            loss = soft_label_loss(name, logits, soft, target)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.bad_input
def test_compiles_without_a_graph_break():
    logits, soft, target = draw()
    compiled = torch.compile(gift_loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, soft, target), gift_loss(logits, soft, target))


# bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, r"num_classes must be a finite number in \[2"),
        ({"smoothing": 1.0}, r"smoothing must be a finite number in \[0, 1\)"),
        ({"smoothing": -0.1}, "smoothing"),
        ({"target": torch.tensor([0, 5])}, r"target must be in 0\.\.4, got 5"),
        ({"target": torch.tensor([-1, 0])}, r"target must be in 0\.\.4, got -1"),
        ({"target": torch.tensor([0.0, 1.0])}, "integer dtype"),
        ({"target": torch.tensor([[0, 1]])}, r"target must have shape \[batch\], got \[1, 2\]"),
    ],
)
def test_smooth_hard_labels_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        smooth_hard_labels(**{"target": torch.tensor([0, 1]), "num_classes": 5, **arguments})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": torch.zeros(6, 4)}, r"soft_labels must have shape \[batch=6, classes=4\], got \[6, 5\]"),
        ({"logits": torch.zeros(5)}, r"logits must have shape \[batch, classes\], got \[5\]"),
        ({"logits": torch.zeros(6, 5, dtype=torch.int64)}, "logits must be a floating point tensor"),
        ({"soft_labels": torch.zeros(6, 5, dtype=torch.int64)}, "soft_labels must be a floating point tensor"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, r"target must have shape \[batch=6\], got \[5\]"),
        ({"target": torch.full((6,), -1)}, r"target must be in 0\.\.4, got -1"),
        ({"weight": -0.1}, r"weight must be a finite number in \[0, 1\]"),
        ({"weight": 1.1}, r"weight must be a finite number in \[0, 1\]"),
        ({"weight": float("nan")}, "weight must be a finite number"),
        ({"weight": float("inf"), "mode": "additive"}, "weight must be a finite number"),
        ({"mode": "convexx"}, "Did you mean 'convex'"),
    ],
)
@pytest.mark.parametrize("loss", [gift_loss, partial(soft_label_loss, "gift")], ids=["gift_loss", "soft_label_loss"])
def test_gift_loss_refuses(loss, arguments, message):
    logits, soft, target = draw(dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        loss(**{"logits": logits, "soft_labels": soft, "target": target, **arguments})


@pytest.mark.bad_input
@pytest.mark.parametrize("function", [cosine_similarity_loss, kl_soft_label_loss, soft_cross_entropy])
def test_soft_losses_refuse_unequal_shapes(function):
    with pytest.raises(ValueError, match=r"soft_labels must have shape \[batch=3, classes=4\], got \[3, 5\]"):
        function(torch.zeros(3, 4), torch.zeros(3, 5))


@pytest.mark.bad_input
def test_unknown_loss_lists_the_names():
    with pytest.raises(ValueError, match=r"'ce', 'kl', 'softce', .* got 'cosin'\. Did you mean 'cosine'"):
        soft_label_loss("cosin", *draw())
    with pytest.raises(ValueError, match="temperature"):
        soft_label_loss("kl", *draw(), temperature=0.0)
    with pytest.raises(ValueError, match="hard_weight"):
        soft_label_loss("mse_ce", *draw(), hard_weight=-1.0)


def test_the_functions_need_torch_only():
    code = (
        "import sys; from lightning_methods.gift import gift_loss; "
        "assert not {'lightning', 'torchvision', 'torchmetrics', 'timm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
