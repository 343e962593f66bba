"""The papers are a package like any other: they use what is public, and are found by entry points."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire import Task, load_task

ROOT = Path(__file__).parents[1]
# Modules whose names are public: `__all__`, or what the module imports under its own name.
PUBLIC = (
    *("gradwire", "gradwire.benchmarks", "gradwire.coded.arithmetic", "gradwire.compressors"),
    "gradwire.planning",
)


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import of gradwire in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.partition(".")[0] == "gradwire")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gradwire":
            yield from ((str(node.module), each.name) for each in node.names)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.name)
def test_only_the_public_face_of_gradwire_is_imported(path: Path) -> None:
    for module, name in imported(path):
        assert module in PUBLIC, f"{path.name}: {module} is not public"
        assert name, f"{path.name}: import the names of {module} that are used"
        public = getattr(importlib.import_module(module), "__all__", None)
        assert not name.startswith("_") or name == "__version__"
        assert public is None or name in public, f"{path.name}: {module}.{name} is not public"


def test_the_tasks_are_found_by_their_names() -> None:
    for name in ("cifar10", "cifar100", "mnist", "hyperspectral"):
        assert isinstance(load_task(f"{name}:synthetic=200"), Task)
