"""Nothing that a compiled kernel is given or allocates outlives the call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gradwire.compressors import warm_up
from gradwire.compressors.kernels import lazy

CALLS = 1_000
RUNTIME: Any = import_module("numba.core.runtime")  # has no types


def kernels() -> Iterator[tuple[lazy.LazyModule, str, Callable[..., None]]]:
    """Yield every compiled kernel, with the module that callers reach it through."""
    for place, module in vars(lazy).items():
        if isinstance(module, lazy.LazyModule):
            compiled = import_module(f"gradwire.compressors.kernels.{place}")
            for name, value in vars(compiled).items():
                if getattr(value, "__module__", "") == compiled.__name__ and is_kernel(value):
                    yield module, name, value


def is_kernel(value: Any) -> bool:
    """Tell kernels, which `compiling.kernel` has given a name of their own, from functions that they call."""
    function = getattr(value, "py_func", None)
    return function is not None and function.__qualname__ != function.__name__


def live_blocks() -> int:
    """Arrays that machine code holds: those it was given, and those it allocated."""
    statistics = RUNTIME.rtsys.get_allocation_stats()
    return int(statistics.mi_alloc - statistics.mi_free)


def call_often(kernel: Callable[..., None], given: tuple[Any, ...]) -> None:
    """Call the kernel `CALLS` times with the same contents: some kernels count on in an array of theirs."""
    arrays: list[npt.NDArray[Any]] = [each for each in given if isinstance(each, np.ndarray)]
    written = [each for each in arrays if each.flags.writeable]
    contents = [each.copy() for each in written]
    references, blocks = [sys.getrefcount(each) for each in arrays], live_blocks()
    for _ in range(CALLS):
        for position, content in enumerate(contents):
            written[position][...] = content
        kernel(*given)
    assert live_blocks() == blocks
    assert [sys.getrefcount(each) for each in arrays] == references


def test_no_kernel_keeps_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """`warm_up` calls every kernel; each call is repeated a thousand times."""
    warm_up()
    RUNTIME._nrt_python.memsys_enable_stats()
    monkeypatch.setattr("gradwire.compressors.kernels.threads._pool.threads", 1)
    found, called = set[Callable[..., None]](), set[Callable[..., None]]()
    for module, name, kernel in list(kernels()):

        def repeated(*given: Any, kernel: Callable[..., None] = kernel) -> None:
            if kernel not in called:
                called.add(kernel)
                call_often(kernel, given)
            kernel(*given)

        found.add(kernel)
        monkeypatch.setattr(module, name, repeated)
    warm_up()
    assert len(found) > 25
    assert called == found
