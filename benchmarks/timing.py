"""Times of tasks that run alternately, so that drift of the machine's speed affects all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

# After a parallel region torch's OpenMP threads spin for some milliseconds before they sleep. The next task
# would share a core with them, so it waits until they sleep.
REST_S = 0.02


def wall(task: Callable[[], object], calls: int = 1) -> float:
    """Return the wall seconds of one call of the task.

    Args:
        task: function to time.
        calls: number of calls to average over; more than one for short tasks.
    """
    time.sleep(REST_S)
    if calls > 1:
        task()  # wakes the threads
    started = time.perf_counter()
    for _ in range(calls):
        task()
    return (time.perf_counter() - started) / calls


def interleaved(
    tasks: Sequence[Callable[[], object]], repeats: int, timed: Callable[[Callable[[], object]], float] = wall
) -> list[float]:
    """Run the tasks alternately and return the median seconds of each.

    The first round, which compiles, is left out.

    Args:
        tasks: functions to time.
        repeats: number of rounds that count.
        timed: function that runs a task and returns its seconds.
    """
    _, *rounds = [[timed(task) for task in tasks] for _ in range(repeats + 1)]
    return [statistics.median(taken) for taken in zip(*rounds, strict=True)]
