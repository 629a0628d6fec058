"""Shared set-up: one thread per worker, no network, and jaxtyping's shape checks at run time."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import jaxtyping
import pytest
import torch

import tests.typechecker  # noqa: F401 - the import hook finds it by name

# Every function annotated with shapes is checked on every call, in this process.
jaxtyping.install_import_hook(["lightning_methods"], "tests.typechecker.typechecker")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _shape_checks(request: pytest.FixtureRequest):
    """Switch the run-time shape checks off where a test looks at our own error for bad input."""
    jaxtyping.config.update("jaxtyping_disable", request.node.get_closest_marker("bad_input") is not None)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _environment_of_one_process():
    """A test that leaves the variables of a cluster behind makes others, later in the same process, fail."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    before = {name: os.environ.get(name) for name in names}
    yield
    assert {name: os.environ.get(name) for name in names} == before
