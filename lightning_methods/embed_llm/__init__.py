"""EmbedLLM: a vector for every language model, learned from which questions it answers rightly."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..core.batches import CorrectnessBatch as CorrectnessBatch
    from .baselines import KNNCorrectness as KNNCorrectness
    from .benchmark import BenchmarkPrediction as BenchmarkPrediction
    from .benchmark import benchmark_contribution as benchmark_contribution
    from .benchmark import predict_benchmark_accuracy as predict_benchmark_accuracy
    from .callbacks import BenchmarkProbe as BenchmarkProbe
    from .callbacks import CommunityProbe as CommunityProbe
    from .data import Outcomes as Outcomes
    from .data import read_model_embeddings as read_model_embeddings
    from .data import read_outcomes as read_outcomes
    from .data import read_question_embeddings as read_question_embeddings
    from .data import synthetic_outcomes as synthetic_outcomes
    from .functional import RoutingBaselines as RoutingBaselines
    from .functional import community_distances as community_distances
    from .functional import correctness_logits as correctness_logits
    from .functional import correctness_loss as correctness_loss
    from .functional import correctness_margin_matrix as correctness_margin_matrix
    from .functional import correctness_score as correctness_score
    from .functional import correctness_score_matrix as correctness_score_matrix
    from .functional import fit_benchmark_regression as fit_benchmark_regression
    from .functional import fit_model_embedding as fit_model_embedding
    from .functional import knn_correctness as knn_correctness
    from .functional import knn_votes as knn_votes
    from .functional import route_queries as route_queries
    from .functional import routing_accuracy as routing_accuracy
    from .functional import routing_baselines as routing_baselines
    from .metrics import RoutingAccuracy as RoutingAccuracy
    from .module import EmbedLLM as EmbedLLM
    from .modules import CorrectnessMF as CorrectnessMF
    from .plots import plot_contributions as plot_contributions
    from .plots import plot_embeddings as plot_embeddings
    from .router import Router as Router

__getattr__, __dir__, __all__ = attach(__name__, __file__)
