"""Argument checks: what passes, and what the message of a failure names."""

from __future__ import annotations

import pytest
import torch

from lightning_methods.core import checks

pytestmark = pytest.mark.bad_input


def test_shapes():
    x = torch.zeros(4, 3)
    assert checks.check_shape("x", x, "batch classes") == {"batch": 4, "classes": 3}
    assert checks.check_shape("x", torch.zeros(2, 5, 3), "... classes", classes=3) == {"classes": 3}
    assert checks.check_shape("x", torch.zeros(2, 5, 3), "batch ...") == {"batch": 2}
    with pytest.raises(ValueError, match=r"x must have shape \[batch, classes=5\], got \[4, 3\]"):
        checks.check_shape("x", x, "batch classes", classes=5)
    with pytest.raises(ValueError, match=r"got \[4\]"):
        checks.check_shape("x", torch.zeros(4), "batch classes")
    with pytest.raises(ValueError, match=r"got \[\]"):
        checks.check_shape("x", torch.tensor(0.0), "batch ...")
    with pytest.raises(TypeError, match="got list"):
        checks.check_shape("x", [1.0], "batch")


def test_rows():
    assert checks.check_same_rows(x=torch.zeros(4, 2), y=torch.zeros(4)) == 4
    with pytest.raises(ValueError, match=r"x \[4, 2\], y \[5\]"):
        checks.check_same_rows(x=torch.zeros(4, 2), y=torch.zeros(5))
    with pytest.raises(ValueError, match="same number of rows"):
        checks.check_same_rows(x=torch.tensor(1.0))


def test_choices_suggest_the_nearest():
    checks.check_choice("mode", "convex", ("convex", "additive"))
    with pytest.raises(
        ValueError, match=r"mode must be one of 'convex', 'additive'; got 'convx'\. Did you mean 'convex'\?"
    ):
        checks.check_choice("mode", "convx", ("convex", "additive"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1.0])
def test_ranges(value):
    checks.check_range("p", 0.0, 0, 1, high_open=True)
    with pytest.raises(ValueError, match=r"p must be a finite number in \[0, 1\)"):
        checks.check_range("p", value, 0, 1, high_open=True)


def test_open_lower_end():
    with pytest.raises(ValueError, match=r"\(0, inf\)"):
        checks.check_range("t", 0.0, 0, low_open=True)


def test_labels():
    checks.check_labels("y", torch.tensor([0, 2]), 3)
    checks.check_labels("y", torch.tensor([0, -1]), 3, ignore=-1)
    for bad, message in [
        (torch.tensor([0, 3]), r"y must be in 0\.\.2, got 3"),
        (torch.tensor([-1, 0]), "got -1"),
        (torch.tensor([0.0, 1.0]), "integer dtype"),
        (torch.tensor([True]), "integer dtype"),
        (torch.zeros(2, 3, dtype=torch.long), r"\[batch\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            checks.check_labels("y", bad, 3)
    with pytest.raises(ValueError, match="batch=5"):
        checks.check_labels("y", torch.tensor([0, 1]), 3, batch=5)


def test_values():
    checks.check_finite("x", torch.ones(3))
    with pytest.raises(ValueError, match="2 of its 3 entries"):
        checks.check_finite("x", torch.tensor([1.0, float("nan"), float("inf")]))
    checks.check_probabilities("p", torch.full((2, 4), 0.25))
    for bad in (torch.full((2, 4), 0.3), torch.tensor([[1.5, -0.5]]), torch.tensor([[float("nan"), 1.0]])):
        with pytest.raises(ValueError, match=r"probabilities|finite"):
            checks.check_probabilities("p", bad)
    with pytest.raises(ValueError, match="floating point"):
        checks.check_floating("x", torch.ones(2, dtype=torch.long))


def test_values_are_not_read_on_an_accelerator_unless_asked():
    x = torch.ones(2, device="meta")
    assert not checks.values_visible(x)
    assert checks.values_visible(x, validate=True)
    checks.check_finite("x", x)  # would fail: meta tensors have no values
