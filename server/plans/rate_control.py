"""Rate control: limits how fast each worker sends, so that the parts of a round arrive from all workers
together. It is not the share fit (`server/job/modes/share_fit`), which divides samples among workers.

Connections share a link unevenly: one worker may have sent all of its parts while another has hardly begun.
With `--overlap both` that costs time, because a part is sent back once all workers have sent it. The server
therefore assigns each worker a rate, in bytes per second.

A part that waited behind another part shows the speed of its worker on the link: from the arrival of the
previous part to its own. If the previous part did not wait, it is assumed to have had the same speed. While n
workers send, the fair share of each is one n-th of all bytes. A worker that never has two parts waiting gets
no rate.

A rate does not measure the link. A worker that used all of its rate, and had no less than its fair share,
gets a higher one. A far lower measurement counts only if the next round confirms it. When other workers take
part in a round, all rates are measured anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

GAIN = 1.03  # Assigned rate relative to the fair share; a larger gain shares the link unevenly again.
FASTER = 1.1  # Gain while the link has room.
ALL = 0.99  # Fraction of a rate from which on it counts as used up.
FAR_LESS = 0.5  # Fraction of the last rate below which a new rate has to be confirmed.
MOST_PARTS = 1 << 14  # Most parts that are evaluated in a round, which takes some milliseconds.
LEAST_PARTS = 2  # Fewest parts of a worker that waited, for the worker to get a rate.


class PartArrival(NamedTuple):
    """The arrival of a part. The handler of pushes makes it; rate control and planner use it.

    Attributes:
        at: time of its arrival, in seconds of the monotonic clock.
        waited: whether the worker had it ready while the previous part was being sent.
    """

    worker: str
    size: int
    at: float
    waited: bool


class SendingInterval(NamedTuple):
    """An interval in which a worker sent without a pause.

    Attributes:
        at: end of the interval.
    """

    worker: str
    size: int
    since: float
    at: float


def sending_intervals(arrivals: Iterable[PartArrival], opened_at: float) -> list[SendingInterval]:
    """Return the intervals in which workers are known to have sent.

    Args:
        arrivals: arrivals of parts, in order of time.
        opened_at: time at which the round opened; no interval begins before it.
    """
    before: dict[str, PartArrival] = {}
    found: list[SendingInterval] = []
    for each in arrivals:
        last = before.get(each.worker)
        before[each.worker] = each
        if last is None or not each.waited or each.at <= last.at:
            continue
        if not last.waited:
            as_fast = last.size * (each.at - last.at) / max(1, each.size)
            since = max(opened_at, last.at - as_fast)
            if since < last.at:
                found.append(SendingInterval(each.worker, last.size, since, last.at))
        found.append(SendingInterval(each.worker, each.size, last.at, each.at))
    return found


def seconds_per_byte(sent: Sequence[SendingInterval]) -> float:
    """Return the seconds per byte of the shared link, over the time in which at least one worker sent."""
    busy, until = 0.0, -math.inf
    for each in sorted(sent, key=lambda each: each.since):
        busy += max(0.0, each.at - max(each.since, until))
        until = max(until, each.at)
    return busy / max(1, sum(each.size for each in sent))


class Rates(NamedTuple):
    """Measured rates of a worker, in bytes per second.

    Attributes:
        own: rate at which the worker sent.
        fair: even share of the link among all workers that sent at the same time.
    """

    own: float
    fair: float


def rates(sent: Sequence[SendingInterval]) -> dict[str, Rates]:
    """Return the measured rates of each worker, from the intervals in which workers sent."""
    number: dict[str, int] = {}
    workers = np.array([number.setdefault(each.worker, len(number)) for each in sent], int)
    if not number:
        return {}
    size, since, at = np.array([each[1:] for each in sent], float).T
    borders = np.unique((since, at))
    first, last = np.searchsorted(borders, np.stack((since, at)))

    def active_sum(each: Float64) -> Float64:
        """Return the sum of `each` over the intervals that are active between each two borders."""
        change = np.bincount(first, each, len(borders)) - np.bincount(last, each, len(borders))
        return np.cumsum(change, dtype=np.float64)[:-1]

    sending = np.maximum(1.0, active_sum(np.ones(len(sent))))
    shares = active_sum(size / (at - since)) / sending * np.diff(borders)
    until = np.concatenate(((0.0,), np.cumsum(shares)))
    seconds = np.bincount(workers, at - since)
    own: list[float] = (np.bincount(workers, size) / seconds).tolist()
    fair: list[float] = (np.bincount(workers, until[last] - until[first]) / seconds).tolist()
    return {worker: Rates(own[each], fair[each]) for worker, each in number.items()}


def next_rate(assigned: int, found: Rates) -> int:
    """Return the rate to assign to a worker for the next round, in bytes per second. assigned: its present
    rate, 0 for none. found: its measured rates."""
    room = assigned and found.own >= ALL * assigned and found.fair >= ALL * found.own
    return math.ceil((FASTER if room else GAIN) * found.fair)


class RateControl:
    """The rates assigned to the workers, adjusted after each round. The conductor owns it."""

    def __init__(self) -> None:
        self._arrivals: list[PartArrival] | None = None  # arrivals of the open round; None without one
        self._opened_at = 0.0
        self._workers: frozenset[str] = frozenset()
        self._assigned: dict[str, int] = {}
        self._doubted: set[str] = set()  # workers whose far lower rate is not confirmed yet

    def open(self, workers: Iterable[str], now: float) -> None:
        """Begin a round whose parts are stepped one by one. If its workers are not those of the last round,
        drop all rates. now: time in seconds of the monotonic clock."""
        members = frozenset(workers)
        if members != self._workers:
            self._workers = members
            self._assigned.clear()
            self._doubted.clear()
        self._arrivals, self._opened_at = [], now

    def arrived(self, arrival: PartArrival) -> None:
        """Record the arrival of a part, if a round is open."""
        if self._arrivals is not None and len(self._arrivals) < MOST_PARTS:
            self._arrivals.append(arrival)

    def close(self) -> None:
        """End the round, and compute the rates for the next one from its arrivals."""
        if self._arrivals is None:
            return
        waited = Counter(each.worker for each in self._arrivals if each.waited)
        found = rates(sending_intervals(self._arrivals, self._opened_at))
        self._arrivals = None
        assigned, self._assigned = self._assigned, {}
        for worker in self._workers & found.keys():
            if waited[worker] < LEAST_PARTS:
                continue
            before, now = assigned.get(worker, 0), next_rate(assigned.get(worker, 0), found[worker])
            doubtful = now < FAR_LESS * before and worker not in self._doubted
            self._assigned[worker] = before if doubtful else now
            (self._doubted.add if doubtful else self._doubted.discard)(worker)

    def rate(self, worker: str) -> int:
        """Return the rate assigned to a worker, in bytes per second; 0 for no limit."""
        return self._assigned.get(worker, 0)
