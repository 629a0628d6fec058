"""What may import what: methods stand alone, functional code needs torch only, and nothing imports in a circle."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from lightning_methods._lazy import exports

ROOT = Path(__file__).parents[1]
SHARED = {"claims", "core", "graph", "metrics", "nn", "ssl", "text"}
METHODS = sorted(
    path.parent.name for path in (ROOT / "lightning_methods").glob("*/__init__.py") if path.parent.name not in SHARED
)
# The one import from a shared folder into a method's: two-view training reports the Wasserstein distance to uniformity.
ALLOWED = {("ssl", "wasserstein_uniformity.functional"), ("ssl", "wasserstein_uniformity.metrics")}
LIGHT = {"torch", "jaxtyping", "__future__", *sys.stdlib_module_names}
HEAVY = [
    "lightning",
    "pytorch_lightning",
    "lightning_utilities",
    "torchmetrics",
    "torchvision",
    "timm",
    "transformers",
    "datasets",
    "peft",
    "sklearn",
    "scipy",
    "pandas",
    "matplotlib",
    "networkx",
    "jsonargparse",
    "rich",
    "torch_geometric",
    "soundfile",
]


def files(package: str) -> dict[str, Path]:
    """The modules of a package by their dotted names."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = {**files("lightning_methods"), **files("datamodules")}


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """What is executed when the module is imported, without the bodies of functions."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(node):
            continue
        found.append(node)
        for block in ("body", "orelse", "finalbody"):
            found += _statements(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            found += _statements(handler.body)
    return found


def _home(module: str, name: str) -> str:
    """Where ``from module import name`` ends: in a module of that name, or where a lazy package has it from."""
    if f"{module}.{name}" in MODULES:
        return f"{module}.{name}"
    path = MODULES.get(module)
    if path is None or path.name != "__init__.py" or name not in (table := exports(str(path))):
        return module
    source, original = table[name]
    return _home(_absolute(source, module, is_package=True), original)


def _absolute(source: str, module: str, is_package: bool) -> str:
    level = len(source) - len(source.lstrip("."))
    if level == 0:
        return source
    parts = module.split(".")
    parts = parts[: len(parts) - level + is_package]
    return ".".join([*parts, *filter(None, [source[level:]])])


@cache
def imports(module: str, everything: bool) -> frozenset[str]:
    """The modules that a module imports.

    Args:
        module: its dotted name.
        everything: also what functions and type checkers import, not only what happens at import.
    """
    path = MODULES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree) if everything else _statements(tree.body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = _absolute("." * node.level + (node.module or ""), module, path.name == "__init__.py")
            found |= {_home(source, alias.name) for alias in node.names}
    return frozenset(found - {module})


def _owner(module: str) -> str | None:
    """The folder of lightning_methods that a module belongs to."""
    parts = module.split(".")
    return parts[1] if parts[0] == "lightning_methods" and len(parts) > 1 else None


@pytest.mark.parametrize("method", METHODS)
def test_methods_do_not_import_each_other(method: str):
    own = [module for module in MODULES if _owner(module) == method]
    foreign = {
        f"{module} imports {other}"
        for module in own
        for other in imports(module, everything=True)
        if _owner(other) in METHODS and _owner(other) != method
    }
    assert not foreign, "what two methods need belongs in core, nn, metrics, ssl, text or graph"


@pytest.mark.parametrize("folder", sorted(SHARED & {_owner(module) or "" for module in MODULES}))
def test_shared_folders_do_not_import_methods(folder: str):
    foreign = {
        f"{module} imports {other}"
        for module in MODULES
        if _owner(module) == folder
        for other in imports(module, everything=True)
        if _owner(other) in METHODS and (folder, other.removeprefix("lightning_methods.")) not in ALLOWED
    }
    assert not foreign


def test_library_does_not_import_data_modules():
    foreign = {
        f"{module} imports {other}"
        for module in MODULES
        if module.startswith("lightning_methods")
        for other in imports(module, everything=True)
        if other.split(".")[0] == "datamodules"
    }
    assert not foreign


def test_data_modules_import_shared_and_torch_only_code():
    foreign = set()
    for module in MODULES:
        if not module.startswith("datamodules"):
            continue
        for other in imports(module, everything=True):
            owner = _owner(other)
            if owner in METHODS and other.split(".")[2:] not in (["functional"], ["data"]):
                foreign.add(f"{module} imports {other}")
    assert not foreign, "of a method's files, data modules import functional.py and data.py"


TORCH_ONLY = sorted(
    [f"lightning_methods.{method}.functional" for method in METHODS]
    + [
        f"lightning_methods.core.{name}"
        for name in [
            "batches",
            "checks",
            "clustering",
            "contrastive",
            "distributed",
            "gaussian_process",
            "layers",
            "losses",
            "neighbors",
            "ordering",
            "queue",
            "random",
            "teacher",
        ]
    ]
    + [
        "lightning_methods.ssl.losses",
        "lightning_methods.graph.types",
        "lightning_methods.graph.ops",
        "lightning_methods.text.likelihood",
        "lightning_methods.text.pooling",
        "datamodules.long_tail",
    ]
)


@pytest.mark.parametrize("module", [name for name in TORCH_ONLY if name in MODULES])
def test_functional_code_imports_torch_only(module: str):
    seen, open_modules, heavy = set(), [module], set()
    while open_modules:
        current = open_modules.pop()
        seen.add(current)
        for other in imports(current, everything=False):
            if other in MODULES:
                open_modules += [other] if other not in seen else []
            elif other.split(".")[0] not in LIGHT:
                heavy.add(f"{current} imports {other}")
    assert not heavy


def test_no_import_circles():
    graph = {
        module: {other for other in imports(module, everything=False) if other in MODULES and other != module}
        for module in MODULES
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize(
    "package", [name for name, path in MODULES.items() if path.name == "__init__.py" and exports(str(path))]
)
def test_public_names_have_a_home(package: str):
    """Every name that a lazy package lists is defined in the module that it is said to come from."""
    missing = []
    for name, (source, original) in exports(str(MODULES[package])).items():
        home = _home(_absolute(source, package, is_package=True), original)
        if home not in MODULES:
            missing.append(f"{name}: there is no {home}")
            continue
        if home.rsplit(".", 1)[-1] == original:
            continue
        tree = ast.parse(MODULES[home].read_text(encoding="utf-8"))
        defined = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        defined |= {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        defined |= {
            alias.asname or alias.name
            for node in ast.walk(tree)
            for alias in getattr(node, "names", [])
            if isinstance(alias, ast.alias)
        }
        if original not in defined:
            missing.append(f"{name}: {home} has no {original}")
    assert not missing


def _in_a_new_process(code: str, *arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_packages_import_without_torch():
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    code = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    dir(sys.modules[name])
print([name for name in ("torch", "numpy", "lightning") if name in sys.modules])
"""
    assert _in_a_new_process(code, json.dumps(packages)).strip() == "[]"


def test_functional_names_need_torch_only():
    """``from lightning_methods.<method> import <function>`` where torch is all that is installed."""
    names = {
        f"lightning_methods.{method}": sorted(
            name
            for name, (source, _) in exports(str(MODULES[f"lightning_methods.{method}"])).items()
            if source == ".functional"
        )
        for method in METHODS
    }
    code = """
import importlib, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

names, HEAVY = json.loads(sys.argv[1])
sys.meta_path.insert(0, Absent())
failures = []
for module, functions in names.items():
    for function in functions:
        try:
            getattr(importlib.import_module(module), function)
        except Exception as error:
            failures.append(f"from {module} import {function}: {error!r}")
print(json.dumps(failures))
"""
    assert json.loads(_in_a_new_process(code, json.dumps([names, HEAVY]))) == []
