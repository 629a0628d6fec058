"""Training of unsupervised node embeddings: GraphSAGE by links, and Deep Graph Infomax."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc

from ..core.checks import check_range
from ..core.distributed import rank, world_size
from ..core.module import MethodModule, feature_dim
from ..core.random import make_generator
from ..graph.ops import negative_edges, undirected_pairs
from ..graph.types import Graph
from .functional import dgi_loss, link_loss

__all__ = ["DGI", "UnsupervisedGraphSAGE"]


class _NodeEmbedding(MethodModule):
    """What both have in common: embeddings, validation by held-out links, the linear probe at the end."""

    encoder: nn.Module

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Embeddings of all nodes, [n, dim]."""
        return self.encoder(x, edge_index) if edge_weight is None else self.encoder(x, edge_index, edge_weight)

    def embed(self, graph: Any) -> Tensor:
        """Embeddings of all nodes of a graph, or of anything with fields x and edge_index, [n, dim]."""
        return self(graph.x, graph.edge_index, getattr(graph, "edge_weight", None))

    @abstractmethod
    def evaluation_loss(self, graph: Graph, z: Tensor) -> Tensor:
        """The training loss with random numbers that are the same every time."""

    def _evaluate(self, graph: Graph, stage: str) -> Tensor:
        z = self.embed(graph)
        options = {"batch_size": graph.x.shape[0], "on_step": False, "on_epoch": True, "sync_dist": True}
        self.log(f"{stage}/loss", self.evaluation_loss(graph, z), **options)
        pairs, label = getattr(graph, "edge_label_index", None), getattr(graph, "edge_label", None)
        if pairs is not None and label is not None:
            scores = (z[pairs[0]] * z[pairs[1]]).sum(dim=1)
            self.log(f"{stage}/link_auc", binary_auroc(scores.float(), label.long()), prog_bar=True, **options)
        return z

    def validation_step(self, batch: Graph, batch_idx: int) -> None:
        """Log the loss, and the area under the curve of held-out links."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Graph, batch_idx: int) -> None:
        """Log the same, and the accuracy of logistic regression where nodes have classes and masks."""
        z = self._evaluate(batch, "test")
        y, train, test = (getattr(batch, name, None) for name in ("y", "train_mask", "test_mask"))
        if y is None or train is None or test is None or not train.any() or not test.any():
            return
        if len(y[train].unique()) < 2:
            return
        from ..metrics.probes import linear_probe

        accuracy = linear_probe(z[train], y[train], z[test], y[test])["accuracy"]
        self.log("test/probe_acc", accuracy, batch_size=int(test.sum()), sync_dist=True)

    def predict_step(self, batch: Graph, batch_idx: int) -> Tensor:
        """Embeddings of all nodes, [n, dim]."""
        return self.embed(batch)


class UnsupervisedGraphSAGE(_NodeEmbedding):
    """Embeddings whose inner products tell edges from other pairs of nodes (:func:`link_loss`).

    Batches are :class:`Graph`; messages go over all its edges, negatives are uniform over the pairs that are no edges.
    Held-out links of the graph are never trained on. For graphs too large for that, give the batches of
    torch_geometric's ``LinkNeighborLoader`` instead (made with ``neg_sampling="binary"``): anything but a ``Graph``
    that has fields ``x``, ``edge_index``, ``edge_label_index`` and ``edge_label`` is taken as a sampled part of a
    graph, with the pairs to score. Under DDP the edges of a step are divided among the processes.

    Logs ``train/loss``; ``val/loss`` (with fixed negatives) and, for graphs with held-out links, ``val/link_auc``; the
    same under ``test``, and for graphs with classes and masks ``test/probe_acc``, logistic regression on embeddings.

    Args:
        encoder: ``encoder(x, edge_index)`` gives embeddings [n, dim]; a further argument ``edge_weight`` is only given
            for weighted graphs.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        negatives_per_edge: pairs that are no edges, for every edge.
        edge_batch_size: edges in a step; None takes all. How many steps an epoch has is said by the loader
            (``steps_per_epoch`` of the data module).
        seed: of the order of the edges and of the negatives.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        encoder: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=1e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        negatives_per_edge: int = 1,
        edge_batch_size: int | None = None,
        seed: int = 0,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_range("negatives_per_edge", negatives_per_edge, 1)
        if edge_batch_size is not None:
            check_range("edge_batch_size", edge_batch_size, 1)
        self.encoder = encoder
        self.negatives_per_edge = negatives_per_edge
        self.edge_batch_size = edge_batch_size
        self.seed = seed

    def _chosen(self, num_edges: int, batch_idx: int) -> Tensor:
        """Edges of this process's step: slices of one shuffled order after the other."""
        size = self.edge_batch_size
        start = (batch_idx * world_size() + rank()) * size
        passes = range(start // num_edges, (start + size - 1) // num_edges + 1)
        orders = [
            torch.randperm(num_edges, generator=make_generator(self.seed, "edges", self.current_epoch, each))
            for each in passes
        ]
        return torch.cat(orders)[start - passes[0] * num_edges :][:size]

    def _loss(self, z: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Mean over the pairs of all processes, of which this one has a share."""
        processes = world_size()
        if processes == 1:
            return link_loss(z, positive, negative)
        total = positive.shape[1] + negative.shape[1]
        share = link_loss(z, positive[:, rank() :: processes], negative[:, rank() :: processes], reduction="sum")
        return share * processes / total  # DDP takes the mean over the processes

    def _negatives(self, graph: Graph, positive: Tensor, *parts: int | str) -> Tensor:
        generator = make_generator(self.seed, "negatives", *parts)
        n = self.negatives_per_edge * positive.shape[1]
        return negative_edges(graph.edge_index, graph.num_nodes, n, generator)

    def training_loss(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Loss of one step.

        Args:
            batch: a graph, or a sampled part with the pairs to score.
            batch_idx: number of the step within the epoch.

        Raises:
            ValueError: the graph has no edges, or a sampled part no pairs.
        """
        if not isinstance(batch, Graph):
            pairs, label = batch.edge_label_index, batch.edge_label > 0
            return link_loss(self.embed(batch), pairs[:, label], pairs[:, ~label])
        positive = undirected_pairs(batch.edge_index, batch.num_nodes).T
        if positive.shape[1] == 0:
            raise ValueError("the graph has no edges to learn from.")
        z = self.embed(batch)
        if self.edge_batch_size is None:
            return self._loss(z, positive, self._negatives(batch, positive, self.current_epoch, batch_idx))
        positive = positive[:, self._chosen(positive.shape[1], batch_idx).to(positive.device)]
        negative = self._negatives(batch, positive, self.current_epoch, batch_idx, "rank", rank())
        return link_loss(z, positive, negative)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of the edges of a step against random pairs."""
        loss = self.training_loss(batch, batch_idx)
        self.log("train/loss", loss, prog_bar=True, batch_size=1, on_step=False, on_epoch=True)
        return loss

    def evaluation_loss(self, graph: Graph, z: Tensor) -> Tensor:
        """Link loss over all edges and as many times ``negatives_per_edge`` fixed other pairs."""
        positive = undirected_pairs(graph.edge_index, graph.num_nodes).T
        return link_loss(z, positive, self._negatives(graph, positive, "evaluation"))


class DGI(_NodeEmbedding):
    """Deep Graph Infomax: a node's embedding fits the graph's summary, that of a corrupted graph does not.

    The summary is ``sigmoid(mean_i z_i)``, the corruption permutes the rows of x and keeps the edges; see
    :func:`dgi_loss`. Batches are :class:`Graph`. Under DDP every process computes the whole graph.

    Logs ``train/loss``; ``val/loss`` (one fixed corruption) and, for graphs with held-out links, ``val/link_auc``; the
    same under ``test``, and for graphs with classes and masks ``test/probe_acc``, logistic regression on embeddings.

    Args:
        encoder: ``encoder(x, edge_index)`` gives embeddings [n, hidden_channels].
        hidden_channels: width of the embeddings; None takes ``encoder.num_features``.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        seed: of the corruption.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: the width is not known.
    """

    def __init__(
        self,
        encoder: nn.Module,
        hidden_channels: int | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=1e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        seed: int = 0,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        self.encoder = encoder
        width = feature_dim(encoder, hidden_channels)
        self.weight = nn.Parameter(torch.empty(width, width).uniform_(-(width**-0.5), width**-0.5))
        self.seed = seed

    def _loss(self, graph: Graph, z: Tensor, *parts: int | str) -> Tensor:
        order = torch.randperm(graph.num_nodes, generator=make_generator(self.seed, "corruption", *parts))
        corrupted = graph._replace(x=graph.x[order.to(graph.x.device)])
        return dgi_loss(z, self.embed(corrupted), z.float().mean(dim=0).sigmoid(), self.weight)

    def training_loss(self, graph: Graph, batch_idx: int = 0) -> Tensor:
        """Loss of one step, with a fresh corruption."""
        return self._loss(graph, self.embed(graph), self.current_epoch, batch_idx)

    def training_step(self, batch: Graph, batch_idx: int) -> Tensor:
        """Tell the nodes of the graph from those of a corruption."""
        loss = self.training_loss(batch, batch_idx)
        self.log("train/loss", loss, prog_bar=True, batch_size=1, on_step=False, on_epoch=True)
        return loss

    def evaluation_loss(self, graph: Graph, z: Tensor) -> Tensor:
        """The loss with a corruption that is the same every time."""
        return self._loss(graph, z, "evaluation")
