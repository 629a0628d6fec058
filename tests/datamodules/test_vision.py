"""Image sets on tiny files of the format that the real ones have on disk."""

from __future__ import annotations

import csv
import gzip
import pickle
import struct

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets
from torchvision.transforms import v2

import datamodules.vision as vision
from datamodules import (
    CIFARDataModule,
    DigitsDataModule,
    DistilledDataModule,
    ImageFolderDataModule,
    ImageNetDataModule,
    ImageTableDataModule,
    LabelNoise,
    PermutedPixels,
    PixelNoise,
    RandomCropFlip,
    SpuriousDigitsDataModule,
    Subset,
    SyntheticShapesDataModule,
    TinyImageNetDataModule,
    TorchvisionDataModule,
    TwoViews,
    WaterbirdsDataModule,
    WithIndex,
)
from lightning_methods.core.batches import GroupBatch, IndexedBatch, SoftLabelBatch, TwoViewBatch
from lightning_methods.core.io import safe_unpickle


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a test tried to download")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", refuse)
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", refuse)


def ready(dm):
    dm.prepare_data()
    dm.setup("fit")
    return dm


def batch_of(loader):
    return next(iter(loader))


# digits


def test_digits_are_pixels_over_16_split_60_20_20():
    dm = ready(DigitsDataModule())
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (1079, 359, 359)
    x, y = batch_of(dm.train_dataloader())
    assert x.shape == (32, 1, 8, 8)
    assert x.dtype == torch.float32
    assert x.min() >= 0
    assert x.max() <= 1
    assert ((x * 16) == (x * 16).round()).all()
    assert y.dtype == torch.int64
    assert dm.num_classes == 10
    from sklearn.datasets import load_digits

    digits = load_digits()
    row = dm.train_set.indices[5]
    torch.testing.assert_close(dm.train_set[5][0][0], torch.as_tensor(digits.images[row], dtype=torch.float32) / 16)
    assert dm.train_set[5][1] == digits.target[row]


def test_digits_options():
    x, _ = batch_of(ready(DigitsDataModule(flatten=True)).train_dataloader())
    assert x.shape == (32, 64)
    x, _ = batch_of(ready(DigitsDataModule(image_size=16, channels=3)).val_dataloader())
    assert x.shape == (32, 3, 16, 16)
    assert torch.equal(x[:, 0], x[:, 2])
    dm = ready(DigitsDataModule(classes=[3, 8], val_per_class=5, test_per_class=6, images_per_class=4))
    assert dm.class_counts.tolist() == [0, 0, 0, 4, 0, 0, 0, 0, 4, 0]
    assert torch.bincount(dm.val_set.targets, minlength=10)[[3, 8]].tolist() == [5, 5]
    assert torch.bincount(dm.test_set.targets, minlength=10)[[3, 8]].tolist() == [6, 6]
    dm = ready(DigitsDataModule(splits="train+test"))
    assert len(dm.train_set) == len(dm.val_set) == len(dm.test_set) == 1797


def all_of(loader):
    return torch.cat([batch[0] for batch in loader])


def test_digits_normalisation():
    x = all_of(ready(DigitsDataModule(normalize=True)).train_eval_dataloader())
    assert abs(x.mean()) < 1e-5
    assert abs(x.std() - 1) < 1e-4
    dm = ready(DigitsDataModule(normalize="standardize"))
    x = all_of(dm.train_eval_dataloader()).flatten(1)
    torch.testing.assert_close(x.mean(0), torch.zeros(64), atol=1e-4, rtol=0)
    std = x.std(0, correction=0)
    assert (((std - 1).abs() < 1e-3) | (std == 0)).all()
    assert abs(all_of(dm.test_dataloader()).mean()) > 1e-6  # measured on the training part only
    dm = ready(DigitsDataModule(normalize=8.0, flatten=True))
    torch.testing.assert_close(all_of(dm.test_dataloader()).norm(dim=1), torch.full((359,), 8.0))
    assert all_of(dm.train_eval_dataloader()).mean(0).abs().max() < 0.3


def test_digits_normalisation_ignores_selection_and_follows_pixels():
    few, all_images = (ready(DigitsDataModule(normalize=True, images_per_class=k)) for k in (1, None))
    torch.testing.assert_close(batch_of(few.test_dataloader())[0], batch_of(all_images.test_dataloader())[0])
    permuted = DigitsDataModule(
        normalize="standardize", modifiers=[PermutedPixels()], eval_modifiers=[PermutedPixels()]
    )
    x = all_of(ready(permuted).train_eval_dataloader()).flatten(1)
    std = x.std(0, correction=0)
    assert (((std - 1).abs() < 1e-3) | (std == 0)).all()


def test_digits_transforms_come_before_normalisation_and_flattening():
    dm = ready(DigitsDataModule(train_transform=RandomCropFlip(1, flip=False), normalize=True, flatten=True))
    x, _ = batch_of(dm.train_dataloader())
    assert x.shape == (32, 64)
    background = all_of(dm.test_dataloader()).min()
    assert torch.isclose(x.min(), background)
    single = ready(DigitsDataModule(train_transform=v2.RandomRotation(10), normalize=True, flatten=True))
    assert batch_of(single.train_dataloader())[0].shape == (32, 64)
    views = ready(DigitsDataModule(modifiers=[TwoViews(RandomCropFlip(1, flip=False))], flatten=True, normalize=True))
    batch = batch_of(views.train_dataloader())
    assert isinstance(batch, TwoViewBatch)
    assert batch.view1.shape == (32, 64)
    assert torch.isclose(batch.view2.min(), background)


def test_images_per_class_is_a_seeded_choice():
    def rows(seed, images):
        return ready(DigitsDataModule(seed=seed, images_per_class=images)).train_set.indices.tolist()

    assert rows(0, 2) == rows(0, 2)
    assert rows(0, 2) != rows(1, 2)
    whole = set(ready(DigitsDataModule()).train_set.indices.tolist())
    assert set(rows(0, 2)) < whole


def test_spurious_digits():
    dm = ready(SpuriousDigitsDataModule(train_size=1000, val_size=300))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (1000, 300, 497)
    assert dm.num_classes == 2
    batch = batch_of(dm.train_dataloader())
    assert isinstance(batch, GroupBatch)
    assert batch.x.shape == (32, 3, 8, 8)
    assert set(batch.group.tolist()) == {0, 1}
    agrees = (dm.train_groups == dm.train_targets).float().mean()
    assert abs(agrees - 0.9) < 0.03
    for part in (dm.val_set, dm.test_set):
        assert abs((part.extras["group"] == part.targets).float().mean() - 0.5) < 0.1
    assert isinstance(batch_of(dm.test_dataloader()), GroupBatch)
    from sklearn.datasets import load_digits

    assert torch.equal(dm.train_targets, torch.as_tensor(load_digits().target >= 5).long()[dm.train_set.indices])
    # fixed noise: the same image twice
    x1 = dm.train_set.__getitems__([3]).x
    assert torch.equal(dm.train_set.__getitems__([3]).x, x1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "standardise"}, "standardize"),
        ({"normalize": -1.0}, "normalize"),
        ({"normalize": (0.5, 0.5)}, "normalize"),
        ({"image_size": 0}, "image_size"),
        ({"channels": 2}, "channels"),
        ({"images_per_class": 0}, "images_per_class"),
        ({"val_per_class": 0}, "val_per_class"),
        ({"test_per_class": -1}, "test_per_class"),
    ],
)
def test_bad_digits_options(options, message):
    with pytest.raises(ValueError, match=message):
        DigitsDataModule(**options)


def test_too_many_images_per_class():
    with pytest.raises(ValueError, match="per class"):
        ready(DigitsDataModule(images_per_class=150))
    with pytest.raises(ValueError, match="classes"):
        ready(DigitsDataModule(classes=[10]))


# CIFAR


def write_cifar(root, name, per_file=20, seed=0):
    """The python version of the archive, pickled as Python 2 did: byte strings, protocol 2."""
    rng = np.random.default_rng(seed)
    if name == "cifar10":
        folder, files = root / "cifar-10-batches-py", [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    else:
        folder, files = root / "cifar-100-python", ["train", "test"]
    folder.mkdir(parents=True)
    written = {}
    for file in files:
        n = per_file * (5 if file == "train" else 1)
        data = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
        entry = {b"data": data, b"batch_label": file.encode(), b"filenames": [b"a_%d.png" % i for i in range(n)]}
        if name == "cifar10":
            entry[b"labels"] = [i % 10 for i in range(n)]
        else:
            entry[b"fine_labels"] = [i % 100 for i in range(n)]
            entry[b"coarse_labels"] = [i % 100 // 5 for i in range(n)]
        written[file] = entry
        (folder / file).write_bytes(python2_pickle(entry))
    return written


def python2_pickle(value):
    """What Python 2's cPickle writes: its strings are BINSTRING bytes, numpy is numpy.core."""

    def emit(item):
        if isinstance(item, bytes):
            if len(item) < 256:
                return b"U" + bytes([len(item)]) + item
            return b"T" + struct.pack("<i", len(item)) + item
        if isinstance(item, int):
            return b"J" + struct.pack("<i", item)
        if isinstance(item, list):
            return b"](" + b"".join(map(emit, item)) + b"e"
        if isinstance(item, tuple):
            return b"(" + b"".join(map(emit, item)) + b"t"
        if isinstance(item, dict):
            return b"}(" + b"".join(emit(key) + emit(value) for key, value in item.items()) + b"u"
        if isinstance(item, np.ndarray):
            dtype = b"cnumpy\ndtype\n" + emit((b"u1", 0, 1)) + b"R"
            dtype += b"(" + emit(3) + emit(b"|") + b"NNN" + emit(-1) + emit(-1) + emit(0) + b"tb"
            start = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + emit((0,)) + emit(b"b") + b"tR"
            return start + b"(" + emit(1) + emit(item.shape) + dtype + b"\x89" + emit(item.tobytes()) + b"tb"
        raise TypeError(type(item))

    return b"\x80\x02" + emit(value) + b"."


def test_python2_pickle_is_what_torchvision_reads(tmp_path, monkeypatch):
    written = write_cifar(tmp_path, "cifar10")
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(datasets.CIFAR10, "_load_meta", lambda self: None)
    theirs = datasets.CIFAR10(tmp_path, train=False)
    assert np.array_equal(theirs.data.transpose(0, 3, 1, 2).reshape(20, -1), written["test_batch"][b"data"])
    dm = ready(CIFARDataModule(root=str(tmp_path), normalize=False))
    image, label = dm.test_set[3]
    assert label == theirs.targets[3]
    torch.testing.assert_close(image, v2.functional.to_dtype(v2.functional.to_image(theirs.data[3]), scale=True))


def test_cifar10(tmp_path):
    write_cifar(tmp_path, "cifar10")
    dm = ready(CIFARDataModule(root=str(tmp_path)))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (100, 20, 20)
    assert dm.num_classes == 10
    assert dm.class_counts.tolist() == [10] * 10
    x, y = batch_of(dm.train_dataloader())
    assert x.shape == (32, 3, 32, 32)
    assert y.dtype == torch.int64
    x, _ = batch_of(dm.test_dataloader())
    pixels = dm.test_set.source[dm.test_set.indices].float() / 255
    mean, std = torch.tensor(dm.mean)[:, None, None], torch.tensor(dm.std)[:, None, None]
    torch.testing.assert_close(x, (pixels - mean) / std)


@pytest.mark.parametrize(
    ("name", "classes", "key"), [("cifar100", 100, b"fine_labels"), ("cifar20", 20, b"coarse_labels")]
)
def test_cifar100_fine_and_coarse(tmp_path, name, classes, key):
    written = write_cifar(tmp_path, "cifar100")
    dm = ready(CIFARDataModule(name, root=str(tmp_path)))
    assert dm.num_classes == classes
    assert dm.train_targets.tolist() == written["train"][key]
    assert dm.test_set.targets.tolist() == written["test"][key]


def test_cifar_options(tmp_path):
    write_cifar(tmp_path, "cifar10")
    root = str(tmp_path)
    dm = ready(CIFARDataModule(root=root, val_per_class=2, classes=[1, 2], normalize=False, augment=False))
    assert torch.bincount(dm.val_set.targets).tolist() == [0, 2, 2]
    assert torch.bincount(dm.train_set.targets).tolist() == [0, 8, 8]
    assert set(dm.test_set.targets.tolist()) == {1, 2}
    x, _ = batch_of(dm.train_dataloader())
    assert x.min() >= 0
    assert x.max() <= 1
    x, _ = batch_of(ready(CIFARDataModule(root=root, image_size=40)).train_dataloader())
    assert x.shape[2:] == (40, 40)
    dm = ready(CIFARDataModule(root=root, splits="train+test"))
    assert len(dm.train_set) == len(dm.test_set) == 120
    other = ready(CIFARDataModule(root=root, normalize=([0.5] * 3, [0.25] * 3)))
    x, _ = batch_of(other.test_dataloader())
    assert x.min() >= -2
    assert x.max() <= 2
    constant = batch_of(ready(CIFARDataModule(root=root, normalize=False)).train_dataloader())[0]
    reflect = batch_of(ready(CIFARDataModule(root=root, normalize=False, pad_mode="reflect")).train_dataloader())[0]
    black = [(x.sum(1) == 0).float().mean() for x in (constant, reflect)]
    assert black[0] > 0.05
    assert black[1] < 0.001


def test_cifar_with_own_transforms_gets_pil_images(tmp_path):
    write_cifar(tmp_path, "cifar10")
    seen = []

    def look(image):
        seen.append(image)
        return v2.functional.to_image(image)

    dm = ready(CIFARDataModule(root=str(tmp_path), train_transform=look))
    x, _ = batch_of(dm.train_dataloader())
    assert isinstance(seen[0], Image.Image)
    assert x.dtype == torch.uint8
    dm = ready(CIFARDataModule(root=str(tmp_path), train_transform=look, modifiers=[PixelNoise(0.1)]))
    seen.clear()
    batch_of(dm.train_dataloader())
    assert isinstance(seen[0], torch.Tensor)
    assert seen[0].is_floating_point()


def test_cifar_modifiers(tmp_path):
    write_cifar(tmp_path, "cifar10")
    dm = ready(
        CIFARDataModule(
            root=str(tmp_path), modifiers=[Subset(per_class=5), LabelNoise(0.4), WithIndex()], drop_last=True
        )
    )
    batch = batch_of(dm.train_dataloader())
    assert isinstance(batch, IndexedBatch)
    assert torch.equal(dm.train_targets[batch.index], batch.y)
    assert (dm.train_targets != torch.arange(100)[dm.train_set.indices] % 20 % 10).sum() == 20


def test_cifar_missing(tmp_path):
    for name, archive in (("cifar10", "cifar-10-python"), ("cifar20", "cifar-100-python")):
        with pytest.raises(FileNotFoundError, match=archive) as error:
            CIFARDataModule(name, root=str(tmp_path), download=False).setup("fit")
        assert str(tmp_path) in str(error.value)
        assert "https://www.cs.toronto.edu" in str(error.value)
    with pytest.raises(ValueError, match="cifar20"):
        CIFARDataModule("cifar50")


def test_cifar_downloads_only_what_is_missing(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(datasets, "CIFAR10", lambda root, download: calls.append((root, download)))
    dm = CIFARDataModule(root=str(tmp_path))
    dm.prepare_data()
    assert calls == [(str(tmp_path), True)]
    write_cifar(tmp_path, "cifar10")
    dm.prepare_data()
    CIFARDataModule(root=str(tmp_path / "other"), download=False).prepare_data()
    assert len(calls) == 1


def test_pickles_that_run_code_are_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (eval, ("1/0",))

    for protocol in (2, 4):
        (tmp_path / "evil").write_bytes(pickle.dumps({"data": Evil()}, protocol=protocol))
        with pytest.raises(pickle.UnpicklingError, match="eval"):
            safe_unpickle(tmp_path / "evil")
    for code in (b"cnumpy.testing._private.utils\nrunstring\n(V1\n}tR.", b"cbuiltins\ngetattr\n(NVx\ntR."):
        (tmp_path / "evil").write_bytes(code)
        with pytest.raises(pickle.UnpicklingError, match="not plain data"):
            safe_unpickle(tmp_path / "evil")
    plain = {"a": np.arange(3), "b": [1, {2}, (3.0, "x")], "c": np.float32(2), "d": np.array(["u", "v"])}
    (tmp_path / "plain").write_bytes(pickle.dumps(plain))
    again = safe_unpickle(tmp_path / "plain")
    assert np.array_equal(again["a"], plain["a"])
    assert again["b"] == plain["b"]
    import scipy.sparse

    (tmp_path / "sparse").write_bytes(pickle.dumps(scipy.sparse.eye(3, format="csr")))
    assert safe_unpickle(tmp_path / "sparse").sum() == 3
    with pytest.raises(pickle.UnpicklingError):
        safe_unpickle(tmp_path / "sparse", allowed=("builtins", "numpy"))


# other sets of torchvision


def test_stl10(tmp_path):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    rng = np.random.default_rng(0)
    images = {}
    for split, n in (("train", 20), ("test", 10), ("unlabeled", 15)):
        images[split] = rng.integers(0, 256, (n, 3, 96, 96), dtype=np.uint8)
        images[split].tofile(folder / f"{split}_X.bin")
        if split != "unlabeled":
            (np.arange(n, dtype=np.uint8) % 10 + 1).tofile(folder / f"{split}_y.bin")
    dm = ready(TorchvisionDataModule("stl10", root=str(tmp_path), normalize=False))
    assert (len(dm.train_set), len(dm.test_set)) == (20, 10)
    assert dm.train_targets.tolist() == [i % 10 for i in range(20)]
    x, _ = batch_of(dm.test_dataloader())
    assert x.shape == (10, 3, 96, 96)
    # stored column by column
    torch.testing.assert_close(x[2], torch.from_numpy(images["test"][2].transpose(0, 2, 1).copy()).float() / 255)
    dm = ready(TorchvisionDataModule("stl10", root=str(tmp_path), splits="train+unlabeled", val_size=10))
    assert len(dm.train_set) == 25
    assert (dm.train_targets == -1).sum() == 15
    assert len(ready(TorchvisionDataModule("stl10", root=str(tmp_path), splits="train+test")).train_set) == 30
    (folder / "test_y.bin").unlink()
    with pytest.raises(FileNotFoundError, match="stl10_binary"):
        TorchvisionDataModule("stl10", root=str(tmp_path), download=False).setup("fit")


def write_idx(path, array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + b"".join(struct.pack(">I", n) for n in array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.tobytes())
    (path.parent / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist(tmp_path, name, folder):
    rng = np.random.default_rng(0)
    for prefix, n in (("train", 30), ("t10k", 10)):
        raw = tmp_path / folder / "raw"
        write_idx(raw / f"{prefix}-images-idx3-ubyte", rng.integers(0, 256, (n, 28, 28), dtype=np.uint8))
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", np.arange(n, dtype=np.uint8) % 10)
    dm = ready(TorchvisionDataModule(name, root=str(tmp_path)))
    x, y = batch_of(dm.test_dataloader())
    assert x.shape == (10, 1, 28, 28)
    assert y.tolist() == list(range(10))
    assert batch_of(dm.train_dataloader())[0].shape == (30, 1, 28, 28)
    with pytest.raises(FileNotFoundError, match="download=True"):
        TorchvisionDataModule(name, root=str(tmp_path / "none"), download=False).setup()


def write_image(path, size=(20, 16), color=(200, 100, 50)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def test_dtd(tmp_path):
    base = tmp_path / "dtd" / "dtd"
    names = ["banded", "woven"]
    for split, numbers in (("train", (0, 1)), ("val", (2,)), ("test", (3, 4, 5))):
        lines = []
        for name in names:
            for i in numbers:
                write_image(base / "images" / name / f"{name}_{i:04d}.jpg")
                lines.append(f"{name}/{name}_{i:04d}.jpg")
        (base / "labels").mkdir(parents=True, exist_ok=True)
        (base / "labels" / f"{split}1.txt").write_text("\n".join(lines))
    dm = ready(TorchvisionDataModule("dtd", root=str(tmp_path), image_size=8))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (4, 2, 6)
    assert dm.num_classes == 2
    for loader in (dm.train_dataloader(), dm.test_dataloader()):
        assert batch_of(loader)[0].shape[1:] == (3, 8, 8)
    assert len(ready(TorchvisionDataModule("dtd", root=str(tmp_path), splits="train+val")).train_set) == 6


def test_fgvc_aircraft(tmp_path):
    data = tmp_path / "fgvc-aircraft-2013b" / "data"
    (data / "images").mkdir(parents=True)
    (data / "variants.txt").write_text("707-320\n727-200\n")
    for k, split in enumerate(("train", "val", "test")):
        lines = []
        for i, name in enumerate(("707-320", "727-200")):
            number = f"{k:03d}{i:04d}"
            write_image(data / "images" / f"{number}.jpg")
            lines.append(f"{number} {name}")
        (data / f"images_variant_{split}.txt").write_text("\n".join(lines) + "\n")
    dm = ready(TorchvisionDataModule("fgvc_aircraft", root=str(tmp_path), image_size=8))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (2, 2, 2)
    assert dm.train_targets.tolist() == [0, 1]


def test_stanford_cars(tmp_path):
    import scipy.io

    base = tmp_path / "stanford_cars"
    (base / "devkit").mkdir(parents=True)
    scipy.io.savemat(base / "devkit" / "cars_meta.mat", {"class_names": np.array(["A car", "B car"], dtype=object)})

    def annotations(folder, n):
        fields = [("fname", object), ("class", np.uint8)]
        table = np.zeros(n, dtype=fields)
        for i in range(n):
            table[i] = (f"{i + 1:05d}.jpg", i % 2 + 1)
            write_image(base / folder / f"{i + 1:05d}.jpg")
        return {"annotations": table}

    scipy.io.savemat(base / "devkit" / "cars_train_annos.mat", annotations("cars_train", 4))
    scipy.io.savemat(base / "cars_test_annos_withlabels.mat", annotations("cars_test", 2))
    dm = ready(TorchvisionDataModule("stanford_cars", root=str(tmp_path), image_size=8))
    assert (len(dm.train_set), len(dm.test_set)) == (4, 2)
    assert dm.train_targets.tolist() == [0, 1, 0, 1]
    with pytest.raises(FileNotFoundError, match="mirror"):
        TorchvisionDataModule("stanford_cars", root=str(tmp_path / "none")).setup()


def test_unknown_name():
    with pytest.raises(ValueError, match="stl10"):
        TorchvisionDataModule("stl")
    with pytest.raises(ValueError, match="splits"):
        TorchvisionDataModule("cifar10", splits="train+unlabeled")


# generated shapes


def test_synthetic_shapes():
    dm = ready(SyntheticShapesDataModule(num_images=200, normalize=False, augment=False))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (120, 40, 40)
    assert dm.class_counts.tolist() == [30] * 4
    x, _ = batch_of(dm.train_dataloader())
    assert x.shape == (32, 3, 32, 32)
    assert x.min() == 0
    assert (x.amax((1, 2, 3)) > 0.2).all()
    assert batch_of(ready(SyntheticShapesDataModule(num_images=40, image_size=16)).train_dataloader())[0].shape[2] == 16


# folders


def write_tree(root, splits, names=("cat", "dog", "emu"), size=(20, 16)):
    for split, n in splits.items():
        for c, name in enumerate(names):
            for i in range(n):
                write_image(root / split / name / f"{i}.png", size, (40 * c + 10, i, 0))


def label_in_image(x):
    """The class that write_tree put into the red channel."""
    return ((x[:, 0].mean((1, 2)) * 255 - 10) / 40).round().long()


def test_image_folder_with_all_parts(tmp_path):
    write_tree(tmp_path, {"train": 4, "val": 2, "test": 3})
    dm = ready(ImageFolderDataModule(root=str(tmp_path), image_size=8, normalize=False))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (12, 6, 9)
    for loader in (dm.train_dataloader(), dm.val_dataloader(), dm.test_dataloader()):
        x, y = batch_of(loader)
        assert x.shape[1:] == (3, 8, 8)
        assert torch.equal(label_in_image(x), y)


def test_image_folder_where_val_is_the_test(tmp_path):
    write_tree(tmp_path, {"training": 4, "validation": 2})
    options = {"root": str(tmp_path), "train_folder": "training", "val_folder": "validation", "image_size": 8}
    dm = ready(ImageFolderDataModule(**options))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (12, 6, 6)
    dm = ready(ImageFolderDataModule(**options, val_per_class=1))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (9, 3, 6)
    dm = ready(ImageFolderDataModule(**options, splits="train+test"))
    assert len(dm.train_set) == 18


def test_image_folder_without_parts_is_a_pool(tmp_path):
    write_tree(tmp_path, {"": 10})
    dm = ready(ImageFolderDataModule(root=str(tmp_path), image_size=8))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (18, 6, 6)
    dm = ready(ImageFolderDataModule(root=str(tmp_path), image_size=8, splits="train+test", class_ids=["emu", "cat"]))
    assert len(dm.train_set) == len(dm.test_set) == 20
    assert dm.num_classes == 2
    dm = ImageFolderDataModule(root=str(tmp_path), image_size=8, class_ids=["emu", "cat"], normalize=False)
    x, y = batch_of(ready(dm).test_dataloader())
    assert torch.equal(label_in_image(x), torch.where(y == 0, 2, 0))


def test_image_lists(tmp_path):
    write_tree(tmp_path, {"pictures": 3})
    for split, numbers in (("train", (0, 1)), ("test", (2,))):
        lines = [f"pictures/{name}/{i}.png {c}" for c, name in enumerate(("cat", "dog", "emu")) for i in numbers]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    options = {"root": str(tmp_path), "image_size": 8, "normalize": False}
    lists = {"train": "train.txt", "test": "test.txt"}
    dm = ready(ImageFolderDataModule(list_files=lists, **options))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (6, 3, 3)
    assert dm.num_classes == 3
    x, y = batch_of(dm.train_dataloader())
    assert torch.equal(label_in_image(x), y)
    (tmp_path / "bad.txt").write_text("pictures/cat/0.png\n")
    (tmp_path / "gone.txt").write_text("pictures/cat/9.png 0\n")
    (tmp_path / "empty.txt").write_text("\n")
    for file, error, message in (
        ("bad.txt", ValueError, "line 1"),
        ("gone.txt", FileNotFoundError, r"9\.png"),
        ("empty.txt", ValueError, "no images"),
        ("none.txt", FileNotFoundError, r"none\.txt"),
    ):
        with pytest.raises(error, match=message):
            ready(ImageFolderDataModule(list_files={"train": file}, **options))


def test_image_folder_mistakes(tmp_path):
    with pytest.raises(FileNotFoundError, match="each class"):
        ImageFolderDataModule(root=str(tmp_path / "none")).setup()
    write_tree(tmp_path, {"train": 2, "val": 1})
    with pytest.raises(FileNotFoundError, match=r"cats.*'cat'"):
        ready(ImageFolderDataModule(root=str(tmp_path), class_ids=["cats"]))
    write_tree(tmp_path, {"val": 1}, names=("fox",))
    with pytest.raises(ValueError, match="fox"):
        ready(ImageFolderDataModule(root=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match="training"):
        ready(ImageFolderDataModule(root=str(tmp_path), train_folder="training"))
    with pytest.raises(ValueError, match="class_ids"):
        ImageFolderDataModule(class_ids=["a"], list_files={"train": "x"})
    with pytest.raises(ValueError, match="different"):
        ImageFolderDataModule(class_ids=["a", "a"])
    with pytest.raises(ValueError, match="'train'"):
        ImageFolderDataModule(list_files={"test": "x"})
    with pytest.raises(ValueError, match="list_files"):
        ImageFolderDataModule(list_files={"train": "x", "tset": "y"})
    with pytest.raises(ValueError, match="normalize"):
        ImageFolderDataModule(normalize=([0.5, 0.5], [0.5]))
    with pytest.raises(ValueError, match="pad_mode"):
        ImageFolderDataModule(pad_mode="zero")
    with pytest.raises(ValueError, match="image_size"):
        ImageFolderDataModule(image_size=0)


def test_imagenet(tmp_path):
    write_tree(tmp_path, {"train": 2, "val": 1}, names=("n01440764", "n01443537"), size=(40, 30))
    dm = ready(ImageNetDataModule(root=str(tmp_path)))
    assert batch_of(dm.train_dataloader())[0].shape == (4, 3, 224, 224)
    assert batch_of(dm.test_dataloader())[0].shape == (2, 3, 224, 224)
    dm = ready(ImageNetDataModule(root=str(tmp_path), image_size=64, class_ids=["n01443537"]))
    resize = dm.default_eval_transform().transforms[0]
    assert resize.size == [73]
    assert dm.num_classes == 1
    with pytest.raises(FileNotFoundError, match=r"image-net\.org"):
        ImageNetDataModule(root=str(tmp_path / "none")).setup()


@pytest.mark.parametrize("inside", [True, False])
def test_tiny_imagenet(tmp_path, inside):
    base = tmp_path / "tiny-imagenet-200"
    names = ["n01443537", "n01629819", "n01641577"]
    for c, name in enumerate(names):
        for i in range(4):
            write_image(base / "train" / name / "images" / f"{name}_{i}.JPEG", (64, 64), (40 * c + 10, 0, 0))
    lines = []
    for i in range(6):
        write_image(base / "val" / "images" / f"val_{i}.JPEG", (64, 64), (40 * (i % 3) + 10, 0, 0))
        lines.append(f"val_{i}.JPEG\t{names[i % 3]}\t0\t32\t44\t62")
    (base / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    write_image(base / "test" / "images" / "test_0.JPEG", (64, 64))
    root = str(base if inside else tmp_path)
    dm = ready(TinyImageNetDataModule(root=root, normalize=False))
    assert (len(dm.train_set), len(dm.test_set)) == (12, 6)
    for loader in (dm.train_eval_dataloader(), dm.test_dataloader()):
        x, y = batch_of(loader)
        assert x.shape[1:] == (3, 64, 64)
        assert torch.equal(label_in_image(x), y)
    assert batch_of(dm.train_dataloader())[0].shape == (12, 3, 64, 64)
    some = ready(TinyImageNetDataModule(root=root, class_ids=names[1:], val_per_class=1))
    assert (len(some.train_set), len(some.val_set), len(some.test_set)) == (6, 2, 4)
    with pytest.raises(FileNotFoundError, match=r"tiny-imagenet-200\.zip"):
        TinyImageNetDataModule(root=str(tmp_path / "none"), download=False).setup()


# tables


def write_waterbirds(root):
    """Columns and folders of the published archive."""
    base = root / "waterbird_complete95_forest2water2"
    rows = []
    for i in range(24):
        name = f"{i // 8 + 1:03d}.Bird/Bird_{i:04d}.jpg"
        write_image(base / name, (60, 50), (10 * i, 0, 0))
        split, y, place = (0 if i < 12 else 1 + i % 2), i % 4 // 2, i % 2
        rows.append([i + 1, name, y, split, place, f"/b/bamboo_forest/{i}.jpg"])
    with (base / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["img_id", "img_filename", "y", "split", "place", "place_filename"])
        writer.writerows(rows)
    return base, rows


@pytest.mark.parametrize("inside", [True, False])
def test_waterbirds(tmp_path, inside):
    base, rows = write_waterbirds(tmp_path)
    dm = ready(WaterbirdsDataModule(root=str(base if inside else tmp_path), batch_size=12))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (12, 6, 6)
    assert dm.num_classes == 2
    batch = batch_of(dm.train_eval_dataloader())
    assert isinstance(batch, GroupBatch)
    assert batch.x.shape == (12, 3, 224, 224)
    train = [row for row in rows if row[3] == 0]
    assert batch.y.tolist() == [row[2] for row in train]
    assert batch.group.tolist() == [row[4] for row in train]
    assert isinstance(batch_of(dm.test_dataloader()), GroupBatch)
    assert dm.test_set.extras["group"].tolist() == [row[4] for row in rows if row[3] == 2]
    red = batch.x[:, 0].mean((1, 2)) * dm.std[0] + dm.mean[0]
    assert ((red * 255 - torch.tensor([10.0 * (row[0] - 1) for row in train])).abs() < 4).all()
    with pytest.raises(FileNotFoundError, match=r"nlp\.stanford\.edu"):
        WaterbirdsDataModule(root=str(tmp_path / "none")).setup()


def test_image_table(tmp_path):
    for i in range(20):
        write_image(tmp_path / "pictures" / f"{i}.png", (9, 9))
    table = tmp_path / "table.csv"
    lines = ["file,kind,part"] + [f"{i}.png,{'ab'[i % 2]},{['learn', 'exam'][i % 4 == 3]}" for i in range(20)]
    table.write_text("\n".join(lines) + "\n")
    options = {
        "root": str(tmp_path),
        "table": "table.csv",
        "path_column": "file",
        "label_column": "kind",
        "image_folder": "pictures",
        "image_size": 8,
    }
    dm = ready(ImageTableDataModule(**options))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (12, 4, 4)
    x, y = batch_of(dm.train_dataloader())
    assert x.shape == (12, 3, 8, 8)
    assert set(y.tolist()) == {0, 1}
    split = {"split_column": "part", "split_values": {"train": "learn", "test": "exam"}, "val_size": 0}
    dm = ready(ImageTableDataModule(**options, **split))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (15, 5, 5)
    with pytest.raises(ValueError, match="no row"):
        ready(ImageTableDataModule(**options, split_column="part"))
    with pytest.raises(ValueError, match=r"no column 'fil'.*'file'"):
        ready(ImageTableDataModule(**{**options, "path_column": "fil"}))
    with pytest.raises(FileNotFoundError, match=r"0\.png"):
        ready(ImageTableDataModule(**{**options, "image_folder": ""}))
    with pytest.raises(FileNotFoundError, match="none"):
        ready(ImageTableDataModule(**{**options, "table": "none.csv"}))
    with pytest.raises(ValueError, match="split_values"):
        ImageTableDataModule(split_values={"dev": 1})
    (tmp_path / "empty.csv").write_text("file,kind\n")
    with pytest.raises(ValueError, match="no rows"):
        ready(ImageTableDataModule(**{**options, "table": "empty.csv"}))


# distilled sets


@pytest.fixture
def cifar(tmp_path):
    write_cifar(tmp_path, "cifar10")
    return CIFARDataModule(root=str(tmp_path))


def write_distilled(folder, label, n=10, size=32):
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    data = torch.rand(n, 3, size, size)
    torch.save({"dataset": "cifar10", "data": data, "label": label}, folder / "data.pt")
    return data


def test_distilled_hard_labels(tmp_path, cifar):
    folder = tmp_path / "sre2l" / "cifar10_conv3" / "ipc1"
    data = write_distilled(folder, torch.arange(10))
    dm = ready(DistilledDataModule(str(folder), cifar))
    assert dm.batch_size == 10
    x, y = next(iter(dm.train_eval_dataloader()))
    assert y.tolist() == list(range(10))
    loader = dm.train_dataloader()
    x, y = next(iter(loader))
    mean, std = torch.tensor(cifar.mean)[:, None, None], torch.tensor(cifar.std)[:, None, None]
    torch.testing.assert_close(x, (data[y] - mean) / std)
    for ours, theirs in (
        (dm.val_dataloader(), cifar.val_dataloader()),
        (dm.test_dataloader(), cifar.test_dataloader()),
    ):
        torch.testing.assert_close(batch_of(ours)[0], batch_of(theirs)[0])
        assert torch.equal(batch_of(ours)[1], batch_of(theirs)[1])
    by_name = ready(DistilledDataModule(str(folder / "data.pt"), "cifar10", root=str(tmp_path)))
    torch.testing.assert_close(batch_of(by_name.test_dataloader())[0], batch_of(dm.test_dataloader())[0])


def test_distilled_soft_labels(tmp_path, cifar):
    soft = torch.randn(12, 10)
    write_distilled(tmp_path / "d", soft, n=12)
    dm = ready(DistilledDataModule(str(tmp_path / "d"), cifar))
    assert dm.batch_size == 50
    batch = batch_of(dm.train_dataloader())
    assert isinstance(batch, SoftLabelBatch)
    assert torch.equal(batch.target, batch.soft_labels.argmax(1))
    assert set(map(tuple, batch.soft_labels.tolist())) == set(map(tuple, soft.tolist()))
    assert len(batch_of(dm.test_dataloader())) == 2


@pytest.mark.parametrize(("n", "expected"), [(10, 10), (11, 50), (500, 50), (501, 100), (20_000, 100), (20_001, 200)])
def test_distilled_batch_size(tmp_path, n, expected):
    folder = tmp_path / "d"
    folder.mkdir()
    torch.save(
        {"dataset": "digits", "data": torch.zeros(n, 1, 1, 1), "label": torch.arange(n) % 10}, folder / "data.pt"
    )
    assert ready(DistilledDataModule(str(folder), DigitsDataModule())).batch_size == expected
    assert ready(DistilledDataModule(str(folder), DigitsDataModule(), batch_size=7)).batch_size == 7


def test_distilled_mosaics(tmp_path, cifar):
    folder = tmp_path / "rded"
    folder.mkdir()
    tiles = (
        torch.arange(4.0).view(1, 1, 2, 2).repeat_interleave(16, 2).repeat_interleave(16, 3).expand(40, 3, -1, -1) / 4
    )
    torch.save({"dataset": "cifar10", "data": tiles.contiguous(), "label": torch.arange(40) % 10}, folder / "data.pt")
    dm = ready(DistilledDataModule(str(folder), cifar, factor=2))
    x, _ = batch_of(dm.train_dataloader())
    flat = x[:, 0].flatten(1)
    single = (flat == flat[:, :1]).all(1)
    assert 0.5 < single.float().mean() < 0.95
    x, _ = batch_of(dm.train_eval_dataloader())
    assert x.shape == (40, 3, 32, 32)


def test_distilled_zca_whitens_the_test_images(tmp_path):
    dm = DigitsDataModule()
    folder = tmp_path / "datm"
    folder.mkdir()
    torch.manual_seed(0)
    data = torch.randn(10, 1, 8, 8)
    torch.save({"dataset": "digits", "data": data, "label": torch.arange(10)}, folder / "data.pt")
    distilled = ready(DistilledDataModule(str(folder), dm, zca=True, eval_batch_size=None, batch_size=359))
    x, y = batch_of(distilled.train_dataloader())
    assert torch.equal(x, data[y])  # whitened when it was made
    white, _ = batch_of(distilled.test_dataloader())
    raw, _ = batch_of(ready(DigitsDataModule(eval_batch_size=359)).test_dataloader())
    train = ready(DigitsDataModule()).train_set
    pixels = train.source[train.indices].flatten(1).double()
    values, vectors = torch.linalg.eigh(torch.cov(pixels.T))
    expected = (raw.flatten(1).double() - pixels.mean(0)) @ vectors @ torch.diag((values + 0.1).rsqrt()) @ vectors.T
    torch.testing.assert_close(white.flatten(1).double(), expected, atol=1e-4, rtol=1e-4)


class Foreign(L.LightningDataModule):
    """Somebody else's data module."""

    def loader(self):
        return DataLoader(TensorDataset(torch.ones(6, 3, 4, 4), torch.arange(6)), batch_size=3)

    val_dataloader = test_dataloader = loader


def test_distilled_with_a_foreign_test_set(tmp_path):
    write_distilled(tmp_path / "d", torch.arange(10), size=4)
    dm = ready(DistilledDataModule(str(tmp_path / "d"), Foreign()))
    assert dm.batch_size == 10
    assert batch_of(dm.test_dataloader())[0].shape == (3, 3, 4, 4)
    assert batch_of(dm.val_dataloader())[1].tolist() == [0, 1, 2]
    x, _ = batch_of(dm.train_dataloader())
    assert x.min() >= 0
    with pytest.raises(ValueError, match="zca"):
        DistilledDataModule(str(tmp_path / "d"), Foreign(), zca=True)
    with pytest.raises(ValueError, match="eval_modifiers"):
        DistilledDataModule(str(tmp_path / "d"), Foreign(), eval_modifiers=[Subset(size=2)])


def test_distilled_mistakes(tmp_path, cifar):
    with pytest.raises(FileNotFoundError, match=r"data\.pt"):
        ready(DistilledDataModule(str(tmp_path / "d" / "data.pt"), cifar))
    for stored, message in (
        ([1], "dict with data and label"),
        ({"data": torch.zeros(2, 3, 4, 4)}, "dict with data and label"),
        ({"data": torch.zeros(2, 3, 4), "label": torch.zeros(2)}, r"\[N, C, H, W\]"),
        ({"data": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "label": torch.zeros(2)}, "float tensor"),
        ({"data": torch.zeros(2, 3, 4, 4), "label": torch.zeros(3, dtype=torch.long)}, "N=2"),
        ({"data": torch.zeros(2, 3, 4, 4), "label": torch.zeros(2)}, "integer"),
        ({"data": torch.zeros(2, 3, 4, 4), "label": torch.tensor([0, 10])}, "11 classes"),
    ):
        torch.save(stored, tmp_path / "bad.pt")
        with pytest.raises(ValueError, match=message):
            ready(DistilledDataModule(str(tmp_path / "bad.pt"), cifar))
    for options, message in (
        ({"factor": 0}, "factor"),
        ({"batch_size": "big"}, "batch_size"),
        ({"val_size": 0.1}, "val_size"),
        ({"splits": "train+test"}, "splits"),
    ):
        with pytest.raises(ValueError, match=message):
            DistilledDataModule("d", cifar, **options)


def test_distilled_file_runs_no_code(tmp_path, cifar):
    class Evil:
        def __reduce__(self):
            return (eval, ("1/0",))

    torch.save({"data": Evil(), "label": torch.zeros(1)}, tmp_path / "evil.pt")
    with pytest.raises(pickle.UnpicklingError):
        ready(DistilledDataModule(str(tmp_path / "evil.pt"), cifar))


def test_image_files_keep_their_paths(tmp_path):
    write_image(tmp_path / "ü.png", (3, 2))
    Image.new("L", (3, 2), 7).save(tmp_path / "grey.png")
    files = vision.ImageFiles([tmp_path / "ü.png", tmp_path / "grey.png"])
    assert files.path(0) == str(tmp_path / "ü.png")
    assert files[1].mode == "RGB"
    assert len(files) == 2
