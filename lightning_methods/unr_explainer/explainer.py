"""UNR-Explainer: Monte Carlo tree search with restarts for the edges that hold a node's neighbourhood together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..core.checks import check_range, check_shape
from ..core.distributed import rank, world_size
from ..core.modes import evaluating
from ..core.random import make_generator
from ..graph.ops import check_edge_index, has_reverse, neighbor_lists
from ..graph.types import Graph
from .functional import in_edges, knn_importance, knn_indices, remove_edges
from .incremental import IncrementalSAGE
from .modules import SAGEEncoder

__all__ = ["Explanation", "UNRExplainer"]

Pair = tuple[int, int]

MAX_MOVES = 1000  # of one selection: restarts end it with probability 1 only
RESTARTED = -1  # in a path: back to the root
EARLY_STOP = {2: 1, 3: 100}  # iterations that are enough where v and its 2-hop surroundings are 2 or 3 nodes


class Explanation(NamedTuple):
    """The edges that were found for a node.

    Attributes:
        node: v.
        edges: int64 [S, 2], sorted pairs u < v; empty for a node without neighbours.
        importance: share of v's nearest nodes that are lost without the edges; 1 is a counterfactual.
        num_iterations: iterations of the search.
        num_evaluations: different sets of edges that the encoder was asked about.
        history: importance of the set of each iteration.
    """

    node: int
    edges: Tensor
    importance: float
    num_iterations: int
    num_evaluations: int
    history: list[float]


class _TreeNode:
    """A place in the search tree: a node of the graph, reached along the path that led there."""

    __slots__ = ("children", "node", "value", "visits")

    def __init__(self, node: int) -> None:
        self.node = node
        self.children: list[_TreeNode] | None = None
        self.visits = 0
        self.value = 0.0

    def update(self, value: float) -> None:
        """Count a visit; the value is the largest seen."""
        self.value = max(self.value, value)
        self.visits += 1

    def bound(self, total: int, c1: float) -> float:
        """:func:`ucb1` of this one place; a tensor would cost more than it computes."""
        if self.visits == 0:
            return math.inf
        return self.value + c1 * math.sqrt(math.log(max(total, 1)) / self.visits)


class _Walk:
    """What one iteration collects on its way from the root, and where it is."""

    def __init__(self, root: _TreeNode) -> None:
        self.root = self.place = root
        self.path: list[int] = []
        self.edges: set[Pair] = set()
        self.nodes = {root.node}

    def move(self, index: int) -> None:
        """To a child; its edge is collected."""
        child = self.place.children[index]
        self.edges.add(_pair(self.place.node, child.node))
        self.nodes.add(child.node)
        self.path.append(index)
        self.place = child

    def restart(self) -> None:
        """Back to the root; what was collected stays."""
        self.path.append(RESTARTED)
        self.place = self.root

    @property
    def restarted(self) -> bool:
        """Whether the last move was a jump to the root."""
        return bool(self.path) and self.path[-1] == RESTARTED


class _Draws:
    """Random numbers of a generator, fetched in blocks: one tensor operation per number would cost more than a move."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.block: list[float] = []

    def uniform(self) -> float:
        """In [0, 1)."""
        if not self.block:
            self.block = torch.rand(256, generator=self.generator, dtype=torch.float64).tolist()
        return self.block.pop()

    def below(self, n: int) -> int:
        """A whole number in 0 .. n - 1."""
        return int(self.uniform() * n)

    def sample(self, items: Sequence[int], size: int) -> list[int]:
        """``size`` different items in random order."""
        items = list(items)
        for i in range(size):
            j = i + self.below(len(items) - i)
            items[i], items[j] = items[j], items[i]
        return items[:size]


def _pair(u: int, v: int) -> Pair:
    return (u, v) if u < v else (v, u)


class _Search:
    """The tree of one node."""

    def __init__(self, explainer: UNRExplainer, node: int, importance: Callable[[frozenset[Pair]], float]) -> None:
        self.explainer = explainer
        self.importance = importance
        self.draws = _Draws(make_generator(explainer.seed, "unr_explainer", node))
        self.root = _TreeNode(node)
        self.expand(self.root)

    def expand(self, place: _TreeNode) -> None:
        """Give a place its children: some of the node's neighbours, in random order."""
        neighbors = self.explainer.neighbor_lists[place.node]
        size = min(self.explainer.expansion_num, len(neighbors))
        place.children = [_TreeNode(node) for node in self.draws.sample(neighbors, size)]

    def choose(self, place: _TreeNode, allowed: list[int], total: int, after_restart: bool) -> int:
        """A child by its upper confidence bound; after a restart another one, so that a second branch grows."""
        bounds = [place.children[index].bound(total, self.explainer.c1) for index in allowed]
        best = allowed[bounds.index(max(bounds))]  # the first of equal ones
        if not after_restart or len(allowed) < 2:
            return best
        others = [index for index in allowed if index != best]
        return others[self.draws.below(len(others))]

    def allowed(self, place: _TreeNode, nodes: set[int]) -> list[int]:
        """The children that may be visited: all, until the set of nodes is full."""
        limit = self.explainer.max_nodes
        free = limit is None or len(nodes) < limit
        return [i for i, child in enumerate(place.children) if free or child.node in nodes]

    def iterate(self) -> tuple[float, frozenset[Pair], int]:
        """One iteration: select, expand, evaluate, back up. Gives importance, edges and number of nodes."""
        walk, total = _Walk(self.root), self.root.visits
        while walk.place.children is not None and len(walk.path) < MAX_MOVES:
            allowed = self.allowed(walk.place, walk.nodes)
            if not allowed and walk.place is self.root:
                break
            if not allowed or self.draws.uniform() < self.explainer.restart:
                walk.restart()
            else:
                walk.move(self.choose(walk.place, allowed, total, walk.restarted))
        if walk.place.children is None and walk.place.visits > 0:
            self.expand(walk.place)
            if allowed := self.allowed(walk.place, walk.nodes):
                walk.move(allowed[0])
        found = frozenset(walk.edges)
        value = self.importance(found)
        self.back_up(walk.path, value)
        return value, found, len(walk.nodes)

    def back_up(self, path: list[int], value: float) -> None:
        """Update the root once, and every place as often as it was visited."""
        self.root.update(value)
        place = self.root
        for index in path:
            if index == RESTARTED:
                place = self.root
            else:
                place = place.children[index]
                place.update(value)


class UNRExplainer:
    """Find, for a node of a trained encoder, a small connected subgraph whose removal changes its nearest nodes most.

    The search keeps a tree of walks from the node. An iteration walks down by the upper confidence bound, jumping back
    to the root with probability ``restart`` while it keeps the edges collected so far; the value of the walk is the
    importance of its edges, ``1 - |N_v and N'_v| / k`` (:func:`edge_set_importance`), and a place in the tree keeps the
    largest value seen below it. ``restart=0`` is plain tree search, whose explanations are paths.

    The result for a node depends on the seed and the node alone, not on which others are explained, in what order or by
    how many processes.

    Args:
        encoder: ``encoder(x, edge_index)`` gives embeddings [n, dim]; of a LightningModule of this method its
            ``encoder`` is taken. It is put in eval mode for each explanation and restored.
        graph: the graph, undirected (every edge in both directions). Self-loops are never part of an explanation.
        k: size of the neighbourhood, 1 to n - 1.
        restart: probability of a jump to the root before each move, in [0, 1).
        c1: weight of the exploration.
        expansion_num: children of a place in the tree; None is the mean degree, rounded, and at least 3.
        max_iterations: hard limit.
        min_iterations: iterations before ``patience`` counts.
        patience: iterations without a better set that end the search.
        max_nodes: when a walk has collected so many nodes it may only visit them again or restart; None: no limit.
        perturb: factor of the messages over the edges instead of their removal, in [0, 1), for encoders that take a
            third argument ``edge_weight``. Close to 0 it is not the same as removal: with weights a mean still divides
            by all neighbours.
        minimize: drop edges from what was found, one at a time, as long as the rest stays connected with the node and
            as important.
        seed: seed of the search.
        incremental: "auto": compute again only what the missing edges change where the encoder is a
            :class:`SAGEEncoder`, else by a whole forward pass. True insists on the former, False on the latter.
        allow_directed: accept edges without their reverse. Walks then follow the edges' direction.

    Raises:
        ValueError: an argument is out of range, the graph is directed, or ``incremental=True`` with another encoder.

    Example:
        >>> from lightning_methods.unr_explainer import Graph, SAGEEncoder
        >>> ring = torch.arange(12)
        >>> edges = torch.cat([torch.stack([ring, ring.roll(-1)]), torch.stack([ring.roll(-1), ring])], dim=1)
        >>> _ = torch.manual_seed(0)
        >>> explainer = UNRExplainer(SAGEEncoder(4, 8), Graph(torch.randn(12, 4), edges), k=3)
        >>> explanation = explainer.explain(5)
        >>> explanation.importance > 0, explanation.edges.shape[1]
        (True, 2)
    """

    def __init__(
        self,
        encoder: nn.Module,
        graph: Graph,
        k: int = 5,
        restart: float = 0.2,
        c1: float = 1.0,
        expansion_num: int | None = None,
        max_iterations: int = 1000,
        min_iterations: int = 500,
        patience: int = 10,
        max_nodes: int | None = None,
        perturb: float = 0.0,
        minimize: bool = False,
        seed: int = 0,
        incremental: Literal["auto", True, False] = "auto",
        allow_directed: bool = False,
    ) -> None:
        n = check_shape("graph.x", graph.x, "n features")["n"]
        check_edge_index("graph.edge_index", graph.edge_index, n)
        check_range("k", k, 1, n - 1)
        check_range("restart", restart, 0, 1, high_open=True)
        check_range("c1", c1, 0)
        check_range("max_iterations", max_iterations, 1)
        check_range("min_iterations", min_iterations, 0)
        check_range("patience", patience, 0)
        check_range("perturb", perturb, 0, 1, high_open=True)
        for name, value, low in (("expansion_num", expansion_num, 1), ("max_nodes", max_nodes, 2)):
            if value is not None:
                check_range(name, value, low)
        one_way = ~has_reverse(graph.edge_index, n)
        if not allow_directed and one_way.any():
            raise ValueError(
                f"edge_index is directed: {int(one_way.sum())} of its {graph.edge_index.shape[1]} edges have no "
                f"reverse, e.g. {graph.edge_index[:, one_way][:, 0].tolist()}. Use to_undirected, or allow_directed."
            )
        if n - 1 < 2 * k:
            warnings.warn(
                f"with {n} nodes two neighbourhoods of k={k} always share a node, so an importance of 1 cannot be "
                "reached: use a smaller k.",
                stacklevel=2,
            )
        inner = getattr(encoder, "encoder", None)
        self.encoder = inner if isinstance(inner, nn.Module) and hasattr(encoder, "embed") else encoder
        if incremental is True and not isinstance(self.encoder, SAGEEncoder):
            raise ValueError(f"incremental=True needs a SAGEEncoder, got {type(self.encoder).__name__}.")
        self.graph = graph
        self.k, self.restart, self.c1 = k, restart, c1
        self.max_iterations, self.min_iterations, self.patience = max_iterations, min_iterations, patience
        self.max_nodes, self.perturb, self.minimize, self.seed = max_nodes, perturb, minimize, seed
        self.incremental = incremental is True or (incremental == "auto" and isinstance(self.encoder, SAGEEncoder))
        self.neighbor_lists = neighbor_lists(graph.edge_index, n)
        degrees = [len(neighbors) for neighbors in self.neighbor_lists]
        self.expansion_num = max(round(sum(degrees) / n), 3) if expansion_num is None else expansion_num
        self._sage: IncrementalSAGE | None = None
        self._z: Tensor | None = None
        self._warned = False  # of duplicates, once

    # embeddings

    def _evaluation(self) -> AbstractContextManager:
        """Eval mode and no gradient inside the block."""
        return evaluating(*([self.encoder] if self._is_module else []))

    @property
    def _is_module(self) -> bool:
        return isinstance(self.encoder, nn.Module)

    def refresh(self) -> None:
        """Forget the embeddings: the encoder's weights have changed."""
        self._sage = self._z = None

    @property
    def z(self) -> Tensor:
        """Embeddings of all nodes with all edges, [n, dim]; computed once."""
        if self._z is None:
            graph = self.graph
            with self._evaluation():
                if self.incremental:
                    self._sage = IncrementalSAGE(
                        self.encoder, graph.x, graph.edge_index, graph.edge_weight, self.perturb
                    )
                    self._z = self._sage.z
                else:
                    self._z = self._forward(graph.edge_index, graph.edge_weight)
        return self._z

    def _forward(self, edge_index: Tensor, edge_weight: Tensor | None) -> Tensor:
        weights = () if edge_weight is None else (edge_weight,)
        return self.encoder(self.graph.x, edge_index, *weights)

    def embed(self, edges: Tensor | Collection[Pair] = ()) -> Tensor:
        """Embeddings of all nodes without some edges, [n, dim].

        Args:
            edges: pairs of nodes, int64 [S, 2] or a collection of tuples.

        Raises:
            ValueError: the graph does not have one of the edges.
        """
        pairs = self._pairs(edges)
        if not pairs:
            return self.z
        with self._evaluation():
            if self.incremental:
                _ = self.z
                return self._sage.embed(pairs)
            graph = self.graph
            index = torch.tensor(pairs, device=graph.edge_index.device)
            if self.perturb == 0:
                kept = ~in_edges(graph.edge_index, index)
                weight = None if graph.edge_weight is None else graph.edge_weight[kept]
                return self._forward(remove_edges(graph.edge_index, index), weight)
            weight = torch.ones_like(graph.x[:1, 0]) if graph.edge_weight is None else graph.edge_weight
            factor = torch.where(in_edges(graph.edge_index, index), self.perturb, 1.0).to(weight.dtype)
            return self._forward(graph.edge_index, weight * factor)

    @staticmethod
    def _pairs(edges: Tensor | Collection[Pair]) -> list[Pair]:
        """Sorted pairs u < v, each once."""
        if isinstance(edges, Tensor):
            check_shape("edges", edges, "explained two", two=2)
            edges = edges.tolist()
        return sorted({_pair(*edge) for edge in edges})

    def neighbors(self, node: int) -> Tensor:
        """The k nearest nodes with all edges there, nearest first, int64 [k].

        Raises:
            ValueError: the node is out of range.
        """
        self._check_node(node)
        return knn_indices(self.z, self.k, torch.tensor([node], device=self.z.device))[0]

    def _check_node(self, node: int) -> None:
        check_range("node", node, 0, self.graph.num_nodes - 1)

    def importance(self, node: int, edges: Tensor | Collection[Pair]) -> float:
        """Share of the node's nearest nodes that are lost without some edges, in [0, 1].

        Args:
            node: v.
            edges: pairs of nodes, int64 [S, 2] or a collection of tuples; they are removed in both directions.

        Raises:
            ValueError: the node is out of range, or the graph does not have one of the edges.
        """
        return self._importance(node, self.neighbors(node), self._pairs(edges))

    def importances(self, nodes: Sequence[int], edges: Sequence[Tensor | Collection[Pair]]) -> Tensor:
        """Importance of a set of edges for each of several nodes, all computed at once where the encoder allows it.

        Args:
            nodes: B nodes.
            edges: a set of edges for each of them.

        Returns:
            float64 [B], on the CPU.

        Raises:
            ValueError: the numbers differ, a node is out of range, or the graph does not have one of the edges.
        """
        if len(nodes) != len(edges):
            raise ValueError(f"nodes and edges must have the same length, got {len(nodes)} and {len(edges)}.")
        if not self.incremental:
            found = [self.importance(node, part) for node, part in zip(nodes, edges, strict=True)]
            return torch.tensor(found, dtype=torch.float64)
        for node in nodes:
            self._check_node(node)
        index = torch.tensor(list(nodes), dtype=torch.int64, device=self.z.device)
        before = knn_indices(self.z, self.k, index)
        return self._sage.importance([self._pairs(part) for part in edges], index, before).cpu()

    def _importance(self, node: int, neighbors: Tensor, pairs: list[Pair]) -> float:
        index = torch.tensor([node], device=neighbors.device)
        if self.incremental:
            return self._sage.importance([pairs], index, neighbors[None]).item()
        after = knn_indices(self.embed(pairs), self.k, index)
        return knn_importance(neighbors[None], after).item()

    # search

    def explain(self, node: int) -> Explanation:
        """Search the edges that matter most for a node's neighbourhood.

        Args:
            node: v.

        Returns:
            Of the sets with the largest importance the one with fewest nodes, the earliest of those.

        Raises:
            ValueError: the node is out of range.
        """
        neighbors = self.neighbors(node)
        self._warn_about_duplicates(node)
        known: dict[frozenset[Pair], float] = {}

        def importance(edges: frozenset[Pair]) -> float:
            if edges not in known:
                known[edges] = self._importance(node, neighbors, sorted(edges)) if edges else 0.0
            return known[edges]

        search = _Search(self, node, importance)
        best, best_edges, best_size, last_better = -1.0, frozenset(), 0, 0
        history: list[float] = []
        limit = min(self.max_iterations, EARLY_STOP.get(self._surroundings(node), self.max_iterations))
        while len(history) < limit:
            value, edges, size = search.iterate()
            history.append(value)
            if value > best:
                last_better = len(history)
            if value > best or (value == best and size < best_size):
                best, best_edges, best_size = value, edges, size
            stale = len(history) - last_better > self.patience
            if value == 1 or size == 1 or (len(history) > self.min_iterations and stale):
                break
        if self.minimize:
            best, best_edges = self._minimized(node, best, best_edges, importance)
        edges = torch.tensor(sorted(best_edges), dtype=torch.int64).reshape(-1, 2)
        evaluations = len(known) - (frozenset() in known)
        return Explanation(node, edges, best, len(history), evaluations, history)

    def _surroundings(self, node: int) -> int:
        """Number of nodes within two hops, itself included."""
        first = self.neighbor_lists[node]
        return len({node, *first}.union(*(self.neighbor_lists[u] for u in first)))

    def _warn_about_duplicates(self, node: int) -> None:
        if self._warned:
            return
        twins = int((self.z == self.z[node]).all(dim=1).sum()) - 1
        if twins > self.k:
            self._warned = True
            warnings.warn(
                f"{twins} nodes have the same embedding as node {node}: which {self.k} of them are its nearest is "
                "decided by their index, and there may be more such nodes. Features would tell them apart.",
                stacklevel=3,
            )

    @staticmethod
    def _connected(node: int, edges: Collection[Pair]) -> bool:
        """Whether every edge can be reached from the node."""
        left, seen = set(edges), {node}
        while near := {edge for edge in left if edge[0] in seen or edge[1] in seen}:
            left -= near
            seen.update(*near)
        return not left

    def _minimized(
        self, node: int, value: float, edges: frozenset[Pair], importance: Callable[[frozenset[Pair]], float]
    ) -> tuple[float, frozenset[Pair]]:
        """Drop one edge after the other, the most harmless first, as long as nothing is lost."""
        while len(edges) > 1:
            rest = [edges - {edge} for edge in sorted(edges)]
            rest = [part for part in rest if self._connected(node, part)]
            best = max(rest, key=importance, default=None)
            if best is None or importance(best) < value:
                break
            value, edges = importance(best), best
        return value, edges

    # many nodes

    def explain_all(self, nodes: Sequence[int] | Tensor | None = None, num_workers: int = 0) -> list[Explanation]:
        """Explain many nodes; under ``torch.distributed`` every process takes a part and all get everything.

        Args:
            nodes: the nodes; None for all of the graph.
            num_workers: further processes on this machine; 0 works in this one. They compute on the CPU.

        Returns:
            The explanations in the order of ``nodes``.

        Raises:
            ValueError: a node is out of range, num_workers is negative, or workers with a graph on another device.
        """
        check_range("num_workers", num_workers, 0)
        nodes = range(self.graph.num_nodes) if nodes is None else nodes
        nodes = [int(node) for node in nodes]
        for node in nodes:
            self._check_node(node)
        mine = nodes[rank() :: world_size()]
        found = self._in_workers(mine, num_workers) if num_workers and len(mine) > 1 else list(map(self.explain, mine))
        if world_size() == 1:
            return found
        parts: list[Any] = [None] * world_size()
        torch.distributed.all_gather_object(parts, found)
        return [parts[i % world_size()][i // world_size()] for i in range(len(nodes))]

    def _in_workers(self, nodes: list[int], num_workers: int) -> list[Explanation]:
        if self.z.device.type != "cpu":
            raise ValueError(f"num_workers={num_workers} needs the graph on the CPU, it is on {self.z.device}.")
        import multiprocessing
        import pickle
        from concurrent.futures import ProcessPoolExecutor

        # A fork spares the workers the imports; they keep to one thread, as those of a DataLoader do.
        forks = "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()
        context = multiprocessing.get_context("fork" if forks else "spawn")
        size = min(num_workers, len(nodes))
        chunk = max(1, len(nodes) // (4 * size))
        _ = self.z  # computed here, so that all workers start from the same numbers
        with ProcessPoolExecutor(size, context, _start_worker, (pickle.dumps(self),)) as pool:
            return [_as_explanation(plain) for plain in pool.map(_explain_in_worker, nodes, chunksize=chunk)]


_worker: UNRExplainer | None = None


def _start_worker(explainer: bytes) -> None:
    import pickle

    global _worker
    torch.set_num_threads(1)
    _worker = pickle.loads(explainer)


def _explain_in_worker(node: int) -> tuple:
    """A plain tuple: tensors would be sent through shared memory, one file each."""
    found = _worker.explain(node)
    return tuple(found._replace(edges=found.edges.tolist()))


def _as_explanation(plain: tuple) -> Explanation:
    found = Explanation(*plain)
    return found._replace(edges=torch.tensor(found.edges, dtype=torch.int64).reshape(-1, 2))
