"""Memory that malloc holds for nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.common import free_memory as memory
from gradwire.common.free_memory import LEAST_BYTES, FreeMemory

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_that_has_come_free_goes_back_to_the_system() -> None:
    subject = FreeMemory(LEAST_BYTES)
    # Blocks of the heap; the last stays, so that the heap cannot shrink by itself.
    blocks = [bytearray(os.urandom(64 << 10)) for _ in range(4096)]
    subject.limit()  # of glibc 2.33 or later; after the blocks, which may fill memory that was free before
    del blocks[:-1]
    before = resident_bytes()
    time.sleep(memory.EVERY_S)
    subject.limit()
    assert before - resident_bytes() > 128 * MIB


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Looks when so much is free, after some seconds; returns how often memory has been given back."""
    free, given, now = [0], list[int](), [100.0]
    monkeypatch.setattr(memory, "_functions", lambda: (lambda: free[0], lambda: given.append(1)))
    monkeypatch.setattr("gradwire.common.free_memory.time.monotonic", lambda: now[0])
    subject = FreeMemory(0)

    def look(free_bytes: int, after_s: float = memory.EVERY_S) -> int:
        free[0] = free_bytes
        now[0] += after_s
        subject.limit()
        return len(given)

    return look


def test_memory_goes_back_once_it_has_grown_by_more_than_the_limit(look: Callable[..., int]) -> None:
    usual = 5 * LEAST_BYTES
    assert look(usual) == look(usual + LEAST_BYTES) == look(0) == 0
    assert look(usual + LEAST_BYTES + 1) == 1


def test_what_every_step_leaves_free_is_kept(look: Callable[..., int]) -> None:
    """The first look may come before there is anything; then it is given back once."""
    assert look(0) == 0
    assert [look(9 * LEAST_BYTES) for _ in range(5)] == [1] * 5


def test_it_is_looked_at_once_a_second_at_most(look: Callable[..., int]) -> None:
    assert look(0) == look(9 * LEAST_BYTES, 0.9) == 0
    assert look(9 * LEAST_BYTES, 0.2) == 1


def test_a_malloc_that_cannot_be_asked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_functions", lambda: None)
    FreeMemory(0).limit()
