from __future__ import annotations

import itertools
import math

import pytest
import torch

from datamodules import ThreeMoonsDataModule
from datamodules.dynamics import common_period, moon_periods, moon_positions


def ready(**options) -> ThreeMoonsDataModule:
    data = ThreeMoonsDataModule(**{"block_size": 180, "batch_size": 16, "steps_per_epoch": 4, "num_val": 8, **options})
    data.setup("fit")
    return data


def batches(data: ThreeMoonsDataModule) -> torch.Tensor:
    return torch.cat([x for x, _ in data.train_dataloader()])


# periods


def test_the_held_out_periods_are_among_the_simplest_and_not_trained_on():
    train, held_out = moon_periods()
    assert held_out == (1.0, 2.0, 3.0)
    assert len(train) == len(set(train)) == 8
    assert held_out not in train
    candidates = list(itertools.combinations([0.5 * k for k in range(1, 8)], 3))
    assert set(train) < set(candidates)
    kept = sorted(common_period(triple) for triple in (*train, held_out))
    assert kept == sorted(map(common_period, candidates))[: len(candidates) // 4 + 1]
    assert common_period(held_out) == max(kept) == 6


def test_common_period():
    assert common_period((0.5, 1.5, 2.0)) == 6
    assert common_period((1.0, 2.0, 3.0)) == 6
    assert common_period((3.5, 0.5, 1.0)) == 7


# trajectories


def test_moons_are_on_circles_and_come_back():
    time = torch.arange(0, 12, 0.25)[None]
    position = moon_positions(time, torch.tensor([[1.0, 2.0, 3.0]]))
    assert position.shape == (1, 48, 6)
    assert position.dtype == torch.float32
    moons = position.unflatten(2, (3, 2))
    torch.testing.assert_close(moons.norm(dim=3), torch.ones(1, 48, 3))
    for moon, period in enumerate((1, 2, 3)):
        steps = 4 * period
        torch.testing.assert_close(moons[:, steps:, moon], moons[:, :-steps, moon], atol=1e-5, rtol=0)
        assert (moons[:, steps // 2, moon] + moons[:, 0, moon]).abs().max() < 1e-5  # opposite after half of it
    # (sin, cos) of 2 pi t / p + 0.3, one moon after the other
    expected = [math.sin(2 * math.pi * 0.25 / 2 + 0.3), math.cos(2 * math.pi * 0.25 / 2 + 0.3)]
    torch.testing.assert_close(position[0, 1, 2:4], torch.tensor(expected))


def test_seen_from_a_planet_the_others_are_relative_to_the_last():
    time, periods = torch.rand(2, 30) * 50, torch.tensor([[1.0, 2.0, 3.0], [0.5, 1.0, 2.0]])
    sun = moon_positions(time, periods).unflatten(2, (3, 2))
    planet = moon_positions(time, periods, "planet").unflatten(2, (3, 2))
    torch.testing.assert_close(planet[:, :, :2], sun[:, :, :2] - sun[:, :, 2:], atol=1e-6, rtol=0)
    torch.testing.assert_close(planet[:, :, 2], sun[:, :, 2])


# windows


def periods_of(x: torch.Tensor, rate: float) -> tuple[float, ...]:
    """The periods that a window's angles turn with."""
    sine, cosine = x.unflatten(1, (3, 2)).double().unbind(dim=2)
    angle = torch.atan2(
        sine[1:] * cosine[:-1] - cosine[1:] * sine[:-1], cosine[1:] * cosine[:-1] + sine[1:] * sine[:-1]
    )
    return tuple(round(2 * 2 * math.pi / (rate * float(step))) / 2 for step in angle.mean(dim=0))


def test_training_has_the_eight_triples_and_evaluation_the_ninth():
    data = ready(steps_per_epoch=10)
    assert data.rate == pytest.approx(10)
    seen = {periods_of(x, data.rate) for x in batches(data)}
    assert seen == set(moon_periods()[0])
    for part in (data.val_set, data.test_set):
        assert {periods_of(part[row][0], data.rate) for row in range(8)} == {(1.0, 2.0, 3.0)}


def test_targets_are_the_next_positions():
    x, y = next(iter(ready().train_dataloader()))
    assert x.shape == y.shape == (16, 180, 6)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert not torch.equal(x[:, -1], y[:, -1])


def test_windows_are_new_in_every_epoch_and_a_function_of_the_seed():
    data = ready()
    loader = data.train_dataloader()
    one, two = (torch.cat([x for x, _ in loader]) for _ in range(2))
    assert len(one) == 64
    assert not torch.equal(one, two)
    assert torch.equal(batches(ready()), one)
    assert torch.equal(batches(ready(num_workers=1)), one)
    assert not torch.equal(batches(ready(seed=1)), one)
    first, again = (torch.cat([x for x, _ in data.val_dataloader()]) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(data.train_set[3][0], data.train_set.__getitems__([3])[0][0])


def test_the_positions_between_the_longest_and_the_common_period():
    data = ThreeMoonsDataModule(block_size=800)
    assert data.rate == pytest.approx(800 / 6 / 3)
    start, stop = data.before_lcm
    assert start == round(1.1 * 3 * data.rate)
    assert stop == round(6 * data.rate)
    assert ThreeMoonsDataModule(block_size=160).before_lcm == (29, 53)
    # at the first of them every moon has been where it is, at the last one not yet all together
    x = ready().val_set[0][0]
    start, stop = ready().before_lcm
    apart = torch.cdist(x[start:stop], x[: stop - 1])
    assert (apart[torch.arange(stop - start)[:, None] + start > torch.arange(stop - 1) + 5] > 0.1).all()
    for moon in range(3):
        one = x[:, 2 * moon : 2 * moon + 2]
        assert (torch.cdist(one[start : start + 1], one[: start - 5]).min()) < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size"),
        ({"block_size": 5000}, "block_size"),
        ({"min_periods": 0}, "min_periods"),
        ({"observer": "moon"}, "observer"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
        ({"num_val": 0}, "num_val"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ThreeMoonsDataModule(**options)


def test_validation_and_test_have_windows_of_their_own():
    data = ThreeMoonsDataModule(block_size=30, batch_size=4, steps_per_epoch=1, num_val=4)
    data.setup()
    val, test = (next(iter(loader))[0] for loader in (data.val_dataloader(), data.test_dataloader()))
    assert not torch.equal(val, test)
