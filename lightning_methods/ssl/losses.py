"""Losses on two views of a batch. Every function takes the global batch and averages over it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..core.checks import check_floating, check_range, check_shape
from ..core.contrastive import contrastive_log_probs
from ..core.losses import at_least_float32, float64_if_possible

__all__ = [
    "alignment_loss",
    "barlow_twins_loss",
    "byol_loss",
    "info_nce_queue_loss",
    "nt_xent_loss",
    "uniformity_loss",
    "zero_cl_loss",
]


def _pair(name_x: str, x: Tensor, name_y: str, y: Tensor) -> tuple[Tensor, Tensor]:
    """Check two matrices of one shape and give them in float32 or wider."""
    check_floating(name_x, x)
    check_floating(name_y, y)
    sizes = check_shape(name_x, x, "batch width")
    check_shape(name_y, y, "batch width", **sizes)
    if x.numel() == 0:
        raise ValueError(f"{name_x} must have at least one row and one column, got {list(x.shape)}.")
    return at_least_float32(x), at_least_float32(y)


def alignment_loss(
    x: Float[Tensor, "batch width"], y: Float[Tensor, "batch width"], alpha: float = 2.0, normalize: bool = True
) -> Float[Tensor, ""]:
    """Mean distance between the two views of each sample: ``mean_i ||x_i - y_i||^alpha``.

    Source: Wang & Isola, "Understanding Contrastive Representation Learning through Alignment and Uniformity on the
    Hypersphere", ICML 2020, section 4.1.

    Args:
        x: embeddings of the first view, [batch, width].
        y: embeddings of the second view, [batch, width].
        alpha: exponent, positive.
        normalize: scale the rows to unit norm first.

    Returns:
        A scalar; 0 when the views agree.

    Raises:
        ValueError: shapes differ, an input is empty or not floating point, or alpha is not positive.

    Example:
        >>> alignment_loss(torch.eye(2), torch.eye(2).flip(0))
        tensor(2.)
    """
    x, y = _pair("x", x, "y", y)
    check_range("alpha", alpha, 0, low_open=True)
    if normalize:
        x, y = F.normalize(x, dim=1), F.normalize(y, dim=1)
    squared = (x - y).square().sum(dim=1)
    if alpha == 2:
        return squared.mean()
    # The root has no slope at 0; equal views get the sub-gradient 0.
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1).pow(alpha / 2), 0).mean()


def uniformity_loss(
    z: Float[Tensor, "samples width"], t: float = 2.0, normalize: bool = True, chunk_size: int | None = None
) -> Float[Tensor, ""]:
    """Pairwise uniformity: ``log mean_{i<j} exp(-t ||z_i - z_j||^2)``.

    Source: Wang & Isola, ICML 2020, section 4.1.

    Args:
        z: embeddings, [samples, width].
        t: inverse width of the kernel, positive.
        normalize: scale the rows to unit norm first.
        chunk_size: rows at a time, for memory of ``chunk_size * samples`` (without gradient).

    Returns:
        A scalar, at most 0; lower is more uniform.

    Raises:
        ValueError: fewer than 2 samples, not a floating point matrix, t is not positive, or ``chunk_size`` is below 1.

    Example:
        >>> uniformity_loss(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        tensor(-8.)
    """
    check_floating("z", z)
    rows = check_shape("z", z, "samples width")["samples"]
    check_range("t", t, 0, low_open=True)
    if chunk_size is not None:
        check_range("chunk_size", chunk_size, 1)
    if rows < 2 or z.shape[1] < 1:
        raise ValueError(f"z must have at least 2 samples (pairs are compared) and 1 column, got {list(z.shape)}.")
    z = at_least_float32(z)
    if normalize:
        z = F.normalize(z, dim=1)
    z = z - z.detach().mean(dim=0)  # distances do not change, their rounding does
    norms = z.square().sum(dim=1)
    columns = torch.arange(rows, device=z.device)
    parts = []
    with torch.autocast(z.device.type, enabled=False):
        for index in columns.split(chunk_size or rows):
            squared = (norms[index, None] + norms - 2 * z[index] @ z.T).clamp_min(0)
            itself = index[:, None] == columns
            parts.append((-t * squared).masked_fill(itself, -torch.inf).flatten().logsumexp(dim=0))
    pairs = torch.as_tensor(float(rows) * (rows - 1), dtype=z.dtype, device=z.device)
    return torch.stack(parts).logsumexp(dim=0) - pairs.log()


def info_nce_queue_loss(
    q: Float[Tensor, "batch width"],
    k: Float[Tensor, "batch width"],
    queue: Float[Tensor, "negatives width"],
    temperature: float = 0.2,
) -> Float[Tensor, ""]:
    """InfoNCE with one positive key and a queue of negatives, one direction.

    ``mean_b -log( e^{q.k/T} / (e^{q.k/T} + sum_j e^{q.n_j/T}) )``.

    Source: He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", CVPR 2020, equation (1).

    Args:
        q: queries of unit norm, [batch, width].
        k: keys of the same samples, unit norm, [batch, width].
        queue: negatives of unit norm, [negatives, width].
        temperature: T, positive.

    Returns:
        A scalar.

    Raises:
        ValueError: shapes do not fit or the temperature is not positive.
    """
    q, k = _pair("q", q, "k", k)
    check_shape("queue", queue, "negatives width", width=q.shape[1])
    check_range("temperature", temperature, 0, low_open=True)
    with torch.autocast(q.device.type, enabled=False):
        positive = (q * k).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, q @ queue.to(q.dtype).T], dim=1) / temperature
        return -contrastive_log_probs(logits)[:, 0].mean()


def nt_xent_loss(
    z1: Float[Tensor, "batch width"], z2: Float[Tensor, "batch width"], temperature: float = 0.2
) -> Float[Tensor, ""]:
    """SimCLR's loss: each of the 2B embeddings has to find its partner among the other 2B - 1.

    Source: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020, equation
        (1).

    Args:
        z1: embeddings of the first view, any norm, [batch, width].
        z2: embeddings of the second view, [batch, width].
        temperature: of the cosines, positive.

    Returns:
        A scalar, the mean over both directions.

    Raises:
        ValueError: shapes differ or the temperature is not positive.
    """
    z1, z2 = _pair("z1", z1, "z2", z2)
    check_range("temperature", temperature, 0, low_open=True)
    rows = z1.shape[0]
    with torch.autocast(z1.device.type, enabled=False):
        z = F.normalize(torch.cat([z1, z2]), dim=1)
        index = torch.arange(2 * rows, device=z.device)
        log_probs = contrastive_log_probs(z @ z.T / temperature, exclude=index[:, None] == index)
        return -log_probs[index, index.roll(rows)].mean()


def byol_loss(
    p1: Float[Tensor, "batch width"],
    p2: Float[Tensor, "batch width"],
    z1: Float[Tensor, "batch width"],
    z2: Float[Tensor, "batch width"],
) -> Float[Tensor, ""]:
    """Both directions of BYOL: ``2 (1 - mean cos(z1, p2)) + 2 (1 - mean cos(z2, p1))``.

    Source: Grill et al., "Bootstrap your own latent", NeurIPS 2020, equation (2), in both directions.

    Args:
        p1: the online predictor's output for the first view, [batch, width].
        p2: the same for the second view.
        z1: the target projector's output for the first view; no gradient flows into it.
        z2: the same for the second view.

    Returns:
        A scalar in [0, 8].

    Raises:
        ValueError: shapes differ.
    """
    p1, p2 = _pair("p1", p1, "p2", p2)
    p1, z1 = _pair("p1", p1, "z1", z1.detach())
    p1, z2 = _pair("p1", p1, "z2", z2.detach())
    return 4 - 2 * F.cosine_similarity(z1, p2, dim=1).mean() - 2 * F.cosine_similarity(z2, p1, dim=1).mean()


def barlow_twins_loss(
    z1: Float[Tensor, "batch width"], z2: Float[Tensor, "batch width"], lambd: float = 0.08, eps: float = 1e-5
) -> Float[Tensor, ""]:
    """Make the cross-correlation of the views the identity: ``sum_i (c_ii - 1)^2 + lambd sum_{i != j} c_ij^2``.

    c is the mean product of the columns standardised over the batch (a batch norm without scale and shift).

    Source: Zbontar et al., "Barlow Twins", ICML 2021, equations (1) and (2).

    Args:
        z1: embeddings of the first view, [batch, width].
        z2: embeddings of the second view, [batch, width].
        lambd: weight of the off-diagonal terms, non-negative.
        eps: added to the (biased) variances.

    Returns:
        A scalar.

    Raises:
        ValueError: shapes differ, fewer than 2 rows, or lambd is negative.
    """
    z1, z2 = _pair("z1", z1, "z2", z2)
    check_range("lambd", lambd, 0)
    check_range("eps", eps, 0)
    if z1.shape[0] < 2:
        raise ValueError(f"z1 must have at least 2 rows (columns are standardised over them), got {list(z1.shape)}.")
    with torch.autocast(z1.device.type, enabled=False):
        h1, h2 = (F.batch_norm(z, None, None, training=True, eps=eps) for z in (z1, z2))
        c = h1.T @ h2 / z1.shape[0]
        diagonal = c.diagonal()
        on = (diagonal - 1).square().sum()
        return on + lambd * (c.square().sum() - diagonal.square().sum())


class _InverseRoot(torch.autograd.Function):
    """``C^{-1/2}`` of a symmetric positive matrix.

    The gradient is taken through the matrix function (Daleckii-Krein) and not through eigenvectors: with s =
    sqrt(lambda), the divided difference of ``lambda^{-1/2}`` is ``-1 / (s_i s_j (s_i + s_j))``, finite also where
    eigenvalues are equal.
    """

    @staticmethod
    def forward(ctx, matrix: Tensor) -> Tensor:
        eigenvalues, vectors = torch.linalg.eigh(matrix)
        roots = eigenvalues.clamp_min(torch.finfo(matrix.dtype).tiny).sqrt()
        ctx.save_for_backward(roots, vectors)
        return (vectors / roots) @ vectors.T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        roots, vectors = ctx.saved_tensors
        inner = vectors.T @ (grad + grad.T) @ vectors / 2
        kernel = torch.outer(roots, roots) * (roots[:, None] + roots)
        return -vectors @ (inner / kernel) @ vectors.T


def _whiten(z: Tensor, eps: float) -> Tensor:
    """ZCA: columns centred and decorrelated, ``Zc (Zc^T Zc / n + eps I)^{-1/2}`` for n rows."""
    centred = z - z.mean(dim=0)
    identity = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    return centred @ _InverseRoot.apply(centred.T @ centred / z.shape[0] + eps * identity)


def zero_cl_loss(
    z1: Float[Tensor, "batch width"], z2: Float[Tensor, "batch width"], eps: float = 1e-4
) -> Float[Tensor, ""]:
    """Align the whitened views, over features and over instances.

    With H the ZCA-whitened embeddings of a view: ``-mean_j (H1^T H2 / batch)_jj`` with whitened columns, plus
    ``-mean_i (H1 H2^T / width)_ii`` with whitened rows.

    Source: Zhang et al., "Zero-CL: Instance and Feature decorrelation for negative-free symmetric contrastive
    learning", ICLR 2022. Reconstructed from the paper's description; there is no authors' code to compare with.

    Args:
        z1: embeddings of the first view, [batch, width].
        z2: embeddings of the second view, [batch, width].
        eps: added to the diagonals of both covariances, positive.

    Returns:
        A scalar, at least -2.

    Raises:
        ValueError: shapes differ or ``eps`` is not positive.
    """
    z1, z2 = _pair("z1", z1, "z2", z2)
    check_range("eps", eps, 0, low_open=True)
    with torch.autocast(z1.device.type, enabled=False):
        # One of the two covariances never has full rank: inverse roots down to eps need double precision.
        w1, w2 = float64_if_possible(z1), float64_if_possible(z2)
        feature = -(_whiten(w1, eps) * _whiten(w2, eps)).mean()
        instance = -(_whiten(w1.T, eps) * _whiten(w2.T, eps)).mean()
        return (feature + instance).to(z1.dtype)
