"""Tensors do not depend on torch's defaults, which belong to the user's script.

`torch.set_default_dtype` and `torch.set_default_device` change each allocation that does not name its dtype
and its device.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Programs of their own: they allocate data and networks as a user's script does, and import no user's code.
OF_THEIR_OWN = (
    "benchmarks/",
    "deploy/kubernetes/script/",
    "docs/",
    "examples/",
    "papers/",
    "records/",
    "tests/",
)
BUILT_IN_TASKS = ("characters", "digits")
ALLOCATES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


def allocations() -> Iterator[tuple[str, set[str]]]:
    """Yield each call of torch that allocates, as FILE:LINE, and the keywords that it names."""
    shown = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    for path in sorted([*ROOT.glob("*.py"), *(file for room in shown for file in room.rglob("*.py"))]):
        place = path.relative_to(ROOT)
        task = place.parts[:2] == ("worker", "tasks") and path.stem in BUILT_IN_TASKS
        if str(place).startswith(OF_THEIR_OWN) or task:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of = node.func.value
            if isinstance(of, ast.Name) and of.id == "torch" and node.func.attr in ALLOCATES:
                yield f"{place}:{node.lineno}", {each.arg for each in node.keywords if each.arg}


def test_each_allocation_names_its_dtype_and_its_device() -> None:
    found = dict(allocations())
    assert found
    assert [place for place, named in found.items() if not {"dtype", "device"} <= named] == []
