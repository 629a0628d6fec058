"""What several methods share: checks, global-batch statistics, the module base, losses, clustering, neighbours."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .batches import CorrectnessBatch as CorrectnessBatch
    from .batches import GroupBatch as GroupBatch
    from .batches import IndexedBatch as IndexedBatch
    from .batches import MultiViewBatch as MultiViewBatch
    from .batches import PopTBatch as PopTBatch
    from .batches import PreferenceBatch as PreferenceBatch
    from .batches import SoftLabelBatch as SoftLabelBatch
    from .batches import TwoViewBatch as TwoViewBatch
    from .callbacks import FiniteGuard as FiniteGuard
    from .callbacks import LossPenalty as LossPenalty
    from .callbacks import SeedEveryEpoch as SeedEveryEpoch
    from .checkpoints import load_network as load_network
    from .checkpoints import load_submodule as load_submodule
    from .clustering import kmeans as kmeans
    from .hooks import capture_outputs as capture_outputs
    from .io import cached_tensors as cached_tensors
    from .io import read_jsonl as read_jsonl
    from .io import safe_unpickle as safe_unpickle
    from .io import write_jsonl as write_jsonl
    from .manual import ManualOptimization as ManualOptimization
    from .module import Classifier as Classifier
    from .module import MethodModule as MethodModule
    from .module import feature_dim as feature_dim
    from .optim import build_optimizer as build_optimizer
    from .optim import parameter_groups as parameter_groups
    from .queue import FeatureQueue as FeatureQueue
    from .schedules import WarmupSchedule as WarmupSchedule
    from .schedules import warmup_constant as warmup_constant
    from .schedules import warmup_cosine as warmup_cosine
    from .schedules import warmup_linear as warmup_linear

__getattr__, __dir__, __all__ = attach(__name__, __file__)
