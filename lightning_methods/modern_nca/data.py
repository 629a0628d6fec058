"""Preparation of tables: imputation, standardisation and one-hot columns, fitted on the training rows."""

from __future__ import annotations

from typing import Literal

import numpy as np

__all__ = ["NULL", "TabularPreprocessor", "as_categories"]

NULL = "___null___"
LARGEST = 2.0**53  # above it not every integer is a float
_MISSING = ("", "nan", "NaN", "None", "<NA>", "NaT")


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (float, np.floating)) and float(value).is_integer() and abs(value) < LARGEST:
        return str(int(value))
    return str(value)


def as_categories(values: np.ndarray) -> np.ndarray:
    """Categorical values of any dtype as strings, missing ones (NaN, None, "") as a category of their own.

    Whole numbers are written without a decimal point, so that a column reads the same from integers and from floats
    (which integers with a missing value become in a data frame).
    """
    values = np.asarray(values)
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    if values.dtype.kind == "f":
        whole = (np.abs(values) < LARGEST) & (values == np.round(values))
        text = values.astype(str).astype(object)
        text[whole] = values[whole].astype(np.int64).astype(str)
        return np.where(np.isnan(values), NULL, text).astype(str)
    if values.dtype.kind in "iuU":
        text = values.astype(str)
        return np.where(np.isin(text, _MISSING), NULL, text)
    text = np.array([_text(value) for value in values.flat], dtype=object)
    text[np.isin(text.astype(str), _MISSING)] = NULL
    return text.astype(str).reshape(values.shape)


class TabularPreprocessor:
    """Turns numeric and categorical columns into the float matrix that ModernNCA reads: numbers first, then one-hot.

    Everything is fitted on the rows given to :meth:`fit`:

    * a missing number becomes its column's mean (0 where a column has no number at all); numbers are standardised, a
      constant column becomes 0;
    * a missing category is a category of its own; one that the training rows do not have counts as their most frequent
      one (as in the authors' code), or as none with ``unseen="zero"``.

    Args:
        unseen: what a category becomes that was not in the training rows.

    Attributes:
        mean_: [numeric columns].
        scale_: standard deviation, [numeric columns]; 1 for a constant column.
        categories_: for each categorical column its sorted categories.
        d_num: number of numeric columns.
        d_cat: number of one-hot columns.

    Example:
        >>> table = TabularPreprocessor().fit(np.array([[1.0], [np.nan], [3.0]]), np.array([["a"], ["b"], ["b"]]))
        >>> table.transform(np.array([[2.0]]), np.array([["c"]]))
        array([[0., 0., 1.]], dtype=float32)
    """

    def __init__(self, unseen: Literal["most_frequent", "zero"] = "most_frequent") -> None:
        if unseen not in ("most_frequent", "zero"):
            raise ValueError(f"unseen must be 'most_frequent' or 'zero', got {unseen!r}.")
        self.unseen = unseen

    def fit(self, numeric: np.ndarray | None = None, categorical: np.ndarray | None = None) -> TabularPreprocessor:
        """Learn means, scales and categories.

        Args:
            numeric: [rows, numeric columns], NaN where missing.
            categorical: [rows, categorical columns], any dtype.

        Raises:
            ValueError: no rows, shapes that do not fit, or infinite numbers.
        """
        numeric, categorical = self._matrices(numeric, categorical)
        if len(numeric) == 0:
            raise ValueError("the preprocessor needs at least one training row.")
        known = ~np.isnan(numeric)
        count = np.maximum(known.sum(axis=0), 1)
        mean = np.where(known, numeric, 0).sum(axis=0) / count
        # Missing values are imputed first, so they count into the spread, as in the authors' code.
        filled = np.where(known, numeric, mean)
        self.mean_ = mean
        scale = filled.std(axis=0)
        # A constant column may have a spread of rounding errors.
        constant = scale <= 10 * np.finfo(np.float64).eps * np.maximum(np.abs(self.mean_), np.abs(filled).max(axis=0))
        self.scale_ = np.where(constant, 1.0, scale)
        self.constant_ = constant
        self.categories_, self.most_frequent_ = [], []
        for column in categorical.T:
            names, counts = np.unique(column, return_counts=True)
            self.categories_.append(names)
            self.most_frequent_.append(int(counts.argmax()))
        return self

    def transform(
        self, numeric: np.ndarray | None = None, categorical: np.ndarray | None = None, dtype: type = np.float32
    ) -> np.ndarray:
        """Apply what was fitted.

        Args:
            numeric: [rows, numeric columns].
            categorical: [rows, categorical columns].
            dtype: of the result.

        Returns:
            [rows, d_num + d_cat].

        Raises:
            ValueError: other columns than in :meth:`fit`, or infinite numbers.
        """
        numeric, categorical = self._matrices(numeric, categorical)
        if numeric.shape[1] != self.d_num or categorical.shape[1] != len(self.categories_):
            raise ValueError(
                f"the table has {numeric.shape[1]} numeric and {categorical.shape[1]} categorical columns, "
                f"the preprocessor was fitted on {self.d_num} and {len(self.categories_)}."
            )
        filled = np.where(np.isnan(numeric), self.mean_, numeric)
        columns = [np.where(self.constant_, 0.0, (filled - self.mean_) / self.scale_)]
        for values, names, common in zip(categorical.T, self.categories_, self.most_frequent_, strict=True):
            code = np.searchsorted(names, values).clip(max=len(names) - 1)
            seen = names[code] == values
            one_hot = np.zeros((len(values), len(names)))
            one_hot[np.arange(len(values)), np.where(seen, code, common)] = 1
            if self.unseen == "zero":
                one_hot[~seen] = 0
            columns.append(one_hot)
        return np.concatenate(columns, axis=1).astype(dtype)

    @property
    def d_num(self) -> int:
        """Number of numeric columns."""
        return len(self.mean_)

    @property
    def d_cat(self) -> int:
        """Number of one-hot columns."""
        return sum(map(len, self.categories_))

    @staticmethod
    def _matrices(numeric: np.ndarray | None, categorical: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if numeric is None and categorical is None:
            raise ValueError("give numeric or categorical columns (or both).")
        rows = len(categorical if numeric is None else numeric)
        numeric = np.zeros((rows, 0)) if numeric is None else np.asarray(numeric, dtype=np.float64)
        categorical = np.zeros((rows, 0), dtype=str) if categorical is None else as_categories(categorical)
        for name, x in (("numeric", numeric), ("categorical", categorical)):
            if x.ndim != 2 or len(x) != rows:
                raise ValueError(f"{name} must have shape [rows={rows}, columns], got {list(x.shape)}.")
        if np.isinf(numeric).any():
            raise ValueError(f"numeric must not be infinite, but {int(np.isinf(numeric).sum())} of its entries are.")
        return numeric, categorical
