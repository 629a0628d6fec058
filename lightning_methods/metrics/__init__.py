"""Metrics that several methods share: each a pure function and a thin ``torchmetrics.Metric`` on it."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .group import GroupAccuracy as GroupAccuracy
    from .group import WorstGroupAccuracy as WorstGroupAccuracy
    from .group import group_accuracy as group_accuracy
    from .probes import linear_probe as linear_probe

__getattr__, __dir__, __all__ = attach(__name__, __file__)
