from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lightning_methods.metrics import EffectiveRank, effective_rank
from lightning_methods.ssl import alignment_loss, uniformity_loss
from lightning_methods.wasserstein_uniformity import (
    PairwiseUniformity,
    PairwiseUniformityLoss,
    WassersteinUniformity,
    WassersteinUniformityLoss,
    covariance_log_spectrum,
    wasserstein_to_uniform,
    wasserstein_uniformity,
)
from lightning_methods.wasserstein_uniformity.figures import collapsed_sphere
from tests.vectors import load_cases


def rows(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", load_cases("wasserstein_uniformity", "wasserstein_uniformity"), ids=repr)
def test_vectors(case):
    tolerance = 1e-6 if case.inputs["z"].dtype == torch.float64 else 1e-4
    value = wasserstein_uniformity(**case.inputs)
    assert value.dtype == case.inputs["z"].dtype
    assert value.item() == pytest.approx(case.outputs["value"], rel=tolerance)


@pytest.mark.parametrize("case", load_cases("wasserstein_uniformity", "wasserstein_uniformity_grad"), ids=repr)
def test_gradient_vectors(case):
    z = case.inputs.pop("z").requires_grad_()
    wasserstein_uniformity(z, **case.inputs).backward()
    torch.testing.assert_close(z.grad, case.outputs["grad"], rtol=1e-5, atol=1e-8)


def test_every_case_of_the_file_is_a_test_somewhere():
    functions = {case.function for case in load_cases("wasserstein_uniformity")}
    here = {"wasserstein_uniformity", "wasserstein_uniformity_grad"}
    in_ssl = {"uniformity_loss", "alignment_loss", "info_nce_queue_loss", "byol_loss", "barlow_twins_loss"}
    assert functions == here | in_ssl | {"knn_predict"}


# the four properties that a uniformity metric should have


SETS = st.tuples(st.integers(2, 20), st.integers(2, 8), st.integers(0, 1000))


@settings(deadline=None, max_examples=25)
@given(SETS)
def test_property_1_instances_may_be_permuted(sizes):
    n, m, seed = sizes
    z = rows(n, m, seed=seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert wasserstein_uniformity(z[order]).item() == pytest.approx(wasserstein_uniformity(z).item(), abs=1e-10)
    assert uniformity_loss(z[order]).item() == pytest.approx(uniformity_loss(z).item(), abs=1e-10)


@settings(deadline=None, max_examples=25)
@given(SETS, st.integers(2, 5))
def test_property_2_instances_may_be_cloned(sizes, copies):
    n, m, seed = sizes
    z = rows(n, m, seed=seed)
    cloned = wasserstein_uniformity(z.repeat(copies, 1)).item()
    assert cloned == pytest.approx(wasserstein_uniformity(z).item(), abs=1e-8)
    assert uniformity_loss(z.repeat(copies, 1)) > uniformity_loss(z)  # the pairwise metric has not this property


@settings(deadline=None, max_examples=25)
@given(SETS)
def test_property_3_cloned_features_are_less_uniform(sizes):
    n, m, seed = sizes
    z = F.normalize(rows(n, m, seed=seed), dim=1)
    doubled = torch.cat([z, z], dim=1)
    assert wasserstein_uniformity(doubled) > wasserstein_uniformity(z) + 1e-6
    assert uniformity_loss(doubled).item() == pytest.approx(uniformity_loss(z).item(), abs=1e-10)  # blind to it
    # Without normalising again, as in the authors' script, the square grows by exactly 1.
    released = wasserstein_uniformity(doubled, normalize=False).square()
    assert released.item() == pytest.approx(wasserstein_uniformity(z).square().item() + 1, abs=1e-8)


@settings(deadline=None, max_examples=25)
@given(SETS, st.integers(1, 6))
def test_property_4_dead_features_are_less_uniform(sizes, k):
    n, m, seed = sizes
    z = rows(n, m, seed=seed)
    padded = torch.cat([z, torch.zeros(n, k, dtype=z.dtype)], dim=1)
    assert wasserstein_uniformity(padded) > wasserstein_uniformity(z) + 1e-6
    assert uniformity_loss(padded).item() == pytest.approx(uniformity_loss(z).item(), abs=1e-10)


def test_properties_3_and_4_hold_with_equality_under_full_collapse():
    z = torch.ones(6, 3, dtype=torch.float64)
    for other in (torch.cat([z, z], dim=1), torch.cat([z, torch.zeros(6, 2, dtype=z.dtype)], dim=1)):
        assert wasserstein_uniformity(other).item() == pytest.approx(math.sqrt(2), abs=1e-12)


# the evidence that needs no training


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_only_w2_sees_dead_dimensions(seed):
    g = torch.Generator().manual_seed(seed)
    clouds = [collapsed_sphere(4000, 64, eta, g) for eta in (0.0, 0.25, 0.5, 0.75)]
    w2 = [wasserstein_uniformity(z).item() for z in clouds]
    pairwise = [uniformity_loss(z, chunk_size=500).item() for z in clouds]
    assert w2 == pytest.approx([0.06, 0.52, 0.77, 1.00], abs=0.008)
    assert pairwise == pytest.approx([-3.875, -3.834, -3.752, -3.513], abs=0.004)
    assert w2[-1] - w2[0] > 0.9
    assert pairwise[-1] - pairwise[0] < 0.4


def test_copies_of_a_half_collapsed_cloud():
    z = collapsed_sphere(1000, 32, 0.5, torch.Generator().manual_seed(0))
    w2, pairwise = wasserstein_uniformity(z).item(), uniformity_loss(z).item()
    assert wasserstein_uniformity(z.repeat(5, 1)).item() == pytest.approx(w2, abs=1e-10)
    assert uniformity_loss(z.repeat(5, 1), chunk_size=500).item() - pairwise == pytest.approx(0.026, abs=0.006)
    for changed in (torch.cat([z, z], dim=1), torch.cat([z, torch.zeros_like(z)], dim=1)):
        assert wasserstein_uniformity(changed).item() == pytest.approx(1.001, abs=0.003)
        assert uniformity_loss(changed).item() == pytest.approx(pairwise, abs=1e-10)
    assert w2 == pytest.approx(0.767, abs=0.003)


# values at the ends, and numerics


def test_range_of_unit_rows():
    assert wasserstein_uniformity(torch.ones(1, 5)).item() == pytest.approx(math.sqrt(2))
    assert wasserstein_uniformity(torch.ones(9, 5)).item() == pytest.approx(math.sqrt(2))
    cross = torch.cat([torch.eye(8, dtype=torch.float64), -torch.eye(8, dtype=torch.float64)])
    assert wasserstein_uniformity(cross).item() < 2e-6  # covariance exactly I / m


def test_is_rotation_invariant_and_ignores_norms():
    z = rows(40, 6)
    rotation = torch.linalg.qr(rows(6, 6, seed=1))[0]
    scaled = torch.rand(40, 1, dtype=z.dtype, generator=torch.Generator().manual_seed(2)) + 0.1
    value = wasserstein_uniformity(z)
    torch.testing.assert_close(wasserstein_uniformity(z @ rotation), value)
    torch.testing.assert_close(wasserstein_uniformity(z * scaled), value)


def test_bound_of_few_samples():
    for n, m in ((4, 16), (10, 24)):
        assert wasserstein_uniformity(rows(n, m)).item() ** 2 >= 2 - 2 * math.sqrt((n - 1) / m) - 1e-9


@pytest.mark.parametrize("eps", [0.0, 1e-4, 1e-12])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_gram_and_covariance_agree(shape, eps):
    z = rows(*shape)
    normal = F.normalize(z, dim=1)
    mean = normal.mean(dim=0)
    covariance = (normal - mean).T @ (normal - mean) / shape[0] + eps * torch.eye(shape[1], dtype=z.dtype)
    expected = wasserstein_to_uniform(mean, covariance)
    torch.testing.assert_close(wasserstein_uniformity(z, eps=eps), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "z",
    [
        rows(5, 12),  # fewer samples than dimensions
        rows(5, 4).repeat(3, 1),  # duplicated rows
        torch.ones(6, 4, dtype=torch.float64),  # all equal
        rows(1, 4),
        torch.cat([rows(20, 4), torch.zeros(20, 3, dtype=torch.float64)], dim=1),  # dead columns
        torch.cat([torch.eye(4, dtype=torch.float64), -torch.eye(4, dtype=torch.float64)]),  # W2 = 0, equal eigenvalues
        torch.zeros(4, 3, dtype=torch.float64),
    ],
    ids=["wide", "duplicates", "equal", "single", "dead", "uniform", "zero"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_is_finite_and_bounded(z, dtype):
    z = z.detach().to(dtype, copy=True).requires_grad_()
    value = wasserstein_uniformity(z)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(z.grad).all()
    if value > 1e-3 and z.detach().norm(dim=1).min() > 0.5:
        assert z.grad.abs().max() < 10


def test_gradient_at_the_minimum_is_zero():
    z = torch.cat([torch.eye(4, dtype=torch.float64), -torch.eye(4, dtype=torch.float64)]).requires_grad_()
    value = wasserstein_uniformity(z)
    value.backward()
    assert value.item() == pytest.approx(1e-6)
    assert z.grad.abs().max() == 0


@pytest.mark.parametrize("shape", [(12, 5), (6, 9)])
def test_gradcheck(shape):
    z = rows(*shape).requires_grad_()
    assert torch.autograd.gradcheck(wasserstein_uniformity, (z,))


def test_descent_spreads_a_collapsed_cloud():
    z = (torch.ones(64, 8) + 0.05 * rows(64, 8, dtype=torch.float32)).requires_grad_()
    before = wasserstein_uniformity(z).item()
    optimizer = torch.optim.Adam([z], lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        wasserstein_uniformity(z).backward()
        optimizer.step()
    assert before > 1.2
    assert wasserstein_uniformity(z).item() < 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    z = rows(64, 8).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = wasserstein_uniformity(z)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(wasserstein_uniformity(z.double()).item(), rel=1e-4)


def test_collapse_in_single_precision_is_not_hidden_by_rounding():
    z = torch.zeros(512, 256)
    z[:, :16] = rows(512, 16, dtype=torch.float32)
    rotated = (z.double() @ torch.linalg.qr(rows(256, 256, seed=1))[0]).float()
    exact = wasserstein_uniformity(z.double()).item()
    assert wasserstein_uniformity(rotated).item() == pytest.approx(exact, rel=1e-4)


def test_spectrum():
    z = rows(50, 4)
    z[:, 3] = 0
    spectrum = covariance_log_spectrum(z, normalize=False)
    singular = torch.linalg.svdvals(z - z.mean(dim=0)).square() / 50
    torch.testing.assert_close(spectrum[:3], singular[:3].log())
    assert spectrum[3].item() == pytest.approx(math.log(1e-20), abs=12)
    assert (spectrum.diff() <= 0).all()
    normal = covariance_log_spectrum(3 * z)
    torch.testing.assert_close(normal[:3], covariance_log_spectrum(F.normalize(z, dim=1), normalize=False)[:3])


def test_effective_rank():
    flat = torch.cat([torch.eye(6, dtype=torch.float64), -torch.eye(6, dtype=torch.float64)])
    assert effective_rank(flat).item() == pytest.approx(6)
    assert effective_rank(flat[:, :2].repeat_interleave(2, dim=1)).item() == pytest.approx(2)
    assert effective_rank(torch.ones(4, 3)).item() == pytest.approx(1)
    z = rows(30, 5) * torch.tensor([1.0, 0.5, 0.2, 0.1, 0.0], dtype=torch.float64)
    shares = torch.linalg.svdvals(z - z.mean(dim=0)).square()
    shares = shares[shares > 1e-12] / shares.sum()
    assert effective_rank(z).item() == pytest.approx((-(shares * shares.log()).sum()).exp().item())
    assert effective_rank(rows(4, 9)).item() <= 3 + 1e-9  # from the Gram matrix


# metrics


@pytest.mark.parametrize("normalize", [True, False])
def test_metric_over_batches_is_the_function(normalize):
    z = rows(101, 6, dtype=torch.float32) + 0.5
    w2, rank = WassersteinUniformity(normalize), EffectiveRank(normalize)
    for part in z.split(17):
        w2.update(part)
        rank.update(part)
    assert w2.compute().item() == pytest.approx(wasserstein_uniformity(z, normalize=normalize).item(), rel=1e-5)
    assert rank.compute().item() == pytest.approx(effective_rank(z, normalize=normalize).item(), rel=1e-5)
    w2.reset()
    w2.update(z[:50, :3])  # a new width after a reset
    assert w2.compute().item() == pytest.approx(
        wasserstein_uniformity(z[:50, :3], normalize=normalize).item(), rel=1e-5
    )


def test_metric_of_a_collapsed_encoder_is_exact():
    metric = WassersteinUniformity()
    for _ in range(10):
        metric.update(torch.ones(100, 256))
    assert metric.compute().item() == pytest.approx(math.sqrt(2), rel=1e-6)


def test_metric_state_stays_double():
    metric = WassersteinUniformity().half().to(torch.bfloat16)
    metric.update(rows(8, 3, dtype=torch.float32))
    assert metric.total.dtype == torch.float64
    assert metric.higher_is_better is False


def test_metric_forward_gives_the_batch_and_keeps_the_sum():
    z = rows(60, 4, dtype=torch.float32)
    metric = WassersteinUniformity()
    assert metric(z[:30]).item() == pytest.approx(wasserstein_uniformity(z[:30]).item(), rel=1e-5)
    metric(z[30:])
    assert metric.compute().item() == pytest.approx(wasserstein_uniformity(z).item(), rel=1e-5)


def test_pairwise_metric():
    z = rows(70, 4, dtype=torch.float32)
    metric = PairwiseUniformity(chunk_size=16)
    for part in z.split(33):
        metric.update(part)
    assert metric.compute().item() == pytest.approx(uniformity_loss(z).item(), rel=1e-5)
    metric.reset()
    metric.update(z[:1])
    assert math.isnan(metric.compute().item())


def test_losses_share_one_calling_convention():
    z1, z2 = rows(20, 4), rows(20, 4, seed=1)
    w2, pairwise = WassersteinUniformityLoss(eps=1e-4), PairwiseUniformityLoss(t=3.0)
    torch.testing.assert_close(w2(z1, z2), wasserstein_uniformity(torch.cat([z1, z2]), eps=1e-4))
    torch.testing.assert_close(w2(z1), wasserstein_uniformity(z1, eps=1e-4))
    torch.testing.assert_close(pairwise(z1, z2), (uniformity_loss(z1, 3.0) + uniformity_loss(z2, 3.0)) / 2)
    torch.testing.assert_close(pairwise(z1), uniformity_loss(z1, 3.0))
    scaled = WassersteinUniformityLoss(normalize=False)(z1)
    torch.testing.assert_close(scaled, wasserstein_uniformity(z1, normalize=False))


def test_reexports_are_the_same_objects():
    from lightning_methods import ssl
    from lightning_methods import wasserstein_uniformity as package

    for name in ("alignment_loss", "uniformity_loss", "MoCoV2", "BYOL", "BarlowTwins", "ZeroCL"):
        assert getattr(package, name) is getattr(ssl, name)
    assert alignment_loss is package.alignment_loss


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: wasserstein_uniformity(torch.zeros(4)), "z must have shape"),
        (lambda: wasserstein_uniformity(torch.zeros(4, 0)), "at least one sample"),
        (lambda: wasserstein_uniformity(torch.zeros(0, 4)), "at least one sample"),
        (lambda: wasserstein_uniformity(torch.zeros(4, 2, dtype=torch.int64)), "floating point"),
        (lambda: wasserstein_uniformity(torch.zeros(4, 2), eps=-1.0), "eps"),
        (lambda: wasserstein_to_uniform(torch.zeros(4), torch.eye(4).long()), "covariance must be a floating point"),
        (lambda: covariance_log_spectrum(torch.zeros(4)), "z must have shape"),
        (lambda: effective_rank(torch.zeros(0, 4)), "at least one sample"),
        (lambda: WassersteinUniformity().update(torch.tensor([[float("nan"), 1.0]])), "z must be finite"),
        (lambda: WassersteinUniformity().update(torch.zeros(3)), "z must have shape"),
        (lambda: WassersteinUniformity().compute(), "has seen no rows"),
        (lambda: WassersteinUniformityLoss(eps=-1.0), "eps"),
        (lambda: PairwiseUniformityLoss(t=0.0), "t must be"),
        (lambda: PairwiseUniformity(chunk_size=0), "chunk_size"),
    ],
)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.bad_input
def test_a_metric_refuses_another_width():
    metric = WassersteinUniformity()
    metric.update(torch.ones(2, 3))
    with pytest.raises(ValueError, match="width of the earlier batches, 3"):
        metric.update(torch.ones(2, 4))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_what_is_not_finite_does_not_look_uniform(bad, eps):
    z = rows(9, 4)
    z[2, 1] = bad
    z.requires_grad_()
    value = wasserstein_uniformity(z, eps=eps)
    value.backward()
    assert value.isnan()
    assert z.grad.isnan().any()
    assert not wasserstein_to_uniform(torch.full((4,), bad), torch.eye(4) / 4).isfinite()
    covariance = torch.eye(4) / 4
    covariance[0, 1] = bad
    assert wasserstein_to_uniform(torch.zeros(4), covariance).isnan()


def test_moments_in_half_precision():
    value = wasserstein_to_uniform(torch.zeros(4, dtype=torch.float16), torch.eye(4, dtype=torch.float16))
    assert value.item() == pytest.approx(1.0)
