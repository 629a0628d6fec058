from __future__ import annotations

import copy

import pytest
import torch

from lightning_methods.ssl import LARS


def reference_step(p, g, v, *, lr, momentum, weight_decay, eta, bare):
    if not bare and p.norm() > 0 and g.norm() > 0:
        g = g + weight_decay * p
        g = g * eta * p.norm() / g.norm()
    v = momentum * v + g
    return p - lr * v, v


@pytest.mark.parametrize("exclude_1d", [True, False])
def test_is_the_loop(exclude_1d):
    torch.manual_seed(0)
    params = [torch.randn(4, 3), torch.randn(5), torch.randn(2, 3, 2, 2), torch.zeros(3, 2), torch.randn(2, 2)]
    ours = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = LARS(ours, lr=0.3, weight_decay=0.1, eta=0.02, exclude_1d=exclude_1d)
    velocities = [torch.zeros_like(p) for p in params]
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in params]
        gradients[4] = torch.zeros(2, 2)
        for p, g in zip(ours, gradients, strict=True):
            p.grad = g.clone()
        optimizer.step()
        for i, g in enumerate(gradients):
            params[i], velocities[i] = reference_step(
                params[i], g, velocities[i], lr=0.3, momentum=0.9, weight_decay=0.1, eta=0.02,
                bare=exclude_1d and params[i].dim() <= 1,
            )  # fmt: skip
    for p, expected in zip(ours, params, strict=True):
        torch.testing.assert_close(p.data, expected)


def test_vectors_have_a_rate_of_their_own():
    weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = LARS([weight, bias], lr=1.0, lr_1d=0.25, weight_decay=0.5)
    weight.grad, bias.grad = torch.ones(2, 2), torch.ones(2)
    optimizer.step()
    torch.testing.assert_close(bias.data, torch.full((2,), 0.75))  # no decay, no adaptation
    torch.testing.assert_close(weight.data, torch.full((2, 2), 0.98))
    grouped = LARS([{"params": [weight, bias], "weight_decay": 0.2}], lr=1.0, lr_1d=0.25)
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in grouped.param_groups] == [
        (1, 1.0, 0.2),
        (1, 0.25, 0.2),
    ]


def test_closure_missing_gradients_and_state():
    used, unused = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([used, unused], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4
    assert torch.equal(unused.data, torch.ones(2, 2))
    twin = torch.nn.Parameter(used.detach().clone())
    other = LARS([twin, torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step(closure)
    twin.grad = used.grad.clone()
    other.step()
    assert torch.equal(twin.data, used.data)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "change", [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -1.0}, {"eta": 0.0}, {"lr_1d": -1.0}]
)
def test_bad_input(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        LARS([torch.nn.Parameter(torch.ones(1))], **({"lr": 0.1} | change))


def test_a_decay_that_cancels_the_gradient():
    weight = torch.nn.Parameter(torch.ones(1, 1))
    optimizer = LARS([weight], lr=1.0, weight_decay=0.5)
    weight.grad = torch.full((1, 1), -0.5)
    optimizer.step()
    assert weight.item() == 1


def test_named_parameters():
    layer = torch.nn.Linear(2, 3)
    optimizer = LARS(layer.named_parameters(), lr=1.0, lr_1d=0.25)
    assert [(group["param_names"], group["lr"]) for group in optimizer.param_groups] == [
        (["weight"], 1.0),
        (["bias"], 0.25),
    ]
