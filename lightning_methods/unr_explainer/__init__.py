"""UNR-Explainer: the small subgraph without which a node's neighbours in embedding space are others."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..graph.types import Graph as Graph
    from .baselines import explanations_by as explanations_by
    from .baselines import knn_baseline as knn_baseline
    from .baselines import one_hop_baseline as one_hop_baseline
    from .baselines import random_edges_baseline as random_edges_baseline
    from .baselines import random_walk_baseline as random_walk_baseline
    from .callbacks import EvaluateExplanations as EvaluateExplanations
    from .callbacks import ExplainOnFitEnd as ExplainOnFitEnd
    from .drawing import draw_explanation as draw_explanation
    from .explainer import Explanation as Explanation
    from .explainer import UNRExplainer as UNRExplainer
    from .functional import dgi_loss as dgi_loss
    from .functional import edge_set_importance as edge_set_importance
    from .functional import explanation_precision_recall as explanation_precision_recall
    from .functional import knn_importance as knn_importance
    from .functional import knn_indices as knn_indices
    from .functional import link_loss as link_loss
    from .functional import remove_edges as remove_edges
    from .functional import ucb1 as ucb1
    from .incremental import IncrementalSAGE as IncrementalSAGE
    from .metrics import ExplanationSize as ExplanationSize
    from .metrics import MeanImportance as MeanImportance
    from .metrics import ProbabilityOfNecessity as ProbabilityOfNecessity
    from .metrics import Validity as Validity
    from .metrics import link_necessity as link_necessity
    from .metrics import node_necessity as node_necessity
    from .metrics import probability_of_necessity as probability_of_necessity
    from .module import DGI as DGI
    from .module import UnsupervisedGraphSAGE as UnsupervisedGraphSAGE
    from .modules import SAGEConv as SAGEConv
    from .modules import SAGEEncoder as SAGEEncoder

__getattr__, __dir__, __all__ = attach(__name__, __file__)
