"""What the training thread does, and since when it has made no progress. Other threads may ask."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager

from ...common.liveness import limit_s


class Progress:
    """Told by the thread that made it.

    Attributes:
        activity: "computing", "waiting", …, for people.
        stated_s: `--progress-seconds` of the job; 0 for no limit, as before it is known.
        begun: whether the thread works for the job already: before that, loading takes as long as it takes.
        stepped: whether it has finished a step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: seconds, monotonic.
        """
        self.activity = "starting"
        self.stated_s = 0.0
        self.begun = self.stepped = False
        self._clock = clock
        self._moved_at = clock()
        self._waits = False
        self._longest_s: dict[str, float] = {}
        self._thread = threading.get_ident()

    def moved(self, activity: str | None = None) -> None:
        """The thread has got on, and does this now; None for the same as before."""
        now = self._clock()
        took = now - self._moved_at
        if self.stepped and took > self._longest_s.get(self.activity, 0.0):
            self._longest_s[self.activity] = took
        if activity is not None:
            self.activity = activity
        self._moved_at = now

    @contextmanager
    def waiting(self) -> Generator[None]:
        """The thread waits for the server, or for the network."""
        self.moved()
        self._waits = True
        try:
            yield
        finally:
            self._moved_at = self._clock()
            self._waits = False

    @property
    def still_s(self) -> float:
        """Seconds without progress; 0 while it waits for the server."""
        return 0.0 if self._waits else max(0.0, self._clock() - self._moved_at)

    @property
    def still_beyond_stated(self) -> bool:
        """Whether the server may have set this worker aside."""
        return 0.0 < self.stated_s <= self.still_s

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which the thread hangs, by what this worker knows."""
        longest_s = self._longest_s.get(self.activity, 0.0)
        return limit_s(self.stated_s, longest_s, first=not self.stepped)

    def hung(self) -> str:
        """What /livez says if the thread hangs; empty if it does not."""
        still_s = self.still_s
        if not self.begun or still_s <= self.limit_s:
            return ""
        return f"the training thread has made no progress for {still_s:.0f} s ({self.activity})"

    def stack(self) -> str:
        """Where the thread is."""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        return "".join(traceback.format_stack(frame)) if frame is not None else ""
