from __future__ import annotations

import pytest
import torch

from lightning_methods.metrics import linear_probe


def test_separable_features_and_noise():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(3, (400,), generator=g)
    z = torch.eye(3)[y] + 0.1 * torch.randn(400, 3, generator=g)
    result = linear_probe(z[:200], y[:200], z[200:], y[200:])
    assert result["accuracy"] == result["macro_f1"] == result["micro_f1"] == 1
    assert result["probabilities"].shape == (200, 3)
    torch.testing.assert_close(result["probabilities"].sum(1), torch.ones(200, dtype=torch.float64))
    noise = linear_probe(torch.randn(200, 3, generator=g), y[:200], torch.randn(200, 3, generator=g), y[200:])
    assert 0.2 < noise["accuracy"] < 0.5


def test_standardize_uses_training_statistics_and_labels_keep_their_numbers():
    g = torch.Generator().manual_seed(0)
    y = torch.where(torch.rand(100, generator=g) < 0.5, 4, 7)
    z = torch.stack([1e4 * torch.randn(100, generator=g), 1e-3 * (y - 5.5)], dim=1)
    assert linear_probe(z, y, z, y, standardize=True)["accuracy"] == 1
    assert linear_probe(z, y, z, y)["accuracy"] < 0.9
    assert linear_probe(z, y, z, y, standardize=True, C=10.0)["classes"].tolist() == [4, 7]


@pytest.mark.bad_input
def test_bad_input():
    z, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(ValueError, match="dim=2"):
        linear_probe(z, y, torch.zeros(4, 3), y)
    with pytest.raises(ValueError, match="same number of rows"):
        linear_probe(z, y[:3], z, y)
