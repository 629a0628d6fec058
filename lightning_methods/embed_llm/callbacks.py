"""What the embeddings of a finished run know: benchmarks that were left out, communities of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ..core.checks import check_range, nearest
from .benchmark import predict_benchmark_accuracy
from .functional import community_distances

__all__ = ["BenchmarkProbe", "CommunityProbe"]


class BenchmarkProbe(Callback):
    """At the end of a test, predicts accuracies on the benchmarks that training left out (paper, benchmark accuracy).

    Needs a data module with ``held_out_accuracy``: every model's mean accuracy [M] by benchmark, as
    ``CorrectnessMatrixDataModule(held_out_benchmarks=[...])`` has it. See :func:`predict_benchmark_accuracy`.

    Logs ``test/benchmark_tau`` (mean Kendall tau over splits and benchmarks; splits without one are left out),
    ``test/benchmark_significant`` (share of the splits with p < 0.05), ``test/benchmark_mse``,
    ``test/benchmark_mse_of_mean`` (of predicting the mean of the training models) and the ratio of the two,
    ``test/benchmark_mse_ratio``.

    Args:
        num_splits: random splits of the models.
        train_fraction: share of the models that the regression sees.
        seed: of the splits.
    """

    def __init__(self, num_splits: int = 100, train_fraction: float = 0.8, seed: int = 0) -> None:
        check_range("num_splits", num_splits, 1)
        check_range("train_fraction", train_fraction, 0, 1, low_open=True, high_open=True)
        self.num_splits = num_splits
        self.train_fraction = train_fraction
        self.seed = seed

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Predict and log.

        Raises:
            ValueError: the data module has left nothing out.
        """
        accuracy = getattr(trainer.datamodule, "held_out_accuracy", None)
        if not accuracy:
            raise ValueError(
                "BenchmarkProbe predicts benchmarks that training left out: give the data module held_out_benchmarks."
            )
        results = [
            predict_benchmark_accuracy(
                pl_module.model_embeddings, values, self.num_splits, self.train_fraction, self.seed
            )
            for values in accuracy.values()
        ]
        error, of_mean, tau, p_value = (
            torch.cat([result[name] for result in results]) for name in ("mse", "mse_of_mean", "kendall_tau", "p_value")
        )
        measured = {
            "tau": tau.nanmean(),
            "significant": (p_value < 0.05).double().mean(),
            "mse": error.mean(),
            "mse_of_mean": of_mean.mean(),
            "mse_ratio": error.sum() / of_mean.sum(),
        }
        pl_module.log_dict({f"test/benchmark_{name}": value.float() for name, value in measured.items()})


class CommunityProbe(Callback):
    """At the end of a test, compares distances within communities of models with those to other models.

    Logs ``test/intra_distance`` and ``test/inter_distance``, means over the communities, and
    ``test/communities_closer``, the share of the communities whose members are closer to each other than to others.

    Args:
        communities: names of the members by community, e.g. all models of one size, one family or one speciality. None
            takes the data module's ``communities`` (boolean [M] by name).
    """

    def __init__(self, communities: dict[str, list[str]] | None = None) -> None:
        self.communities = communities

    def members(self, datamodule: Any, model_names: Sequence[str]) -> Mapping[str, Tensor]:
        """Members by community, boolean [M].

        Raises:
            ValueError: there are no communities, or a member is unknown.
        """
        if self.communities is None:
            found = getattr(datamodule, "communities", None)
            if not found:
                raise ValueError("CommunityProbe needs communities: the data module has none.")
            return found
        for member in {name for members in self.communities.values() for name in members}:
            if member not in model_names:
                raise ValueError(f"communities: there is no model {member!r}.{nearest(member, model_names)}")
        return {
            community: torch.tensor([name in members for name in model_names])
            for community, members in self.communities.items()
        }

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and log."""
        embeddings = pl_module.model_embeddings
        members = self.members(trainer.datamodule, pl_module.model_names)
        pairs = torch.stack(
            [torch.stack(community_distances(embeddings, mask.to(embeddings.device))) for mask in members.values()]
        )
        intra, inter = pairs.unbind(dim=1)
        measured = {
            "intra_distance": intra.mean(),
            "inter_distance": inter.mean(),
            "communities_closer": (intra < inter).float().mean(),
        }
        pl_module.log_dict({f"test/{name}": value for name, value in measured.items()})
