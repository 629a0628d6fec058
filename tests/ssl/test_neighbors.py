from __future__ import annotations

import pytest
import torch

from lightning_methods.ssl import knn_predict
from tests.vectors import load_cases


@pytest.mark.parametrize("case", load_cases("wasserstein_uniformity", "knn_predict"), ids=repr)
def test_vectors(case):
    for chunk_size in (1024, 5):
        predicted, scores = knn_predict(**case.inputs, chunk_size=chunk_size)
        torch.testing.assert_close(scores, case.outputs["scores"], rtol=1e-6, atol=0)
        assert torch.equal(predicted, case.outputs["pred"])


def test_k_is_cut_and_temperature_sharpens():
    bank = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.1, 1.0]])
    labels = torch.tensor([0, 1, 1, 1])
    query = torch.tensor([[5.0, 0.0]])
    everything, scores = knn_predict(query, bank, labels, 3, k=200)
    assert everything.item() == 1  # three neighbours outvote the nearest one
    assert scores[0, 2] == 0
    assert knn_predict(query, bank, labels, 3, k=200, temperature=0.07)[0].item() == 0


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bank": torch.zeros(4, 3)}, "bank must have shape"),
        ({"bank_labels": torch.tensor([0, 1, 2, 3])}, "bank_labels must be in 0..2"),
        ({"bank_labels": torch.tensor([0, 1])}, "bank_labels must have shape"),
        ({"k": 0}, "k must be"),
        ({"temperature": 0.0}, "temperature"),
        ({"bank": torch.zeros(0, 2), "bank_labels": torch.zeros(0, dtype=torch.int64)}, "at least one row"),
    ],
)
def test_bad_input(change, match):
    given = {
        "features": torch.ones(2, 2),
        "bank": torch.ones(4, 2),
        "bank_labels": torch.zeros(4, dtype=torch.int64),
        "num_classes": 3,
    }
    with pytest.raises(ValueError, match=match):
        knn_predict(**(given | change))


def test_a_very_small_temperature_does_not_overflow():
    bank = torch.tensor([[0.99, 0.1], [1.0, 0.0], [0.9, 0.3]])
    predicted, scores = knn_predict(
        torch.tensor([[1.0, 0.0]]), bank, torch.tensor([0, 1, 0]), 2, k=3, temperature=0.005
    )
    assert predicted.item() == 1
    assert scores.isfinite().all()
    cosines = torch.nn.functional.normalize(bank.double(), dim=1)[:, 0]
    votes = ((cosines - 1) / 0.005).exp()
    assert (scores[0, 0] / scores[0, 1]).item() == pytest.approx(((votes[0] + votes[2]) / votes[1]).item(), rel=1e-3)
