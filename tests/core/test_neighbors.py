from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.neighbors import NearestNeighbors

from lightning_methods.core.neighbors import knn, pairwise_distances


def points(n, d, seed=0, dtype=torch.float64):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "cosine"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_distances_as_scipy(metric, exact, chunk_size):
    x, y = points(40, 6), points(31, 6, seed=1)
    result = pairwise_distances(x, y, metric, exact, chunk_size)
    np.testing.assert_allclose(result.numpy(), cdist(x.numpy(), y.numpy(), metric), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_exact_gives_zero_between_equal_rows_of_large_norm(metric):
    x = 3 * points(60, 64, dtype=torch.float32)
    assert pairwise_distances(x, x, metric, exact=True).diagonal().max() == 0
    assert pairwise_distances(x, x, metric).diagonal().abs().max() > 0  # why `exact` exists


def test_gradient_is_zero_at_duplicates():
    x = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    pairwise_distances(x, x, exact=True).sum().backward()
    assert x.grad.abs().max() == 0


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean", "cosine"])
def test_distances_gradcheck(metric):
    x, y = points(5, 3).requires_grad_(), points(4, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: pairwise_distances(a, b, metric, exact=True), (x, y))


def test_half_precision_and_autocast_compute_in_float32():
    x = points(30, 8, dtype=torch.float32)
    assert pairwise_distances(x.bfloat16(), x.bfloat16()).dtype == torch.float32
    expected = pairwise_distances(x, x, "cosine")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(pairwise_distances(x, x, "cosine"), expected)


@pytest.mark.parametrize("chunk_size", [5, 64, 1000])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_knn_as_scikit_learn(chunk_size, metric):
    bank, query = points(120, 5), points(33, 5, seed=1)
    expected = NearestNeighbors(n_neighbors=4, metric=metric, algorithm="brute").fit(bank.numpy())
    distance, index = knn(query, bank, 4, metric, exact=True, chunk_size=chunk_size)
    d, i = expected.kneighbors(query.numpy())
    np.testing.assert_array_equal(index.numpy(), i)
    np.testing.assert_allclose(distance.numpy(), d, rtol=1e-7, atol=1e-9)
    _, inside = knn(bank, bank, 4, metric, exclude_self=True, exact=True, chunk_size=chunk_size)
    np.testing.assert_array_equal(inside.numpy(), expected.kneighbors()[1])


def test_knn_ties_go_to_the_lower_index_and_duplicates_are_neighbours():
    x = torch.zeros(6, 2)
    _, index = knn(x, x, 2, exclude_self=True, exact=True, chunk_size=4)
    assert index.tolist() == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1], [0, 1]]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"k": 6, "exclude_self": True}, r"k must be .* \[1, 5\]"),
        ({"k": 0}, r"k must be"),
        ({"k": 1, "chunk_size": 0}, "chunk_size"),
        ({"k": 1, "metric": "cosin"}, "Did you mean 'cosine'"),
        ({"k": 1, "bank": torch.zeros(4, 3)}, "bank must have shape"),
        ({"k": 1, "bank": torch.zeros(4, 2), "exclude_self": True}, "query must have shape"),
    ],
)
def test_knn_bad_input(kwargs, message):
    x = torch.zeros(6, 2)
    with pytest.raises(ValueError, match=message):
        knn(**{"query": x, "bank": x, **kwargs})
