"""MLA: logit adjustment for long-tailed data, after training, and the boundaries that it approximates (ICLR 2025)."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.losses import logit_adjusted_cross_entropy as logit_adjusted_cross_entropy
    from ..metrics.group import ShotAccuracy as ShotAccuracy
    from ..metrics.group import shot_accuracy as shot_accuracy
    from .callbacks import CompareAdjustments as CompareAdjustments
    from .callbacks import LogitAdjustment as LogitAdjustment
    from .functional import additive_boundary_angles as additive_boundary_angles
    from .functional import additive_logit_adjustment as additive_logit_adjustment
    from .functional import multiplicative_boundary_angles as multiplicative_boundary_angles
    from .functional import multiplicative_logit_adjustment as multiplicative_logit_adjustment
    from .functional import one_vs_one_scores as one_vs_one_scores
    from .functional import optimal_boundary_angles as optimal_boundary_angles
    from .functional import search_strength as search_strength
    from .functional import simplex_etf as simplex_etf
    from .module import MLA as MLA
    from .modules import ETFClassifier as ETFClassifier
    from .modules import TableMLP as TableMLP

__getattr__, __dir__, __all__ = attach(__name__, __file__)
