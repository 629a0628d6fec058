"""SNR: reset the units of a network that have been silent for longer than their own history makes plausible."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .callbacks import SelfNormalizedResets as SelfNormalizedResets
    from .competitors import ContinualBackprop as ContinualBackprop
    from .competitors import L2Init as L2Init
    from .competitors import L2Regularization as L2Regularization
    from .competitors import ReDo as ReDo
    from .competitors import ShrinkAndPerturb as ShrinkAndPerturb
    from .functional import LayerPair as LayerPair
    from .functional import cbp_utility as cbp_utility
    from .functional import empirical_tail as empirical_tail
    from .functional import find_layer_pairs as find_layer_pairs
    from .functional import firing_mask as firing_mask
    from .functional import geometric_tail as geometric_tail
    from .functional import redo_scores as redo_scores
    from .functional import reset_units as reset_units
    from .functional import update_ages as update_ages
    from .functional import update_thresholds as update_thresholds
    from .module import ContinualClassifier as ContinualClassifier
    from .modules import CausalTransformer as CausalTransformer
    from .modules import ConcatReLU as ConcatReLU
    from .modules import ContinualCNN as ContinualCNN
    from .modules import ContinualMLP as ContinualMLP
    from .units import PlasticityMonitor as PlasticityMonitor
    from .units import UnitResetCallback as UnitResetCallback

__getattr__, __dir__, __all__ = attach(__name__, __file__)
