"""The public face: `gradwire.__all__`, and the rooms of a script: `compressors`, `ddp`, `optim`.

The examples in docstrings run in the order of the list below, beside one server for scripts. They find what a
script has: `model`, `optimizer` and `dataset`, new ones for every example.
"""

from __future__ import annotations

import builtins
import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from daemons import Daemons

import gradwire

pytestmark = pytest.mark.xdist_group("face")  # one server, whose job ends with the example of Job
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "scripts.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
AT_THE_END = ("Job", "JobFinished", "Refused")  # the example of Job trains to the end of the job
ROOMS = {"": gradwire.__all__, "compressors.": ("create",), "ddp.": ("HookState",), "optim.": ("muon",)}


def public(name: str) -> Any:
    found: Any = gradwire
    for part in name.split("."):
        found = getattr(found, part)
    return found


NAMES = [f"{room}{name}" for room, names in ROOMS.items() for name in names if name != "__version__"]
NAMES.sort(key=lambda name: AT_THE_END.index(name) if name in AT_THE_END else -1)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server for scripts."""
    started = Daemons()
    try:
        yield started.server("--script", "--epochs", "2", "--batch-size", "4").address
    finally:
        started.end()


@pytest.fixture
def script(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that a script has. It is the only rank of a job of DDP's, too."""
    monkeypatch.setenv("GC_SERVER", server)
    torch.manual_seed(1)
    store: Any = getattr(torch.distributed, "HashStore")()  # noqa: B009 (not among its declared names)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.Linear(4, 1)
    yield {
        "gradwire": gradwire,
        "numpy": numpy,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1)),
    }
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name: str, script: dict[str, Any]) -> None:
    example = doctest.DocTestParser().get_doctest(
        inspect.getdoc(public(name)) or "", script, name, None, None
    )
    assert example.examples
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=said.append)
    assert not failed, "".join(said)


def documented(found: Any) -> Iterator[str]:
    """The docstrings of a function, or of a class and its public methods."""
    if inspect.isfunction(found) or inspect.isclass(found):
        yield inspect.getdoc(found) or ""
    for name, member in vars(found).items() if inspect.isclass(found) else ():
        if name == "__init__" or not name.startswith("_"):
            yield inspect.getdoc(member) or ""


def test_every_exception_that_a_public_call_raises_is_exported() -> None:
    rooms = (gradwire.compressors, gradwire.compressors.library, gradwire.ddp)
    calls = [public(name) for name in NAMES]
    calls += [getattr(room, name) for room in rooms for name in dir(room) if not name.startswith("_")]
    raised: set[str] = set()
    for text in (text for call in calls for text in documented(call)):
        if section := re.search(r"^Raises:\n((?:[ ]{4}.*\n?)+)", text, re.M):
            raised |= set(re.findall(r"^ {4}(\w+):", section[1], re.M))
    assert {"ScriptError", "SpecError", "RanksDisagree"} <= raised
    assert {name for name in raised if not hasattr(builtins, name)} <= set(gradwire.__all__)


def test_the_table_has_every_exported_exception() -> None:
    rows = PAGE.read_text().split("\n## Exceptions\n")[1]
    listed = {
        name for row in re.findall(r"^\| (`.+?) \| ", rows, re.M) for name in re.findall(r"`(\w+)`", row)
    }
    exported = {
        name for name in NAMES if inspect.isclass(public(name)) and issubclass(public(name), BaseException)
    }
    assert listed == exported


def test_dir_has_every_public_name_for_completion_and_the_site() -> None:
    assert set(gradwire.__all__) <= set(dir(gradwire))
