"""``python -m lightning_methods.claims``: run claims, show and save what came out."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from .definition import Claim, Job, find_claims, load_claim, plan
from .expressions import ClaimError, unknown
from .results import summarise, write_json
from .runner import Runner, log_tail
from .tables import print_summary, update_documents

__all__ = ["main", "repository"]


def repository() -> Path:
    """The folder with ``configs``: the current one, else the one that the package is in."""
    here = Path.cwd()
    return here if (here / "configs").is_dir() else Path(__file__).parents[2]


def _parser(slugs: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_methods.claims",
        description="Runs a paper's central comparison at small scale over several seeds and says whether it holds.",
        epilog=f"Methods with a claim: {', '.join(slugs) or 'none'}.",
    )
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="methods; `all` for every one")
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N-1 instead of the claim's own")
    parser.add_argument("--workers", type=int, metavar="N", help="runs at a time (default: one per core)")
    parser.add_argument("--only", action="append", metavar="RUN", help="only this run (may be repeated)")
    parser.add_argument("--fresh", action="store_true", help="run again what was already run")
    parser.add_argument("--all-metrics", action="store_true", help="show every metric that was logged")
    parser.add_argument("--table", action="store_true", help="rewrite the README's table and the cards' results")
    return parser


def _enumerate(names: list[str], shown: int = 3) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


class Display:
    """Shows what is running, what is done and how long it may still take.

    Args:
        console: where to.
        total: number of jobs.
        workers: jobs at a time, for the estimate.
        metrics: the metric to show, by slug.
    """

    def __init__(self, console: Console, total: int, workers: int, metrics: dict[str, str]) -> None:
        self.console = console
        self.workers = workers
        self.metrics = metrics
        self.running: list[str] = []
        self.seconds: list[float] = []
        self.began: dict[str, float] = {}
        self.progress = Progress(
            TextColumn("[bold]runs"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("[dim]{task.fields[running]}"),
            console=console,
            transient=True,
        )
        self.task = self.progress.add_task("runs", total=total, left="", running="")

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def start(self, job: Job) -> None:
        """A job's process has started."""
        name = f"{job.slug}/{job.run}/{job.seed}"
        self.running.append(name)
        self.began[name] = time.monotonic()
        self._refresh()

    def end(self, job: Job, result: dict[str, Any] | None, cached: bool, reason: str) -> None:
        """A job has a result, or has failed."""
        name = f"{job.slug}/{job.run}/{job.seed}"
        if name in self.running:
            self.running.remove(name)
            self.seconds.append(time.monotonic() - self.began[name])
        self.progress.advance(self.task)
        if not cached:
            self._line(job, result, reason)
        self._refresh()

    def _line(self, job: Job, result: dict[str, Any] | None, reason: str) -> None:
        line = Text(f"{job.slug} {job.run} seed {job.seed}: ")
        if result is None:
            line.append(f"failed, {reason}", style="red")
        else:
            metric = self.metrics[job.slug]
            if metric in result["metrics"]:
                line.append(f"{metric} {result['metrics'][metric]:.4g} ")
            line.append(f"({result['seconds']:.0f} s)", style="dim")
        self.console.print(line)

    def _refresh(self) -> None:
        task = self.progress.tasks[0]
        left = ""
        if self.seconds and task.remaining:
            each = sum(self.seconds) / len(self.seconds)
            rounds = max(1.0, task.remaining / self.workers)
            minutes, seconds = divmod(round(each * rounds), 60)
            left = f"about {minutes}:{seconds:02d} left"
        self.progress.update(self.task, left=left, running=_enumerate(self.running))


def _report_failures(runner: Runner, jobs: list[Job], console: Console) -> None:
    for job in jobs:
        reason = runner.failed.get((job.slug, job.run, job.seed))
        if reason is None:
            continue
        console.print(Text(f"\n{job.slug}: run {job.run}, seed {job.seed} failed: {reason}", style="bold red"))
        tail = log_tail(job)
        if tail:
            console.print(Text(tail, style="dim"))
            console.print(Text(f"log: {job.folder / 'log.txt'}"))


def _conclude(claim: Claim, seeds: tuple[int, ...], runner: Runner, console: Console, all_metrics: bool) -> bool:
    """Show and save one claim's result if it is complete; whether it could be concluded."""
    results = {
        (run, seed): runner.results[claim.slug, run, seed]
        for run in claim.runs
        for seed in seeds
        if (claim.slug, run, seed) in runner.results
    }
    missing = [run for run in claim.runs if any((run, seed) not in results for seed in seeds)]
    if missing:
        names = ", ".join(missing)
        console.print(Text(f"{claim.slug}: no verdict, {names} did not run with every seed.", style="yellow"))
        return False
    summary = summarise(claim, results, seeds)
    print_summary(summary, console, all_metrics)
    if not set(claim.seeds) <= set(seeds):
        path = claim.folder / "result.json"
        write_json(summary, path)
        console.print(f"saved {path} (not docs/claims: the claim asks for seeds {', '.join(map(str, claim.seeds))})")
        return True
    from .plots import picture

    path = claim.root / "docs" / "claims" / f"{claim.slug}.json"
    write_json(summary, path)
    picture(summary, claim.folder, path.with_suffix(".png"))
    console.print(f"saved {path} and {path.with_suffix('.png').name}")
    return True


def _warn_of_old_results(claims: list[Claim], runner: Runner, console: Console) -> None:
    """The fingerprint does not see code: say so where the method's code is newer than a result that was taken over."""
    for claim in claims:
        files = list((Path(__file__).parents[1] / claim.slug).glob("*.py"))
        newest = max((path.stat().st_mtime for path in files), default=0.0)
        runs = [(run, seed) for slug, run, seed in runner.results if slug == claim.slug]
        paths = [claim.folder / run / f"seed{seed}" / "result.json" for run, seed in runs]
        if any(path.exists() and path.stat().st_mtime < newest for path in paths):
            warning = f"{claim.slug}: its code has changed since some of these runs; --fresh runs them again."
            console.print(Text(warning, style="yellow"))


def _run(options: argparse.Namespace, root: Path, known: dict[str, Path], console: Console) -> int:
    slugs = list(known) if options.slugs == ["all"] else list(dict.fromkeys(options.slugs))
    for slug in slugs:
        if slug not in known:
            raise unknown("method", slug, known)
    for name, value in (("--seeds", options.seeds), ("--workers", options.workers)):
        if value is not None and value < 1:
            raise ClaimError(f"{name} must be at least 1; got {value}.")
    claims = [load_claim(known[slug], root) for slug in slugs]
    seeds = {claim.slug: tuple(range(options.seeds)) if options.seeds else claim.seeds for claim in claims}
    jobs = [job for claim in claims for job in plan(claim, seeds[claim.slug], options.only)]
    runner = Runner(options.workers, root, options.fresh)
    display = Display(console, len(jobs), runner.workers, {claim.slug: claim.metric for claim in claims})
    runner.on_start, runner.on_end = display.start, display.end
    try:
        with display:
            runner.run(jobs)
    except KeyboardInterrupt:
        console.print("stopped; the same command continues.")
        return 130
    _warn_of_old_results(claims, runner, console)
    if options.only:
        # The other runs may be there from before.
        runner.take([job for claim in claims for job in plan(claim, seeds[claim.slug])])
    concluded = [_conclude(claim, seeds[claim.slug], runner, console, options.all_metrics) for claim in claims]
    _report_failures(runner, jobs, console)
    return 1 if runner.failed or not (all(concluded) or options.only) else 0


def main(arguments: Sequence[str] | None = None, root: Path | None = None, console: Console | None = None) -> int:
    """The command; its exit status is 0 unless a run failed (1), the input is wrong (2) or it was stopped (130).

    A claim that does not hold is a result, not a failure.

    Args:
        arguments: of the command line; the process's own by default.
        root: the folder with ``configs``.
        console: where to write.
    """
    root = (root or repository()).resolve()
    console = console or Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    known = find_claims(root)
    parser = _parser(list(known))
    options = parser.parse_args(arguments)
    if not options.slugs and not options.table:
        parser.print_help()
        return 2
    status = 0
    try:
        if options.slugs:
            status = _run(options, root, known, console)
        if options.table and status == 0:
            for path in update_documents(root):
                console.print(f"updated {path.relative_to(root)}")
    except ClaimError as error:
        console.print(Text(f"error: {error}", style="red"))
        return 2
    return status
