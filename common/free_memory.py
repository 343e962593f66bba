"""Returns free memory from malloc to the system.

glibc before 2.38 does not reuse a freed aligned block once a small block lies beside it (glibc bug 14581).
Because torch aligns every tensor, the gradients of each step may take new memory, without end. Some workers
were observed to grow by the size of the model in every step.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

_ARENA_MAX = -8  # of malloc.h
LEAST_BYTES = 64 << 20
EVERY_S = 1.0


class _Mallinfo2(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _functions() -> tuple[Callable[[], int], Callable[[], object]] | None:
    """Return malloc's functions that count free bytes and return them to the system; None if it has none."""
    try:
        libc = ctypes.CDLL(None)
        info, trim = libc.mallinfo2, libc.malloc_trim
    except (OSError, AttributeError):
        return None
    info.restype = _Mallinfo2
    return (lambda: int(info().fordblks)), (lambda: trim(ctypes.c_size_t(0)))


def give_back() -> None:
    """Return all free memory to the system, of which the chunks of a whole model leave much."""
    if (functions := _functions()) is not None:
        functions[1]()


def share_arena() -> None:
    """Have all threads take memory from one arena of malloc, so that each reuses memory of others.

    Call it before there are other threads.
    """
    with suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


class FreeMemory:
    """Limits the growth of malloc's free memory.

    The usual amount, such as the activations that are free at the end of each step, stays with malloc: the
    next step needs it.
    """

    def __init__(self, limit_bytes: int) -> None:
        """limit_bytes: number of bytes by which free memory may exceed its usual amount without being
        returned to the system; values below 64 MiB count as 64 MiB."""
        self._limit_bytes = max(LEAST_BYTES, limit_bytes)
        self._functions = _functions()
        self._looked_at = 0.0
        self._usual_bytes: int | None = None  # free bytes at the first call since memory was returned

    def limit(self) -> None:
        """Return all free memory to the system if it has grown by more than the limit.

        Call it at the same point of each step. It measures once a second at most.
        """
        now = time.monotonic()
        if self._functions is None or now - self._looked_at < EVERY_S:
            return
        self._looked_at = now
        free, give_back = self._functions
        free_bytes = free()
        if self._usual_bytes is None:
            self._usual_bytes = free_bytes
        elif free_bytes > self._usual_bytes + self._limit_bytes:
            give_back()
            self._usual_bytes = None
