from __future__ import annotations

import csv
import json
import pickle

import numpy as np
import pytest
import torch

from datamodules import (
    SklearnTabularDataModule,
    TabularCSVDataModule,
    TabularPreprocessor,
    TalentDataModule,
)
from lightning_methods.core import GroupBatch, IndexedBatch

# the preprocessor


def test_numbers_are_imputed_and_standardised_with_the_training_rows():
    train = np.array([[1.0, 5.0, np.nan, 0.1], [3.0, 5.0, np.nan, 0.1], [np.nan, 5.0, np.nan, 0.1]])
    table = TabularPreprocessor().fit(train)
    x = table.transform(train)
    assert x.dtype == np.float32
    assert np.isfinite(x).all()
    spread = np.std([1.0, 3.0, 2.0])  # the missing one is the mean
    np.testing.assert_allclose(x[:, 0], [-1 / spread, 1 / spread, 0], rtol=1e-6)
    assert (x[:, 1:] == 0).all()  # constant, without a number, constant up to rounding
    new = table.transform(np.array([[np.nan, 7.0, 4.0, np.nan]]))
    np.testing.assert_array_equal(new, [[0, 0, 0, 0]])


def test_large_offsets_do_not_make_a_column_constant():
    column = 1e6 + np.arange(10.0)[:, None]
    x = TabularPreprocessor().fit(column).transform(column, dtype=np.float64)
    np.testing.assert_allclose(x.std(), 1)


def test_categories():
    train = np.array([["a", 1.0], ["b", 2.0], ["b", np.nan], [None, 2.0], ["", 2.0]], dtype=object)
    table = TabularPreprocessor().fit(categorical=train)
    assert [list(names) for names in table.categories_] == [["___null___", "a", "b"], ["1", "2", "___null___"]]
    assert (table.d_num, table.d_cat) == (0, 6)
    x = table.transform(categorical=train)
    np.testing.assert_array_equal(x.sum(axis=1), 2)
    np.testing.assert_array_equal(x[:, :3].argmax(1), [1, 2, 2, 0, 0])
    unseen = np.array([["z", 9.0]], dtype=object)
    np.testing.assert_array_equal(table.transform(categorical=unseen), [[1, 0, 0, 0, 1, 0]])  # the most frequent ones
    zero = TabularPreprocessor(unseen="zero").fit(categorical=train).transform(categorical=unseen)
    np.testing.assert_array_equal(zero, np.zeros((1, 6)))


def test_categories_read_the_same_from_integers_floats_and_bytes():
    table = TabularPreprocessor().fit(categorical=np.array([[1], [2]]))
    for same in (np.array([[2.0]]), np.array([["2"]]), np.array([[b"2"]]), np.array([[2]], dtype=object),
                 np.array([[2.0]], dtype=object), np.array([[np.float32(2)]], dtype=object)):  # fmt: skip
        np.testing.assert_array_equal(table.transform(categorical=same), [[0, 1]])


def test_large_numbers_stay_apart():
    for kind in (np.float64, object):
        table = TabularPreprocessor().fit(categorical=np.array([[1e300], [2e300], [np.inf], [-1e19]], dtype=kind))
        assert table.d_cat == 4


@pytest.mark.bad_input
def test_preprocessor_rejects():
    table = TabularPreprocessor().fit(np.ones((3, 2)))
    with pytest.raises(ValueError, match="fitted on 2 and 0"):
        table.transform(np.ones((3, 1)))
    with pytest.raises(ValueError, match="infinite"):
        table.transform(np.array([[np.inf, 1.0]]))
    with pytest.raises(ValueError, match="at least one training row"):
        TabularPreprocessor().fit(np.ones((0, 2)))
    with pytest.raises(ValueError, match="numeric or categorical"):
        TabularPreprocessor().fit()
    with pytest.raises(ValueError, match="unseen"):
        TabularPreprocessor(unseen="ignore")
    with pytest.raises(ValueError, match="shape"):
        TabularPreprocessor().fit(np.ones(3))


# scikit-learn


@pytest.mark.parametrize(
    ("name", "rows", "columns", "classes"),
    [
        ("breast_cancer", 569, 30, 2),
        ("wine", 178, 13, 3),
        ("digits", 1797, 64, 10),
        ("diabetes", 442, 10, 0),
        ("checkerboard", 1500, 10, 2),
        ("friedman1", 1200, 10, 0),
    ],
)
def test_sklearn_tables(name, rows, columns, classes):
    data = SklearnTabularDataModule(name, batch_size=50)
    data.prepare_data()
    data.setup("fit")
    sizes = [len(data.train_set), len(data.val_set), len(data.test_set)]
    assert sum(sizes) == rows
    np.testing.assert_allclose(sizes, [0.64 * rows, 0.16 * rows, 0.2 * rows], atol=1.5)
    assert (data.d_num, data.d_cat, data.num_classes) == (columns, 0, classes)

    stored = data.candidates()
    assert stored.x.dtype == torch.float32
    torch.testing.assert_close(stored.x.mean(dim=0), torch.zeros(columns), rtol=0, atol=1e-4)
    constant = stored.x.std(dim=0) == 0
    torch.testing.assert_close(stored.x[:, ~constant].std(dim=0, correction=0), torch.ones(int((~constant).sum())))

    seen = []
    for batch in data.train_dataloader():
        assert isinstance(batch, IndexedBatch)
        assert torch.equal(stored.x[batch.index], batch.x)
        assert torch.equal(stored.y[batch.index], batch.y)
        seen.append(batch.index)
    assert torch.cat(seen).sort().values.tolist() == list(range(sizes[0]))
    assert torch.cat(seen).tolist() != list(range(sizes[0]))
    x, y = next(iter(data.test_dataloader()))
    assert x.shape == (min(50, sizes[2]), columns)
    assert y.dtype == (torch.long if classes else torch.float32)


def test_regression_targets_are_standardised_with_the_training_rows():
    data = SklearnTabularDataModule("diabetes", standardize_target=True)
    data.setup("fit")
    _, y, mean, std = data.candidates()
    torch.testing.assert_close(y.mean(), torch.tensor(0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(y.std(correction=0), torch.tensor(1.0))
    raw = SklearnTabularDataModule("diabetes", standardize_target=False)
    raw.setup("fit")
    assert raw.candidates()[2:] == (0.0, 1.0)
    torch.testing.assert_close(y * std + mean, raw.train_targets)
    torch.testing.assert_close(data.test_set.targets * std + mean, raw.test_set.targets)
    assert data.test_set.targets.mean().abs() > 1e-4  # not its own mean


def test_checkerboard_and_friedman():
    data = SklearnTabularDataModule("checkerboard", seed=3)
    noisy = SklearnTabularDataModule("checkerboard", seed=3, noise=0.25)
    for module, share in ((data, 0.0), (noisy, 0.25)):
        module.setup("fit")
        raw = module.preprocessor.mean_ + module.candidates().x.double().numpy() * module.preprocessor.scale_
        cell = (np.floor(raw[:, 0]) + np.floor(raw[:, 1])) % 2
        assert 0.4 < cell.mean() < 0.6
        assert (cell != module.train_targets.numpy()).mean() == pytest.approx(share, abs=0.002 if share == 0 else 0.05)
    again, other = SklearnTabularDataModule("friedman1", seed=1), SklearnTabularDataModule("friedman1", seed=2)
    first = SklearnTabularDataModule("friedman1", seed=1, n_samples=None)
    for module in (again, other, first):
        module.setup("fit")
    assert torch.equal(first.candidates().x, again.candidates().x)
    assert not torch.equal(first.candidates().x, other.candidates().x)
    small = SklearnTabularDataModule("friedman1", n_samples=50, n_features=6, noise=0.0)
    small.setup("fit")
    assert small.d_num == 6
    assert len(small.train_set) == 32


def test_candidates_follow_the_chosen_rows():
    data = SklearnTabularDataModule("wine")
    data.set_train_indices([5, 3, 8])
    data.setup("fit")
    whole = SklearnTabularDataModule("wine")
    whole.setup("fit")
    assert torch.equal(data.candidates().x, whole.candidates().x[[5, 3, 8]])
    batch = next(iter(data.train_dataloader()))
    assert torch.equal(data.candidates().x[batch.index], batch.x)


def test_sklearn_rejects():
    with pytest.raises(ValueError, match="Did you mean 'friedman1'"):
        SklearnTabularDataModule("friedman")
    with pytest.raises(ValueError, match="n_features"):
        SklearnTabularDataModule("friedman1", n_features=4)
    with pytest.raises(ValueError, match="noise"):
        SklearnTabularDataModule("checkerboard", noise=2.0)


# CSV and ARFF


def write_csv(path, rows, delimiter=","):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return str(path)


def bank(n=200, seed=0):
    """Rows as in UCI's bank marketing: a sensitive number and a sensitive category among the columns."""
    generator = np.random.default_rng(seed)
    rows = [["age", "job", "marital", "balance", "y"]]
    for i in range(n):
        age = generator.integers(18, 90)
        rows.append(
            [
                age,
                generator.choice(["admin", "blue collar, other", "unknown"]),
                generator.choice(["single", "married", "divorced"]),
                "" if i % 20 == 0 else generator.integers(-100, 5000),
                "yes" if age > 60 else "no",
            ]
        )
    return rows


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(tmp_path, delimiter):
    path = write_csv(tmp_path / "bank.csv", bank(), delimiter)
    data = TabularCSVDataModule(path, batch_size=16)
    data.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [150, 30, 20]
    assert (data.d_num, data.d_cat) == (2, 6)
    assert data.class_names == ["no", "yes"]
    x, _ = next(iter(data.train_dataloader()))
    assert x.shape == (16, 8)
    assert torch.isfinite(x).all()
    assert ((x[:, 2:] == 0) | (x[:, 2:] == 1)).all()
    everything = torch.cat([part.targets for part in (data.train_set, data.val_set, data.test_set)])
    assert int(everything.sum()) == sum(row[-1] == "yes" for row in bank()[1:])
    age = data.candidates().x[:, 0]
    assert age[data.train_targets == 1].min() > age[data.train_targets == 0].max()


def test_csv_columns_by_choice(tmp_path):
    path = write_csv(tmp_path / "bank.csv", bank())
    data = TabularCSVDataModule(
        "bank.csv",
        root=str(tmp_path),
        target="y",
        categorical_columns=["job", "marital", "age"],
        drop_columns=["balance"],
    )
    data.setup("fit")
    assert data.d_num == 0
    assert data.d_cat == 6 + len(data.preprocessor.categories_[0])
    regression = TabularCSVDataModule(path, target="balance", task="regression")
    regression.setup("fit")
    assert regression.num_classes == 0
    assert len(regression.train_set) + len(regression.val_set) + len(regression.test_set) == 190  # ten have no balance
    assert regression.target_std > 100
    by_position = TabularCSVDataModule(path, target="3", task="regression")
    by_position.setup("fit")
    assert torch.equal(by_position.train_targets, regression.train_targets)


def test_csv_sensitive_columns(tmp_path):
    path = write_csv(tmp_path / "bank.csv", bank())
    data = TabularCSVDataModule(path, sensitive_columns=["age", "marital"], batch_size=8)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert isinstance(batch, GroupBatch)
    assert batch.x.shape == (8, 1 + 3)  # balance and job
    assert batch.group.shape == (8, 1 + 3)  # age, and marital as one-hot
    assert batch.group.dtype == torch.float32
    torch.testing.assert_close(data.train_groups[:, 0].mean(), torch.tensor(0.0), rtol=0, atol=1e-5)
    assert (data.train_groups[:, 1:].sum(dim=1) == 1).all()
    assert isinstance(next(iter(data.test_dataloader())), GroupBatch)
    age = data.train_groups[:, 0]
    assert age[data.train_targets == 1].min() > age[data.train_targets == 0].max()

    index = TabularCSVDataModule(path, sensitive_columns=["marital", "job"], sensitive_as="index")
    index.setup("fit")
    assert index.num_groups == 9
    assert index.train_groups.dtype == torch.long
    assert index.train_groups.unique().tolist() == list(range(9))


def test_csv_binary_sensitive_column_is_one_column(tmp_path):
    rows = [["sex", "x", "y"]] + [["f" if i % 2 else "m", i, i % 3] for i in range(60)]
    data = TabularCSVDataModule(write_csv(tmp_path / "t.csv", rows), sensitive_columns=["sex"])
    data.setup("fit")
    assert data.train_groups.shape[1] == 1
    assert data.train_groups.unique().tolist() == [0, 1]


def test_csv_without_header_and_with_own_test_file(tmp_path):
    rows = [[i, i % 7, i % 2] for i in range(40)]
    path, test = write_csv(tmp_path / "train.data", rows), write_csv(tmp_path / "test.data", rows[:6])
    data = TabularCSVDataModule(path, header=False, test_path=test)
    data.setup("fit")
    assert len(data.test_set) == 6
    assert len(data.train_set) + len(data.val_set) == 40
    assert data.d_num == 2


def test_arff_with_held_out_rows_per_class(tmp_path):
    """As OpenML's helena: the class is the first column; a fixed number per class is held out, the rest trains."""
    generator = np.random.default_rng(0)
    labels = np.repeat([3, 11, 2], [30, 50, 20])
    lines = ["@RELATION helena", "@ATTRIBUTE class {2,3,11}", "@ATTRIBUTE V1 REAL", "@ATTRIBUTE V2 {a,b}", "@DATA"]
    lines += [f"{y},{'?' if i == 4 else y + generator.normal():.4},{'ab'[i % 2]}" for i, y in enumerate(labels)]
    path = tmp_path / "helena.arff"
    path.write_text("\n".join(lines).replace("'", ""))
    options = {"target": 0, "val_per_class": 4, "test_per_class": 5}
    data = TabularCSVDataModule(str(path), **options)
    data.setup("fit")
    assert data.class_names == ["2", "3", "11"]
    assert torch.bincount(data.val_set.targets).tolist() == [4, 4, 4]
    assert torch.bincount(data.test_set.targets).tolist() == [5, 5, 5]
    assert data.class_counts.tolist() == [11, 21, 41]
    assert (data.d_num, data.d_cat) == (1, 2)
    counted = TabularCSVDataModule(str(path), class_order="count", **options)
    counted.setup("fit")
    assert counted.class_names == ["11", "3", "2"]
    assert counted.class_counts.tolist() == [41, 21, 11]


def test_csv_rejects(tmp_path):
    path = write_csv(tmp_path / "bank.csv", bank())

    def setup(*args, **kwargs):
        TabularCSVDataModule(*args, **kwargs).setup("fit")

    with pytest.raises(FileNotFoundError, match="no table"):
        setup("nowhere.csv")
    with pytest.raises(ValueError, match=r"no column 'Age'. Did you mean 'age'"):
        setup(path, sensitive_columns=["Age"])
    with pytest.raises(ValueError, match=r"'job' of .* is not numeric"):
        setup(path, categorical_columns=["marital"])
    with pytest.raises(ValueError, match="is the task 'regression'"):
        setup(path, target="balance")
    with pytest.raises(ValueError, match="not numeric"):
        setup(path, target="job", task="regression")
    with pytest.raises(ValueError, match="cannot be a sensitive"):
        setup(path, sensitive_columns=["y"])
    with pytest.raises(ValueError, match="not one of the 5 columns"):
        setup(path, target=7)
    with pytest.raises(ValueError, match="not one of the 5 columns"):
        setup(path, target="-6")
    with pytest.raises(ValueError, match="needs classes"):
        TabularCSVDataModule(path, task="regression", val_per_class=3)
    with pytest.raises(ValueError, match="row 3: 2 cells"):
        setup(write_csv(tmp_path / "bad.csv", [["a", "b", "y"], [1, 2, 0], [1, 2]]))
    with pytest.raises(ValueError, match="twice"):
        setup(write_csv(tmp_path / "twice.csv", [["a", "a", "y"], [1, 2, 0]]))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match="empty"):
        setup(str(tmp_path / "empty.csv"))


# TALENT


def write_talent(folder, task="multiclass", numbers=True, categories=True, seed=0):
    """A data set in the benchmark's own format: object arrays for strings, NaN where missing."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for split, n in (("train", 40), ("val", 12), ("test", 15)):
        if numbers:
            x = generator.normal(size=(n, 3)) * [1, 10, 100]
            x[0, 1] = np.nan
            np.save(folder / f"N_{split}.npy", x)
        if categories:
            c = np.stack([generator.choice(["red", "green"], n), generator.choice(["x", "y", "z"], n)], axis=1).astype(
                object
            )
            c[1, 0] = np.nan
            if split == "test":
                c[2, 1] = "never seen"
            np.save(folder / f"C_{split}.npy", c)
        y = generator.normal(50, 5, n) if task == "regression" else np.array(["a", "b", "c"])[np.arange(n) % 3]
        np.save(folder / f"y_{split}.npy", y if task == "regression" else y.astype(object))
    info = {"task_type": task, "n_num_features": 3 * numbers, "n_cat_features": 2 * categories}
    (folder / "info.json").write_text(json.dumps(info))


@pytest.mark.parametrize("task", ["multiclass", "regression"])
@pytest.mark.parametrize(("numbers", "categories"), [(True, True), (True, False), (False, True)])
def test_talent(tmp_path, task, numbers, categories):
    write_talent(tmp_path / "set", task, numbers, categories)
    data = TalentDataModule(str(tmp_path), "set", batch_size=16)
    data.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [40, 12, 15]
    assert data.task == ("regression" if task == "regression" else "classification")
    assert data.num_classes == (0 if task == "regression" else 3)
    assert (data.d_num, data.d_cat) == (3 * numbers, 6 * categories)  # {null, red, green} and {x, y, z}
    batch = next(iter(data.train_dataloader()))
    assert isinstance(batch, IndexedBatch)
    assert torch.isfinite(batch.x).all()
    assert torch.equal(data.candidates().x[batch.index], batch.x)
    if task == "regression":
        assert data.target_mean == pytest.approx(50, abs=3)
        torch.testing.assert_close(data.train_targets.mean(), torch.tensor(0.0), rtol=0, atol=1e-5)
    else:
        assert data.train_targets[:6].tolist() == [0, 1, 2, 0, 1, 2]
    if categories:
        x = data.test_set[2][0]
        common = data.preprocessor.most_frequent_[1]
        assert x[3 * numbers + 3 :].tolist() == [float(i == common) for i in range(3)]


def test_talent_train_and_val_together(tmp_path):
    write_talent(tmp_path / "set")
    data = TalentDataModule(str(tmp_path), "set", splits="train+val")
    data.setup("fit")
    assert len(data.train_set) == 52
    assert len(data.test_set) == 15


def test_talent_rejects(tmp_path):
    write_talent(tmp_path / "abalone")
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'abalone'.*LAMDA-Tabular/TALENT"):
        TalentDataModule(str(tmp_path), "abalon").setup("fit")
    info = tmp_path / "abalone" / "info.json"
    info.write_text(json.dumps({"task_type": "multiclass", "n_num_features": 4, "n_cat_features": 2}))
    with pytest.raises(ValueError, match="n_num_features=4"):
        TalentDataModule(str(tmp_path), "abalone").setup("fit")
    info.write_text(json.dumps({"task_type": "ranking"}))
    with pytest.raises(ValueError, match="task_type"):
        TalentDataModule(str(tmp_path), "abalone").setup("fit")
    (tmp_path / "abalone" / "y_val.npy").unlink()
    info.write_text(json.dumps({"task_type": "binclass", "n_num_features": 3, "n_cat_features": 2}))
    with pytest.raises(FileNotFoundError, match="y_val"):
        TalentDataModule(str(tmp_path), "abalone").setup("fit")


class Evil:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_talent_runs_no_code_from_a_file(tmp_path, capsys):
    write_talent(tmp_path / "set")
    array = np.empty((40, 2), dtype=object)
    array[:] = "a"
    array[0, 0] = Evil()
    np.save(tmp_path / "set" / "C_train.npy", array)
    with pytest.raises((ValueError, pickle.UnpicklingError), match="refused"):
        TalentDataModule(str(tmp_path), "set").setup("fit")
    assert capsys.readouterr().out == ""
