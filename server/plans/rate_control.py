"""Rate control: how fast each worker may send, so that the parts of a round arrive from all workers together.

Connections share a link unevenly: one worker may have sent everything while another has hardly begun. With
`--overlap both` that costs time, because a part is sent back once all workers have sent it. So the server
assigns each worker a rate.

A part that waited behind another one shows the speed of its worker on the link, from the arrival of the part
before it to its own. A part before it that did not wait is assumed to have had the same speed. While n
workers send, the fair share of each is an n-th of all bytes. A worker that never has two parts waiting gets
no rate.

A rate is no measure of the link. A worker that used all of its rate, and had no less than its fair share,
gets a higher one. A far lower measurement counts only if the next round confirms it. With other workers in
the round all rates are measured anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

GAIN = 1.03  # rate by fair share; with a larger one the link is shared unevenly again
FASTER = 1.1  # the same, where the link has room
ALL = 0.99  # fraction of a rate that counts as all of it
FAR_LESS = 0.5
MOST_PARTS = 1 << 14  # evaluated in a round, within some milliseconds
LEAST_PARTS = 2  # that waited, of a worker in a round


class Came(NamedTuple):
    """An arrived part. size: bytes. at: seconds, of its arrival. waited: behind the part before it."""

    worker: str
    size: int
    at: float
    waited: bool


class Sent(NamedTuple):
    """size: bytes that arrived from `since` to `at`."""

    worker: str
    size: int
    since: float
    at: float


def sendings(came: Iterable[Came], opened_at: float) -> list[Sent]:
    """Return the intervals in which workers are known to have sent. came: in the order of arrival."""
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
    """Return the seconds per byte of the shared link while any worker sent."""
    busy, until = 0.0, -math.inf
    for each in sorted(sent, key=lambda each: each.since):
        busy += max(0.0, each.at - max(each.since, until))
        until = max(until, each.at)
    return busy / max(1, sum(each.size for each in sent))


class Rates(NamedTuple):
    """Bytes per second. own: of the worker. fair: its even share among all that sent at the same time."""

    own: float
    fair: float


def rates(sent: Sequence[Sent]) -> dict[str, Rates]:
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
    """Return the next rate of a worker. told: its present rate, 0 for none. found: its measured rates."""
    room = told and found.own >= ALL * told and found.fair >= ALL * found.own
    return math.ceil((FASTER if room else GAIN) * found.fair)


class Pacing:
    """Rates of the workers, from one round for the next."""

    def __init__(self) -> None:
        self._came: list[Came] | None = None  # of the round that is open
        self._opened_at = 0.0
        self._workers: frozenset[str] = frozenset()
        self._told: dict[str, int] = {}
        self._doubted: set[str] = set()  # workers that were far slower in the last round

    def open(self, workers: Iterable[str], now: float) -> None:
        """Called when a round of these workers opens whose parts are stepped one by one."""
        members = frozenset(workers)
        if members != self._workers:
            self._workers = members
            self._told.clear()
            self._doubted.clear()
        self._came, self._opened_at = [], now

    def arrived(self, came: Came) -> None:
        """Record the arrival of a part."""
        if self._came is not None and len(self._came) < MOST_PARTS:
            self._came.append(came)

    def close(self) -> None:
        """Called when the round is over: compute the rates for the next one."""
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
        """Return bytes per second; 0 for no limit."""
        return self._told.get(worker, 0)
