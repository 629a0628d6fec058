"""GraphSAGE with mean aggregation; the names of the parameters are torch_geometric's."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.checks import check_range, check_shape
from ..graph.ops import check_edge_index, scatter_mean

__all__ = ["SAGEConv", "SAGEEncoder"]


class SAGEConv(nn.Module):
    """One layer, ``h_i = W_l mean_{j -> i} x_j + b + W_r x_i``; the mean of no neighbour is 0.

    Source: Hamilton, Ying, Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS 2017.

    Args:
        in_channels: features of a node.
        out_channels: features of its embedding.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Embeddings, [n, out].

        Args:
            x: [n, in].
            edge_index: int64 [2, E], messages go from row 0 to row 1.
            edge_weight: factor of every message, [E]. The mean still divides by the number of messages, so a weight
                of 0 is not the same as an edge that is not there.
        """
        # The mean and the linear map commute: the one with the narrower rows to gather goes first.
        first = self.lin_l.out_features <= self.lin_l.in_features
        source = F.linear(x, self.lin_l.weight) if first else x
        messages = source[edge_index[0]]
        if edge_weight is not None:
            messages = messages * edge_weight[:, None].to(messages.dtype)
        mean = scatter_mean(messages, edge_index[1], len(x))
        left = mean + self.lin_l.bias if first else self.lin_l(mean)
        return left + self.lin_r(x)


class SAGEEncoder(nn.Module):
    """GraphSAGE: layers with a ReLU between them and none after the last.

    ``state_dict`` has the names of torch_geometric's ``GraphSAGE`` (``convs.0.lin_l.weight``, ...), whose weights load
    unchanged.

    Args:
        in_channels: features of a node.
        hidden_channels: width of the layers but the last.
        num_layers: number of layers, at least 1.
        out_channels: width of the embedding; None is ``hidden_channels``.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> encoder = SAGEEncoder(3, hidden_channels=8)
        >>> encoder(torch.ones(2, 3), torch.tensor([[0, 1], [1, 0]])).shape
        torch.Size([2, 8])
    """

    def __init__(
        self, in_channels: int, hidden_channels: int = 128, num_layers: int = 2, out_channels: int | None = None
    ) -> None:
        super().__init__()
        out_channels = hidden_channels if out_channels is None else out_channels
        for name, value in {
            "in_channels": in_channels,
            "hidden_channels": hidden_channels,
            "num_layers": num_layers,
            "out_channels": out_channels,
        }.items():
            check_range(name, value, 1)
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(SAGEConv(*pair) for pair in pairwise(widths))
        self.num_features = out_channels

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """Embeddings, [n, out].

        Args:
            x: node features, [n, in].
            edge_index: int64 [2, E]; messages go from row 0 to row 1.
            edge_weight: see :class:`SAGEConv`, [E].

        Raises:
            ValueError: shapes do not fit, or nodes are out of range.
        """
        n = check_shape("x", x, "n in_channels", in_channels=self.convs[0].lin_l.in_features)["n"]
        check_edge_index("edge_index", edge_index, n)
        if edge_weight is not None:
            check_shape("edge_weight", edge_weight, "edges", edges=edge_index.shape[1])
        for layer, conv in enumerate(self.convs):
            x = conv(torch.relu(x) if layer else x, edge_index, edge_weight)
        return x
