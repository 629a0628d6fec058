"""The expansion of a linear layer against the same column by column, and of DeiT-S into DeiT-B as a whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor

from lightning_methods.lemon import expand_linear, expand_vit


def ours(weight: Tensor, bias: Tensor, free: Tensor) -> Tensor:
    return expand_linear(weight, bias, free, out_mode="average", in_mode="circular")[0]


def plain(weight: Tensor, bias: Tensor, free: Tensor) -> Tensor:
    """The rows as they are; the copies of every input in a loop."""
    (rows, columns), (old_rows, old_columns) = free.shape, weight.shape
    residue = weight.mean(dim=0, keepdim=True).expand(rows % old_rows, -1)
    grown = torch.cat([weight.repeat(rows // old_rows, 1), residue])
    result = free.clone()
    for k in range(old_columns):
        copies = torch.arange(k, columns, old_columns)
        result[:, copies] -= (free[:, copies].sum(dim=1, keepdim=True) - grown[:, k : k + 1]) / len(copies)
    return result


@pytest.mark.shapes(
    small={"old": (96, 384), "new": (160, 640)},
    deit_fc2={"old": (384, 1536), "new": (768, 3072)},
)
@pytest.mark.parametrize("form", [ours, plain], ids=["ours", "plain"])
def test_expand_linear(measure, shape: dict, form: Callable, device: torch.device):
    weight, free = torch.randn(*shape["old"], device=device), torch.randn(*shape["new"], device=device)
    bias = torch.randn(shape["old"][0], device=device)
    torch.testing.assert_close(ours(weight, bias, free), plain(weight, bias, free), rtol=1e-4, atol=1e-4)
    measure(lambda: form(weight, bias, free))


@pytest.mark.shapes(deit={"source": "deit_small_patch16_224", "target": "deit_base_patch16_224"})
def test_expand_vit(measure, shape: dict, device: torch.device):
    source, target = (timm.create_model(shape[name]).to(device) for name in ("source", "target"))
    measure(lambda: expand_vit(source, target))
