"""LIDR: a chat model improves itself in its weaker languages by preferring what it thought in its strongest one."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.batches import PreferenceBatch as PreferenceBatch
    from .callbacks import PrecomputeReference as PrecomputeReference
    from .callbacks import SavePretrained as SavePretrained
    from .data import ToyWorld as ToyWorld
    from .evaluation import ModelOutputs as ModelOutputs
    from .evaluation import MultilingualEvaluation as MultilingualEvaluation
    from .evaluation import head_to_head as head_to_head
    from .evaluation import identify_language as identify_language
    from .evaluation import judge_prompt as judge_prompt
    from .evaluation import mgsm_correct as mgsm_correct
    from .evaluation import off_target_rate as off_target_rate
    from .evaluation import read_preferences as read_preferences
    from .evaluation import weighted_preference as weighted_preference
    from .evaluation import win_rates as win_rates
    from .evaluation import write_model_outputs as write_model_outputs
    from .functional import LIDRLoss as LIDRLoss
    from .functional import dpo_loss as dpo_loss
    from .functional import lidr_loss as lidr_loss
    from .functional import sequence_log_prob as sequence_log_prob
    from .generate import ResponseGenerator as ResponseGenerator
    from .iterate import CommandLineFit as CommandLineFit
    from .iterate import TrainerFit as TrainerFit
    from .iterate import make_records as make_records
    from .iterate import read_prompts as read_prompts
    from .iterate import run_iterations as run_iterations
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
