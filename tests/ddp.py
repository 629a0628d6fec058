"""Two gloo processes on this machine, for what has to agree between one process and two."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(rank: int, world: int, port: int, folder: str, fn: Callable[..., Any], args: tuple) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        torch.save(fn(rank, world, *args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_two_processes(fn: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    """Run ``fn(rank, world, *args)`` on two gloo ranks and return what each returned.

    Args:
        fn: a function at module level (it is pickled); may use ``torch.distributed`` freely.
        *args: picklable arguments.
        world: number of processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A fork spares the children the imports; with a GPU in use it is not possible.
        method = "spawn" if torch.cuda.is_initialized() or not hasattr(os, "fork") else "fork"
        arguments = (world, _free_port(), folder, fn, args)
        mp.start_processes(_worker, arguments, nprocs=world, join=True, start_method=method)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _step(rank: int, world: int, build: Callable[[], Any], sizes: tuple[int, ...]) -> dict[str, Any]:
    module, loss_of, batch = build()
    start = sum(sizes[:rank])
    local = tuple(x[start : start + sizes[rank]] for x in batch)
    loss = loss_of(module, *local)
    loss.backward()
    gradients = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            gradients[name] = parameter.grad / world  # what DistributedDataParallel hands to the optimiser
    return {"loss": loss.detach(), "gradients": gradients}


def assert_two_processes_agree(
    build: Callable[[], tuple[torch.nn.Module, Callable[..., torch.Tensor], tuple]],
    sizes: tuple[int, ...] | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Two ranks with a part of the batch each get the loss and the gradients of one process with all of it.

    Args:
        build: a function at module level that returns ``(module, loss_of, batch)``, the same every time:
            ``loss_of(module, *batch)`` is a scalar, the tensors of ``batch`` have the samples as rows.
        sizes: rows per rank; halves by default. With unequal sizes only losses that do not average per rank can agree.
        tolerance: absolute, on loss and gradients.
    """
    module, loss_of, batch = build()
    rows = batch[0].shape[0]
    sizes = sizes or (rows // 2, rows - rows // 2)
    alone = loss_of(module, *batch)
    alone.backward()
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert expected, "the loss sends no gradient to any parameter"
    results = run_two_processes(_step, build, sizes)
    torch.testing.assert_close(
        torch.stack([r["loss"] for r in results]).mean(),
        alone.detach(),
        rtol=0,
        atol=tolerance,
        msg=lambda m: f"loss: {m}",
    )
    for result in results:
        assert result["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                result["gradients"][name], gradient, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
