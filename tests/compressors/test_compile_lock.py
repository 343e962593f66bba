"""One process of several compiles a kernel; the others wait for it, say so, and load what it has compiled."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest

from gradwire.compressors.kernels import compile_lock
from gradwire.compressors.kernels.compiling import kernel
from gradwire.compressors.kernels.notices import COMPILING, UNCACHED

# Needs the kernels of the smallest module. Before it compiles the first of them it reads a line.
PROGRAM = """
import sys
from gradwire.compressors import kernels
def tell(line):
    print(line, flush=True)
    if line.startswith("compiling kernels, once"):
        sys.stdin.readline()
kernels.tell_of_compiling(tell)
kernels.sparse.warm_up()
from gradwire.compressors.kernels import sparse_loops
stats = [each.stats for each in vars(sparse_loops).values() if hasattr(each, "stats")]
stats = [each for each in stats if each.cache_path]
for counts in ([each.cache_misses for each in stats], [each.cache_hits for each in stats]):
    print(sum(sum(count.values()) for count in counts))
"""


class Started:
    """A process that needs kernels, and what it says."""

    def __init__(self, cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        """Let it compile."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, int]:
        """How many kernels it has compiled, and how many it has loaded."""
        output, _ = self.process.communicate(timeout=100)
        compiled, loaded = output.splitlines()[-2:]
        return int(compiled), int(loaded)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Started]]:
    """Three, with one cache."""
    found = [Started(tmp_path) for _ in range(3)]
    yield found
    for each in found:
        each.process.kill()
        each.process.communicate()


def test_each_kernel_is_compiled_once_also_when_the_first_process_is_killed(
    started: list[Started],
) -> None:
    lines = {each: each.line() for each in started}
    (first,) = (each for each in started if lines[each] == COMPILING)
    others = [each for each in started if each is not first]
    waits = f"waiting for process {first.process.pid}, which compiles kernels"
    assert [lines[each] for each in others] == [waits] * 2

    first.process.kill()
    for each in others:  # either may be the next to have the lock
        each.go()
    compiled, loaded = zip(*(each.end() for each in others), strict=True)
    assert sum(compiled) == sum(loaded) > 0


def test_without_a_folder_each_process_says_that_it_compiles_for_itself(tmp_path: Path) -> None:
    program = """
from gradwire.compressors import kernels
from numba.core.caching import FunctionCache
FunctionCache._impl_class._locator_classes.clear()
kernels.tell_of_compiling(print)
kernels.sparse.warm_up()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [UNCACHED]


class Empty:
    """A cache that never has the kernel, in place of numba's."""

    def __init__(self, path: Path) -> None:
        self.cache_path = str(path)
        self.saved: list[object] = []

    def load_overload(self, signature: object, target: object) -> None:
        return None

    def save_overload(self, signature: object, data: object) -> None:
        self.saved.append(data)


def is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


# Compiles a kernel; forks a child while it holds the lock, which lives on after the kernel is saved.
FORKING = """
import fcntl, os, sys
from gradwire.compressors.kernels.compile_lock import LockedCache
class Empty:
    cache_path = sys.argv[1]
    def load_overload(self, signature, target): pass
    def save_overload(self, signature, data): pass
def is_free():
    with open(sys.argv[1] + "/kernel.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
kernel = LockedCache(Empty(), "kernel")
kernel.load_overload(None, None)
ends, goes_on = os.pipe()
if not os.fork():
    os.close(goes_on)
    os.read(ends, 1)
    os._exit(0)
print(is_free())
kernel.save_overload(None, None)
print(is_free())
os.close(goes_on)
os.wait()
"""


def test_a_forked_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["False", "True"]


def test_a_compilation_that_fails_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def without_a_type(value: object) -> None:
        value.no_such_attribute()  # type: ignore[attr-defined]  # pyright: ignore

    with pytest.raises(numba.TypingError):
        kernel(without_a_type)(1)
    (lock,) = tmp_path.rglob("*without_a_type*.lock")
    assert lock.read_text() == str(os.getpid()), "the process had it"
    assert is_free(lock)


def test_a_process_that_waits_too_long_compiles_without_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_lock, "WAIT_SECONDS", 0.2)
    cache = Empty(tmp_path)
    with (tmp_path / "kernel.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting: Any = compile_lock.LockedCache(cache, "kernel")  # untyped, as numba's caches are
        waiting.load_overload(None, None)
        waiting.save_overload(None, "compiled")
        assert cache.saved == ["compiled"]
        assert not is_free(tmp_path / "kernel.lock"), "it is still the other's"
