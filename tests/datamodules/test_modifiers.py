"""Modifiers: what they change, what they leave, their seeds, bad input."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import (
    ArrayDataset,
    Classes,
    LabelNoise,
    PermutedPixels,
    PixelNoise,
    RandomLabels,
    SoftLabels,
    SpuriousBackground,
    SpuriousPatch,
    Subset,
    TwoViews,
    Views,
    WithIndex,
)
from datamodules.modifiers import counter_normal
from lightning_methods.core.batches import (
    GroupBatch,
    IndexedBatch,
    MultiViewBatch,
    SoftLabelBatch,
    TwoViewBatch,
)


class Shift:
    """A random transform that pickles."""

    batched = True

    def __call__(self, x):
        return x + torch.rand(len(x), 1, 1, 1)


@pytest.fixture
def dataset():
    images = torch.arange(100.0).view(-1, 1, 1, 1).expand(-1, 1, 6, 6) / 100
    return ArrayDataset(images.clone(), torch.arange(100) % 4, num_classes=4, training=True)


ALL = [
    Subset(size=0.5),
    Subset(per_class=3),
    Classes([1, 2]),
    LabelNoise(0.3),
    RandomLabels(),
    SoftLabels(torch.rand(100, 4)),
    WithIndex(),
    PixelNoise(0.1),
    PermutedPixels(),
    SpuriousBackground(),
    SpuriousPatch(size=2),
    TwoViews(Shift()),
    Views(clean=None, weak=Shift(), strong=Shift()),
]


@pytest.mark.parametrize("modifier", ALL, ids=lambda m: type(m).__name__)
def test_every_modifier_is_deterministic_pickles_and_leaves_its_input(modifier, dataset):
    state = torch.get_rng_state()
    first = pickle.loads(pickle.dumps(modifier))(dataset)
    assert torch.equal(torch.get_rng_state(), state)
    second = modifier(dataset)
    assert torch.equal(first.targets, second.targets)
    assert torch.equal(first.indices, second.indices)
    for name, value in first.extras.items():
        assert torch.equal(value, second.extras[name])
    assert first.source is dataset.source
    assert torch.equal(dataset.targets, torch.arange(100) % 4)
    assert dataset.batch_type is None
    assert dataset.pixel_ops == ()
    rows = [5, 0, 7]
    for a, b in zip(first.__getitems__(rows), second.__getitems__(rows), strict=True):
        assert torch.equal(a, b)
    pickle.loads(pickle.dumps(first))


@pytest.mark.parametrize("modifier", [ALL[0], ALL[1], ALL[3], ALL[4], ALL[9], ALL[10]], ids=lambda m: type(m).__name__)
def test_seeds_matter(modifier, dataset):
    options = {key: value for key, value in vars(modifier).items() if key != "seed"}
    other = type(modifier)(**options, seed=7)
    a, b = modifier(dataset), other(dataset)
    same = torch.equal(a.indices, b.indices) and torch.equal(a.targets, b.targets)
    assert not same or any(not torch.equal(a.extras[name], b.extras[name]) for name in a.extras)


# selection


def test_subset_by_share_count_class_order_and_rows(dataset, tmp_path):
    half = Subset(size=0.5)(dataset)
    assert torch.bincount(half.targets).tolist() == [13, 13, 12, 12]
    assert (half.indices.diff() > 0).all()
    assert len(Subset(size=7)(dataset)) == 7
    assert Subset(size=7, order="first")(dataset).indices.tolist() == list(range(7))
    few = Subset(per_class=2)(dataset)
    assert torch.bincount(few.targets).tolist() == [2, 2, 2, 2]
    first = Subset(per_class=2, order="first")(dataset)
    assert first.indices.tolist() == list(range(8))
    assert Subset(indices=[9, 3])(dataset).indices.tolist() == [9, 3]
    np.save(tmp_path / "rows.npy", np.array([4, 2]))
    torch.save(torch.tensor([4, 2]), tmp_path / "rows.pt")
    for file in ("rows.npy", "rows.pt"):
        assert Subset(indices=str(tmp_path / file))(dataset).indices.tolist() == [4, 2]


def test_subset_of_a_subset_counts_its_own_rows(dataset):
    assert Subset(indices=[0, 1])(Subset(indices=[9, 3, 7])(dataset)).indices.tolist() == [9, 3]


def test_classes(dataset):
    kept = Classes([3, 1])(dataset)
    assert set(kept.targets.tolist()) == {1, 3}
    assert kept.num_classes == 4
    renumbered = Classes([3, 1], remap=True)(dataset)
    assert renumbered.num_classes == 2
    assert torch.equal(renumbered.targets, (kept.targets == 1).long())


# labels


def test_symmetric_noise_is_uniform_over_the_others():
    clean = ArrayDataset(torch.zeros(8000, 1), torch.arange(8000) % 4, num_classes=4)
    noisy = LabelNoise(0.4)(clean).targets
    wrong = noisy != clean.targets
    assert wrong.sum() == 3200
    shift = (noisy - clean.targets)[wrong] % 4
    assert ((torch.bincount(shift, minlength=4)[1:] / 3200 - 1 / 3).abs() < 0.03).all()


def test_pairflip_takes_the_next_class_that_occurs(dataset):
    noisy = LabelNoise(1.0, kind="pairflip")(dataset)
    assert torch.equal(noisy.targets, (dataset.targets + 1) % 4)
    some = LabelNoise(1.0, kind="pairflip")(Classes([1, 3])(dataset))
    assert set(some.targets.tolist()) == {1, 3}
    assert torch.equal(some.targets, 4 - Classes([1, 3])(dataset).targets)


def test_noise_leaves_unknown_labels():
    targets = torch.where(torch.arange(100) < 50, -1, torch.arange(100) % 2)
    half = ArrayDataset(torch.zeros(100, 1), targets, num_classes=2)
    noisy = LabelNoise(1.0)(half)
    assert (noisy.targets[:50] == -1).all()
    assert (noisy.targets[50:] != half.targets[50:]).all()


def test_random_labels_are_uniform():
    clean = ArrayDataset(torch.zeros(8000, 1), torch.zeros(8000, dtype=torch.long), num_classes=5)
    labels = RandomLabels()(clean)
    assert ((torch.bincount(labels.targets) / 8000 - 0.2).abs() < 0.02).all()
    two = RandomLabels(num_classes=2)(clean)
    assert two.num_classes == 2
    assert two.targets.max() == 1
    regression = ArrayDataset(torch.zeros(10, 1), torch.zeros(10))
    assert RandomLabels(num_classes=3)(regression).targets.dtype == torch.long


def test_soft_labels_stay_with_their_samples(dataset, tmp_path):
    soft = torch.rand(100, 4)
    torch.save(soft, tmp_path / "soft.pt")
    some = Subset(indices=[7, 3])(SoftLabels(str(tmp_path / "soft.pt"))(dataset))
    batch = some.__getitems__([1, 0])
    assert isinstance(batch, SoftLabelBatch)
    assert torch.equal(batch.soft_labels, soft[[3, 7]])
    assert torch.equal(batch.target, torch.tensor([3, 3]))
    by_item = SoftLabels(soft)(Subset(indices=[7, 3])(dataset))  # one row per raw item
    assert torch.equal(by_item.__getitems__([0]).soft_labels, soft[[7]])
    by_row = SoftLabels(soft[:2])(Subset(indices=[7, 3])(dataset))
    assert torch.equal(by_row.__getitems__([0]).soft_labels, soft[[0]])


def test_with_index(dataset):
    batch = WithIndex()(Subset(indices=[9, 3])(dataset)).__getitems__([1])
    assert isinstance(batch, IndexedBatch)
    assert batch.index.tolist() == [1]
    two = TwoViews(Shift())(dataset)
    assert WithIndex()(two).batch_type is TwoViewBatch
    with pytest.raises(ValueError, match="GroupBatch"):
        WithIndex()(SpuriousPatch(size=2)(dataset))


# pixels


def test_counter_noise_is_standard_normal_and_a_function_of_its_key():
    noise = counter_normal(torch.arange(4000), (5, 5), seed=3)
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    assert abs((noise**4).mean() - 3) < 0.1
    correlation = torch.corrcoef(noise.flatten(1).T) - torch.eye(25)
    assert correlation.abs().max() < 0.08
    assert torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1].abs() < 0.02
    assert torch.equal(counter_normal(torch.tensor([17]), (5, 5), 3)[0], noise[17])
    other = counter_normal(torch.arange(4000), (5, 5), seed=4)
    assert torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1].abs() < 0.02


def test_fixed_noise_belongs_to_the_image_and_fresh_noise_does_not(dataset):
    clean = dataset.__getitems__([30])[0]
    fixed = PixelNoise(0.5)(dataset)
    first = fixed.__getitems__([30])[0]
    fixed.set_epoch(5)
    assert torch.equal(fixed.__getitems__([30])[0], first)
    assert torch.equal(Subset(indices=[30])(fixed).__getitems__([0])[0], first)
    assert 0.2 < (first - clean).std() < 0.8
    fresh = PixelNoise(0.5, fixed=False)(dataset)
    first = fresh.__getitems__([30])[0]
    fresh.set_epoch(6)
    assert not torch.equal(fresh.__getitems__([30])[0], first)


def test_one_permutation_for_all_images_and_channels():
    images = torch.rand(10, 3, 5, 5)
    dataset = ArrayDataset(images, torch.arange(10))
    x = PermutedPixels(seed=1)(dataset).__getitems__(list(range(10)))[0]
    order = torch.randperm(25, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(x.flatten(2), images.flatten(2)[:, :, order])
    again = PermutedPixels(seed=2)(PermutedPixels(seed=1)(dataset))
    assert len(again.pixel_ops) == 1
    both = PermutedPixels(seed=2, cumulative=True)(PermutedPixels(seed=1)(dataset)).__getitems__(list(range(10)))[0]
    second = torch.randperm(25, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(both.flatten(2), x.flatten(2)[:, :, second])
    vectors = PermutedPixels(seed=1)(ArrayDataset(images.flatten(1), torch.arange(10))).__getitems__([0])[0]
    assert torch.equal(vectors.sort().values, images[:1].flatten(1).sort().values)


def test_permutation_needs_one_size():
    files = [Image.new("RGB", (4, 4)), Image.new("RGB", (5, 4))]
    dataset = PermutedPixels()(ArrayDataset(files, [0, 1]))
    dataset[0]
    with pytest.raises(ValueError, match="one size"):
        dataset[1]


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("kind", [SpuriousBackground, SpuriousPatch])
def test_attribute_agrees_with_the_label_as_asked(kind, k):
    n = 20_000
    dataset = ArrayDataset(torch.zeros(n, 1, 4, 4), torch.arange(n) % k, num_classes=k)
    for correlation in (0.9, 1.0, 0.0, 1 / k):
        group = kind(correlation=correlation)(dataset).extras["group"]
        agrees = group == dataset.targets
        assert abs(agrees.float().mean() - correlation) < 0.02
        if 0 < correlation < 1 and k > 2:
            other = (group - dataset.targets)[~agrees] % k
            share = torch.bincount(other, minlength=k)[1:] / len(other)
            assert ((share - 1 / (k - 1)).abs() < 0.03).all()


def test_background_follows_its_formula():
    dataset = ArrayDataset(torch.rand(50, 1, 4, 4), torch.arange(50) % 2, num_classes=2, training=True)
    dataset.source[:, :, 0, 0] = 0.0
    dataset.source[:, :, 1, 1] = 1.0
    colors = [[0.1, 0.6, 0.3], [0.3, 0.1, 0.7]]
    plain = SpuriousBackground(noise=0.0, jitter=0.0)(dataset)
    batch = plain.__getitems__(list(range(50)))
    assert isinstance(batch, GroupBatch)
    assert batch.x.shape == (50, 3, 4, 4)
    color = torch.tensor(colors)[batch.group]
    torch.testing.assert_close(batch.x[:, :, 0, 0], color)
    torch.testing.assert_close(batch.x[:, :, 1, 1], torch.ones(50, 3))
    expected = dataset.source + (1 - dataset.source) * color[:, :, None, None]
    torch.testing.assert_close(batch.x, expected)
    noisy = SpuriousBackground(noise=0.15, jitter=0.1)(dataset)
    rest = noisy.__getitems__(list(range(50))).x - batch.x
    assert 0.12 < rest[:, :, 1, 1].std() < 0.18
    jitter = noisy.extras["background"] - torch.tensor(colors)[noisy.extras["group"]]
    assert 0.07 < jitter.std() < 0.13
    # colours stay with their images through a selection
    torch.testing.assert_close(
        Subset(indices=[8])(noisy).__getitems__([0]).x, noisy.__getitems__(list(range(50))).x[[8]]
    )


def test_patch_is_pasted_where_it_should_be():
    dataset = ArrayDataset(torch.full((40, 3, 9, 9), 0.123), torch.arange(40) % 2, num_classes=2)
    for position in ("corner", "center", "random"):
        x = SpuriousPatch(size=3, position=position)(dataset).__getitems__(list(range(40))).x
        changed = (x != 0.123).any(1)
        assert (changed.sum((1, 2)) == 9).all()
        rows, columns = changed.any(2), changed.any(1)
        assert (rows.sum(1) == 3).all()
        assert (columns.sum(1) == 3).all()
        places = rows.int().argmax(1)
        expected = {"corner": {0}, "center": {3}, "random": set(range(7))}[position]
        assert set(places.tolist()) == expected
    grey = ArrayDataset(torch.zeros(40, 1, 9, 9), torch.arange(40) % 4, num_classes=4)
    batch = SpuriousPatch(correlation=1.0, size=3)(grey).__getitems__(list(range(40)))
    torch.testing.assert_close(batch.x[:, 0, 0, 0], (batch.group + 1) / 4)


def test_pixel_operations_come_before_the_views(dataset):
    noisy = TwoViews(Shift())(PixelNoise(0.2)(dataset)).__getitems__([50])
    offsets1 = noisy.view1 - PixelNoise(0.2)(dataset).__getitems__([50])[0]
    offsets2 = noisy.view2 - PixelNoise(0.2)(dataset).__getitems__([50])[0]
    assert offsets1.std() < 1e-6
    assert offsets2.std() < 1e-6
    assert (offsets1.mean() - offsets2.mean()).abs() > 1e-4


def test_pixel_operations_on_image_files_and_bytes():
    image = Image.fromarray(np.full((6, 5, 3), 51, dtype=np.uint8))
    x, _ = PixelNoise(0.0)(ArrayDataset([image], [0]))[0]
    assert x.shape == (3, 6, 5)
    torch.testing.assert_close(x, torch.full((3, 6, 5), 0.2))
    levels = ArrayDataset(torch.full((1, 3, 6, 5), 51, dtype=torch.uint8), [0])
    torch.testing.assert_close(PixelNoise(0.0)(levels).__getitems__([0])[0][0], x)


# views


def test_two_views_are_two_draws(dataset):
    batch = TwoViews(Shift())(dataset).__getitems__([3, 8])
    assert isinstance(batch, TwoViewBatch)
    assert not torch.equal(batch.view1, batch.view2)
    assert batch.label.tolist() == [3, 0]
    assert batch.index.tolist() == [3, 8]


def test_views_by_name(dataset):
    batch = Views(clean=None, weak=Shift(), strong=Shift())(dataset).__getitems__([3])
    assert isinstance(batch, MultiViewBatch)
    torch.testing.assert_close(batch.clean, torch.full((1, 1, 6, 6), 0.03))
    assert not torch.equal(batch.weak, batch.strong)
    two = Views(view1=Shift(), view2=Shift())(dataset)
    assert two.batch_type is TwoViewBatch
    assert Views("TwoViewBatch", view1=None, view2=None)(dataset).batch_type is TwoViewBatch


# bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Subset(), "exactly one"),
        (lambda: Subset(size=3, per_class=1), "exactly one"),
        (lambda: Subset(size=0), "size"),
        (lambda: Subset(size=1.5), "size"),
        (lambda: Subset(per_class=0), "per_class"),
        (lambda: Subset(size=3, order="last"), "order"),
        (lambda: Classes([]), "keep"),
        (lambda: Classes([1, 1]), "keep"),
        (lambda: LabelNoise(1.1), "rate"),
        (lambda: LabelNoise(0.1, kind="asymmetric"), "kind"),
        (lambda: RandomLabels(num_classes=1), "num_classes"),
        (lambda: PixelNoise(-0.1), "std"),
        (lambda: SpuriousBackground(correlation=2), "correlation"),
        (lambda: SpuriousBackground(noise=-1), "noise"),
        (lambda: SpuriousBackground(jitter=-1), "jitter"),
        (lambda: SpuriousBackground(colors=[[1, 0]]), "colors"),
        (lambda: SpuriousPatch(size=0), "size"),
        (lambda: SpuriousPatch(position="left"), "position"),
        (lambda: Views(a=None), "no batch type"),
        (lambda: Views(), "no batch type"),
        (lambda: Views("TwoViewBatch", clean=None), "no field"),
        (lambda: Views("ThreeViewBatch", view1=None), "batch_type"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("modifier", "message"),
    [
        (Subset(size=101), "101 of 100"),
        (Subset(size=0.001), "0 of 100"),
        (Subset(per_class=26), "26 samples per class"),
        (Subset(per_class=26, order="first"), "26 samples per class"),
        (Subset(indices=[100]), r"0\.\.99"),
        (Subset(indices=[-1]), r"0\.\.99"),
        (Subset(indices=[0.5]), "integers"),
        (Classes([4]), r"0\.\.3"),
        (SoftLabels(torch.rand(99, 4)), "99 rows"),
        (SoftLabels(torch.rand(100, 5)), "4 columns"),
        (SoftLabels(torch.ones(100, 4, dtype=torch.long)), "floats"),
        (SpuriousBackground(colors=[[0, 0, 1]] * 3), "one colour for each of 4"),
    ],
)
def test_bad_use(modifier, message, dataset):
    with pytest.raises(ValueError, match=message):
        modifier(dataset)


def test_labels_are_needed(dataset):
    regression = ArrayDataset(torch.zeros(10, 1, 4, 4), torch.zeros(10))
    for modifier in (LabelNoise(0.1), Classes([0]), SpuriousPatch(), SpuriousBackground(), RandomLabels()):
        with pytest.raises(ValueError, match="class indices"):
            modifier(regression)
    one = Classes([1])(dataset)
    with pytest.raises(ValueError, match="two classes"):
        LabelNoise(0.1)(one)


def test_bad_images(dataset):
    with pytest.raises(ValueError, match="1 or 3"):
        SpuriousBackground()(ArrayDataset(torch.zeros(4, 2, 4, 4), [0, 1, 0, 1])).__getitems__([0])
    with pytest.raises(ValueError, match="at least 7"):
        SpuriousPatch(size=7)(dataset).__getitems__([0])


def test_bad_files(tmp_path, dataset):
    with pytest.raises(FileNotFoundError, match=r"soft\.pt"):
        SoftLabels(str(tmp_path / "soft.pt"))(dataset)
    torch.save({"a": 1}, tmp_path / "dict.pt")
    with pytest.raises(ValueError, match="one tensor"):
        SoftLabels(str(tmp_path / "dict.pt"))(dataset)
    (tmp_path / "soft.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"\.npy or \.pt"):
        SoftLabels(str(tmp_path / "soft.csv"))(dataset)
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="pickle"):
        SoftLabels(str(tmp_path / "objects.npy"))(dataset)
