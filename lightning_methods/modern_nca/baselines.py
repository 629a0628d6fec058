"""What ModernNCA is compared with: scikit-learn's models (and three boosting libraries) as runs of the same trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.checks import check_choice
from .store import CandidateModule

__all__ = ["SklearnBaseline"]

NAMES = ("knn", "nca_knn", "mlp", "hist_gradient_boosting", "linear", "catboost", "lightgbm", "xgboost")
BOOSTERS = ("catboost", "lightgbm", "xgboost")


def make_estimator(name: str, classification: bool, seed: int, parameters: dict[str, Any] | None = None) -> Any:
    """A scikit-learn estimator by its short name, with the settings of the comparison.

    Args:
        name: one of "knn" (5 neighbours), "nca_knn" (NeighborhoodComponentsAnalysis with 30 iterations, then 5
            neighbours; classification only), "mlp" (two layers of 128, early stopping), "hist_gradient_boosting",
            "linear" (logistic or ridge regression), and with their libraries installed "catboost", "lightgbm",
            "xgboost" (2000 trees).
        classification: or regression.
        seed: random state.
        parameters: override those of the estimator; in "nca_knn" with the prefix ``nca__`` or ``knn__``.

    Raises:
        ValueError: unknown name, or "nca_knn" for regression.
        ImportError: the boosting library is not installed.
    """
    check_choice("estimator", name, NAMES)
    if name in BOOSTERS:
        estimator = _make_booster(name, classification)
    elif name == "nca_knn":
        from sklearn.neighbors import KNeighborsClassifier, NeighborhoodComponentsAnalysis
        from sklearn.pipeline import Pipeline

        if not classification:
            raise ValueError("estimator 'nca_knn' is for classification; regression has no NCA in scikit-learn.")
        estimator = Pipeline([("nca", NeighborhoodComponentsAnalysis(max_iter=30)), ("knn", KNeighborsClassifier(5))])
    else:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from sklearn.linear_model import LogisticRegression, Ridge
        from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
        from sklearn.neural_network import MLPClassifier, MLPRegressor

        table = {
            "knn": (KNeighborsClassifier, KNeighborsRegressor, {"n_neighbors": 5}),
            "mlp": (MLPClassifier, MLPRegressor, {"hidden_layer_sizes": (128, 128), "early_stopping": True}),
            "hist_gradient_boosting": (HistGradientBoostingClassifier, HistGradientBoostingRegressor, {}),
            "linear": (LogisticRegression, Ridge, {"max_iter": 1000}),
        }
        classifier, regressor, defaults = table[name]
        estimator = (classifier if classification else regressor)(**defaults)
    states = [key for key in estimator.get_params() if key.rsplit("__", 1)[-1] == "random_state"]
    return estimator.set_params(**dict.fromkeys(states, seed), **(parameters or {}))


def _make_booster(name: str, classification: bool) -> Any:
    try:
        if name == "catboost":
            from catboost import CatBoostClassifier, CatBoostRegressor

            kind = CatBoostClassifier if classification else CatBoostRegressor
            return kind(
                iterations=2000, early_stopping_rounds=50, verbose=False, allow_writing_files=False, random_state=0
            )
        if name == "lightgbm":
            from lightgbm import LGBMClassifier, LGBMRegressor

            return (LGBMClassifier if classification else LGBMRegressor)(n_estimators=2000, verbosity=-1)
        from xgboost import XGBClassifier, XGBRegressor
    except ImportError as error:
        raise ImportError(
            f"estimator {name!r} needs a library: pip install 'lightning-methods[tabular]' ({error})."
        ) from None
    kind = XGBClassifier if classification else XGBRegressor
    return kind(n_estimators=2000, early_stopping_rounds=50, subsample=0.8, colsample_bytree=0.8, tree_method="hist")


def _fit_booster(name: str, estimator: Any, x: np.ndarray, y: np.ndarray, val_x: np.ndarray, val_y: np.ndarray) -> None:
    """Fit with early stopping (50 rounds) on the validation rows."""
    if name == "lightgbm":
        from lightgbm import early_stopping

        estimator.fit(x, y, eval_set=[(val_x, val_y)], callbacks=[early_stopping(50, verbose=False)])
    else:
        estimator.fit(x, y, eval_set=[(val_x, val_y)], verbose=False)


class SklearnBaseline(CandidateModule):
    """A scikit-learn model on the rows of a data module, with the metrics of :class:`ModernNCA`.

    There is nothing to train by gradient: ``fit`` stores the data module's training rows (``candidates()``), the
    estimator is fitted on them when it is first asked, and one epoch suffices (``trainer.max_epochs=1``). A checkpoint
    holds the rows and the seed, not the estimator: a reloaded module fits it again and predicts the same. One process
    only.

    Args:
        estimator: "knn", "nca_knn", "mlp", "hist_gradient_boosting", "linear", "catboost", "lightgbm" or "xgboost"; see
            :func:`make_estimator`.
        num_classes: number of classes; None for regression.
        parameters: override the estimator's own.

    Raises:
        ValueError: unknown estimator.
    """

    def __init__(
        self, estimator: str = "knn", num_classes: int | None = None, parameters: dict[str, Any] | None = None
    ) -> None:
        super().__init__(num_classes, lambda params: torch.optim.SGD(params, lr=0.0))
        check_choice("estimator", estimator, NAMES)
        self.automatic_optimization = False
        self.estimator_name = estimator
        self.parameters_of_estimator = parameters
        self.register_buffer("val_x", torch.zeros(0, 0))
        self.register_buffer("val_y", torch.zeros(0, dtype=self.candidate_y.dtype))
        self.register_buffer("fit_seed", torch.zeros((), dtype=torch.int64))
        self._estimator: Any = None

    @property
    def resized_buffers(self) -> Iterable[str]:
        """Buffers whose size a checkpoint decides."""
        return (*super().resized_buffers, "val_x", "val_y")

    @property
    def estimator(self) -> Any:
        """The estimator, fitted on the stored rows."""
        if self._estimator is None:
            self.require_candidates()
            estimator = make_estimator(
                self.estimator_name, self.num_classes is not None, int(self.fit_seed), self.parameters_of_estimator
            )
            x, y = self.candidate_x.cpu().numpy(), self.candidate_y.cpu().numpy()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*did not converge.*|.*Maximum iterations.*")
                if self.estimator_name in BOOSTERS and len(self.val_x):
                    val = self.val_x.cpu().numpy(), self.val_y.cpu().numpy()
                    _fit_booster(self.estimator_name, estimator, x, y, *val)
                else:
                    estimator.fit(x, y)
            self._estimator = estimator
        return self._estimator

    def set_candidates(self, x: Tensor, y: Tensor, target_mean: float = 0.0, target_std: float = 1.0) -> None:
        """Store the training rows; the estimator is fitted again when it is next asked."""
        super().set_candidates(x, y, target_mean, target_std)
        self._estimator = None

    def setup(self, stage: str) -> None:
        """Take the training rows, and for the boosting libraries the validation rows, from the data module."""
        super().setup(stage)
        if stage != "fit":
            return
        self.fit_seed.fill_(torch.initial_seed() % 2**31)
        datamodule = getattr(self.trainer, "datamodule", None)
        if self.estimator_name in BOOSTERS and datamodule is not None:
            batches = list(datamodule.val_dataloader())
            self.val_x = torch.cat([batch[0] for batch in batches]).to(self.candidate_x)
            self.val_y = torch.cat([batch[1] for batch in batches]).to(self.candidate_y)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        same = all(
            (stored := state_dict.get(prefix + name)) is not None and torch.equal(stored.to(own), own)
            for name, own in ((name, getattr(self, name)) for name in (*self.resized_buffers, "fit_seed"))
        )
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not same:
            self._estimator = None

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities [B, K], or standardised targets [B]."""
        estimator, rows = self.estimator, x.cpu().numpy()
        if self.num_classes is None:
            return torch.as_tensor(estimator.predict(rows)).to(x)
        known = estimator.predict_proba(rows)
        probabilities = np.zeros((len(rows), self.num_classes))
        probabilities[:, np.asarray(estimator.classes_, dtype=np.int64)] = known  # not every class need be in training
        return torch.as_tensor(np.log(probabilities + 1e-7)).to(x)

    def configure_optimizers(self) -> None:
        """None: nothing is trained by gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Fit the estimator, unless it is."""
        _ = self.estimator

    def __getstate__(self) -> dict[str, Any]:
        """Leave the fitted estimator out of pickles: it is fitted again."""
        return {**super().__getstate__(), "_estimator": None}
