"""How fast each worker may send, so that the parts of a round come from all workers together.

Connections that share a link do not share it evenly: one has sent everything when another has hardly begun.
With `--overlap both` that costs time, because a part goes back once it is there from everybody. So the server
tells each worker its share.

A part that had to wait behind another one shows what a worker got of the link while it had something to send:
from the end of the part before to its own end. The part before it, if that had not waited, is taken to have
come as fast. While n workers send, an n-th of all that comes is what each of them would get if they shared
evenly. A worker that never has two parts waiting is told nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

GAIN = 1.03  # of the share, so that a link that has become faster is noticed. More, and it is uneven again
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


def sendings(came: Sequence[Came], opened_at: float) -> list[Sent]:
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


def fair_rates(sent: Sequence[Sent]) -> dict[str, float]:
    """Bytes per second that each worker would have got, had all that sent at the same time shared evenly."""
    workers = sorted({each.worker for each in sent})
    if not workers:
        return {}
    who = np.array([workers.index(each.worker) for each in sent])
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
    share = np.bincount(who, until[last] - until[first])
    seconds = np.bincount(who, at - since)
    rates: list[float] = (share / seconds).tolist()
    return dict(zip(workers, rates, strict=True))


class Pacing:
    """Rates of the workers, from one round for the next."""

    def __init__(self) -> None:
        self._came: list[Came] | None = None  # of the round that is open
        self._opened_at = 0.0
        self._rates: dict[str, int] = {}

    def open(self, now: float) -> None:
        """A round has opened whose parts go back one by one."""
        self._came, self._opened_at = [], now

    def arrived(self, came: Came) -> None:
        if self._came is not None:
            self._came.append(came)

    def close(self) -> None:
        """The round is over."""
        if self._came is None:
            return
        counts = Counter(each.worker for each in self._came if each.waited)
        self._rates = {
            worker: math.ceil(GAIN * rate)
            for worker, rate in fair_rates(sendings(self._came, self._opened_at)).items()
            if counts[worker] >= LEAST_PARTS
        }
        self._came = None

    def rate(self, worker: str) -> int:
        """Bytes per second; 0: as fast as it goes."""
        return self._rates.get(worker, 0)
