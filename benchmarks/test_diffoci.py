"""The coefficients and FOCI against plain forms; memory by neighbours and by chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_methods.diffoci import codec, diffoci_coefficient, foci
from lightning_methods.diffoci.functional import rank_statistics


def rows_by_vmap(y: Tensor, z: Tensor, beta: float = 0.2) -> Tensor:
    """One softmax per row under vmap, with the diagonal taken out by an n x n mask."""
    n = len(y)
    r, upper = rank_statistics(y)
    masked = torch.cdist(z, z) + torch.eye(n, device=z.device) * 1e10

    def soft_rank(distances: Tensor) -> Tensor:
        weights = torch.exp(-(distances - distances.min()) / beta)
        return torch.dot(weights / weights.sum(), r)

    soft = torch.vmap(soft_rank)(masked)
    return (n * torch.minimum(r, soft) - upper.square()).sum() / (upper * (n - upper)).sum()


def rows_in_a_loop(y: Tensor, z: Tensor, beta: float = 0.2) -> Tensor:
    """One row after the other."""
    n = len(y)
    r, upper = rank_statistics(y)
    soft = []
    for i in range(n):
        distances = torch.linalg.vector_norm(z - z[i], dim=1)
        others = torch.arange(n, device=z.device) != i
        soft.append(torch.softmax(-distances[others] / beta, dim=0) @ r[others])
    return (n * torch.minimum(r, torch.stack(soft)) - upper.square()).sum() / (upper * (n - upper)).sum()


def problem(shape: dict[str, int], device: torch.device) -> tuple[Tensor, Tensor]:
    z = torch.randn(shape["n"], shape["dim"], device=device)
    return z[:, 0].sin() + 0.1 * torch.randn(shape["n"], device=device), z.requires_grad_()


@pytest.mark.shapes(small={"n": 512, "dim": 64}, large={"n": 2000, "dim": 64})
@pytest.mark.parametrize("form", [diffoci_coefficient, rows_by_vmap, rows_in_a_loop], ids=["ours", "vmap", "loop"])
def test_coefficient(forward_backward, shape: dict[str, int], form: Callable, device: torch.device):
    y, z = problem(shape, device)
    torch.testing.assert_close(form(y, z), diffoci_coefficient(y, z), rtol=1e-4, atol=1e-5)
    forward_backward(form, y, z)


@pytest.mark.shapes(small={"n": 2000, "dim": 16}, large={"n": 10_000, "dim": 16})
@pytest.mark.parametrize("num_neighbors", [10, 50, 200, None])
def test_memory_by_neighbors(forward_backward, shape: dict[str, int], num_neighbors: int | None, device: torch.device):
    y, z = problem(shape, device)
    forward_backward(diffoci_coefficient, y, z, num_neighbors=num_neighbors)


@pytest.mark.shapes(small={"n": 2000, "dim": 16}, large={"n": 10_000, "dim": 16})
@pytest.mark.parametrize("chunk_size", [256, 1024])
def test_memory_by_chunks(forward_backward, shape: dict[str, int], chunk_size: int, device: torch.device):
    y, z = problem(shape, device)
    forward_backward(diffoci_coefficient, y, z, chunk_size=chunk_size)


def codec_in_a_loop(y: Tensor, z: Tensor) -> Tensor:
    n = len(y)
    r, upper = (rank.double() for rank in rank_statistics(y))
    z = z.double()
    total = 0.0
    for i in range(n):
        distances = (z - z[i]).square().sum(dim=1)
        distances[i] = torch.inf
        total += torch.minimum(r[i], r[distances == distances.min()]).mean()
    return ((n * total - upper.square().sum()) / (upper * (n - upper)).sum()).to(torch.float32)


@pytest.mark.shapes(small={"n": 512, "dim": 16}, large={"n": 5000, "dim": 16})
@pytest.mark.parametrize("form", [codec, codec_in_a_loop], ids=["ours", "plain"])
def test_codec(measure, shape: dict[str, int], form: Callable, device: torch.device):
    y, z = problem(shape, device)
    z = z.detach()
    torch.testing.assert_close(form(y, z), codec(y, z))
    measure(lambda: form(y, z))


def foci_by_codec(y: Tensor, x: Tensor) -> list[int]:
    """Every candidate's coefficient from scratch."""
    x = x / x.std(dim=0)
    chosen: list[int] = []
    last = 0.0
    while True:
        rest = [j for j in range(x.shape[1]) if j not in chosen]
        values = [codec(y, x[:, [*chosen, j]]).item() for j in rest]
        if not rest or max(values) <= last:
            return chosen
        last = max(values)
        chosen.append(rest[values.index(last)])


def ours(y: Tensor, x: Tensor) -> list[int]:
    return foci(y, x).indices.tolist()


@pytest.mark.shapes(small={"n": 400, "dim": 10}, large={"n": 1000, "dim": 40})
@pytest.mark.parametrize("form", [ours, foci_by_codec])
def test_foci(measure, shape: dict[str, int], form: Callable, device: torch.device):
    x = torch.randn(shape["n"], shape["dim"], device=device)
    y = x[:, 0].sin() + x[:, 1].sin() + x[:, 2].sin()
    assert form(y, x)[:3] == ours(y, x)[:3]
    measure(lambda: form(y, x))
