"""Memory Mosaics: leaky averages, peeking values and associative retrieval, as tensor functions.

Symbols: B sequences, H heads, T times, D numbers per head; lambda is the decay of a head, ``k_t`` its keys, ``v_t`` its
values, S the pairs that a persistent memory stores.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ..core.checks import check_choice, check_floating, check_range, check_shape, values_visible
from ..core.losses import at_least_float32

__all__ = [
    "complex_linear_weight",
    "contextual_retrieval",
    "leaky_average",
    "peek_values",
    "persistent_retrieval",
    "regular_language_accuracy",
    "total_variation",
    "unit_norm",
]

METHODS = ("auto", "matrix", "scan")
CHUNK = 64


# keys and values


def _decay_weights(decay: Tensor, steps: Tensor) -> Tensor:
    """``exp(-lambda * steps)``, and 0 where steps are negative: [H, *steps.shape]."""
    # The exponent is clamped before exp, not masked behind it: exp of a large number would be inf * 0 in the gradient.
    powers = torch.exp(-decay.view(-1, *[1] * steps.dim()) * steps.clamp_min(0))
    return powers.masked_fill(steps < 0, 0)


def _lags(length: int, like: Tensor) -> Tensor:
    """t - s for all pairs of times, [length, length]."""
    time = torch.arange(length, device=like.device, dtype=like.dtype)
    return time[:, None] - time


def _scan(x: Tensor, decay: Tensor, chunk: int) -> Tensor:
    """The sums ``m_t = e^-lambda m_{t-1} + x_t``: within chunks, and what earlier chunks leave; a product each."""
    batch, heads, length, dim = x.shape
    chunks = -(-length // chunk)
    x = F.pad(x, (0, 0, 0, chunks * chunk - length)).view(batch, heads, chunks, chunk, dim)
    inside = _decay_weights(decay, _lags(chunk, x))[:, None] @ x
    ends = inside[:, :, :, -1]
    # Chunk c is entered by m at the end of chunk c - 1, which is the sum over c' < c of e^(-lambda chunk (c - 1 - c')).
    entering = _decay_weights(decay, (_lags(chunks, x) - 1) * chunk) @ ends
    leak = _decay_weights(decay, torch.arange(1, chunk + 1, device=x.device, dtype=x.dtype))
    total = inside + leak[:, None, :, None] * entering[:, :, :, None]
    return total.view(batch, heads, chunks * chunk, dim)[:, :, :length]


def leaky_average(
    x: Float[Tensor, "batch heads time dim"],
    decay: Float[Tensor, " heads"],
    *,
    normalize: bool = True,
    method: Literal["auto", "matrix", "scan"] = "auto",
) -> Float[Tensor, "batch heads time dim"]:
    """Causal exponential average ``(1 - e^-lambda) sum_{s <= t} e^{-lambda (t - s)} x_s``, in float32 or wider.

    Source: Zhang et al., "Memory Mosaics", ICLR 2025, equation of the keys; the authors' released code.

    Args:
        x: [batch, heads, time, dim].
        decay: lambda of each head, at least 0.
        normalize: multiply by ``1 - e^-lambda``. A head with lambda = 0 sums without decay; its factor is then 1.
        method: "matrix" multiplies with the [time, time] weights of each head; "scan" goes by chunks of 64 times, with
            memory and work linear in time; "auto" takes the matrix for a single chunk.

    Returns:
        [batch, heads, time, dim].

    Raises:
        ValueError: shapes that do not fit, a negative decay (looked at on the CPU only), or an unknown method.

    Example:
        >>> leaky_average(torch.ones(1, 1, 3, 1), torch.tensor([0.6931]), normalize=False).flatten()
        tensor([1.0000, 1.5000, 1.7500])
    """
    sizes = check_shape("x", x, "batch heads time dim")
    check_floating("x", x)
    check_shape("decay", decay, "heads", heads=sizes["heads"])
    check_choice("method", method, METHODS)
    if values_visible(decay) and bool((decay < 0).any()):
        raise ValueError(f"decay must be at least 0, got {decay.detach().min().item():.3g}.")
    x = at_least_float32(x)
    decay = decay.to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        if method == "matrix" or (method == "auto" and sizes["time"] <= CHUNK):
            total = _decay_weights(decay, _lags(sizes["time"], x)) @ x
        else:
            total = _scan(x, decay, CHUNK)
        return total * leak_factor(decay)[:, None, None] if normalize else total


def leak_factor(decay: Tensor) -> Tensor:
    """``1 - e^-lambda``, the inverse of the weights' sum; 1 without decay, where there is no such sum."""
    return torch.where(decay > 0, -torch.expm1(-decay), 1.0)


def carry_average(average: Tensor, before: Tensor, decay: Tensor) -> Tensor:
    """Add what the average had reached before the first of these times.

    Args:
        average: :func:`leaky_average` of the new times alone, [B, H, T, D].
        before: its value one step earlier, [B, H, D].
        decay: lambda, [H].
    """
    steps = torch.arange(1, average.shape[2] + 1, device=average.device, dtype=average.dtype)
    return average + _decay_weights(decay.to(average.dtype), steps)[..., None] * before[:, :, None]


def peek_values(
    v: Float[Tensor, "batch heads time dim"], mix: Float[Tensor, " heads"], shift: int = 1
) -> Float[Tensor, "batch heads time dim"]:
    """Values that look ahead: ``(1 - c) v_{t + shift} + c v_t``, with zeros behind the end.

    Source: Memory Mosaics, equation of the values.

    Args:
        v: [batch, heads, time, dim].
        mix: c of each head, any number.
        shift: how far ahead, at least 1.

    Returns:
        [batch, heads, time, dim].

    Raises:
        ValueError: shapes that do not fit, or a shift below 1.

    Example:
        >>> peek_values(torch.tensor([1.0, 2.0, 4.0]).view(1, 1, 3, 1), torch.tensor([0.0])).flatten()
        tensor([2., 4., 0.])
    """
    sizes = check_shape("v", v, "batch heads time dim")
    check_shape("mix", mix, "heads", heads=sizes["heads"])
    check_range("shift", shift, 1)
    ahead = F.pad(v[:, :, shift:], (0, 0, 0, min(shift, sizes["time"])))
    c = mix[:, None, None]
    return (1 - c) * ahead + c * v


def unit_norm(x: Tensor, eps: float = 1e-6, dim: int = -1) -> Tensor:
    """``x / max(||x||, eps)`` in float32 or wider. Zero stays zero, and its gradient is finite.

    Args:
        x: any shape.
        eps: smallest divisor.
        dim: dimension of the vectors.
    """
    x = at_least_float32(x)
    return x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(eps)


# retrieval


def contextual_retrieval(
    keys: Float[Tensor, "batch heads time dim"],
    values: Float[Tensor, "batch heads time dim"],
    *,
    shift: int = 1,
    dropout_p: float = 0.0,
) -> Float[Tensor, "batch heads time dim"]:
    """Kernel regression on the past: ``y_t = sum_{s <= t - shift} softmax_s(k_t . k_s) v_s``.

    The values peek ``shift`` steps ahead, so a query may not see the last ``shift`` of them: the mask is strict. Keys
    and values are moved against each other by ``shift`` and ordinary causal attention does the rest, without a mask in
    memory. No factor ``1 / sqrt(dim)``.

    Source: Memory Mosaics, contextual memory.

    Args:
        keys: scaled keys, which are the queries too, [batch, heads, time, dim].
        values: [batch, heads, time, dim].
        shift: how far the values peek ahead, at least 1.
        dropout_p: dropout of the weights; pass 0 in evaluation.

    Returns:
        [batch, heads, time, dim]; the first ``shift`` rows have nothing to look at and are 0.

    Raises:
        ValueError: shapes that differ, or a shift below 1.
    """
    sizes = check_shape("keys", keys, "batch heads time dim")
    check_shape("values", values, "batch heads time dim", **sizes)
    check_range("shift", shift, 1)
    if sizes["time"] <= shift:
        return torch.zeros_like(values)
    found = F.scaled_dot_product_attention(
        keys[:, :, shift:],
        keys[:, :, :-shift],
        values[:, :, :-shift],
        dropout_p=dropout_p,
        is_causal=True,
        scale=1.0,
    )
    return F.pad(found, (0, 0, shift, 0))


def persistent_retrieval(
    keys: Float[Tensor, "batch heads time dim"],
    mem_keys: Float[Tensor, "memories heads size dim"],
    mem_values: Float[Tensor, "memories heads size dim"],
    *,
    dropout_p: float = 0.0,
) -> Float[Tensor, "batch heads time dim"]:
    """Look up learned pairs: ``y_t = mean_n sum_j softmax_j(k_t . K_{n,j}) V_{n,j}``.

    All sequences and times are queries of one attention per memory and head; nothing is copied for the batch.

    Source: Memory Mosaics, persistent memory.

    Args:
        keys: scaled keys, [batch, heads, time, dim].
        mem_keys: learned keys, used as they are, [memories, heads, size, dim].
        mem_values: learned values, [memories, heads, size, dim].
        dropout_p: dropout of the weights; pass 0 in evaluation.

    Returns:
        [batch, heads, time, dim].

    Raises:
        ValueError: shapes that do not fit.
    """
    sizes = check_shape("keys", keys, "batch heads time dim")
    stored = check_shape("mem_keys", mem_keys, "memories heads size dim", heads=sizes["heads"], dim=sizes["dim"])
    check_shape("mem_values", mem_values, "memories heads size dim", **stored)
    queries = keys.transpose(0, 1).flatten(1, 2).expand(stored["memories"], -1, -1, -1)
    found = F.scaled_dot_product_attention(
        queries, mem_keys.to(keys.dtype), mem_values.to(keys.dtype), dropout_p=dropout_p, scale=1.0
    ).mean(dim=0)
    return found.unflatten(1, (sizes["batch"], sizes["time"])).transpose(0, 1)


def complex_linear_weight(weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """The nearest weight that multiplies pairs of numbers as complex numbers.

    Every 2 x 2 block ``[[a, b], [c, d]]`` becomes ``[[p, q], [-q, p]]`` with p = (a + d) / 2 and q = (b - c) / 2.

    Source: Memory Mosaics, the three-moons experiment (authors' released code).

    Args:
        weight: [2 R, 2 C].

    Returns:
        [2 R, 2 C]; applied twice it is the same.

    Raises:
        ValueError: an odd size.

    Example:
        >>> complex_linear_weight(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
        tensor([[ 2.,  1.],
                [-1.,  2.]])
    """
    rows, columns = check_shape("weight", weight, "rows columns").values()
    if rows % 2 or columns % 2:
        raise ValueError(f"weight must have even sizes (pairs of numbers), got {list(weight.shape)}.")
    a, b, c, d = weight.view(rows // 2, 2, columns // 2, 2).permute(1, 3, 0, 2).flatten(0, 1)
    p, q = (a + d) / 2, (b - c) / 2
    return torch.stack([torch.stack([p, q], dim=-1), torch.stack([-q, p], dim=-1)], dim=1).view(rows, columns)


# in-context regular languages


def _scored_mean(values: Tensor, scored_mask: Tensor) -> Tensor:
    """Mean where the mask is True; nan if it is nowhere."""
    return values.masked_fill(~scored_mask, 0).sum() / scored_mask.sum()


def regular_language_accuracy(
    logits: Float[Tensor, "batch time vocab"],
    legal_mask: Bool[Tensor, "batch time vocab"],
    scored_mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, ""]:
    """Share of the scored positions at which the most probable next symbol is a legal one.

    Source: Akyurek et al., "In-Context Language Learning: Architectures and Algorithms", ICML 2024 (RegBench).

    Args:
        logits: of the next symbol, [batch, time, vocab].
        legal_mask: which symbols may come next, [batch, time, vocab].
        scored_mask: positions that count, [batch, time].

    Returns:
        A scalar in [0, 1]; nan if no position counts.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> legal = torch.tensor([[[True, False], [True, False]]])
        >>> regular_language_accuracy(torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]), legal, torch.ones(1, 2).bool())
        tensor(0.5000)
    """
    sizes = check_shape("logits", logits, "batch time vocab")
    check_shape("legal_mask", legal_mask, "batch time vocab", **sizes)
    check_shape("scored_mask", scored_mask, "batch time", batch=sizes["batch"], time=sizes["time"])
    best = logits.argmax(dim=-1, keepdim=True)
    return _scored_mean(legal_mask.gather(2, best).squeeze(2).float(), scored_mask)


def total_variation(
    logits: Float[Tensor, "batch time vocab"],
    true_probs: Float[Tensor, "batch time vocab"],
    scored_mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, ""]:
    """Mean total variation distance ``sum_v |p(v) - q(v)| / 2`` of predicted and true next-symbol probabilities.

    Args:
        logits: of the next symbol, [batch, time, vocab].
        true_probs: [batch, time, vocab].
        scored_mask: positions that count, [batch, time].

    Returns:
        A scalar in [0, 1]; nan if no position counts.

    Raises:
        ValueError: shapes that do not fit.
    """
    sizes = check_shape("logits", logits, "batch time vocab")
    check_shape("true_probs", true_probs, "batch time vocab", **sizes)
    check_shape("scored_mask", scored_mask, "batch time", batch=sizes["batch"], time=sizes["time"])
    gap = (at_least_float32(logits).softmax(dim=-1) - true_probs).abs().sum(dim=-1) / 2
    return _scored_mean(gap, scored_mask)
