"""Named points at which a test kills, fails or delays this process; off unless the environment arms them.

    GRADWIRE_FAILPOINTS=checkpoint.renamed=kill@3,journal.appended=enospc@10+,version.applied=sleep:0.2

is a list of POINT=ACTION. Actions: `kill` sends SIGKILL to the process itself. `sleep:SECONDS` blocks the
calling thread. An error's name, such as `enospc`, `erofs` or `eio`, raises that OSError. A suffix `@N`
limits the action to the N-th time that the point is reached, `@N+` to that time and every later one. Without
a suffix it happens every time. Code calls `reached` with the name of a point. While no point is armed, the
call tests an empty dictionary and returns.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import threading
import time
from dataclasses import dataclass

from .configuration import UsageError

VARIABLE = "GRADWIRE_FAILPOINTS"

# Each name says which event has just happened. In the order in which they happen:
POINTS = (
    "push.decided",  # control has accepted a push; the worker has not been told
    "journal.appended",  # a record is written to the journal, and not synced
    "journal.synced",
    "version.applied",  # the shard has stepped to a version; no worker has been sent it
    "version.announced",  # the version is in the queues of the workers' streams
    "checkpoint.written",  # under a temporary name
    "checkpoint.synced",
    "checkpoint.renamed",
    "checkpoint.directory-synced",
    "checkpoint.stored",  # every file but the manifest is at the URL
    "journal.read",  # the next server has read a record and repeated its effect
)

_log = logging.getLogger("gradwire.common.failpoints")
_ENTRY = re.compile(r"([a-z.-]+)=([a-z0-9]+)(?::(\d+(?:\.\d+)?))?(?:@(\d+)(\+)?)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Action:
    """One action that a point is armed with.

    Attributes:
        kind: "kill", "sleep", or the name of an error number.
        seconds: duration of a sleep; 0 otherwise.
        first, last: range of visits to the point, counted from 1, at which the action happens; infinity for
            no end.
    """

    kind: str
    seconds: float
    first: int
    last: float


_armed: dict[str, list[_Action]] = {}
_times: dict[str, int] = {}
_lock = threading.Lock()


def reached(point: str) -> None:
    """Perform the actions that `point` is armed with; do nothing if it is not armed.

    Raises:
        OSError: the point is armed with an error number.
        AssertionError: `POINTS` does not list the point.
    """
    if _armed:
        _reached(point)


def arm(text: str) -> None:
    """Arm the points that `text` lists, instead of those armed before.

    The list has the form of the environment variable. Raises UsageError, which quotes the wrong entry.
    """
    found: dict[str, list[_Action]] = {}
    for entry in filter(None, (each.strip() for each in text.split(","))):
        point, action = _parse(entry)
        found.setdefault(point, []).append(action)
    with _lock:
        _times.clear()
        _armed.clear()
        _armed.update(found)


def _parse(entry: str) -> tuple[str, _Action]:
    """Return the point and the action of one entry POINT=ACTION[@N[+]]."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise UsageError(f"{VARIABLE}: expected POINT=ACTION[@N[+]], got {entry!r}")
    point, kind, seconds, number, onwards = match.groups()
    if point not in POINTS:
        raise UsageError(f"{VARIABLE}: unknown point {point!r}; known points: {', '.join(POINTS)}")
    if kind not in ("kill", "sleep") and not isinstance(getattr(errno, kind.upper(), None), int):
        raise UsageError(
            f"{VARIABLE}: expected kill, sleep:SECONDS or the name of an error number, got {kind!r}"
        )
    if (kind == "sleep") != (seconds is not None):
        raise UsageError(f"{VARIABLE}: {entry!r}: expected seconds after sleep, and after no other action")
    first = int(number or 1)
    last = first if number and not onwards else float("inf")
    return point, _Action(kind=kind, seconds=float(seconds or 0), first=first, last=last)


def _reached(point: str) -> None:
    """Count the visit to `point` and perform the actions that are due."""
    if point not in POINTS:
        raise AssertionError(f"{point!r} is not among the points of common/failpoints.py")
    with _lock:
        times = _times[point] = _times.get(point, 0) + 1
        due = [action for action in _armed.get(point, ()) if action.first <= times <= action.last]
    for action in due:
        _log.warning("failpoint %s, time %d: %s", point, times, action.kind)
        if action.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action.kind == "sleep":
            time.sleep(action.seconds)
        else:
            number = getattr(errno, action.kind.upper())
            raise OSError(number, f"{os.strerror(number)} (failpoint {point})")
