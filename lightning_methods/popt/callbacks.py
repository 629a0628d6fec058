"""Maps of the subjects that a model is tested on, written at the end of the test."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from ..core.batches import PopTBatch
from ..core.checks import check_range
from ..core.random import make_generator
from .interpretation import channel_connectivity, channel_correlation, channel_importance, channel_task_batch

__all__ = ["PopulationMaps"]


class PopulationMaps(Callback):
    """Writes connectivity and importance of the channels of every tested subject to ``maps.pt`` in the run's folder.

    The file (``torch.load``) holds ``{subject: {"coords" [S, 3], "connectivity" [S, S], "correlation" [S, S],
    "importance" [S]}}``, see :func:`channel_connectivity`, :func:`channel_correlation` and :func:`channel_importance`;
    connectivity is meaningful after pretraining, importance after fine-tuning. A subject's first recording is used. The
    data module's ``test_set`` must have ``recordings``, as those of populations do.

    Args:
        num_windows: windows, evenly spaced, that the maps are means over.
        replace_probability: share of the channels that are swapped for the connectivity.
    """

    def __init__(self, num_windows: int = 64, replace_probability: float = 0.1) -> None:
        check_range("num_windows", num_windows, 2)
        check_range("replace_probability", replace_probability, 0, 1)
        self.num_windows = num_windows
        self.replace_probability = replace_probability

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute the maps and write them, on the first process."""
        if not trainer.is_global_zero or trainer.log_dir is None or trainer.fast_dev_run:
            return
        recordings = {}
        for recording in trainer.datamodule.test_set.recordings:
            recordings.setdefault(recording.subject, recording)
        maps = {}
        for subject, recording in recordings.items():
            windows = torch.linspace(0, recording.n_windows - 1, min(self.num_windows, recording.n_windows)).long()
            shape = (len(windows), recording.n_channels)
            x = recording.read(windows[:, None].expand(shape), torch.arange(recording.n_channels).expand(shape))
            zeros = torch.zeros(shape, dtype=torch.long)
            coords = recording.coords.expand(len(windows), -1, -1)
            batch = PopTBatch(x, coords, zeros, zeros.bool(), torch.zeros(len(windows)))
            batch = PopTBatch(*(None if part is None else part.to(pl_module.device) for part in batch))
            generator = make_generator("population maps", subject, device=pl_module.device)
            posed = channel_task_batch(batch, self.replace_probability, generator)
            maps[subject] = {
                "coords": recording.coords,
                "connectivity": channel_connectivity(pl_module, posed).cpu(),
                "correlation": channel_correlation(batch.x).cpu(),
                "importance": channel_importance(pl_module, batch).mean(dim=0).cpu(),
            }
        Path(trainer.log_dir).mkdir(parents=True, exist_ok=True)
        torch.save(maps, Path(trainer.log_dir) / "maps.pt")
