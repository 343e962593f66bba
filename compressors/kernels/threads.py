"""A few threads of our own, because the kernels release the interpreter lock and memory is shared.

Not numba's threading layers: one of them aborts when two Python threads enter it at once, another does not
survive a fork, and the third needs a library that a wheel cannot bring. The pool is made on first use, never
at import; it is forgotten in a forked child; and any number of threads may call `run` at once.
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

# Below this, waking a thread takes about as long as the work.
ELEMENTS_PER_THREAD = 1 << 18


class _Pool:
    """The helpers of the calling thread: one fewer than the number of threads."""

    def __init__(self) -> None:
        self.threads = machine.cores()
        self.forget()

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def resize(self, threads: int) -> None:
        with self._lock:
            # Dropped rather than shut down: a call in flight keeps it until its work is done.
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
    """Use at most this many threads, at least 1, for a large tensor; the default is one per usable core."""
    if threads < 1:
        raise ValueError(f"threads: expected at least 1, got {threads}")
    _pool.resize(threads)


def run(kernel: Callable[..., Any], elements: int, *args: Any) -> None:
    """Call `kernel(cursor, *args)` on as many threads as `elements` are worth, this one included.

    The kernel takes chunks of its range from the cursor (int64, shape (1,)) until there are none.
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
            # One that has not started by now would find nothing left to do.
            if not future.cancel():
                future.result()


class Scratch(threading.local):
    """Memory that a thread uses again and again: fresh memory takes as long as half a pass over it.

    largest: elements, of 8 bytes, beyond which it is not kept.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._words, self._floats = np.empty(0, np.uint32), np.empty(0, np.float32)

    def take(self, elements: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """Two arrays with anything in them; the next call in this thread gives them out again."""
        if elements > self._largest:
            return np.empty(elements, np.uint32), np.empty(elements, np.float32)
        if elements > self._words.size:
            self._words, self._floats = np.empty(elements, np.uint32), np.empty(elements, np.float32)
        return self._words[:elements], self._floats[:elements]
