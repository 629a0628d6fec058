"""Pipelines by name, two views, clean-weak-strong views, drawn shapes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from datamodules import (
    Cutout,
    DigitsDataModule,
    ImageFolderDataModule,
    MultiViewDataModule,
    PixelNoise,
    RandomAffineNoise,
    Subset,
    SyntheticShapesDataModule,
    TwoViewDataModule,
    build_transform,
    render_shapes,
)
from datamodules.views import AUGMENTATIONS
from lightning_methods.core.batches import MultiViewBatch, TwoViewBatch

from .test_vision import write_cifar, write_tree


def ready(dm):
    dm.prepare_data()
    dm.setup("fit")
    return dm


def batch_of(loader):
    return next(iter(loader))


# pipelines


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 32])
def test_pipelines_on_batches(name, channels, size):
    x = torch.rand(16, channels, size, size)
    view = build_transform(name, size, channels)
    assert view.batched
    torch.manual_seed(0)
    first = view(x)
    assert first.shape == (16, channels, size, size)
    assert first.dtype == torch.float32
    if name != "digits":
        assert first.min() >= -1e-5
        assert first.max() <= 1 + 1e-5
    assert not torch.equal(view(x), first)
    torch.manual_seed(0)
    assert torch.equal(pickle.loads(pickle.dumps(view))(x), first)


@pytest.mark.parametrize("name", [name for name in AUGMENTATIONS if name != "digits"])
def test_pipelines_on_single_images(name):
    view = build_transform(name, 24, batched=False)
    assert not view.batched
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))
    for item in (image, torch.rand(3, 50, 40)):
        x = view(item)
        assert type(x) is torch.Tensor
        assert x.shape == (3, 24, 24)
        assert x.min() >= -1e-5
        assert x.max() <= 1 + 1e-5


def test_both_forms_have_one_law():
    torch.manual_seed(0)
    image = torch.nn.functional.interpolate(torch.rand(1, 3, 6, 6), size=24, mode="bilinear")
    for name in AUGMENTATIONS[:4]:
        batch = build_transform(name, 24)(image.expand(1000, -1, -1, -1))
        single = build_transform(name, 24, batched=False)
        singles = torch.stack([single(image[0]) for _ in range(200)])
        for statistic in (
            lambda x: x.mean((1, 2, 3)),
            lambda x: x.std((1, 2, 3)),
            lambda x: (x[:, 0] - x[:, 1]).abs().mean((1, 2)),
            lambda x: x.diff(dim=3).abs().mean((1, 2, 3)),
        ):
            a, b = statistic(batch), statistic(singles)
            assert abs(a.mean() - b.mean()) < 4.5 * (a.var() / len(a) + b.var() / len(b)).sqrt()


def test_pipeline_options():
    x = torch.rand(64, 3, 32, 32)
    torch.manual_seed(0)
    plain = build_transform("moco_v2", 32)(x)
    torch.manual_seed(0)
    normalized = build_transform("moco_v2", 32, mean=[0.5] * 3, std=[0.25] * 3)(x)
    torch.testing.assert_close(normalized, (plain - 0.5) / 0.25)
    # crops of the whole image only: without colours it is the image or its mirror image
    whole = build_transform("simclr_hypersphere", 32, 1, scale=(1.0, 1.0))
    grey = torch.full((8, 1, 32, 32), 0.5)
    assert whole(grey).std(dim=(2, 3)).max() < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "moco"}, "moco_v2"),
        ({"size": 0}, "size"),
        ({"channels": 2}, "channels"),
        ({"mean": [0.5]}, "both"),
        ({"scale": (0.5, 0.2)}, "scale"),
        ({"name": "digits", "scale": (0.5, 1.0)}, "crops"),
    ],
)
def test_bad_pipelines(options, message):
    with pytest.raises(ValueError, match=message):
        build_transform(**{"name": "cifar", "size": 32, **options})


# two views


def test_two_views_of_digits():
    dm = ready(TwoViewDataModule())
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (1348, 449, 449)
    batches = list(dm.train_dataloader())
    assert len(batches) == 1348 // 32
    batch = batches[0]
    assert isinstance(batch, TwoViewBatch)
    assert batch.view1.shape == (32, 1, 8, 8)
    assert not torch.equal(batch.view1, batch.view2)
    assert torch.equal(dm.train_targets[batch.index], batch.label)
    x, y = batch_of(dm.memory_dataloader())
    torch.testing.assert_close(x, dm.train_set.source[dm.train_set.indices[:32]])
    assert torch.equal(y, dm.train_targets[:32])
    assert len(batch_of(dm.val_dataloader())) == 2
    # the views are of the image that the index names
    clean = dm.train_set.source[dm.train_set.indices[batch.index]]
    own = (batch.view1 - clean).flatten(1).norm(dim=1).mean()
    other = (batch.view1 - clean.roll(1, 0)).flatten(1).norm(dim=1).mean()
    assert own < other


def test_held_out_part():
    assert len(ready(TwoViewDataModule(val_fraction=0.5)).test_set) == 898
    dm = ready(TwoViewDataModule(val_size=100, test_size=200))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (1497, 100, 200)
    assert len(ready(TwoViewDataModule(test_size=450, val_size=0)).train_set) == 1347
    with pytest.raises(ValueError, match="val_fraction"):
        TwoViewDataModule(val_fraction=0.5, val_size=10)
    with pytest.raises(ValueError, match="val_fraction"):
        TwoViewDataModule(val_fraction=1.0)


def test_two_views_of_cifar(tmp_path):
    write_cifar(tmp_path, "cifar10")
    dm = ready(TwoViewDataModule("cifar10", root=str(tmp_path), augmentation="moco_v2"))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (100, 20, 20)
    assert dm.train_set.batchable
    batch = batch_of(dm.train_dataloader())
    assert batch.view2.shape == (32, 3, 32, 32)
    assert batch.view1.min() < -0.5  # normalised
    dm = ready(TwoViewDataModule("cifar10", root=str(tmp_path), val_fraction=0.2, normalize=False, image_size=16))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (80, 20, 20)
    assert batch_of(dm.train_dataloader()).view1.min() >= 0
    assert batch_of(dm.train_dataloader()).view1.shape[2:] == (16, 16)
    assert batch_of(dm.test_dataloader())[0].shape[2:] == (16, 16)
    other = ready(TwoViewDataModule("cifar10", root=str(tmp_path), normalize=([0.5] * 3, [0.5] * 3)))
    assert batch_of(other.test_dataloader())[0].abs().max() <= 1


def test_two_views_of_stl10_use_the_unlabeled_images(tmp_path):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    for split, n in (("train", 10), ("test", 10), ("unlabeled", 6)):
        np.zeros((n, 3, 96, 96), dtype=np.uint8).tofile(folder / f"{split}_X.bin")
        (np.arange(n, dtype=np.uint8) % 10 + 1).tofile(folder / f"{split}_y.bin")
    dm = ready(TwoViewDataModule("stl10", root=str(tmp_path), image_size=32, crop_scale=(0.2, 1.0), batch_size=8))
    assert len(dm.train_set) == 16
    batch = batch_of(dm.train_dataloader())
    assert batch.view1.shape == (8, 3, 32, 32)
    assert (dm.train_targets == -1).sum() == 6
    assert len(ready(TwoViewDataModule("stl10", root=str(tmp_path), splits="train", batch_size=8)).train_set) == 10


def test_two_views_of_folders_and_own_data_modules(tmp_path):
    write_tree(tmp_path, {"": 8})
    dm = ready(
        TwoViewDataModule("imagefolder", root=str(tmp_path), image_size=16, batch_size=4, class_ids=["cat", "dog"])
    )
    assert (len(dm.train_set), len(dm.test_set)) == (12, 4)
    assert not dm.train_set.batchable
    assert batch_of(dm.train_dataloader()).view1.shape == (4, 3, 16, 16)
    inner = ImageFolderDataModule(root=str(tmp_path), image_size=16)
    dm = ready(TwoViewDataModule(inner, augmentation="simclr", batch_size=4))
    assert batch_of(dm.train_dataloader()).view2.shape == (4, 3, 16, 16)
    with pytest.raises(ValueError, match="given"):
        TwoViewDataModule(inner, image_size=8)


def test_two_views_keep_modifiers_and_options():
    noisy = ready(
        TwoViewDataModule(augmentation=RandomAffineNoise(0, 0, 0), modifiers=[Subset(per_class=10), PixelNoise(0.3)])
    )
    assert len(noisy.train_set) == 100
    batch = batch_of(noisy.train_dataloader())
    torch.testing.assert_close(batch.view1, batch.view2, atol=1e-5, rtol=0)
    assert batch.view1.min() < 0
    dm = ready(TwoViewDataModule(DigitsDataModule(normalize=True, flatten=True, image_size=16)))
    batch = batch_of(dm.train_dataloader())
    assert batch.view1.shape == (32, 256)
    assert batch_of(dm.test_dataloader())[0].shape == (32, 256)
    assert abs(batch.view1.mean()) < 0.3
    shapes = ready(TwoViewDataModule("synthetic_shapes", batch_size=16))
    assert batch_of(shapes.train_dataloader()).view1.shape == (16, 3, 32, 32)


def test_views_are_reproducible_and_independent_of_workers():
    def views(workers, epoch):
        loader = ready(TwoViewDataModule(num_workers=workers, modifiers=[Subset(size=96)])).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return torch.cat([batch.view2 for batch in loader])

    assert torch.equal(views(0, 1), views(0, 1))
    assert torch.equal(views(0, 1), views(2, 1))
    assert not torch.equal(views(0, 1), views(0, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "cifar"}, "cifar10"),
        ({"augmentation": "moco"}, "moco_v2"),
        ({"augmentation": RandomAffineNoise(), "crop_scale": (0.2, 1.0)}, "crop_scale"),
        ({"class_ids": ["a"]}, "class_ids"),
        ({"normalize": ([0.5], [0.5])}, "normalize"),
        ({"splits": "train+unlabeled"}, "splits"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_two_views(options, message):
    with pytest.raises(ValueError, match=message):
        TwoViewDataModule(**options)


# clean, weak, strong


def test_three_views_of_digits():
    dm = ready(MultiViewDataModule(batch_size=600))
    assert len(dm.train_set) == len(dm.val_set) == len(dm.test_set) == 1797
    batches = list(dm.train_dataloader())
    assert len(batches) == 2
    batch = batches[0]
    assert isinstance(batch, MultiViewBatch)
    torch.testing.assert_close(batch.clean, dm.train_set.source[batch.index])
    assert torch.equal(batch.target, dm.train_targets[batch.index])
    weak, strong = ((view - batch.clean).flatten(1).norm(dim=1).mean() for view in (batch.weak, batch.strong))
    assert 0 < weak < strong
    x, y = batch_of(dm.val_dataloader())
    torch.testing.assert_close(x, dm.train_set.source[:600])
    assert torch.equal(y, dm.train_targets[:600])
    x, _ = batch_of(dm.train_eval_dataloader())
    torch.testing.assert_close(x, dm.train_set.source[:600])


def test_three_views_of_cifar(tmp_path):
    write_cifar(tmp_path, "cifar100")
    dm = ready(MultiViewDataModule("cifar20", root=str(tmp_path), batch_size=50))
    assert len(dm.train_set) == 120
    assert dm.num_classes == 20
    assert dm.cutout == 16
    assert dm.train_set.batchable
    batch = batch_of(dm.train_dataloader())
    for view in (batch.clean, batch.weak, batch.strong):
        assert view.shape == (50, 3, 32, 32)
    mean, std = torch.tensor(dm.dataset.mean)[:, None, None], torch.tensor(dm.dataset.std)[:, None, None]
    pixels = dm.train_set.source[dm.train_set.indices[batch.index]].float() / 255
    torch.testing.assert_close(batch.clean, (pixels - mean) / std)
    hole = (batch.strong == 0).all(1)  # the mean colour, after normalisation
    assert (hole.sum((1, 2)) > 0).float().mean() > 0.8
    assert hole.sum((1, 2)).max() <= 256
    none = ready(MultiViewDataModule("cifar20", root=str(tmp_path), cutout=0, splits="train"))
    assert (batch_of(none.train_dataloader()).strong == 0).all(1).sum() == 0
    assert (len(none.train_set), len(none.test_set)) == (100, 20)
    rand = ready(MultiViewDataModule("cifar20", root=str(tmp_path), strong="randaugment", batch_size=8))
    assert batch_of(rand.train_dataloader()).strong.shape == (8, 3, 32, 32)


def test_three_views_of_folders(tmp_path):
    write_tree(tmp_path, {"": 4}, size=(40, 30))
    dm = ready(MultiViewDataModule("imagefolder", root=str(tmp_path), size=16, class_ids=["dog", "emu"], batch_size=8))
    assert len(dm.train_set) == 8
    batch = batch_of(dm.train_dataloader())
    for view in (batch.clean, batch.weak, batch.strong):
        assert view.shape == (8, 3, 16, 16)
        assert torch.isfinite(view).all()
    assert len(ready(MultiViewDataModule("synthetic_shapes", batch_size=64)).train_set) == 2000


def test_number_of_strong_operations_and_pickling():
    dm = MultiViewDataModule(SyntheticShapesDataModule(num_images=80), num_strong_ops=0, cutout=0, batch_size=8)
    ready(pickle.loads(pickle.dumps(dm)))
    batch = batch_of(ready(dm).train_dataloader())
    # no operations: the strong view is a crop, whose colours are those of the image, as the weak view's
    assert batch.strong.amax((2, 3)).max() <= batch.clean.amax() + 1e-5
    pickle.loads(pickle.dumps(dm))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "mnist"}, "dataset"),
        ({"strong": "autoaugment"}, "strong"),
        ({"num_strong_ops": -1}, "num_strong_ops"),
        ({"cutout": -1}, "cutout"),
        ({"size": 0}, "image_size"),
        ({"class_ids": ["a"]}, "class_ids"),
    ],
)
def test_bad_three_views(options, message):
    with pytest.raises(ValueError, match=message):
        MultiViewDataModule(**options)


def test_more_than_there_is():
    with pytest.raises(ValueError, match="leaves no batch"):
        ready(MultiViewDataModule(batch_size=1798)).train_dataloader()


# shapes


def test_rendered_shapes_have_their_place_colour_and_size():
    n, size = 4, 64
    images = render_shapes(
        torch.arange(4),
        color=torch.tensor([[1.0, 0.5, 0.25]]).repeat(n, 1),
        radius=torch.full((n,), 0.25),
        center=torch.tensor([[0.3, 0.6]]).repeat(n, 1),
        size=size,
    )
    assert images.shape == (4, 3, size, size)
    torch.testing.assert_close(images[:, 1], images[:, 0] / 2)
    area = images[:, 0].sum((1, 2)) / size**2
    expected = torch.tensor([torch.pi, 4 * 0.85**2, 3 * 3**0.5 / 4, 2 * 1.2 - 0.36]) * 0.25**2
    assert ((area - expected).abs() < 0.06 * expected).all()
    y, x = torch.meshgrid(torch.arange(size) + 0.5, torch.arange(size) + 0.5, indexing="ij")
    for axis, place in ((x, 0.3), (y, 0.6)):
        centre = (images[[0, 1, 3], 0] * axis).sum((1, 2)) / images[[0, 1, 3], 0].sum((1, 2)) / size
        assert ((centre - place).abs() < 0.005).all()


def test_rendered_shapes_turn():
    options = {
        "color": torch.ones(1, 3),
        "radius": torch.tensor([0.3]),
        "center": torch.tensor([[0.5, 0.5]]),
        "size": 33,
    }
    upright = render_shapes(torch.tensor([3]), angle=torch.zeros(1), **options)
    quarter = render_shapes(torch.tensor([3]), angle=torch.tensor([torch.pi / 2]), **options)
    eighth = render_shapes(torch.tensor([3]), angle=torch.tensor([torch.pi / 4]), **options)
    torch.testing.assert_close(upright, quarter, atol=1e-3, rtol=0)
    assert (upright - eighth).abs().mean() > 0.02
    torch.testing.assert_close(render_shapes(torch.tensor([3]), **options), upright)
    with pytest.raises(ValueError, match=r"0\.\.3"):
        render_shapes(torch.tensor([4]), **options)
    with pytest.raises(ValueError, match="same number of rows"):
        render_shapes(torch.tensor([0, 1]), **options)


def test_cutout_is_reachable_from_torchvision_pipelines():
    pipeline = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), Cutout(4)])
    x = pipeline(Image.new("RGB", (8, 8), (255, 255, 255)))
    assert 0 < (x == 0).sum() <= 48
