"""BERT with the normalisation before each part (Pre-LN), as the paper trains it, and BERTs by their sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_utils import PreTrainedModel

from ..core.checks import check_range

__all__ = ["PreLNBertForMaskedLM", "build_bert"]


class PreLNEmbeddings(nn.Module):
    """Word, position and type embeddings, summed without a normalisation.

    Args:
        config: sizes and dropout.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """The start of the residual stream, [B, T, H]."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        embedded = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.dropout(embedded + self.position_embeddings(position_ids))


class PreLNBlock(nn.Module):
    """``x + attention(LN(x))``, then ``x + MLP(LN(x))``.

    Args:
        config: sizes and dropout.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        if width % config.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads={config.num_attention_heads}, got {width}."
            )
        self.num_heads = config.num_attention_heads
        self.attention_dropout = float(config.attention_probs_dropout_prob)
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attention_output = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.intermediate = nn.Linear(width, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.output = nn.Linear(config.intermediate_size, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """One block.

        Args:
            x: residual stream, [B, T, H].
            mask: True where a token may be looked at, [B, 1, 1, T].
        """
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        dropout = self.attention_dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        x = x + self.dropout(self.attention_output(heads.transpose(1, 2).flatten(-2)))
        hidden = self.activation(self.intermediate(self.norm2(x)))
        return x + self.dropout(self.output(hidden))


class PreLNBertForMaskedLM(PreTrainedModel):
    """BERT for masked language modelling with Pre-LN blocks; no LayerNorm on the embeddings, no prediction transform.

    The decoder is the word embedding unless ``config.tie_word_embeddings`` is off. Unlike the Post-LN BERT it can be
    expanded to any larger width by whole heads. Saves and loads like every model of transformers.

    Args:
        config: sizes; dropouts, ``hidden_act`` and ``layer_norm_eps`` mean what they mean for BERT.

    Raises:
        ValueError: the hidden size is no multiple of the number of heads.
    """

    config_class = BertConfig
    config: BertConfig
    base_model_prefix = ""
    _tied_weights_keys = {"decoder.weight": "embeddings.word_embeddings.weight"}

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.embeddings = PreLNEmbeddings(config)
        self.blocks = nn.ModuleList(PreLNBlock(config) for _ in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word embedding."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word embedding."""
        self.embeddings.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        """The decoder."""
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the decoder."""
        self.decoder = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits of every token.

        Args:
            input_ids: [B, T].
            attention_mask: 1 for real tokens, [B, T].
            token_type_ids: [B, T], zeros by default.
            position_ids: [T] or [B, T], counted from the left by default.
            labels: tokens to predict, -100 elsewhere, [B, T].
            **kwargs: what other models of transformers also take; not used.

        Returns:
            ``logits`` [B, T, V], and with labels the mean cross-entropy ``loss``.
        """
        x = self.embeddings(input_ids, token_type_ids, position_ids)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, mask)
        logits = self.decoder(self.ln_f(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        return MaskedLMOutput(loss=loss, logits=logits)


def build_bert(
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int = 30522,
    max_length: int = 512,
    pre_norm: bool = True,
    dropout: float = 0.1,
) -> PreTrainedModel:
    """A BERT for masked language modelling with random weights, by its sizes.

    Args:
        hidden_size: H.
        num_layers: number of blocks.
        num_heads: None for heads of 64.
        intermediate_size: hidden units of a block; None for 4 H.
        vocab_size: number of tokens.
        max_length: number of positions.
        pre_norm: :class:`PreLNBertForMaskedLM`, else ``BertForMaskedLM`` of transformers.
        dropout: of hidden states and of attention.

    Returns:
        The model.

    Raises:
        ValueError: a size below 1, or a width that is no multiple of the heads.
    """
    for name, value in (("hidden_size", hidden_size), ("num_layers", num_layers), ("vocab_size", vocab_size)):
        check_range(name, value, 1)
    check_range("dropout", dropout, 0, 1, high_open=True)
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads or max(hidden_size // 64, 1),
        intermediate_size=intermediate_size or 4 * hidden_size,
        max_position_embeddings=max_length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return (PreLNBertForMaskedLM if pre_norm else BertForMaskedLM)(config)
