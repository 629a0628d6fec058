"""Collectives: identities on one process; on two, the values and the gradients of one process with everything."""

from __future__ import annotations

import torch

from lightning_methods.core import distributed
from tests.ddp import assert_two_processes_agree, run_two_processes


def test_identities_on_one_process():
    x = torch.randn(3, 2, requires_grad=True)
    assert distributed.gather(x) is x
    assert not distributed.gather(x, grad=False).requires_grad
    assert distributed.sum_over_ranks(x) is x
    assert distributed.gather_slice(x, 3) is x
    assert distributed.mean_over_ranks(torch.tensor(6.0), torch.tensor(3)) == 2
    assert distributed.mean_over_ranks(torch.tensor(0.0), torch.tensor(0)) == 0
    assert (distributed.world_size(), distributed.rank()) == (1, 0)


def _collectives(rank: int, world: int) -> dict:
    rows = 3 - rank  # unequal
    x = torch.arange(rows, dtype=torch.float32)[:, None] + 10 * rank
    everything = distributed.gather(x)
    return {
        "gathered": everything,
        "slice": distributed.gather_slice(everything, rows),
        "bool": distributed.gather(torch.tensor([rank == 1])),
        "any": distributed.any_over_ranks(torch.tensor([rank == 1, False, True])),
        "sum": distributed.sum_over_ranks(torch.tensor([1.0 + rank])),
        "mean": distributed.mean_over_ranks(x.sum(), torch.tensor(rows)),
        "broadcast": distributed.broadcast(torch.tensor([rank + 5])),
    }


def test_values_on_two_processes():
    for rank, result in enumerate(run_two_processes(_collectives)):
        torch.testing.assert_close(result["gathered"].flatten(), torch.tensor([0.0, 1, 2, 10, 11]))
        assert result["slice"].flatten().tolist() == ([0, 1, 2], [10, 11])[rank]
        assert result["bool"].tolist() == [False, True]
        assert result["any"].tolist() == [True, False, True]
        assert result["sum"].item() == 3
        torch.testing.assert_close(result["mean"], torch.tensor(24 / 5))
        assert result["broadcast"].item() == 5


def _network_and_batch() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3), torch.randn(6, 4)


def _pairwise(network: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    z = distributed.gather(network(x))
    return torch.cdist(z, z).exp().mean()  # looks at every pair of the global batch


def _pairwise_case():
    network, x = _network_and_batch()
    return network, _pairwise, (x,)


def _masked_mean(network: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return distributed.mean_over_ranks((network(x).square().sum(dim=1) * mask).sum(), mask.sum())


def _masked_mean_case():
    network, x = _network_and_batch()
    return network, _masked_mean, (x, torch.tensor([1.0, 0, 0, 0, 1, 1]))


def test_gradient_of_a_loss_over_the_gathered_batch():
    assert_two_processes_agree(_pairwise_case)


def test_gradient_with_unequal_shares():
    assert_two_processes_agree(_pairwise_case, sizes=(2, 4))


def test_gradient_of_a_global_masked_mean():
    assert_two_processes_agree(_masked_mean_case)
