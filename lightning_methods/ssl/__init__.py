"""Self-supervision from two views: modules, losses, evaluation callbacks and the LARS optimiser."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.batches import TwoViewBatch as TwoViewBatch
    from ..core.teacher import cosine_momentum as cosine_momentum
    from ..core.teacher import momentum_update as update_momentum  # noqa: F401
    from ..nn.mlp import MLPHead as MLPHead
    from ..nn.resnets import CIFARResNet18 as CIFARResNet18
    from .callbacks import KNNEvaluation as KNNEvaluation
    from .callbacks import OnlineLinearProbe as OnlineLinearProbe
    from .lars import LARS as LARS
    from .losses import alignment_loss as alignment_loss
    from .losses import barlow_twins_loss as barlow_twins_loss
    from .losses import byol_loss as byol_loss
    from .losses import info_nce_queue_loss as info_nce_queue_loss
    from .losses import nt_xent_loss as nt_xent_loss
    from .losses import uniformity_loss as uniformity_loss
    from .losses import zero_cl_loss as zero_cl_loss
    from .module import BYOL as BYOL
    from .module import BarlowTwins as BarlowTwins
    from .module import MoCoV2 as MoCoV2
    from .module import SimCLR as SimCLR
    from .module import TwoViewSSL as TwoViewSSL
    from .module import ZeroCL as ZeroCL
    from .neighbors import knn_predict as knn_predict
    from .probe import LinearProbe as LinearProbe

__getattr__, __dir__, __all__ = attach(__name__, __file__)
