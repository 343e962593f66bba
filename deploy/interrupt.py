"""Signals that ask gc-run or gc-bench to end.

gc-run uses `Interrupt`, whose handler only notes the signal; `pause` raises later. If the handler itself
raised, it could strike between the start of a process and its entry in the list of processes to end.

gc-bench uses `interrupted`, whose handler raises at once. Benchmarks wait in many places, and `child` ends
their processes in any case.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

if TYPE_CHECKING:
    from ..proto.messages import StatusResponse

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """Raised when a signal ends a command. It is a BaseException, so that only the command's entry point
    catches it.

    Attributes:
        number: the signal.
        code: exit code of a command that it ends.
        status: last status of the job; None if training had not begun.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.code = 128 + number
        self.status: StatusResponse | None = None


class Interrupt:
    """A context manager that catches `SIGNALS` while it is entered. Only the main thread may enter it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._number = signal.SIGINT
        self._previous: dict[signal.Signals, Any] = {}

    def pause(self, seconds: float) -> None:
        """Sleep for `seconds`. Raise `Interrupted` at a signal, or at once if one has arrived before."""
        if self._event.wait(seconds):
            raise Interrupted(self._number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Called by Python at a signal: remember the first one."""
        if not self._event.is_set():
            self._number = signal.Signals(number)
            self._event.set()

    def __enter__(self) -> Self:
        self._previous = _handle(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        _restore(self._previous)


@contextmanager
def interrupted() -> Generator[None]:
    """Have the first of `SIGNALS` raise `Interrupted` in the main thread, for the duration of a with block.

    Later signals are ignored until the end of the block.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number))

    previous: dict[signal.Signals, Any] = {}
    try:
        previous |= _handle(end)
        yield
    finally:
        _restore(previous)


def _handle(handler: Any) -> dict[signal.Signals, Any]:
    """Install a handler for `SIGNALS` and return the previous handlers."""
    # An ignored SIGHUP stays ignored: under nohup, the run is meant to outlive its terminal.
    return {
        number: signal.signal(number, handler)
        for number in SIGNALS
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }


def _restore(previous: dict[signal.Signals, Any]) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)
