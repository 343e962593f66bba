"""The training thread's activity, and the time since its last progress, as other threads may read them."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager

from ...common.liveness import limit_s


class Progress:
    """Progress of the thread that created this object and calls `moved` and `waiting`.

    Attributes:
        stated_s: the job's `--progress-seconds`; 0 for no limit, and before the limit is known.
        begun: True if the thread works for the job; before that, loading may take any time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.activity = "starting"
        self.stated_s = 0.0
        self.begun = self.stepped = False
        self._clock = clock
        self._moved_at = clock()
        self._waits = False
        self._longest_s: dict[str, float] = {}
        self._thread = threading.get_ident()

    def moved(self, activity: str | None = None) -> None:
        """Note that the thread makes progress now. activity: activity that begins now; None if the activity
        continues."""
        now = self._clock()
        took = now - self._moved_at
        if self.stepped and took > self._longest_s.get(self.activity, 0.0):
            self._longest_s[self.activity] = took
        if activity is not None:
            self.activity = activity
        self._moved_at = now

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Mark the block as waiting for the server or the network, which does not count as a stall."""
        self.moved()
        self._waits = True
        try:
            yield
        finally:
            self._moved_at = self._clock()
            self._waits = False

    @property
    def stalled_s(self) -> float:
        """Seconds since the thread's last progress; 0 while it waits for the server."""
        return 0.0 if self._waits else max(0.0, self._clock() - self._moved_at)

    @property
    def may_be_suspended(self) -> bool:
        """True if the server may have suspended this worker: the stall exceeds `--progress-seconds`."""
        return 0.0 < self.stated_s <= self.stalled_s

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which the thread counts as hung, given its longest activities."""
        longest_s = self._longest_s.get(self.activity, 0.0)
        return limit_s(self.stated_s, longest_s, first=not self.stepped)

    def hung(self) -> str:
        """Return the error text for /livez if the thread counts as hung; "" if it does not."""
        stalled_s = self.stalled_s
        if not self.begun or stalled_s <= self.limit_s:
            return ""
        return f"the training thread has made no progress for {stalled_s:.0f} s ({self.activity})"

    def stack(self) -> str:
        """Return the thread's present stack trace; "" if the thread has ended."""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        return "".join(traceback.format_stack(frame)) if frame is not None else ""
