from __future__ import annotations

import math
import pickle

import pytest
import torch

from lightning_methods.core.schedules import WarmupSchedule, warmup_constant, warmup_cosine, warmup_linear


def rates(make, steps: int, lr: float = 2.0) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine():
    seen = rates(lambda o: warmup_cosine(o, 4, 24, min_ratio=0.1), 26)
    assert seen[:5] == pytest.approx([0, 0.5, 1.0, 1.5, 2.0])
    expected = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * (s - 4) / 20)) / 2) for s in range(4, 24)]
    assert seen[4:24] == pytest.approx(expected)
    assert seen[24:] == pytest.approx([0.2, 0.2])  # and stays there


def test_linear_and_constant():
    assert rates(lambda o: warmup_linear(o, 2, 6), 7) == pytest.approx([0, 1, 2, 1.5, 1, 0.5, 0])
    assert rates(lambda o: warmup_constant(o, 2, start_factor=0.5), 4) == pytest.approx([1, 1.5, 2, 2])
    assert rates(lambda o: warmup_linear(o, 0, 4), 4) == pytest.approx([2, 1.5, 1, 0.5])


def test_warmup_as_a_share():
    assert rates(lambda o: warmup_constant(o, 0.5, 8), 6) == pytest.approx([0, 0.5, 1, 1.5, 2, 2])


def test_every_group_keeps_its_own_rate():
    a, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.1}], lr=9.0)
    scheduler = warmup_cosine(optimizer, 2, 4)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])


def test_total_is_read_when_it_is_there():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = warmup_cosine(optimizer, 0.25)
    assert scheduler.total_steps is None
    scheduler.total_steps = 8
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


def test_state_and_pickle():
    def make():
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    optimizer, other = make(), make()
    first, second = warmup_cosine(optimizer, 2, 10), warmup_cosine(other, 2)
    for _ in range(5):
        optimizer.step()
        first.step()
    other.load_state_dict(optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    for o, s in ((optimizer, first), (other, second)):
        o.step()
        s.step()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert pickle.loads(pickle.dumps(first)).factor(3) == first.factor(3)


@pytest.mark.bad_input
def test_bad_input():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(ValueError, match="shape must be one of"):
        WarmupSchedule(optimizer, "cosin")
    with pytest.raises(ValueError, match="whole number"):
        warmup_cosine(optimizer, 1.5, 10)
    with pytest.raises(ValueError, match="warmup"):
        warmup_cosine(optimizer, -1, 10)
    scheduler = warmup_cosine(optimizer, 0)
    optimizer.step()
    with pytest.raises(ValueError, match="length of the run"):
        scheduler.step()
