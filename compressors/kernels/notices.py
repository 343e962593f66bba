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
    """Register the callbacks for notices that this process compiles a kernel, or waits for a process that
    does.

    Args:
        tell: called with the notice, the first time for each kind of notice, on the thread that needs the
            kernel.
        doing: called with the notice for each kernel, on the same thread.
    """
    global _tell, _doing
    _tell, _doing = tell, doing
    _said.clear()


def compiling() -> None:
    """Notify the listeners that this process compiles a kernel."""
    _say(compiling, COMPILING)


def uncached() -> None:
    """Notify the listeners that compiled kernels cannot be cached on disk."""
    _say(uncached, UNCACHED)


def waiting(process: str) -> None:
    """Notify the listeners that this process waits for another one to compile a kernel.

    Args:
        process: id of the other process; empty if it has not written its id to the lock file yet.
    """
    _say(waiting, f"waiting for process {process or '?'}, which compiles kernels")


def _say(kind: Callable[..., None], line: str) -> None:
    """Pass the line to `doing`, and the first time for this kind also to `tell`."""
    _doing(line)
    if kind not in _said:
        _said.add(kind)
        _tell(line)
