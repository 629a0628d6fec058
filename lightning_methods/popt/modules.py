"""The Population Transformer, and the front end that turns voltages into embeddings of channels."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.checks import check_range, check_shape, values_visible
from .functional import check_positions, look_up_positions, sinusoidal_table, stft_features

__all__ = ["PopTOutput", "PopulationTransformer", "SpectrogramEncoder"]


class PopTOutput(NamedTuple):
    """What the transformer says about a batch of populations.

    Attributes:
        hidden: codes of all tokens, [CLS] first, [B, 1 + S, D].
        cls_logit: logit of "the ensembles are not consecutive", [B, 1].
        token_logit: logits of "this channel was replaced", [B, S, 1].
        attention: weights of every layer, [B, heads, 1 + S, 1 + S] each; None unless asked for.
    """

    hidden: Tensor
    cls_logit: Tensor
    token_logit: Tensor
    attention: tuple[Tensor, ...] | None


class _Attention(nn.Module):
    """Multi-head self-attention, without its weights by the fused kernel, with them by the formula."""

    def __init__(self, dim: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x: Tensor, mask: Tensor | None, return_attention: bool) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            x: tokens, [B, N, D].
            mask: additive, [B, 1, 1, N], minus infinity at tokens that nobody attends to; None for all.
            return_attention: whether the weights (before dropout) are returned, [B, heads, N, N].
        """
        heads = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.n_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if return_attention:
            scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
            weights = (scores if mask is None else scores + mask).softmax(dim=-1)
            mixed = F.dropout(weights, dropout).to(value.dtype) @ value
        else:
            mask = None if mask is None else mask.to(query.dtype)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), weights


class _Layer(nn.Module):
    """A layer with the norms after the residual sums."""

    def __init__(self, dim: int, n_heads: int, ffn_dim: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = _Attention(dim, n_heads, dropout)
        self.linear1 = nn.Linear(dim, ffn_dim)
        self.linear2 = nn.Linear(ffn_dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None, return_attention: bool) -> tuple[Tensor, Tensor | None]:
        mixed, weights = self.self_attn(x, mask, return_attention)
        x = self.norm1(x + self.dropout(mixed))
        hidden = self.linear2(self.dropout(F.gelu(self.linear1(x))))
        return self.norm2(x + self.dropout(hidden)), weights


class PopulationTransformer(nn.Module):
    """A transformer over the channels of one subject at one time, for any number of channels at any positions.

    [CLS] enters as a vector of ones and its output is the code of the whole population. Where a channel is, and to
    which ensemble it belongs, is told by sinusoidal codes added to the projected activity; there are no parameters of a
    subject or of a channel. Parameters have the names of the authors' code.

    Args:
        input_dim: width of a channel's embedding (768 for BrainBERT).
        hidden_dim: width D, divisible by 8 and by ``n_heads``.
        n_heads: attention heads.
        n_layers: layers.
        ffn_dim: width of the feed-forward part; in the authors' code 2048 for any D.
        dropout: in [0, 1).
        max_position: coordinates are in ``[0, max_position)``.
        use_position: tell where the channels are; False gives all the same coordinates (ablation).
        use_ensemble: tell to which ensemble they belong; False gives all the same (ablation).
        layernorm_bias_init: what the biases of the LayerNorms start from. The authors' code has 1, by what is probably
            a slip; 0 is usual.
        identical_layers: start all layers from the same weights, as the authors' code does.

    Raises:
        ValueError: a width that is not divisible as it must be, or an argument out of range.

    Example:
        >>> model = PopulationTransformer(input_dim=6, hidden_dim=16, n_heads=2, n_layers=1, ffn_dim=32).eval()
        >>> x, coords, seq_id = torch.randn(2, 5, 6), torch.randint(200, (2, 5, 3)), torch.zeros(2, 5, dtype=torch.long)
        >>> model(x, coords, seq_id).hidden.shape
        torch.Size([2, 6, 16])
    """

    def __init__(
        self,
        input_dim: int = 768,
        hidden_dim: int = 512,
        n_heads: int = 8,
        n_layers: int = 6,
        ffn_dim: int = 2048,
        dropout: float = 0.1,
        max_position: int = 5000,
        use_position: bool = True,
        use_ensemble: bool = True,
        layernorm_bias_init: float = 1.0,
        identical_layers: bool = False,
    ) -> None:
        super().__init__()
        for name, value in {
            "input_dim": input_dim,
            "n_heads": n_heads,
            "n_layers": n_layers,
            "ffn_dim": ffn_dim,
        }.items():
            check_range(name, value, 1)
        check_range("hidden_dim", hidden_dim, 8)
        check_range("dropout", dropout, 0, 1, high_open=True)
        check_range("max_position", max_position, 2)
        check_range("layernorm_bias_init", layernorm_bias_init)
        if hidden_dim % 8 or hidden_dim % n_heads:
            raise ValueError(
                f"hidden_dim must be divisible by 8 (four position codes of even width) and by n_heads={n_heads}, "
                f"got {hidden_dim}."
            )
        self.input_dim = input_dim
        self.hidden_dim = hidden_dim
        self.max_position = max_position
        self.use_position = use_position
        self.use_ensemble = use_ensemble
        self.input_encoding = nn.ModuleDict(
            {"in_proj": nn.Linear(input_dim, hidden_dim), "layer_norm": nn.LayerNorm(hidden_dim)}
        )
        self.input_dropout = nn.Dropout(dropout)
        layers = [_Layer(hidden_dim, n_heads, ffn_dim, dropout) for _ in range(n_layers)]
        if identical_layers:
            layers = [copy.deepcopy(layers[0]) for _ in layers]
        self.transformer_encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.constant_(module.bias, layernorm_bias_init)
        self.cls_head = nn.Linear(hidden_dim, 1)
        self.token_cls_head = nn.Linear(hidden_dim, 1)
        self.register_buffer("positions", sinusoidal_table(max_position, hidden_dim // 4), persistent=False)

    @property
    def num_features(self) -> int:
        """Width of the code of a population, D."""
        return self.hidden_dim

    def _check(self, x: Tensor, coords: Tensor, seq_id: Tensor, pad_mask: Tensor | None) -> None:
        sizes = check_shape("x", x, "batch channels input_dim", input_dim=self.input_dim)
        sizes = {"batch": sizes["batch"], "channels": sizes["channels"]}
        check_shape("coords", coords, "batch channels axes", **sizes)
        check_positions(coords, seq_id, self.max_position)
        if pad_mask is None:
            return
        check_shape("pad_mask", pad_mask, "batch channels", **sizes)
        if pad_mask.dtype != torch.bool:
            raise ValueError(f"pad_mask must be boolean (True = padding), got dtype {pad_mask.dtype}.")
        if values_visible(pad_mask) and pad_mask.all(dim=1).any():
            empty = pad_mask.all(dim=1).nonzero().flatten().tolist()
            raise ValueError(f"every sample needs a channel; in pad_mask the samples {empty} are padding throughout.")

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        seq_id: Tensor,
        pad_mask: Tensor | None = None,
        return_attention: bool = False,
    ) -> PopTOutput:
        """Read a batch of populations; [CLS] is added here.

        Args:
            x: embeddings of the channels, [B, S, input_dim].
            coords: their integer coordinates, [B, S, 3], in ``[0, max_position)``.
            seq_id: the ensemble of each, 0 or 1, [B, S].
            pad_mask: True where a channel is padding, [B, S]; None if there is none.
            return_attention: return the attention weights of every head too (slower, more memory).

        Raises:
            ValueError: shapes do not fit, positions are outside the table, or a sample has no channel.
        """
        self._check(x, coords, seq_id, pad_mask)
        if not self.use_position:
            coords = torch.zeros_like(coords)
        if not self.use_ensemble:
            seq_id = torch.zeros_like(seq_id)
        tokens = torch.cat([x.new_ones(x.shape[0], 1, x.shape[2]), x], dim=1)
        tokens = self.input_encoding["in_proj"](tokens)
        tokens = tokens + look_up_positions(self.positions, coords, seq_id).to(tokens.dtype)
        tokens = self.input_dropout(self.input_encoding["layer_norm"](tokens))

        mask = None
        if pad_mask is not None:
            mask = F.pad(pad_mask, (1, 0))[:, None, None]
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf)
        attention = []
        for layer in self.transformer_encoder["layers"]:
            tokens, weights = layer(tokens, mask, return_attention)
            attention.append(weights)
        return PopTOutput(
            tokens,
            self.cls_head(tokens[:, 0]),
            self.token_cls_head(tokens[:, 1:]),
            tuple(attention) if return_attention else None,
        )

    def load_reference_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load weights of the authors' code; their position table and the head that no loss uses are left out.

        Args:
            state_dict: the authors' names and tensors.

        Raises:
            ValueError: a weight is missing, unknown or of another shape.
        """
        ignored = ("input_encoding.positional_encoding.", "spec_prediction_head.")
        state = {key: value for key, value in state_dict.items() if not key.startswith(ignored)}
        own = self.state_dict()
        problems = [f"{key} is missing" for key in own if key not in state]
        problems += [f"{key} is unknown" for key in state if key not in own]
        problems += [
            f"{key} is {list(state[key].shape)} there and {list(own[key].shape)} here"
            for key in own
            if key in state and state[key].shape != own[key].shape
        ]
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(f"the weights do not fit: {'; '.join(problems[:5])}{more}.")
        self.load_state_dict(state)


class SpectrogramEncoder(nn.Module):
    """A frozen temporal embedding of every channel: spectrogram, a network over its frames, mean of the middle frames.

    With BrainBERT as the network this is the authors' input; :func:`~lightning_methods.popt.embed_recording` applies it
    (or any other module that maps [channels, samples] to [channels, d]) to a whole recording.

    Args:
        network: maps [channels, frames, n_freq] to [channels, frames, d].
        sampling_rate: samples per second.
        n_freq: bins of the spectrogram that are kept.
        nperseg: samples in a window of the spectrogram.
        noverlap: samples that neighbouring windows share.
        trim: frames dropped at both ends.
        middle: frames in the mean, half of them before the middle.
    """

    def __init__(
        self,
        network: nn.Module,
        sampling_rate: int = 2048,
        n_freq: int = 40,
        nperseg: int = 400,
        noverlap: int = 350,
        trim: int = 10,
        middle: int = 10,
    ) -> None:
        super().__init__()
        check_range("middle", middle, 1)
        self.network = network.requires_grad_(False).eval()
        self.options = {
            "sampling_rate": sampling_rate,
            "n_freq": n_freq,
            "nperseg": nperseg,
            "noverlap": noverlap,
            "trim": trim,
        }
        self.middle = middle

    def train(self, mode: bool = True) -> SpectrogramEncoder:
        """Set the mode; the network stays in eval mode."""
        super().train(mode)
        self.network.eval()
        return self

    def forward(self, signal: Tensor) -> Tensor:
        """Embed the middle of a stretch of voltages, [channels, samples] -> [channels, d].

        Raises:
            ValueError: too few frames for the mean.
        """
        spectrogram = stft_features(signal, **self.options)
        start = spectrogram.shape[1] // 2 - self.middle // 2
        if start < 0 or spectrogram.shape[1] < start + self.middle:
            raise ValueError(
                f"the mean needs {self.middle} frames in the middle; {signal.shape[1]} samples give "
                f"{spectrogram.shape[1]}."
            )
        return self.network(spectrogram)[:, start : start + self.middle].mean(dim=1)
