"""Notices that this process compiles kernels, or waits for a process that does. Imports no numba."""

from __future__ import annotations

from collections.abc import Callable

COMPILING = "compiling kernels, once per machine"
UNCACHED = (
    "compiling kernels, in every process: no cache folder is writeable; set NUMBA_CACHE_DIR to one that is"
)

Tell = Callable[[str], None]
_said: set[Callable[..., None]] = set()


def _ignore(line: str) -> None:
    pass


_tell: Tell = _ignore
_doing: Tell = _ignore


def tell_of_compiling(tell: Tell, doing: Tell = _ignore) -> None:
    """Register callbacks for notices that this process compiles a kernel, or waits for a process that does.

    Both are called on the thread that needs the kernel: `doing` each time, `tell` the first time for each
    kind of notice.
    """
    global _tell, _doing
    _tell, _doing = tell, doing
    _said.clear()


def compiling() -> None:
    _say(compiling, COMPILING)


def uncached() -> None:
    _say(uncached, UNCACHED)


def waiting(process: str) -> None:
    """Say that another process compiles a kernel; its id is empty if it has not written it yet."""
    _say(waiting, f"waiting for process {process or '?'}, which compiles kernels")


def _say(kind: Callable[..., None], line: str) -> None:
    """Pass the line to `doing`, and the first time for this kind also to `tell`."""
    _doing(line)
    if kind not in _said:
        _said.add(kind)
        _tell(line)
