# mypy: ignore-errors
# pyright: basic
"""A lock by which only one process of a machine compiles each kernel. The others wait and load the result.

Numba's cache has no lock: processes that start with an empty cache would each compile everything, on the same
cores. So a process that finds a kernel missing locks a file beside the cache, then looks again. The system
releases the lock when the process ends, for any reason.

The wait is bounded, because a holder may be suspended, and a child that it forked keeps the lock after the
holder was killed. After `WAIT_SECONDS` the process compiles the kernel itself, without the lock.

A wheel cannot contain the machine code. A file of numba's cache is valid for one kind of processor, one
release of numba and Python, and one modification time of the source. Kernels compiled ahead for every
processor would have to do without AVX. The container image contains the cache of the processor that built it
(deploy/image/Containerfile).
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
    """Numba's cache of one kernel, with a file lock that is held from when the kernel is missing until it is
    saved.

    `compiling.kernel` puts it in place of the cache that numba made. All other attributes are those of
    numba's cache.
    """

    def __init__(self, cache, name: str) -> None:
        """Take numba's cache, and the name of the lock file without its suffix."""
        self._cache = cache
        self._name = name
        self._file: int | None = None

    def __getattr__(self, name: str):
        return getattr(self._cache, name)

    def load_overload(self, sig, target_context):
        """Return the machine code for a signature; None if it is missing, and then hold the lock."""
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
        """Save the machine code for a signature, and release the lock."""
        try:
            self._cache.save_overload(sig, data)
        finally:
            self._unlock()

    def unlock_on_failure(self, compiler) -> None:
        """Release the lock whenever `compiler.compile` raises: numba then never calls `save_overload`."""
        compile_kernel = compiler.compile

        def compile_or_unlock(*args):
            try:
                return compile_kernel(*args)
            except BaseException:
                self._unlock()
                raise

        compiler.compile = compile_or_unlock

    def _lock(self) -> None:
        """Take the lock. Give up if the file system has no locks, or after `WAIT_SECONDS`."""
        self._unlock()  # an exception between compiling and saving may have left it locked
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
            # Closing alone does not release the lock: a forked child has the file open, too.
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None
