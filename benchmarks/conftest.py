"""The harness of the benchmarks: shapes, forward and backward passes, and peak memory beside the time.

See README.md in this folder.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

PEAKS = pytest.StashKey[list[tuple[str, float]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shapes", action="append", help="run the shapes of this name only, e.g. small (may be repeated)")
    parser.addoption("--device", default="cpu", help="where the tensors live: cpu (default), cuda, cuda:1, mps")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "shapes(**named): sizes by name; the test gets each as its argument `shape`")
    config.stash[PEAKS] = []
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("shapes")
    if mark is None:
        return
    wanted = metafunc.config.getoption("--shapes") or list(mark.kwargs)
    chosen = {name: shape for name, shape in mark.kwargs.items() if name in wanted}
    metafunc.parametrize("shape", list(chosen.values()), ids=list(chosen))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[PEAKS]:
        terminalreporter.section("peak memory above the inputs")
        for name, peak in config.stash[PEAKS]:
            terminalreporter.write_line(f"{peak:12.2f} MiB  {name}")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of ``--device``."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory(step: Callable[[], Any], device: torch.device) -> float:
    """How much more memory the tensors of a step take at one time than there was before it, in MiB.

    On the CPU the allocator's own events are followed, so that what an operation allocates inside counts too. NaN where
    a device does not tell.
    """
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if device.type != "cpu":
        return float("nan")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    current = peak = 0
    for event in memory:
        current += event["args"]["Bytes"]
        peak = max(peak, current)
    return peak / 2**20


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _names(node: Any) -> tuple[str, str]:
    """The form that a test measures, and the name of what it measures: the function, the shape, other parameters."""
    values = dict(node.callspec.params) if hasattr(node, "callspec") else {}
    form = values.pop("form", "")
    shapes = node.get_closest_marker("shapes")
    named = [name for name, shape in (shapes.kwargs if shapes else {}).items() if shape == values.get("shape")]
    others = [f"{key}={value}" for key, value in values.items() if key != "shape"]
    return str(getattr(form, "__name__", form)), " ".join([node.originalname.removeprefix("test_"), *named, *others])


@pytest.fixture
def measure(
    benchmark: Any, request: pytest.FixtureRequest, device: torch.device
) -> Callable[[Callable[[], Any]], None]:
    """``measure(step)``: time a function without arguments and note its peak memory.

    Tests that differ in the parameter ``form`` alone share a group, and stand side by side in the table.
    """

    def run(step: Callable[[], Any]) -> None:
        def synchronized() -> None:
            step()
            synchronize(device)

        form, group = _names(request.node)
        benchmark.group = f"{group} {device}"
        synchronized()
        start = time.perf_counter()
        synchronized()
        slow = time.perf_counter() - start > 0.5
        peak = peak_memory(synchronized, device)
        benchmark.extra_info.update({"peak_mib": peak, "device": str(device), "threads": torch.get_num_threads()})
        request.config.stash[PEAKS].append((f"{benchmark.group}: {form}", peak))
        if slow:
            benchmark.pedantic(synchronized, rounds=3)
        else:
            benchmark(synchronized)

    return run


@pytest.fixture
def forward_backward(measure: Callable[[Callable[[], Any]], None]) -> Callable[..., None]:
    """``forward_backward(function, *args, **kwargs)``: measure a call with the gradient of all it returns.

    The gradient is that of the sum of every floating point result, with respect to the arguments that require one.
    """

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        leaves = [x for x in _tensors([args, kwargs]) if x.requires_grad]

        def step() -> None:
            results = [x for x in _tensors(function(*args, **kwargs)) if x.requires_grad]
            total = torch.stack([x.float().sum() for x in results]).sum()
            torch.autograd.grad(total, leaves, allow_unused=True)

        measure(step if leaves else lambda: function(*args, **kwargs))

    return run
