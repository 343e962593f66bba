"""A rate limit. The caller reads the clock."""

from __future__ import annotations

import math


class Rate:
    """A rate limit of `per_second` events a second, with bursts of at most `burst` events."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second, self._burst = per_second, float(burst)
        self._left, self._at = self._burst, -math.inf
        self._put_off = 0

    def take(self, now: float) -> bool:
        """Count an event at `now`, in seconds of a monotonic clock, and return True if the limit allows
        it."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            self._put_off += 1
            return False
        self._left -= 1
        return True

    def put_off(self) -> int:
        """Return the number of events that the limit has rejected since the last call."""
        found, self._put_off = self._put_off, 0
        return found
