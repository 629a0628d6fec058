"""The loss against the vectors, its gradient, its limits and its errors."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lightning_methods.lidr import (
    LIDRLoss,
    ParallelRecord,
    build_preference_pairs,
    dpo_loss,
    has_repetition,
    lidr_loss,
    sequence_log_prob,
)
from tests.vectors import load_cases

CASES = {case.number: case for case in load_cases("lidr")}
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-5}


def as_dtype(inputs, dtype):
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def test_every_case_of_the_vectors_has_its_test():
    assert set(CASES) == set(range(9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("number", [0, 1])
def test_sequence_log_prob(number, dtype):
    case = CASES[number]
    log_prob, length = sequence_log_prob(**as_dtype(case.inputs, dtype))
    assert log_prob.dtype == dtype
    assert length.dtype == torch.int64
    torch.testing.assert_close(log_prob, case.outputs["log_prob"].to(dtype), rtol=TOLERANCE[dtype], atol=0)
    assert torch.equal(length, case.outputs["length"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_lidr_loss(number, dtype):
    case = CASES[number]
    if case.inputs["policy_chosen"].dtype == torch.float32 and dtype == torch.float64:
        pytest.skip("a float32 case")
    out = lidr_loss(**as_dtype(case.inputs, dtype))
    assert isinstance(out, LIDRLoss)
    for name, expected in case.outputs.items():
        value = getattr(out, name)
        expected = torch.as_tensor(expected, dtype=dtype)
        torch.testing.assert_close(value, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], msg=name)
    options = {k: v for k, v in as_dtype(case.inputs, dtype).items() if k not in ("chosen_length", "alpha")}
    torch.testing.assert_close(dpo_loss(**options), out.dpo)


@pytest.mark.parametrize("number", [5, 6])
def test_pairs_are_those_of_the_authors_script(number):
    case = CASES[number]
    records = [ParallelRecord.from_dict(record) for record in json.loads(case.inputs["records"])]
    pairs = build_preference_pairs(
        records,
        "en",
        [case.inputs["language"]],
        json.loads(case.inputs["translation_instruction_ids"]),
        dominant_pairs="all",
    )
    assert [pair._asdict() for pair in pairs] == json.loads(case.outputs["pairs"])


def test_repetition():
    case = CASES[7]
    assert [has_repetition(text) for text in json.loads(case.inputs["texts"])] == case.outputs["repeated"].tolist()


# gradients


def test_gradients_are_right():
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)]
    length = torch.tensor([1, 2, 3, 4])
    assert torch.autograd.gradcheck(lambda *a: lidr_loss(*a, length, beta=0.7, alpha=0.3).loss, x)
    logits = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([[-100, -100, 1, 4], [-100, 2, 0, -100]])
    assert torch.autograd.gradcheck(lambda a: sequence_log_prob(a, labels)[0], logits)


def test_the_gradient_of_a_pair_is_the_formula_s_weight():
    policy = [torch.tensor([-20.0, -3.0], dtype=torch.float64).requires_grad_(), torch.tensor([-10.0, -9.0]).double()]
    reference = [torch.tensor([-18.0, -5.0]).double(), torch.tensor([-12.0, -9.0]).double()]
    beta, alpha, length = 0.5, 0.2, torch.tensor([4, 2])
    margin = beta * ((policy[0] - reference[0]) - (policy[1] - reference[1])).detach()
    out = lidr_loss(*policy, *reference, length, beta, alpha)
    (gradient,) = torch.autograd.grad(out.loss, policy[0])
    expected = (-beta * torch.sigmoid(-margin) - alpha / length) / 2
    torch.testing.assert_close(gradient, expected)
    assert not out.reward_chosen.requires_grad
    assert not out.reward_rejected.requires_grad


# invariances and limits


def test_only_differences_to_the_reference_matter_to_the_preference():
    generator = torch.Generator().manual_seed(1)
    a, b, c, d = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    shift = torch.randn(6, generator=generator, dtype=torch.float64) * 100
    torch.testing.assert_close(dpo_loss(a + shift, b, c + shift, d), dpo_loss(a, b, c, d))
    torch.testing.assert_close(dpo_loss(a + shift, b + shift, c, d), dpo_loss(a, b, c, d))
    # Exchanging the answers: -log sigmoid(z) and -log sigmoid(-z) differ by z.
    z = 0.1 * ((a - c) - (b - d))
    torch.testing.assert_close(dpo_loss(b, a, d, c) - dpo_loss(a, b, c, d), z)


def test_a_model_that_is_its_reference_pays_log_two():
    x, y = torch.tensor([-5.0, -500.0]), torch.tensor([-7.0, -1.0])
    torch.testing.assert_close(dpo_loss(x, y, x, y), torch.full((2,), math.log(2)))


@pytest.mark.parametrize("margin", [-3e4, -300.0, 300.0, 3e4])
def test_large_margins_stay_finite_with_the_right_slope(margin):
    chosen = torch.tensor([margin], requires_grad=True)
    zero = torch.zeros(1)
    loss = dpo_loss(chosen, zero, zero, zero, beta=1.0)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([max(-margin, 0.0)]))
    torch.testing.assert_close(chosen.grad, torch.tensor([-1.0 if margin < 0 else 0.0]))


def test_the_preference_sums_and_the_likelihood_averages():
    """A response of twice as many equally likely tokens: twice the log-ratio, the same likelihood term."""
    logits = torch.randn(1, 1, 7, generator=torch.Generator().manual_seed(2)).expand(1, 9, 7)
    short = torch.full((1, 9), -100)
    long = short.clone()
    short[0, 1:5], long[0, 1:9] = 3, 3
    (a, n), (b, m) = sequence_log_prob(logits, short), sequence_log_prob(logits, long)
    torch.testing.assert_close(2 * a, b)
    zero = torch.zeros(1)
    one, two = (lidr_loss(p, zero, zero, zero, k) for p, k in ((a, n), (b, m)))
    torch.testing.assert_close(one.nll, two.nll)
    torch.testing.assert_close(2 * one.reward_chosen, two.reward_chosen)
    torch.testing.assert_close(lidr_loss(a, zero, zero, zero, n, alpha=0).loss, one.dpo.mean())


def test_prompt_and_padding_do_not_count():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 6, 5, generator=generator)
    labels = torch.tensor([[-100, -100, 1, 2, -100, -100], [-100, 3, 3, 3, 0, 1]])
    changed = logits.clone()
    changed[0, 0], changed[0, 3:], changed[1, 5] = 9.0, -4.0, 2.0
    for chunk_size in (None, 2):
        a, b = (sequence_log_prob(x, labels, chunk_size=chunk_size) for x in (logits, changed))
        torch.testing.assert_close(a, b)
    assert a[1].tolist() == [2, 5]


def test_half_precision_inputs_give_float32():
    half = torch.tensor([-3.0, -4.0], dtype=torch.bfloat16)
    out = lidr_loss(half, half - 1, half, half, torch.tensor([2, 2]))
    assert {value.dtype for value in out} == {torch.float32}
    log_prob, _ = sequence_log_prob(torch.zeros(1, 3, 4, dtype=torch.bfloat16), torch.tensor([[-100, 0, 1]]))
    assert log_prob.dtype == torch.float32


# errors


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_rejected": torch.zeros(3)}, "policy_rejected must have shape"),
        ({"reference_chosen": torch.zeros(2, 1)}, "reference_chosen must have shape"),
        ({"reference_rejected": torch.zeros(2).long()}, "reference_rejected must be a floating"),
        ({"chosen_length": torch.ones(3).long()}, "chosen_length must have shape"),
        ({"chosen_length": torch.tensor([1, 0])}, "row 1 has none"),
        ({"beta": 0.0}, "beta"),
        ({"beta": -1.0}, "beta"),
        ({"alpha": -0.1}, "alpha"),
        ({"alpha": math.nan}, "alpha"),
    ],
)
def test_bad_input_of_the_loss(changes, message):
    names = ("policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected")
    good = {name: torch.zeros(2) for name in names} | {"chosen_length": torch.ones(2).long()}
    with pytest.raises(ValueError, match=message):
        lidr_loss(**{**good, **changes})


@pytest.mark.bad_input
def test_bad_input_of_the_log_probability():
    with pytest.raises(ValueError, match="row 0 has none"):
        sequence_log_prob(torch.zeros(1, 3, 4), torch.tensor([[2, -100, -100]]))  # nothing scores the first position
    with pytest.raises(ValueError, match="labels must have shape"):
        sequence_log_prob(torch.zeros(1, 3, 4), torch.zeros(1, 2).long())
    with pytest.raises(ValueError, match="logits must have shape"):
        sequence_log_prob(torch.zeros(3, 4), torch.zeros(1, 3).long())
