"""Transforms of whole batches against torchvision's of single images, and what they promise by themselves."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as V

from datamodules import transforms as T

ALL = [
    T.Standardize([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]),
    T.Resize(12),
    T.RandomCropFlip(2, "reflect"),
    T.RandomAffineNoise(brightness=0.2, noise=0.1),
    T.Cutout(4),
    T.RandomFactorResizedCrop(2),
    T.RandomResizedCrop(12, interpolation="bicubic"),
    T.RandomColor(blur_p=0.5, solarize_p=0.2),
    T.StrongAugment(4),
    T.ZCA(torch.rand(20, 3, 16, 16)),
]


@pytest.fixture
def images():
    return torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("transform", ALL, ids=lambda t: type(t).__name__)
def test_batches_single_images_and_pickling(transform, images):
    assert transform.batched
    before = images.clone()
    batch = transform(images)
    assert torch.equal(images, before)
    single = transform(images[0])
    assert single.shape == batch[0].shape
    assert torch.isfinite(batch).all()
    again = pickle.loads(pickle.dumps(transform))
    torch.manual_seed(0)
    expected = transform(images)
    torch.manual_seed(0)
    assert torch.equal(again(images), expected)
    assert repr(transform)


@pytest.mark.parametrize(
    "transform",
    [ALL[2], ALL[3], ALL[4], T.RandomResizedCrop(16), T.RandomColor(jitter_p=1.0, grey_p=0.0), T.StrongAugment(4)],
    ids=lambda t: type(t).__name__,
)
def test_every_image_of_a_batch_has_its_own_draw(transform):
    same = torch.rand(1, 3, 16, 16).expand(32, -1, -1, -1)
    assert len(transform(same).flatten(1).round(decimals=5).unique(dim=0)) > 16


# crops


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [8, 16, 24])
def test_resized_crop_is_torchvisions(images, interpolation, size):
    crop = T.RandomResizedCrop(size, interpolation=interpolation)
    boxes = crop.boxes(len(images), 16, 16)
    ours = crop.resized(images, *boxes)
    for image, result, (top, left, h, w) in zip(images, ours, boxes.T.tolist(), strict=True):
        theirs = V.resized_crop(image, top, left, h, w, [size, size], InterpolationMode(interpolation), antialias=True)
        torch.testing.assert_close(result, theirs, atol=2e-5, rtol=0)


def test_crops_are_drawn_by_torchvisions_law():
    torch.manual_seed(0)
    n = 20_000
    _, _, h, w = T.RandomResizedCrop(32).boxes(n, 32, 40).double()
    theirs = v2.RandomResizedCrop(32)
    drawn = [theirs.make_params([torch.zeros(3, 32, 40)]) for _ in range(4000)]
    for ours, key in ((h, "height"), (w, "width")):
        sample = torch.tensor([float(draw[key]) for draw in drawn]).double()
        assert abs(ours.mean() - sample.mean()) < 4 * sample.std() / len(drawn) ** 0.5
        assert abs(ours.std() - sample.std()) < 0.3
    top, left, h, w = T.RandomResizedCrop(32).boxes(n, 32, 40)
    assert (top >= 0).all()
    assert (top + h <= 32).all()
    assert (left >= 0).all()
    assert (left + w <= 40).all()
    assert ((top == 0) & (h < 32)).any()
    assert ((top + h == 32) & (h < 32)).any()


def test_very_long_images_fall_back_to_the_middle():
    top, left, h, w = T.RandomResizedCrop(8, scale=(1.0, 1.0)).boxes(3, 10, 100)
    assert (top == 0).all()
    assert (h == 10).all()
    assert w.unique().tolist() == [13]
    assert left.unique().tolist() == [43]


def test_crop_flip_gives_windows_of_the_padded_image(images):
    torch.manual_seed(0)
    out = T.RandomCropFlip(padding=3)(images)
    padded = F.pad(images, [3] * 4)
    windows = padded.unfold(2, 16, 1).unfold(3, 16, 1).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
    straight = (windows == out[:, None]).flatten(2).all(2).any(1)
    mirrored = (windows == out[:, None].flip(-1)).flatten(2).all(2).any(1)
    assert (straight | mirrored).all()
    assert straight.any()
    assert mirrored.any()
    shifted = T.RandomCropFlip(padding=1, flip=False)(images)
    windows = F.pad(images, [1] * 4).unfold(2, 16, 1).unfold(3, 16, 1).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
    assert (windows == shifted[:, None]).flatten(2).all(2).any(1).all()


def test_reflection_padding_brings_in_no_black():
    assert T.RandomCropFlip(4, "reflect")(torch.ones(50, 3, 16, 16)).min() == 1
    assert T.RandomCropFlip(4)(torch.ones(50, 3, 16, 16)).min() == 0


def test_affine_without_range_changes_nothing(images):
    still = T.RandomAffineNoise(degrees=0, translate=0, scale=0)
    torch.testing.assert_close(still(images), images, atol=1e-5, rtol=0)


def test_affine_shifts_by_at_most_its_share():
    dot = torch.zeros(200, 1, 17, 17)
    dot[:, :, 8, 8] = 1
    out = T.RandomAffineNoise(degrees=0, translate=2 / 17, scale=0)(dot)
    y, x = torch.meshgrid(torch.arange(17.0), torch.arange(17.0), indexing="ij")
    for axis in (x, y):
        centre = (out[:, 0] * axis).sum((1, 2)) / out.sum((1, 2, 3))
        assert (centre - 8).abs().max() <= 2 + 1e-4
        assert (centre - 8).abs().max() > 1.5


# colours


@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high"),
    [
        (T.adjust_brightness, V.adjust_brightness, 0.2, 1.8),
        (T.adjust_contrast, V.adjust_contrast, 0.2, 1.8),
        (T.adjust_saturation, V.adjust_saturation, 0.2, 1.8),
        (T.adjust_hue, V.adjust_hue, -0.5, 0.5),
        (T.solarize, V.solarize, 0.0, 1.0),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_colours_are_torchvisions(images, ours, theirs, low, high, channels):
    images = images[:, :channels].clone()
    images[0] = 0.3  # grey: no hue
    factors = torch.linspace(low, high, len(images))
    result = ours(images, factors)
    for image, changed, factor in zip(images, result, factors.tolist(), strict=True):
        torch.testing.assert_close(changed, theirs(image, factor), atol=2e-5, rtol=0)


def test_grey_and_blur_are_torchvisions(images):
    torch.testing.assert_close(T.grey(images), V.rgb_to_grayscale(images), atol=1e-5, rtol=0)
    sigma = torch.linspace(0.1, 2, len(images))
    ours = T.gaussian_blur(images, sigma, 6)
    for image, blurred, s in zip(images, ours, sigma.tolist(), strict=True):
        torch.testing.assert_close(blurred, V.gaussian_blur(image, [13, 13], [s, s]), atol=1e-5, rtol=0)


def test_color_probabilities(images):
    torch.manual_seed(0)
    many = images.repeat(100, 1, 1, 1)
    none = T.RandomColor(jitter_p=0.0, grey_p=0.0)
    assert torch.equal(none(many), many)
    grey = T.RandomColor(jitter_p=0.0, grey_p=0.2)(many)
    is_grey = ((grey[:, 0] - grey[:, 1]).abs().amax((1, 2)) < 1e-6).float().mean()
    assert abs(is_grey - 0.2) < 0.03
    for options in ({"blur_p": 0.3}, {"solarize_p": 0.3}):
        changed = T.RandomColor(jitter_p=0.0, grey_p=0.0, **options)(many)
        assert abs((changed != many).flatten(1).any(1).float().mean() - 0.3) < 0.04
    jittered = T.RandomColor(jitter_p=0.8, grey_p=0.0)(many)
    assert abs((jittered != many).flatten(1).any(1).float().mean() - 0.8) < 0.04


# strong operations


def _strength(n):
    return torch.linspace(0, 1, n)


@pytest.mark.parametrize("operation", list(T.StrongAugment.operations))
def test_strong_operations_are_torchvisions(images, operation):
    # Pixels as they are in files: multiples of 1/255, for which equalize and posterize are defined.
    images = (images**2 * 255).round() / 255
    levels = (images * 255).round().to(torch.uint8)
    u = _strength(len(images))
    ours = T.StrongAugment.operations[operation](images, u)
    assert ours.shape == images.shape
    assert ours.min() >= 0
    assert ours.max() <= 1
    factor = (0.05 + 0.9 * u).tolist()
    reference = {
        "identity": lambda i: images[i],
        "autocontrast": lambda i: V.autocontrast(images[i]),
        "equalize": lambda i: V.equalize(levels[i]).float() / 255,
        "solarize": lambda i: V.solarize(images[i], min(float(u[i]) * 256 / 255, 1.0)),
        "color": lambda i: V.adjust_saturation(images[i], factor[i]),
        "contrast": lambda i: V.adjust_contrast(images[i], factor[i]),
        "brightness": lambda i: V.adjust_brightness(images[i], factor[i]),
        "sharpness": lambda i: V.adjust_sharpness(images[i], factor[i]),
        "posterize": lambda i: V.posterize(levels[i], min(4 + int(5 * u[i]), 8)).float() / 255,
    }
    if operation in reference:
        rows = range(len(images) - 1) if operation == "solarize" else range(len(images))
        for i in rows:
            torch.testing.assert_close(ours[i], reference[operation](i), atol=2e-5, rtol=0)
        return
    signed = 2 * u - 1
    for i in range(len(images)):
        s = float(signed[i])
        if operation == "rotate":
            # The same turn either way round: the law is symmetric.
            candidates = [V.rotate(images[i], 30 * s), V.rotate(images[i], -30 * s)]
        elif operation.startswith("shear"):
            angle = math.degrees(math.atan(0.1 * s))
            shears = [[angle, 0.0], [-angle, 0.0]] if operation == "shear_x" else [[0.0, angle], [0.0, -angle]]
            candidates = [V.affine(images[i], 0.0, [0, 0], 1.0, shear) for shear in shears]
        else:
            shift = round(0.1 * s * 16)
            moves = [[shift, 0], [-shift, 0]] if operation == "translate_x" else [[0, shift], [0, -shift]]
            candidates = [V.affine(images[i], 0.0, move, 1.0, [0.0, 0.0]) for move in moves]
        # Nearest neighbours may differ where a pixel lies half way between two.
        assert max(float((ours[i] == candidate).float().mean()) for candidate in candidates) > 0.93


def test_strong_augment_draws_operations_evenly_with_replacement(images, monkeypatch):
    assert torch.equal(T.StrongAugment(0)(images), images)
    marks = {
        name: lambda x, u, i=i: torch.cat([x[:, 1:], torch.full_like(x[:, :1], i)], 1) for i, name in enumerate("abcd")
    }
    monkeypatch.setattr(T.StrongAugment, "operations", marks)
    torch.manual_seed(0)
    drawn = T.StrongAugment(2)(torch.zeros(4000, 2, 1, 1)).flatten(1).long()
    share = torch.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16) / 4000
    assert ((share - 1 / 16).abs() < 0.015).all()


def test_equalize_leaves_flat_images():
    flat = torch.full((2, 3, 8, 8), 0.25)
    assert torch.equal(T.StrongAugment.operations["equalize"](flat, _strength(2)), flat)
    assert torch.equal(T.StrongAugment.operations["autocontrast"](flat, _strength(2)), flat)


# cutout, mosaics, whitening


def test_cutout_cuts_one_square():
    torch.manual_seed(0)
    out = T.Cutout(6)(torch.ones(500, 3, 20, 20))
    holes = out[:, 0] == 0
    assert torch.equal(out == 0, holes[:, None].expand_as(out))
    rows, columns = holes.any(2).sum(1), holes.any(1).sum(1)
    assert torch.equal(holes.sum((1, 2)), rows * columns)
    assert rows.max() == 6
    assert rows.min() == 1
    inner = holes[:, 6:14, 6:14].flatten(1).any(1) & ~holes[:, 0].any(1) & ~holes[:, :, 0].any(1)
    inner &= ~holes[:, -1].any(1) & ~holes[:, :, -1].any(1)
    assert torch.equal(rows[inner], columns[inner])
    assert (T.Cutout(6, random_side=False)(torch.ones(50, 1, 40, 40)) == 0).flatten(1).sum(1).max() == 36


def test_factor_crop_takes_tiles():
    tiles = torch.arange(4.0).view(1, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.manual_seed(0)
    out = T.RandomFactorResizedCrop(2)(tiles.expand(4000, -1, -1, -1))
    whole = (out == tiles).flatten(1).all(1)
    assert abs(whole.float().mean() - 0.25) < 0.03
    rest = out[~whole].flatten(1)
    assert (rest == rest[:, :1]).all()
    share = torch.bincount(rest[:, 0].long(), minlength=4) / len(rest)
    assert ((share - 0.25).abs() < 0.03).all()
    assert torch.equal(T.RandomFactorResizedCrop(1)(tiles), tiles)
    with pytest.raises(ValueError, match="multiples of factor=3"):
        T.RandomFactorResizedCrop(3)(tiles)


def test_zca_whitens_and_stays_close():
    torch.manual_seed(0)
    images = (torch.randn(3000, 12) @ torch.randn(12, 12)).view(-1, 3, 2, 2)
    white = T.ZCA(images, eps=1e-6, chunk_size=700)(images).flatten(1)
    torch.testing.assert_close(torch.cov(white.T), torch.eye(12), atol=1e-3, rtol=0)
    torch.testing.assert_close(white.mean(0), torch.zeros(12), atol=1e-4, rtol=0)
    w = T.ZCA(images).whitening
    torch.testing.assert_close(w, w.T)  # symmetric: of all whitenings the closest to the images
    values = torch.linalg.eigvalsh(torch.cov(images.flatten(1).T.double()))
    torch.testing.assert_close(
        torch.linalg.eigvalsh(w.double()).sort().values, (values + 0.1).rsqrt().sort().values, atol=1e-4, rtol=1e-4
    )


def test_standardize_and_norm():
    x = torch.rand(5, 3, 4, 4)
    torch.testing.assert_close(
        T.Standardize([0.1, 0.2, 0.3], [1.0, 2.0, 4.0])(x), V.normalize(x, [0.1, 0.2, 0.3], [1.0, 2.0, 4.0])
    )
    scaled = T.ScaleToNorm(x.mean(0), 8.0)(x)
    torch.testing.assert_close(scaled.flatten(1).norm(dim=1), torch.full((5,), 8.0))
    assert torch.equal(T.ScaleToNorm(torch.zeros(2), 1.0)(torch.zeros(1, 2)), torch.zeros(1, 2))


def test_chain_is_batched_only_if_all_are():
    batched = T.Chain(T.Resize(4), None, T.Flatten())
    assert batched.batched
    assert batched(torch.rand(2, 3, 8, 8)).shape == (2, 48)

    mixed = T.Chain(v2.ToImage(), T.Resize(4), T.Flatten())
    assert not mixed.batched
    assert mixed(torch.rand(3, 8, 8)).shape == (48,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: T.Standardize([0.5], [0.0]), "std"),
        (lambda: T.Standardize([0.5, 0.5], [1.0]), "shape"),
        (lambda: T.RandomCropFlip(-1), "padding"),
        (lambda: T.RandomCropFlip(1, "mirror"), "pad_mode"),
        (lambda: T.RandomAffineNoise(scale=1.0), "scale"),
        (lambda: T.RandomAffineNoise(noise=-1.0), "noise"),
        (lambda: T.Cutout(0), "length"),
        (lambda: T.RandomFactorResizedCrop(0), "factor"),
        (lambda: T.RandomResizedCrop(0), "size"),
        (lambda: T.RandomResizedCrop(8, scale=(0.0, 1.0)), "scale"),
        (lambda: T.RandomResizedCrop(8, ratio=(2.0, 1.0)), "ratio"),
        (lambda: T.RandomResizedCrop(8, interpolation="nearest"), "interpolation"),
        (lambda: T.RandomResizedCrop(8, flip=2.0), "flip"),
        (lambda: T.RandomColor((0.4, 0.4, 0.4, 0.6)), "hue"),
        (lambda: T.RandomColor((-0.4, 0.4, 0.4, 0.1)), "jitter"),
        (lambda: T.RandomColor(grey_p=1.1), "grey_p"),
        (lambda: T.StrongAugment(-1), "num_ops"),
        (lambda: T.ZCA(torch.rand(1, 3, 4, 4)), "at least two"),
        (lambda: T.ZCA(torch.rand(5, 4)), "images"),
        (lambda: T.ZCA(torch.rand(5, 3, 4, 4), eps=0.0), "eps"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
