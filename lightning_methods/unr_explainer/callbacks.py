"""Explanations as part of a run: written when training ends, measured when it is tested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ..core.checks import check_choice, check_range
from ..core.io import write_jsonl
from ..core.random import make_generator
from ..graph.ops import induced_edges, undirected_pairs
from ..graph.types import Graph
from .baselines import METHODS, explanations_by
from .explainer import Explanation, UNRExplainer
from .functional import explanation_precision_recall, knn_indices
from .metrics import ExplanationSize, MeanImportance, Validity

__all__ = ["EvaluateExplanations", "ExplainOnFitEnd"]

Nodes = list[int] | Literal["motif", "all"]


def choose_nodes(graph: Graph, nodes: Nodes, num_nodes: int | None, seed: int) -> list[int]:
    """The nodes to explain: those given, all, or all of planted motifs; of those a random part.

    Raises:
        ValueError: the graph has no motifs, or a node is out of range.
    """
    if nodes == "motif":
        if graph.motif is None or not (graph.motif >= 0).any():
            raise ValueError("nodes='motif' needs a graph with planted motifs; give nodes='all' or a list.")
        chosen = (graph.motif >= 0).nonzero().flatten().tolist()
    else:
        chosen = list(range(graph.num_nodes)) if nodes == "all" else [int(node) for node in nodes]
    if num_nodes is None or num_nodes >= len(chosen):
        return chosen
    order = torch.randperm(len(chosen), generator=make_generator(seed, "explained nodes")).tolist()
    return sorted(chosen[i] for i in order[:num_nodes])


def as_row(explainer: UNRExplainer, explanation: Explanation, surroundings: bool = False) -> dict[str, Any]:
    """An explanation as a JSON object.

    Args:
        explainer: the one that made it.
        explanation: the explanation.
        surroundings: add what is needed to draw it: the edges within two hops, the motifs of their nodes, and the
            nearest nodes before and after.
    """
    graph, node = explainer.graph, explanation.node
    row = {**explanation._asdict(), "edges": explanation.edges.tolist()}
    if graph.motif is not None:
        row["precision"], row["recall"] = precision_recall(graph, explanation)
    if not surroundings:
        return row
    row["neighbors"] = explainer.neighbors(node).tolist()
    after = explainer.embed(explanation.edges)
    row["neighbors_after"] = knn_indices(after, explainer.k, torch.tensor([node], device=after.device))[0].tolist()
    lists = explainer.neighbor_lists
    near = {node, *lists[node]}.union(*(lists[other] for other in lists[node]), *explanation.edges.tolist())
    near = torch.tensor(sorted(near), device=graph.edge_index.device)
    row["surroundings"] = undirected_pairs(induced_edges(graph.edge_index, near), graph.num_nodes).tolist()
    if graph.motif is not None:
        row["motif"] = dict(zip(map(str, near.tolist()), graph.motif[near].tolist(), strict=True))
    return row


def precision_recall(graph: Graph, explanation: Explanation, official_recall: bool = False) -> tuple[float, float]:
    """Precision and recall of an explanation against the motif of its node."""
    return explanation_precision_recall(
        explanation.edges.to(graph.edge_index.device),
        graph_edges=graph.edge_index.T,
        motif=graph.motif,
        node=explanation.node,
        official_recall=official_recall,
    )


class _Explaining(Callback):
    """Which nodes, and with what search."""

    def __init__(
        self,
        nodes: Nodes,
        num_nodes: int | None,
        num_workers: int,
        seed: int,
        explainer: dict[str, Any] | None,
    ) -> None:
        if isinstance(nodes, str):
            check_choice("nodes", nodes, ("motif", "all"))
        if num_nodes is not None:
            check_range("num_nodes", num_nodes, 1)
        check_range("num_workers", num_workers, 0)
        self.nodes, self.num_nodes, self.num_workers, self.seed = nodes, num_nodes, num_workers, seed
        self.explainer = {"seed": seed, **(explainer or {})}

    def make_explainer(self, pl_module: LightningModule, graph: Any) -> UNRExplainer:
        """The search on a graph of the run.

        Raises:
            ValueError: the loader yields something other than a ``Graph``.
        """
        if not isinstance(graph, Graph):
            raise ValueError(f"{type(self).__name__} explains a Graph; the loader yields {type(graph).__name__}.")
        return UNRExplainer(getattr(pl_module, "encoder", pl_module), graph.to(pl_module.device), **self.explainer)

    def chosen(self, trainer: Trainer, graph: Graph) -> list[int]:
        """The nodes to explain; two of them where the Trainer only tries everything out (``fast_dev_run``)."""
        nodes = choose_nodes(graph, self.nodes, self.num_nodes, self.seed)
        return nodes[:2] if getattr(trainer, "fast_dev_run", False) else nodes


class ExplainOnFitEnd(_Explaining):
    """When training ends, explain nodes of the training graph and write one JSON line for each.

    A line has ``node``, ``edges``, ``importance``, ``num_iterations``, ``num_evaluations``, ``history``, and for graphs
    with planted motifs ``precision`` and ``recall``. Under DDP the processes share the nodes. For any module whose
    ``encoder`` (or which itself) maps ``(x, edge_index)`` to embeddings.

    Args:
        nodes: the nodes; "motif" are all of planted motifs, "all" the whole graph.
        path: the file; a relative one is in the run's folder.
        num_nodes: a random part of so many of them; None for all.
        num_workers: processes, see :meth:`UNRExplainer.explain_all`.
        seed: of the search and the choice of nodes.
        surroundings: write also what :func:`draw_explanation` needs.
        explainer: arguments of :class:`UNRExplainer` besides encoder and graph.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        nodes: Nodes = "motif",
        path: str = "explanations.jsonl",
        num_nodes: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        surroundings: bool = False,
        explainer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(nodes, num_nodes, num_workers, seed, explainer)
        self.path = path
        self.surroundings = surroundings

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Explain and write."""
        explainer = self.make_explainer(pl_module, next(iter(trainer.train_dataloader)))
        found = explainer.explain_all(self.chosen(trainer, explainer.graph), self.num_workers)
        _write(trainer, self.path, explainer, found, self.surroundings)


class EvaluateExplanations(_Explaining):
    """When a run is tested, measure explanations of the test graph, by the search or by something to compare it with.

    Logs means over the nodes: ``test/importance``, ``test/validity`` (share with importance 1), ``test/size`` (edges),
    ``test/evaluations`` (of the encoder), and with planted motifs ``test/precision`` and ``test/recall``.

    Args:
        method: "unr", or a baseline: see :func:`explanations_by`.
        nodes: the nodes; "motif" are all of planted motifs, "all" the whole graph.
        num_nodes: a random part of so many of them; None for all.
        path: write one JSON line for each node to this file too; a relative one is in the run's folder.
        num_workers: processes, see :meth:`UNRExplainer.explain_all`.
        seed: of the search, the baselines and the choice of nodes.
        official_recall: see :func:`explanation_precision_recall`.
        explainer: arguments of :class:`UNRExplainer` besides encoder and graph.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        method: Literal[
            "unr", "one_hop_2", "one_hop_3", "knn", "random_walk", "random_walk_restart", "random_edges"
        ] = "unr",
        nodes: Nodes = "motif",
        num_nodes: int | None = None,
        path: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
        official_recall: bool = False,
        explainer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(nodes, num_nodes, num_workers, seed, explainer)
        check_choice("method", method, METHODS)
        self.method = method
        self.path = path
        self.official_recall = official_recall
        self._graph: Graph | None = None

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Remember the graph."""
        self._graph = batch

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Explain and log."""
        graph, self._graph = self._graph, None
        explainer = self.make_explainer(pl_module, graph)
        nodes = self.chosen(trainer, explainer.graph)
        found = explanations_by(self.method, explainer, nodes, self.seed, self.num_workers)
        for name, value in self.measure(explainer.graph, found).items():
            pl_module.log(f"test/{name}", value.to(pl_module.device), batch_size=len(nodes), sync_dist=True)
        if self.path is not None:
            _write(trainer, self.path, explainer, found, surroundings=True)

    def measure(self, graph: Graph, explanations: Sequence[Explanation]) -> dict[str, Tensor]:
        """Means over the nodes, by name."""
        metrics = {"importance": MeanImportance(), "validity": Validity(), "size": ExplanationSize()}
        for metric in metrics.values():
            metric.update(explanations)
        values = {name: metric.compute() for name, metric in metrics.items()}
        values["evaluations"] = torch.tensor([float(part.num_evaluations) for part in explanations]).mean()
        if graph.motif is not None:
            pairs = torch.tensor([precision_recall(graph, part, self.official_recall) for part in explanations])
            values["precision"], values["recall"] = pairs.mean(dim=0)
        return values


def _write(
    trainer: Trainer, path: str, explainer: UNRExplainer, found: Sequence[Explanation], surroundings: bool
) -> None:
    if trainer.is_global_zero:
        rows = [as_row(explainer, explanation, surroundings) for explanation in found]
        write_jsonl(Path(trainer.default_root_dir) / path, rows)
