"""Functions that the claims of tests/test_claims.py call in their worker processes. Nothing heavy is imported."""

from __future__ import annotations

import os
import time
from pathlib import Path


def measure(seed: int, gain: float = 0.0) -> dict[str, float]:
    """Values whose differences between two gains are exactly the gain's, whatever the seed."""
    return {"test/acc": 0.5 + 0.1 * seed + gain, "test/loss": 1.0 / (1 + seed)}


def noisy(seed: int, gain: float = 0.0) -> dict[str, float]:
    """A gain that differs from seed to seed: gain, 2 gain, 3 gain, ..."""
    return {"test/acc": 0.5 + gain * (seed + 1)}


def counted(seed: int, folder: str, count: str, gain: float = 0.0) -> dict[str, float]:
    """As :func:`measure`, and one more line in the file ``count``."""
    with open(count, "a", encoding="utf-8") as file:
        file.write(f"{Path(folder).parent.name}/{seed}\n")
    return measure(seed, gain)


def failing(seed: int, switch: str) -> dict[str, float]:
    """Fails for seed 1 while the file ``switch`` is not there."""
    print("about to fail")
    if seed == 1 and not Path(switch).exists():
        raise RuntimeError("the reason of the failure")
    return measure(seed)


def pretrain(seed: int, folder: str) -> dict[str, object]:
    """Leaves a file, whose path is the run's checkpoint."""
    path = Path(folder) / "weights.txt"
    path.write_text(f"weights of seed {seed}", encoding="utf-8")
    return {"test/acc": 0.0, "checkpoint": str(path)}


def finetune(seed: int, start: str, source: str) -> dict[str, float]:
    """Starts from the file that :func:`pretrain` has left for the same seed."""
    assert Path(start).read_text(encoding="utf-8") == f"weights of seed {seed}"
    assert Path(source) == Path(start).parent
    return {"test/acc": 1.0}


def threads(seed: int) -> dict[str, float]:
    """What the process was told about threads."""
    return {"test/threads": float(os.environ["OMP_NUM_THREADS"])}


def not_a_number(seed: int) -> dict[str, float]:
    """A run that diverged."""
    return {"test/acc": float("nan")}


def sleeping(seed: int, folder: str) -> dict[str, float]:
    """Says its process id and stays."""
    (Path(folder) / "pid").write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(120)
    return {"test/acc": 0.0}
