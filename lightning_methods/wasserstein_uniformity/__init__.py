"""Wasserstein uniformity: how evenly representations cover the sphere, as a metric and as a loss (ICLR 2024)."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..ssl.losses import alignment_loss as alignment_loss
    from ..ssl.losses import uniformity_loss as uniformity_loss
    from ..ssl.module import BYOL as BYOL
    from ..ssl.module import BarlowTwins as BarlowTwins
    from ..ssl.module import MoCoV2 as MoCoV2
    from ..ssl.module import ZeroCL as ZeroCL
    from .callbacks import SpectrumWriter as SpectrumWriter
    from .callbacks import UniformityPenalty as UniformityPenalty
    from .figures import plot_collapse as plot_collapse
    from .figures import plot_spectra as plot_spectra
    from .functional import covariance_log_spectrum as covariance_log_spectrum
    from .functional import wasserstein_to_uniform as wasserstein_to_uniform
    from .functional import wasserstein_uniformity as wasserstein_uniformity
    from .metrics import PairwiseUniformity as PairwiseUniformity
    from .metrics import WassersteinUniformity as WassersteinUniformity
    from .modules import PairwiseUniformityLoss as PairwiseUniformityLoss
    from .modules import WassersteinUniformityLoss as WassersteinUniformityLoss

__getattr__, __dir__, __all__ = attach(__name__, __file__)
