from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image

from datamodules import ContinualDataModule
from datamodules.continual import encode, split_words


def _make(problem="permuted_digits", **options) -> ContinualDataModule:
    data = ContinualDataModule(problem, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def _all(dataset):
    return dataset.__getitems__(range(len(dataset)))


# tasks


def test_a_permutation_is_one_order_of_the_pixels_for_all_images():
    data = _make(num_samples=50)
    (a, ya), (b, yb) = _all(data.task_dataset(0)), _all(data.task_dataset(1))
    assert a.shape == (50, 1, 8, 8)
    assert torch.equal(ya, yb)
    assert not torch.equal(a, b)
    assert torch.equal(a.flatten(1).sort().values, b.flatten(1).sort().values)
    plain = _all(data._images)[0].flatten(1)
    # each permuted pixel is one of the original pixels, the same one in every image
    match = (a.flatten(1)[:, :, None] == plain[:, None, :]).all(dim=0)
    assert match.any(dim=1).all()
    assert not torch.equal(a.flatten(1), plain)


def test_random_labels_are_new_and_the_images_stay():
    data = _make("random_label_digits", num_samples=100)
    (a, ya), (b, yb) = _all(data.task_dataset(0)), _all(data.task_dataset(1))
    assert torch.equal(a, b)
    assert (ya != yb).float().mean() > 0.7
    assert set(ya.tolist()) == set(range(10))


def test_tasks_are_a_function_of_seed_and_number():
    first, second, other = _make(seed=3), _make(seed=3), _make(seed=4)
    for _ in range(2):  # going back changes nothing
        for task in (5, 0, 7):
            assert torch.equal(_all(first.task_dataset(task))[0], _all(second.task_dataset(task))[0])
    assert not torch.equal(_all(first.task_dataset(5))[0], _all(other.task_dataset(5))[0])
    again = pickle.loads(pickle.dumps(first))
    assert torch.equal(_all(again.task_dataset(5))[0], _all(first.task_dataset(5))[0])


def test_new_classes_are_used_once_before_any_returns():
    data = ContinualDataModule("cifar100_5plus1")
    seen = [data._new_classes(task, 100, (5, 1)) for task in range(66)]
    assert [len(classes) for classes in seen[:4]] == [5, 1, 5, 1]
    first = [c for classes in seen[:32] for c in classes]  # 16 rounds of 6
    assert len(first) == len(set(first)) == 96
    assert seen[:32] != seen[32:64]
    pairs = [data._new_classes(task, 1000, (2,)) for task in range(500)]
    assert sorted(c for pair in pairs for c in pair) == list(range(1000))


# in a fit


class Spy(LightningModule):
    """Writes down the batches of every epoch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.seen = {}

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.setdefault(self.trainer.current_epoch, []).append((x.clone(), y.clone()))
        return self.layer(x.flatten(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fit(data, model=None, epochs=4, ckpt=None, folder=None, reload=1):
    model = model or Spy()
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=folder is not None, default_root_dir=folder,
        reload_dataloaders_every_n_epochs=reload,
    )  # fmt: skip
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    return model.seen, trainer


def test_the_task_changes_with_the_epoch():
    seen, _ = _fit(ContinualDataModule("random_label_digits", num_samples=32, epochs_per_task=2))
    label_of = []
    for epoch in range(4):
        x, y = (torch.cat(parts) for parts in zip(*seen[epoch], strict=True))
        assert len(x) == 32
        label_of.append({tuple(image.flatten().tolist()): int(label) for image, label in zip(x, y, strict=True)})
    assert label_of[0] == label_of[1]
    assert label_of[2] == label_of[3]
    assert label_of[0] != label_of[2]
    assert not torch.equal(seen[0][0][0], seen[1][0][0])  # another order in every epoch


def test_a_resumed_stream_goes_on(tmp_path):
    make = lambda: ContinualDataModule(num_samples=48, seed=1)  # noqa: E731
    whole, _ = _fit(make(), epochs=4)
    _, trainer = _fit(make(), epochs=2, folder=tmp_path)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest, _ = _fit(make(), epochs=4, ckpt=tmp_path / "half.ckpt", folder=tmp_path)
    assert sorted(rest) == [2, 3]
    for epoch in (2, 3):
        for (a, ya), (b, yb) in zip(whole[epoch], rest[epoch], strict=True):
            assert torch.equal(a, b)
            assert torch.equal(ya, yb)


def test_evaluation_is_on_the_last_task_also_from_a_checkpoint():
    data = ContinualDataModule(num_samples=16)
    _fit(data, epochs=3)
    x, y = next(iter(data.test_dataloader()))
    wanted = _all(_make(num_samples=16).task_dataset(2))
    assert torch.equal(x, wanted[0])
    assert torch.equal(y, wanted[1])
    other = _make(num_samples=16)
    other.load_state_dict(data.state_dict())
    assert torch.equal(next(iter(other.test_dataloader()))[0], wanted[0])
    assert torch.equal(next(iter(other.val_dataloader()))[0], wanted[0])


def test_without_reloading_the_stream_would_stand_still():
    with pytest.raises(ValueError, match="reload_dataloaders_every_n_epochs=1"):
        _fit(ContinualDataModule(num_samples=16), reload=0)
    _fit(ContinualDataModule(num_samples=16), reload=0, epochs=1)  # one task


def test_steps_per_epoch_are_passes_one_after_the_other():
    data = _make("random_label_digits", num_samples=20, batch_size=8, steps_per_epoch=7)
    loader = data.train_dataloader()
    assert len(loader) == 7
    x = torch.cat([x for x, _ in loader]).flatten(1)
    assert len(x) == 56
    for start in (0, 20):
        assert len(x[start : start + 20].unique(dim=0)) == len(x[:20].unique(dim=0)) >= 19


def test_modifiers_and_flatten():
    from datamodules import Classes

    data = _make("random_label_digits", num_samples=60, flatten=True, modifiers=[Classes([0, 1, 2], remap=True)])
    x, y = _all(data.task_dataset(0))
    assert x.shape[1:] == (64,)
    assert data.num_classes == 3
    assert y.max() == 2
    assert 10 <= len(x) <= 30


# files


def _mnist(root, n=30):
    """The IDX files that torchvision's MNIST reads."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", n), ("t10k", 5)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(
            b"\0\0\x08\x03" + b"".join(int(v).to_bytes(4, "big") for v in images.shape) + images.tobytes()
        )
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + count.to_bytes(4, "big") + labels.tobytes())


@pytest.mark.parametrize("problem", ["permuted_mnist", "random_label_mnist"])
def test_mnist_files(tmp_path, problem):
    _mnist(tmp_path)
    data = _make(problem, root=str(tmp_path), download=False, num_samples=20)
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == (16, 1, 28, 28)
    assert x.dtype == torch.float32
    assert 0.9 < x.max() <= 1
    assert y.dtype == torch.int64
    assert data.num_classes == 10
    with pytest.raises(ValueError, match="exceeds the 30 images"):
        _make(problem, root=str(tmp_path), download=False, num_samples=31)


def _cifar(root, name, classes, per_class):
    """The pickled batches that torchvision's CIFAR reads; its checksums are of the real files."""
    from torchvision import datasets

    cls = getattr(datasets, name)
    folder = root / cls.base_folder
    folder.mkdir(parents=True)
    key = "labels" if name == "CIFAR10" else "fine_labels"
    labels = np.tile(np.arange(classes), per_class)
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    parts = np.array_split(np.arange(len(labels)), len(cls.train_list))
    for (file, _), rows in zip(cls.train_list, parts, strict=True):
        (folder / file).write_bytes(pickle.dumps({"data": pixels[rows], key: labels[rows].tolist()}))
    names = {cls.meta["key"]: [str(i) for i in range(classes)]}
    (folder / cls.meta["filename"]).write_bytes(pickle.dumps(names))


def test_cifar_files(tmp_path, monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    _cifar(tmp_path, "CIFAR10", 10, 5)
    data = _make("random_label_cifar", root=str(tmp_path), download=False, num_samples=40)
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == (16, 3, 32, 32)
    assert 0.9 < x.max() <= 1
    assert y.max() <= 9

    _cifar(tmp_path, "CIFAR100", 100, 4)
    data = _make("cifar100_5plus1", root=str(tmp_path), download=False, num_samples=3)
    five, one = data.task_dataset(0), data.task_dataset(1)
    assert (len(five), len(one)) == (15, 3)
    assert len(five.targets.unique()) == 5
    assert not set(five.targets.tolist()) & set(one.targets.tolist())
    assert data.num_classes == 100
    assert len(data.train_dataloader()) == 780


def _imagenet(folder, kind, classes=5, count=6):
    rng = np.random.default_rng(0)
    for c in range(classes):
        images = rng.integers(0, 200, (count, 32, 32, 3), dtype=np.uint8)
        images[..., 0] = 10 * c  # tells the class
        name = folder / f"n{c:08d}"
        if kind == "folder":
            name.mkdir(parents=True)
            for i, image in enumerate(images):
                Image.fromarray(image).save(name / f"{i}.png")
        elif kind == "npy":
            np.save(name, images.transpose(0, 3, 1, 2))
        else:
            np.savez(name, data=images)


@pytest.mark.parametrize("kind", ["folder", "npy", "npz"])
def test_imagenet_by_class(tmp_path, kind):
    _imagenet(tmp_path, kind)
    data = _make("continual_imagenet", path=str(tmp_path), num_samples=4, batch_size=8)
    used = []
    for task in range(2):
        x, y = _all(data.task_dataset(task))
        assert x.shape == (8, 3, 32, 32)
        assert y.tolist() == [0] * 4 + [1] * 4
        red = (x[:, 0, 0, 0] * 25.5).round().int()
        assert len(red[:4].unique()) == len(red[4:].unique()) == 1
        used += [int(red[0]), int(red[4])]
    assert len(set(used)) == 4
    assert data.num_classes == 2
    with pytest.raises(ValueError, match="has 6"):
        _make("continual_imagenet", path=str(tmp_path), num_samples=7).task_dataset(0)


TEXT = "To be, or not to be: that is the question. 'Tis nobler in the mind to suffer the slings and arrows. " * 8


def test_shakespeare_permutes_the_vocabulary(tmp_path):
    path = tmp_path / "all_shakespeare.txt"
    path.write_text(TEXT)
    data = _make("permuted_shakespeare", path=str(path), context=12, num_samples=40)
    tokens, size = data._tokens
    assert size == data.num_classes == len(set(split_words(TEXT)))
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == y.shape == (8, 12)
    assert x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    # Undone, the windows are windows of the text; tasks differ in the numbering only.
    text = tokens.tolist()
    windows = {tuple(text[i : i + 12]) for i in range(len(text) - 11)}
    orders = []
    for task in (0, 1):
        dataset = data.task_dataset(task)
        assert len(dataset) == 40
        order = torch.randperm(size, generator=torch.Generator().manual_seed(data._task_seed(task)))
        orders.append(order)
        for row in range(5):
            assert tuple(order.argsort()[dataset[row][0]].tolist()) in windows
    assert not torch.equal(*orders)


def test_words_and_vocabulary():
    assert split_words("Don't stop, me!") == ["Don't", "stop", ",", "me", "!"]
    ids, size = encode(["b", "a", "b", "c", "d", "a", "b"], 3)
    assert size == 3
    assert ids.tolist() == [0, 1, 0, 2, 2, 1, 0]
    assert encode([50256, 11, 11])[0].tolist() == [1, 0, 0]


def test_a_tokenizer_of_transformers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"to": 0, "be": 7, "?": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tok")
    (tmp_path / "t.txt").write_text("to be or not to be " * 5)
    data = _make(
        "permuted_shakespeare", path=str(tmp_path / "t.txt"), tokenizer=str(tmp_path / "tok"), context=4, num_samples=3
    )
    assert data.num_classes == 3
    assert data._tokens[0][:6].tolist() == [0, 1, 2, 2, 0, 1]


# bad input


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"problem": "permuted_cifar"}, ValueError, "problem"),
        ({"epochs_per_task": 0}, ValueError, "epochs_per_task"),
        ({"num_samples": 0}, ValueError, "num_samples"),
        ({"num_samples": 1798}, ValueError, "exceeds the 1797 images"),
        ({"steps_per_epoch": 0}, ValueError, "steps_per_epoch"),
        ({"vocab_size": 1}, ValueError, "vocab_size"),
        ({"path": "somewhere"}, ValueError, "does not take a path"),
        ({"problem": "permuted_shakespeare"}, ValueError, "needs a path"),
        ({"problem": "permuted_shakespeare", "path": "nowhere.txt"}, FileNotFoundError, "Shakespeare"),
        ({"problem": "continual_imagenet", "path": "nowhere"}, FileNotFoundError, "image-net.org"),
        ({"problem": "permuted_mnist", "root": "nowhere", "download": False}, FileNotFoundError, "MNIST was not found"),
    ],
)
def test_bad_options_are_named(options, error, match):
    with pytest.raises(error, match=match):
        _make(**options)


def test_downloads_is_true_where_files_are_needed():
    assert not ContinualDataModule().downloads
    assert not ContinualDataModule("random_label_digits").downloads
    assert ContinualDataModule("permuted_mnist").downloads
    assert ContinualDataModule("continual_imagenet", path="x").downloads
