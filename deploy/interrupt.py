"""Signals that ask gc-run or gc-bench to end.

`Interrupt` takes them where gc-run waits and nowhere else. A handler that raised could strike between
starting a process and remembering it. This one only notes the signal; `pause`, where gc-run spends its time
anyway, raises.

`interrupted` raises wherever the program is: for benchmarks, which wait in many places, and whose processes
end with them in any case (`child`).
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
    """A signal came. A BaseException, so that nothing but a command's entry point swallows it.

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
        self._previous = _handle(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        _restore(self._previous)


@contextmanager
def interrupted() -> Generator[None]:
    """Raise `Interrupted` at the first of `SIGNALS`, wherever the main thread is.

    Later ones are ignored until the context is left, so that they do not interrupt the clearing up.
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
    """Install a handler. Returns the handlers that were there before."""
    # nohup ignores SIGHUP: the run is meant to outlive its terminal.
    return {
        number: signal.signal(number, handler)
        for number in SIGNALS
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }


def _restore(previous: dict[signal.Signals, Any]) -> None:
    for number, handler in previous.items():
        signal.signal(number, handler)
