"""``configs/<slug>/claim.yaml``: what it may say, and the list of jobs that follows from it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from .expressions import ClaimError, Expression, unknown

__all__ = ["Claim", "Expectation", "Job", "Run", "find_claims", "load_claim", "plan"]

SUBCOMMANDS = ("fit", "test", "validate")

# `{seed}`, `{folder}`, `{checkpoint:RUN}`, `{folder:RUN}`; any other brace belongs to the argument's YAML.
_PLACEHOLDER = re.compile(r"\{(?:(seed|folder)|(checkpoint|folder):([A-Za-z_]\w*))\}")


@dataclass(frozen=True)
class Run:
    """One run of a claim: a config with overrides through the command line, or a call of a function.

    Attributes:
        name: an identifier, so that expectations can speak of it.
        configs: files that are stacked, later over earlier.
        args: arguments of the command line, the common ones first.
        subcommand: "fit" (trains, then tests), "test" or "validate".
        call: ``package.module.function`` that returns a dictionary of numbers, for what is not a training run.
        arguments: the function's keyword arguments.
        hidden: left out of the results (a pretraining that other runs start from).
    """

    name: str
    configs: tuple[Path, ...] = ()
    args: tuple[str, ...] = ()
    subcommand: str = "fit"
    call: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    hidden: bool = False

    @property
    def needs(self) -> list[str]:
        """The runs whose checkpoint or folder this one takes, for the same seed."""
        text = json.dumps([self.args, self.arguments])
        return sorted({match[3] for match in _PLACEHOLDER.finditer(text) if match[3]})


@dataclass(frozen=True)
class Expectation:
    """One inequality that the claim stands on."""

    expression: Expression
    every_seed: bool = False
    why: str = ""


@dataclass(frozen=True)
class Claim:
    """A paper's central comparison at small scale, as read from ``claim.yaml``.

    Attributes:
        slug: the method.
        claim: the claim in one sentence.
        source: where the paper makes it.
        metric: the metric that a run's name alone stands for.
        seeds: the seeds of every run.
        runs: the runs by name.
        expect: the inequalities.
        note: what a reader of the result should know.
        root: the folder that holds ``configs`` and that runs start in.
    """

    slug: str
    claim: str
    source: str
    metric: str
    seeds: tuple[int, ...]
    runs: dict[str, Run]
    expect: tuple[Expectation, ...]
    note: str
    root: Path

    @property
    def folder(self) -> Path:
        """Where the runs leave their results."""
        return self.root / "runs" / "claims" / self.slug

    @property
    def shown(self) -> list[str]:
        """The runs that are part of the result."""
        return [name for name, run in self.runs.items() if not run.hidden]


def find_claims(root: Path) -> dict[str, Path]:
    """The claim files by slug."""
    return {path.parent.name: path for path in sorted((root / "configs").glob("*/claim.yaml"))}


# reading


def _keys(where: str, given: Any, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ClaimError(f"{where} must be a mapping; got {type(given).__name__}.")
    for key in given:
        if key not in required | optional:
            raise ClaimError(f"{where}: {unknown('key', key, required | optional)}")
    missing = sorted(required - set(given))
    if missing:
        raise ClaimError(f"{where}: {', '.join(missing)} is missing.")
    return given


def _typed(where: str, value: Any, kind: type | tuple[type, ...], words: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ClaimError(f"{where} must be {words}; got {value!r}.")
    return value


def _strings(where: str, value: Any) -> tuple[str, ...]:
    """A list of strings; a number is taken as YAML's reading of one."""
    _typed(where, value, list, "a list of strings")
    for item in value:
        if isinstance(item, (dict, list)) or item is None:
            raise ClaimError(f"{where} must be a list of strings; got {item!r} (quote what has a colon or a brace).")
    return tuple(item if isinstance(item, str) else json.dumps(item) for item in value)


def _configs(where: str, value: Any, home: Path, root: Path) -> tuple[Path, ...]:
    """Config files, looked for beside the claim and then from the root."""
    found = []
    for name in [value] if isinstance(value, str) else _strings(where, value):
        path = next((folder / name for folder in (home, root) if (folder / name).is_file()), None)
        if path is None:
            siblings = [other.name for other in home.glob("*.yaml") if other.name != "claim.yaml"]
            raise ClaimError(f"{where}: there is no {name} in {home} or {root}; {unknown('config', name, siblings)}")
        found.append(path.resolve())
    return tuple(found)


def _run(
    where: str, name: Any, given: Any, base: tuple[Path, ...], common: tuple[str, ...], home: Path, root: Path
) -> Run:
    if not isinstance(name, str) or not name.isidentifier():
        raise ClaimError(f"{where}: a run's name must be letters, digits and underscores; got {name!r}.")
    where = f"{where}: runs.{name}"
    given = {} if given is None else given
    if isinstance(given, dict) and "call" in given:
        _keys(where, given, {"call"}, {"arguments", "hidden"})
        call = _typed(f"{where}.call", given["call"], str, "package.module.function")
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", call):
            raise ClaimError(f"{where}.call must be package.module.function; got {call!r}.")
        arguments = _typed(f"{where}.arguments", given.get("arguments", {}), dict, "a mapping")
        hidden = _typed(f"{where}.hidden", given.get("hidden", False), bool, "true or false")
        return Run(name, call=call, arguments=arguments, hidden=hidden)
    _keys(where, given, set(), {"config", "args", "common_args", "subcommand", "hidden"})
    configs = _configs(f"{where}.config", given["config"], home, root) if "config" in given else base
    if not configs:
        raise ClaimError(f"{where}: there is no base config, so the run needs config or call.")
    subcommand = given.get("subcommand", "fit")
    if subcommand not in SUBCOMMANDS:
        raise ClaimError(f"{where}: {unknown('subcommand', subcommand, SUBCOMMANDS)}")
    own = _strings(f"{where}.args", given.get("args", []))
    if not _typed(f"{where}.common_args", given.get("common_args", True), bool, "true or false"):
        common = ()
    hidden = _typed(f"{where}.hidden", given.get("hidden", False), bool, "true or false")
    return Run(name, configs, common + own, subcommand, hidden=hidden)


def _expectation(where: str, given: Any, metric: str | None, runs: dict[str, Run]) -> Expectation:
    given = {"expression": given} if isinstance(given, str) else given
    _keys(where, given, {"expression"}, {"metric", "why", "every_seed"})
    text = _typed(f"{where}.expression", given["expression"], str, "an inequality between runs")
    own = _typed(f"{where}.metric", given.get("metric", metric), (str, type(None)), "a metric's name")
    try:
        expression = Expression(text, own)
        for name, _ in expression.references:
            if name not in runs:
                raise unknown("run", name, runs)
            if runs[name].hidden:
                raise ClaimError(f"the run {name} is hidden, so nothing can be expected of it.")
    except ClaimError as error:
        raise ClaimError(f"{where}: {error}") from None
    every_seed = _typed(f"{where}.every_seed", given.get("every_seed", False), bool, "true or false")
    return Expectation(expression, every_seed, _typed(f"{where}.why", given.get("why", ""), str, "a sentence"))


def _order(where: str, runs: dict[str, Run]) -> dict[str, Run]:
    """Runs after those that they start from; otherwise as written."""
    ordered: dict[str, Run] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ClaimError(f"{where}: the runs {' -> '.join((*path, name))} wait for each other.")
        for need in runs[name].needs:
            if need not in runs:
                raise ClaimError(f"{where}: runs.{name} starts from an {unknown('run', need, runs)}")
            visit(need, (*path, name))
        ordered.setdefault(name, runs[name])

    for name in runs:
        visit(name, ())
    return ordered


def load_claim(path: Path, root: Path) -> Claim:
    """Read and check a claim file.

    Args:
        path: ``configs/<slug>/claim.yaml``.
        root: the folder that holds ``configs``.

    Raises:
        ClaimError: the file says something else than it may; the message names the file and the key.
    """
    import yaml

    where = str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ClaimError(f"{where} is not YAML: {error}") from None
    _keys(where, given, {"claim", "source", "runs", "expect"}, {"base", "seeds", "args", "metric", "note"})
    for key in ("claim", "source"):
        _typed(f"{where}: {key}", given[key], str, "a sentence")
    seeds = _typed(f"{where}: seeds", given.get("seeds", [0, 1, 2]), list, "a list of numbers")
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ClaimError(f"{where}: seeds must be different whole numbers; got {seeds!r}.")
    base = _configs(f"{where}: base", given["base"], path.parent, root) if "base" in given else ()
    common = _strings(f"{where}: args", given.get("args", []))
    _typed(f"{where}: runs", given["runs"], dict, "a mapping of names to runs")
    runs = {name: _run(where, name, run, base, common, path.parent, root) for name, run in given["runs"].items()}
    metric = _typed(f"{where}: metric", given.get("metric"), (str, type(None)), "a metric's name")
    _typed(f"{where}: expect", given["expect"], list, "a list of inequalities")
    expect = tuple(_expectation(f"{where}: expect[{i}]", item, metric, runs) for i, item in enumerate(given["expect"]))
    if not expect:
        raise ClaimError(f"{where}: expect is empty; a claim expects something.")
    return Claim(
        slug=path.parent.name,
        claim=" ".join(given["claim"].split()),
        source=" ".join(given["source"].split()),
        metric=metric or next(iter(sorted(expect[0].expression.references)))[1],
        seeds=tuple(seeds),
        runs=_order(where, runs),
        expect=expect,
        note=" ".join(_typed(f"{where}: note", given.get("note", ""), str, "text").split()),
        root=root,
    )


# jobs


@dataclass(frozen=True)
class Job:
    """One run with one seed: what a worker process does.

    Attributes:
        slug: the method.
        run: the run's name.
        seed: the seed.
        folder: where it leaves ``result.json``, ``log.txt``, its checkpoints and its curves.
        subcommand: of the command line.
        args: everything after the subcommand, with placeholders for what other runs leave.
        call: the function instead of the command line.
        arguments: its arguments.
        needs: the runs, same seed, that have to be there first.
        fingerprint: changes with whatever the result depends on, but for the code: the configs' text, the arguments,
            the seed, the library's version, and the same of the runs it starts from.
    """

    slug: str
    run: str
    seed: int
    folder: Path
    subcommand: str
    args: tuple[str, ...]
    call: str | None
    arguments: dict[str, Any]
    needs: tuple[str, ...]
    fingerprint: str

    def as_json(self) -> dict[str, Any]:
        """A plain dictionary for the worker."""
        return {**asdict(self), "folder": str(self.folder)}

    def fill(self, value: Any, checkpoints: dict[str, str]) -> Any:
        """Put the seed, the folders and the checkpoints in the place of their placeholders.

        Args:
            value: a string, or lists and mappings of them. A string that is ``{seed}`` becomes the number.
            checkpoints: path by run, of the runs that this one needs.

        Raises:
            ClaimError: a run that this one starts from left no checkpoint.
        """
        if isinstance(value, dict):
            return {key: self.fill(item, checkpoints) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.fill(item, checkpoints) for item in value]
        if not isinstance(value, str):
            return value
        if value == "{seed}":
            return self.seed

        def replacement(match: re.Match[str]) -> str:
            if match[1]:
                return str(self.seed if match[1] == "seed" else self.folder)
            if match[2] == "folder":
                return str(self.folder.parent.parent / match[3] / self.folder.name)
            if not checkpoints.get(match[3]):
                raise ClaimError(f"the run {match[3]} left no checkpoint for {self.run}.")
            return checkpoints[match[3]]

        return _PLACEHOLDER.sub(replacement, value)


def _fingerprint(claim: Claim, run: Run, seed: int, memory: dict[str, str]) -> str:
    if run.name not in memory:
        content = {
            "configs": [path.read_text(encoding="utf-8") for path in run.configs],
            "run": [run.subcommand, run.args, run.call, run.arguments],
            "seed": seed,
            "version": __version__,
            "needs": [_fingerprint(claim, claim.runs[need], seed, memory) for need in run.needs],
        }
        memory[run.name] = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return memory[run.name]


def plan(claim: Claim, seeds: tuple[int, ...] | None = None, only: list[str] | None = None) -> list[Job]:
    """The jobs of a claim: seed by seed, so that a first seed is there early, each run after those it starts from.

    Args:
        claim: the claim.
        seeds: other seeds than the claim's.
        only: these runs, with the runs that they start from; all by default.

    Raises:
        ClaimError: ``only`` names a run that the claim does not have.
    """
    wanted = set()
    for name in only if only is not None else claim.runs:
        if name not in claim.runs:
            raise ClaimError(f"{claim.slug}: {unknown('run', name, claim.runs)}")
        open_names = [name]
        while open_names:
            wanted.add(current := open_names.pop())
            open_names += [need for need in claim.runs[current].needs if need not in wanted]
    jobs = []
    for seed in seeds or claim.seeds:
        memory: dict[str, str] = {}
        for run in claim.runs.values():
            if run.name not in wanted:
                continue
            jobs.append(
                Job(
                    slug=claim.slug,
                    run=run.name,
                    seed=seed,
                    folder=claim.folder / run.name / f"seed{seed}",
                    subcommand=run.subcommand,
                    args=tuple(part for path in run.configs for part in ("--config", str(path))) + run.args,
                    call=run.call,
                    arguments=run.arguments,
                    needs=tuple(run.needs),
                    fingerprint=_fingerprint(claim, run, seed, memory),
                )
            )
    return jobs
