"""Memory Mosaics: sequence models made of associative memories (Zhang et al., ICLR 2025)."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .functional import complex_linear_weight as complex_linear_weight
    from .functional import contextual_retrieval as contextual_retrieval
    from .functional import leaky_average as leaky_average
    from .functional import peek_values as peek_values
    from .functional import persistent_retrieval as persistent_retrieval
    from .functional import regular_language_accuracy as regular_language_accuracy
    from .functional import total_variation as total_variation
    from .functional import unit_norm as unit_norm
    from .metrics import PositionLoss as PositionLoss
    from .module import MemoryMosaics as MemoryMosaics
    from .module import ThreeMoons as ThreeMoons
    from .modules import GPTLM as GPTLM
    from .modules import ContextualMemory as ContextualMemory
    from .modules import MemoryCache as MemoryCache
    from .modules import MemoryMosaicBlock as MemoryMosaicBlock
    from .modules import MemoryMosaicLM as MemoryMosaicLM
    from .modules import PersistentMemory as PersistentMemory
    from .modules import ThreeMoonsMosaic as ThreeMoonsMosaic

__getattr__, __dir__, __all__ = attach(__name__, __file__)
