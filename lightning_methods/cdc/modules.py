"""CDC's head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..core.checks import check_range, check_shape

__all__ = ["ClusteringHead"]


class ClusteringHead(nn.Module):
    """Two linear layers with batch norm and ReLU between them; the clustering and the calibration head are such.

    Args:
        in_dim: width of the features D.
        num_clusters: number of clusters C, at least 2.
        hidden_dim: width of the hidden layer h.

    Attributes:
        fc1: the first linear layer, D -> h.
        bn: batch norm of the hidden layer.
        fc2: the second linear layer, h -> C.

    Example:
        >>> ClusteringHead(in_dim=64, num_clusters=10)(torch.zeros(4, 64)).shape
        torch.Size([4, 10])
    """

    def __init__(self, in_dim: int, num_clusters: int, hidden_dim: int = 512) -> None:
        super().__init__()
        check_range("in_dim", in_dim, 1)
        check_range("num_clusters", num_clusters, 2)
        check_range("hidden_dim", hidden_dim, 1)
        self.fc1 = nn.Linear(in_dim, hidden_dim)
        self.bn = nn.BatchNorm1d(hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, num_clusters)

    def forward(self, features: Float[Tensor, "batch features"]) -> Float[Tensor, "batch clusters"]:
        """Logits, [batch, clusters]."""
        return self.fc2(self.bn(self.fc1(features)).relu())

    @torch.no_grad()
    def load_prototypes(
        self, first: Float[Tensor, "hidden features"], second: Float[Tensor, "clusters hidden"]
    ) -> None:
        """Take both layers' weights and set their biases to zero; the batch norm starts afresh.

        Args:
            first: weights of the first layer, [h, D].
            second: weights of the second layer, [C, h].

        Raises:
            ValueError: shapes differ from the layers'.
        """
        for name, layer, weight in (("first", self.fc1, first), ("second", self.fc2, second)):
            check_shape(name, weight, "outputs inputs", outputs=layer.out_features, inputs=layer.in_features)
            layer.weight.copy_(weight)
            layer.bias.zero_()
        self.bn.reset_parameters()
        self.bn.reset_running_stats()
