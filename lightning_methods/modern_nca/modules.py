"""The encoder of ModernNCA. Parameter names are those of the authors' released code, so that its checkpoints load."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..core.checks import check_choice, check_range, check_shape
from .functional import plr, plr_lite

__all__ = ["PLREmbedding", "TabularEncoder"]


class _Frequencies(nn.Module):
    def __init__(self, d_num: int, n_frequencies: int, scale: float) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.empty(d_num, n_frequencies).normal_(0, scale))


class _LinearPerColumn(nn.Module):
    def __init__(self, d_num: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = in_features**-0.5  # nn.Linear's
        self.weight = nn.Parameter(torch.empty(d_num, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(d_num, out_features).uniform_(-bound, bound))


class PLREmbedding(nn.Sequential):
    """Embeds every numeric column by cosines and sines of learned frequencies, a linear map and ReLU.

    Inputs are expected to be standardised: ``frequency_scale`` is in units of their standard deviation. One-hot and
    binary columns gain nothing from it.

    Args:
        d_num: number of columns.
        n_frequencies: k, cosines (and sines) per column.
        frequency_scale: standard deviation of the frequencies at the start.
        d_embedding: width of a column's embedding.
        lite: share the linear map between the columns.
    """

    def __init__(
        self,
        d_num: int,
        n_frequencies: int = 77,
        frequency_scale: float = 0.04431360576139521,
        d_embedding: int = 34,
        lite: bool = True,
    ) -> None:
        check_range("d_num", d_num, 1)
        check_range("n_frequencies", n_frequencies, 1)
        check_range("frequency_scale", frequency_scale, 0, low_open=True)
        check_range("d_embedding", d_embedding, 1)
        linear = (
            nn.Linear(2 * n_frequencies, d_embedding)
            if lite
            else _LinearPerColumn(d_num, 2 * n_frequencies, d_embedding)
        )
        super().__init__(_Frequencies(d_num, n_frequencies, frequency_scale), linear, nn.ReLU())
        self.lite = lite

    def forward(self, x: Tensor) -> Tensor:
        """[B, d_num] -> [B, d_num, d_embedding]."""
        embed = plr_lite if self.lite else plr
        return embed(x, self[0].frequencies, self[1].weight, self[1].bias)


class _Block(nn.Module):
    """BatchNorm and a two-layer network. The authors' blocks have no residual connection."""

    def __init__(self, dim: int, d_block: int, dropout: float) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.BatchNorm1d(dim), nn.Linear(dim, d_block), nn.ReLU(), nn.Dropout(dropout), nn.Linear(d_block, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class TabularEncoder(nn.Module):
    """Embeds rows of a table: periodic embeddings of the numeric columns, a linear map, BatchNorm-MLP blocks.

    With ``n_blocks=0`` and ``num_embedding="none"`` it is the linear map of L-NCA.

    Args:
        d_num: number of numeric columns, which come first; may be 0.
        d_cat: number of one-hot columns, which follow; may be 0.
        dim: width of the embedding.
        n_blocks: number of blocks; a BatchNorm follows the last one.
        d_block: hidden width of a block.
        dropout: inside the blocks, in [0, 1).
        num_embedding: "plr-lite", "plr" (a linear map for every column), or "none" (numbers as they are).
        n_frequencies: see :class:`PLREmbedding`.
        frequency_scale: see :class:`PLREmbedding`.
        d_embedding: see :class:`PLREmbedding`.

    Attributes:
        num_features: ``dim``.

    Raises:
        ValueError: no column at all, or an argument out of range.

    Example:
        >>> TabularEncoder(d_num=5, d_cat=3, dim=16, n_blocks=1)(torch.randn(4, 8)).shape
        torch.Size([4, 16])
    """

    def __init__(
        self,
        d_num: int,
        d_cat: int = 0,
        dim: int = 128,
        n_blocks: int = 0,
        d_block: int = 512,
        dropout: float = 0.1,
        num_embedding: Literal["plr-lite", "plr", "none"] = "plr-lite",
        n_frequencies: int = 77,
        frequency_scale: float = 0.04431360576139521,
        d_embedding: int = 34,
    ) -> None:
        super().__init__()
        check_range("d_num", d_num, 0)
        check_range("d_cat", d_cat, 0)
        if d_num + d_cat == 0:
            raise ValueError("d_num and d_cat are both 0: the encoder needs at least one column.")
        check_range("dim", dim, 1)
        check_range("n_blocks", n_blocks, 0)
        check_range("d_block", d_block, 1)
        check_range("dropout", dropout, 0, 1, high_open=True)
        check_choice("num_embedding", num_embedding, ("plr-lite", "plr", "none"))
        self.d_num = d_num
        self.d_cat = d_cat
        self.num_features = dim
        self.num_embeddings = None
        width = d_num
        if num_embedding != "none" and d_num > 0:
            lite = num_embedding == "plr-lite"
            self.num_embeddings = PLREmbedding(d_num, n_frequencies, frequency_scale, d_embedding, lite)
            width = d_num * d_embedding
        self.encoder = nn.Linear(width + d_cat, dim)
        self.post_encoder = nn.Sequential(*(_Block(dim, d_block, dropout) for _ in range(n_blocks)))
        if n_blocks > 0:
            self.post_encoder.append(nn.BatchNorm1d(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Embed rows.

        Args:
            x: numeric columns, then one-hot columns, [B, d_num + d_cat].

        Returns:
            [B, dim].
        """
        check_shape("x", x, "batch columns", columns=self.d_num + self.d_cat)
        if self.num_embeddings is not None:
            numbers = self.num_embeddings(x[:, : self.d_num]).flatten(1)
            x = torch.cat([numbers, x[:, self.d_num :]], dim=1)
        return self.post_encoder(self.encoder(x))
