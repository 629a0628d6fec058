"""Memory Mosaics: the chunked scan against the matrix of weights, a block against the plain form, generation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_methods.memory_mosaics import GPTLM, MemoryMosaicLM, leaky_average, peek_values, unit_norm

SHAPES = {
    "small": {"batch": 4, "heads": 4, "time": 256, "dim": 32},
    "long": {"batch": 4, "heads": 4, "time": 2048, "dim": 32},
}


def scan(x: Tensor, decay: Tensor) -> Tensor:
    return leaky_average(x, decay, method="scan")


def matrix(x: Tensor, decay: Tensor) -> Tensor:
    return leaky_average(x, decay, method="matrix")


def recurrence(x: Tensor, decay: Tensor) -> Tensor:
    leak, total, rows = torch.exp(-decay)[:, None], torch.zeros_like(x[:, :, 0]), []
    for t in range(x.shape[2]):
        total = leak * total + x[:, :, t]
        rows.append(total)
    return torch.stack(rows, dim=2) * (1 - leak)[:, None]


@pytest.mark.shapes(**SHAPES)
@pytest.mark.parametrize("form", [scan, matrix, recurrence], ids=["scan", "matrix", "recurrence"])
def test_leaky_average(forward_backward, shape, form, device):
    x = torch.randn(shape["batch"], shape["heads"], shape["time"], shape["dim"], device=device, requires_grad=True)
    decay = torch.linspace(0.5, 5, shape["heads"], device=device, requires_grad=True)
    forward_backward(form, x, decay)


class PlainMosaic(torch.nn.Module):
    """The same function with a [time, time] matrix for every average and every mask, as its formulas stand."""

    def __init__(self, model: MemoryMosaicLM) -> None:
        super().__init__()
        self.model = model

    def keys(self, memory: torch.nn.Module, x: Tensor, power: int) -> Tensor:
        u = memory.key_proj(x).unflatten(2, (memory.num_heads, -1)).transpose(1, 2)
        time = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        lag = (time[:, None] - time).clamp_min(0)
        decay = 10 * memory.key_decay.abs()
        weights = torch.exp(-decay[:, None, None] * lag) * (1 - torch.exp(-decay))[:, None, None]
        weights = weights.masked_fill(time[:, None] < time, 0)
        average = weights.expand(len(x), -1, -1, -1) @ u
        return unit_norm(average) * torch.exp(power * (10 * memory.key_scale).clamp_max(5))[:, None, None]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids)
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu()
        for block in self.model.blocks:
            memory, normed = block.contextual, block.norm1(x)
            keys = self.keys(memory, normed, 1)
            w = memory.value_proj(normed).unflatten(2, (memory.num_heads, -1)).transpose(1, 2)
            values = unit_norm(peek_values(w, memory.value_mix)) * torch.exp(10 * memory.value_scale)[:, None, None]
            weights = (keys @ keys.transpose(2, 3)).masked_fill(future, -torch.inf)
            y = torch.cat([torch.zeros_like(keys[:, :, :1]), weights[:, :, 1:].softmax(dim=3) @ values], dim=2)
            x = x + memory.out_proj(y.transpose(1, 2).flatten(2))
            pairs, normed = block.persistent, block.norm2(x)
            weights = (self.keys(pairs, normed, 2) @ pairs.mem_keys[0].transpose(1, 2)).softmax(dim=3)
            y = weights @ pairs.mem_values[0] * torch.exp(10 * pairs.out_scale)[:, None, None]
            x = x + pairs.out_proj(y.transpose(1, 2).flatten(2))
        return self.model.logit_scale * self.model.head(self.model.norm(x))


def sizes() -> dict[str, int]:
    return {"vocab_size": 1000, "embed_dim": 128, "num_heads": 4, "num_layers": 2}


def language_model(kind: str, time: int) -> torch.nn.Module:
    if kind == "gpt":
        return GPTLM(**sizes(), block_size=time, dropout=0)
    model = MemoryMosaicLM(**sizes(), memory_size=448, attn_dropout=0, resid_dropout=0)
    return model if kind == "ours" else PlainMosaic(model)


@pytest.mark.shapes(t256={"time": 256}, t512={"time": 512}, t2048={"time": 2048})
@pytest.mark.parametrize("form", ["ours", "plain", "gpt"])
def test_language_model_step(forward_backward, shape, form, device):
    model = language_model(form, shape["time"]).to(device)
    ids = torch.randint(1000, (4, shape["time"]), device=device)

    def step(*parameters: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())

    forward_backward(step, *model.parameters())


class Uncached(MemoryMosaicLM):
    """Generation that runs the whole text for every token."""

    def start_cache(self) -> None:
        return None


@pytest.mark.shapes(t64={"new": 64}, t256={"new": 256})
@pytest.mark.parametrize("form", [MemoryMosaicLM, Uncached], ids=["cached", "uncached"])
def test_generation(measure, shape, form, device):
    model = form(**sizes(), memory_size=448).to(device)
    ids = torch.randint(1000, (4, 16), device=device)
    measure(lambda: model.generate(ids, shape["new"]))
