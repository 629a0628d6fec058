from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from lightning_methods.ssl import losses
from lightning_methods.ssl.losses import (
    alignment_loss,
    barlow_twins_loss,
    byol_loss,
    info_nce_queue_loss,
    nt_xent_loss,
    uniformity_loss,
    zero_cl_loss,
)
from tests.vectors import load_cases

OURS = {name: getattr(losses, name) for name in losses.__all__}
CASES = [case for case in load_cases("wasserstein_uniformity") if case.function in OURS]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_vectors(case):
    value = OURS[case.function](**case.inputs)
    assert value.item() == pytest.approx(case.outputs["value"], rel=1e-6)


def test_there_are_vectors_for_five_losses():
    assert {case.function for case in CASES} == set(OURS) - {"nt_xent_loss", "zero_cl_loss"}


def rows(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# against the definition, one pair at a time


def test_nt_xent_is_the_loop():
    z1, z2 = rows(5, 4), rows(5, 4, seed=1)
    z = F.normalize(torch.cat([z1, z2]), dim=1)
    terms = []
    for i in range(10):
        partner = (i + 5) % 10
        total = sum(math.exp((z[i] @ z[j]).item() / 0.3) for j in range(10) if j != i)
        terms.append(-math.log(math.exp((z[i] @ z[partner]).item() / 0.3) / total))
    assert nt_xent_loss(z1, z2, 0.3).item() == pytest.approx(sum(terms) / 10, rel=1e-10)


def test_nt_xent_ignores_norms_and_the_order_of_views():
    z1, z2 = rows(6, 4), rows(6, 4, seed=1)
    torch.testing.assert_close(nt_xent_loss(z1, z2), nt_xent_loss(3 * z2, 0.1 * z1))


def test_zero_cl_is_its_definition_by_eigenvectors():
    z1, z2, eps = rows(9, 5), rows(9, 5, seed=1), 1e-4

    def inverse_root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.rsqrt()) @ vectors.T

    def feature(z):
        centred = z - z.mean(dim=0)
        return centred @ inverse_root(centred.T @ centred / 9 + eps * torch.eye(5, dtype=z.dtype))

    def instance(z):
        centred = z - z.mean(dim=1, keepdim=True)
        return inverse_root(centred @ centred.T / 5 + eps * torch.eye(9, dtype=z.dtype)) @ centred

    features = -(feature(z1).T @ feature(z2) / 9).diagonal().mean()
    instances = -(instance(z1) @ instance(z2).T / 5).diagonal().mean()
    torch.testing.assert_close(zero_cl_loss(z1, z2), features + instances)


def test_zero_cl_of_equal_views_is_near_its_lower_end():
    z = rows(32, 8)
    # Whitened columns have unit variance; of 32 whitened rows 7 dimensions (8 minus the mean) can be.
    assert zero_cl_loss(z, z, eps=1e-8).item() == pytest.approx(-1 - 7 / 32, abs=1e-4)


@pytest.mark.parametrize("views", [1, 2])
def test_zero_cl_gradient_is_finite_where_eigenvalues_coincide(views):
    z = torch.eye(4, dtype=torch.float64).repeat(2, 1).requires_grad_()  # equal eigenvalues in both covariances
    other = z if views == 1 else rows(8, 4)
    zero_cl_loss(z, other).backward()
    assert torch.isfinite(z.grad).all()


def test_uniformity_in_chunks_and_shifted():
    z = rows(50, 6)
    torch.testing.assert_close(uniformity_loss(z, chunk_size=7), uniformity_loss(z))
    torch.testing.assert_close(uniformity_loss(z + 100, normalize=False), uniformity_loss(z, normalize=False))
    expected = (-2 * torch.pdist(F.normalize(z, dim=1)).square()).exp().mean().log()
    torch.testing.assert_close(uniformity_loss(z), expected)


def test_uniformity_in_single_precision_of_near_rows():
    z = F.normalize(1 + 1e-3 * rows(40, 16, dtype=torch.float32), dim=1)
    assert uniformity_loss(z).item() == pytest.approx(uniformity_loss(z.double()).item(), abs=1e-6)


def test_alignment_gradient_at_equal_views():
    x = rows(3, 4).requires_grad_()
    for alpha in (1.0, 1.5, 2.0):
        loss = alignment_loss(x, x.detach().clone(), alpha=alpha)
        (gradient,) = torch.autograd.grad(loss, x)
        assert loss.item() == 0
        assert gradient.abs().max() == 0


def test_byol_range_and_who_gets_gradient():
    z = rows(4, 3)
    assert byol_loss(z, z, z, z).item() == pytest.approx(0, abs=1e-12)
    assert byol_loss(z, z, -z, -z).item() == pytest.approx(8)
    p1, p2, z1, z2 = (rows(4, 3, seed=s).requires_grad_() for s in range(4))
    byol_loss(p1, p2, z1, z2).backward()
    assert p1.grad is not None
    assert p2.grad is not None
    assert z1.grad is None
    assert z2.grad is None


def test_byol_pairs_the_views_crosswise():
    p, z1, z2 = rows(4, 3), rows(4, 3, seed=1), rows(4, 3, seed=2)
    assert byol_loss(z2, z1, z1, z2).item() == pytest.approx(0, abs=1e-12)
    assert byol_loss(z1, z2, z1, z2).item() > 0.1
    assert byol_loss(p, p, z1, z2) == byol_loss(p, p, z2, z1)


def test_info_nce_does_not_use_the_other_keys_of_the_batch():
    q, k, queue = (F.normalize(rows(n, 5, seed=n), dim=1) for n in (4, 4, 9))
    q = q[torch.tensor([0, 1, 2, 3])]
    alone = torch.stack([info_nce_queue_loss(q[i : i + 1], k[i : i + 1], queue) for i in range(4)]).mean()
    torch.testing.assert_close(info_nce_queue_loss(q, k, queue), alone)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (nt_xent_loss, 2),
        (barlow_twins_loss, 2),
        (zero_cl_loss, 2),
        (alignment_loss, 2),
        (lambda x, y: alignment_loss(x, y, alpha=1.0), 2),
        (uniformity_loss, 1),
        (lambda q, k, n: info_nce_queue_loss(q, k, n), 3),
    ],
)
def test_gradcheck(function, inputs):
    arguments = tuple(rows(6, 4, seed=s).requires_grad_() for s in range(inputs))
    assert torch.autograd.gradcheck(function, arguments)


@pytest.mark.parametrize("function", [nt_xent_loss, barlow_twins_loss, zero_cl_loss, alignment_loss])
def test_half_precision_is_computed_in_single(function):
    z1, z2 = rows(32, 8), rows(32, 8, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = function(z1.float(), z2.float())
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(function(z1, z2).item(), rel=1e-4)
    assert function(z1.bfloat16(), z2.bfloat16()).dtype == torch.float32


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: uniformity_loss(torch.zeros(1, 3)), "at least 2 samples"),
        (lambda: uniformity_loss(torch.zeros(3)), "z must have shape"),
        (lambda: uniformity_loss(torch.zeros(3, 2, dtype=torch.int64)), "floating point"),
        (lambda: uniformity_loss(torch.zeros(3, 2), t=0.0), "t must be"),
        (lambda: uniformity_loss(torch.zeros(3, 2), chunk_size=0), "chunk_size must be"),
        (lambda: alignment_loss(torch.zeros(3, 2), torch.zeros(3, 4)), "y must have shape"),
        (lambda: alignment_loss(torch.zeros(3, 2), torch.zeros(2, 2)), "y must have shape"),
        (lambda: alignment_loss(torch.zeros(0, 2), torch.zeros(0, 2)), "at least one row"),
        (lambda: info_nce_queue_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(4, 2)), "queue must have shape"),
        (
            lambda: info_nce_queue_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(4, 3), temperature=0.0),
            "temperature",
        ),
        (lambda: nt_xent_loss(torch.zeros(2, 3), torch.zeros(2, 3), temperature=-1.0), "temperature"),
        (lambda: barlow_twins_loss(torch.zeros(1, 3), torch.zeros(1, 3)), "at least 2 rows"),
        (lambda: barlow_twins_loss(torch.zeros(4, 3), torch.zeros(4, 3), lambd=-1.0), "lambd"),
        (lambda: zero_cl_loss(torch.zeros(4, 3), torch.zeros(4, 3), eps=0.0), "eps"),
        (lambda: byol_loss(*[torch.zeros(4, 3)] * 3, torch.zeros(4, 2)), "z2 must have shape"),
    ],
)
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()
