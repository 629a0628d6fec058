"""Calibration error against torchmetrics and by hand; the diagram's bars are the numbers."""

import pytest
import torch
from matplotlib import pyplot as plt
from torchmetrics.functional.classification import binary_calibration_error

from lightning_methods.metrics.calibration import (
    confidence_bins,
    expected_calibration_error,
    plot_reliability,
    reliability_bins,
)


def sample(n: int = 500):
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(n, generator=generator, dtype=torch.float64)
    return confidence, torch.rand(n, generator=generator) < confidence**2


@pytest.mark.parametrize("num_bins", [1, 7, 15, 100])
def test_equals_torchmetrics(num_bins):
    confidence, correct = sample()
    reference = binary_calibration_error(confidence, correct.long(), n_bins=num_bins, norm="l1")
    assert expected_calibration_error(confidence, correct, num_bins).item() == pytest.approx(reference.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bins_are_open_below_and_closed_above(dtype):
    edges = torch.tensor([0.0, 1e-6, 0.2, 0.4, 0.6, 0.8, 1.0], dtype=dtype)
    assert confidence_bins(edges, 5).tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert confidence_bins(torch.arange(1, 16, dtype=dtype) / 15, 15).tolist() == list(range(15))


def test_right_and_sure_is_zero_and_wrong_and_sure_is_one():
    sure = torch.ones(10)
    assert expected_calibration_error(sure, torch.ones(10)) == 0
    assert expected_calibration_error(sure, torch.zeros(10)) == 1


def test_empty_bins_are_nan_and_do_not_count():
    count, confidence, accuracy = reliability_bins(torch.tensor([0.95, 0.85]), torch.tensor([1, 0]), 10)
    assert count.tolist() == [0] * 8 + [1, 1]
    assert confidence[:8].isnan().all()
    assert accuracy[8:].tolist() == [0, 1]
    assert expected_calibration_error(torch.rand(0), torch.rand(0)).isnan()


def test_half_precision_is_summed_in_float32_or_wider():
    confidence = torch.full((5000,), 0.75, dtype=torch.bfloat16)
    error = expected_calibration_error(confidence, torch.ones(5000))
    assert error.dtype == torch.float32
    assert error.item() == pytest.approx(0.25)


def test_plot_draws_the_accuracy_of_every_bin():
    confidence, correct = sample()
    ax = plot_reliability(confidence, correct, 10, title="squared")
    _, _, accuracy = reliability_bins(confidence, correct, 10)
    bars = [bar.get_height() for bar in ax.containers[0]]
    assert bars == pytest.approx(accuracy.tolist())
    assert f"ECE {expected_calibration_error(confidence, correct, 10).item():.3f}" in ax.texts[0].get_text()
    plt.close(ax.figure)
    fig, own = plt.subplots()
    assert plot_reliability(confidence, correct, ax=own) is own
    plt.close(fig)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [
        (torch.tensor([1.2]), torch.tensor([1]), r"confidence must be in \[0, 1\]"),
        (torch.tensor([torch.nan]), torch.tensor([1]), r"confidence must be in \[0, 1\]"),
        (torch.rand(3), torch.tensor([1]), "same number of rows"),
        (torch.rand(3, 2), torch.ones(3), "confidence must have shape"),
        (torch.tensor([1]), torch.tensor([1]), "floating"),
    ],
)
def test_bad_input(confidence, correct, message):
    with pytest.raises(ValueError, match=message):
        expected_calibration_error(confidence, correct)
