"""How chunks keep to a rate. No I/O: the clock is given."""

from __future__ import annotations

LATE_S = 0.02  # by which chunks may be late, and catch up: a pause never ends to the millisecond


class Throttle:
    """rate: bytes per second, 0 for as fast as it goes."""

    def __init__(self) -> None:
        self.rate = 0
        self._due = 0.0

    def set(self, rate: int) -> None:
        """Set the rate. Bytes sent before do not count."""
        self.rate, self._due = rate, 0.0

    def sent(self, size: int, now: float) -> None:
        """Note that bytes are sent."""
        if self.rate:
            self._due = max(self._due, now - LATE_S) + size / self.rate

    def pause(self, now: float) -> float:
        """Seconds until more may go."""
        return max(0.0, self._due - now)
