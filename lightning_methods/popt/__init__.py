"""PopT: one transformer over any set of electrodes, pretrained by two discriminative tasks (Population Transformer)."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.batches import PopTBatch as PopTBatch
    from .baselines import ConcatenatedDecoder as ConcatenatedDecoder
    from .baselines import ConcatenatedLogistic as ConcatenatedLogistic
    from .baselines import rank_channels as rank_channels
    from .callbacks import PopulationMaps as PopulationMaps
    from .data import PopulationPairs as PopulationPairs
    from .data import PopulationWindows as PopulationWindows
    from .data import Recording as Recording
    from .data import collate_population as collate_population
    from .data import embed_recording as embed_recording
    from .data import pack_recordings as pack_recordings
    from .functional import attention_rollout as attention_rollout
    from .functional import corrupt_channels as corrupt_channels
    from .functional import electrode_position_encoding as electrode_position_encoding
    from .functional import lengths_to_pad_mask as lengths_to_pad_mask
    from .functional import popt_pretraining_loss as popt_pretraining_loss
    from .functional import ramp_up_factor as ramp_up_factor
    from .functional import sample_ensembles as sample_ensembles
    from .functional import sample_windows as sample_windows
    from .functional import sinusoidal_table as sinusoidal_table
    from .functional import stft_features as stft_features
    from .interpretation import channel_connectivity as channel_connectivity
    from .interpretation import channel_correlation as channel_correlation
    from .interpretation import channel_importance as channel_importance
    from .interpretation import channel_task_batch as channel_task_batch
    from .interpretation import region_importance as region_importance
    from .module import PopTFinetuning as PopTFinetuning
    from .module import PopTPretraining as PopTPretraining
    from .modules import PopTOutput as PopTOutput
    from .modules import PopulationTransformer as PopulationTransformer
    from .modules import SpectrogramEncoder as SpectrogramEncoder
    from .schedules import RampUp as RampUp

__getattr__, __dir__, __all__ = attach(__name__, __file__)
