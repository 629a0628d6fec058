"""What a graph is, as a batch: a named tuple of tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Graph"]


class Graph(NamedTuple):
    """A homogeneous graph with n nodes.

    Attributes:
        x: node features, float [n, f].
        edge_index: int64 [2, E]; an undirected edge stands there in both directions. Who sends and who receives is
            said by the function that reads it.
        y: class of every node, int64 [n].
        motif: planted motif that a node belongs to, int64 [n]; -1 is none.
        edge_weight: [E].
        distance: distances between the nodes, [n, n].
        train_mask: bool [n].
        val_mask: bool [n].
        test_mask: bool [n].
        edge_label_index: pairs of nodes that are held out from ``edge_index``, or no edges at all, int64 [2, P].
        edge_label: 1 where such a pair is an edge, 0 where it is none, [P].

    Example:
        >>> graph = Graph(torch.ones(2, 3), torch.tensor([[0, 1], [1, 0]]))
        >>> graph.num_nodes, graph.y is None
        (2, True)
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor | None = None
    motif: Tensor | None = None
    edge_weight: Tensor | None = None
    distance: Tensor | None = None
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None
    edge_label_index: Tensor | None = None
    edge_label: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.x.shape[0]

    def to(self, device: torch.device | str) -> Graph:
        """The graph with all its tensors on a device."""
        return Graph(*(value.to(device) if isinstance(value, Tensor) else value for value in self))

    @classmethod
    def from_pyg(cls, data: Any) -> Graph:
        """Take over a homogeneous graph of torch_geometric: every field that it has under the same name.

        Args:
            data: a ``torch_geometric.data.Data``, or any object with attributes ``x`` and ``edge_index``; nothing is
                imported for it. Without features every node gets a constant 1.

        Raises:
            ValueError: there is no ``edge_index``, or masks hold several splits.
        """
        edge_index = getattr(data, "edge_index", None)
        if not isinstance(edge_index, Tensor):
            raise ValueError(f"data has no edge_index: {type(data).__name__} is not a homogeneous graph.")
        x = getattr(data, "x", None)
        if x is None:
            nodes = getattr(data, "num_nodes", None) or int(edge_index.max()) + 1
            x = torch.ones(nodes, 1, device=edge_index.device)
        found = {name: getattr(data, name, None) for name in cls._fields if name not in ("x", "edge_index")}
        fields = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        for name in ("train_mask", "val_mask", "test_mask"):
            if name in fields and fields[name].dim() != 1:
                raise ValueError(
                    f"{name} holds {fields[name].shape[1]} splits, shape {list(fields[name].shape)}; choose one first."
                )
        return cls(x, edge_index, **fields)
