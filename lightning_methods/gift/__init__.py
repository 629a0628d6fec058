"""GIFT: refined soft labels and a cosine loss for students of distilled data sets (ICLR 2025)."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.batches import SoftLabelBatch as SoftLabelBatch
    from ..nn.convnets import ConvNet as ConvNet
    from .callbacks import TeacherTraining as TeacherTraining
    from .functional import cosine_similarity_loss as cosine_similarity_loss
    from .functional import gift_loss as gift_loss
    from .functional import kl_soft_label_loss as kl_soft_label_loss
    from .functional import refine_soft_labels as refine_soft_labels
    from .functional import smooth_hard_labels as smooth_hard_labels
    from .functional import soft_cross_entropy as soft_cross_entropy
    from .functional import soft_label_loss as soft_label_loss
    from .module import GIFT as GIFT
    from .modules import DiffAugment as DiffAugment

__getattr__, __dir__, __all__ = attach(__name__, __file__)
