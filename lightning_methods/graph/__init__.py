"""Graphs as named tuples, and the operations on edge lists that several methods share; torch only."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .ops import edge_positions as edge_positions
    from .ops import gcn_norm as gcn_norm
    from .ops import has_reverse as has_reverse
    from .ops import induced_edges as induced_edges
    from .ops import negative_edges as negative_edges
    from .ops import neighbor_lists as neighbor_lists
    from .ops import remove_self_loops as remove_self_loops
    from .ops import scatter_mean as scatter_mean
    from .ops import scatter_softmax as scatter_softmax
    from .ops import scatter_sum as scatter_sum
    from .ops import to_undirected as to_undirected
    from .ops import undirected_pairs as undirected_pairs
    from .types import Graph as Graph

__getattr__, __dir__, __all__ = attach(__name__, __file__)
