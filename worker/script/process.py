"""The jobs that this process has joined, and how events of the process end a membership.

| event | effect on the jobs that this process has joined |
|---|---|
| SIGTERM, if the script has no handler | each pushes its residual with its next step; SystemExit(143) |
| a second SIGTERM | the process ends at once |
| the interpreter exits | each leaves; after an exception since its last step, as a failed worker |
| Ctrl-C in the first upload, a push, an update | KeyboardInterrupt once it is whole; a second one at once |
| `connect` to the same server as the same worker | the earlier membership leaves, with a warning |
| a fork | the child has no part in them |

The time for residuals is limited by `--leave-seconds`, and to 3 s where the server is away, as in gc-worker.
A handler runs in the main thread, between two of its instructions. A watching thread therefore signals the
main thread again when it is time to end: the timer of the operating system (SIGALRM) may be the script's.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import Protocol

from .terms import ScriptError

log = logging.getLogger("gradwire.worker")

CHECK_S = 0.5  # seconds between two checks whether leaving takes too long
AWAY_S = 3.0  # seconds without a server after which a leaving worker gives up
EXIT_CODE = 128 + signal.SIGTERM

Key = tuple[str, str]  # the server's address and the worker's id


class Joined(Protocol):
    """A job that this process has joined: `part.Part`."""

    key: Key
    thread: threading.Thread  # the thread that has joined the job

    @property
    def done(self) -> bool: ...

    @property
    def leave_s(self) -> float: ...

    @property
    def away_s(self) -> float: ...

    @property
    def owes(self) -> bool: ...

    def make_last_push(self) -> None: ...

    def leave(self, reason: str = "", *, failed: bool = False) -> None: ...

    def leave_with_script(self) -> None: ...

    def forget(self) -> None: ...


joined: dict[Key, Joined] = {}
_stopping: _Stopping | None = None


def make_room(key: Key) -> None:
    """Have an earlier membership of this process leave, before the same worker joins again.

    Raises:
        ScriptError: another thread that still runs has joined as this worker.
    """
    earlier = joined.get(key)
    if earlier is None:
        return
    thread = earlier.thread
    if thread is not threading.current_thread() and thread.is_alive():
        raise ScriptError(
            f"gradwire.connect: thread {thread.name!r} of this process is worker {key[1]!r} of {key[0]} "
            "already; give each thread a worker_id of its own"
        )
    if not earlier.done:
        log.warning(
            "this process is worker %s of %s already, and connects again: its earlier job leaves. Use `with "
            "gradwire.connect() as job`, or call job.leave()",
            *reversed(key),
        )
    earlier.leave_with_script()


def add(job: Joined) -> None:
    """Add a job that this process has joined; at the first one, handle SIGTERM if the script does not."""
    if not joined:
        atexit.register(leave_all)
    joined[job.key] = job
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_sigterm)
    elif os.getpid() == 1:
        log.warning(
            "this process is PID 1 and ignores SIGTERM, because gradwire.connect was called in a thread: "
            "install a handler, or start the script by an init process"
        )


def remove(job: Joined) -> None:
    """Remove a job that was left; after the last one, SIGTERM has its default effect again."""
    if joined.get(job.key) is job:
        del joined[job.key]
    if not joined:
        atexit.unregister(leave_all)
    main = threading.current_thread() is threading.main_thread()
    if main and not joined and _stopping is None and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def stopped_by() -> str:
    """Return the reason that a leaving job gives to the server: that of SIGTERM if it has arrived, otherwise
    ""."""
    return "" if _stopping is None else "stopped by SIGTERM"


def end_if_nothing_is_owed() -> None:
    """End the process if SIGTERM has arrived and no job has anything left to push. Called by a job that has
    pushed all of its residual.

    Raises:
        SystemExit: the process ends. It also ends the calling script's loop if that is on another thread than
            the main one.
    """
    if _stopping is None or any(job.owes for job in joined.values()):
        return
    if not _stopping.over:
        log.info("SIGTERM: leaving, all residuals pushed")
    for job in [*joined.values()]:
        job.leave(stopped_by())
    _stopping.end()
    raise SystemExit(EXIT_CODE)


class _Stopping:
    """State after the first SIGTERM, and a thread that watches over the time limit.

    Attributes:
        over: True to end now: nothing is owed any more, or it takes too long.
        raised: True once SystemExit was raised in the main thread.
    """

    def __init__(self, leave_s: float) -> None:
        self.over = self.raised = False
        self._leave_s = leave_s
        self._began = time.monotonic()

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="gradwire-leave", daemon=True).start()

    def _watch(self) -> None:
        while not self.over:
            time.sleep(min(CHECK_S, self._leave_s))
            took = time.monotonic() - self._began
            away_s = max((job.away_s for job in [*joined.values()]), default=0.0)
            if took >= self._leave_s or away_s >= AWAY_S:
                self.end()

    def end(self) -> None:
        """End the process by SystemExit in the main thread, once."""
        if self.over:
            return
        self.over = True
        if threading.current_thread() is threading.main_thread():
            self.raised = True
            raise SystemExit(EXIT_CODE)
        # The handler raises it there, also if the main thread waits for a lock.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM; see the table above."""
    global _stopping
    if _stopping is not None:
        if not _stopping.over or _stopping.raised:  # not from `_Stopping.end`
            os._exit(EXIT_CODE)
        _stopping.raised = True
        raise SystemExit(EXIT_CODE)
    jobs = [*joined.values()]
    _stopping = _Stopping(max((job.leave_s for job in jobs), default=0.0))
    for job in jobs:
        job.make_last_push()
    if not any(job.owes and job.leave_s for job in jobs):
        _stopping.end()
    log.info("SIGTERM: this worker leaves after its next step, with the whole residual")
    _stopping.watch()


@contextlib.contextmanager
def whole() -> Generator[None]:
    """Hold back Ctrl-C until the block is over, so that a notebook may continue after it.

    A second Ctrl-C ends the block at once. Handlers of the script's own are called as before.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            signal.default_int_handler(number, frame)
        held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt


def leave_all() -> None:
    """Leave all jobs at the end of the interpreter."""
    if _stopping is not None:
        _stopping.over = _stopping.raised = True
    for job in [*joined.values()]:
        job.leave_with_script()


def last_error() -> BaseException | None:
    """Return the last exception that ended a script or a cell of a notebook; None if there was none.

    Python and IPython note it when they print it. An exception of another thread is not noted.
    """
    return getattr(sys, "last_value", None)


def _in_child() -> None:
    """Called in a forked child: it has no part in the jobs, and default signal handlers."""
    for job in joined.values():
        job.forget()
    joined.clear()
    with contextlib.suppress(ValueError):
        if signal.getsignal(signal.SIGTERM) is _on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_child)
