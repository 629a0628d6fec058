"""Splits, modifiers' data set, loaders: order, random numbers, several processes, bad input."""

from __future__ import annotations

import pickle
from typing import NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _is_dataloader_shuffled, _update_dataloader
from torch import Tensor, nn
from torch.utils.data import RandomSampler, WeightedRandomSampler

from datamodules import ArrayDataset, BaseDataModule, LabelNoise, Subset, WithIndex
from datamodules.base import EpochSampler, concatenate, stratified_parts
from lightning_methods.core.batches import GroupBatch, IndexedBatch, MultiViewBatch


class Pool(BaseDataModule):
    """One pool of 200 samples in 4 unequal classes; x is the row, so that order and membership can be read off."""

    def load_split(self, split):
        if split != "train":
            return None
        x = torch.arange(200.0)[:, None]
        return ArrayDataset(x, torch.arange(200) % 10 // 3, num_classes=4)


class Official(BaseDataModule):
    """A set with train (100), test (40) and unlabeled (50) parts of its own."""

    available_splits = ("train", "val", "test", "unlabeled")
    default_val_size = 0

    def load_split(self, split):
        if split == "val":
            return None
        start, n = {"train": (0, 100), "test": (1000, 40), "unlabeled": (2000, 50)}[split]
        targets = torch.full((n,), -1) if split == "unlabeled" else torch.arange(n) % 4
        return ArrayDataset(start + torch.arange(float(n))[:, None], targets, num_classes=4)


class AddNoise:
    """A transform of single samples."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + torch.rand(1)


class AddNoiseBatched:
    batched = True

    def __call__(self, x: Tensor) -> Tensor:
        return x + torch.rand(len(x), 1)


def ready(dm: BaseDataModule) -> BaseDataModule:
    dm.prepare_data()
    dm.setup("fit")
    return dm


def rows(dataset: ArrayDataset) -> set[int]:
    return (
        set(dataset.source[dataset.indices].flatten().long().tolist()) if isinstance(dataset.source, Tensor) else set()
    )


def values(loader, epoch: int | None = None) -> Tensor:
    if epoch is not None:
        loader.sampler.set_epoch(epoch)
    return torch.cat([batch[0] for batch in loader]).flatten()


# splits


def test_pool_is_split_60_20_20_with_classes_in_proportion():
    dm = ready(Pool())
    parts = [dm.train_set, dm.val_set, dm.test_set]
    assert [len(part) for part in parts] == [120, 40, 40]
    assert not rows(parts[0]) & rows(parts[1])
    assert not rows(parts[0]) & rows(parts[2])
    assert not rows(parts[1]) & rows(parts[2])
    whole = torch.bincount(torch.arange(200) % 10 // 3)
    for part in parts:
        counts = torch.bincount(part.targets, minlength=4)
        assert ((counts - whole * len(part) / 200).abs() < 1).all()
    assert dm.num_classes == 4
    assert torch.equal(dm.class_counts, torch.bincount(dm.train_targets, minlength=4))
    assert dm.class_counts.dtype == torch.long


def test_splits_follow_the_seed_and_nothing_else():
    torch.manual_seed(1)
    first = ready(Pool(seed=3))
    torch.manual_seed(2)
    second = ready(Pool(seed=3))
    other = ready(Pool(seed=4))
    assert rows(first.test_set) == rows(second.test_set)
    assert rows(first.train_set) == rows(second.train_set)
    assert rows(first.test_set) != rows(other.test_set)


def test_test_set_does_not_depend_on_the_other_sizes():
    assert rows(ready(Pool(test_size=50, val_size=10)).test_set) == rows(
        ready(Pool(test_size=50, val_size=70)).test_set
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_size": 100}, (100, 40, 60)),
        ({"train_size": 150}, (150, 40, 10)),
        ({"train_size": 120, "test_size": 80}, (120, 80, 80)),  # nothing left for validation: it sees the test set
        ({"train_size": 100, "val_size": 30, "test_size": 20}, (100, 30, 20)),
        ({"val_size": 0.1, "test_size": 0.3}, (120, 20, 60)),
        ({"val_size": 0}, (160, 40, 40)),
        ({"test_size": 0}, (160, 40, 40)),
        ({"train_size": 0.5, "val_size": 0.25}, (100, 50, 50)),
        ({"splits": "train+test"}, (200, 200, 200)),
        ({"splits": "train+test", "train_size": 50}, (50, 50, 50)),
        ({"splits": "train+val"}, (160, 40, 40)),
    ],
)
def test_sizes(sizes, expected):
    dm = ready(Pool(**sizes))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == expected
    if "splits" not in sizes:
        assert not rows(dm.train_set) & rows(dm.test_set)


def test_official_parts_are_kept():
    dm = ready(Official())
    assert rows(dm.train_set) == set(range(100))
    assert rows(dm.test_set) == rows(dm.val_set) == set(range(1000, 1040))
    dm = ready(Official(val_size=20, test_size=0.5))
    assert (len(dm.train_set), len(dm.val_set), len(dm.test_set)) == (80, 20, 20)
    assert rows(dm.val_set) < set(range(100))
    assert rows(dm.test_set) < set(range(1000, 1040))


def test_merged_splits():
    dm = ready(Official(splits="train+test"))
    assert rows(dm.train_set) == rows(dm.val_set) == rows(dm.test_set) == {*range(100), *range(1000, 1040)}
    assert torch.equal(dm.train_set.source[dm.train_set.indices].flatten().long() % 1000 % 4, dm.train_targets)


def test_unlabeled_samples_train_only():
    dm = ready(Official(splits="train+unlabeled", val_size=20))
    assert rows(dm.train_set) > set(range(2000, 2050))
    assert rows(dm.val_set) < set(range(100))
    assert len(dm.train_set) == 130
    assert dm.class_counts.sum() == 80


def test_classes_and_per_class_counts():
    dm = Pool()
    dm.classes, dm.val_per_class, dm.test_per_class = [1, 3], 5, 4
    ready(dm)
    assert torch.bincount(dm.val_set.targets, minlength=4).tolist() == [0, 5, 0, 5]
    assert torch.bincount(dm.test_set.targets, minlength=4).tolist() == [0, 4, 0, 4]
    assert dm.num_classes == 4
    assert set(dm.train_targets.tolist()) == {1, 3}


def test_setup_is_idempotent():
    dm = ready(Pool(modifiers=[LabelNoise(0.5)]))
    before = dm.train_set
    dm.setup("fit")
    dm.setup("test")
    assert dm.train_set is before


def test_regression_targets():
    class Regression(BaseDataModule):
        def load_split(self, split):
            return ArrayDataset(torch.randn(50, 3), torch.randn(50)) if split == "train" else None

    dm = ready(Regression())
    assert dm.num_classes == 0
    x, y = next(iter(dm.train_dataloader()))
    assert x.shape == (30, 3)
    assert y.dtype == torch.float32
    with pytest.raises(RuntimeError, match="no classes"):
        dm.class_counts  # noqa: B018


def test_stratified_parts_are_exact():
    targets = torch.tensor([0] * 7 + [1] * 2 + [2] * 91)
    parts = stratified_parts(targets, [10, 30], seed=0)
    assert [len(part) for part in parts] == [10, 30, 60]
    assert torch.cat(parts).sort().values.tolist() == list(range(100))
    assert torch.bincount(targets[parts[1]], minlength=3).sum() == 30


# the data set


class Odd(NamedTuple):
    x: Tensor
    label: Tensor
    index: Tensor
    group: Tensor
    weight: Tensor


def test_fields_are_filled_by_name():
    dataset = ArrayDataset(
        torch.arange(12.0).view(6, 2),
        [0, 1, 0, 1, 0, 1],
        extras={"group": torch.arange(6) * 10},
        batch_type=Odd,
        training=True,
    ).select(torch.tensor([4, 1]))
    sample = dataset[1]
    assert sample.x.tolist() == [2, 3]
    assert (sample.label, sample.index, int(sample.group), sample.weight) == (1, 1, 10, -1)
    batch = dataset.__getitems__([1, 0])
    assert batch.group.tolist() == [10, 40]
    assert batch.index.tolist() == [1, 0]
    assert batch.weight.tolist() == [-1, -1]
    evaluation = dataset.replace(training=False)
    assert evaluation[0].index == -1
    assert evaluation.__getitems__([0, 1]).index.tolist() == [-1, -1]


def test_batches_and_single_samples_agree():
    dataset = ArrayDataset(
        torch.randint(0, 256, (6, 3, 4, 4), dtype=torch.uint8), torch.arange(6), batch_type=IndexedBatch, training=True
    )
    batch = dataset.__getitems__([3, 0, 5])
    singles = [dataset[row] for row in (3, 0, 5)]
    torch.testing.assert_close(batch.x, torch.stack([sample.x for sample in singles]))
    assert batch.x.max() <= 1
    assert batch.y.tolist() == [sample.y for sample in singles]


def test_modifying_copies_nothing():
    dataset = ArrayDataset(torch.randn(6, 2), torch.arange(6))
    changed = WithIndex()(LabelNoise(0.5)(Subset(size=4)(dataset)))
    assert changed.source is dataset.source
    assert len(dataset) == 6
    assert dataset.batch_type is None


def test_dataset_pickles():
    dataset = ArrayDataset(torch.randn(6, 2), torch.arange(6), transforms={"x": AddNoise()})
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again.source, dataset.source)
    assert len(again) == 6


def test_concatenate_keeps_rows_together():
    a = ArrayDataset(torch.arange(4.0), torch.tensor([0, 1, 2, 3])).select(torch.tensor([3, 1]))
    b = ArrayDataset(torch.arange(10.0, 13.0), torch.tensor([0, 1, 2]))
    both = concatenate([a, b])
    assert [(float(both[i][0]), both[i][1]) for i in range(5)] == [(3, 3), (1, 1), (10, 0), (11, 1), (12, 2)]
    lists = concatenate([ArrayDataset(list(torch.arange(4.0)), [0, 1, 2, 3]).select(torch.tensor([2])), b])
    assert [float(lists[i][0]) for i in range(4)] == [2, 10, 11, 12]


# order and random numbers


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return values(ready(Pool(seed=seed, train_size=200, splits="train+test")).train_dataloader(), epoch).tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 5) == order(0, 5)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert sorted(order(0, 0)) == list(range(200))


def test_a_plain_loop_gets_a_new_order_every_pass():
    loader = ready(Pool()).train_dataloader()
    first, second = values(loader), values(loader)
    assert not torch.equal(first, second)
    again = ready(Pool()).train_dataloader()
    assert torch.equal(values(again), first)
    assert torch.equal(values(again), second)


def test_iterating_leaves_the_global_generators_alone():
    loader = ready(Pool(train_transform=AddNoise())).train_dataloader()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    values(loader)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("transform", [AddNoise(), AddNoiseBatched()])
def test_random_transforms_differ_between_samples_and_epochs_and_repeat(transform):
    def noise(epoch, seed=0):
        loader = ready(Pool(seed=seed, train_transform=transform, splits="train+test")).train_dataloader()
        return values(loader, epoch).sort().values - torch.arange(200.0)

    assert noise(0).unique().numel() > 195
    assert torch.equal(noise(0), noise(0))
    assert (noise(0) == noise(1)).float().mean() < 0.05
    assert (noise(0) == noise(0, seed=1)).float().mean() < 0.05


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing(persistent):
    def loader(workers):
        return ready(
            Pool(num_workers=workers, train_transform=AddNoise(), persistent_workers=persistent)
        ).train_dataloader()

    alone, several = loader(0), loader(2)
    for epoch in (0, 1, 4):
        assert torch.equal(values(alone, epoch), values(several, epoch))


def test_evaluation_draws_the_same_every_time():
    dm = ready(Pool(eval_transform=AddNoise()))
    first = values(dm.val_dataloader())
    dm.train_set.set_epoch(3)
    assert torch.equal(values(dm.val_dataloader()), first)


class Recorder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[int, list[float]] = {}

    def training_step(self, batch, batch_idx):
        self.seen.setdefault(self.current_epoch, []).extend(batch[0].flatten().tolist())
        return self.layer(batch[0]).mean() * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(tmp_path, **options):
    return L.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )


def test_resumed_run_sees_what_the_uninterrupted_run_saw(tmp_path):
    def data():
        return Pool(train_transform=AddNoise())

    whole = Recorder()
    trainer(tmp_path, max_epochs=4, enable_checkpointing=False).fit(whole, data())
    half = Recorder()
    run = trainer(tmp_path, max_epochs=2)
    run.fit(half, data())
    run.save_checkpoint(tmp_path / "half.ckpt")
    rest = Recorder()
    trainer(tmp_path, max_epochs=4).fit(rest, data(), ckpt_path=tmp_path / "half.ckpt")
    assert {**half.seen, **rest.seen} == whole.seen
    assert len({tuple(seen) for seen in whole.seen.values()}) == 4
    assert set(rest.seen) == {2, 3}


def test_trainer_takes_up_new_train_indices(tmp_path):
    class Prune(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.datamodule.set_train_indices(torch.arange(10))

    module = Recorder()
    run = trainer(tmp_path, max_epochs=3, callbacks=[Prune()], enable_checkpointing=False)
    run.fit(module, Pool())
    assert [len(module.seen[epoch]) for epoch in range(3)] == [120, 10, 10]
    assert run.reload_dataloaders_every_n_epochs == 0


# several processes


def shard(dm: BaseDataModule, replicas: int, rank: int, stage=RunningStage.TRAINING):
    """What Lightning makes of the loader in a run of several processes."""
    loader = dm.train_dataloader() if stage == RunningStage.TRAINING else dm.test_dataloader()
    sampler = _get_distributed_sampler(
        loader,
        _is_dataloader_shuffled(loader),
        overfit_batches=0,
        mode=stage,
        num_replicas=replicas,
        rank=rank,
    )
    return _update_dataloader(loader, sampler, mode=stage)


@pytest.mark.parametrize("replicas", [2, 3])
def test_processes_share_one_random_order(replicas):
    whole = values(ready(Pool()).train_dataloader(), 7)
    shards = [shard(ready(Pool()), replicas, rank) for rank in range(replicas)]
    parts = [values(loader, 7) for loader in shards]
    assert torch.equal(torch.stack(parts, dim=1).flatten(), whole)
    assert not torch.equal(values(shards[0], 8), parts[0])
    assert shards[0].sampler.dataset._sampler.dataset.epoch == 8


def test_processes_share_the_draws_of_any_sampler():
    def balanced(dataset):
        counts = torch.bincount(dataset.targets)
        return WeightedRandomSampler(1 / counts[dataset.targets].double(), len(dataset))

    whole = values(ready(Pool(sampler=balanced)).train_dataloader(), 2)
    parts = []
    for rank in range(2):
        torch.manual_seed(rank)  # the global generators of two processes differ
        parts.append(values(shard(ready(Pool(sampler=balanced)), 2, rank), 2))
    assert torch.equal(torch.stack(parts, dim=1).flatten(), whole)
    targets = torch.arange(200) % 10 // 3
    assert (torch.bincount(targets[whole.long()], minlength=4) > 15).all()


def test_every_process_draws_other_augmentations():
    dms = [ready(Pool(train_transform=AddNoise())) for _ in range(2)]
    parts = [values(shard(dm, 2, rank), 0) % 1 for rank, dm in enumerate(dms)]
    assert (parts[0] == parts[1]).float().mean() < 0.05


def test_evaluation_is_sharded_in_order():
    parts = [values(shard(ready(Pool()), 2, rank, RunningStage.TESTING)) for rank in range(2)]
    assert torch.equal(torch.stack(parts, dim=1).flatten(), values(ready(Pool()).test_dataloader()))


def test_class_balanced_and_sqrt_samplers():
    pytest.importorskip("datamodules.long_tail")
    dm = ready(Pool(sampler="class_balanced", train_size=160))
    targets = torch.arange(200) % 10 // 3
    drawn = torch.cat([values(dm.train_dataloader(), epoch) for epoch in range(20)]).long()
    share = torch.bincount(targets[drawn], minlength=4) / len(drawn)
    assert ((share - 0.25).abs() < 0.03).all()
    drawn = torch.cat([values(ready(Pool(sampler="sqrt")).train_dataloader(), epoch) for epoch in range(20)]).long()
    expected = dm.class_counts.double().sqrt() / dm.class_counts.double().sqrt().sum()
    share = torch.bincount(targets[drawn], minlength=4) / len(drawn)
    assert ((share - expected).abs() < 0.03).all()
    parts = [values(shard(ready(Pool(sampler="class_balanced")), 2, rank), 1) for rank in range(2)]
    whole = values(ready(Pool(sampler="class_balanced")).train_dataloader(), 1)
    assert torch.equal(torch.stack(parts, dim=1).flatten(), whole)


def test_sampler_with_its_own_epoch_is_told():
    class Own(RandomSampler):
        def set_epoch(self, epoch):
            self.told = epoch

    sampler = EpochSampler(ready(Pool()).train_set, Own(range(120)))
    sampler.set_epoch(3)
    assert sampler.inner.told == 3
    assert len(sampler) == 120


# loaders


def test_train_eval_loader_is_in_order_and_not_augmented():
    dm = ready(Pool(train_transform=AddNoise(), modifiers=[WithIndex()]))
    for loader in (
        dm.train_eval_dataloader(),
        dm.feature_dataloader(),
        dm.memory_dataloader(),
        dm.score_dataloader(),
    ):
        batches = list(loader)
        assert torch.equal(torch.cat([b.index for b in batches]), torch.arange(120))
        assert torch.equal(torch.cat([b.x for b in batches]), dm.train_set.source[dm.train_set.indices])


def test_train_eval_loader_turns_views_into_x_y():
    def views(dataset):
        return dataset.replace(
            transforms=dict.fromkeys(("clean", "weak", "strong"), AddNoise()), batch_type=MultiViewBatch
        )

    dm = ready(Pool(modifiers=[views]))
    assert isinstance(next(iter(dm.train_dataloader())), MultiViewBatch)
    x, y = next(iter(dm.memory_dataloader()))
    assert torch.equal(x, x.round())
    assert torch.equal(y, dm.train_targets[:32])


def test_groups_reach_the_batch():
    def grouped(dataset):
        return dataset.with_extras(group=torch.arange(len(dataset))).replace(batch_type=GroupBatch)

    dm = ready(Pool(modifiers=[grouped]))
    batch = next(iter(dm.train_dataloader()))
    assert isinstance(batch, GroupBatch)
    assert torch.equal(dm.train_groups, torch.arange(120))
    assert dm.train_candidates is None
    assert len(next(iter(dm.val_dataloader()))) == 2


def test_train_indices_before_and_after_setup():
    keep = torch.tensor([5, 0, 7])
    dm = Pool(modifiers=[WithIndex()])
    dm.set_train_indices(keep)
    ready(dm)
    assert len(dm.train_set) == 3
    assert dm.class_counts.sum() == 3
    assert torch.equal(torch.cat([b.index for b in dm.score_dataloader()]), torch.arange(3))
    dm.set_train_indices(torch.arange(20))  # of the whole set, not of what was kept before
    assert len(dm.train_set) == 20
    dm.set_train_indices(None)
    assert len(dm.train_set) == 120
    whole = dm.train_set
    dm.set_train_indices(keep)
    assert torch.equal(dm.train_set.indices, whole.indices[keep])


def test_batch_sizes():
    dm = ready(Pool(batch_size=50, eval_batch_size=7, drop_last=True))
    assert [len(b[0]) for b in dm.train_dataloader()] == [50, 50]
    assert len(next(iter(dm.test_dataloader()))[0]) == 7
    assert [len(b[0]) for b in ready(Pool(batch_size=None)).train_dataloader()] == [120]
    assert len(next(iter(dm.predict_dataloader()))[0]) == 7


# bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"eval_batch_size": -1}, "eval_batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"train_size": 0}, "train_size"),
        ({"train_size": 1.5}, "train_size"),
        ({"val_size": -1}, "val_size"),
        ({"val_size": -0.1}, "val_size"),
        ({"test_size": True}, "test_size"),
        ({"test_size": "half"}, "test_size"),
        ({"sampler": "class_balance"}, "class_balanced"),
        ({"sampler": 3}, "sampler"),
        ({"splits": "train+tset"}, "splits"),
        ({"splits": "test"}, "train"),
        ({"modifiers": [3]}, "modifiers"),
        ({"eval_modifiers": ["Subset"]}, "eval_modifiers"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Pool(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_size": 201}, "200"),
        ({"train_size": 100, "val_size": 60, "test_size": 60}, "ask for more than the 200"),
        ({"val_size": 100, "test_size": 100}, "at least one"),
        ({"val_size": 0, "test_size": 0}, "nothing is left to evaluate on"),
        ({"splits": "train+test", "val_size": 10}, "have no meaning"),
        ({"splits": "train+val", "val_size": 10}, "no meaning"),
        ({"modifiers": [lambda dataset: dataset.select(torch.tensor([], dtype=torch.long))]}, "training set is empty"),
        ({"eval_modifiers": [lambda dataset: dataset.select(torch.tensor([], dtype=torch.long))]}, "val set is empty"),
    ],
)
def test_bad_splits(options, message):
    with pytest.raises(ValueError, match=message):
        ready(Pool(**options))


def test_bad_official_size():
    with pytest.raises(ValueError, match="test_size=41 exceeds the 40"):
        ready(Official(test_size=41))


def test_bad_classes_and_counts():
    dm = Pool()
    dm.classes = [7]
    with pytest.raises(ValueError, match=r"0\.\.3"):
        ready(dm)
    dm = Pool()
    dm.test_per_class = 30
    with pytest.raises(ValueError, match="class 3 has 20"):
        ready(dm)


def test_drop_last_must_leave_a_batch():
    with pytest.raises(ValueError, match="leaves no batch of the 120"):
        ready(Pool(batch_size=121, drop_last=True)).train_dataloader()


@pytest.mark.parametrize("indices", [[], [0.5], [[1]], [True]])
def test_bad_train_indices(indices):
    with pytest.raises(ValueError, match="indices"):
        Pool().set_train_indices(torch.tensor(indices))


def test_train_indices_out_of_range():
    with pytest.raises(ValueError, match=r"0\.\.119"):
        ready(Pool()).set_train_indices([120])
    dm = Pool()
    dm.set_train_indices([-1])
    with pytest.raises(ValueError, match=r"0\.\.119"):
        ready(dm)


def test_asking_too_early():
    with pytest.raises(RuntimeError, match="setup"):
        Pool().class_counts  # noqa: B018
    with pytest.raises(RuntimeError, match="setup"):
        Pool().test_dataloader()


def test_bad_dataset():
    with pytest.raises(ValueError, match="one row per sample"):
        ArrayDataset(torch.zeros(3, 2), [0, 1])
    with pytest.raises(ValueError, match="group"):
        ArrayDataset(torch.zeros(3, 2), [0, 1, 0]).with_extras(group=torch.zeros(2))
    with pytest.raises(IndexError):
        ArrayDataset(torch.zeros(3, 2), [0, 1, 0])[3]
    with pytest.raises(ValueError, match="nothing"):
        concatenate([])
    a = ArrayDataset(torch.zeros(3, 2), [0, 1, 0])
    with pytest.raises(ValueError, match="extras"):
        concatenate([a, a.with_extras(group=torch.zeros(3))])
