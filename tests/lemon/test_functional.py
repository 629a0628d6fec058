from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_methods.lemon.functional import (
    depth_map,
    expand_batch_norm,
    expand_conv,
    expand_layer_norm,
    expand_linear,
    expand_rms_norm,
    expand_vector,
)
from tests.vectors import load_cases

CASES = load_cases("lemon")
MODES = ("circular", "average", "zero")
SPLITS = ("projection", "complement", "even")


def of(function: str):
    return pytest.mark.parametrize("case", [case for case in CASES if case.function == function], ids=repr)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Tolerance of the vectors: 1e-10 in float64, 1e-5 in float32."""
    assert actual.dtype == expected.dtype
    tolerance = 1e-10 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# the authors' results


def test_there_are_vectors():
    assert len(CASES) == 20
    assert {case.function for case in CASES} == {"vector", "linear", "conv", "layer_norm", "depth_map"}


@of("vector")
def test_vector_matches_the_authors(case):
    assert_close(expand_vector(**case.inputs), case.outputs["y"])


@of("linear")
def test_linear_matches_the_authors(case):
    weight, bias = expand_linear(**{"bias": None, **case.inputs})
    assert_close(weight, case.outputs["weight"])
    if "bias" in case.inputs:
        assert_close(bias, case.outputs["bias"])
    else:
        assert bias is None


@of("conv")
def test_conv_matches_the_authors(case):
    weight, bias = expand_conv(**case.inputs)
    assert_close(weight, case.outputs["weight"])
    assert_close(bias, case.outputs["bias"])


@of("layer_norm")
def test_layer_norm_matches_the_authors(case):
    weight, bias, eps = expand_layer_norm(**case.inputs)
    head = case.outputs["weight_head"]
    assert_close(weight[: len(head)], head)
    assert_close(bias, case.outputs["bias"])
    assert eps == pytest.approx(case.outputs["eps"], rel=1e-12)


@of("depth_map")
def test_depth_map_matches(case):
    blocks = depth_map(**case.inputs)
    assert [index for index, _ in blocks] == case.outputs["source"].tolist()
    assert [new for _, new in blocks] == case.outputs["new"].tolist()


# what makes them lossless


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9)),
    modes=st.tuples(st.sampled_from(MODES), st.sampled_from(MODES)),
    split=st.sampled_from(SPLITS),
    scale=st.sampled_from([1.0, 0.1, -2.0]),
    seed=st.integers(0, 10**6),
)
def test_a_layer_maps_an_expanded_input_to_the_expanded_output(sizes, modes, split, scale, seed):
    o, i, more_o, more_i = sizes
    weight, bias, free = (
        normal(o, i, seed=seed),
        normal(o, seed=seed + 1),
        normal(o + more_o, i + more_i, seed=seed + 2),
    )
    grown, grown_bias = expand_linear(
        weight, bias, free, out_mode=modes[0], in_mode=modes[1], split=split, free_scale=scale
    )
    x = normal(3, i, seed=seed + 3)
    actual = F.linear(expand_vector(x, i + more_i, modes[1]), grown, grown_bias)
    expected = expand_vector(F.linear(x, weight, bias), o + more_o, modes[0])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_the_projection_is_the_nearest_lossless_weight():
    # Any other lossless weight differs by something orthogonal to F - W*.
    weight, free = normal(2, 3), normal(2, 8, seed=1)
    grown, _ = expand_linear(weight, None, free, out_mode="circular", in_mode="circular")
    direction = normal(2, 8, seed=2)
    columns = torch.arange(8) % 3
    for k in range(3):
        direction[:, columns == k] -= direction[:, columns == k].mean(dim=1, keepdim=True)
    inner = ((free - grown) * direction).sum()
    torch.testing.assert_close(inner, torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_same_size_is_the_weight_itself():
    weight = torch.randn(4, 3)
    for split in SPLITS:
        grown, _ = expand_linear(weight, None, 1e3 * torch.randn(4, 3), split=split)
        assert torch.equal(grown, weight)


def test_an_even_split_gives_equal_copies_and_a_projection_does_not():
    weight, free = normal(2, 3), normal(2, 6, seed=1)
    even, _ = expand_linear(weight, None, free, split="even")
    assert torch.equal(even[:, :3], even[:, 3:])
    projected, _ = expand_linear(weight, None, free)
    assert ((projected[:, :3] - projected[:, 3:]).abs() > 1e-3).all()


def test_the_complement_leaves_the_last_copy_to_the_free_matrix():
    weight, free = normal(2, 3), normal(2, 8, seed=1)
    grown, _ = expand_linear(weight, None, free, split="complement", free_scale=0.1)
    torch.testing.assert_close(grown[:, 6:], 0.1 * free[:, 6:])  # third copies of inputs 0 and 1
    torch.testing.assert_close(grown[:, 5], 0.1 * free[:, 5])  # second and last copy of input 2


def test_residue_columns():
    weight, free = normal(2, 3), normal(2, 8, seed=1)
    average, _ = expand_linear(weight, None, free, in_mode="average")
    torch.testing.assert_close(average[:, 6:].sum(dim=1), torch.zeros(2, dtype=torch.float64))
    assert average[:, 6:].abs().min() > 1e-3
    zero, _ = expand_linear(weight, None, free, in_mode="zero")
    assert torch.equal(zero[:, 6:], free[:, 6:])


def test_a_convolution_is_expanded_at_every_position():
    weight, bias, free = normal(2, 3, 3, 3), normal(2), normal(5, 7, 3, 3, seed=1)
    grown, grown_bias = expand_conv(weight, bias, free)
    x = normal(1, 3, 6, 6, seed=2)
    actual = F.conv2d(expand_vector(x, 7, dim=1), grown, grown_bias)
    torch.testing.assert_close(actual, expand_vector(F.conv2d(x, weight, bias), 5, dim=1), rtol=0, atol=1e-10)
    one, _ = expand_linear(weight[:, :, 1, 2], None, free[:, :, 1, 2])
    torch.testing.assert_close(grown[:, :, 1, 2], one)


@pytest.mark.parametrize("size", [6, 8, 9, 12])
def test_layer_norm_is_lossless_with_the_eps_it_returns(size):
    weight, bias, x = normal(4), normal(4, seed=1), 1e-3 * normal(5, 4, seed=2)  # small: a wrong eps shows
    grown, grown_bias, eps = expand_layer_norm(weight, bias, 1e-5, size)
    expected = expand_vector(F.layer_norm(x, (4,), weight, bias, 1e-5), size, "zero")
    stream = expand_vector(x, size, "average")
    torch.testing.assert_close(F.layer_norm(stream, (size,), grown, grown_bias, eps), expected, rtol=0, atol=1e-10)
    if size % 4:
        wrong = F.layer_norm(stream, (size,), grown, grown_bias, 1e-5)
        assert (wrong - expected).abs().max() > 1e-3


@pytest.mark.parametrize("size", [6, 8, 11])
def test_rms_norm_is_lossless(size):
    weight, x = normal(4), 1e-3 * normal(5, 4, seed=2)
    grown, eps = expand_rms_norm(weight, 1e-6, size)
    actual = F.rms_norm(expand_vector(x, size, "zero"), (size,), grown, eps)
    expected = expand_vector(F.rms_norm(x, (4,), weight, 1e-6), size, "zero")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_residue_weights_of_a_layer_norm():
    free = normal(11)
    weight, _, _ = expand_layer_norm(normal(4), None, 1e-5, 11, free)
    torch.testing.assert_close(weight[8:], math.sqrt(8 / 11) * free[8:])
    first, again, other = (
        expand_layer_norm(normal(4), None, 1e-5, 7, generator=torch.Generator().manual_seed(seed))[0][4:]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (first.abs() <= math.sqrt(4 / 7)).all()


def test_batch_norm_is_lossless():
    layer = nn.BatchNorm2d(3).double()
    values = [normal(3), normal(3, seed=1), normal(3, seed=2), normal(3, seed=3).exp()]
    x = normal(2, 3, 4, 4, seed=4)
    expected = F.batch_norm(x, values[2], values[3], values[0], values[1], eps=layer.eps)
    weight, bias, mean, var = expand_batch_norm(*values, 7)
    actual = F.batch_norm(expand_vector(x, 7, dim=1), mean, var, weight, bias, eps=layer.eps)
    torch.testing.assert_close(actual, expand_vector(expected, 7, dim=1), rtol=0, atol=1e-10)


def test_half_precision_sums_in_float32():
    weight, free = torch.randn(4, 3).bfloat16(), torch.randn(4, 30)
    grown, _ = expand_linear(weight, None, free)
    assert grown.dtype == torch.bfloat16
    exact, _ = expand_linear(weight.float(), None, free.bfloat16().float())
    torch.testing.assert_close(grown, exact.bfloat16(), rtol=0, atol=0.05)
    # 300 copies of ones: a bfloat16 sum would stop at 256.
    assert expand_vector(torch.ones(300).bfloat16(), 301, "average")[-1] == 1


def test_gradients_flow():
    weight, bias, free = (x.requires_grad_() for x in (normal(2, 3), normal(2), normal(5, 7, seed=1)))
    for split in SPLITS:
        function = partial(expand_linear, out_mode="average", in_mode="zero", split=split)
        assert torch.autograd.gradcheck(function, (weight, bias, free))


# depth


@given(source=st.integers(1, 6), more=st.integers(0, 12), mode=st.sampled_from(["interpolate", "stack"]))
def test_every_source_block_is_there_once_and_in_order(source, more, mode):
    blocks = depth_map(source, source + more, mode)
    assert [index for index, new in blocks if not new] == list(range(source))
    assert len(blocks) == source + more
    if mode == "interpolate":
        assert [index for index, _ in blocks] == sorted(index for index, _ in blocks)


def test_depth_by_hand():
    assert depth_map(3, 5) == [(0, False), (1, False), (1, True), (2, False), (2, True)]
    assert depth_map(2, 5) == [(0, False), (0, True), (1, False), (1, True), (1, True)]
    assert depth_map(3, 5, "stack") == [(0, False), (1, False), (2, False), (0, True), (1, True)]


# bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: expand_vector(torch.ones(4), 3), "size must be at least 4"),
        (lambda: expand_vector(torch.ones(4), 5, "circle"), "Did you mean 'circular'"),
        (lambda: expand_vector(torch.arange(4), 5), "floating point"),
        (lambda: expand_vector(torch.ones(4), 5, dim=1), "dim"),
        (lambda: expand_linear(torch.ones(4, 3), None, torch.ones(3, 3)), "rows of free"),
        (lambda: expand_linear(torch.ones(4, 3), None, torch.ones(4, 2)), "columns of free"),
        (lambda: expand_linear(torch.ones(4), None, torch.ones(4, 2)), "weight"),
        (lambda: expand_linear(torch.ones(2, 2), None, torch.ones(4, 2, 1)), "free"),
        (lambda: expand_linear(torch.ones(2, 2), torch.ones(3), torch.ones(4, 4)), "bias"),
        (lambda: expand_linear(torch.ones(2, 2).long(), None, torch.ones(4, 4)), "floating point"),
        (lambda: expand_linear(torch.ones(2, 2), None, torch.ones(4, 4), split="odd"), "split"),
        (lambda: expand_linear(torch.ones(2, 2), None, torch.ones(4, 4), in_mode="mean"), "in_mode"),
        (lambda: expand_linear(torch.ones(2, 2), None, torch.ones(4, 4), out_mode="mean"), "mode"),
        (lambda: expand_linear(torch.ones(2, 2), None, torch.ones(4, 4), free_scale=math.nan), "free_scale"),
        (lambda: expand_conv(torch.ones(2, 2, 3), None, torch.ones(4, 4, 5)), "kernel"),
        (lambda: expand_conv(torch.ones(2, 2), None, torch.ones(4, 4)), "kernel"),
        (lambda: expand_layer_norm(torch.ones(4), None, 1e-5, 3), "size"),
        (lambda: expand_layer_norm(torch.ones(4, 1), None, 1e-5, 8), "weight"),
        (lambda: expand_layer_norm(torch.ones(4), torch.ones(3), 1e-5, 8), "bias"),
        (lambda: expand_layer_norm(torch.ones(4), None, -1.0, 8), "eps"),
        (lambda: expand_layer_norm(torch.ones(4), None, 1e-5, 8, torch.ones(7)), "free"),
        (lambda: expand_rms_norm(torch.ones(4).int(), 1e-5, 8), "floating point"),
        (lambda: expand_batch_norm(*[torch.ones(4)] * 3, torch.ones(3), 8), "running_var"),
        (lambda: expand_batch_norm(*[torch.ones(4)] * 4, 3), "size"),
        (lambda: depth_map(4, 3), "target_depth"),
        (lambda: depth_map(0, 3), "source_depth"),
        (lambda: depth_map(2, 3, "middle"), "mode"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
