"""Tell listeners once that this process compiles kernels, or waits for one that does. Imports no numba."""

from __future__ import annotations

from collections.abc import Callable

COMPILING = "compiling kernels, once per machine"
UNCACHED = "compiling kernels, in every process: no folder can be written for them; set NUMBA_CACHE_DIR"

Tell = Callable[[str], None]
_said: set[Callable[..., None]] = set()


def _nobody(line: str) -> None:
    pass


_tell: Tell = _nobody
_doing: Tell = _nobody


def tell_of_compiling(tell: Tell, doing: Tell = _nobody) -> None:
    """Say that this process compiles a kernel, or waits for another process that does.

    Args:
        tell: called with a line the first time, on the thread that needs the kernel.
        doing: likewise, for each kernel.
    """
    global _tell, _doing
    _tell, _doing = tell, doing
    _said.clear()


def compiling() -> None:
    _say(compiling, COMPILING)


def uncached() -> None:
    _say(uncached, UNCACHED)


def waiting(process: str) -> None:
    """process: its id; empty if it has not written it yet."""
    _say(waiting, f"waiting for process {process or '?'}, which compiles kernels")


def _say(kind: Callable[..., None], line: str) -> None:
    _doing(line)
    if kind not in _said:
        _said.add(kind)
        _tell(line)
