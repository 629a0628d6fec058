from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_methods.diffoci import codec, diffoci_coefficient, foci, group_dro_update, rank_statistics, saliency_map
from tests.vectors import load_cases

CASES = load_cases("diffoci")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def data(n=60, q=3, seed=0, dtype=torch.float64):
    z = normal(n, q, seed=seed, dtype=dtype)
    return z[:, 0].sin() + 0.3 * normal(n, seed=seed + 1, dtype=dtype), z


# the vectors


def test_all_vectors_are_used():
    kinds = {"soft_official", "soft_official_conditional", "soft", "soft_topk", "soft_scaled", "codec", "foci", "ranks"}
    assert len(CASES) == 22
    assert {case.function for case in CASES} == kinds


@pytest.mark.parametrize("case", [c for c in CASES if c.function.startswith("soft")], ids=repr)
def test_soft_vectors(case):
    inputs = dict(case.inputs)
    z = inputs.pop("z").requires_grad_()
    if case.function == "soft_scaled":
        inputs["distance_scale"] = "mean"
    official = case.function.startswith("soft_official")
    t = diffoci_coefficient(z=z, **inputs)
    assert t.item() == pytest.approx(case.outputs["t"], abs=5e-4 if official else 1e-6)
    t.backward()
    assert torch.isfinite(z.grad).all()
    if "grad_z" in case.outputs:
        torch.testing.assert_close(z.grad, case.outputs["grad_z"], rtol=0, atol=5e-3 if official else 1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.function == "codec"], ids=repr)
@pytest.mark.parametrize("chunk_size", [7, 1024])
def test_codec_vectors(case, chunk_size):
    assert codec(**case.inputs, chunk_size=chunk_size).item() == pytest.approx(case.outputs["t"], abs=1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.function == "foci"], ids=repr)
@pytest.mark.parametrize("chunk_size", [33, 256])
def test_foci_vectors(case, chunk_size):
    result = foci(**{**case.inputs, "stop": bool(case.inputs["stop"])}, chunk_size=chunk_size)
    assert torch.equal(result.indices, case.outputs["indices"])
    torch.testing.assert_close(result.step_t, case.outputs["step_t"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", [c for c in CASES if c.function == "ranks"], ids=repr)
def test_rank_vectors(case):
    r, upper = rank_statistics(case.inputs["y"])
    assert torch.equal(r, case.outputs["r"])
    assert torch.equal(upper, case.outputs["l"])


# plain forms of the same mathematics


def loop_ranks(y):
    y = y.tolist()
    return [sum(b <= a for b in y) for a in y], [sum(b >= a for b in y) for a in y]


def loop_nearest(z):
    """For every sample all nearest others, squared distances by plain differences."""
    rows = z.reshape(len(z), -1).tolist()
    result = []
    for i, a in enumerate(rows):
        d = [sum((u - v) ** 2 for u, v in zip(a, b, strict=True)) if i != j else math.inf for j, b in enumerate(rows)]
        result.append([j for j, value in enumerate(d) if value == min(d)])
    return result


def loop_codec(y, z, x=None, pick=None):
    r, upper = loop_ranks(y)
    n = len(r)

    def minimum(features):
        chosen = [pick(c) if pick else c for c in loop_nearest(features)]
        return [sum(min(r[i], r[j]) for j in c) / len(c) for i, c in enumerate(chosen)]

    if x is None:
        m = minimum(z)
        top = sum(n * m[i] - upper[i] ** 2 for i in range(n))
        bottom = sum(value * (n - value) for value in upper)
    else:
        m, without = minimum(torch.cat([x.reshape(n, -1), z.reshape(n, -1)], 1)), minimum(x)
        top = sum(a - b for a, b in zip(m, without, strict=True))
        bottom = sum(a - b for a, b in zip(r, without, strict=True))
    return top / bottom if bottom else 1.0


@settings(deadline=None, max_examples=30)
@given(
    st.integers(2, 25), st.integers(1, 3), st.integers(0, 10**6), st.booleans(), st.sampled_from(["average", "first"])
)
def test_codec_against_loops_on_tied_data(n, q, seed, conditional, mode):
    g = torch.Generator().manual_seed(seed)
    y, z, x = (torch.randint(0, 4, shape, generator=g).double() for shape in [(n,), (n, q), (n, 2)])
    given_x = x if conditional else None
    expected = loop_codec(y, z, given_x, pick=(lambda c: c[:1]) if mode == "first" else None)
    assert codec(y, z, given_x, neighbor_ties=mode, chunk_size=4).item() == pytest.approx(expected, abs=1e-12)


def test_random_ties_have_the_average_as_their_expectation():
    g = torch.Generator().manual_seed(0)
    y, z = torch.rand(30, generator=g).double(), torch.randint(0, 3, (30, 1), generator=g).double()
    draws = torch.stack([codec(y, z, neighbor_ties="random", generator=g) for _ in range(200)])
    assert draws.std() > 0.05
    assert draws.mean().item() == pytest.approx(codec(y, z).item(), abs=4 * draws.std().item() / 200**0.5)


def test_random_ties_repeat_with_the_generator_and_do_not_depend_on_chunks():
    y, z = normal(50), torch.randint(0, 2, (50,), generator=torch.Generator().manual_seed(0)).double()
    first, second = (
        codec(y, z, neighbor_ties="random", generator=torch.Generator().manual_seed(3), chunk_size=c) for c in (7, 50)
    )
    assert first == second


def test_random_ties_use_one_draw_for_numerator_and_denominator():
    """With z a copy of x, M and N are drawn from the same sets; T given x is (A - B) / (R - B) with one B."""
    g = torch.Generator().manual_seed(1)
    y, x = torch.rand(40, generator=g).double(), torch.randint(0, 3, (40, 1), generator=g).double()
    z = torch.rand(40, 1, generator=g).double()
    r = rank_statistics(y)[0]
    value = codec(y, z, x, neighbor_ties="random", generator=torch.Generator().manual_seed(5))
    # replay: first the draw for (x, z), unique neighbours whatever it is, then the one for x
    replay = torch.Generator().manual_seed(5)
    torch.rand(40, generator=replay)
    u = torch.rand(40, generator=replay)
    without = [c[int(u[i] * len(c))] for i, c in enumerate(loop_nearest(x))]
    with_z = [c[0] for c in loop_nearest(torch.cat([x, z], 1))]
    a, b = torch.minimum(r, r[with_z]), torch.minimum(r, r[without])
    assert value.item() == pytest.approx(((a - b).sum() / (r - b).sum()).item(), abs=1e-12)


def test_codec_of_float32_data_sees_exact_ties_at_large_norms():
    """Duplicates 60 x 64 with norms of 24: the expansion into a matrix product would separate them."""
    z = 3 * normal(30, 64, dtype=torch.float32)
    y = normal(60, dtype=torch.float32)
    z = torch.cat([z, z])
    pairs = torch.minimum(rank_statistics(y)[0], rank_statistics(y)[0].roll(30))
    _, upper = rank_statistics(y)
    expected = (60 * pairs - upper.square()).sum() / (upper * (60 - upper)).sum()
    assert codec(y, z).item() == pytest.approx(expected.item(), abs=1e-6)


def test_neighbors_from_elsewhere():
    y, z = data()
    nearest = torch.tensor([c[0] for c in loop_nearest(z)])
    own = torch.arange(60)
    expected = codec(y, z)
    assert codec(y, z, neighbors=nearest) == expected
    # as an index returns them: the sample itself first
    assert codec(y, z, neighbors=torch.stack([own, nearest, nearest.roll(1)], 1)) == expected
    assert codec(y, z, neighbors=nearest.roll(1).where(nearest.roll(1) != own, (own + 1) % 60)) != expected
    x = normal(60, 1, seed=5)
    both = torch.tensor([c[0] for c in loop_nearest(torch.cat([x, z], 1))])
    assert codec(y, z, x, neighbors=both) == codec(y, z, x)


def loop_soft(y, z, x=None, beta=0.2):
    """Rows one by one, no softmax function."""
    r, upper = rank_statistics(y)
    n = len(y)

    def soft(features):
        rows = []
        for i in range(n):
            d = (features[i] - features).square().sum(-1).sqrt()
            d = torch.cat([d[:i], d[i + 1 :]])
            w = torch.exp(-(d - d.min()) / beta)
            rows.append((w / w.sum()) @ torch.cat([r[:i], r[i + 1 :]]))
        return torch.minimum(r, torch.stack(rows))

    if x is None:
        return (n * soft(z) - upper**2).sum() / (upper * (n - upper)).sum()
    without = soft(x)
    return (soft(torch.cat([x, z], 1)) - without).sum() / (r - without).sum()


@pytest.mark.parametrize("beta", [0.01, 0.2, 1.0])
@pytest.mark.parametrize("conditional", [False, True])
def test_soft_against_a_loop(beta, conditional):
    y, z = data(n=40)
    x = normal(40, 2, seed=9) if conditional else None
    assert diffoci_coefficient(y, z, x, beta=beta).item() == pytest.approx(loop_soft(y, z, x, beta).item(), abs=1e-10)


# what the coefficient is


def test_small_beta_gives_the_exact_coefficient():
    for conditional in (False, True):
        y, z = data(n=200)
        x = normal(200, 2, seed=7) if conditional else None
        exact = codec(y, z, x)
        gaps = [abs(diffoci_coefficient(y, z, x, beta=b) - exact).item() for b in (0.3, 0.03, 1e-5)]
        assert gaps[0] > gaps[1] > gaps[2]
        assert gaps[2] < 1e-3


def test_independence_is_near_zero_and_a_function_near_one():
    z = normal(1000, 2)
    assert abs(codec(normal(1000, seed=4), z).item()) < 0.1
    assert codec(z[:, 0].sin() * z[:, 1], z).item() > 0.85
    assert codec(z[:, 0] + z[:, 1], z[:, 0], z[:, 1]).item() > 0.85
    assert abs(codec(z[:, 1], normal(1000, seed=4), z[:, 0]).item()) < 0.1


@given(st.sampled_from([torch.exp, torch.tanh, lambda t: t**3, lambda t: 5 * t - 2]))
@settings(deadline=None)
def test_invariant_to_increasing_maps_of_y(function):
    y, z = data()
    assert codec(function(y), z) == codec(y, z)
    assert diffoci_coefficient(function(y), z) == diffoci_coefficient(y, z)


def test_invariant_to_rotation_shift_and_order_of_samples():
    y, z = data()
    rotation = torch.linalg.qr(normal(3, 3, seed=3)).Q
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    value = diffoci_coefficient(y, z).item()
    assert diffoci_coefficient(y, z @ rotation + 7).item() == pytest.approx(value, abs=1e-9)
    assert diffoci_coefficient(y[order], z[order]).item() == pytest.approx(value, abs=1e-9)
    scaled = diffoci_coefficient(y, z, distance_scale="mean").item()
    assert diffoci_coefficient(y, 1000 * z, distance_scale="mean").item() == pytest.approx(scaled, abs=1e-9)


def test_floor_at_large_beta():
    """1/4 for a continuous y, 0 for a binary one, balanced or not; ordinal ranks give 1/4 again."""
    z = normal(1000, 2)
    assert diffoci_coefficient(normal(1000, seed=2), z, beta=1e6).item() == pytest.approx(0.25, abs=2e-3)
    for share in (0.5, 0.9):
        g = (torch.arange(1000) < 1000 * share).long()
        assert diffoci_coefficient(g, z, beta=1e6).item() == pytest.approx(0, abs=2e-3)
        assert diffoci_coefficient(g, z, beta=1e6, ties="ordinal").item() == pytest.approx(0.25, abs=2e-3)
    assert diffoci_coefficient(normal(1000, seed=2), torch.zeros(1000, 2)).item() == pytest.approx(0.25, abs=2e-3)


def test_binary_attribute_needs_max_ranks():
    z = normal(200)
    g = (z > 0).long()
    assert codec(g, z).item() == pytest.approx(1, abs=0.06)
    assert diffoci_coefficient(g, z, beta=1e-4).item() == pytest.approx(codec(g, z).item(), abs=0.02)
    assert 0.45 < diffoci_coefficient(g, z, beta=1e-4, ties="ordinal").item() < 0.7


def test_ordinal_and_max_agree_without_ties():
    y, z = data()
    assert diffoci_coefficient(y, z, ties="ordinal") == diffoci_coefficient(y, z)
    r, upper = rank_statistics(y, "ordinal")
    assert torch.equal(r + upper, torch.full((60,), 61.0, dtype=torch.float64))


def test_nominal_attribute_is_the_mean_over_one_hot_columns():
    _, z = data()
    label = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    onehot = nn.functional.one_hot(label, 4)  # the last class is missing: it counts 0
    columns = [diffoci_coefficient(onehot[:, c], z).item() for c in range(4)]
    assert columns[3] == 0
    assert diffoci_coefficient(onehot, z).item() == pytest.approx(sum(columns) / 4, abs=1e-12)
    exact = [codec(onehot[:, c], z).item() for c in range(3)]
    assert codec(onehot, z).item() == pytest.approx(sum(exact) / 3, abs=1e-12)
    # not the same as an order between the classes
    assert diffoci_coefficient(onehot, z).item() != pytest.approx(diffoci_coefficient(label, z).item(), abs=1e-3)


# degenerate input


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("y", [torch.ones(30), torch.zeros(30, 2), torch.zeros(30, dtype=torch.bool)], ids=str)
def test_constant_response_is_zero_without_gradient_and_exactly_one(y, conditional, dtype):
    z = normal(30, 3, dtype=dtype).requires_grad_()
    x = normal(30, 2, seed=1, dtype=dtype) if conditional else None
    t = diffoci_coefficient(y, z, x)
    t.backward()
    assert t.item() == 0
    assert z.grad.abs().max() == 0
    assert codec(y, z.detach(), x).item() == 1


def test_response_that_is_a_function_of_x_in_the_sample():
    x = torch.tensor([0.0, 0.1, 10.0, 10.1, 20.0, 20.1])
    y = torch.tensor([1, 1, 2, 2, 3, 3])
    z = normal(6, 2, dtype=torch.float32).requires_grad_()
    assert codec(y, z.detach(), x).item() == 1
    t = diffoci_coefficient(y, z, x, beta=0.05)
    t.backward()
    assert t.item() == 0
    assert z.grad.abs().max() == 0


def test_two_samples():
    assert diffoci_coefficient(torch.tensor([0, 1]), normal(2, 3)).item() == pytest.approx(-1)
    assert codec(torch.tensor([0, 1]), normal(2, 3)).item() == pytest.approx(-1)


def test_duplicates_and_far_points_have_finite_gradient():
    z = torch.cat([torch.zeros(5, 2), 1e4 * normal(5, 2, dtype=torch.float32)]).requires_grad_()
    y = torch.arange(10) % 3
    for kwargs in ({}, {"beta": 1e-3}, {"num_neighbors": 3}, {"distance_scale": "mean"}, {"chunk_size": 3}):
        t = diffoci_coefficient(y, z, **kwargs)
        (gradient,) = torch.autograd.grad(t, z)
        assert torch.isfinite(t)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16])
def test_dtypes_of_y(dtype):
    z = normal(300, 2, dtype=torch.float32)
    y = (z[:, 0] > 0).to(dtype)
    assert diffoci_coefficient(y, z).item() == diffoci_coefficient(y.double(), z).item()
    assert codec(y, z).item() == codec(y.double(), z).item()


def test_half_precision_features_are_computed_in_float32():
    y, z = data(n=400, dtype=torch.float32)  # ranks above 256 are not exact in bfloat16
    half = z.bfloat16().requires_grad_()
    t = diffoci_coefficient(y, half)
    t.backward()
    assert t.dtype == torch.float32
    assert half.grad.dtype == torch.bfloat16
    assert t.item() == diffoci_coefficient(y, z.bfloat16().float()).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert diffoci_coefficient(y, z).item() == diffoci_coefficient(y, z).item()
        inside = diffoci_coefficient(y, z)
    assert inside.item() == diffoci_coefficient(y, z).item()
    assert codec(y, z.bfloat16()).dtype == torch.float32


def test_vectors_count_as_one_column():
    y, z = data()
    assert diffoci_coefficient(y, z[:, 0], z[:, 1]) == diffoci_coefficient(y, z[:, :1], z[:, 1:2])
    assert codec(y, z[:, 0], z[:, 1]) == codec(y, z[:, :1], z[:, 1:2])


# gradients and memory options


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"beta": 0.04}, {"num_neighbors": 4}, {"chunk_size": 5}, {"num_neighbors": 4, "chunk_size": 3}],
    ids=str,
)
@pytest.mark.parametrize("conditional", [False, True])
def test_gradcheck(kwargs, conditional):
    y, z = data(n=14, q=2)
    kwargs = {"beta": 0.5, **kwargs}
    if conditional:
        x = normal(14, 1, seed=8).requires_grad_()
        assert torch.autograd.gradcheck(lambda a, b: diffoci_coefficient(y, a, b, **kwargs), (z.requires_grad_(), x))
    else:
        assert torch.autograd.gradcheck(lambda a: diffoci_coefficient(y, a, **kwargs), (z.requires_grad_(),))


def test_gradient_of_the_scaled_distances_treats_the_mean_as_a_constant():
    y, z = data(n=20)
    z.requires_grad_()
    mean = torch.pdist(z.detach()).mean().item()
    (scaled,) = torch.autograd.grad(diffoci_coefficient(y, z, beta=0.1, distance_scale="mean"), z)
    (plain,) = torch.autograd.grad(diffoci_coefficient(y, z, beta=0.1 * mean), z)
    torch.testing.assert_close(scaled, plain)


def test_gradient_comes_from_rows_below_their_rank_only():
    """Two clusters with the attribute constant in each: every soft rank equals the rank, nothing to gain."""
    z = torch.cat([normal(10, 2) * 0.01, 1e5 + normal(10, 2, seed=1) * 0.01]).requires_grad_()
    y = (torch.arange(20) >= 10).long()
    t = diffoci_coefficient(y, z)
    (gradient,) = torch.autograd.grad(t, z)
    assert t.item() == pytest.approx(1)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize(
    "kwargs", [{"num_neighbors": 59}, {"chunk_size": 7}, {"num_neighbors": 59, "chunk_size": 7}], ids=str
)
@pytest.mark.parametrize("scale", ["none", "mean"])
@pytest.mark.parametrize("beta", [0.2, 0.01])
def test_memory_options_change_nothing(kwargs, scale, beta):
    y, z = data()
    x = normal(60, 1, seed=8)
    for given_x in (None, x):
        a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
        whole = diffoci_coefficient(y, a, given_x, beta=beta, distance_scale=scale)
        other = diffoci_coefficient(y, b, given_x, beta=beta, distance_scale=scale, **kwargs)
        torch.testing.assert_close(other, whole, rtol=0, atol=1e-9)
        torch.testing.assert_close(
            *(torch.autograd.grad(t, v)[0] for t, v in ((other, b), (whole, a))), rtol=0, atol=1e-8
        )


def test_maximising_it_finds_the_variable():
    z = normal(200, 3)
    y = z[:, 0].sin() + 0.05 * normal(200, seed=1)
    scale = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([scale], lr=0.1, weight_decay=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        (-diffoci_coefficient(y, scale * z)).backward()
        optimizer.step()
    assert (scale.abs() > 0.1).tolist() == [True, False, False]


def test_compiles_without_graph_breaks():
    """In a process of its own: the run-time shape checks of this one are not made for the compiler."""
    program = """
import torch
from lightning_methods.diffoci import diffoci_coefficient
z = torch.randn(30, 3)
y = z[:, 0]
whole = torch.compile(diffoci_coefficient, backend="eager", fullgraph=True)
for kwargs in ({"distance_scale": "mean"}, {"num_neighbors": 5}):
    torch.testing.assert_close(whole(y, z, z[:, 1], **kwargs), diffoci_coefficient(y, z, z[:, 1], **kwargs))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# forward selection


def loop_foci(y, x, scale=True):
    columns = (x / x.std(0)) if scale else x
    chosen, values = [], []
    while len(chosen) < x.shape[1]:
        rest = [j for j in range(x.shape[1]) if j not in chosen]
        t = [loop_codec(y, columns[:, [*chosen, j]]) for j in rest]
        if max(t) <= (values[-1] if values else 0):
            break
        chosen.append(rest[t.index(max(t))])
        values.append(max(t))
    return chosen, values


@pytest.mark.parametrize("seed", range(3))
def test_foci_against_a_loop(seed):
    x = normal(40, 4, seed=seed)
    y = x[:, 1] * x[:, 2]
    result = foci(y, x, chunk_size=16)
    chosen, values = loop_foci(y, x)
    assert result.indices.tolist() == chosen
    assert result.step_t.tolist() == pytest.approx(values)


def test_foci_steps_are_the_coefficient_and_equal_the_conditional_rule():
    x = normal(120, 5)
    y = x[:, 0].sin() + x[:, 3] ** 2
    result = foci(y, x, standardize="none")
    for k in range(1, len(result.indices) + 1):
        assert result.step_t[k - 1].item() == pytest.approx(codec(y, x[:, result.indices[:k]]).item(), abs=1e-12)
    rest = [j for j in range(5) if j not in result.indices.tolist()]
    assert all(codec(y, x[:, j], x[:, result.indices]).item() <= 1e-12 for j in rest)


def test_foci_keeps_exact_ties_of_integer_columns():
    """Equal gaps of a standardised integer column are equal; dividing first would break the ties by rounding."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 6, (60, 3), generator=g)
    y = torch.rand(60, generator=g)
    result = foci(y, x, stop=False)
    single = [loop_codec(y, x[:, [j]].double()) for j in range(3)]
    assert result.indices[0].item() == single.index(max(single))
    assert result.step_t[0].item() == pytest.approx(max(single), abs=1e-6)


def test_foci_standardisation():
    x = normal(200, 3) * torch.tensor([1.0, 1e-3, 1e3], dtype=torch.float64)
    y = x[:, 0] + 1e3 * x[:, 1]
    assert sorted(foci(y, x, max_features=2).indices.tolist()) == [0, 1]
    assert sorted(foci(y, x, max_features=2, standardize="bounded").indices.tolist()) == [0, 1]
    assert foci(y, x, stop=False).indices.shape == (3,)


def test_foci_may_select_nothing():
    g = torch.Generator().manual_seed(3)
    for _ in range(20):
        result = foci(torch.rand(30, generator=g), torch.rand(30, 1, generator=g))
        if len(result.indices) == 0:
            assert result.step_t.shape == (0,)
            return
    pytest.fail("independent data always selected something")


# group DRO and saliency


def test_group_dro_by_hand():
    losses = torch.tensor([1.0, 3.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    groups = torch.tensor([0, 0, 2, 2])
    q = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    loss, new_q = group_dro_update(q, losses, groups, eta=0.1)
    raw = [math.exp(0.2), 1.0, math.exp(0.35)]
    expected = [value / sum(raw) for value in raw]
    assert new_q.tolist() == pytest.approx(expected)
    assert not new_q.requires_grad
    assert loss.item() == pytest.approx(expected[0] * 2 + expected[2] * 3.5)
    loss.backward()
    assert losses.grad.tolist() == pytest.approx([expected[0] / 2] * 2 + [expected[2] / 2] * 2)
    assert torch.equal(q, torch.ones(3, dtype=torch.float64))  # not in place


def test_group_dro_concentrates_on_the_worst_group_and_does_not_overflow():
    q = torch.ones(3)
    for _ in range(200):
        _, q = group_dro_update(q, torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0, 1, 2]), 0.1)
    assert q[1] > 0.99
    loss, q = group_dro_update(torch.ones(2), torch.tensor([1e5, 1.0]), torch.tensor([0, 1]), 1.0)
    assert q.tolist() == [1, 0]
    assert loss.item() == 1e5


class Pixel(nn.Module):
    """Two classes; the first reads one pixel of the second channel, the other nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(-3.0))
        self.drop = nn.Dropout(0.9)

    def forward(self, x):
        score = self.drop(self.weight * x[:, 1, 2, 3] + 10 + x[:, 0, 0, 0])
        return torch.stack([score, torch.zeros_like(score)], dim=1)


def test_saliency_finds_the_pixel():
    model = Pixel().train()
    model.drop.eval()
    saliency = saliency_map(model, torch.rand(4, 3, 5, 6, generator=torch.Generator().manual_seed(0)))
    expected = torch.zeros(4, 5, 6)
    expected[:, 2, 3] = 1
    expected[:, 0, 0] = 1 / 3
    torch.testing.assert_close(saliency, expected)
    assert model.weight.grad is None
    assert model.training
    assert not model.drop.training  # every mode as it was


def test_saliency_of_a_constant_map_is_zero():
    saliency = saliency_map(Pixel(), torch.rand(4, 3, 5, 6), target=torch.ones(4, dtype=torch.int64))
    assert torch.equal(saliency, torch.zeros(4, 5, 6))
    with torch.no_grad():
        assert saliency_map(Pixel(), torch.rand(2, 3, 5, 6)).amax() == 1


# bad input

Y, Z = torch.arange(6.0), torch.arange(12.0).view(6, 2)
NAN = torch.tensor([0.0, torch.nan, 1, 2, 3, 4])
INF = torch.tensor([0.0, torch.inf, 1, 2, 3, 4])


@pytest.mark.bad_input
@pytest.mark.parametrize("function", [codec, diffoci_coefficient])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((Y[:5], Z), r"same number of rows, got y \[5\], z \[6, 2\]"),
        ((Y, Z, Z[:4]), r"x \[4, 2\]"),
        ((Y[:1], Z[:1]), "at least 2 samples"),
        ((Y.view(1, 2, 3), Z), r"y must have shape \[n\] or \[n, c\], got \[1, 2, 3\]"),
        ((torch.tensor(1.0), Z), "y must have shape"),
        ((Y, Z.view(6, 2, 1)), r"z must have shape \[n\] or \[n, features\], got \[6, 2, 1\]"),
        ((Y, Z, Z.view(6, 2, 1)), "x must have shape"),
        ((NAN, Z), "y must be finite, but 1 of its 6 entries"),
        ((Y, INF), "z must be finite"),
        ((Y, Z, NAN), "x must be finite"),
    ],
)
def test_bad_data(function, args, message):
    with pytest.raises(ValueError, match=message):
        function(*args)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: diffoci_coefficient(Y, Z, beta=0.0), "beta must be a finite number in"),
        (lambda: diffoci_coefficient(Y, Z, beta=-1.0), "beta"),
        (lambda: diffoci_coefficient(Y, Z, beta=math.inf), "beta"),
        (lambda: diffoci_coefficient(Y, Z, beta=math.nan), "beta"),
        (lambda: diffoci_coefficient(Y, Z, ties="mx"), "ties must be one of 'max', 'ordinal'.*Did you mean 'max'"),
        (lambda: diffoci_coefficient(Y, Z, distance_scale="men"), "distance_scale must be one of"),
        (lambda: diffoci_coefficient(Y, Z, num_neighbors=0), r"num_neighbors must be .*\[1, 5\]"),
        (lambda: diffoci_coefficient(Y, Z, num_neighbors=6), "num_neighbors"),
        (lambda: diffoci_coefficient(Y, Z, chunk_size=0), "chunk_size"),
        (lambda: diffoci_coefficient(Y, Z.where(Z < 9, torch.nan).requires_grad_()), "z must be finite"),
        (lambda: codec(Y, Z, neighbor_ties="avrage"), "neighbor_ties must be one of"),
        (lambda: codec(Y, Z, chunk_size=0), "chunk_size"),
        (lambda: codec(Y, Z, neighbors=torch.zeros(5).long()), r"neighbors must be integers of shape \[n=6\]"),
        (lambda: codec(Y, Z, neighbors=torch.zeros(6)), "neighbors must be integers"),
        (lambda: codec(Y, Z, neighbors=torch.full((6,), 6)), r"neighbors must be in 0\.\.5, got 6"),
        (lambda: codec(Y, Z, neighbors=torch.arange(6)), "sample 0 has no neighbour but itself"),
        (lambda: rank_statistics(Y, "min"), "ties must be one of"),
        (lambda: rank_statistics(Y.view(1, 2, 3)), "y must have shape"),
        (lambda: foci(Y, Z.where(Z % 2 == 0, 7.0)), "column 1 is constant"),
        (lambda: foci(Y, Z.where(Z % 2 == 0, 7.0), standardize="bounded"), "column 1 is constant"),
        (lambda: foci(Y, Z, standardize="std"), "standardize must be one of"),
        (lambda: foci(Y, Z, max_features=3), r"max_features must be .*\[1, 2\]"),
        (lambda: foci(Y, Y), "x must have shape"),
        (lambda: foci(Z, Z), "y must have shape"),
        (lambda: foci(NAN, Z), "y must be finite"),
        (lambda: foci(Y[:4], Z), "same number of rows"),
        (lambda: group_dro_update(torch.ones(2), Y, torch.zeros(5).long(), 0.1), "groups must have shape"),
        (lambda: group_dro_update(torch.ones(2), Y, torch.full((6,), 2), 0.1), r"groups must be in 0\.\.1, got 2"),
        (lambda: group_dro_update(torch.ones(2), Y, torch.zeros(6).long(), -0.1), "eta"),
        (lambda: saliency_map(Pixel(), torch.zeros(3, 5, 6)), "images must have shape"),
        (lambda: saliency_map(Pixel(), torch.zeros(2, 3, 5, 6), torch.tensor([0, 2])), r"target must be in 0\.\.1"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.bad_input
def test_constant_columns_may_stay_unstandardised():
    assert foci(Y, Z.where(Z % 2 == 0, 7.0), standardize="none").indices[0] == 0
