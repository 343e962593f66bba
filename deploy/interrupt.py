"""Signals that ask gc-run to end, taken where it waits and nowhere else.

A handler that raised could strike between starting a process and remembering it. These only note the signal;
`pause`, where the program spends its time anyway, raises.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from ..proto.messages import StatusResponse

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal came.

    Attributes:
        status: the job's last state, if training had begun.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.status: StatusResponse | None = None


class Interrupt:
    """Catches `SIGNALS` while it is entered; from the main thread only."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._number = signal.SIGINT
        self._previous: dict[signal.Signals, Any] = {}

    def pause(self, seconds: float) -> None:
        """Sleep; raise `Interrupted` as soon as a signal has come."""
        if self._event.wait(seconds):
            raise Interrupted(self._number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._event.is_set():
            self._number = signal.Signals(number)
            self._event.set()

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the run is meant to outlive its terminal
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
