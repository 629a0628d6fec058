"""Random numbers that do not depend on what else has drawn any."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["make_generator"]


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
