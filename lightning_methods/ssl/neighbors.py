"""Classification by the nearest neighbours in feature space."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.checks import check_labels, check_range, check_shape
from ..core.neighbors import knn

__all__ = ["knn_predict"]


@torch.no_grad()
def knn_predict(
    features: Float[Tensor, "samples width"],
    bank: Float[Tensor, "bank width"],
    bank_labels: Int[Tensor, " bank"],
    num_classes: int,
    k: int = 200,
    temperature: float = 1.0,
    chunk_size: int = 1024,
) -> tuple[Int[Tensor, " samples"], Float[Tensor, "samples num_classes"]]:
    """Weighted vote of the k nearest neighbours by cosine: ``score_c = sum_{j in top k} exp(sim_j / T) 1[y_j = c]``.

    Source: Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination", CVPR 2018, section
    3.4 (T = 0.07 there; T = 1 in the uniformity paper's code).

    Args:
        features: to be classified, any norm, [samples, width].
        bank: labelled features, any norm, [bank, width].
        bank_labels: class indices, [bank].
        num_classes: number of classes.
        k: number of neighbours; cut to the size of the bank.
        temperature: T, positive.
        chunk_size: samples at a time; memory is ``chunk_size * bank``.

    Returns:
        The predicted classes [samples] and the scores [samples, num_classes]; for T below 1/80 all scores are divided
        by ``exp(1 / T - 80)``, or they would overflow.

    Raises:
        ValueError: shapes do not fit, a label is out of range, the bank is empty, or k or T is not positive.

    Example:
        >>> bank = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> knn_predict(torch.tensor([[2.0, 0.1]]), bank, torch.tensor([1, 1, 0]), num_classes=2, k=2)[0]
        tensor([1])
    """
    width = check_shape("features", features, "samples width")["width"]
    size = check_shape("bank", bank, "bank width", width=width)["bank"]
    check_labels("bank_labels", bank_labels, num_classes, batch=size)
    check_range("k", k, 1)
    check_range("temperature", temperature, 0, low_open=True)
    if size == 0:
        raise ValueError("bank must have at least one row.")
    distance, index = knn(features, bank, min(k, size), metric="cosine", chunk_size=chunk_size)
    votes = ((1 - distance) / temperature - max(1 / temperature - 80, 0.0)).exp()
    scores = votes.new_zeros(features.shape[0], num_classes).scatter_add_(1, bank_labels[index], votes)
    return scores.argmax(dim=1), scores
