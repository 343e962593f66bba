"""How fast each worker may send, so that the parts of a round come from all workers together.

Connections that share a link do not share it evenly: one has sent everything when another has hardly begun.
With `--overlap both` that costs time, because a part goes back once it is there from everybody. So the server
tells each worker its share.

A part that had to wait behind another one shows what a worker got of the link while it had something to send:
from the end of the part before to its own end. The part before it, if that had not waited, is taken to have
come as fast. While n workers send, an n-th of all that comes is what each of them would get if they shared
evenly. A worker that never has two parts waiting is told nothing.

A share is not a limit of the link. A worker that got all that it was told to take, and had the link for
itself or no less than anybody else, is told more; what is measured in one round at far less is not believed
before the next one confirms it; and with other workers in the round everything is found anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

GAIN = 1.03  # of the share. More, and the link is uneven again
FASTER = 1.1  # the same, where the link has room
ALL = 0.99  # of a rate, is taken for all of it
FAR_LESS = 0.5
MOST_PARTS = 1 << 14  # that are looked at in a round: it takes some milliseconds
LEAST_PARTS = 2  # that waited, of a worker in a round


class Came(NamedTuple):
    """A part. size: bytes. at: seconds, when it was there. waited: behind the part before it."""

    worker: str
    size: int
    at: float
    waited: bool


class Sent(NamedTuple):
    """size: bytes, that came from `since` to `at`."""

    worker: str
    size: int
    since: float
    at: float


def sendings(came: Iterable[Came], opened_at: float) -> list[Sent]:
    """What is known of when workers were sending. came: in the order in which it came."""
    before: dict[str, Came] = {}
    found: list[Sent] = []
    for each in came:
        last = before.get(each.worker)
        before[each.worker] = each
        if last is None or not each.waited or each.at <= last.at:
            continue
        if not last.waited:
            as_fast = last.size * (each.at - last.at) / max(1, each.size)
            since = max(opened_at, last.at - as_fast)
            if since < last.at:
                found.append(Sent(each.worker, last.size, since, last.at))
        found.append(Sent(each.worker, each.size, last.at, each.at))
    return found


def seconds_per_byte(sent: Sequence[Sent]) -> float:
    """Of the link that all share, while anybody sent."""
    busy, until = 0.0, -math.inf
    for each in sorted(sent, key=lambda each: each.since):
        busy += max(0.0, each.at - max(each.since, until))
        until = max(until, each.at)
    return busy / max(1, sum(each.size for each in sent))


class Rates(NamedTuple):
    """Bytes per second. own: that a worker got. fair: that it would have got, had all that sent at the same
    time shared evenly."""

    own: float
    fair: float


def rates(sent: Sequence[Sent]) -> dict[str, Rates]:
    """By worker."""
    number: dict[str, int] = {}
    who = np.array([number.setdefault(each.worker, len(number)) for each in sent], int)
    if not number:
        return {}
    size, since, at = np.array([each[1:] for each in sent], float).T
    borders = np.unique((since, at))
    first, last = np.searchsorted(borders, np.stack((since, at)))

    def at_once(each: Float64) -> Float64:
        """Between each two borders, the sum over the parts that were on their way."""
        change = np.bincount(first, each, len(borders)) - np.bincount(last, each, len(borders))
        return np.cumsum(change, dtype=np.float64)[:-1]

    sending = np.maximum(1.0, at_once(np.ones(len(sent))))
    shares = at_once(size / (at - since)) / sending * np.diff(borders)
    until = np.concatenate(((0.0,), np.cumsum(shares)))
    seconds = np.bincount(who, at - since)
    own: list[float] = (np.bincount(who, size) / seconds).tolist()
    fair: list[float] = (np.bincount(who, until[last] - until[first]) / seconds).tolist()
    return {worker: Rates(own[each], fair[each]) for worker, each in number.items()}


def following(told: int, found: Rates) -> int:
    """What a worker is to be told, that was told a rate (0: none) and got these."""
    room = told and found.own >= ALL * told and found.fair >= ALL * found.own
    return math.ceil((FASTER if room else GAIN) * found.fair)


class Pacing:
    """Rates of the workers, from one round for the next."""

    def __init__(self) -> None:
        self._came: list[Came] | None = None  # of the round that is open
        self._opened_at = 0.0
        self._workers: frozenset[str] = frozenset()
        self._told: dict[str, int] = {}
        self._doubted: set[str] = set()  # who got far less in the last round

    def open(self, workers: Iterable[str], now: float) -> None:
        """A round of these has opened whose parts go back one by one."""
        members = frozenset(workers)
        if members != self._workers:
            self._workers = members
            self._told.clear()
            self._doubted.clear()
        self._came, self._opened_at = [], now

    def arrived(self, came: Came) -> None:
        """A part is there."""
        if self._came is not None and len(self._came) < MOST_PARTS:
            self._came.append(came)

    def close(self) -> None:
        """The round is over."""
        if self._came is None:
            return
        waited = Counter(each.worker for each in self._came if each.waited)
        found = rates(sendings(self._came, self._opened_at))
        self._came = None
        told, self._told = self._told, {}
        for worker in self._workers & found.keys():
            if waited[worker] < LEAST_PARTS:
                continue
            before, now = told.get(worker, 0), following(told.get(worker, 0), found[worker])
            doubtful = now < FAR_LESS * before and worker not in self._doubted
            self._told[worker] = before if doubtful else now
            (self._doubted.add if doubtful else self._doubted.discard)(worker)

    def rate(self, worker: str) -> int:
        """Bytes per second; 0: as fast as it goes."""
        return self._told.get(worker, 0)
