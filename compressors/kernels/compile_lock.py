# mypy: ignore-errors
# pyright: basic
"""Each kernel is compiled by one process of a machine. Others wait, and load what it has compiled.

Numba's cache has no lock: of several processes that start with an empty cache each would compile everything,
on the same cores. So a process that finds a kernel missing takes a lock on a file beside the cache, which the
system frees when the process ends, in whatever way, and looks again. The wait is bounded: a child that the
holder forked keeps the lock of a holder that was killed, and a holder may be suspended. After `WAIT_SECONDS`
the process compiles the kernel itself, without the lock.

A wheel cannot bring the machine code along. A file of numba's cache is good for one kind of processor, one
release of numba and of Python, and one modification time of the source; and kernels that were compiled ahead
for every processor would have to do without AVX. The container image brings the cache of the processor that
built it (deploy/image/Containerfile).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from . import notices

WAIT_SECONDS = 120.0  # for one kernel; the largest takes a few seconds on an idle processor
POLL_SECONDS = 0.05


class LockedCache:
    """A kernel's cache as numba uses it, with a lock from when the kernel is missing until it is saved."""

    def __init__(self, cache, name: str) -> None:
        self._cache = cache
        self._name = name
        self._file: int | None = None

    def __getattr__(self, name: str):
        return getattr(self._cache, name)

    def load_overload(self, sig, target_context):
        found = self._cache.load_overload(sig, target_context)
        if found is None:
            self._lock()
            found = self._cache.load_overload(sig, target_context)
            if found is None:
                notices.compiling()
            else:
                self._unlock()
        return found

    def save_overload(self, sig, data) -> None:
        try:
            self._cache.save_overload(sig, data)
        finally:
            self._unlock()

    def unlock_on_failure(self, compiler) -> None:
        """Release the lock if `compiler.compile` raises: numba then never calls `save_overload`."""
        compile_kernel = compiler.compile

        def compile_or_unlock(*args):
            try:
                return compile_kernel(*args)
            except BaseException:
                self._unlock()
                raise

        compiler.compile = compile_or_unlock

    def _lock(self) -> None:
        """Take the lock, or do without it: where the file system has none, or after `WAIT_SECONDS`."""
        self._unlock()  # left by an exception between compiling and saving
        try:
            self._file = os.open(
                Path(self._cache.cache_path) / f"{self._name}.lock",
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o666,
            )
            if not self._try_lock():
                notices.waiting(os.pread(self._file, 20, 0).decode(errors="replace"))
                deadline = time.monotonic() + WAIT_SECONDS
                while not self._try_lock():
                    if time.monotonic() >= deadline:
                        self._unlock()
                        return
                    time.sleep(POLL_SECONDS)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(os.getpid()).encode(), 0)
        except OSError:
            self._unlock()

    def _try_lock(self) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(self) -> None:
        if self._file is not None:
            # Closing alone does not release it: a forked child has the file open, too.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None
