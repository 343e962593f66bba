"""Memory that malloc has and nobody uses goes back to the system.

glibc before 2.38 does not use a freed aligned block again once something small lies beside it (its bug
14581). torch aligns every tensor, so that the gradients of each step may take new memory, without end: it was
seen to grow by the size of the model in every step, at some workers and not at others.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import ClassVar

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
    """Return functions that count free bytes and that return them; None where malloc has neither."""
    try:
        libc = ctypes.CDLL(None)
        info, trim = libc.mallinfo2, libc.malloc_trim
    except (OSError, AttributeError):
        return None
    info.restype = _Mallinfo2
    return (lambda: int(info().fordblks)), (lambda: trim(ctypes.c_size_t(0)))


class FreeMemory:
    """Keeps what malloc holds for nobody from growing. What is free at the end of each step, as the
    activations of a network are, is kept: the next one needs it."""

    def __init__(self, limit_bytes: int) -> None:
        """limit_bytes: by how much it may grow, about; at least 64 MiB."""
        self._limit_bytes = max(LEAST_BYTES, limit_bytes)
        self._functions = _functions()
        self._looked_at = 0.0
        self._usual_bytes: int | None = None  # when it was first looked at since memory was given back

    def limit(self) -> None:
        """Give everything back if there is more than the limit beyond what was usual.

        To be called at the same point of each step; looks once a second at most.
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
