"""Results as tables: on the screen, in the README and in the method cards."""

from __future__ import annotations

import ast
import math
import os
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .expressions import ClaimError
from .results import read_results

__all__ = ["card_block", "methods_table", "print_summary", "shown_metrics", "update_documents", "verdict_line"]

HOLDS = {True: "holds", False: "does not hold"}


def _number(value: float | None) -> str:
    """Three decimals near one, three digits elsewhere."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 100 else f"{value:.3g}"


def _mean_std(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return ""
    spread = entry["std"]
    known = spread is not None and math.isfinite(spread)
    return f"{_number(entry['mean'])} ± {_number(spread)}" if known else _number(entry["mean"])


def shown_metrics(summary: dict[str, Any]) -> list[str]:
    """The metrics that a reader needs: the claim's own and those that its expectations look at."""
    names = [summary.get("metric", "")] + [name for item in summary["expect"] for name in item["metric"].split(", ")]
    present = {name for metrics in summary["runs"].values() for name in metrics}
    return [name for name in dict.fromkeys(names) if name in present]


def verdict_line(item: dict[str, Any]) -> str:
    """One expectation in one line: what was found, against what, and whether that suffices."""
    found = f"mean {_number(item['mean'])}"
    if item["low"] is None or not math.isfinite(item["low"]):
        found += ", no interval from one seed"
    else:
        found += f", 95 % interval [{_number(item['low'])}, {_number(item['high'])}]"
    if item.get("every_seed"):
        found += f", seeds {', '.join(map(_number, item['values']))}"
    return f"{found}, margin {_number(item['margin'])}: {HOLDS[item['holds']]}"


def print_summary(summary: dict[str, Any], console: Console, all_metrics: bool = False) -> None:
    """Show a claim's table and verdicts.

    Args:
        summary: the content of the JSON file.
        console: where to.
        all_metrics: show every metric that was logged.
    """
    console.print()
    console.print(Text(f"{summary['slug']}: {summary['claim']}", style="bold"))
    console.print(Text(f"{summary['source']}; seeds {', '.join(map(str, summary['seeds']))}", style="dim"))
    names = shown_metrics(summary)
    if all_metrics:
        names = list(dict.fromkeys([*names, *(name for metrics in summary["runs"].values() for name in metrics)]))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("run")
    for name in names:
        table.add_column(escape(name), justify="right")
    for run, metrics in summary["runs"].items():
        table.add_row(run, *(_mean_std(metrics.get(name)) for name in names))
    console.print(table)
    for item in summary["expect"]:
        style = "green" if item["holds"] else "red"
        console.print(Text(f"  {item['expression']}", style="bold"))
        console.print(Text(f"    {verdict_line(item)}", style=style))
    style = "bold green" if summary["holds"] else "bold red"
    console.print(Text(f"{summary['slug']} {HOLDS[summary['holds']]}", style=style))


# documents


def _markdown_table(header: list[str], rows: list[list[str]], right: bool = True) -> str:
    rule = ["---"] + ["--:" if right else "---"] * (len(header) - 1)
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def card_block(summary: dict[str, Any], picture: str | None) -> str:
    """The results of a method card.

    Args:
        summary: the content of the JSON file.
        picture: path of the picture from the card; None if there is none.
    """
    names = shown_metrics(summary)
    rows = [[run, *(_mean_std(metrics.get(name)) for name in names)] for run, metrics in summary["runs"].items()]
    held = HOLDS[summary["holds"]]
    parts = [
        f"**Claim** ({summary['source']}): {summary['claim']}",
        f"At small scale it **{held}**: {len(summary['seeds'])} seeds, mean ± standard deviation.",
        _markdown_table(["run", *(f"`{name}`" for name in names)], rows),
        "\n".join(
            f"- `{item['expression']}`: {verdict_line(item)}." + (f" {item['why']}" if item.get("why") else "")
            for item in summary["expect"]
        ),
    ]
    if summary.get("note"):
        parts.append(summary["note"])
    if picture:
        parts.append(f"![What the runs of {summary['slug']} look like]({picture})")
    parts.append(f"`python -m lightning_methods.claims {summary['slug']}` runs this again.")
    return "\n\n".join(parts)


def _purpose(folder: Path) -> str:
    """The first line of a package's docstring, without the method's name in front."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").strip()


def _verdict(summary: dict[str, Any]) -> str:
    """The verdict, and how many of several expectations hold where not all do."""
    held = [item["holds"] for item in summary["expect"]]
    some = f": {sum(held)} of {len(held)} expectations do" if len(held) > 1 and not all(held) else ""
    return HOLDS[summary["holds"]] + some


def methods_table(root: Path) -> str:
    """The README's table: every method that has a card, what it is, and how its claim came out."""
    results = read_results(root)
    rows = []
    for card in sorted((root / "lightning_methods").glob("*/README.md")):
        slug = card.parent.name
        if not (root / "configs" / slug).is_dir():
            continue
        found = results.get(slug)
        claim = found["claim"] if found else ""
        held = f"[{_verdict(found)}](docs/claims/{slug}.json)" if found else "not run"
        rows.append([f"[{slug}](lightning_methods/{slug}/README.md)", _purpose(card.parent), claim, held])
    return _markdown_table(["method", "what it is", "claim, checked at small scale", "verdict"], rows, right=False)


def _with_block(path: Path, name: str, content: str) -> str:
    """A file's text with this content between ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        ClaimError: the file has no such block.
    """
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ClaimError(f"{path} must have one block between <!-- {name} --> and <!-- /{name} -->.")
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n{match[2]}", text)


def update_documents(root: Path, check: bool = False) -> list[Path]:
    """Rewrite the README's table and the results of every card from ``docs/claims/*.json``.

    Args:
        root: the repository.
        check: change nothing, only say what would change.

    Returns:
        the files that changed.

    Raises:
        ClaimError: a file has no place for its numbers; the others are still written.
    """
    blocks = [(root / "README.md", "methods", methods_table(root))] if (root / "README.md").exists() else []
    for slug, summary in read_results(root).items():
        card = root / "lightning_methods" / slug / "README.md"
        if not card.exists():
            continue
        image = root / "docs" / "claims" / f"{slug}.png"
        picture = Path(os.path.relpath(image, card.parent)).as_posix() if image.exists() else None
        blocks.append((card, "claim", card_block(summary, picture)))
    changed, problems = [], []
    for path, name, content in blocks:
        try:
            text = _with_block(path, name, content)
        except ClaimError as error:
            problems.append(str(error))
            continue
        if text != path.read_text(encoding="utf-8"):
            changed.append(path)
            if not check:
                path.write_text(text, encoding="utf-8")
    if problems:
        raise ClaimError("\n".join(problems))
    return changed
