"""Log lines about the server's waiting: none for the short pauses of a healthy job, and for a long one a
short line now and then."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

log = logging.getLogger("gradwire.worker")

FIRST_S = 5.0  # of waiting before the first line; each further line comes after twice as long
LONGEST = 120  # characters of a line

# "rank 1 (w1, connected, heard 2.0 s ago, computing)": the server's log has all of that.
DETAILS = re.compile(r"\(([^(),]+),[^()]*\)")


class WaitingLog:
    """Says which workers the server waits for, with back-off."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._since: float | None = None
        self._pause_s = FIRST_S

    def say(self, text: str, *, starting: bool = False) -> None:
        """Log that the server waits, as `text` says.

        Args:
            starting: whether the job has yet to make its first version, so that a wait is no reason to warn.
                It is a warning all the same where information is not shown, as in a script that sets up no
                logging: nothing may wait silently.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        if now - self._since < self._pause_s:
            return
        self._pause_s *= 2
        line = "the server says: " + DETAILS.sub(r"(\1)", text)
        level = logging.INFO if starting and log.isEnabledFor(logging.INFO) else logging.WARNING
        log.log(level, "%s", line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…")

    def over(self) -> None:
        """Reset the back-off, because work has arrived."""
        self._since, self._pause_s = None, FIRST_S
