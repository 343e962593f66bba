"""The time without progress after which a training thread counts as hung.

A worker says with its heartbeats, which come from another thread, how long its training thread has been at
what it does. Waiting for the server is not counted: there the server is to blame. The server decides by this
rule, and the worker's /livez goes by it.
"""

from __future__ import annotations

import math

TIMES = 5  # as long as the longest stretch that came to its end
FIRST = 3  # times as long as usual: kernels compile, data are cached


def limit_s(stated_s: float, longest_s: float, *, first: bool) -> float:
    """Seconds without progress after which a training thread hangs.

    Args:
        stated_s: `--progress-seconds`; 0 for never.
        longest_s: the longest that the same activity has taken in this job.
        first: whether the worker has yet to finish a step.
    """
    if not stated_s:
        return math.inf
    return max(stated_s, TIMES * longest_s) * (FIRST if first else 1)
