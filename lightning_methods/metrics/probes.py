"""How much a linear model can read from frozen features."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.checks import check_same_rows, check_shape

__all__ = ["linear_probe"]


def linear_probe(
    train_z: Tensor,
    train_y: Tensor,
    test_z: Tensor,
    test_y: Tensor,
    standardize: bool = False,
    **logistic: Any,
) -> dict[str, Any]:
    """Fit scikit-learn's logistic regression on one set of features and test it on another.

    Args:
        train_z: features, [n, dim].
        train_y: classes, int [n].
        test_z: features, [m, dim].
        test_y: classes, int [m].
        standardize: scale the features to mean 0 and variance 1 with the training set's statistics.
        **logistic: arguments of ``sklearn.linear_model.LogisticRegression``; ``max_iter`` is 1000 unless given.

    Returns:
        ``accuracy``, ``macro_f1``, ``micro_f1`` (floats), ``probabilities`` (float64 [m, classes]) and ``classes`` (the
        class of each of their columns).

    Raises:
        ValueError: shapes do not fit, or features are not finite (scikit-learn's message).

    Example:
        >>> z = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]])
        >>> linear_probe(z, torch.tensor([0, 0, 1, 1]), z, torch.tensor([0, 0, 1, 1]))["accuracy"]
        1.0
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    dim = check_shape("train_z", train_z, "n dim")["dim"]
    check_shape("test_z", test_z, "m dim", dim=dim)
    check_same_rows(train_z=train_z, train_y=train_y)
    check_same_rows(test_z=test_z, test_y=test_y)

    def to_numpy(x: Tensor) -> np.ndarray:
        x = x.detach().cpu()
        return (x.double() if x.is_floating_point() else x).numpy()

    model = LogisticRegression(**{"max_iter": 1000, **logistic})
    model = make_pipeline(StandardScaler(), model) if standardize else model
    model.fit(to_numpy(train_z), to_numpy(train_y))
    probabilities = model.predict_proba(to_numpy(test_z))
    classes = model.classes_
    predicted, target = classes[probabilities.argmax(axis=1)], to_numpy(test_y)
    return {
        "accuracy": float((predicted == target).mean()),
        "macro_f1": float(f1_score(target, predicted, average="macro")),
        "micro_f1": float(f1_score(target, predicted, average="micro")),
        "probabilities": torch.from_numpy(probabilities),
        "classes": torch.from_numpy(np.asarray(classes)),
    }
