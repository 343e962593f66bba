"""Fixtures that the tests of gc-run share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

WaitUntilGone = Callable[[list[int], float], None]


def is_running(pid: int) -> bool:
    """Not whether it still has a number: an orphan that has ended keeps it until someone asks for its end."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def wait_until_gone() -> WaitUntilGone:
    """Waits until none of these processes runs, at most so many seconds."""

    def wait(pids: list[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while alive := [pid for pid in pids if is_running(pid)]:
            assert time.monotonic() < deadline, f"still running: {alive}"
            time.sleep(0.05)

    return wait
