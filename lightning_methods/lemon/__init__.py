"""LEMON: large networks that start as the function of a small one (ICLR 2024)."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .augment import DeiTTransform as DeiTTransform
    from .augment import MixUpOrCutMix as MixUpOrCutMix
    from .callbacks import SourceTraining as SourceTraining
    from .expand import expand_bert as expand_bert
    from .expand import expand_model as expand_model
    from .expand import expand_resnet as expand_resnet
    from .expand import expand_vit as expand_vit
    from .expand import max_output_difference as max_output_difference
    from .expand import norm_eps as norm_eps
    from .expand import set_norm_eps as set_norm_eps
    from .files import load_expanded as load_expanded
    from .files import load_source as load_source
    from .files import save_expanded as save_expanded
    from .functional import depth_map as depth_map
    from .functional import expand_batch_norm as expand_batch_norm
    from .functional import expand_conv as expand_conv
    from .functional import expand_layer_norm as expand_layer_norm
    from .functional import expand_linear as expand_linear
    from .functional import expand_rms_norm as expand_rms_norm
    from .functional import expand_vector as expand_vector
    from .module import LEMON as LEMON
    from .module import LEMONMaskedLM as LEMONMaskedLM
    from .modules import PreLNBertForMaskedLM as PreLNBertForMaskedLM
    from .modules import build_bert as build_bert
    from .schedule import expanded_cosine as expanded_cosine

__getattr__, __dir__, __all__ = attach(__name__, __file__)
