"""The blocks of a round: how many members compute each one (the redundancy), and their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..common.stored import stored
from ..proto.messages import Coding
from ..server.job import events as e
from ..server.job.roster import Name
from .arithmetic import AdaptiveRedundancy, UncodedTimes, block_sizes, plan, possible
from .round import CodedRound

WARM_UP, RENEWED = 5, 50  # exchanges after which speeds are measured anew: once, and again and again

# Objects of these classes are saved. They are named here, because the arithmetic imports nothing.
stored("step-times")(UncodedTimes)
stored("redundancy-choice")(AdaptiveRedundancy)


@stored("coded-blocks")
@dataclass(kw_only=True)
class Blocks:
    """Divides the samples of rounds into blocks.

    Attributes:
        _paces: seconds that each member takes for a sample: a running mean since the last exchange with equal
            blocks, in which each exchange has half the weight of the next one.
    """

    most: int | None  # largest redundancy; None to choose it by measured times
    by_speed: bool = False  # True to size the blocks by the speeds of their workers
    _paces: dict[Name, float] = field(default_factory=dict[Name, float])
    _choice: AdaptiveRedundancy = field(default_factory=AdaptiveRedundancy)
    _noted: tuple[int, int] = (0, 0)  # number of nodes and redundancy that the log names last

    @property
    def redundancy(self) -> int:
        """Number of members that compute each block of the last round; 0 before the first."""
        return self._noted[1]

    def divide(
        self, exchange: int, samples: int, members: Sequence[Name], least: int
    ) -> tuple[Coding, list[e.Action]]:
        """Return the blocks of the next round, and a log line if they change.

        Args:
            least: smallest number of samples of a block that has any.
        """
        nodes = len(members)
        redundancy = self._redundancy(nodes)
        notes: list[e.Action] = []
        if (nodes, redundancy) != self._noted:
            self._noted = nodes, redundancy
            named = f"{nodes} member{'' if nodes == 1 else 's'}"
            text = f"{named} exchange with redundancy {redundancy}{self._why(nodes, redundancy)}"
            less = self.most is not None and redundancy < self.most
            notes.append(e.Note(text=text, warning=less and nodes > 1))
        # A speed measured while a worker warmed up or was disturbed would stay wrong: with few samples, or
        # none, no better one is measured. So blocks are equal again from time to time.
        if exchange == WARM_UP or exchange % RENEWED == 0:
            self._paces = {}
        sizes: tuple[int, ...] = ()  # equal blocks, until every node's speed is measured
        if self.by_speed and all(name in self._paces for name in members):
            speeds = [1 / self._paces[name] for name in members]
            sizes = block_sizes(samples, plan(nodes, redundancy).holders, speeds, least)
        return Coding(exchange=exchange, redundancy=redundancy, sizes=sizes), notes

    def _redundancy(self, nodes: int) -> int:
        if self.most is None:
            return self._choice.next(nodes)
        return max(r for r in possible(nodes) if r <= self.most)

    def _why(self, nodes: int, redundancy: int) -> str:
        typical = self._choice.typical
        if self.most is not None:
            return f": {self.most} is more than possible" if redundancy < self.most else ""
        if typical is None or self._choice.nodes != nodes:
            return ": no step has been measured yet"
        times = f"{typical.computing:.3g} s of computing and {typical.exchanging:.3g} s of exchanging"
        return f": without redundancy a step would take {times}; the fastest choice is being determined"

    def measured(self, round_: CodedRound, now: float) -> None:
        """Learn from the times that the members of a complete round report."""
        reports = [round_.reports[node] for node in round_.present]
        if self.by_speed:
            self._measure_paces(round_)
        computing = max(report.exchanged.computing_seconds for report in reports)
        if not round_.irregular and not round_.lost and math.isfinite(computing) and computing >= 0:
            times = UncodedTimes(computing, max(0.0, now - round_.opened_at - computing))
            self._choice.note(len(reports), round_.coding.redundancy, times)

    def _measure_paces(self, round_: CodedRound) -> None:
        """Take the seconds per sample of each member from its report, and forget those of other members."""
        known = {name: self._paces[name] for name in round_.members.values() if name in self._paces}
        for node, report in round_.reports.items():
            seconds = report.exchanged.computing_seconds
            if report.samples and math.isfinite(seconds) and seconds > 0:
                name, pace = round_.members[node], seconds / report.samples
                known[name] = (known[name] + pace) / 2 if name in known else pace
        self._paces = known
