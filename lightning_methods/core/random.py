"""Random numbers that do not depend on what else has drawn any."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from .checks import check_range

__all__ = ["haar_orthogonal", "make_generator"]


def make_generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded by a hash of what it is for, e.g. ``make_generator(seed, "regions", step)``.

    Equal parts give equal numbers on every process, whatever was drawn before; leave the rank out for numbers that all
    ranks must share.

    Args:
        *parts: integers and strings.
        device: of the generator.

    Example:
        >>> first, again = (torch.rand(1, generator=make_generator(0, "step", 7)) for _ in range(2))
        >>> first == again
        tensor([True])
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def haar_orthogonal(
    rows: int,
    columns: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """A random matrix with orthonormal columns (rows, where there are fewer of them), uniform over all such matrices.

    QR decomposition of a Gaussian matrix; without fixing the signs of R's diagonal the result would not be uniform.

    Source: Mezzadri, "How to generate random matrices from the classical compact groups", 2007.

    Args:
        rows: number of rows.
        columns: number of columns.
        generator: source of the random numbers; drawn on its device.
        dtype: of the result.
        device: of the result.

    Returns:
        [rows, columns].

    Raises:
        ValueError: a size below 1.

    Example:
        >>> q = haar_orthogonal(5, 3, torch.Generator().manual_seed(0))
        >>> torch.allclose(q.T @ q, torch.eye(3), atol=1e-6)
        True
    """
    check_range("rows", rows, 1)
    check_range("columns", columns, 1)
    dtype = dtype or torch.get_default_dtype()
    source = generator.device if generator is not None else torch.device(device or "cpu")
    wide = torch.float32 if source.type == "mps" else torch.float64
    gaussian = torch.randn(max(rows, columns), min(rows, columns), generator=generator, dtype=wide, device=source)
    q, r = torch.linalg.qr(gaussian)
    diagonal = r.diagonal()
    q = q * torch.where(diagonal < 0, -1.0, 1.0).to(wide)
    return (q if rows >= columns else q.T).to(device=device or source, dtype=dtype)
