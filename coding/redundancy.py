"""How long a step takes at each redundancy, and which one is the fastest.

The paper's model is T(r) = r · T_calc + T_comm / r. Its 1/r holds for a given number of blocks; but with r
their number C(n,r) grows too, and through a server that relays, every packet comes down once for each of its
targets. A node's own link carries, in block gradients,

    up    C(n-1,r) / r          down    C(n-1,r)

and downwards is never the smaller one, so that is what the time of an exchange goes with here:

    T(r) = r · T_calc + T_comm · C(n-1,r) / (n-1)

T_calc and T_comm are those of r = 1, where each node computes its n-th part of the batch once. Between 1 and
n - 1 the load only rises and falls again, so that one of these two is the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb
from statistics import median
from typing import ClassVar

from .plan import is_possible


@dataclass(frozen=True, slots=True)
class UncodedTimes:
    """Of a step without redundancy, in seconds."""

    computing: float
    exchanging: float


def load(nodes: int, redundancy: int) -> int:
    """Block gradients that come down to each node."""
    return comb(nodes - 1, redundancy)


def step_seconds(times: UncodedTimes, nodes: int, redundancy: int) -> float:
    """T(r)."""
    exchanging = times.exchanging * load(nodes, redundancy) / load(nodes, 1) if nodes > 1 else 0.0
    return redundancy * times.computing + exchanging


def possible(nodes: int) -> list[int]:
    """Every redundancy that so many nodes, up to `MAX_NODES`, can have; 1 is always among them."""
    return [r for r in range(1, max(nodes, 2)) if is_possible(nodes, r)]


def fastest(times: UncodedTimes, nodes: int) -> int:
    """The redundancy with the shortest step; the smallest one of equals."""
    return min(possible(nodes), key=lambda r: step_seconds(times, nodes, r))


def without_redundancy(nodes: int, redundancy: int, measured: UncodedTimes) -> UncodedTimes:
    """What a step at some redundancy says about one at 1."""
    factor = load(nodes, 1) / load(nodes, redundancy) if nodes > 1 else 1.0
    return UncodedTimes(measured.computing / redundancy, measured.exchanging * factor)


@dataclass
class AdaptiveRedundancy:
    """The redundancy of the next step, from how long the last ones took."""

    REMEMBERED: ClassVar[int] = 9  # steps
    FEWEST: ClassVar[int] = 3  # before anything is concluded from them
    GAIN: ClassVar[float] = 0.9  # a change has to promise a step as short as this, or it is not worth it

    nodes: int = 0  # that the measurements are of
    _times: list[UncodedTimes] = field(default_factory=list[UncodedTimes])
    _chosen: int = 1

    def note(self, nodes: int, redundancy: int, measured: UncodedTimes) -> None:
        """A step is over. The first of a number of nodes is not representative."""
        if nodes != self.nodes:
            self.nodes = nodes
            self._times.clear()
            return
        self._times = [*self._times, without_redundancy(nodes, redundancy, measured)][-self.REMEMBERED :]

    @property
    def typical(self) -> UncodedTimes | None:
        """The median of what was measured, None before there is enough of it."""
        if len(self._times) < self.FEWEST:
            return None
        return UncodedTimes(
            median(each.computing for each in self._times), median(each.exchanging for each in self._times)
        )

    def next(self, nodes: int) -> int:
        typical = self.typical if nodes == self.nodes else None
        if self._chosen not in possible(nodes):
            self._chosen = 1
        if typical is not None:
            best = fastest(typical, nodes)
            now = step_seconds(typical, nodes, self._chosen)
            if step_seconds(typical, nodes, best) < self.GAIN * now:
                self._chosen = best
        return self._chosen
