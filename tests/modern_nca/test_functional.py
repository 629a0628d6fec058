from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_methods.modern_nca import (
    neighbor_weights,
    plr,
    plr_lite,
    rows_outside,
    sample_candidates,
    soft_nearest_neighbor_log_probs,
    soft_nearest_neighbor_regression,
)
from tests.vectors import load_cases


def tolerance(x: Tensor) -> float:
    return 1e-9 if x.dtype == torch.float64 else 2e-4


CLASS_CASES = load_cases("modern_nca", "soft_nn_class")
REGRESSION_CASES = load_cases("modern_nca", "soft_nn_reg") + load_cases("modern_nca", "soft_nn_reg_self")


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 1000])
@pytest.mark.parametrize("case", CLASS_CASES, ids=repr)
def test_log_probs_vectors(case, chunk_size):
    expected = case.outputs["log_prob"]
    result = soft_nearest_neighbor_log_probs(**case.inputs, chunk_size=chunk_size)
    torch.testing.assert_close(result, expected, rtol=0, atol=tolerance(expected))


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 1000])
@pytest.mark.parametrize("case", REGRESSION_CASES, ids=repr)
def test_regression_vectors(case, chunk_size):
    expected = case.outputs["pred"]
    exclude_self = case.function == "soft_nn_reg_self"
    result = soft_nearest_neighbor_regression(**case.inputs, exclude_self=exclude_self, chunk_size=chunk_size)
    torch.testing.assert_close(result, expected, rtol=0, atol=tolerance(expected))


@pytest.mark.parametrize("case", load_cases("modern_nca", "plr_lite"), ids=repr)
def test_plr_lite_vectors(case):
    torch.testing.assert_close(plr_lite(**case.inputs), case.outputs["out"], rtol=0, atol=2e-4)


def test_every_kind_of_vector_is_used():
    kinds = [case.function for case in load_cases("modern_nca")]
    assert len(kinds) == 14
    assert set(kinds) == {"eval", "train", "soft_nn_class", "soft_nn_reg", "soft_nn_reg_self", "plr_lite"}
    assert len(CLASS_CASES) == 2
    assert len(REGRESSION_CASES) == 3


def example(batch: int = 5, rows: int = 12, dim: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    keys = torch.cat([query, torch.randn(rows - batch, dim, generator=generator, dtype=torch.float64)])
    return query, keys, torch.randint(0, 3, (rows,), generator=generator)


def log_probs_by_loops(query, keys, labels, num_classes, temperature=1.0, exclude_self=False, distance="euclidean"):
    out = torch.zeros(len(query), num_classes, dtype=torch.float64)
    for i, q in enumerate(query):
        weights = {}
        for j, k in enumerate(keys):
            if exclude_self and i == j:
                continue
            d = (q - k).norm() if distance == "euclidean" else -(q @ k) / q.norm() / k.norm()
            weights[j] = math.exp(-d / temperature)
        for j, w in weights.items():
            out[i, labels[j]] += w / sum(weights.values())
    return (out + 1e-7).log()


@pytest.mark.parametrize("chunk_size", [None, 5, 1])
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_log_probs_equal_loops(distance, exclude_self, chunk_size):
    query, keys, labels = example()
    options = {"temperature": 0.6, "exclude_self": exclude_self, "distance": distance}
    result = soft_nearest_neighbor_log_probs(query, keys, labels, 3, **options, chunk_size=chunk_size)
    torch.testing.assert_close(result, log_probs_by_loops(query, keys, labels, 3, **options), rtol=0, atol=1e-7)


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_gradcheck(distance, exclude_self, chunk_size):
    query, keys, labels = example(3, 8)
    keys = keys + 0.3 * torch.randn(keys.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.randn(8, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = {"temperature": 0.8, "exclude_self": exclude_self, "distance": distance, "chunk_size": chunk_size}
    inputs = [query.requires_grad_(), keys.requires_grad_()]
    assert torch.autograd.gradcheck(lambda q, k: soft_nearest_neighbor_log_probs(q, k, labels, 3, **options), inputs)
    inputs.append(values.requires_grad_())
    assert torch.autograd.gradcheck(lambda q, k, v: soft_nearest_neighbor_regression(q, k, v, **options), inputs)


@pytest.mark.parametrize("function", [plr_lite, plr])
def test_gradcheck_plr(function):
    x, frequencies = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    weight = torch.randn((5, 4) if function is plr_lite else (3, 4, 5), dtype=torch.float64)
    bias = torch.randn((5,) if function is plr_lite else (3, 5), dtype=torch.float64)
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in (x, frequencies, weight, bias)])


def test_plr_with_equal_maps_is_plr_lite():
    x, frequencies, weight, bias = torch.randn(4, 3), torch.randn(3, 2), torch.randn(5, 4), torch.randn(5)
    own = plr(x, frequencies, weight.T.expand(3, 4, 5), bias.expand(3, 5))
    torch.testing.assert_close(own, plr_lite(x, frequencies, weight, bias))


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 6),
    extra=st.integers(1, 40),
    chunk_size=st.integers(1, 50),
    exclude_self=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_chunks_change_nothing(batch, extra, chunk_size, exclude_self, scale, seed):
    query, keys, labels = example(batch, batch + extra, seed=seed)
    query, keys = (scale * query).requires_grad_(), (scale * keys).requires_grad_()
    results = []
    for size in (None, chunk_size):
        log_probs = soft_nearest_neighbor_log_probs(query, keys, labels, 3, exclude_self=exclude_self, chunk_size=size)
        results.append([log_probs, *torch.autograd.grad(log_probs.square().sum(), [query, keys])])
    for whole, chunked in zip(*results, strict=True):
        assert torch.isfinite(whole).all()
        torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-6)


def test_a_chunk_of_nothing_but_the_query_itself():
    query, keys, labels = example(4, 4)
    whole = soft_nearest_neighbor_log_probs(query, keys, labels, 3, exclude_self=True)
    single = soft_nearest_neighbor_log_probs(query, keys, labels, 3, exclude_self=True, chunk_size=1)
    torch.testing.assert_close(single, whole)


def test_invariances():
    query, keys, labels = example()
    reference = soft_nearest_neighbor_log_probs(query, keys, labels, 3)
    order = torch.randperm(len(keys))
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    for q, k, y in (
        (query, keys[order], labels[order]),
        (query @ rotation, keys @ rotation, labels),
        (query + 5.0, keys + 5.0, labels),
        (query, keys.repeat(2, 1), labels.repeat(2)),
    ):
        torch.testing.assert_close(soft_nearest_neighbor_log_probs(q, k, y, 3), reference)
    scaled = soft_nearest_neighbor_log_probs(3 * query, 3 * keys, labels, 3, temperature=3.0)
    torch.testing.assert_close(scaled, reference)
    cosine = soft_nearest_neighbor_log_probs(query, keys, labels, 3, distance="cosine", temperature=0.1)
    longer = soft_nearest_neighbor_log_probs(7 * query, 2 * keys, labels, 3, distance="cosine", temperature=0.1)
    torch.testing.assert_close(longer, cosine)


def test_the_distance_is_not_squared():
    result = soft_nearest_neighbor_regression(
        torch.tensor([[0.0]]), torch.tensor([[0.0], [2.0]]), torch.tensor([0.0, 1.0])
    )
    assert result.item() == pytest.approx(math.exp(-2) / (1 + math.exp(-2)), abs=1e-6)  # squared: exp(-4)


def test_low_temperature_is_the_nearest_neighbor():
    query, keys, labels = example()
    result = soft_nearest_neighbor_log_probs(query, keys, labels, 3, temperature=1e-6)
    assert (result.argmax(dim=1) == labels[: len(query)]).all()
    loo = soft_nearest_neighbor_log_probs(query, keys, labels, 3, temperature=1e-6, exclude_self=True)
    distances = torch.cdist(query, keys).fill_diagonal_(torch.inf)
    assert (loo.argmax(dim=1) == labels[distances.argmin(dim=1)]).all()


def test_a_class_without_candidates_has_log_eps():
    query, keys = torch.randn(4, 2), torch.randn(6, 2)
    result = soft_nearest_neighbor_log_probs(query, keys, torch.zeros(6, dtype=torch.long), 2)
    torch.testing.assert_close(result[:, 1], torch.full((4,), -16.118), rtol=0, atol=1e-3)
    torch.testing.assert_close(result[:, 0], torch.zeros(4), rtol=0, atol=1e-6)


def test_duplicates_and_far_keys_have_finite_gradients():
    query = torch.zeros(2, 3, requires_grad=True)
    keys = torch.cat([torch.zeros(4, 3), torch.full((30, 3), 1e4)]).requires_grad_()
    for chunk_size in (None, 5):
        result = soft_nearest_neighbor_regression(query, keys, torch.arange(34.0), chunk_size=chunk_size)
        torch.testing.assert_close(result, torch.full((2,), 1.5))
        for gradient in torch.autograd.grad(result.sum(), [query, keys]):
            assert torch.isfinite(gradient).all()


def test_the_own_label_is_never_seen():
    """With the query among the keys, changing its own label must change its prediction, unless it is excluded."""
    query, keys, _ = example()
    values = torch.randn(len(keys), dtype=torch.float64)
    for i in range(len(query)):
        other = values.clone()
        other[i] += 100
        for chunk_size in (None, 2):
            options = {"exclude_self": True, "chunk_size": chunk_size}
            before = soft_nearest_neighbor_regression(query, keys, values, **options)
            after = soft_nearest_neighbor_regression(query, keys, other, **options)
            assert torch.equal(before[i], after[i])
            assert (before != after).sum() == len(query) - 1
        assert soft_nearest_neighbor_regression(query, keys, other)[i] > values.max()


def test_several_outputs_are_averaged_with_the_same_weights():
    query, keys, _ = example()
    values = torch.randn(len(keys), 2, dtype=torch.float64)
    both = soft_nearest_neighbor_regression(query, keys, values)
    each = [soft_nearest_neighbor_regression(query, keys, column) for column in values.T]
    torch.testing.assert_close(both, torch.stack(each, dim=1))


@pytest.mark.parametrize("chunk_size", [None, 4, 7])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_neighbor_weights(exclude_self, chunk_size):
    query, keys, _ = example(5, 40)
    logits = -torch.cdist(query, keys, compute_mode="donot_use_mm_for_euclid_dist") / 0.5
    if exclude_self:
        logits.fill_diagonal_(-torch.inf)
    expected, order = logits.softmax(dim=1).sort(dim=1, descending=True, stable=True)
    options = {"temperature": 0.5, "exclude_self": exclude_self, "chunk_size": chunk_size}
    weights, indices = neighbor_weights(query, keys, 6, **options)
    torch.testing.assert_close(weights, expected[:, :6], rtol=0, atol=1e-6)
    assert torch.equal(indices, order[:, :6])
    everything = neighbor_weights(query, keys, 40 - exclude_self, **options)[0]
    torch.testing.assert_close(everything.sum(dim=1), torch.ones(5, dtype=torch.float64))


def test_neighbor_weights_explain_the_prediction():
    query, keys, _ = example(5, 30)
    values = torch.randn(30, dtype=torch.float64)
    weights, indices = neighbor_weights(query, keys, 30)
    torch.testing.assert_close(
        (weights * values[indices]).sum(1), soft_nearest_neighbor_regression(query, keys, values)
    )


def test_equal_neighbors_keep_the_lower_index():
    keys = torch.zeros(9, 2)
    for chunk_size in (None, 2):
        assert neighbor_weights(torch.zeros(1, 2), keys, 3, chunk_size=chunk_size)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    query, keys, labels = example(8, 40)
    half = soft_nearest_neighbor_log_probs(query.to(dtype), keys.to(dtype), labels, 3)
    assert half.dtype == torch.float32
    exact = soft_nearest_neighbor_log_probs(query.to(dtype).double(), keys.to(dtype).double(), labels, 3)
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=1e-3)
    for chunk_size in (None, 16):
        inputs = (query.float(), keys.float(), labels, 3)
        plain = soft_nearest_neighbor_log_probs(*inputs, chunk_size=chunk_size)
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(soft_nearest_neighbor_log_probs(*inputs, chunk_size=chunk_size), plain)


def test_mixed_precisions_are_computed_in_the_wider():
    query, keys, labels = torch.randn(3, 4).double(), torch.randn(9, 4), torch.arange(9) % 2
    for q, k in ((query, keys), (query.float(), keys.double()), (query.half(), keys.double())):
        assert soft_nearest_neighbor_log_probs(q, k, labels, 2).dtype == torch.float64
        assert soft_nearest_neighbor_regression(q, k, keys[:, 0], chunk_size=4).dtype == torch.float64
        assert neighbor_weights(q, k, 2, chunk_size=4)[0].dtype == torch.float64


def test_sample_candidates():
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(20)
    for _ in range(400):
        drawn = sample_candidates(20, 0.47, generator)
        assert len(drawn) == len(drawn.unique()) == 9
        counts[drawn] += 1
    assert (counts / 400 - 0.45).abs().max() < 0.1  # uniform over the rows
    assert torch.equal(
        sample_candidates(50, 0.3, torch.Generator().manual_seed(3)),
        sample_candidates(50, 0.3, torch.Generator().manual_seed(3)),
    )
    assert sample_candidates(7, 1.0).sort().values.tolist() == list(range(7))
    assert sample_candidates(3, 0.3).shape == (0,)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), unique=True))))
def test_rows_outside_counts_the_rows_that_are_left(case):
    n, excluded = case
    left = [row for row in range(n) if row not in excluded]
    position = torch.arange(len(left))
    assert rows_outside(position, torch.tensor(excluded, dtype=torch.long)).tolist() == left


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.randn(12, 4)}, r"keys must have shape \[rows, dim=3\], got \[12, 4\]"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"labels": torch.full((12,), 3)}, r"labels must be in 0..2, got 3"),
        ({"labels": torch.full((12,), -1)}, r"labels must be in 0..2, got -1"),
        ({"labels": torch.zeros(11, dtype=torch.long)}, "labels must have shape"),
        ({"keys": torch.zeros(0, 3), "labels": torch.zeros(0, dtype=torch.long)}, "at least one row"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"distance": "cosin"}, "Did you mean 'cosine'"),
        (
            {"keys": torch.randn(4, 3), "labels": torch.zeros(4, dtype=torch.long), "exclude_self": True},
            "at least 5 rows",
        ),
        ({"query": torch.zeros(5, 3, dtype=torch.long)}, "floating point"),
    ],
)
def test_bad_input(change, message):
    arguments = {"query": torch.randn(5, 3), "keys": torch.randn(12, 3), "labels": torch.zeros(12, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        soft_nearest_neighbor_log_probs(**{**arguments, "num_classes": 3, **change})
    labels = {**arguments, **change}.pop("labels")
    if "labels" not in message:
        change = {key: value for key, value in change.items() if key != "labels"}
        arguments.pop("labels")
        with pytest.raises(ValueError, match=message):
            soft_nearest_neighbor_regression(**{**arguments, "values": labels.float(), **change})
        with pytest.raises(ValueError, match=message):
            neighbor_weights(**{**arguments, "k": 1, **change})


@pytest.mark.bad_input
def test_nothing_left():
    one = torch.randn(1, 3)
    with pytest.raises(ValueError, match="leaves no candidate"):
        soft_nearest_neighbor_regression(one, one, torch.ones(1), exclude_self=True)
    with pytest.raises(ValueError, match="values must have shape"):
        soft_nearest_neighbor_regression(one, one, torch.ones(2))
    with pytest.raises(ValueError, match="k must be"):
        neighbor_weights(one, torch.randn(3, 3), 4)
    for rate in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="rate"):
            sample_candidates(10, rate)
    with pytest.raises(ValueError, match=r"frequencies must have shape \[columns=3, k\]"):
        plr_lite(torch.randn(2, 3), torch.randn(4, 2), torch.randn(5, 4), torch.randn(5))
    with pytest.raises(ValueError, match=r"weight must have shape \[dim, two_k=4\]"):
        plr_lite(torch.randn(2, 3), torch.randn(3, 2), torch.randn(5, 3), torch.randn(5))
