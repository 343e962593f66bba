"""Prediction of a coded step's duration at each redundancy, and the choice of the fastest.

The paper's model is T(r) = r · T_calc + T_comm / r. Its 1/r holds for a fixed number of blocks. Here the
number of blocks, C(n,r), grows with r, and a relaying server sends every packet once to each of its targets.
A node's own link carries, in block gradients,

    upload    C(n-1,r) / r          download    C(n-1,r)

The download is never the smaller one, so the time of an exchange is taken to be proportional to it:

    T(r) = r · T_calc + T_comm · C(n-1,r) / (n-1)

T_calc and T_comm are those of r = 1, where each node computes its n-th part of the batch once. Between 1 and
n - 1 the load rises to one maximum and falls, so r = 1 or r = n - 1 is the fastest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb
from statistics import median
from typing import ClassVar

from .plan import is_possible


@dataclass(frozen=True, slots=True)
class UncodedTimes:
    """The durations of the two phases of a step, usually at redundancy 1."""

    computing: float  # seconds that a worker computes gradients
    exchanging: float  # seconds from the end of computing until the exchange is complete


def load(nodes: int, redundancy: int) -> int:
    """Return the load of a node's download in an exchange, in units of one block's gradient."""
    return comb(nodes - 1, redundancy)


def step_seconds(times: UncodedTimes, nodes: int, redundancy: int) -> float:
    """Return the predicted seconds of a step at `redundancy`: T(r) in the head of this file.

    Args:
        times: seconds of a step's phases at redundancy 1.
    """
    exchanging = times.exchanging * load(nodes, redundancy) / load(nodes, 1) if nodes > 1 else 0.0
    return redundancy * times.computing + exchanging


def possible(nodes: int) -> list[int]:
    """Return every redundancy that this number of nodes can use, ascending.

    Up to `MAX_NODES` nodes, 1 is always among them.
    """
    return [r for r in range(1, max(nodes, 2)) if is_possible(nodes, r)]


def fastest(times: UncodedTimes, nodes: int) -> int:
    """Return the redundancy with the shortest predicted step; the smallest one if several are equal.

    Args:
        times: seconds of a step's phases at redundancy 1.
    """
    return min(possible(nodes), key=lambda r: step_seconds(times, nodes, r))


def without_redundancy(nodes: int, redundancy: int, measured: UncodedTimes) -> UncodedTimes:
    """Convert the measured times of a step at `redundancy` to predicted times at redundancy 1."""
    factor = load(nodes, 1) / load(nodes, redundancy) if nodes > 1 else 1.0
    return UncodedTimes(measured.computing / redundancy, measured.exchanging * factor)


@dataclass
class AdaptiveRedundancy:
    """The control's choice of each step's redundancy in coded mode, by the times of recent steps."""

    REMEMBERED: ClassVar[int] = 9  # steps
    FEWEST: ClassVar[int] = 3  # steps before the redundancy may change
    GAIN: ClassVar[float] = (
        0.9  # change only if the predicted step is shorter than this share of the present one
    )

    nodes: int = 0  # number of nodes in the remembered steps, 0 before the first
    _times: list[UncodedTimes] = field(default_factory=list[UncodedTimes])
    _chosen: int = 1

    def note(self, nodes: int, redundancy: int, measured: UncodedTimes) -> None:
        """Record the times of a finished step, or discard all records if the number of nodes has changed.

        The first step of a new number of nodes is not recorded either: it is not representative.
        """
        if nodes != self.nodes:
            self.nodes = nodes
            self._times.clear()
            return
        self._times = [*self._times, without_redundancy(nodes, redundancy, measured)][-self.REMEMBERED :]

    @property
    def typical(self) -> UncodedTimes | None:
        """Median times of the recorded steps at redundancy 1; None before there are `FEWEST` steps."""
        if len(self._times) < self.FEWEST:
            return None
        return UncodedTimes(
            median(each.computing for each in self._times), median(each.exchanging for each in self._times)
        )

    def next(self, nodes: int) -> int:
        """Choose and return the redundancy of the next step for `nodes` nodes.

        It keeps the previous choice unless another redundancy promises a step shorter by the factor `GAIN`.
        It returns to 1 if the previous choice is not possible for `nodes`.
        """
        typical = self.typical if nodes == self.nodes else None
        if self._chosen not in possible(nodes):
            self._chosen = 1
        if typical is not None:
            best = fastest(typical, nodes)
            now = step_seconds(typical, nodes, self._chosen)
            if step_seconds(typical, nodes, best) < self.GAIN * now:
                self._chosen = best
        return self._chosen
