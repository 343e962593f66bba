"""How tests share the machine when pytest has several processes, and how a coroutine is a test."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Generator, Iterator

import pytest
from hypothesis import settings

# Before torch is imported: its threads spin while they wait, and take the cores from the other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example takes as long as the other processes leave it; each run of the suite draws others.
settings.register_profile("shared", deadline=None, max_examples=40)
settings.load_profile("shared")

# Fixtures that take long to make: all tests of a group run where they have been made, once.
GROUPS = {
    **{"built": "packages", "image": "packages", "site": "third party", "completion": "completion"},
    **{"all_of_it": "one run", "ran": "one run", "graph": "imports", "example": "example"},
}


@pytest.hookimpl(wrapper=True)  # before xdist, which reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    for item in items:
        names: list[str] = getattr(item, "fixturenames", [])
        for group in {GROUPS[name] for name in names if name in GROUPS}:
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)  # the long ones begin at once
    return (yield)


@pytest.fixture(params=["float64", "bfloat16"])
def other_defaults(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Return a function that gives torch another default dtype and device until the test ends."""
    import torch

    def change() -> None:
        torch.set_default_dtype(getattr(torch, request.param))
        torch.set_default_device("meta")

    yield change
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in given}))
    return True


def pytest_xdist_auto_num_workers() -> int:
    """More processes than cores: tests of daemons mostly wait."""
    return 2 * (os.cpu_count() or 1)
