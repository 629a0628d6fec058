"""LIDR: a chat model improves itself in its weaker languages by preferring what it thought in its strongest one."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.batches import PreferenceBatch as PreferenceBatch
    from .callbacks import PrecomputeReference as PrecomputeReference
    from .callbacks import SavePretrained as SavePretrained
    from .data import ToyWorld as ToyWorld
    from .functional import LIDRLoss as LIDRLoss
    from .functional import dpo_loss as dpo_loss
    from .functional import lidr_loss as lidr_loss
    from .functional import sequence_log_prob as sequence_log_prob
    from .module import LIDR as LIDR
    from .module import MultilingualAlignment as MultilingualAlignment
    from .preference import TRANSLATION_PRIMER as TRANSLATION_PRIMER
    from .preference import ParallelRecord as ParallelRecord
    from .preference import PreferencePair as PreferencePair
    from .preference import build_preference_pairs as build_preference_pairs
    from .preference import extract_translation as extract_translation
    from .preference import final_number as final_number
    from .preference import has_repetition as has_repetition
    from .preference import language_prompt as language_prompt
    from .preference import translation_prompt as translation_prompt

__getattr__, __dir__, __all__ = attach(__name__, __file__)
