"""Networks of associative memories: the two layers, a language model of them, and the three-moons toy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.checks import check_choice, check_range
from ..core.modes import evaluating
from .functional import (
    carry_average,
    complex_linear_weight,
    contextual_retrieval,
    leaky_average,
    peek_values,
    persistent_retrieval,
    unit_norm,
)

__all__ = [
    "GPTLM",
    "ContextualMemory",
    "MemoryCache",
    "MemoryMosaicBlock",
    "MemoryMosaicLM",
    "PersistentMemory",
    "ThreeMoonsMosaic",
]

# Numbers per head are stored divided by 10 and used times 10: a learning rate ten times that of the matrices.
SCALE = 10.0
# exp(2 * 5) = 22026 is the largest scale of a key, within the range of float16.
MAX_LOG_SCALE = 5.0


@dataclass
class MemoryCache:
    """What a memory layer keeps of the times before, to go on with the next ones.

    Attributes:
        average: the leaky average at the last time, [B, H, D].
        keys: scaled keys of all times (contextual memories only), [B, H, T, D].
        values: the values that are final: those that could peek already, [B, H, T - shift, D].
        pending: projections of the last times, whose values still wait for their future, [B, H, shift, D].
    """

    average: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    pending: Tensor | None = None


class _Memory(nn.Module):
    """What both kinds share: keys are scaled unit vectors along leaky averages of a projection."""

    key_power: int

    def __init__(
        self, embed_dim: int, num_heads: int, attn_dropout: float, resid_dropout: float, bias: bool, eps: float = 1e-6
    ) -> None:
        super().__init__()
        check_range("num_heads", num_heads, 1)
        check_range("embed_dim", embed_dim, 1)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}.")
        check_range("attn_dropout", attn_dropout, 0, 1, high_open=True)
        check_range("resid_dropout", resid_dropout, 0, 1, high_open=True)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.attn_dropout = attn_dropout
        self.eps = eps
        self.key_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.key_decay = nn.Parameter(torch.empty(num_heads))
        self.key_scale = nn.Parameter(torch.empty(num_heads))
        self.dropout = nn.Dropout(resid_dropout)

    def reset_parameters(self, depth: int = 1, std: float | None = None) -> None:
        """Draw the weights as the paper's code does.

        Args:
            depth: number of blocks; the output projections are smaller by its root.
            std: deviation of the projections (GPT-2 takes .02, and divides the output projections by the root of
                twice the depth); None for 1 / sqrt(fan_in).
        """
        for linear in (module for module in self.children() if isinstance(module, nn.Linear)):
            deviation = 1 / math.sqrt(linear.in_features) if std is None else std
            if linear is self.out_proj:
                deviation /= math.sqrt(depth if std is None else 2 * depth)
            nn.init.normal_(linear.weight, std=deviation)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        with torch.no_grad():
            self.key_decay.copy_(torch.linspace(0.5, 5, self.num_heads) / SCALE)
            self.key_scale.fill_(1 / SCALE)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, C] as [B, H, T, D]."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _merge(self, y: Tensor) -> Tensor:
        """[B, H, T, D] through the output projection, [B, T, C]."""
        return self.dropout(self.out_proj(y.transpose(1, 2).flatten(2)))

    def keys(self, x: Tensor, cache: MemoryCache | None = None) -> Tensor:
        """Scaled keys [B, H, T, D] of inputs [B, T, C], in float32 or wider."""
        decay = SCALE * self.key_decay.abs()
        average = leaky_average(self._heads(self.key_proj(x)), decay)
        if cache is not None:
            if cache.average is not None:
                average = carry_average(average, cache.average, decay)
            cache.average = average[:, :, -1]
        scale = torch.exp(self.key_power * (SCALE * self.key_scale).clamp_max(MAX_LOG_SCALE))
        return unit_norm(average, self.eps) * scale[:, None, None]

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[1] == 0 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must have shape [batch, time >= 1, {self.embed_dim}], got {list(x.shape)}.")

    @property
    def _dropout_p(self) -> float:
        return self.attn_dropout if self.training else 0.0

    def extra_repr(self) -> str:
        """Sizes for printing."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


def _like(x: Tensor, reference: Tensor) -> Tensor:
    """For the attention in the precision of the projections: under autocast their type, else that of the input."""
    if torch.is_autocast_enabled(reference.device.type):
        return x.to(torch.get_autocast_dtype(reference.device.type))
    return x.to(reference.dtype)


class ContextualMemory(_Memory):
    """Associative memory of the running sequence: takes the place of causal self-attention.

    Keys look back (leaky average), values look ``shift`` steps ahead, and a query sees only the values that were known
    at its time: what it gets back is a prediction. There is no query projection and no position encoding.

    Source: Zhang et al., "Memory Mosaics", ICLR 2025.

    Args:
        embed_dim: width of inputs and outputs C.
        num_heads: memories H that work side by side; divides C.
        shift: how far values peek ahead, at least 1.
        attn_dropout: dropout of the retrieval weights.
        resid_dropout: dropout of the output.
        bias: whether projections have biases.

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> memory = ContextualMemory(embed_dim=8, num_heads=2)
        >>> memory(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    key_power = 1

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        shift: int = 1,
        attn_dropout: float = 0.0,
        resid_dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, attn_dropout, resid_dropout, bias)
        check_range("shift", shift, 1)
        self.shift = shift
        self.value_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.value_scale = nn.Parameter(torch.empty(num_heads))
        self.value_mix = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self, depth: int = 1, std: float | None = None) -> None:
        """Draw the weights; see the base."""
        super().reset_parameters(depth, std)
        nn.init.constant_(self.value_scale, -0.5 / SCALE)
        nn.init.uniform_(self.value_mix)

    def values(self, w: Tensor) -> Tensor:
        """Scaled unit values [B, H, T, D] of projections [B, H, T, D]; the last ``shift`` ones lack their future."""
        y = unit_norm(peek_values(w, self.value_mix, self.shift), self.eps)
        return y * torch.exp(SCALE * self.value_scale)[:, None, None]

    def forward(self, x: Tensor, cache: MemoryCache | None = None) -> Tensor:
        """Retrieve for every time, from the times before.

        Args:
            x: [B, T, C].
            cache: of the times before ``x``; brought up to date in place.

        Returns:
            [B, T, C].

        Raises:
            ValueError: another shape, or no time at all.
        """
        self._check_input(x)
        keys = _like(self.keys(x, cache), x)
        w = self._heads(self.value_proj(x))
        if cache is None:
            values = _like(self.values(w), x)
            return self._merge(contextual_retrieval(keys, values, shift=self.shift, dropout_p=self._dropout_p))
        return self._merge(self._retrieve(keys, w, cache))

    def _retrieve(self, keys: Tensor, w: Tensor, cache: MemoryCache) -> Tensor:
        """As :func:`contextual_retrieval`, with the pairs of earlier times in front."""
        new = keys.shape[2]
        if cache.keys is not None:
            keys = torch.cat([cache.keys, keys], dim=2)
            w = torch.cat([cache.pending, w], dim=2)
        total = keys.shape[2]
        final = _like(self.values(w), keys)[:, :, : max(w.shape[2] - self.shift, 0)]
        values = final if cache.values is None else torch.cat([cache.values, final], dim=2)
        cache.keys, cache.values, cache.pending = keys, values, w[:, :, -self.shift :]
        known = values.shape[2]
        silent = min(max(self.shift - (total - new), 0), new)  # first times of all: nothing to look at
        if silent == new:
            return torch.zeros_like(keys[:, :, -new:])
        queries = keys[:, :, total - new + silent :]
        time = torch.arange(total - new + silent, total, device=keys.device)
        mask = None
        if queries.shape[2] > 1:
            mask = torch.arange(known, device=keys.device) <= time[:, None] - self.shift
        found = F.scaled_dot_product_attention(
            queries, keys[:, :, :known], values, attn_mask=mask, dropout_p=self._dropout_p, scale=1.0
        )
        return F.pad(found, (0, 0, silent, 0))


class PersistentMemory(_Memory):
    """Associative memory of learned pairs: takes the place of the feed-forward network.

    Source: Memory Mosaics.

    Args:
        embed_dim: width of inputs and outputs C.
        num_heads: memories H that work side by side; divides C.
        memory_size: pairs S in each; ``3.5 * embed_dim`` gives a block the parameters of a GPT-2 block.
        num_memories: sets of pairs N whose answers are averaged.
        attn_dropout: dropout of the retrieval weights.
        resid_dropout: dropout of the output.
        bias: whether projections have biases.

    Raises:
        ValueError: an argument out of range.
    """

    key_power = 2

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        memory_size: int,
        *,
        num_memories: int = 1,
        attn_dropout: float = 0.0,
        resid_dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__(embed_dim, num_heads, attn_dropout, resid_dropout, bias)
        check_range("memory_size", memory_size, 1)
        check_range("num_memories", num_memories, 1)
        self.out_scale = nn.Parameter(torch.empty(num_heads))
        shape = (num_memories, num_heads, memory_size, embed_dim // num_heads)
        self.mem_keys = nn.Parameter(torch.empty(shape))
        self.mem_values = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self, depth: int = 1, std: float | None = None) -> None:
        """Draw the weights; see the base."""
        super().reset_parameters(depth, std)
        nn.init.constant_(self.out_scale, -0.5 / SCALE)
        for pairs in (self.mem_keys, self.mem_values):
            nn.init.normal_(pairs, std=1 / math.sqrt(pairs.shape[-1]))

    def forward(self, x: Tensor, cache: MemoryCache | None = None) -> Tensor:
        """Look up for every time, [B, T, C] -> [B, T, C]; see :meth:`ContextualMemory.forward`."""
        self._check_input(x)
        keys = _like(self.keys(x, cache), x)
        found = persistent_retrieval(
            keys, _like(self.mem_keys, x), _like(self.mem_values, x), dropout_p=self._dropout_p
        )
        return self._merge(found * torch.exp(SCALE * self.out_scale).to(found.dtype)[:, None, None])


class MemoryMosaicBlock(nn.Module):
    """Residual block: ``x + contextual(norm1(x))``, then ``x + persistent(norm2(x))``.

    Args:
        embed_dim: width C.
        num_heads: memories in each layer.
        memory_size: pairs of the persistent memory; 0 leaves it out.
        num_memories: sets of pairs.
        shift: how far values peek ahead.
        attn_dropout: dropout of the retrieval weights.
        resid_dropout: dropout of the outputs.
        bias: whether projections and norms have biases.
        pre_ln: whether the sum goes on with ``x``; False goes on with ``norm(x)`` in its place, as an option of the
            authors' code does.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        memory_size: int,
        *,
        num_memories: int = 1,
        shift: int = 1,
        attn_dropout: float = 0.0,
        resid_dropout: float = 0.0,
        bias: bool = False,
        pre_ln: bool = True,
    ) -> None:
        super().__init__()
        check_range("memory_size", memory_size, 0)
        options = {"attn_dropout": attn_dropout, "resid_dropout": resid_dropout, "bias": bias}
        self.pre_ln = pre_ln
        self.norm1 = nn.LayerNorm(embed_dim, bias=bias)
        self.contextual = ContextualMemory(embed_dim, num_heads, shift=shift, **options)
        self.norm2 = nn.LayerNorm(embed_dim, bias=bias) if memory_size else None
        self.persistent = (
            PersistentMemory(embed_dim, num_heads, memory_size, num_memories=num_memories, **options)
            if memory_size
            else None
        )

    def reset_parameters(self, depth: int = 1, std: float | None = None) -> None:
        """Draw the weights of both memories."""
        self.contextual.reset_parameters(depth, std)
        if self.persistent is not None:
            self.persistent.reset_parameters(depth, std)

    def forward(self, x: Tensor, cache: tuple[MemoryCache, MemoryCache] | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        first, second = cache or (None, None)
        normed = self.norm1(x)
        x = (x if self.pre_ln else normed) + self.contextual(normed, first)
        if self.persistent is None:
            return x
        normed = self.norm2(x)
        return (x if self.pre_ln else normed) + self.persistent(normed, second)


class _LanguageModel(nn.Module):
    """Generation for models with ``forward(input_ids) -> logits``."""

    def start_cache(self) -> list[tuple[MemoryCache, MemoryCache]] | None:
        """An empty cache; None if the model has none and is run on the whole text each time."""
        return None

    def window(self, input_ids: Tensor) -> Tensor:
        """The part of the text that the model can see."""
        return input_ids

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        eos_token_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue texts of equal length.

        Args:
            input_ids: int64 [B, T], T at least 1.
            max_new_tokens: tokens to add, at least 0.
            temperature: of the softmax; 0 takes the most probable token.
            top_k: draw among this many most probable tokens; None for all.
            eos_token_id: a text ends with this token; behind it stands only this token.
            generator: source of the draws, on the texts' device.

        Returns:
            The texts with what was added, int64 [B, T + n]; n is less than ``max_new_tokens`` if all ended before.

        Raises:
            ValueError: an argument out of range, or no token to start from.
        """
        check_range("max_new_tokens", max_new_tokens, 0)
        check_range("temperature", temperature, 0)
        if top_k is not None:
            check_range("top_k", top_k, 1)
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids must have shape [batch, time >= 1], got {list(input_ids.shape)}.")
        with evaluating(self):
            return self._generate(input_ids, max_new_tokens, temperature, top_k, eos_token_id, generator)

    def _generate(
        self,
        text: Tensor,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        eos_token_id: int | None,
        generator: torch.Generator | None,
    ) -> Tensor:
        cache = self.start_cache()
        unseen = text
        ended = torch.zeros(len(text), 1, dtype=torch.bool, device=text.device)
        for _ in range(max_new_tokens):
            logits = self(self.window(text)) if cache is None else self(unseen, cache)
            unseen = _draw(logits[:, -1].float(), temperature, top_k, generator)
            if eos_token_id is not None:
                unseen = torch.where(ended, eos_token_id, unseen)
                ended = ended | (unseen == eos_token_id)
            text = torch.cat([text, unseen], dim=1)
            if eos_token_id is not None and bool(ended.all()):
                break
        return text


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits [B, V], [B, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


class MemoryMosaicLM(_LanguageModel):
    """Language model of Memory Mosaic blocks.

    Source: Memory Mosaics, language modelling; sizes by default those of GPT-2 small.

    Args:
        vocab_size: number of tokens V.
        embed_dim: width C.
        num_heads: memories in each layer.
        num_layers: blocks L.
        memory_size: pairs of each persistent memory; 0 leaves them out.
        num_memories: sets of pairs.
        attn_dropout: dropout of the retrieval weights.
        resid_dropout: dropout of the layers' outputs.
        shift: how far values peek ahead.
        bias: whether projections and norms have biases.
        pre_ln: see :class:`MemoryMosaicBlock`.
        tie_weights: whether the output head is the embedding.
        init: "paper" (deviation 1 / sqrt(fan_in), logits divided by sqrt(C)) or "gpt2" (.02, plain logits).

    Raises:
        ValueError: an argument out of range.

    Example:
        >>> model = MemoryMosaicLM(50, embed_dim=16, num_heads=2, num_layers=2, memory_size=8)
        >>> model(torch.zeros(1, 7, dtype=torch.long)).shape
        torch.Size([1, 7, 50])
        >>> model.generate(torch.zeros(1, 7, dtype=torch.long), max_new_tokens=3).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int = 768,
        num_heads: int = 12,
        num_layers: int = 12,
        memory_size: int = 2688,
        *,
        num_memories: int = 1,
        attn_dropout: float = 0.05,
        resid_dropout: float = 0.05,
        shift: int = 1,
        bias: bool = False,
        pre_ln: bool = True,
        tie_weights: bool = True,
        init: Literal["paper", "gpt2"] = "paper",
    ) -> None:
        super().__init__()
        check_range("vocab_size", vocab_size, 1)
        check_range("num_layers", num_layers, 1)
        check_choice("init", init, ("paper", "gpt2"))
        self.vocab_size = vocab_size
        self.init = init
        self.logit_scale = 1 / math.sqrt(embed_dim) if init == "paper" else 1.0
        self.embed = nn.Embedding(vocab_size, embed_dim)
        self.blocks = nn.ModuleList(
            MemoryMosaicBlock(
                embed_dim,
                num_heads,
                memory_size,
                num_memories=num_memories,
                shift=shift,
                attn_dropout=attn_dropout,
                resid_dropout=resid_dropout,
                bias=bias,
                pre_ln=pre_ln,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_dim, bias=bias)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        if tie_weights:
            self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights."""
        std = None if self.init == "paper" else 0.02
        nn.init.normal_(self.embed.weight, std=std or 1.0)
        # Last, for a tied embedding: as the head of a linear layer it starts small, as in the authors' code.
        nn.init.normal_(self.head.weight, std=std or 1 / math.sqrt(self.embed.embedding_dim))
        for block in self.blocks:
            block.reset_parameters(len(self.blocks), std)

    def start_cache(self) -> list[tuple[MemoryCache, MemoryCache]]:
        """An empty cache for :meth:`forward`: with it a token costs what it looks up, not the text before it."""
        return [(MemoryCache(), MemoryCache()) for _ in self.blocks]

    def forward(self, input_ids: Tensor, cache: list[tuple[MemoryCache, MemoryCache]] | None = None) -> Tensor:
        """Logits of the next token.

        Args:
            input_ids: int64 [B, T].
            cache: of :meth:`start_cache`, with the tokens before these; brought up to date in place.

        Returns:
            [B, T, V].
        """
        x = self.embed(input_ids)
        for block, state in zip(self.blocks, cache or [None] * len(self.blocks), strict=True):
            x = block(x, state)
        return self.logit_scale * self.head(self.norm(x))


class _GPTBlock(nn.Module):
    """Pre-norm attention and GELU network."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout_p = dropout
        self.norm1 = nn.LayerNorm(embed_dim, bias=bias)
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.norm2 = nn.LayerNorm(embed_dim, bias=bias)
        self.fc1 = nn.Linear(embed_dim, 4 * embed_dim, bias=bias)
        self.fc2 = nn.Linear(4 * embed_dim, embed_dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(self.norm1(x)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        dropout_p = self.dropout_p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
        x = x + self.dropout(self.out_proj(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class GPTLM(_LanguageModel):
    """GPT-2 with learned positions: what the language model is compared with.

    Args:
        vocab_size: number of tokens V.
        embed_dim: width C.
        num_heads: attention heads.
        num_layers: blocks.
        block_size: longest text; :meth:`generate` looks at the last ``block_size`` tokens.
        dropout: of weights, embeddings and outputs.
        bias: whether projections and norms have biases.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int = 768,
        num_heads: int = 12,
        num_layers: int = 12,
        *,
        block_size: int = 512,
        dropout: float = 0.05,
        bias: bool = False,
    ) -> None:
        super().__init__()
        check_range("vocab_size", vocab_size, 1)
        check_range("num_layers", num_layers, 1)
        check_range("block_size", block_size, 1)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}.")
        self.block_size = block_size
        self.embed = nn.Embedding(vocab_size, embed_dim)
        self.positions = nn.Embedding(block_size, embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_GPTBlock(embed_dim, num_heads, dropout, bias) for _ in range(num_layers))
        self.norm = nn.LayerNorm(embed_dim, bias=bias)
        self.head = nn.Linear(embed_dim, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_residual = name.endswith(("out_proj.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if ends_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def window(self, input_ids: Tensor) -> Tensor:
        """The last ``block_size`` tokens."""
        return input_ids[:, -self.block_size :]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next token, int64 [B, T] -> [B, T, V].

        Raises:
            ValueError: a text longer than ``block_size``.
        """
        time = input_ids.shape[1]
        if time > self.block_size:
            raise ValueError(f"input_ids has {time} tokens, more than block_size {self.block_size}.")
        x = self.dropout(self.embed(input_ids) + self.positions.weight[:time])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ThreeMoonsMosaic(nn.Module):
    """One layer of contextual memories in its barest form, for sequences of vectors.

    Keys are projections (no average, no norm), values are projections of the next input, and all three matrices
    multiply complex numbers. With one head a memory must have seen the whole configuration before; with one head per
    moon each can be predicted as soon as its own period has passed.

    Source: Memory Mosaics, section on the three moons (authors' released code).

    Args:
        num_heads: memories H.
        head_dim: numbers per head D.
        input_dim: numbers in an input.
        score_scale: factor of the scores ``k_t . k_s``.
        complex_linear: keep the matrices complex-linear.

    Raises:
        ValueError: an argument out of range; odd sizes with ``complex_linear``.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        input_dim: int = 6,
        score_scale: float = 50.0,
        complex_linear: bool = True,
    ) -> None:
        super().__init__()
        check_range("num_heads", num_heads, 1)
        check_range("head_dim", head_dim, 1)
        check_range("score_scale", score_scale, 0, low_open=True)
        self.num_heads = num_heads
        self.score_scale = score_scale
        self.complex_linear = complex_linear
        self.key_proj = nn.Linear(input_dim, num_heads * head_dim, bias=False)
        self.value_proj = nn.Linear(input_dim, num_heads * head_dim, bias=False)
        self.out_proj = nn.Linear(num_heads * head_dim, input_dim, bias=False)
        if complex_linear:
            with torch.no_grad():
                for linear in self.children():
                    linear.weight.copy_(complex_linear_weight(linear.weight))

    def effective_weight(self, linear: nn.Linear) -> Tensor:
        """The matrix that is in use."""
        return complex_linear_weight(linear.weight) if self.complex_linear else linear.weight

    def _project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """[B, T, input_dim] -> [B, H, T, D]."""
        y = F.linear(x, self.effective_weight(linear))
        return y.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Prediction of the next input at every time, [B, T, input_dim]; 0 at the first."""
        keys = self._project(self.key_proj, x) * math.sqrt(self.score_scale)
        w = self._project(self.value_proj, x)
        values = peek_values(w, w.new_zeros(self.num_heads))
        y = contextual_retrieval(keys, values).transpose(1, 2).flatten(2)
        return F.linear(y, self.effective_weight(self.out_proj))

    @torch.no_grad()
    def generate(self, x: Tensor, steps: int) -> Tensor:
        """Go on with its own predictions.

        Args:
            x: [B, T, input_dim].
            steps: inputs to add.

        Returns:
            [B, T + steps, input_dim].
        """
        check_range("steps", steps, 0)
        for _ in range(steps):
            x = torch.cat([x, self(x)[:, -1:]], dim=1)
        return x
