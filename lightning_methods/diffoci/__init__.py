"""difFOCI: a differentiable, rank-based measure of dependence for selection, representations and robust features."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.batches import GroupBatch as GroupBatch
    from ..metrics.group import WorstGroupAccuracy as WorstGroupAccuracy
    from .callbacks import DifFOCIRegularizer as DifFOCIRegularizer
    from .callbacks import DownstreamScore as DownstreamScore
    from .callbacks import SaliencyMaps as SaliencyMaps
    from .functional import FOCIResult as FOCIResult
    from .functional import codec as codec
    from .functional import diffoci_coefficient as diffoci_coefficient
    from .functional import foci as foci
    from .functional import group_dro_update as group_dro_update
    from .functional import rank_statistics as rank_statistics
    from .functional import saliency_map as saliency_map
    from .metrics import AttributeLeakage as AttributeLeakage
    from .metrics import DependenceCoefficient as DependenceCoefficient
    from .module import DifFOCIClassifier as DifFOCIClassifier
    from .module import DifFOCIRepresentation as DifFOCIRepresentation
    from .module import DifFOCISelector as DifFOCISelector
    from .modules import DifFOCIPenalty as DifFOCIPenalty
    from .modules import DigitEncoder as DigitEncoder
    from .modules import ElementwiseScale as ElementwiseScale

__getattr__, __dir__, __all__ = attach(__name__, __file__)
