from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from lightning_methods.core.ordering import ranks, stable_topk


def reference_topk(x: np.ndarray, k: int, largest: bool) -> np.ndarray:
    return np.argsort(-x if largest else x, axis=-1, kind="stable")[..., :k]


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int8]


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(0, 40), st.booleans(), st.sampled_from(DTYPES)
)
def test_topk_takes_lower_index_on_ties(values, k, largest, dtype):
    x = torch.tensor(values).to(dtype)
    k = min(k, len(values))
    top, index = stable_topk(x, k, largest=largest)
    np.testing.assert_array_equal(index.numpy(), reference_topk(x.double().numpy(), k, largest))
    assert torch.equal(top, x[index])


@pytest.mark.parametrize("k", [1, 2, 7, 20])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_along_any_dimension(k, dim, largest):
    x = torch.randint(0, 5, (30, 40, 25), generator=torch.Generator().manual_seed(0)).float()
    expected = reference_topk(np.moveaxis(x.numpy(), dim, -1), k, largest)
    values, index = stable_topk(x, k, dim=dim, largest=largest)
    np.testing.assert_array_equal(np.moveaxis(index.numpy(), dim, -1), expected)
    assert torch.equal(values, x.gather(dim, index))


@pytest.mark.parametrize("largest", [True, False])
def test_topk_with_infinities_and_nan(largest):
    x = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan] * 10)
    _, index = stable_topk(x, 3, largest=largest)
    assert index.tolist() == ([1, 3, 5] if largest else [2, 6, 10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [3, 300, 999])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_of_floats_of_all_sizes(dtype, k, largest):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 1000, generator=g, dtype=dtype) * 10 ** torch.randint(-30, 30, (1000,), generator=g)
    x[:, ::7] = -0.0
    x[:, ::11] = 0.0
    np.testing.assert_array_equal(
        stable_topk(x, k, largest=largest)[1].numpy(), reference_topk(x.numpy() + 0.0, k, largest)
    )


def test_topk_carries_gradient():
    x = torch.tensor([1.0, 3.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0], requires_grad=True)
    stable_topk(x, 2)[0].sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.bad_input
@pytest.mark.parametrize("k", [-1, 6])
def test_topk_refuses_k(k):
    with pytest.raises(ValueError, match=r"k must be .* \[0, 5\]"):
        stable_topk(torch.zeros(5), k)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.sampled_from(["average", "max", "min", "ordinal"]))
def test_ranks_as_scipy(values, method):
    x = torch.tensor(values, dtype=torch.float64)
    np.testing.assert_array_equal(ranks(x, method).numpy(), rankdata(x.numpy(), method=method))


def test_ranks_dimensions_and_dtypes():
    x = torch.randint(0, 4, (9, 5), generator=torch.Generator().manual_seed(0))
    for dim in (0, 1):
        np.testing.assert_array_equal(ranks(x, dim=dim).numpy(), rankdata(x.numpy(), axis=dim))
    assert ranks(x).dtype == torch.float32
    assert ranks(x.double()).dtype == torch.float64
    assert ranks(x.bfloat16()).dtype == torch.float32
    assert ranks(torch.tensor([True, False, True]), "max").tolist() == [3, 1, 3]


@pytest.mark.bad_input
def test_ranks_names_the_choices():
    with pytest.raises(ValueError, match=r"method must be one of 'average', 'max'.*Did you mean 'max'"):
        ranks(torch.zeros(3), "maxi")
