"""Populations of electrodes: the generated world, the authors' files and memory-mapped arrays, splits, messages."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch

from datamodules import PopulationEmbeddingDataModule, SyntheticPopulationDataModule
from lightning_methods.popt import PopTBatch

SUBJECTS = {"sub_1": ["A1", "A2", "B1", "B2", "B3"], "sub_2": ["C1", "C2", "C3"]}
TRIALS = {("sub_1", "trial000"): 12, ("sub_1", "trial002"): 8, ("sub_2", "trial001"): 10}


def small(**options) -> SyntheticPopulationDataModule:
    sizes = {"num_subjects": 3, "num_channels": 10, "num_windows": 50, "input_dim": 5, "val_size": 20, "test_size": 30}
    module = SyntheticPopulationDataModule(**{**sizes, "ensemble_sizes": [4, 6], "test_ensemble_sizes": [8], **options})
    module.setup()
    return module


def everything(loader) -> list[PopTBatch]:
    return list(loader)


def assert_same(first, second) -> None:
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x is None and y is None) or torch.equal(x, y)


# the generated world


def test_pretraining_is_tested_on_a_new_subject():
    module = small(batch_size=16)
    assert (len(module.train_set), len(module.val_set), len(module.test_set)) == (3 * 49 - 20, 20, 30)
    assert module.num_features == 5
    assert [r.subject for r in module.train_set.recordings] == ["subject 0", "subject 1", "subject 2"]
    assert [r.subject for r in module.test_set.recordings] == ["subject 3"]
    train, val = ({tuple(row) for row in part.rows.tolist()} for part in (module.train_set, module.val_set))
    assert not train & val
    test = everything(module.test_dataloader())
    assert {batch.x.shape[1] for batch in test} == {8}
    assert {batch.x.shape[1] for batch in everything(module.train_dataloader())} <= {4, 6}
    batch = test[0]
    assert batch.coords.min() >= 0
    assert batch.coords.max() < 200


def test_loaders_repeat_themselves_by_seed_and_epoch():
    module, again = small(), small()
    for name in ("val_dataloader", "test_dataloader"):
        assert_same(everything(getattr(module, name)()), everything(getattr(again, name)()))
    loader, other = module.train_dataloader(), again.train_dataloader()
    first, second = everything(loader), everything(loader)  # two epochs
    assert not torch.equal(first[0].label, second[0].label) or not torch.equal(first[0].x[:3, :4], second[0].x[:3, :4])
    other.sampler.set_epoch(1)
    assert_same(everything(other), second)
    before = torch.get_rng_state()
    everything(small(seed=1).train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_draw_the_same():
    module, parallel = small(), small(num_workers=1)
    assert_same(everything(module.train_dataloader()), everything(parallel.train_dataloader()))


def test_the_world_is_smooth_common_and_slow():
    module = SyntheticPopulationDataModule(noise=0.0, num_channels=40)
    here = torch.tensor([[50, 60, 70], [52, 60, 70], [150, 20, 190]])
    weights = module.mixing(here)
    assert weights.shape == (3, 3)
    assert (weights[0] - weights[1]).norm() < 0.2 * (weights[0] - weights[2]).norm()
    one, two = module.draw_subject(0, 3000), module.draw_subject(1, 3000)
    assert not torch.equal(one.coords, two.coords)
    x = one.embeddings.flatten(1)
    x = (x - x.mean(0)) / x.std(0)
    after = (x[1:] * x[:-1]).mean()
    later = (x[200:] * x[:-200]).mean()
    assert after > 0.7  # tanh of signals with a correlation of 0.95
    assert later < 0.3
    assert 0.2 < one.labels.mean() < 0.8
    assert SyntheticPopulationDataModule(seed=1).mixing(here).allclose(weights) is False


def test_decoding_splits_are_stretches_of_time():
    module = small(mode="finetune", train_size=12)
    rows = [part.rows[:, 1] for part in (module.train_set, module.val_set, module.test_set)]
    assert [len(r) for r in rows] == [12, 20, 30]
    assert rows[0].max() < 50
    assert rows[1].tolist() == list(range(50, 70))
    assert rows[2].tolist() == list(range(70, 100))
    assert abs(module.train_set.labels.sum() - 6) <= 6
    batch = next(iter(module.test_dataloader()))
    assert batch.replace_label is None
    assert batch.x.shape == (30, 10, 5)
    in_order = torch.cat([batch.label for batch in module.train_eval_dataloader()])
    assert torch.equal(in_order, module.train_set.labels)
    assert len(small(mode="finetune").train_set) == 50
    other = small(mode="finetune", subject=1)
    assert not torch.equal(other.test_set.recordings[0].coords, module.test_set.recordings[0].coords)


def test_few_labels_are_balanced_where_both_are_there():
    module = small(mode="finetune", num_windows=600, train_size=21, persistence=0.0)
    assert module.train_set.labels.sum() in (10, 11)


# files


def write_metadata(root) -> None:
    (root / "localization").mkdir(parents=True)
    (root / "all_ordered_electrodes.json").write_text(json.dumps(SUBJECTS))
    for number, (subject, names) in enumerate(SUBJECTS.items()):
        with (root / "localization" / f"{subject}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["Electrode", "L", "I", "P", "DesikanKilliany"])
            for row, name in enumerate(names):
                writer.writerow([name, 10.9 + row, 20 + number, 30.2, "insula" if row % 2 else "temporal"])


def window(subject: str, trial: str, index: int) -> np.ndarray:
    """An embedding that says where it is from."""
    size, number = len(SUBJECTS[subject]), sorted(TRIALS).index((subject, trial))
    return np.stack([np.full(size, number), np.full(size, index), np.arange(size)], axis=1).astype(np.float32)


def write_tsv(path, rows) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)


@pytest.fixture
def arrays(tmp_path):
    """One array a recording."""
    write_metadata(tmp_path)
    for (subject, trial), size in TRIALS.items():
        folder = tmp_path / "recordings" / subject
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{trial}.npy", np.stack([window(subject, trial, i) for i in range(size)]))
        write_tsv(folder / f"{trial}.tsv", [["True" if i % 3 else "False"] for i in range(size)])
    return tmp_path


@pytest.fixture
def manifest(tmp_path_factory):
    """The authors' layout, for pretraining, with the paths of another machine."""
    tmp_path = tmp_path_factory.mktemp("manifest")
    write_metadata(tmp_path)
    rows, labels = [], []
    for (subject, trial), size in TRIALS.items():
        folder = tmp_path / "windows" / subject / trial
        folder.mkdir(parents=True)
        for i in range(size):
            np.save(folder / f"{i}.npy", window(subject, trial, i))
        for i in range(size - 1):
            label = i % 2
            j = (5 * i + 3) % size if label else i + 1
            rows.append([f"/far/away/windows/{subject}/{trial}/{w}.npy" for w in (i, j, (3 * i) % size)] + [subject])
            labels.append([label])
    write_tsv(tmp_path / "manifest.tsv", rows)
    write_tsv(tmp_path / "labels.tsv", labels)
    return tmp_path


def decoding(root, times: bool) -> None:
    """The same windows for decoding: sorted by label, as the authors write words by loudness."""
    rows, labels = [], []
    for (subject, trial), size in TRIALS.items():
        order = sorted(range(size), key=lambda i: i % 3 > 0)
        for position, i in enumerate(order):
            path = root / "windows" / subject / trial / f"{position}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, window(subject, trial, i))
            rows.append([str(path), subject])
            labels.append([str(i % 3 > 0), *([100.0 + i] if times else [])])
    write_tsv(root / "manifest.tsv", rows)
    write_tsv(root / "labels.tsv", labels)


def build(root, **options) -> PopulationEmbeddingDataModule:
    defaults = {"ensemble_sizes": [2, 4], "gaussian_blur": False, "batch_size": 8, "val_size": 0.2, "test_size": 0.2}
    module = PopulationEmbeddingDataModule(str(root), **{**defaults, **options})
    module.setup()
    return module


@pytest.mark.parametrize("layout", ["arrays", "manifest"])
def test_pretraining_pairs_from_files(layout, request):
    root = request.getfixturevalue(layout)
    module = build(root, replace_probability=0.0)
    total = sum(size - 1 for size in TRIALS.values())
    assert len(module.val_set) == len(module.test_set) == round(0.2 * total)
    assert len(module.train_set) == total - 2 * round(0.2 * total)
    assert module.num_features == 3
    assert module.regions["sub_2"] == ["temporal", "insula", "temporal"]
    for batch in module.train_dataloader():
        channel = batch.x[..., 2].long()
        real = ~batch.pad_mask
        # Coordinates are those of the channel, truncated; the subject is told by the second one.
        assert torch.equal(batch.coords[..., 0][real], 10 + channel[real])
        assert torch.equal(batch.coords[..., 1][real] == 21, batch.x[..., 0][real] == 2)
        assert (batch.coords[..., 2][real] == 30).all()
        first, second = (torch.where(real & (batch.seq_id == i), batch.x[..., 1], -1).amax(1) for i in (0, 1))
        assert (second == first + 1)[batch.label == 0].all()
    splits = [
        {tuple(row) for row in part.rows.tolist()} for part in (module.train_set, module.val_set, module.test_set)
    ]
    assert len(set.union(*splits)) == total


def test_pairs_of_the_authors_manifest(manifest):
    module = build(manifest, dynamic_pairs=False, replace_probability=0.0)
    seen = set()
    for part in (module.train_set, module.val_set, module.test_set):
        batch = part.__getitems__(list(range(len(part))))
        for i in range(len(part)):
            ids, real = batch.seq_id[i], ~batch.pad_mask[i]
            trial = sorted(TRIALS)[int(batch.x[i, 0, 0])]
            first, second = (batch.x[i][real & (ids == k), 1].unique().item() for k in (0, 1))
            label = first % 2
            assert batch.label[i] == label
            assert second == ((5 * first + 3) % TRIALS[trial] if label else first + 1)
            seen.add((trial, first))
    assert len(seen) == sum(size - 1 for size in TRIALS.values())


def test_decoding_from_both_layouts(arrays, tmp_path_factory):
    other = tmp_path_factory.mktemp("authors")
    write_metadata(other)
    decoding(other, times=False)
    for root in (arrays, other):
        module = build(root, mode="finetune", test_size=0.3)
        assert sum(map(len, (module.train_set, module.val_set, module.test_set))) == 30
        for loader in (module.train_dataloader(), module.val_dataloader(), module.test_dataloader()):
            for batch in loader:
                assert torch.equal(batch.label, (batch.x[:, 0, 1] % 3 > 0).float())  # "False" is 0, "True" is 1
                assert batch.pad_mask.sum(1).tolist() == [
                    batch.x.shape[1] - (3 if number == 2 else 5) for number in batch.x[:, 0, 0].tolist()
                ]


def test_blocked_splits_do_not_mix_times(arrays, tmp_path_factory):
    for mode in ("finetune", "pretrain"):
        module = build(arrays, mode=mode, split="blocked", replace_probability=0.0, val_size=0.25, test_size=0.25)
        times = {}
        for name in ("train", "val", "test"):
            part = getattr(module, f"{name}_set")
            batch = part.__getitems__(list(range(len(part))))
            for number in range(3):
                here = (batch.x[..., 0] == number) & ~batch.pad_mask
                times[name, number] = set(batch.x[..., 1][here].tolist())
        for number in range(3):
            train, val, test = (times[name, number] for name in ("train", "val", "test"))
            assert max(train) < min(val)
            assert max(val) < min(test)
    # The authors' decoding files are sorted by label; the times in labels.tsv put them in order.
    other = tmp_path_factory.mktemp("authors")
    write_metadata(other)
    decoding(other, times=True)
    module = build(other, mode="finetune", split="blocked", subjects=["sub_2"])
    order = [part.__getitems__(list(range(len(part)))).x[:, 0, 1] for part in (module.train_set, module.test_set)]
    assert order[0].max() < order[1].min()


def test_held_out_subjects_and_selections(arrays, tmp_path):
    module = build(arrays, test_subjects=["sub_2"])
    subject = [r.subject for r in module.train_set.recordings]
    assert {subject[i] for i in module.train_set.rows[:, 0]} | {subject[i] for i in module.val_set.rows[:, 0]} == {
        "sub_1"
    }
    assert {subject[i] for i in module.test_set.rows[:, 0]} == {"sub_2"}
    assert len(module.test_set) == 9
    blocked = build(arrays, test_subjects=["sub_2"], split="blocked")
    assert {r.subject for r in blocked.test_set.recordings} == {"sub_2"}

    module = build(arrays, recordings=["sub_1/trial002"])
    assert [r.n_windows for r in module.train_set.recordings] == [8]

    best = tmp_path / "best.json"
    best.write_text(json.dumps({"sub_1": ["B3", "A1", "B1"]}))
    module = build(arrays, mode="finetune", electrodes=str(best), num_channels=2)
    batch = next(iter(module.train_dataloader()))
    assert (batch.x[..., 2] == torch.tensor([4.0, 0.0])).all()  # in the order of the file
    assert batch.coords[0, :, 0].tolist() == [14, 10]
    assert module.regions == {"sub_1": ["temporal", "temporal"]}

    few = build(arrays, mode="finetune", train_size=5)
    whole = build(arrays, mode="finetune")
    assert len(few.train_set) == 5
    assert torch.equal(few.test_set.rows, whole.test_set.rows)


def test_regression_labels(arrays):
    for (subject, trial), size in TRIALS.items():
        write_tsv(arrays / "recordings" / subject / f"{trial}.tsv", [[i / 4] for i in range(size)])
    module = build(arrays, mode="finetune", task="regression")
    for batch in module.train_dataloader():
        torch.testing.assert_close(batch.label, batch.x[:, 0, 1] / 4)
    with pytest.raises(ValueError, match="two different labels"):
        build(arrays, mode="finetune")


def test_messages(arrays, manifest, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(FileNotFoundError, match=r"all_ordered_electrodes\.json is missing"):
        build(empty)
    write_metadata(empty)
    with pytest.raises(FileNotFoundError, match=r"manifest\.tsv is missing"):
        build(empty)
    cases = [
        ({"subjects": ["sub_9"]}, "none of the subjects"),
        ({"test_subjects": ["sub_9"]}, "test_subjects"),
        ({"recordings": ["sub_1/trial009"]}, "no recording"),
        ({"coordinate_offset": -20.0}, r"from -9 to .*coordinate_offset"),
        ({"max_position": 25}, r"must be in \[0, 25\)"),
        ({"dynamic_pairs": False}, "manifest"),
        ({"val_size": 0.9, "test_size": 0.9}, "ask for more"),
        ({"train_size": 500}, "asks for more"),
        ({"coordinate_columns": ["L", "I", "Q"]}, "column 'Q'"),
        ({"coordinate_columns": ["L"]}, "three columns"),
        ({"split": "blocked", "val_size": 3}, "as shares"),
        ({"split": "blocked", "dynamic_pairs": False}, "dynamic_pairs"),
        ({"ensemble_sizes": [1]}, "ensemble_sizes"),
        ({"batch_size": 0}, "batch_size"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            build(arrays, **options)
    with pytest.raises(ValueError, match="2 columns for mode='finetune'"):
        build(manifest, mode="finetune")
    with pytest.raises(RuntimeError, match=r"call setup\(\)"):
        _ = PopulationEmbeddingDataModule(str(arrays)).train_set
    with pytest.raises(ValueError, match="drop_last"):
        build(manifest, drop_last=True, batch_size=500).train_dataloader()
