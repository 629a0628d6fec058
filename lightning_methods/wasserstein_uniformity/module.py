"""The four methods that the paper adds W2 to; their home is :mod:`lightning_methods.ssl`, which others use too.

``regularizer=WassersteinUniformityLoss()`` is the paper's addition.
"""

from __future__ import annotations

from ..ssl.module import BYOL, BarlowTwins, MoCoV2, ZeroCL

__all__ = ["BYOL", "BarlowTwins", "MoCoV2", "ZeroCL"]
