"""Times within one run, so that the machine's drift meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

# After a parallel region torch's OpenMP threads spin for some milliseconds before they sleep. The next one to
# be measured would share a core with them, so it waits until they are asleep.
REST_S = 0.02


def wall(task: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of a call. calls: calls in a row; several for short tasks."""
    time.sleep(REST_S)
    if calls > 1:
        task()  # which wakes the threads up
    started = time.perf_counter()
    for _ in range(calls):
        task()
    return (time.perf_counter() - started) / calls


def interleaved(
    tasks: Sequence[Callable[[], object]], repeats: int, timed: Callable[[Callable[[], object]], float] = wall
) -> list[float]:
    """Return the median seconds of each task, run in turn without the first round, which compiles.

    timed: runs a task and returns its seconds.
    """
    _, *rounds = [[timed(task) for task in tasks] for _ in range(repeats + 1)]
    return [statistics.median(taken) for taken in zip(*rounds, strict=True)]
