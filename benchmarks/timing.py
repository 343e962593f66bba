"""Times within one run, so that the machine's drift meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

# After a parallel region torch's OpenMP threads spin for some milliseconds before they sleep. The next one to
# be measured would share a core with them, so it waits until they are asleep.
REST_S = 0.02


def interleaved(tasks: Sequence[Callable[[], object]], repeats: int, calls: int = 1) -> list[float]:
    """Median seconds of a call of each, run in turn; the first round touches memory and is not counted.

    calls: of a task in each turn; several for short ones.
    """
    seconds: list[list[float]] = [[] for _ in tasks]
    for repeat in range(repeats + 1):
        for task, taken in zip(tasks, seconds, strict=True):
            time.sleep(REST_S)
            if calls > 1:
                task()  # which wakes the threads up
            started = time.perf_counter()
            for _ in range(calls):
                task()
            if repeat:
                taken.append((time.perf_counter() - started) / calls)
    return [statistics.median(taken) for taken in seconds]
