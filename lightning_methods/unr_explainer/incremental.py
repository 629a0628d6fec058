"""Importance of edges for a GraphSAGE encoder, by computing again only what the missing edges change.

Which rows change is found with numpy on the host, where an operation on a few integers costs next to nothing; the
embeddings stay on their device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.checks import check_range
from ..core.losses import at_least_float32
from ..core.ordering import stable_topk
from ..graph.ops import edge_positions
from .functional import knn_importance
from .modules import SAGEEncoder

__all__ = ["IncrementalSAGE"]

Pair = tuple[int, int]


class _Incidence(NamedTuple):
    """The edges of each node: those of node i are the slots ``start[i] .. start[i] + count[i] - 1``.

    ``other`` has the other end of the edge in a slot, ``position`` its column in the edge list.
    """

    start: np.ndarray
    count: np.ndarray
    other: np.ndarray
    position: np.ndarray

    @classmethod
    def of(cls, owner: np.ndarray, other: np.ndarray, num_nodes: int) -> _Incidence:
        count = np.bincount(owner, minlength=num_nodes)
        order = np.argsort(owner, kind="stable")
        return cls(count.cumsum() - count, count, other[order], order)

    def gather(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All edges of some nodes, one node after the other.

        Returns:
            For every edge the row of ``nodes`` it belongs to, and its slot; for every row the place of its first edge.
        """
        count = self.count[nodes]
        first = count.cumsum() - count
        row = np.repeat(np.arange(len(nodes)), count)
        return row, np.arange(len(row)) + (self.start[nodes] - first)[row], first


class _Layer(NamedTuple):
    """What a layer computes from the nodes' states with all edges there."""

    message: Tensor  # W_l h, [n, out]
    own: Tensor  # W_r h + b, [n, out]


class IncrementalSAGE:
    """Embeddings and importance of a graph without some of its edges, exact, at the cost of their surroundings.

    Without the edges E_s the first layer changes only at their ends, and each further layer at the neighbours of what
    changed before. Those rows are computed again from all their messages; the rest comes from the pass with all edges.
    Several sets of edges, also of different nodes, are computed at once as one graph of many components.

    The encoder must not change in between, and should be in eval mode; no gradient.

    Args:
        encoder: the network.
        x: node features, [n, f].
        edge_index: int64 [2, E]; messages go from row 0 to row 1.
        edge_weight: factors of the messages, [E].
        perturb: factor of the messages over E_s instead of removal, in [0, 1). 0 removes: the mean is over what is
            left. Above 0 it still divides by all, as weights in :class:`SAGEConv` do.

    Raises:
        ValueError: perturb is out of range.
    """

    @torch.no_grad()
    def __init__(
        self,
        encoder: SAGEEncoder,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        perturb: float = 0.0,
    ) -> None:
        check_range("perturb", perturb, 0, 1, high_open=True)
        self.num_nodes = len(x)
        self.perturb = perturb
        self.positions = edge_positions(edge_index.cpu())
        sender, self._receiver = edge_index.cpu().numpy()
        self._incoming = _Incidence.of(self._receiver, sender, self.num_nodes)
        self._outgoing = _Incidence.of(sender, self._receiver, self.num_nodes)
        # of every column, the place among the incoming edges of its receiver
        self._place = np.empty_like(self._receiver)
        self._place[self._incoming.position] = np.arange(len(sender))
        self._place -= self._incoming.start[self._receiver]
        # float32 or wider throughout
        self._weights = [
            tuple(map(at_least_float32, (conv.lin_l.weight, conv.lin_r.weight, conv.lin_l.bias)))
            for conv in encoder.convs
        ]
        self._device = x.device
        order = self._to(self._incoming.position)
        self._edge_weight = None if edge_weight is None else at_least_float32(edge_weight)[order][:, None]
        self._layers: list[_Layer] = []
        with torch.autocast(x.device.type, enabled=False):
            state = at_least_float32(x)
            row, slot, _ = self._incoming.gather(np.arange(self.num_nodes))
            for depth in range(len(self._weights)):
                self._layers.append(self._transform(depth, state))
                message = self._layers[-1].message[self._to(self._incoming.other)]
                count = self._incoming.count
                state = self._combine(self._weighted(message, slot), row, count, self._layers[-1].own, depth)
        self.z = state

    def _to(self, index: np.ndarray) -> Tensor:
        """Indices on the device of the embeddings."""
        return torch.from_numpy(index).to(self._device)

    def _transform(self, depth: int, state: Tensor) -> _Layer:
        left, right, bias = self._weights[depth]
        return _Layer(F.linear(state, left), F.linear(state, right, bias))

    def _weighted(self, message: Tensor, slot: np.ndarray) -> Tensor:
        """Messages with the weights of their edges."""
        if self._edge_weight is None:
            return message
        return message * self._edge_weight[self._to(slot)].to(message.dtype)

    def _combine(self, message: Tensor, row: np.ndarray, count: np.ndarray, own: Tensor, depth: int) -> Tensor:
        """Sum of the messages of every row divided by their number, plus its own part; ReLU but in the last layer."""
        total = torch.zeros_like(own).index_add_(0, self._to(row), message)
        divisor = torch.from_numpy(np.maximum(count, 1)).to(own.dtype).to(self._device)
        state = total.div_(divisor[:, None]).add_(own)
        return state if depth == len(self._weights) - 1 else state.relu_()

    def _removed_columns(self, edges: Sequence[Pair]) -> list[int]:
        """Columns of both directions of the edges."""
        columns: set[int] = set()
        for u, v in edges:
            found = [*self.positions.get((u, v), ()), *self.positions.get((v, u), ())]
            if not found:
                raise ValueError(f"edges holds {[u, v]}, which is no edge of the graph.")
            columns.update(found)
        return sorted(columns)

    @torch.no_grad()
    def changed(self, edge_sets: Sequence[Sequence[Pair]]) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings that differ from those with all edges.

        Args:
            edge_sets: B sets of pairs of nodes.

        Returns:
            ``(which, node, z)``: the set, int64 [C], the node, int64 [C], and its embedding, [C, dim]; sorted by set
            and node. A row may be equal to the old one.

        Raises:
            ValueError: an edge is not in the graph.
        """
        n, incoming, outgoing = self.num_nodes, self._incoming, self._outgoing
        columns = [self._removed_columns(edges) for edges in edge_sets]
        which = np.repeat(np.arange(len(columns)), [len(found) for found in columns])
        column = np.array([c for found in columns for c in found], dtype=np.int64)
        # A node of set b has the number b n + node, as in a graph of B copies.
        removed = which * n + self._receiver[column]
        rows = ends = np.unique(removed)
        keys, values = rows[:0], self.z[:0]
        with torch.autocast(self._device.type, enabled=False):
            for depth, layer in enumerate(self._layers if len(column) else []):
                if depth:  # what changed, what it sends messages to, and the ends of missing edges change next
                    sender, sent, _ = outgoing.gather(keys % n)
                    target, over = keys[sender] - keys[sender] % n + outgoing.other[sent], outgoing.position[sent]
                    rows = np.unique(np.concatenate([keys, target, ends]))
                nodes = rows % n
                row, slot, first = incoming.gather(nodes)
                message = layer.message.index_select(0, self._to(incoming.other[slot]))
                own = layer.own.index_select(0, self._to(nodes))
                if depth:
                    new = self._transform(depth, values)
                    own[self._to(np.searchsorted(rows, keys))] = new.own
                    place = first[np.searchsorted(rows, target)] + self._place[over]
                    message[self._to(place)] = new.message[self._to(sender)]
                message = self._weighted(message, slot)
                place = np.searchsorted(rows, removed)
                message[self._to(first[place] + self._place[column])] *= self.perturb
                count = incoming.count[nodes]
                if self.perturb == 0:
                    np.subtract.at(count, place, 1)
                values, keys = self._combine(message, row, count, own, depth), rows
        return self._to(keys // n), self._to(keys % n), values

    @torch.no_grad()
    def embed(self, edges: Sequence[Pair]) -> Tensor:
        """All embeddings without some edges, [n, dim].

        Raises:
            ValueError: an edge is not in the graph.
        """
        _, node, z = self.changed([edges])
        return self.z.index_copy(0, node, z)

    @torch.no_grad()
    def importance(
        self, edge_sets: Sequence[Sequence[Pair]], nodes: Tensor, neighbors: Tensor, chunk_size: int = 256
    ) -> Tensor:
        """Importance of B sets of edges, each for a node of its own.

        Args:
            edge_sets: B sets of pairs of nodes.
            nodes: int64 [B].
            neighbors: nearest nodes of each with all edges, int64 [B, k].
            chunk_size: sets at a time; memory is ``chunk_size * n``.

        Returns:
            float64 [B].

        Raises:
            ValueError: an edge is not in the graph.
        """
        parts = [torch.empty(0, dtype=torch.float64, device=self._device)]
        for start in range(0, len(edge_sets), chunk_size):
            part = slice(start, start + chunk_size)
            which, node, z = self.changed(edge_sets[part])
            after = self._neighbors(which, node, z, nodes[part], neighbors.shape[1])
            parts.append(knn_importance(neighbors[part], after))
        return torch.cat(parts)

    def _neighbors(self, which: Tensor, node: Tensor, z: Tensor, nodes: Tensor, k: int) -> Tensor:
        """Nearest nodes of ``nodes[b]`` where the rows ``(which, node)`` are those given: int64 [B, k]."""
        query = self.z[nodes]
        moved = (node == nodes[which]).nonzero().flatten()
        query[which[moved]] = z[moved]
        distance = torch.cdist(query, self.z, compute_mode="donot_use_mm_for_euclid_dist")
        distance[which, node] = (z - query[which]).norm(dim=1)
        distance.scatter_(1, nodes[:, None], torch.inf)
        return stable_topk(distance, k, largest=False)[1]
