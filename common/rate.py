"""A rate limit, by a clock that the caller reads."""

from __future__ import annotations

import math


class Rate:
    """At most `per_second` events a second, and `burst` of them at once."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second, self._burst = per_second, float(burst)
        self._left, self._at = self._burst, -math.inf
        self._put_off = 0

    def take(self, now: float) -> bool:
        """Count an event, and return whether the limit allows it. now: seconds of a monotonic clock."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            self._put_off += 1
            return False
        self._left -= 1
        return True

    def put_off(self) -> int:
        """Return the number of events over the limit since the last call."""
        found, self._put_off = self._put_off, 0
        return found
