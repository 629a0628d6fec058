"""Data modules and modifiers can be written down: jsonargparse understands their arguments."""

from __future__ import annotations

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning import LightningDataModule

import datamodules


def build(cls: str, /, **arguments):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    config = parser.parse_object({"data": {"class_path": f"datamodules.{cls}", "init_args": arguments}})
    return parser.instantiate_classes(config).data


def piece(cls: str, /, **arguments):
    return {"class_path": f"datamodules.{cls}", "init_args": arguments}


def test_digits_with_modifiers():
    dm = build(
        "DigitsDataModule",
        normalize=8.0,
        flatten=True,
        train_size=0.5,
        val_size=100,
        classes=[1, 2, 3],
        modifiers=[piece("Subset", per_class=5), piece("LabelNoise", rate=0.2), piece("WithIndex")],
        eval_modifiers=[piece("PixelNoise", std=0.1)],
        train_transform=piece("RandomCropFlip", padding=1, flip=False),
    )
    assert dm.normalize == 8.0
    dm.setup("fit")
    assert next(iter(dm.train_dataloader())).x.shape == (15, 64)
    assert dm.train_size == 0.5
    assert dm.val_size == 100
    assert build("DigitsDataModule", normalize=True).normalize is True
    assert build("DigitsDataModule", normalize="standardize").normalize == "standardize"


def test_samplers():
    assert build("DigitsDataModule", sampler="sqrt").sampler == "sqrt"
    dm = build(
        "DigitsDataModule", sampler={"class_path": "torch.utils.data.RandomSampler", "init_args": {"replacement": True}}
    )
    dm.setup("fit")
    rows = list(dm.train_dataloader().sampler)
    assert len(rows) == 1079
    assert len(set(rows)) < 900
    with pytest.raises(Exception, match="sampler"):
        build("DigitsDataModule", sampler="balanced")


def test_images():
    dm = build("CIFARDataModule", name="cifar100", normalize=[[0.5, 0.5, 0.5], [0.2, 0.2, 0.2]], pad_mode="reflect")
    torch.testing.assert_close(dm.normalizer().std.flatten(), torch.full((3,), 0.2))
    assert build("CIFARDataModule", normalize=False, root="elsewhere").root == "elsewhere"
    assert build("ImageNetDataModule", list_files={"train": "a.txt"}, image_size=64).size == 64
    assert build("TinyImageNetDataModule", class_ids=["n01443537"]).class_ids == ["n01443537"]
    assert build("WaterbirdsDataModule", root="data").augment is False
    table = build("ImageTableDataModule", split_column="split", split_values={"train": 0, "test": "2"})
    assert table.split_values == {"train": "0", "test": "2"}
    assert build("SpuriousDigitsDataModule", correlation=0.95, train_size=1000).correlation == 0.95
    assert build("TorchvisionDataModule", name="stl10", splits="train+unlabeled").splits == "train+unlabeled"
    assert build("SyntheticShapesDataModule", num_images=100).num_images == 100


def test_distilled():
    assert build("DistilledDataModule", path="d", test_dataset="cifar10", factor=2).test_dataset.name == "cifar10"
    dm = build("DistilledDataModule", path="d", test_dataset=piece("CIFARDataModule", name="cifar100"), batch_size=50)
    assert dm.test_dataset.name == "cifar100"
    assert dm.batch_size == 50


def test_views():
    dm = build("TwoViewDataModule", dataset="digits", augmentation="moco_v2", image_size=16, crop_scale=[0.2, 1.0])
    dm.setup("fit")
    assert next(iter(dm.train_dataloader())).view1.shape == (32, 1, 16, 16)
    own = build(
        "TwoViewDataModule", dataset=piece("DigitsDataModule", normalize=True), augmentation=piece("RandomColor")
    )
    own.setup("fit")
    dm = build("MultiViewDataModule", batch_size=600, cutout=2, normalize=None)
    dm.setup("fit")
    assert next(iter(dm.train_dataloader())).clean.shape == (600, 1, 8, 8)
    views = build(
        "DigitsDataModule",
        modifiers=[
            {"class_path": "datamodules.Views", "dict_kwargs": {"view1": None, "view2": None}},
        ],
    )
    views.setup("fit")
    two = build("DigitsDataModule", modifiers=[piece("TwoViews", transform=piece("RandomAffineNoise", noise=0.1))])
    two.setup("fit")
    assert next(iter(two.train_dataloader())).view1.shape == (32, 1, 8, 8)


def test_every_public_name_exists():
    for name in datamodules.__all__:
        assert getattr(datamodules, name).__name__ == name
        assert (getattr(datamodules, name).__doc__ or "").strip()
