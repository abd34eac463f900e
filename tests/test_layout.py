"""The shape of the code: imports go one way, the maths stands alone, the algorithm fits a screen."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import featcal

ROOT = Path(featcal.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imported_by(name: str) -> set[str]:
    """Modules of the package that a module imports, wherever the statement stands (type checking aside)."""
    found: set[str] = set()
    package = name.split(".") if MODULES[name].name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    tree = ast.parse(MODULES[name].read_text())
    typing_only = [
        node for block in ast.walk(tree) if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    ]  # fmt: skip
    for node in ast.walk(tree):
        if node in typing_only or not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        for alias in node.names:
            deeper = ".".join([*base, alias.name])
            found.add(deeper if deeper in MODULES else ".".join(base))
    return {target for target in found if target in MODULES} - {name}


GRAPH = {name: imported_by(name) for name in MODULES}


def test_imports_have_no_cycle() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("errors", set()),
        ("version", set()),
        ("settings", {"errors"}),
        ("solve", set()),
        ("moments", {"solve"}),
        ("update", {"solve", "moments", "settings"}),
        ("blocks", {"errors"}),
        ("targets", {"errors", "blocks", "settings"}),
        ("calibrate", {"network", "stream", "student", "targets", "update"}),
    ],
)
def test_the_core_imports_only_what_lies_below(module: str, allowed: set[str]) -> None:
    assert GRAPH[module] <= allowed


def test_the_algorithm_fits_a_screen() -> None:
    lines = (ROOT / "calibrate.py").read_text().splitlines()
    assert len(lines) < 120
    assert not any(word in "\n".join(lines) for word in ("rank", "open(", "cuda"))


def test_no_handler_swallows_everything() -> None:
    """A bare `Exception` may be caught only to let all but a known kind through (tokenizers raises it itself)."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "Exception":
                assert any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node)), name
