"""Metrics that several methods share: each a pure function and a thin ``torchmetrics.Metric`` on it."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .calibration import draw_reliability_bins as draw_reliability_bins
    from .calibration import expected_calibration_error as expected_calibration_error
    from .calibration import plot_reliability as plot_reliability
    from .calibration import reliability_bins as reliability_bins
    from .clustering import AURC as AURC
    from .clustering import ClusterAccuracy as ClusterAccuracy
    from .clustering import ClusterCalibrationError as ClusterCalibrationError
    from .clustering import ClusterRejection as ClusterRejection
    from .clustering import aurc as aurc
    from .clustering import clustering_metrics as clustering_metrics
    from .clustering import fpr_at_recall as fpr_at_recall
    from .clustering import match_clusters as match_clusters
    from .group import GroupAccuracy as GroupAccuracy
    from .group import ShotAccuracy as ShotAccuracy
    from .group import WorstGroupAccuracy as WorstGroupAccuracy
    from .group import group_accuracy as group_accuracy
    from .group import shot_accuracy as shot_accuracy
    from .probes import linear_probe as linear_probe
    from .spectrum import EffectiveRank as EffectiveRank
    from .spectrum import effective_rank as effective_rank

__getattr__, __dir__, __all__ = attach(__name__, __file__)
