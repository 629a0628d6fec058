"""ModernNCA: chunks of keys against the whole matrix and against a loop over the rows; embeddings of the store kept
during an evaluation against computed for every batch; the pool of a training step against a search over all rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_methods.modern_nca import (
    ModernNCA,
    TabularBatch,
    TabularEncoder,
    rows_outside,
    sample_candidates,
    soft_nearest_neighbor_log_probs,
)

CLASSES = 10


def chunked(query: Tensor, keys: Tensor, labels: Tensor) -> Tensor:
    return soft_nearest_neighbor_log_probs(query, keys, labels, CLASSES, exclude_self=True, chunk_size=1024)


def full(query: Tensor, keys: Tensor, labels: Tensor) -> Tensor:
    return soft_nearest_neighbor_log_probs(query, keys, labels, CLASSES, exclude_self=True)


def loop(query: Tensor, keys: Tensor, labels: Tensor) -> Tensor:
    """Row by row."""
    one_hot = torch.nn.functional.one_hot(labels, CLASSES).to(query.dtype)
    rows = []
    for i, row in enumerate(query):
        distance = (keys - row).square().sum(dim=1).clamp_min(1e-20).sqrt()
        others = torch.arange(len(keys), device=keys.device) != i
        rows.append((-distance[others]).softmax(dim=0) @ one_hot[others])
    return (torch.stack(rows) + 1e-7).log()


@pytest.mark.shapes(
    small={"batch": 256, "rows": 1256, "dim": 128},
    paper={"batch": 1024, "rows": 3024, "dim": 128},
    large={"batch": 1024, "rows": 20000, "dim": 128},
)
@pytest.mark.parametrize("form", [chunked, full, loop], ids=["chunked", "full", "loop"])
def test_soft_nearest_neighbors(forward_backward, shape, form, device):
    if form is loop and shape["rows"] > 2000:
        pytest.skip("minutes")
    keys = torch.randn(shape["rows"], shape["dim"], device=device, requires_grad=True)
    query = keys.detach()[: shape["batch"]].clone().requires_grad_()
    labels = torch.randint(CLASSES, (shape["rows"],), device=device)
    torch.testing.assert_close(chunked(query, keys, labels), full(query, keys, labels), rtol=1e-3, atol=1e-3)
    if shape["rows"] < 2000:
        torch.testing.assert_close(loop(query, keys, labels), full(query, keys, labels), rtol=1e-3, atol=1e-3)
    forward_backward(form, query, keys, labels)


def model_of(shape: dict, device: torch.device) -> tuple[ModernNCA, Tensor, Tensor]:
    encoder = TabularEncoder(8, 2, dim=128, n_blocks=2, d_block=512)
    model = ModernNCA(encoder, 2, sample_rate=0.5).to(device)
    x = torch.randn(shape["rows"], 10, device=device)
    y = torch.randint(2, (shape["rows"],), device=device)
    model.set_candidates(x, y)
    model.log = lambda *args, **kwargs: None
    return model, x, y


@pytest.mark.shapes(paper={"rows": 5024, "batch": 1024})
@pytest.mark.parametrize("form", ["separate", "joint"])
def test_training_step(measure, shape, form, device):
    model, x, y = model_of(shape, device)
    model.joint_forward = form == "joint"
    index = torch.arange(shape["batch"], device=device)
    batch = TabularBatch(x[index], y[index], index)

    def step() -> None:
        torch.autograd.grad(model.training_step(batch, 0), list(model.parameters()))

    measure(step)


@pytest.mark.shapes(paper={"rows": 4000, "batches": 4, "batch": 256})
@pytest.mark.parametrize("form", ["cached", "recomputed"])
def test_evaluation(measure, shape, form, device):
    model, x, _ = model_of(shape, device)
    model.eval()
    batches = x[: shape["batches"] * shape["batch"]].split(shape["batch"])

    def recomputed() -> Tensor:
        return torch.cat([model(batch) for batch in batches])

    def cached() -> Tensor:
        with model.cached_candidates():
            return recomputed()

    with torch.no_grad():
        torch.testing.assert_close(cached(), recomputed())
        measure(cached if form == "cached" else recomputed)


def ours(n: int, index: Tensor) -> Tensor:
    return rows_outside(sample_candidates(n - len(index), 0.05, device=index.device), index)


def search(n: int, index: Tensor) -> Tensor:
    """Look every row up in the batch, then draw from those that are not there."""
    rows = torch.arange(n, device=index.device)
    pool = rows[~torch.isin(rows, index)]
    return pool[torch.randperm(len(pool), device=index.device)[: int(0.05 * len(pool))]]


@pytest.mark.shapes(small={"n": 10_000}, large={"n": 1_000_000})
@pytest.mark.parametrize("form", [ours, search], ids=["ours", "search"])
def test_sampling(measure, shape, form, device):
    index = torch.randperm(shape["n"], device=device)[:1024]
    for drawn in (ours(shape["n"], index), search(shape["n"], index)):
        assert len(drawn.unique()) == int(0.05 * (shape["n"] - 1024))
        assert not torch.isin(drawn, index).any()
    measure(lambda: form(shape["n"], index))
