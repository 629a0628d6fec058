"""The result of a claim: ``docs/claims/<slug>.json`` from the runs' numbers."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import __version__
from .definition import Claim
from .expressions import ClaimError, Verdict, unknown, verdict

__all__ = ["judge", "read_results", "summarise", "write_json"]

# What a run reports about itself and not about the method.
IGNORED = ("epoch", "step")

Results = dict[tuple[str, int], dict[str, Any]]


def judge(claim: Claim, results: Results, seeds: tuple[int, ...]) -> list[Verdict]:
    """A verdict for every expectation.

    Args:
        claim: the claim.
        results: by (run, seed); every run that an expectation speaks of has every seed.
        seeds: the seeds, paired in this order.

    Raises:
        ClaimError: a run did not log the metric that is looked at.
    """
    verdicts = []
    for expectation in claim.expect:
        paired = []
        for seed in seeds:
            values = {}
            for run, metric in expectation.expression.references:
                found = results[run, seed]["metrics"]
                if metric not in found:
                    raise ClaimError(f"{claim.slug}: run {run}, seed {seed}: {unknown('metric', metric, found)}")
                values[run, metric] = found[metric]
            paired.append(values)
        verdicts.append(verdict(expectation.expression, paired, expectation.every_seed))
    return verdicts


def _statistics(values: list[float]) -> dict[str, Any]:
    finite = all(map(math.isfinite, values))
    return {
        "values": values,
        "mean": statistics.fmean(values) if finite else math.nan,
        "std": statistics.stdev(values) if finite and len(values) > 1 else math.nan,
    }


def _versions() -> dict[str, str]:
    installed = {name: importlib.metadata.version(name) for name in ("torch", "lightning")}
    return {"python": platform.python_version(), **installed, "lightning_methods": __version__}


def summarise(claim: Claim, results: Results, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The content of the JSON file.

    ``seconds`` is the time that all runs took together, one after another. A standard deviation is that of the sample
    (divided by n - 1).

    Args:
        claim: the claim.
        results: by (run, seed), complete.
        seeds: the seeds that were run.
    """
    runs: dict[str, dict[str, Any]] = {}
    for run in claim.shown:
        metrics = [results[run, seed]["metrics"] for seed in seeds]
        # A metric that only some seeds have cannot be paired.
        names = [name for name in metrics[0] if name not in IGNORED and all(name in found for found in metrics)]
        runs[run] = {name: _statistics([found[name] for found in metrics]) for name in names}
    verdicts = judge(claim, results, seeds)
    expect = []
    for expectation, judged in zip(claim.expect, verdicts, strict=True):
        entry = asdict(judged)
        if not entry["every_seed"]:
            del entry["every_seed"]
        expect.append({**entry, "why": expectation.why} if expectation.why else entry)
    summary = {
        "slug": claim.slug,
        "claim": claim.claim,
        "source": claim.source,
        "metric": claim.metric,
        "seeds": list(seeds),
        "runs": runs,
        "expect": expect,
        "holds": all(judged.holds for judged in verdicts),
        "seconds": round(sum(result["seconds"] for result in results.values()), 1),
        "versions": _versions(),
    }
    return {**summary, "note": claim.note} if claim.note else summary


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def write_json(summary: dict[str, Any], path: Path) -> None:
    """Write a summary, numbers to six digits; what is not a number becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_without_nan(summary), indent=2, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_results(root: Path) -> dict[str, dict[str, Any]]:
    """The saved results by slug."""
    paths = sorted((root / "docs" / "claims").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
