"""The time without progress after which a training thread counts as hung.

A worker's heartbeats, sent from another thread, report how long its training thread has been in its current
activity. Waiting for the server does not count. The server revokes samples by this rule, and the worker's
/livez fails by it.
"""

from __future__ import annotations

import math

TIMES = 5  # limit, as a multiple of the longest completed activity
FIRST = 3  # factor on the limit before the first step is finished: kernels compile, data are cached


def limit_s(stated_s: float, longest_s: float, *, first: bool) -> float:
    """Return the seconds without progress after which a training thread counts as hung; infinity for never.

    Args:
        stated_s: `--progress-seconds`; 0 for no limit.
        longest_s: longest duration of the same activity in this job so far, in seconds.
        first: True while the worker has not finished a step.
    """
    if not stated_s:
        return math.inf
    return max(stated_s, TIMES * longest_s) * (FIRST if first else 1)
