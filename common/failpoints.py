"""Named points at which a test kills, fails or delays this process; off unless the environment arms them.

    GRADWIRE_FAILPOINTS=checkpoint.renamed=kill@3,journal.appended=enospc@10+,version.applied=sleep:0.2

is a list of POINT=ACTION. `kill` is SIGKILL to the process itself, `sleep:SECONDS` blocks the calling thread,
and the name of an error number, such as `enospc`, `erofs` or `eio`, raises that OSError. `@N` means the N-th
time that the point is reached, `@N+` that time and every later one; without either it is every time. Code
calls `reached` with the name of a point. While nothing is armed the call looks at an empty dictionary and
returns.
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

# What has just happened when a point is reached, in the order in which it does.
POINTS = (
    "push.decided",  # control has accepted a push; nobody has been told
    "journal.appended",  # a record is written to the journal, and not synced
    "journal.synced",
    "version.applied",  # the shard has stepped to a version; nobody has been sent it
    "version.announced",  # it is in the queues of the workers' streams
    "checkpoint.written",  # under a temporary name
    "checkpoint.synced",
    "checkpoint.renamed",
    "checkpoint.directory-synced",
    "checkpoint.stored",  # at a URL, but for its manifest
    "journal.read",  # by the next server: what a record says has happened again
)

_log = logging.getLogger("gradwire.common.failpoints")
_ENTRY = re.compile(r"([a-z.-]+)=([a-z0-9]+)(?::(\d+(?:\.\d+)?))?(?:@(\d+)(\+)?)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Action:
    """kind: kill, sleep, or the name of an error number. first, last: of the times at which it is done."""

    kind: str
    seconds: float
    first: int
    last: float


_armed: dict[str, list[_Action]] = {}
_times: dict[str, int] = {}
_lock = threading.Lock()


def reached(point: str) -> None:
    """Do what this point is armed with, if it is.

    Raises:
        OSError: as armed.
    """
    if _armed:
        _reached(point)


def arm(text: str) -> None:
    """Replace what is armed by what `text` says, which is the value of the variable; empty for nothing.

    Raises:
        UsageError: names the entry that cannot be.
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
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise UsageError(f"{VARIABLE}: expected POINT=ACTION[@N[+]], got {entry!r}")
    point, kind, seconds, number, onwards = match.groups()
    if point not in POINTS:
        raise UsageError(f"{VARIABLE}: unknown point {point!r}; known points: {', '.join(POINTS)}")
    if kind not in ("kill", "sleep") and not isinstance(getattr(errno, kind.upper(), None), int):
        raise UsageError(f"{VARIABLE}: expected kill, sleep:SECONDS or the name of an error, got {kind!r}")
    if (kind == "sleep") != (seconds is not None):
        raise UsageError(f"{VARIABLE}: {entry!r}: sleep takes seconds, and nothing else does")
    first = int(number or 1)
    last = first if number and not onwards else float("inf")
    return point, _Action(kind=kind, seconds=float(seconds or 0), first=first, last=last)


def _reached(point: str) -> None:
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
