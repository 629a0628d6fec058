from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_methods.memory_mosaics import (
    ContextualMemory,
    MemoryMosaicLM,
    PersistentMemory,
    complex_linear_weight,
    contextual_retrieval,
    leaky_average,
    peek_values,
    persistent_retrieval,
    regular_language_accuracy,
    total_variation,
    unit_norm,
)
from lightning_methods.memory_mosaics.module import MemoryMosaics
from tests.vectors import load_cases

SCALE = 10


def assert_as_reference(found: Tensor, expected: Tensor) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max().clamp_min(1e-30)))


def heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# the authors' code in float64


@pytest.mark.parametrize("case", load_cases("memory_mosaics", "contextual"), ids=repr)
def test_contextual_vectors(case):
    inputs = dict(case.inputs)
    x, num_heads, shift = inputs.pop("x"), int(inputs.pop("num_heads")), int(inputs.pop("v_shift"))
    memory = ContextualMemory(x.shape[2], num_heads, shift=shift).double().eval()
    state = {name.replace("_proj_weight", "_proj.weight"): value for name, value in inputs.items()}
    memory.load_state_dict(state)
    with torch.no_grad():
        u = heads(memory.key_proj(x), num_heads)
        assert_as_reference(u, case.outputs["keys_in"])
        decay = SCALE * memory.key_decay.abs()
        assert_as_reference(leaky_average(u, decay), case.outputs["keys_leaky"])
        values = unit_norm(peek_values(heads(memory.value_proj(x), num_heads), memory.value_mix, shift))
        assert_as_reference(values, case.outputs["values_normalized"])
        assert_as_reference(memory(x), case.outputs["y"])


@pytest.mark.parametrize("case", load_cases("memory_mosaics", "persistent"), ids=repr)
def test_persistent_vectors(case):
    inputs = dict(case.inputs)
    x, num_heads = inputs.pop("x"), int(inputs.pop("num_heads"))
    num_memories, _, size, _ = inputs["mem_keys"].shape
    memory = PersistentMemory(x.shape[2], num_heads, size, num_memories=num_memories).double().eval()
    memory.load_state_dict({name.replace("_proj_weight", "_proj.weight"): value for name, value in inputs.items()})
    with torch.no_grad():
        assert_as_reference(memory(x), case.outputs["y"])


@pytest.mark.parametrize("case", load_cases("memory_mosaics", "lm"), ids=repr)
def test_language_model_vectors(case):
    inputs = dict(case.inputs)
    ids, targets = inputs.pop("idx").long(), inputs.pop("targets").long()
    num_heads, num_layers = int(inputs.pop("num_heads")), int(inputs.pop("num_layers"))
    state = {_parameter_name(name): value for name, value in inputs.items()}
    vocab, width = state["embed.weight"].shape
    pairs = state.get("blocks.0.persistent.mem_keys")
    model = MemoryMosaicLM(vocab, width, num_heads, num_layers, 0 if pairs is None else pairs.shape[2])
    model = model.double().eval()
    model.load_state_dict({**state, "head.weight": state["embed.weight"]})
    with torch.no_grad():
        logits = model(ids)
    assert_as_reference(logits, case.outputs["logits"])
    losses, valid = MemoryMosaics(model).token_losses(logits, targets.masked_fill(targets == -1, -100))
    assert_as_reference(losses.sum() / valid.sum(), case.outputs["loss"])


def _parameter_name(name: str) -> str:
    return name if "." in name else name.removesuffix("_weight") + ".weight"


# leaky average


def loop_average(x: Tensor, decay: Tensor) -> Tensor:
    total, rows = torch.zeros_like(x[:, :, 0]), []
    for t in range(x.shape[2]):
        total = torch.exp(-decay)[:, None] * total + x[:, :, t]
        rows.append(total)
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("method", ["auto", "matrix", "scan"])
def test_leaky_average_is_the_recurrence(length, method):
    x, decay = normal(2, 3, length, 4), torch.tensor([0.0, 0.03, 50.0], dtype=torch.float64)
    expected = loop_average(x, decay)
    torch.testing.assert_close(leaky_average(x, decay, normalize=False, method=method), expected)
    factor = torch.tensor([1.0, -math.expm1(-0.03), 1.0], dtype=torch.float64)
    torch.testing.assert_close(leaky_average(x, decay, method=method), factor[:, None, None] * expected)


@given(st.integers(1, 150), st.integers(0, 1000), st.floats(0, 100))
def test_leaky_average_of_a_constant_stays_below_it(length, seed, decay):
    found = leaky_average(torch.ones(1, 1, length, 1, dtype=torch.float64), torch.tensor([decay]).double())
    assert (found <= (1 if decay > 1e-12 else length) + 1e-9).all()  # without decay it is a sum
    assert (found.diff(dim=2) >= -1e-9).all()


@pytest.mark.parametrize("method", ["matrix", "scan"])
def test_leaky_average_gradient(method):
    x = normal(1, 2, 70, 2).requires_grad_()
    decay = torch.tensor([0.1, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: leaky_average(a, b, method=method), (x, decay), fast_mode=True)


def test_leaky_average_of_long_sequences_with_strong_decay_has_finite_gradients():
    x = torch.randn(1, 2, 1000, 4, requires_grad=True)
    decay = torch.tensor([5.0, 100.0], requires_grad=True)
    leaky_average(x, decay).square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(decay.grad).all()


def test_leaky_average_is_float32_under_autocast():
    x, decay = torch.randn(1, 2, 100, 4), torch.tensor([0.5, 5.0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = leaky_average(x.bfloat16(), decay)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, leaky_average(x.bfloat16().float(), decay))


# values and norms


@pytest.mark.parametrize("shift", [1, 2, 5, 9])
def test_peek(shift):
    v, mix = normal(1, 2, 5, 3), torch.tensor([0.3, -1.5], dtype=torch.float64)
    found = peek_values(v, mix, shift)
    for t in range(5):
        ahead = v[:, :, t + shift] if t + shift < 5 else torch.zeros_like(v[:, :, 0])
        torch.testing.assert_close(found[:, :, t], (1 - mix)[:, None] * ahead + mix[:, None] * v[:, :, t])


def test_unit_norm_of_zero_has_a_finite_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    y = unit_norm(x)
    y.sum().backward()
    assert (y == 0).all()
    assert torch.isfinite(x.grad).all()


def test_a_silent_input_gives_no_nan():
    memory = ContextualMemory(8, 2)
    torch.nn.init.zeros_(memory.value_mix)  # the last value is then the unit vector of zero
    x = torch.zeros(1, 6, 8, requires_grad=True)
    memory(x).square().sum().backward()
    for p in (x, *memory.parameters()):
        assert torch.isfinite(p.grad).all()


# retrieval


@pytest.mark.parametrize("shift", [1, 3])
def test_contextual_retrieval_is_masked_attention(shift):
    keys, values = normal(2, 3, 7, 4), normal(2, 3, 7, 5)
    values = values[..., :4]
    found = contextual_retrieval(keys, values, shift=shift)
    assert (found[:, :, :shift] == 0).all()
    for t in range(shift, 7):
        past = slice(0, t - shift + 1)
        weights = torch.einsum("bhd,bhsd->bhs", keys[:, :, t], keys[:, :, past]).softmax(dim=2)
        torch.testing.assert_close(found[:, :, t], torch.einsum("bhs,bhsd->bhd", weights, values[:, :, past]))


def test_nothing_to_look_at():
    x = normal(1, 1, 2, 3)
    assert (contextual_retrieval(x, x, shift=2) == 0).all()


def test_persistent_retrieval_is_attention_over_pairs():
    keys, mem_keys, mem_values = normal(2, 3, 5, 4), normal(2, 3, 6, 4, seed=1), normal(2, 3, 6, 4, seed=2)
    weights = torch.einsum("bhtd,nhjd->nbhtj", keys, mem_keys).softmax(dim=4)
    expected = torch.einsum("nbhtj,nhjd->nbhtd", weights, mem_values).mean(dim=0)
    torch.testing.assert_close(persistent_retrieval(keys, mem_keys, mem_values), expected)


def test_dropout_acts_on_the_weights():
    torch.manual_seed(0)
    keys, values = torch.zeros(1, 1, 50, 1), torch.ones(1, 1, 50, 1)
    found = contextual_retrieval(keys, values, dropout_p=0.5)
    assert found[0, 0, -1] != 1  # a mean of survivors, doubled
    pairs = torch.zeros(1, 1, 50, 1)
    assert (persistent_retrieval(keys, pairs, pairs + 1, dropout_p=0.5).std() > 0).all()


# complex numbers


def test_complex_linear_weights_multiply_complex_numbers():
    weight = complex_linear_weight(normal(4, 6))
    torch.testing.assert_close(complex_linear_weight(weight), weight)
    z = torch.complex(normal(3, seed=1), normal(3, seed=2))
    p, q = weight[0::2, 0::2], weight[0::2, 1::2]
    found = weight @ torch.view_as_real(z).flatten()
    expected = torch.complex(p, -q) @ z
    torch.testing.assert_close(torch.view_as_complex(found.view(-1, 2)), expected)


def test_complex_linear_weight_is_the_projection():
    """What is left is orthogonal to every weight of the form."""
    weight = normal(4, 4)
    rest = weight - complex_linear_weight(weight)
    other = complex_linear_weight(normal(4, 4, seed=5))
    assert abs(float((rest * other).sum())) < 1e-12


# regular languages


def test_accuracy_and_variation():
    logits = torch.log(torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2]]]))
    legal = torch.tensor([[[True, True, False], [True, True, False], [False, True, True]]])
    probs = legal.float() / 2
    scored = torch.tensor([[True, True, False]])
    assert float(regular_language_accuracy(logits, legal, scored)) == 0.5
    expected = (0.5 * (0.2 + 0.3 + 0.1) + 0.5 * (0.4 + 0.4 + 0.8)) / 2
    assert float(total_variation(logits, probs, scored)) == pytest.approx(expected, abs=1e-6)
    assert math.isnan(regular_language_accuracy(logits, legal, torch.zeros(1, 3, dtype=torch.bool)))


# errors

X = torch.randn(1, 2, 5, 4)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: leaky_average(X[0], torch.ones(2)), "x must have shape"),
        (lambda: leaky_average(X, torch.ones(3)), "decay must have shape"),
        (lambda: leaky_average(X, torch.tensor([1.0, -0.1])), "decay must be at least 0"),
        (lambda: leaky_average(X, torch.ones(2), method="fft"), "method"),
        (lambda: peek_values(X, torch.ones(2), shift=0), "shift"),
        (lambda: contextual_retrieval(X, X[:, :, :-1]), "values must have shape"),
        (lambda: contextual_retrieval(X, X, shift=0), "shift"),
        (lambda: persistent_retrieval(X, torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3, 5)), "mem_keys"),
        (lambda: complex_linear_weight(torch.zeros(3, 2)), "even"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
