"""Memory that malloc holds for nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.worker.session import memory
from gradwire.worker.session.memory import LEAST_BYTES, FreeMemory

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_free_memory_beyond_the_limit_goes_back_to_the_system() -> None:
    # Blocks of the heap; the last stays, so that the heap cannot shrink by itself.
    blocks = [bytearray(os.urandom(64 << 10)) for _ in range(4096)]
    del blocks[:-1]
    before = resident_bytes()
    FreeMemory(LEAST_BYTES).limit()  # of glibc 2.33 or later
    assert before - resident_bytes() > 128 * MIB


def limited(free: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """What looks once more, and returns how often memory has been given back."""
    given: list[int] = []
    monkeypatch.setattr(memory, "_functions", lambda: (lambda: free, lambda: given.append(1)))
    subject = FreeMemory(limit)

    def look() -> int:
        subject.limit()
        return len(given)

    return look


def test_up_to_the_limit_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limited(LEAST_BYTES, 0, monkeypatch)() == 0
    assert limited(LEAST_BYTES + 1, 0, monkeypatch)() == 1
    assert limited(4 * LEAST_BYTES, 4 * LEAST_BYTES, monkeypatch)() == 0
    assert limited(4 * LEAST_BYTES + 1, 4 * LEAST_BYTES, monkeypatch)() == 1


def test_it_is_looked_at_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    look = limited(LEAST_BYTES + 1, 0, monkeypatch)
    now = [100.0]
    monkeypatch.setattr("gradwire.worker.session.memory.time.monotonic", lambda: now[0])
    assert look() == look() == 1
    now[0] += memory.EVERY_S
    assert look() == look() == 2


def test_a_malloc_that_cannot_be_asked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_functions", lambda: None)
    FreeMemory(0).limit()
