"""Runs jobs in parallel processes: resumes what is there, reports what failed and leaves nothing running behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .definition import Job
from .expressions import ClaimError

__all__ = ["Runner", "log_tail", "read_result"]

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def read_result(job: Job) -> dict[str, Any] | None:
    """The result that a job has left, unless it was of another config, argument, seed or version."""
    try:
        result = json.loads((job.folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if result.get("fingerprint") != job.fingerprint:
        return None
    metrics = {name: math.nan if value is None else float(value) for name, value in result["metrics"].items()}
    return {**result, "metrics": metrics}


def log_tail(job: Job, lines: int = 20) -> str:
    """The end of a job's log."""
    try:
        text = (job.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Make a termination or a closed terminal end like Ctrl-C, so that the workers are stopped."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    try:
        before = {name: signal.signal(getattr(signal, name), interrupt) for name in names}
    except ValueError:  # not the main thread
        before = {}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


class Runner:
    """Does jobs, several at a time, each in a process of its own with one thread.

    Args:
        workers: how many at a time; as many as there are cores by default.
        root: the folder that they start in.
        fresh: do again what was already done.
        on_start: called with a job when its process starts.
        on_end: called with a job, its result or None, whether it was there already, and the reason of a failure.
    """

    def __init__(
        self,
        workers: int | None,
        root: Path,
        fresh: bool = False,
        on_start: Callable[[Job], None] = lambda job: None,
        on_end: Callable[[Job, dict[str, Any] | None, bool, str], None] = lambda job, result, cached, reason: None,
    ) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = workers or cores
        self.root = root
        self.fresh = fresh
        self.on_start = on_start
        self.on_end = on_end
        self.results: dict[tuple[str, str, int], dict[str, Any]] = {}
        self.failed: dict[tuple[str, str, int], str] = {}
        self._running: list[tuple[Job, subprocess.Popen[bytes]]] = []

    @staticmethod
    def _key(job: Job, run: str | None = None) -> tuple[str, str, int]:
        return job.slug, run or job.run, job.seed

    def run(self, jobs: list[Job]) -> None:
        """Do the jobs; a job waits for those that it needs, and is given up when one of them failed.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after the processes have ended. What they had finished stays.
        """
        waiting = deque(jobs)
        if not self.fresh:
            taken = self.take(jobs, self.on_end)
            waiting = deque(job for job in jobs if job not in taken)
        with _interruptible():
            try:
                while waiting or self._running:
                    self._fill(waiting)
                    self._collect()
            finally:
                self._stop()

    def take(self, jobs: list[Job], on_end: Callable[..., None] = lambda *_: None) -> list[Job]:
        """Take over the results that are there already; returns the jobs that had one."""
        taken = []
        for job in jobs:
            result = read_result(job)
            if result is not None:
                self.results[self._key(job)] = result
                on_end(job, result, True, "")
                taken.append(job)
        return taken

    def _fill(self, waiting: deque[Job]) -> None:
        """Start what can be started."""
        for _ in range(len(waiting)):
            if len(self._running) >= self.workers:
                return
            job = waiting.popleft()
            broken = [need for need in job.needs if self._key(job, need) in self.failed]
            if broken:
                self._give_up(job, f"it starts from {broken[0]}, which failed")
            elif all(self._key(job, need) in self.results for need in job.needs):
                self._start(job)
            else:
                waiting.append(job)

    def _start(self, job: Job) -> None:
        checkpoints = {need: self.results[self._key(job, need)]["checkpoint"] for need in job.needs}
        try:
            described = {
                **job.as_json(),
                "args": job.fill(job.args, checkpoints),
                "arguments": job.fill(job.arguments, checkpoints),
            }
        except ClaimError as error:
            return self._give_up(job, str(error))
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
        (job.folder / "job.json").write_text(json.dumps(described, indent=1, default=str), encoding="utf-8")
        # A session of its own: Ctrl-C reaches us alone, and one signal ends a worker with whatever it has started.
        with open(job.folder / "log.txt", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", str(job.folder)],
                cwd=self.root,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append((job, process))
        self.on_start(job)
        return None

    def _environment(self) -> dict[str, str]:
        paths = [str(self.root), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            **dict.fromkeys(THREADS, "1"),
            "MPLBACKEND": "Agg",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    def _collect(self) -> None:
        """Wait a moment and take what has ended."""
        time.sleep(0.05)
        for job, process in list(self._running):
            status = process.poll()
            if status is None:
                continue
            self._running.remove((job, process))
            result = read_result(job) if status == 0 else None
            if result is None:
                self._give_up(job, f"it ended with status {status}" if status else "it left no result")
            else:
                self.results[self._key(job)] = result
                self.on_end(job, result, False, "")

    def _give_up(self, job: Job, reason: str) -> None:
        self.failed[self._key(job)] = reason
        self.on_end(job, None, False, reason)

    def _stop(self) -> None:
        """End the processes that are left, gently and then not."""
        for gently in (True, False):
            for _, process in self._running:
                if process.poll() is None:
                    self._signal(process, gently)
            deadline = time.monotonic() + 5
            for _, process in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        self._running.clear()

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], gently: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGTERM if gently else signal.SIGKILL)
            else:
                process.terminate() if gently else process.kill()
