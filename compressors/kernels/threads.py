"""A pool of threads for the kernels, which release the interpreter lock and share memory.

Numba's threading layers are no alternative: one aborts when two Python threads enter it at once, another does
not survive a fork, and the third needs a library that a wheel cannot contain. The pool is created on first
use, never at import, and discarded in a forked child. Any number of threads may call `run` at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common import machine

# With fewer elements, waking a thread takes about as long as the work.
ELEMENTS_PER_THREAD = 1 << 18


class _Pool:
    """The helper threads of the kernels, one fewer than `threads`, because the calling thread works, too.

    Attributes:
        threads: number of threads that one kernel may use, the calling thread included.
    """

    def __init__(self) -> None:
        self.threads = machine.cores()
        self.forget()

    def forget(self) -> None:
        """Discard the lock and the threads; a forked child has inherited unusable ones."""
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def resize(self, threads: int) -> None:
        with self._lock:
            # Dropped, not shut down: a call in flight keeps its executor until its work is done.
            self._executor = None
            self.threads = threads

    def executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                helpers = max(1, self.threads - 1)
                self._executor = ThreadPoolExecutor(helpers, thread_name_prefix="gradwire-kernel")
            return self._executor


_pool = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)


def set_threads(threads: int) -> None:
    """Set the largest number of threads that a kernel uses for a large tensor. The default is one per usable
    core. Raises ValueError if `threads` is less than 1."""
    if threads < 1:
        raise ValueError(f"threads: expected at least 1, got {threads}")
    _pool.resize(threads)


def limit_threads(threads: int) -> None:
    """Set the number of `set_threads`, unless it is lower already."""
    set_threads(min(threads, _pool.threads))


def run(kernel: Callable[..., Any], elements: int, *args: Any) -> None:
    """Call `kernel(cursor, *args)` on the calling thread and on helpers, at most one thread per 2**18
    elements.

    Each thread claims chunks of the range from the cursor, int64 of shape (1,), until none are left.

    Args:
        elements: number of elements that the kernel reads, by which the number of threads is chosen.
    """
    cursor = np.zeros(1, np.int64)
    helpers = min(_pool.threads, elements // ELEMENTS_PER_THREAD) - 1
    if helpers < 1:
        kernel(cursor, *args)
        return
    executor = _pool.executor()
    futures = [executor.submit(kernel, cursor, *args) for _ in range(helpers)]
    try:
        kernel(cursor, *args)
    finally:
        for future in futures:
            # A helper that has not started yet is cancelled: it would find no work left.
            if not future.cancel():
                future.result()


class Scratch(threading.local):
    """Memory that each thread reuses, because fresh memory takes as long as half a pass over it."""

    def __init__(self, largest: int) -> None:
        """largest: number of elements of the largest arrays that are kept for reuse; `take` allocates larger
        ones anew each time."""
        self._largest = largest
        self._words, self._floats = np.empty(0, np.uint32), np.empty(0, np.float32)

    def take(self, elements: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """Return a uint32 and a float32 array of `elements` elements, uninitialized; this thread's next call
        reuses them.
        """
        if elements > self._largest:
            return np.empty(elements, np.uint32), np.empty(elements, np.float32)
        if elements > self._words.size:
            self._words, self._floats = np.empty(elements, np.uint32), np.empty(elements, np.float32)
        return self._words[:elements], self._floats[:elements]
