from __future__ import annotations

import math

import pytest
import torch

from lightning_methods.gift import DiffAugment
from lightning_methods.nn import ConvNet


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def augment(strategy: str, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return DiffAugment(strategy)(x, generator(seed))


def test_convnet_is_the_shared_one():
    from lightning_methods import gift

    assert gift.ConvNet is ConvNet


@pytest.mark.parametrize("strategy", ["color", "crop", "cutout", "flip", "scale", "rotate", DiffAugment().strategy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shape_dtype_draws_and_eval_mode(strategy, dtype):
    x = torch.randn(16, 3, 12, 8, generator=generator(1)).to(dtype)
    out = augment(strategy, x)
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert torch.equal(out, augment(strategy, x))
    assert not torch.equal(out, augment(strategy, x, seed=1))
    module = DiffAugment(strategy).eval()
    assert module(x) is x


def test_every_image_has_its_own_draw():
    x = torch.randn(1, 3, 16, 16, generator=generator(1)).expand(64, -1, -1, -1)
    for strategy in ("color", "crop", "cutout", "scale", "rotate"):
        assert len(augment(strategy, x).flatten(1).unique(dim=0)) > 8


def test_flip_mirrors_about_half_of_the_images():
    x = torch.randn(1000, 1, 2, 4, generator=generator(1))
    flipped = (augment("flip", x) == x.flip(3)).flatten(1).all(1)
    kept = (augment("flip", x) == x).flatten(1).all(1)
    assert (flipped ^ kept).all()
    assert 400 < flipped.sum() < 600


def test_crop_shifts_by_whole_pixels_and_pads_with_zeros():
    x = torch.rand(400, 2, 8, 8, generator=generator(1)) + 1  # 12.5 % of 8 is one pixel
    out = augment("crop", x)
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
    shifts = torch.stack([padded[:, :, i : i + 8, j : j + 8] for i in range(3) for j in range(3)])
    distance = (shifts - out).abs().amax(dim=(2, 3, 4))
    assert (distance.amin(dim=0) < 1e-5).all()
    counts = distance.argmin(dim=0).bincount(minlength=9)
    assert (counts > 20).all()


def test_cutout_removes_a_square_of_half_the_side():
    out = augment("cutout", torch.ones(500, 3, 8, 8))
    assert torch.equal(out, out[:, :1].expand_as(out))  # the same square in all channels
    rows, columns = ((out[:, 0] == 0).any(dim).sum(1) for dim in (2, 1))
    assert torch.equal((out[:, 0] == 0).flatten(1).sum(1), rows * columns)
    assert rows.max() == columns.max() == 4
    assert rows.min() >= 2  # its centre is in the image


def test_scale_and_rotate_keep_the_centre_and_their_range():
    x = torch.zeros(300, 1, 33, 33)
    x[:, :, 16, 16] = 1
    for strategy in ("scale", "rotate"):
        assert (augment(strategy, x)[:, 0, 16, 16] > 0.99).all()
    # A dot at 10 pixels to the right of the centre: where does it go?
    x = torch.zeros(2000, 1, 33, 33)
    x[:, :, 15:18, 25:28] = 1
    position = torch.arange(33.0) - 16
    for strategy in ("scale", "rotate"):
        out = augment(strategy, x)[:, 0]
        mass = out.sum((1, 2))
        right, down = ((out.sum(dim) * position).sum(1) / mass for dim in (1, 2))
        if strategy == "scale":
            assert 10 / 1.2 - 0.2 < right.min() < 9
            assert 11.5 < right.max() < 12.2
            assert down.abs().max() < 0.2
        else:
            angle = torch.rad2deg(torch.atan2(down, right))
            assert 14 < angle.max() < 15.5
            assert -15.5 < angle.min() < -14
            torch.testing.assert_close(torch.hypot(right, down), torch.full_like(right, 10.0), atol=0.2, rtol=0)


def test_rotation_is_one_on_the_pixels_of_an_oblong_image():
    x = torch.zeros(200, 1, 17, 65)
    x[:, :, 7:10, 41:44] = 1  # 10 pixels to the right
    out = augment("rotate", x)[:, 0]
    right = (out.sum(1) * (torch.arange(65.0) - 32)).sum(1) / out.sum((1, 2))
    down = (out.sum(2) * (torch.arange(17.0) - 8)).sum(1) / out.sum((1, 2))
    torch.testing.assert_close(torch.hypot(right, down), torch.full_like(right, 10.0), atol=0.2, rtol=0)
    assert down.abs().max() > 2


def test_color_ranges():
    x = torch.zeros(4000, 3, 4, 4)
    x[:, 0] = 1
    out = augment("color", x)
    gray = out.mean(1)
    assert -0.5 <= (gray.mean((1, 2)) - 1 / 3).min() < -0.45  # brightness
    assert 0.45 < (gray.mean((1, 2)) - 1 / 3).max() <= 0.5
    spread = (out[:, 0] - out[:, 1]).mean((1, 2))  # saturation times contrast: 1 * 2 * 1.5 at most
    assert spread.min() >= 0
    assert 2.5 < spread.max() <= 3
    torch.testing.assert_close(spread.mean(), torch.tensor(1.0), atol=0.05, rtol=0)


def test_a_grey_image_has_no_saturation():
    x = torch.rand(50, 1, 4, 4, generator=generator(1))
    out = augment("color", x)
    ratio = (out.std((1, 2, 3)) / x.std((1, 2, 3))).sort().values
    assert 0.5 <= ratio[0] < 0.6
    assert 1.4 < ratio[-1] <= 1.5


def test_one_geometric_transform_for_the_whole_batch():
    # Crop moves the corner's image by whole pixels; scale and rotate do not: never both in one batch.
    x = torch.rand(64, 1, 16, 16, generator=generator(1)) + 1
    kinds = set()
    for seed in range(30):
        out = augment("crop_scale", x, seed)
        whole = torch.stack(
            [(out[:, :, 6:10, 6:10] - x[:, :, 6 + i : 10 + i, 6 + j : 10 + j]).abs().amax((1, 2, 3)) < 1e-4
             for i in range(-2, 3) for j in range(-2, 3)]
        ).any(0)  # fmt: skip
        assert whole.all() or whole.float().mean() < 0.2
        kinds.add(bool(whole.all()))
    assert kinds == {True, False}


def test_gradient_flows():
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    augment(DiffAugment().strategy, x).sum().backward()
    assert math.isfinite(x.grad.sum())
    assert x.grad.abs().sum() > 0


@pytest.mark.bad_input
def test_bad_input():
    with pytest.raises(ValueError, match=r"one of 'color', 'crop', .* Did you mean 'rotate'"):
        DiffAugment("color_rotat")
    with pytest.raises(ValueError, match=r"x must have shape \[batch, channels, height, width\], got \[3, 8, 8\]"):
        DiffAugment()(torch.zeros(3, 8, 8))
    with pytest.raises(ValueError, match="floating point"):
        DiffAugment()(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
