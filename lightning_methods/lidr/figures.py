"""The picture of the claim: both languages from iteration to iteration, with the reward and against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..claims.plots import INK, PALETTE

__all__ = ["figure"]

LANGUAGES = {"en": ("dominant language", PALETTE[0]), "de": ("weaker language", PALETTE[1])}
PANELS = {
    "lidr": "Own dominant answers preferred",
    "plain_dpo": "without the likelihood term",
    "reversed": "the preference reversed",
}


def _panel(axis: Axes, metrics: dict[str, dict[str, Any]], title: str, label: bool) -> None:
    """Accuracy of M0, M1, ... in both languages: every seed thin, the mean thick."""
    steps = sorted({int(name[1 : name.index("/")]) for name in metrics if name.endswith("/acc_en")})
    ends = {}
    for language, (name, color) in LANGUAGES.items():
        columns = [metrics[f"m{step}/acc_{language}"] for step in steps]
        for values in zip(*(column["values"] for column in columns), strict=True):
            axis.plot(steps, values, color=color, lw=0.8, alpha=0.35)
        means = [column["mean"] for column in columns]
        axis.plot(steps, means, color=color, lw=2.4, marker="o", ms=6)
        ends[language] = (name, color, means)
    if label:
        # Written at the first models, where the languages are furthest apart.
        for name, color, means in ends.values():
            axis.annotate(name, (steps[0], means[0]), xytext=(2, -17), textcoords="offset points", color=color)
    away = [metrics[f"m{step}/off_target_de"]["mean"] for step in steps]
    axis.fill_between(steps, away, color="#B9B9B9", alpha=0.55, lw=0, zorder=0)
    if label:
        axis.annotate("off-language answers", (steps[0] + 0.05, 0.03), fontsize=8.5, color="#5A5A5A")
    axis.set_title(title, fontsize=10.5, color=INK)
    axis.set_xticks(steps, [f"M{step}" for step in steps])
    axis.set_xlim(steps[0] - 0.12, steps[-1] + 0.12)
    axis.set_ylim(0, 1)
    axis.grid(axis="y")


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Accuracy on all entities after each iteration, one panel for each run.

    Args:
        results: the content of ``docs/claims/lidr.json``.
        folder: the folder of the runs; not needed.
    """
    shown = {run: title for run, title in PANELS.items() if run in results["runs"]}
    drawing = Figure(figsize=(3.2 * len(shown) + 0.6, 3.6), layout="constrained")
    axes = drawing.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for i, (axis, (run, title)) in enumerate(zip(axes, shown.items(), strict=True)):
        _panel(axis, results["runs"][run], title, label=i == 0)
    axes[0].set_ylabel("share of right answers")
    drawing.supxlabel(
        f"model after each iteration; thin lines: {len(results['seeds'])} seeds; grey: weaker-language answers in the "
        "other language",
        fontsize=8.5,
        color="#5A5A5A",
    )
    return drawing
