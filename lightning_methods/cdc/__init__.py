"""CDC: deep clustering whose confidence matches its accuracy."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.batches import MultiViewBatch as MultiViewBatch
    from ..metrics.clustering import clustering_metrics as clustering_metrics
    from .callbacks import Pretraining as Pretraining
    from .callbacks import ReliabilityDiagram as ReliabilityDiagram
    from .functional import calibration_loss as calibration_loss
    from .functional import prototype_initialization as prototype_initialization
    from .functional import region_targets as region_targets
    from .functional import select_confident_samples as select_confident_samples
    from .functional import separate_prototypes as separate_prototypes
    from .module import CDC as CDC
    from .module import CDCOutput as CDCOutput
    from .module import FixedThresholdClustering as FixedThresholdClustering
    from .modules import ClusteringHead as ClusteringHead

__getattr__, __dir__, __all__ = attach(__name__, __file__)
