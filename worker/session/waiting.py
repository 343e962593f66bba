"""Log lines about the workers for which the server waits: none for short pauses, and few for a long one."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

log = logging.getLogger("gradwire.worker")

FIRST_S = 5.0  # seconds of waiting before the first line; each further line comes after twice the time
LONGEST = 120  # characters of a line

# "rank 1 (w1, connected, heard 2.0 s ago, computing)" becomes "rank 1 (w1)": the server logs the details.
DETAILS = re.compile(r"\(([^(),]+),[^()]*\)")


class WaitingLog:
    """Logs for which workers the server waits, with exponential back-off."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._pause_s = FIRST_S

    def say(self, text: str, *, starting: bool = False) -> None:
        """Log that the server waits, if the wait is long enough since it began or since the last line.

        Args:
            text: sentence from the server that names the workers. The line leaves out its details in
                parentheses, and keeps the reason why a worker was lost.
            starting: True if the job has no version yet. The level is then INFO instead of WARNING, unless
                INFO is disabled, as in a script that has not configured logging: no wait may be silent.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        if now - self._since < self._pause_s:
            return
        self._pause_s *= 2
        # The reason of a loss is logged in full: it is neither searched for details nor cut to `LONGEST`.
        members, lost, reason = text.partition(" is lost: ")
        line = "the server says: " + DETAILS.sub(r"(\1)", members)
        level = logging.INFO if starting and log.isEnabledFor(logging.INFO) else logging.WARNING
        line = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
        log.log(level, "%s", line + lost + reason)

    def over(self) -> None:
        """Reset the back-off, because work has arrived."""
        self._since, self._pause_s = None, FIRST_S
