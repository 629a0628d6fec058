"""ModernNCA with the interface of scikit-learn: ``fit``, ``predict``, ``predict_proba``, pipelines, grid search."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from ..core.batches import IndexedBatch
from .data import TabularPreprocessor
from .module import ModernNCA
from .modules import TabularEncoder

__all__ = ["ModernNCAClassifier", "ModernNCARegressor"]


class _Batches:
    """A loader of tensors: one random permutation per pass, a last batch of one row joins the one before it."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, generator: torch.Generator | None = None) -> None:
        self.x = x
        self.y = y
        self.generator = generator
        ends = list(range(batch_size, len(x), batch_size))
        if ends and len(x) - ends[-1] == 1:
            ends.pop()
        self.sizes = np.diff([0, *ends, len(x)]).tolist()

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[IndexedBatch]:
        rows = torch.arange(len(self.x))
        if self.generator is not None:
            rows = torch.randperm(len(self.x), generator=self.generator)
        for index in rows.split(self.sizes):
            yield IndexedBatch(self.x[index], self.y[index], index)


class _EarlyStopping(Callback):
    """Keeps the weights of the best validation (of equal ones the latest) and ends a fit that stalls."""

    def __init__(self, monitor: str, sign: int, patience: int) -> None:
        self.monitor = monitor
        self.sign = sign
        self.patience = patience
        self.scores: list[float] = []
        self.best = -np.inf
        self.state: dict[str, Tensor] | None = None
        self.waited = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        score = float(trainer.callback_metrics[self.monitor])
        self.scores.append(score)
        self.waited += 1
        if self.sign * score > self.best:
            self.waited = 0
        if self.sign * score >= self.best:
            self.best = self.sign * score
            self.state = copy.deepcopy(pl_module.encoder.state_dict())
        trainer.should_stop = self.waited >= self.patience


@contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """No messages, and no trace in the global random generators."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    seed = os.environ.pop("PL_GLOBAL_SEED", None)
    try:
        with isolate_rng(), warnings.catch_warnings():
            if not verbose:
                for logger in loggers:
                    logger.setLevel(logging.ERROR)
                warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if seed is not None:
            os.environ["PL_GLOBAL_SEED"] = seed


class _ModernNCAEstimator(BaseEstimator):
    def __init__(
        self,
        dim: int = 128,
        n_blocks: int = 0,
        d_block: int = 512,
        dropout: float = 0.1,
        num_embedding: Literal["plr-lite", "plr", "none"] = "plr-lite",
        n_frequencies: int = 77,
        frequency_scale: float = 0.04431360576139521,
        d_embedding: int = 34,
        temperature: float = 1.0,
        sample_rate: float = 0.5,
        distance: Literal["euclidean", "cosine"] = "euclidean",
        learning_rate: float = 0.01,
        weight_decay: float = 2e-4,
        batch_size: int = 256,
        max_epochs: int = 200,
        early_stopping: bool = True,
        validation_fraction: float = 0.2,
        patience: int = 20,
        categorical_features: Sequence[int] | Sequence[str] | Sequence[bool] | None = None,
        accelerator: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.dim = dim
        self.n_blocks = n_blocks
        self.d_block = d_block
        self.dropout = dropout
        self.num_embedding = num_embedding
        self.n_frequencies = n_frequencies
        self.frequency_scale = frequency_scale
        self.d_embedding = d_embedding
        self.temperature = temperature
        self.sample_rate = sample_rate
        self.distance = distance
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.categorical_features = categorical_features
        self.accelerator = accelerator
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        return tags

    # columns

    def _validate(self, X: Any, y: Any = "no_validation", **options: Any) -> Any:
        dtype = np.float64 if self.categorical_features is None else None
        return validate_data(self, X, y, dtype=dtype, ensure_all_finite="allow-nan", **options)

    def _categorical_mask(self) -> np.ndarray:
        mask = np.zeros(self.n_features_in_, dtype=bool)
        if self.categorical_features is None:
            return mask
        chosen = np.asarray(self.categorical_features)
        if chosen.dtype == bool:
            if chosen.shape != mask.shape:
                raise ValueError(f"categorical_features has {len(chosen)} flags for {len(mask)} columns.")
            return chosen
        if chosen.dtype.kind in "UO":
            names = list(getattr(self, "feature_names_in_", []))
            unknown = [name for name in chosen if name not in names]
            if unknown:
                raise ValueError(
                    f"categorical_features: there is no column {str(unknown[0])!r}; the columns are {names}."
                )
            chosen = np.array([names.index(name) for name in chosen], dtype=int)
        if len(chosen) and not (-len(mask) <= chosen.min() and chosen.max() < len(mask)):
            raise ValueError(f"categorical_features must be in 0..{len(mask) - 1}, got {chosen.tolist()}.")
        mask[chosen.astype(int)] = True
        return mask

    def _columns(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        numbers = X[:, ~self.categorical_]
        if numbers.dtype == object:  # a data frame with categories; numpy does not know pandas.NA
            missing = np.frompyfunc(lambda value: type(value).__name__ == "NAType", 1, 1)(numbers)
            numbers = np.where(missing.astype(bool), np.nan, numbers)
        return numbers.astype(np.float64), X[:, self.categorical_]

    def _prepare(self, X: np.ndarray) -> Tensor:
        return torch.from_numpy(self.preprocessor_.transform(*self._columns(X), dtype=np.float64))

    # fitting

    def _check_parameters(self) -> None:
        if self.batch_size < 2:
            raise ValueError(f"batch_size must be at least 2, got {self.batch_size}.")
        if self.max_epochs < 1:
            raise ValueError(f"max_epochs must be at least 1, got {self.max_epochs}.")
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}.")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be in (0, 1), got {self.validation_fraction}.")

    def _split(self, y: np.ndarray, strata: np.ndarray | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows for training and for early stopping; the latter are empty where the table is too small to spare any."""
        rows = np.arange(len(y))
        held_out = int(np.ceil(self.validation_fraction * len(y)))
        if not self.early_stopping or len(y) - held_out < 2:
            return rows, rows[:0]
        if strata is not None:
            counts = np.bincount(strata)
            if counts[counts > 0].min() < 2 or min(held_out, len(y) - held_out) < (counts > 0).sum():
                strata = None
        return tuple(train_test_split(rows, test_size=held_out, random_state=seed, stratify=strata))

    def _fit(self, X: np.ndarray, y: np.ndarray, num_classes: int | None, monitor: str, sign: int) -> None:
        self._check_parameters()
        if len(X) < 2:
            raise ValueError(
                "ModernNCA predicts a row from other rows: it cannot be fitted with 1 sample (n_samples=1)."
            )
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        train, val = self._split(y, y if num_classes else None, seed)
        self.categorical_ = self._categorical_mask()
        self.preprocessor_ = TabularPreprocessor().fit(*self._columns(X[train]))
        mean, std = 0.0, 1.0
        if num_classes is None:
            mean, std = float(y[train].mean()), float(y[train].std()) or 1.0
            y = (y - mean) / std
        rows, targets = self._prepare(X), torch.from_numpy(y)
        with _quiet(self.verbose):
            torch.manual_seed(seed)
            module = self._build(num_classes)
            x = rows.float()
            labels = targets.float() if num_classes is None else targets
            module.set_candidates(x[train], labels[train], mean, std)
            stopping = _EarlyStopping(monitor, sign, self.patience)
            trainer = Trainer(
                accelerator=self.accelerator,
                devices=1,
                max_epochs=self.max_epochs,
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=self.verbose,
                num_sanity_val_steps=0,
                callbacks=[stopping] if len(val) else [],
            )
            generator = torch.Generator().manual_seed(seed)
            loaders = [_Batches(x[train], labels[train], self.batch_size, generator)]
            if len(val):
                loaders.append(_Batches(x[val], labels[val], 4096))
            trainer.fit(module, *loaders)
        if stopping.state is not None:
            module.encoder.load_state_dict(stopping.state)
        self.n_iter_ = trainer.current_epoch
        self.validation_scores_ = stopping.scores
        # Predictions are computed in double precision, from all rows: those held out are neighbours like the others.
        module.trainer = None
        module = module.cpu().double().eval()
        module.set_candidates(rows, targets, mean, std)
        self.module_ = module

    def _build(self, num_classes: int | None) -> ModernNCA:
        encoder = TabularEncoder(
            self.preprocessor_.d_num,
            self.preprocessor_.d_cat,
            dim=self.dim,
            n_blocks=self.n_blocks,
            d_block=self.d_block,
            dropout=self.dropout,
            num_embedding=self.num_embedding,
            n_frequencies=self.n_frequencies,
            frequency_scale=self.frequency_scale,
            d_embedding=self.d_embedding,
        )
        return ModernNCA(
            encoder,
            num_classes,
            temperature=self.temperature,
            sample_rate=self.sample_rate,
            distance=self.distance,
            optimizer=partial(torch.optim.AdamW, lr=self.learning_rate, weight_decay=self.weight_decay),
        )

    # predicting

    @torch.no_grad()
    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        x = self._prepare(self._validate(X, reset=False))
        with self.module_.cached_candidates():
            return torch.cat([self.module_.predict_step(rows, 0) for rows in x.split(1024)]).numpy()

    def embed(self, X: Any) -> np.ndarray:
        """Embeddings of rows.

        Args:
            X: table, [rows, columns].

        Returns:
            float64 [rows, dim].
        """
        check_is_fitted(self)
        with torch.no_grad():
            return self.module_.embed(self._prepare(self._validate(X, reset=False))).numpy()

    def kneighbors(self, X: Any, n_neighbors: int = 5) -> tuple[np.ndarray, np.ndarray]:
        """The training rows on which predictions rest.

        Args:
            X: table, [rows, columns].
            n_neighbors: how many of them.

        Returns:
            ``(weights, indices)``: the largest weights, a share of 1 each, and the rows given to ``fit`` that have
            them, [rows, n_neighbors] each.
        """
        check_is_fitted(self)
        weights, indices = self.module_.explain(self._prepare(self._validate(X, reset=False)), n_neighbors)
        return weights.numpy(), indices.numpy()


_PARAMETERS = """Args:
        dim: width of the embedding.
        n_blocks: number of BatchNorm-MLP blocks after the linear map.
        d_block: hidden width of a block.
        dropout: inside the blocks.
        num_embedding: periodic embedding of numeric columns, "plr-lite", "plr" or "none".
        n_frequencies: frequencies per column.
        frequency_scale: their standard deviation at the start.
        d_embedding: width of a column's embedding.
        temperature: divides the distances.
        sample_rate: share of the training rows that are candidates in a training step.
        distance: "euclidean" or "cosine".
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        batch_size: rows in a training batch, at least 2.
        max_epochs: passes over the training rows, at most.
        early_stopping: keep the epoch that is best on held-out rows, and stop ``patience`` epochs after it.
        validation_fraction: share of the rows held out.
        patience: epochs without improvement.
        categorical_features: columns that hold categories: indices, names (of a data frame) or a boolean mask.
        accelerator: where to train, as in ``lightning.Trainer``. Predictions are made on the CPU.
        random_state: seed of the split, the initial weights, the order and the sampling.
        verbose: whether to show the progress.

    Attributes:
        module_: the fitted :class:`ModernNCA`.
        preprocessor_: the fitted :class:`TabularPreprocessor`.
        n_iter_: epochs that were run.
        validation_scores_: score on the held-out rows (accuracy, or root mean squared error) of each of them.
        n_features_in_: number of columns."""


def _documented(kind: type) -> type:
    """Put the parameters, which both estimators share, into the docstring."""
    kind.__doc__ = (kind.__doc__ or "").replace("PARAMETERS", _PARAMETERS)
    return kind


@_documented
class ModernNCAClassifier(ClassifierMixin, _ModernNCAEstimator):
    """ModernNCA for classification with the interface of scikit-learn.

    A share of the rows is held out for early stopping; in the end all rows given to ``fit`` are neighbours that
    predictions are averaged over. Missing values are allowed.

    PARAMETERS
        classes_: class labels.

    Example:
        >>> from sklearn.datasets import load_wine
        >>> X, y = load_wine(return_X_y=True)
        >>> model = ModernNCAClassifier(dim=16, max_epochs=10, random_state=0).fit(X[::2], y[::2])
        >>> model.score(X[1::2], y[1::2]) > 0.9
        True
    """

    def fit(self, X: Any, y: Any) -> ModernNCAClassifier:
        """Fit to a table.

        Args:
            X: numbers (and categories, see ``categorical_features``), [rows, columns]; array or data frame.
            y: classes, [rows].

        Returns:
            The estimator.

        Raises:
            ValueError: a parameter is out of range, or scikit-learn finds fault with the data.
        """
        X, y = self._validate(X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        self._fit(X, labels.astype(np.int64), max(len(self.classes_), 2), "val/acc", 1)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes.

        Args:
            X: table, [rows, columns].

        Returns:
            float64 [rows, classes], in the order of ``classes_``.
        """
        probabilities = self._outputs(X)[:, : len(self.classes_)]
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row.

        Args:
            X: table, [rows, columns].
        """
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(axis=1)]


@_documented
class ModernNCARegressor(RegressorMixin, _ModernNCAEstimator):
    """ModernNCA for regression with the interface of scikit-learn.

    A share of the rows is held out for early stopping; in the end all rows given to ``fit`` are neighbours that
    predictions are averaged over. Missing values are allowed.

    PARAMETERS

    Example:
        >>> from sklearn.datasets import make_friedman1
        >>> X, y = make_friedman1(300, random_state=0)
        >>> model = ModernNCARegressor(dim=16, max_epochs=30, random_state=0).fit(X[:200], y[:200])
        >>> model.score(X[200:], y[200:]) > 0.5
        True
    """

    def fit(self, X: Any, y: Any) -> ModernNCARegressor:
        """Fit to a table.

        Args:
            X: numbers (and categories, see ``categorical_features``), [rows, columns]; array or data frame.
            y: targets, [rows].

        Returns:
            The estimator.

        Raises:
            ValueError: a parameter is out of range, or scikit-learn finds fault with the data.
        """
        X, y = self._validate(X, y, y_numeric=True)
        self._fit(X, y.astype(np.float64), None, "val/rmse", -1)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Targets of the rows, in their own unit.

        Args:
            X: table, [rows, columns].
        """
        return self._outputs(X)
