"""ModernNCA: predict a row of a table by a softmax over distances to training rows in a learned embedding."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.batches import IndexedBatch as TabularBatch  # noqa: F401 - the same class under the method's name
    from .baselines import SklearnBaseline as SklearnBaseline
    from .data import TabularPreprocessor as TabularPreprocessor
    from .estimators import ModernNCAClassifier as ModernNCAClassifier
    from .estimators import ModernNCARegressor as ModernNCARegressor
    from .functional import neighbor_weights as neighbor_weights
    from .functional import plr as plr
    from .functional import plr_lite as plr_lite
    from .functional import rows_outside as rows_outside
    from .functional import sample_candidates as sample_candidates
    from .functional import soft_nearest_neighbor_log_probs as soft_nearest_neighbor_log_probs
    from .functional import soft_nearest_neighbor_regression as soft_nearest_neighbor_regression
    from .module import ModernNCA as ModernNCA
    from .modules import PLREmbedding as PLREmbedding
    from .modules import TabularEncoder as TabularEncoder

__getattr__, __dir__, __all__ = attach(__name__, __file__)
