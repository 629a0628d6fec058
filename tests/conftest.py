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
