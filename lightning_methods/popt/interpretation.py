"""Which channels hang together, and which ones a decision rests on.

The authors released no code for these maps; they follow the paper's description, the details are ours: see the card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.batches import PopTBatch
from ..core.checks import check_range, check_shape, values_visible
from ..core.losses import at_least_float32
from ..core.modes import evaluating
from .functional import attention_rollout, corrupt_channels
from .modules import PopulationTransformer

__all__ = [
    "channel_connectivity",
    "channel_correlation",
    "channel_importance",
    "channel_task_batch",
    "region_importance",
]


def _transformer(model: nn.Module) -> PopulationTransformer:
    """The transformer itself, out of a LightningModule that holds one as ``model``."""
    inner = getattr(model, "model", model)
    if not isinstance(inner, PopulationTransformer):
        raise ValueError(f"model must be a PopulationTransformer or hold one as .model, got {type(model).__name__}.")
    return inner


def channel_task_batch(batch: PopTBatch, p: float = 0.1, generator: torch.Generator | None = None) -> PopTBatch:
    """Pose the channel-wise task on decoding samples of one subject: swap some channels and score all of them.

    Replacements come from another sample of the batch and another channel.

    Args:
        batch: at least two samples without padding.
        p: probability with which a channel is replaced.
        generator: source of the random numbers, on the batch's device.

    Returns:
        The batch with changed ``x`` and a ``replace_label`` of 1 (replaced) or 2 (genuine) for every channel.

    Raises:
        ValueError: fewer than two samples or channels, or padding.
    """
    n, channels = batch.x.shape[:2]
    if n < 2 or channels < 2:
        raise ValueError(f"replacements need two samples and two channels, got {n} and {channels}.")
    if values_visible(batch.pad_mask) and batch.pad_mask.any():
        raise ValueError("the samples must be of one subject, without padding.")
    device = batch.x.device
    other = (torch.arange(n, device=device)[:, None] + _other(n, (n, channels), generator, device)) % n
    shift = _other(channels, (n, channels), generator, device)
    channel = (torch.arange(channels, device=device) + shift) % channels
    x, label = corrupt_channels(batch.x, batch.x[other, channel], p, "all", generator)
    return batch._replace(x=x, replace_label=label)


def _other(n: int, shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Random steps 1 .. n - 1 around a ring of n: never back to the start."""
    return torch.randint(1, n, shape, generator=generator, device=device)


def channel_connectivity(model: nn.Module, batch: Any, chunk_size: int = 16) -> Tensor:
    """How much the channel-wise task on one channel suffers when another channel is removed.

    For every channel a, the transformer sees the population without it; entry (a, b) is the increase of the
    channel-wise cross-entropy of b, mean over the samples in which b is scored. A large entry says that b is predicted
    from a.

    Args:
        model: a pretrained :class:`PopulationTransformer`, or a module that holds one as ``.model``.
        batch: samples of one subject with the same channels in the same order, no padding, at least two channels. Its
            ``replace_label`` says what is scored (:func:`channel_task_batch` scores everything); None scores all
            channels as genuine.
        chunk_size: removed channels at a time; memory grows with it, the result is the same.

    Returns:
        [S, S]: row = removed channel, column = channel whose loss increases; diagonal 0; nan where a channel is never
        scored.

    Raises:
        ValueError: one channel only, padding, or samples with different channels.
    """
    transformer = _transformer(model)
    check_range("chunk_size", chunk_size, 1)
    n, size = batch.x.shape[:2]
    if size < 2:
        raise ValueError("connectivity needs at least two channels.")
    if values_visible(batch.pad_mask) and batch.pad_mask.any():
        raise ValueError("connectivity needs samples of one subject; this batch has padding.")
    if values_visible(batch.coords) and (batch.coords != batch.coords[:1]).any():
        raise ValueError("connectivity needs the same channels in every sample; the coordinates of this batch differ.")
    label = torch.full_like(batch.seq_id, 2) if batch.replace_label is None else batch.replace_label
    target, scored = (label == 1).float(), (label > 0).float()

    def loss(removed: Tensor) -> Tensor:
        """Mean cross-entropy of every channel under masks of removed channels, [R, S] -> [R, S]."""
        rows = len(removed)
        expanded = [part.expand(rows, *part.shape).flatten(0, 1) for part in (batch.x, batch.coords, batch.seq_id)]
        output = transformer(*expanded, removed[:, None].expand(rows, n, size).flatten(0, 1))
        logit = at_least_float32(output.token_logit).view(rows, n, size)
        each = F.binary_cross_entropy_with_logits(logit, target.to(logit.dtype).expand_as(logit), reduction="none")
        return (each * scored).sum(dim=1) / scored.sum(dim=0)

    alone = torch.eye(size, dtype=torch.bool, device=batch.x.device)
    with evaluating(transformer):
        whole = loss(torch.zeros_like(alone[:1]))
        without = torch.cat([loss(removed) for removed in alone.split(chunk_size)])
    return (without - whole).masked_fill(alone, 0.0)


def channel_correlation(x: Tensor) -> Tensor:
    """How alike the activity of two channels is over time: what a learned connectivity is compared with.

    The RV coefficient, which for one-dimensional activity is the squared correlation:
    ``|Xa' Xb|^2 / (|Xa' Xa| |Xb' Xb|)`` with centred activity and Frobenius norms.

    Args:
        x: activity or embeddings of the channels at many times, [n, S, d].

    Returns:
        [S, S], symmetric, in [0, 1]; 0 for a channel that does not vary.

    Example:
        >>> channel_correlation(torch.tensor([[[1.0], [-2.0]], [[3.0], [-6.0]]]))
        tensor([[1., 1.],
                [1., 1.]])
    """
    check_shape("x", x, "times channels dim")
    x = at_least_float32(x)
    x = x - x.mean(dim=0)
    cross = torch.einsum("nad,nbe->abde", x, x).square().sum(dim=(2, 3))
    own = cross.diagonal()
    return cross / (own[:, None] * own).sqrt().clamp_min(torch.finfo(cross.dtype).tiny)


def channel_importance(model: nn.Module, batch: Any) -> Tensor:
    """How much of every channel reaches the [CLS] code: attention rollout.

    Args:
        model: a fine-tuned :class:`PopulationTransformer`, or a module that holds one as ``.model``.
        batch: samples with x, coords, seq_id and pad_mask.

    Returns:
        [B, S], non-negative, 0 at padding; what is missing to 1 is [CLS] itself.
    """
    transformer = _transformer(model)
    with evaluating(transformer):
        output = transformer(batch.x, batch.coords, batch.seq_id, batch.pad_mask, return_attention=True)
    return attention_rollout(output.attention)[:, 0, 1:]


def region_importance(importance: Tensor, regions: Sequence[str]) -> dict[str, float]:
    """Mean importance of the channels in every region of an atlas, for one subject.

    The mean over the samples, divided by that of the subject's strongest channel, so that subjects can be compared and
    averaged.

    Args:
        importance: [B, S] of :func:`channel_importance`, or [S].
        regions: region of each channel (e.g. Desikan-Killiany), S names.

    Returns:
        Mean of each region in [0, 1], by name, the most important first.

    Raises:
        ValueError: the number of regions differs, or the importance is not positive anywhere.

    Example:
        >>> region_importance(torch.tensor([[1.0, 4.0, 2.0]]), ["insula", "temporal", "temporal"])
        {'temporal': 0.75, 'insula': 0.25}
    """
    if importance.dim() == 1:
        importance = importance[None]
    size = check_shape("importance", importance, "batch channels")["channels"]
    if len(regions) != size:
        raise ValueError(f"regions must name the region of each of the {size} channels, got {len(regions)} names.")
    mean = importance.float().mean(dim=0)
    if not mean.max() > 0:
        raise ValueError("importance must be positive for at least one channel.")
    names = sorted(set(regions))
    index = torch.tensor([names.index(region) for region in regions], device=mean.device)
    total = torch.zeros(len(names), device=mean.device).index_add_(0, index, mean / mean.max())
    average = (total / torch.bincount(index, minlength=len(names))).tolist()
    return dict(sorted(zip(names, average, strict=True), key=lambda item: -item[1]))
