"""The mathematics of the Population Transformer: electrode positions, the two pretraining tasks, attention rollout.

Source: Chau, Wang, et al., "Population Transformer: Learning Population-level Representations of Neural Activity",
ICLR 2025 (PopT), and the authors' released code where the text leaves a choice.

Conventions: a sample holds S channels (electrodes) of one subject at one time; ``pad_mask`` is True at padding; a
replace label is 1 where a channel's activity was swapped for foreign activity, 2 where it is scored as genuine and 0
where it is not scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from ..core.checks import check_choice, check_range, check_shape, values_visible
from ..core.distributed import mean_over_ranks
from ..core.losses import at_least_float32

__all__ = [
    "attention_rollout",
    "corrupt_channels",
    "electrode_position_encoding",
    "lengths_to_pad_mask",
    "popt_pretraining_loss",
    "ramp_up_factor",
    "sample_ensembles",
    "sample_windows",
    "sinusoidal_table",
    "stft_features",
]


# positions


def sinusoidal_table(max_len: int, dim: int) -> Float[Tensor, "max_len dim"]:
    """Sines and cosines: ``P[p, 2i] = sin(p w_i)``, ``P[p, 2i+1] = cos(p w_i)``, ``w_i = 10000^(-2i/dim)``.

    Args:
        max_len: number of positions, at least 1.
        dim: width of a code, even.

    Returns:
        float32 [max_len, dim].

    Raises:
        ValueError: an odd width or no position.

    Example:
        >>> sinusoidal_table(2, 4)[1]
        tensor([0.8415, 0.5403, 0.0100, 0.9999])
    """
    check_range("max_len", max_len, 1)
    if dim < 2 or dim % 2:
        raise ValueError(f"dim must be a positive even number (sines and cosines in pairs), got {dim}.")
    frequency = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angle = torch.arange(max_len)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def check_positions(coords: Tensor, seq_id: Tensor, max_len: int) -> None:
    """Shapes of coordinates and ensemble ids, and that they index a table of ``max_len`` rows (values on the CPU).

    Raises:
        ValueError: another shape or dtype, or a value outside ``[0, max_len)``.
    """
    sizes = check_shape("coords", coords, "batch channels axes", axes=3)
    check_shape("seq_id", seq_id, "batch channels", batch=sizes["batch"], channels=sizes["channels"])
    for name, value in {"coords": coords, "seq_id": seq_id}.items():
        if value.is_floating_point() or value.dtype == torch.bool:
            raise ValueError(f"{name} must be integers (positions in a table), got dtype {value.dtype}.")
        if value.numel() and values_visible(value):
            low, high = int(value.min()), int(value.max())
            if low < 0 or high >= max_len:
                raise ValueError(
                    f"{name} must be in [0, {max_len}), the rows of the position table; they go from {low} to {high}. "
                    "Shift coordinates that can be negative (MNI: + 150) before they are used."
                )


def look_up_positions(
    table: Float[Tensor, "max_len quarter"],
    coords: Int[Tensor, "batch channels 3"],
    seq_id: Int[Tensor, "batch channels"],
) -> Float[Tensor, "batch tokens dim"]:
    """:func:`electrode_position_encoding` from a table that is already there; nothing is checked."""
    index = torch.cat([coords, seq_id[..., None]], dim=-1)
    index = F.pad(index, (0, 0, 1, 0))  # [CLS] is at position 0 of every part
    return table[index].flatten(2)


def electrode_position_encoding(
    coords: Int[Tensor, "batch channels 3"],
    seq_id: Int[Tensor, "batch channels"],
    dim: int,
    max_len: int = 5000,
) -> Float[Tensor, "batch tokens dim"]:
    """Code of every token: the sinusoidal codes of its three coordinates and of its ensemble, side by side.

    The [CLS] token, which comes first, is at position 0 in all four parts.

    Args:
        coords: integer coordinates of the electrodes, in ``[0, max_len)``.
        seq_id: the ensemble of every channel, 0 or 1.
        dim: width of a code, divisible by 8 (four parts of even width).
        max_len: number of positions.

    Returns:
        float32 [batch, 1 + channels, dim].

    Raises:
        ValueError: ``dim`` is not divisible by 8, shapes do not fit, or a position is outside the table.

    Example:
        >>> coords = torch.tensor([[[10, 20, 30], [40, 50, 60]]])
        >>> electrode_position_encoding(coords, torch.tensor([[0, 1]]), dim=16).shape
        torch.Size([1, 3, 16])
    """
    if dim < 8 or dim % 8:
        raise ValueError(f"dim must be divisible by 8 (four parts of even width), got {dim}.")
    check_positions(coords, seq_id, max_len)
    table = sinusoidal_table(max_len, dim // 4).to(coords.device)
    return look_up_positions(table, coords, seq_id)


def lengths_to_pad_mask(lengths: Int[Tensor, " batch"], max_len: int | None = None) -> Bool[Tensor, "batch max_len"]:
    """Mask of padding for samples that fill the first ``lengths`` places.

    Args:
        lengths: number of real entries of each sample.
        max_len: number of places; None for the longest sample.

    Returns:
        bool [batch, max_len], True = padding.

    Raises:
        ValueError: a negative length, or one above ``max_len``.

    Example:
        >>> lengths_to_pad_mask(torch.tensor([1, 3]))
        tensor([[False,  True,  True],
                [False, False, False]])
    """
    check_shape("lengths", lengths, "batch")
    if max_len is None:
        max_len = int(lengths.max()) if lengths.numel() else 0
    if lengths.numel() and values_visible(lengths) and ((lengths < 0) | (lengths > max_len)).any():
        raise ValueError(f"lengths must be in 0..{max_len}, got {lengths.tolist()}.")
    return torch.arange(max_len, device=lengths.device) >= lengths[:, None]


# pretraining samples


def sample_windows(
    index: Int[Tensor, " batch"], n_windows: int, generator: torch.Generator | None = None
) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """The other two windows of a pretraining sample.

    With probability 1/2 the second window is the one that follows (label 0), otherwise any window of the recording,
    which may by chance be the same or the next one (label 1). The third, where replacements come from, is any window.

    Args:
        index: the first window of every sample, in ``0 .. n_windows - 2``.
        n_windows: windows of the recording, at least 2.
        generator: source of the random numbers, on the device of ``index``.

    Returns:
        ``(second, third, label)``, [batch] each.

    Raises:
        ValueError: fewer than two windows, or an index without a next window.
    """
    check_range("n_windows", n_windows, 2)
    if index.numel() and values_visible(index) and ((index < 0) | (index > n_windows - 2)).any():
        raise ValueError(f"index must be in 0..{n_windows - 2}, so that there is a next window; got {index.tolist()}.")
    size, options = index.shape, {"generator": generator, "device": index.device}
    label = torch.randint(2, size, **options)
    anywhere = torch.randint(n_windows, size, **options)
    third = torch.randint(n_windows, size, **options)
    return torch.where(label == 0, index + 1, anywhere), third, label


def sample_ensembles(
    n_channels: int,
    sizes: Sequence[int],
    generator: torch.Generator | None = None,
    batch: int | None = None,
) -> tuple[Int[Tensor, "*batch first"], Int[Tensor, "*batch second"]]:
    """Two disjoint random sets of channels: one size is drawn, that many channels, and halved.

    Args:
        n_channels: channels of the subject, at least 2.
        sizes: numbers of channels to draw from, each at least 2; a size above ``n_channels`` takes all of them.
        generator: source of the random numbers; drawn on its device.
        batch: draw that many pairs of sets, all of one size; None for one pair without a leading dimension.

    Returns:
        Indices of the first and of the second ensemble, ascending, [N // 2] and [N - N // 2] for the size N.

    Raises:
        ValueError: fewer than two channels, no size, or a size below 2.

    Example:
        >>> a, b = sample_ensembles(8, [4], torch.Generator().manual_seed(0))
        >>> len(set(a.tolist()) | set(b.tolist()))
        4
    """
    check_range("n_channels", n_channels, 2)
    if not len(sizes) or min(sizes) < 2:
        raise ValueError(f"sizes must be numbers of channels of at least 2 (one per ensemble), got {list(sizes)}.")
    device = generator.device if generator is not None else None
    drawn = int(torch.randint(len(sizes), (), generator=generator, device=device))
    size = min(int(sizes[drawn]), n_channels)
    order = torch.rand(batch or 1, n_channels, generator=generator, device=device).argsort(dim=1)[:, :size]
    first, second = (part.sort(dim=1).values for part in order.split([size // 2, size - size // 2], dim=1))
    return (first[0], second[0]) if batch is None else (first, second)


def corrupt_channels(
    x: Shaped[Tensor, "*batch channels dim"],
    alternative: Shaped[Tensor, "*batch channels dim"],
    p: float = 0.1,
    scored: Literal["balanced", "all"] = "balanced",
    generator: torch.Generator | None = None,
) -> tuple[Shaped[Tensor, "*batch channels dim"], Int[Tensor, "*batch channels"]]:
    """Replace the activity of random channels, each for itself, and say which are scored.

    * "balanced" (the authors' code): replaced with probability p/2 (label 1); of the others p/2 are scored as genuine
      (label 2); the rest is not scored (label 0).
    * "all" (the paper's text): replaced with probability p (label 1), every other channel is genuine (label 2).

    Args:
        x: activity of the channels; any dtype (also indices of rows that are read afterwards).
        alternative: what replaces it, row by row: other times and other channels.
        p: in [0, 1].
        scored: which channels count.
        generator: source of the random numbers, on the device of ``x``.

    Returns:
        ``(new x, labels)``; ``x`` itself is left alone.

    Raises:
        ValueError: shapes or devices differ, p outside [0, 1], or an unknown ``scored``.

    Example:
        >>> new, label = corrupt_channels(torch.zeros(4, 2), torch.ones(4, 2), p=1.0, scored="all")
        >>> new.min().item(), label.tolist()
        (1.0, [1, 1, 1, 1])
    """
    if x.shape != alternative.shape or x.dim() < 2:
        raise ValueError(
            "x and alternative must have the same shape [..., channels, dim], "
            f"got {list(x.shape)} and {list(alternative.shape)}."
        )
    check_range("p", p, 0, 1)
    check_choice("scored", scored, ("balanced", "all"))
    options = {"generator": generator, "device": x.device}
    if scored == "all":
        replaced = torch.rand(x.shape[:-1], **options) < p
        label = torch.where(replaced, 1, 2)
    else:
        replaced = torch.rand(x.shape[:-1], **options) < p / 2
        kept = torch.rand(x.shape[:-1], **options) < p / 2
        label = torch.where(replaced, 1, torch.where(kept, 2, 0))
    return torch.where(replaced[..., None], alternative, x), label


# loss


def popt_pretraining_loss(
    cls_logit: Float[Tensor, "batch *one"],
    token_logit: Float[Tensor, "batch channels *one"],
    label: Shaped[Tensor, " batch"],
    replace_label: Int[Tensor, "batch channels"],
    ensemble_weight: float = 1.0,
    channel_weight: float = 1.0,
    global_token_mean: bool = True,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
    """Are the two ensembles consecutive, and which channels were replaced?

    The ensemble loss is the binary cross-entropy of "not consecutive" from [CLS], mean over the samples; the channel
    loss that of "replaced" over all scored channels (labels 1 and 2) of the batch, 0 if there are none.

    Args:
        cls_logit: logits of "not consecutive".
        token_logit: logits of "replaced".
        label: 0 for consecutive, 1 for random.
        replace_label: 1 replaced, 2 scored as genuine, 0 not scored (padding too).
        ensemble_weight: weight of the ensemble loss in the total.
        channel_weight: weight of the channel loss in the total.
        global_token_mean: with several processes the means are over the batches of all of them, so that every sample
            and every scored channel counts the same; False averages per process. No effect on one process.

    Returns:
        ``(total, ensemble, channel)``.

    Raises:
        ValueError: shapes do not fit, or a replace label is not 0, 1 or 2.

    Example:
        >>> zeros = torch.zeros(2, 3)
        >>> total, _, _ = popt_pretraining_loss(zeros[:, 0], zeros, torch.tensor([0, 1]), torch.tensor([[1, 2, 0]] * 2))
        >>> round(total.item(), 4)  # twice log 2
        1.3863
    """
    sizes = check_shape("replace_label", replace_label, "batch channels")
    cls_logit = cls_logit.squeeze(1) if cls_logit.dim() == 2 and cls_logit.shape[1] == 1 else cls_logit
    token_logit = token_logit.squeeze(2) if token_logit.dim() == 3 and token_logit.shape[2] == 1 else token_logit
    check_shape("cls_logit", cls_logit, "batch", batch=sizes["batch"])
    check_shape("token_logit", token_logit, "batch channels", **sizes)
    check_shape("label", label, "batch", batch=sizes["batch"])
    if values_visible(replace_label) and ((replace_label < 0) | (replace_label > 2)).any():
        wrong = replace_label[(replace_label < 0) | (replace_label > 2)]
        raise ValueError(f"replace_label must be 0 (not scored), 1 (replaced) or 2 (genuine), got {int(wrong[0])}.")

    cls_logit, token_logit = at_least_float32(cls_logit), at_least_float32(token_logit)
    each = F.binary_cross_entropy_with_logits(cls_logit, label.to(cls_logit.dtype), reduction="none")
    scored = replace_label > 0
    target = (replace_label == 1).to(token_logit.dtype)
    tokens = F.binary_cross_entropy_with_logits(token_logit, target, reduction="none")
    tokens = torch.where(scored, tokens, 0)  # not a product: what padding holds may be infinite
    if global_token_mean:
        ensemble = mean_over_ranks(each.sum(), torch.full_like(each, 1).sum())
        channel = mean_over_ranks(tokens.sum(), scored.sum())
    else:
        ensemble, channel = each.mean(), tokens.sum() / scored.sum().clamp_min(1)
    return ensemble_weight * ensemble + channel_weight * channel, ensemble, channel


# temporal features


def stft_features(
    signal: Float[Tensor, "channels samples"],
    sampling_rate: int = 2048,
    n_freq: int = 40,
    nperseg: int = 400,
    noverlap: int = 350,
    trim: int = 10,
) -> Float[Tensor, "channels frames n_freq"]:
    """Normalised spectrogram of every channel, the input of BrainBERT.

    Magnitudes of the short-time Fourier transform as ``scipy.signal.stft`` gives them (Hann window, zeros around the
    signal), the lowest bins, each bin standardised over time, and frames dropped at both ends, where the zeros show.

    Args:
        signal: voltages, at least ``nperseg`` samples.
        sampling_rate: samples per second. Only names the bins: bin b is at ``b * sampling_rate / nperseg`` Hz.
        n_freq: number of bins kept, the lowest.
        nperseg: samples in a window.
        noverlap: samples that neighbouring windows share.
        trim: frames dropped at each end.

    Returns:
        [channels, frames, n_freq]; bins that do not vary are 0.

    Raises:
        ValueError: the signal is shorter than a window, or too short for the trim; an option is out of range.

    Example:
        >>> stft_features(torch.randn(3, 2048)).shape
        torch.Size([3, 22, 40])
    """
    sizes = check_shape("signal", signal, "channels samples")
    check_range("sampling_rate", sampling_rate, 0, low_open=True)
    check_range("nperseg", nperseg, 2)
    check_range("noverlap", noverlap, 0, nperseg - 1)
    check_range("n_freq", n_freq, 1, nperseg // 2 + 1)
    check_range("trim", trim, 0)
    if sizes["samples"] < nperseg:
        raise ValueError(f"signal has {sizes['samples']} samples, fewer than the {nperseg} of a window (nperseg).")
    signal, hop, edge = at_least_float32(signal), nperseg - noverlap, nperseg // 2
    extended = sizes["samples"] + 2 * edge
    signal = F.pad(signal, (edge, edge + -(extended - nperseg) % hop))  # zeros around, and up to a whole frame
    window = torch.hann_window(nperseg, periodic=True, dtype=signal.dtype, device=signal.device)
    spectrum = torch.stft(
        signal, nperseg, hop_length=hop, window=window / window.sum(), center=False, return_complex=True
    )
    magnitude = spectrum[:, :n_freq].abs()
    frames = magnitude.shape[2] - 2 * trim
    if frames < 1:
        raise ValueError(
            f"signal of {sizes['samples']} samples gives {magnitude.shape[2]} frames; trim={trim} leaves none of them."
        )
    deviation = magnitude.std(dim=2, correction=0, keepdim=True)
    deviation = torch.where(deviation == 0, 1, deviation)
    scored = (magnitude - magnitude.mean(dim=2, keepdim=True)) / deviation
    return torch.nan_to_num(scored[:, :, trim : trim + frames], nan=0.0).transpose(1, 2)


# interpretation


def attention_rollout(
    attention: Sequence[Float[Tensor, "batch heads tokens tokens"]],
) -> Float[Tensor, "batch tokens tokens"]:
    """How much of every input token reaches every output token through all layers.

    The mean over the heads of each layer, half of it the residual connection, multiplied from the last layer to the
    first.

    Source: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020.

    Args:
        attention: attention weights of each layer, the first layer first.

    Returns:
        [batch, tokens, tokens]; rows sum to 1.

    Raises:
        ValueError: no layer, or layers of different shapes.

    Example:
        >>> attention_rollout([torch.full((1, 2, 2, 2), 0.5)])
        tensor([[[0.7500, 0.2500],
                 [0.2500, 0.7500]]])
    """
    if not len(attention):
        raise ValueError("attention must hold the weights of at least one layer, got none.")
    sizes = check_shape("attention[0]", attention[0], "batch heads rows columns")
    flow = None
    for layer, weights in enumerate(attention):
        check_shape(f"attention[{layer}]", weights, "batch heads rows columns", **{**sizes, "columns": sizes["rows"]})
        mixed = at_least_float32(weights).mean(dim=1)
        mixed = mixed + torch.eye(sizes["rows"], dtype=mixed.dtype, device=mixed.device)
        mixed = mixed / mixed.sum(dim=-1, keepdim=True)
        flow = mixed if flow is None else mixed @ flow
    return flow


# schedule


def ramp_up_factor(step: int, total_steps: int, warmup: float = 0.025, gamma: float = 0.99) -> float:
    """Factor on the learning rate: a line from 0 up to 1, then times ``gamma`` at each hundredth of what is left.

    With ``w = int(warmup * total_steps)``: ``step / w`` during the warm-up, afterwards
    ``gamma ** floor((step - w) / int((total_steps - w) / 100))``.

    Args:
        step: optimiser steps done.
        total_steps: length of the run, at least 1.
        warmup: share of the run, in [0, 1).
        gamma: in (0, 1].

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> [round(ramp_up_factor(step, 1000, 0.1, 0.5), 3) for step in (0, 50, 100, 109, 118)]
        [0.0, 0.5, 1.0, 0.5, 0.25]
    """
    check_range("step", step, 0)
    check_range("total_steps", total_steps, 1)
    check_range("warmup", warmup, 0, 1, high_open=True)
    check_range("gamma", gamma, 0, 1, low_open=True)
    ramp = int(warmup * total_steps)
    if step < ramp:
        return step / ramp
    return gamma ** ((step - ramp) // max(int((total_steps - ramp) / 100), 1))
