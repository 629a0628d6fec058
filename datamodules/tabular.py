"""Tables: scikit-learn's sets and generators, CSV and ARFF files, TALENT folders.

All of them prepare a table in the same way (:class:`TabularPreprocessor`, fitted on the training rows) and yield float
rows: standardised numbers first, then one-hot columns.
"""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_methods.core.batches import GroupBatch, IndexedBatch
from lightning_methods.core.checks import check_choice, check_range, nearest
from lightning_methods.modern_nca.data import TabularPreprocessor, as_categories

from .base import ArrayDataset, BaseDataModule, collate

__all__ = [
    "Candidates",
    "SklearnTabularDataModule",
    "TabularCSVDataModule",
    "TabularDataModule",
    "TabularPreprocessor",
    "TalentDataModule",
]


class Table(NamedTuple):
    """A table as it was read.

    Attributes:
        numeric: float64 [N, m], NaN where missing.
        categorical: strings [N, c].
        target: class names as strings [N], or float64 [N].
        sensitive_numeric: float64 [N, s], NaN where missing.
        sensitive_categorical: strings [N, t].
    """

    numeric: np.ndarray
    categorical: np.ndarray
    target: np.ndarray
    sensitive_numeric: np.ndarray | None = None
    sensitive_categorical: np.ndarray | None = None


class Candidates(NamedTuple):
    """The training rows as a retrieval model stores them.

    Attributes:
        x: prepared rows, float [N, columns], in the order of the training set's ``index``.
        y: classes int64 [N], or standardised targets float [N].
        target_mean: mean of a regression target in its own unit; 0 for classes.
        target_std: its standard deviation; 1 for classes.
    """

    x: Tensor
    y: Tensor
    target_mean: float = 0.0
    target_std: float = 1.0


def _encode(columns: np.ndarray, levels: list[np.ndarray]) -> np.ndarray:
    """Names as positions in their column's sorted levels, [N, c] float64."""
    codes = [np.searchsorted(names, column) for column, names in zip(columns.T, levels, strict=True)]
    return np.stack(codes, axis=1).astype(np.float64) if codes else np.zeros((len(columns), 0))


def _decode(codes: np.ndarray, levels: list[np.ndarray]) -> np.ndarray:
    columns = [names[column.astype(np.int64)] for column, names in zip(codes.T, levels, strict=True)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(codes), 0), dtype=str)


class TabularDataModule(BaseDataModule):
    """Base of the tables: reads a :class:`Table` per split, prepares it with statistics of the training rows.

    A subclass implements :meth:`read_table`. Classes are numbered over all splits; a regression target is standardised
    with the training rows' mean and deviation (``target_mean``, ``target_std``).

    Args:
        task: "classification" or "regression".
        unseen: what a category becomes that the training rows do not have, see :class:`TabularPreprocessor`.
        standardize_target: whether a regression target is standardised.
        class_order: classes numbered by "name", or by falling "count" over all rows (ties by name).
        **kwargs: arguments of :class:`BaseDataModule`.

    Attributes:
        preprocessor: the fitted :class:`TabularPreprocessor`; after ``setup``.
        class_names: the names of the classes by number; after ``setup``.
    """

    default_val_size: int | float = 0.16
    default_test_size: int | float = 0.2
    batch_type: type | None = None
    eval_batch_type: type | None = None

    def __init__(
        self,
        task: Literal["classification", "regression"] = "classification",
        unseen: Literal["most_frequent", "zero"] = "most_frequent",
        standardize_target: bool = True,
        class_order: Literal["name", "count"] = "name",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_choice("task", task, ("classification", "regression"))
        check_choice("class_order", class_order, ("name", "count"))
        self.task = task
        self.unseen = unseen
        self.standardize_target = standardize_target
        self.class_order = class_order
        self.preprocessor = TabularPreprocessor(unseen)
        self.class_names: list[str] = []
        self.target_mean = 0.0
        self.target_std = 1.0
        self._tables: dict[str, Table | None] | None = None
        self._levels: list[np.ndarray] = []
        self._sensitive_levels: list[np.ndarray] = []

    # reading

    def read_table(self, split: str) -> Table | None:
        """The set's own part of this name, or None if it has none.

        Raises:
            FileNotFoundError: files are missing.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement read_table.")

    def _read(self) -> dict[str, Table | None]:
        """All parts, with what they share: the levels of the categorical columns and the classes."""
        if self._tables is not None:
            return self._tables
        tables = {split: self.read_table(split) for split in self.available_splits}
        present = [table for table in tables.values() if table is not None]

        def levels(field: str) -> list[np.ndarray]:
            blocks = [getattr(table, field) for table in present if getattr(table, field) is not None]
            return [np.unique(column) for column in np.concatenate(blocks).T] if blocks else []

        self._levels = levels("categorical")
        self._sensitive_levels = levels("sensitive_categorical")
        if self.task == "classification":
            names, counts = np.unique(np.concatenate([table.target for table in present]), return_counts=True)
            if self.class_order == "count":
                names = names[np.argsort(-counts, kind="stable")]
            elif all(name.lstrip("-").isdigit() for name in names.tolist()):
                names = names[np.argsort(names.astype(np.int64), kind="stable")]  # 2 before 10
            self.class_names = names.tolist()
        self._tables = tables
        return tables

    def load_split(self, split: str) -> ArrayDataset | None:
        """A part of the table: numbers, then categories as codes; prepared later, when the training rows are known."""
        table = self._read().get(split)
        if table is None:
            return None
        source = np.concatenate([table.numeric, _encode(table.categorical, self._levels)], axis=1)
        extras = {}
        if table.sensitive_numeric is not None:
            codes = _encode(table.sensitive_categorical, self._sensitive_levels)
            extras["group"] = torch.from_numpy(np.concatenate([table.sensitive_numeric, codes], axis=1))
        if self.task == "regression":
            targets = torch.from_numpy(table.target).float()
        else:
            number = {name: i for i, name in enumerate(self.class_names)}
            targets = torch.tensor([number[name] for name in table.target.tolist()])
        return ArrayDataset(torch.from_numpy(source), targets, len(self.class_names), extras=extras)

    # preparing

    def fit_transforms(self, train: ArrayDataset) -> None:
        """Fit the preparation on the training rows and apply it to all of them, once."""
        numbers = train.source.shape[1] - len(self._levels)

        def columns(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
            x = x.numpy()
            return x[:, :numbers], _decode(x[:, numbers:], self._levels)

        self.preprocessor.fit(*columns(train.source[train.indices]))
        if self.task == "regression" and self.standardize_target:
            self.target_mean = float(train.targets.double().mean())
            self.target_std = float(train.targets.double().std(correction=0)) or 1.0
        groups = self._group_encoder(train)
        prepared: dict[int, Tensor] = {}
        parts = {}
        for name, part in self._parts.items():
            key = id(part.source)  # parts of one table share it
            if key not in prepared:
                prepared[key] = torch.from_numpy(self.preprocessor.transform(*columns(part.source)))
            targets = part.targets
            if self.task == "regression":
                targets = ((targets.double() - self.target_mean) / self.target_std).float()
            changes: dict[str, Any] = {"source": prepared[key], "targets": targets}
            if groups is not None:
                changes["extras"] = {**part.extras, "group": groups(part.extras["group"])}
            changes["batch_type"] = self.batch_type if name == "train" else self.eval_batch_type
            parts[name] = part.replace(**changes)
        self._parts = parts

    def _group_encoder(self, train: ArrayDataset) -> Callable[[Tensor], Tensor] | None:
        return None

    # what modules ask

    @property
    def d_num(self) -> int:
        """Number of numeric columns; after ``setup``."""
        return self.preprocessor.d_num

    @property
    def d_cat(self) -> int:
        """Number of one-hot columns; after ``setup``."""
        return self.preprocessor.d_cat

    def candidates(self) -> Candidates:
        """The (modified) training rows in the order of their ``index``, without augmentation."""
        train = self.train_set
        plain = train.replace(transforms={"x": self.make_transform(training=False)}, batch_type=None)
        x, y = collate(plain.__getitems__(range(len(train))))
        return Candidates(x, y, self.target_mean, self.target_std)


# scikit-learn


class SklearnTabularDataModule(TabularDataModule):
    """Tables that scikit-learn ships, and two generated ones: no download.

    Training batches are :class:`~lightning_methods.core.IndexedBatch`, the others ``(x, y)``. Without sizes 64 % of the
    rows are for training, 16 % for validation and 20 % for the test.

    ========================  =======================================================================================
    breast_cancer             569 rows, 30 numbers, 2 classes
    wine                      178 rows, 13 numbers, 3 classes
    digits                    1797 rows, 64 pixels, 10 classes
    diabetes                  442 rows, 10 numbers, regression
    checkerboard              x uniform in [-2, 2]^10, class ``(floor(x1) + floor(x2)) mod 2``: 8 columns say nothing
    friedman1                 ``10 sin(pi x1 x2) + 20 (x3 - .5)^2 + 10 x4 + 5 x5 + noise``, x uniform in [0, 1]^10
    ========================  =======================================================================================

    Args:
        name: which table.
        n_samples: rows of a generated table; None for 1500 (checkerboard) and 1200 (friedman1).
        n_features: columns of a generated table, at least 2 (checkerboard) or 5 (friedman1).
        noise: standard deviation of the noise of friedman1; share of flipped labels on the checkerboard. None for 1 and
            0.
        **kwargs: arguments of :class:`TabularDataModule` other than ``task``. ``seed`` is also that of the generators.

    Example:
        >>> data = SklearnTabularDataModule("wine", batch_size=64)
        >>> data.setup("fit")
        >>> data.candidates().x.shape, data.num_classes
        (torch.Size([114, 13]), 3)
    """

    available_splits = ("train",)
    batch_type = IndexedBatch

    def __init__(
        self,
        name: Literal["breast_cancer", "wine", "digits", "diabetes", "checkerboard", "friedman1"] = "checkerboard",
        n_samples: int | None = None,
        n_features: int = 10,
        noise: float | None = None,
        **kwargs: Any,
    ) -> None:
        check_choice("name", name, ("breast_cancer", "wine", "digits", "diabetes", "checkerboard", "friedman1"))
        super().__init__(task="regression" if name in ("diabetes", "friedman1") else "classification", **kwargs)
        if n_samples is not None:
            check_range("n_samples", n_samples, 5)
        check_range("n_features", n_features, 5 if name == "friedman1" else 2)
        if noise is not None:
            check_range("noise", noise, 0, 1 if name == "checkerboard" else torch.inf)
        self.name = name
        self.n_samples = n_samples
        self.n_features = n_features
        self.noise = noise

    def read_table(self, split: str) -> Table | None:
        """The whole table as the training part."""
        if split != "train":
            return None
        from sklearn import datasets

        if self.name == "checkerboard":
            x, y = self._checkerboard()
        elif self.name == "friedman1":
            x, y = datasets.make_friedman1(
                self.n_samples or 1200,
                self.n_features,
                noise=1.0 if self.noise is None else self.noise,
                random_state=self.seed,
            )
        else:
            x, y = getattr(datasets, f"load_{self.name}")(return_X_y=True)
        target = y.astype(np.float64) if self.task == "regression" else y.astype(str)
        return Table(np.asarray(x, dtype=np.float64), np.zeros((len(x), 0), dtype=str), target)

    def _checkerboard(self) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(self.seed)
        x = generator.uniform(-2, 2, (self.n_samples or 1500, self.n_features))
        y = np.floor(x[:, :2]).sum(axis=1).astype(np.int64) % 2
        return x, y ^ (generator.random(len(y)) < (self.noise or 0.0))


# files


def _delimiter(line: str) -> str:
    return max(",;\t|", key=line.count)


def _read_csv(path: Path, delimiter: str | None, header: bool) -> dict[str, np.ndarray]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        first = file.readline()
        file.seek(0)
        rows = [
            [cell.strip() for cell in row]
            for row in csv.reader(file, delimiter=delimiter or _delimiter(first), skipinitialspace=True)
            if row
        ]
    if not rows:
        raise ValueError(f"{path} is empty.")
    names = rows.pop(0) if header else [str(i) for i in range(len(rows[0]))]
    if len(set(names)) != len(names):
        raise ValueError(f"{path} names a column twice: {sorted({n for n in names if names.count(n) > 1})}.")
    for i, row in enumerate(rows, start=1 + header):
        if len(row) != len(names):
            raise ValueError(f"{path}, row {i}: {len(row)} cells, but there are {len(names)} columns.")
    cells = np.array(rows, dtype=str).reshape(len(rows), len(names))
    return dict(zip(names, cells.T, strict=True))


def _read_arff(path: Path) -> dict[str, np.ndarray]:
    from scipy.io import arff

    try:
        data, meta = arff.loadarff(path)
    except NotImplementedError as error:
        raise ValueError(
            f"{path} has an attribute that is neither numeric nor nominal: {error}. Drop it or use CSV."
        ) from None
    columns = {}
    for name in meta.names():
        column = data[name]
        columns[name] = column.astype(np.float64) if column.dtype.kind in "fiu" else np.char.decode(column, "utf-8")
    return columns


MISSING = ("", "?", "NA", "N/A", "na", "nan", "NaN", "null", "None")


def _numbers(cells: np.ndarray) -> np.ndarray | None:
    """A column as float64 with NaN where a value is missing; None if a cell is not a number."""
    if cells.dtype.kind == "f":
        return cells
    filled = np.where(np.isin(cells, MISSING), "nan", cells)
    try:
        return filled.astype(np.float64)
    except ValueError:
        return None


class TabularCSVDataModule(TabularDataModule):
    """Any table in a CSV or ARFF file.

    Batches are ``(x, y)``, and :class:`~lightning_methods.core.GroupBatch` with ``sensitive_columns``. Without sizes 75
    % of the rows are for training, 15 % for validation and 10 % for the test. A cell that is empty, ``?``, ``NA``,
    ``nan``, ``null`` or ``None`` is missing; rows without a target are left out.

    Args:
        path: the file; relative paths are looked for in ``root`` if they are not there. Files ending in ``.arff`` are
            ARFF.
        target: name of the target column, or its position (-1: the last).
        categorical_columns: names of the columns that hold categories, in whatever form; "auto" takes those that are
            nominal in ARFF or have a cell that is not a number. Numbers stay numbers unless they are named here.
        sensitive_columns: names of the columns that go to ``group`` and not to ``x``.
        drop_columns: names of columns to ignore (identifiers).
        sensitive_as: "columns": float [B, s], numbers standardised, a category of two levels as 0 or 1, of more as
            one-hot; "index": one int64 per row for the combination of their values (``num_groups`` of them).
        val_path: a file of the same columns for validation, instead of rows of ``path``.
        test_path: a file of the same columns for the test, instead of rows of ``path``.
        val_per_class: validation rows per class, instead of ``val_size``.
        test_per_class: test rows per class, instead of ``test_size``.
        delimiter: of CSV; None takes the most frequent of ``, ; | tab`` in the first line.
        header: whether the first line of a CSV names the columns; else they are named "0", "1", ...
        **kwargs: arguments of :class:`TabularDataModule`.

    Raises:
        FileNotFoundError: there is no such file (in ``setup``).
        ValueError: a column that does not exist, rows of unequal length, text in a numeric column (in ``setup``).
    """

    default_val_size = 0.15
    default_test_size = 0.10

    downloads = True

    def __init__(
        self,
        path: str,
        target: str | int = -1,
        categorical_columns: Sequence[str] | Literal["auto"] = "auto",
        sensitive_columns: Sequence[str] = (),
        drop_columns: Sequence[str] = (),
        sensitive_as: Literal["columns", "index"] = "columns",
        val_path: str | None = None,
        test_path: str | None = None,
        val_per_class: int | None = None,
        test_per_class: int | None = None,
        delimiter: str | None = None,
        header: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_choice("sensitive_as", sensitive_as, ("columns", "index"))
        if isinstance(categorical_columns, str):
            check_choice("categorical_columns", categorical_columns, ("auto",))
        for name, value in (("val_per_class", val_per_class), ("test_per_class", test_per_class)):
            if value is not None:
                check_range(name, value, 1)
                if self.task == "regression":
                    raise ValueError(f"{name} needs classes; the task is regression.")
        self.path = path
        self.target = target
        self.categorical_columns = (
            categorical_columns if isinstance(categorical_columns, str) else tuple(categorical_columns)
        )
        self.sensitive_columns = tuple(sensitive_columns)
        self.drop_columns = tuple(drop_columns)
        self.sensitive_as = sensitive_as
        self.val_path = val_path
        self.test_path = test_path
        self.val_per_class = val_per_class
        self.test_per_class = test_per_class
        self.delimiter = delimiter
        self.header = header
        self.num_groups = 0
        self._categorical: list[str] | None = None
        if self.sensitive_columns:
            self.batch_type = self.eval_batch_type = GroupBatch

    def _columns(self, path: str) -> dict[str, np.ndarray]:
        file = Path(path)
        if not file.exists():
            file = Path(self.root) / path
        if not file.exists():
            raise FileNotFoundError(
                f"there is no table {path!r}, neither here nor in {self.root!r}. Expected a CSV or ARFF file."
            )
        if file.suffix.lower() == ".arff":
            return _read_arff(file)
        return _read_csv(file, self.delimiter, self.header)

    def _target_name(self, names: list[str]) -> str:
        target = self.target
        if isinstance(target, str) and target not in names and target.lstrip("-").isdecimal():
            target = int(target)  # a position that came as text, as from the command line
        if isinstance(target, str):
            return target
        if not -len(names) <= target < len(names):
            raise ValueError(f"target={target} is not one of the {len(names)} columns of {self.path}.")
        return names[target]

    def read_table(self, split: str) -> Table | None:
        """Read the file of this split."""
        path = {"train": self.path, "val": self.val_path, "test": self.test_path}[split]
        if path is None:
            return None
        columns = self._columns(path)
        names = list(columns)
        target = self._target_name(names)
        listed = () if self.categorical_columns == "auto" else self.categorical_columns
        for name in (target, *listed, *self.sensitive_columns, *self.drop_columns):
            if name not in columns:
                raise ValueError(f"{path} has no column {name!r}.{nearest(name, names)} It has: {', '.join(names)}.")
        if target in (*self.sensitive_columns, *self.drop_columns):
            raise ValueError(f"the target {target!r} cannot be a sensitive or a dropped column.")
        features = [name for name in names if name != target and name not in self.drop_columns]
        if self._categorical is None:  # decided on the training file, for all of them
            if self.categorical_columns == "auto":
                self._categorical = [name for name in features if _numbers(columns[name]) is None]
            else:
                self._categorical = list(self.categorical_columns)

        y = self._read_target(path, columns[target])
        keep = ~np.isnan(y) if self.task == "regression" else y != ""

        def block(chosen: list[str], categorical: bool) -> np.ndarray:
            chosen = [name for name in chosen if (name in self._categorical) == categorical]
            if not chosen:
                return np.zeros((int(keep.sum()), 0), dtype=str if categorical else np.float64)
            read = [self._category(columns[n]) if categorical else self._number(path, n, columns[n]) for n in chosen]
            return np.stack(read, axis=1)[keep]

        plain = [name for name in features if name not in self.sensitive_columns]
        if not plain:
            raise ValueError(f"{path} has no column besides the target and the sensitive and dropped ones.")
        table = Table(block(plain, False), block(plain, True), y[keep])
        if not self.sensitive_columns:
            return table
        sensitive = list(self.sensitive_columns)
        if self.sensitive_as == "index":
            values = [self._category(columns[name])[keep] for name in sensitive]
            joint = np.array(["\x1f".join(row) for row in zip(*values, strict=True)])[:, None]
            return table._replace(sensitive_numeric=np.zeros((len(joint), 0)), sensitive_categorical=joint)
        return table._replace(sensitive_numeric=block(sensitive, False), sensitive_categorical=block(sensitive, True))

    def _read_target(self, path: str, cells: np.ndarray) -> np.ndarray:
        if self.task == "regression":
            return self._number(path, "target", cells)
        names = as_categories(cells)
        names = np.where(np.isin(names, MISSING) | (names == "___null___"), "", names)
        found = len(np.unique(names))
        if found > max(2, len(names) / 2):
            raise ValueError(
                f"the target of {path} has {found} classes in {len(names)} rows; is the task 'regression'?"
            )
        return names

    @staticmethod
    def _category(cells: np.ndarray) -> np.ndarray:
        return as_categories(cells if cells.dtype.kind == "f" else np.where(np.isin(cells, MISSING), "", cells))

    @staticmethod
    def _number(path: str, name: str, cells: np.ndarray) -> np.ndarray:
        numbers = _numbers(cells)
        if numbers is None:
            raise ValueError(f"column {name!r} of {path} is not numeric; name it in categorical_columns.")
        return numbers

    def _group_encoder(self, train: ArrayDataset) -> Callable[[Tensor], Tensor] | None:
        if not self.sensitive_columns:
            return None
        if self.sensitive_as == "index":
            self.num_groups = len(self._sensitive_levels[0])
            return lambda group: group[:, 0].long()
        numbers = train.extras["group"].shape[1] - len(self._sensitive_levels)
        levels = self._sensitive_levels

        def columns(group: Tensor) -> tuple[np.ndarray, np.ndarray]:
            return group[:, :numbers].numpy(), _decode(group[:, numbers:].numpy(), levels)

        prepare = TabularPreprocessor(self.unseen).fit(*columns(train.extras["group"]))
        # The first column of a pair says what the second says.
        widths = [len(names) for names in prepare.categories_]
        starts = numbers + np.cumsum([0, *widths])[:-1]
        redundant = [int(start) for start, width in zip(starts, widths, strict=True) if width == 2]
        kept = [i for i in range(numbers + sum(widths)) if i not in redundant]
        return lambda group: torch.from_numpy(prepare.transform(*columns(group))[:, kept])


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds object arrays of plain values and nothing else: a pickle may otherwise run any code."""

    allowed = frozenset({"ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self.allowed:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):  # how old protocols write bytes
            return super().find_class(module, name)
        raise ValueError(f"refused to load {module}.{name}: only arrays of plain values are read.")


def _load_array(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        dtype = read_header(file)[2]
        if dtype.hasobject:
            return _ArrayUnpickler(file).load()
    return np.load(path, allow_pickle=False)


class TalentDataModule(TabularDataModule):
    """A data set of the TALENT benchmark (300 tables), as its folders are.

    ``<root>/<dataset>/`` holds ``N_{train,val,test}.npy`` (numbers), ``C_{train,val,test}.npy`` (categories), one of
    which may be absent, ``y_{train,val,test}.npy`` and ``info.json`` with ``task_type`` ("regression", "binclass" or
    "multiclass"), ``n_num_features`` and ``n_cat_features``. Training batches are
    :class:`~lightning_methods.core.IndexedBatch`.

    Args:
        root: folder of the benchmark.
        dataset: name of the data set's folder.
        batch_size: rows in a training batch.
        eval_batch_size: rows in a batch elsewhere; None for ``batch_size``.
        num_workers: processes that load.
        seed: seed of the order.
        splits: "train", or "train+val" to train on both.
        train_size: number or share of the training rows to keep.
        modifiers: what is done to the training set.
        unseen: what a category becomes that the training rows do not have.
        standardize_target: whether a regression target is standardised.
        drop_last: whether an incomplete last training batch is left out.

    Raises:
        FileNotFoundError: the folder or one of its files is missing (in ``setup``).
        ValueError: ``info.json`` does not fit the arrays (in ``setup``).
    """

    available_splits = ("train", "val", "test")
    batch_type = IndexedBatch

    downloads = True

    def __init__(
        self,
        root: str = "data/talent",
        dataset: str = "",
        batch_size: int | None = 1024,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        splits: str = "train",
        train_size: int | float | None = None,
        modifiers: Sequence[Callable[[ArrayDataset], ArrayDataset]] = (),
        unseen: Literal["most_frequent", "zero"] = "most_frequent",
        standardize_target: bool = True,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            task="classification",
            unseen=unseen,
            standardize_target=standardize_target,
            root=root,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            splits=splits,
            train_size=train_size,
            modifiers=modifiers,
            drop_last=drop_last,
        )
        self.dataset = dataset
        self.info: dict[str, Any] = {}

    def _read(self) -> dict[str, Table | None]:
        if self._tables is None:
            folder = self._folder()
            self.info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
            task = self.info.get("task_type")
            check_choice("task_type in info.json", task, ("regression", "binclass", "multiclass"))
            self.task = "regression" if task == "regression" else "classification"
        return super()._read()

    def _folder(self) -> Path:
        folder = Path(self.root) / self.dataset
        if not (folder / "info.json").exists():
            known = sorted(path.parent.name for path in Path(self.root).glob("*/info.json"))
            hint = nearest(self.dataset, known) if known else ""
            raise FileNotFoundError(
                f"{folder} has no info.json.{hint} Fetch the benchmark's data by hand from the address in the README "
                f"of https://github.com/LAMDA-Tabular/TALENT and unpack it so that each data set is a folder in "
                f"{self.root!r}."
            )
        return folder

    def read_table(self, split: str) -> Table | None:
        """Read the arrays of a split."""
        folder = self._folder()
        if not (folder / f"y_{split}.npy").exists():
            raise FileNotFoundError(f"{folder / f'y_{split}.npy'} is missing; a TALENT folder has train, val and test.")
        y = _load_array(folder / f"y_{split}.npy").reshape(-1)
        arrays = {}
        for prefix, key in (("N", "n_num_features"), ("C", "n_cat_features")):
            path = folder / f"{prefix}_{split}.npy"
            array = _load_array(path) if path.exists() else np.zeros((len(y), 0))
            expected = self.info.get(key)
            if array.ndim != 2 or len(array) != len(y) or (expected is not None and array.shape[1] != expected):
                raise ValueError(
                    f"{path} must have shape [{len(y)}, {key}={expected}] by y_{split}.npy and info.json, "
                    f"got {list(array.shape)}."
                )
            arrays[prefix] = array
        target = y.astype(np.float64) if self.task == "regression" else as_categories(y)
        return Table(arrays["N"].astype(np.float64), as_categories(arrays["C"]), target)
