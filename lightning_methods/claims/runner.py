"""Runs jobs in parallel processes: resumes what is there, reports what failed and leaves nothing running behind."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .definition import Job
from .expressions import ClaimError
from .worker import work_apart

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


def environment(root: Path) -> dict[str, str]:
    """What is different in the environment of a job: one thread, no windows, our packages and those of the root."""
    paths = [str(root), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {
        **dict.fromkeys(THREADS, "1"),
        "MPLBACKEND": "Agg",
        "TOKENIZERS_PARALLELISM": "false",
        # Lightning looks for GPUs when it is imported; asked in this way, they can still be used after a fork.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))),
    }


def _start_context(root: Path, preload: bool) -> Any:
    """Where processes come from: forked from a clean server that has imported the command line once.

    The imports take longer than many a small run. The server itself runs nothing, so every job starts from the same
    clean state. It keeps the environment that it is started with, the number of threads among it.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    if preload:
        context.set_forkserver_preload(["lightning_methods.cli"])
    before = dict(os.environ)
    os.environ.update(environment(root))
    try:
        from multiprocessing.forkserver import ensure_running  # not everywhere

        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


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
        self._running: list[tuple[Job, Any]] = []
        self._context: Any = None

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
        if not waiting:
            return
        self._context = _start_context(self.root, preload=any(job.call is None for job in waiting))
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
        process = self._context.Process(target=work_apart, args=(job.folder, self.root, environment(self.root)))
        process.start()
        self._running.append((job, process))
        self.on_start(job)
        return None

    def _collect(self) -> None:
        """Wait a moment and take what has ended."""
        time.sleep(0.05)
        for job, process in list(self._running):
            status = process.exitcode
            if status is None:
                continue
            process.join()
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
        for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
            for _, process in self._running:
                if process.exitcode is None:
                    _signal(process.pid, number)
            deadline = time.monotonic() + 5
            for _, process in self._running:
                process.join(max(0.0, deadline - time.monotonic()))
        self._running.clear()


def _signal(pid: int, number: int) -> None:
    """Signal a process with all that it has started; a process that has not yet its own group alone."""
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(pid) if hasattr(os, "getpgid") else None
        if group == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
