"""Limits the rate at which chunks are sent. No I/O: the caller passes the time."""

from __future__ import annotations

LATE_S = 0.02  # delay that later chunks may catch up: a pause never ends to the millisecond


class Throttle:
    """Computes the pauses that keep sent bytes to a rate.

    Attributes:
        rate: limit in bytes per second; 0 for no limit.
    """

    def __init__(self) -> None:
        self.rate = 0
        self._due = 0.0

    def set(self, rate: int) -> None:
        """Set the limit, in bytes per second; 0 for no limit. Bytes sent earlier do not count."""
        self.rate, self._due = rate, 0.0

    def sent(self, size: int, now: float) -> None:
        """Note that `size` bytes are sent at `now`, in seconds of a monotonic clock."""
        if self.rate:
            self._due = max(self._due, now - LATE_S) + size / self.rate

    def pause(self, now: float) -> float:
        """Return the seconds from `now` until more bytes may be sent; 0 if they may be sent at once."""
        return max(0.0, self._due - now)
