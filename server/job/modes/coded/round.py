"""One round of coded mode: its members, the packets that were relayed, and the members that have the sum.

A round (`ExchangeLife`):

    EXCHANGING  packets are relayed; members report that they have    -> gone, once all present members have
                the sum                                                 it; BROKEN (`exchanges` says when)
    BROKEN      the exchange cannot end                               -> EXCHANGING, under a new number, with
                                                                        whole blocks from one holder each

What may not happen: reports or packets of a broken exchange counted in the one that replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from .....coding import NOBODY, ExchangePlan, plan, resent
from .....common.stored import DERIVED, stored
from .....proto.messages import Coding, Exchanged
from ...roster import Name
from ...samples import Drawn
from ...transitions import move


@stored("exchange-life")
class ExchangeLife(Enum):
    EXCHANGING = "exchanging"
    BROKEN = "broken"


_TRANSITIONS = {
    ExchangeLife.EXCHANGING: frozenset({ExchangeLife.BROKEN}),
    ExchangeLife.BROKEN: frozenset({ExchangeLife.BROKEN, ExchangeLife.EXCHANGING}),
}


@stored("exchange-report")
@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """A member's report that it has the sum."""

    samples: int
    loss: float
    exchanged: Exchanged


@stored("coded-round")
@dataclass(kw_only=True, slots=True)
class CodedRound:
    """begun, relayed, reports and `plan` are those of the running exchange; the rest lasts for the round."""

    version: int
    opened_at: float
    drawn: Drawn
    coding: Coding  # of the running exchange, as assignments have it
    members: dict[int, Name]  # by node
    least: int = 1  # samples of a block that has any
    life: ExchangeLife = ExchangeLife.EXCHANGING
    broken: str = ""  # why the exchange cannot end
    disagreed: bool = False  # members computed the same block differently
    checksums: dict[int, tuple[int, int]] = field(  # of blocks, with the node that sent the first one
        default_factory=dict[int, tuple[int, int]]
    )
    begun: set[int] = field(default_factory=set[int])  # packets whose headers have arrived
    relayed: set[int] = field(default_factory=set[int])  # packets that were relayed whole
    reports: dict[int, ExchangeReport] = field(default_factory=dict[int, ExchangeReport])  # by node
    lost: set[int] = field(default_factory=set[int])  # nodes
    irregular: bool = False  # its time is no measure: an exchange was replaced, or a member evaluates
    _plan: list[ExchangePlan] = field(default_factory=list[ExchangePlan], metadata=DERIVED)
    _unsent: dict[int, int] = field(default_factory=dict[int, int], metadata=DERIVED)  # packets, by node
    _nodes: dict[Name, int] = field(default_factory=dict[Name, int], metadata=DERIVED)

    @property
    def plan(self) -> ExchangePlan:
        if not self._plan:
            whole = self.original
            coding = self.coding
            made = resent(whole, coding.senders, coding.present) if coding.senders else whole
            self._plan.append(made)
            self._unsent = dict.fromkeys(self.members, 0)
            for index, packet in enumerate(made.packets):
                self._unsent[packet.sender] += index not in self.relayed
        return self._plan[0]

    @property
    def original(self) -> ExchangePlan:
        """The plan of the round's first exchange."""
        return plan(len(self.members), self.coding.redundancy)

    def fail(self, why: str) -> None:
        """Break the exchange, which cannot end."""
        self.life = move(self.life, ExchangeLife.BROKEN, _TRANSITIONS)
        self.broken = why

    @property
    def compares(self) -> bool:
        """Whether packets of the exchange have checksums of blocks that several nodes compute."""
        return self.coding.redundancy > 1 and not self.coding.senders

    def differing(self, node: int, index: int, checksums: Sequence[int]) -> tuple[int, int] | None:
        """Remember the checksums of a packet's blocks. Return the first block that another node has computed
        differently, with that node."""
        for (block, _), checksum in zip(self.plan.packets[index].terms, checksums, strict=True):
            first, expected = self.checksums.setdefault(block, (node, checksum))
            if checksum != expected:
                return block, first
        return None

    def relay(self, index: int) -> None:
        """Called when a packet was relayed whole."""
        if index not in self.relayed:
            sender = self.plan.packets[index].sender  # `plan` also makes `_unsent`
            self._unsent[sender] -= 1
            self.relayed.add(index)

    def has_sent(self, node: int) -> bool:
        """Return whether all of a node's packets were relayed."""
        _ = self.plan  # also makes `_unsent`
        return self._unsent[node] == 0

    @property
    def present(self) -> list[int]:
        return [node for node in self.members if node not in self.lost]

    @property
    def complete(self) -> bool:
        """Whether every present node has reported that it has the sum."""
        return len(self.reports) + len(self.lost) == len(self.members)

    @property
    def awaited(self) -> list[int]:
        """Nodes whose packets have not all arrived; if there are none, nodes that have yet to decode."""
        missing = [node for node in self.present if node not in self.reports]
        return [node for node in missing if not self.has_sent(node)] or missing

    def node_of(self, name: Name) -> int | None:
        if not self._nodes:
            self._nodes.update((member, node) for node, member in self.members.items())
        return self._nodes.get(name)

    @property
    def loss(self) -> float:
        """Mean over the samples of all reports; a block counts as often as it was computed."""
        samples = sum(report.samples for report in self.reports.values())
        total = sum(report.loss * report.samples for report in self.reports.values())
        return total / samples if samples else math.nan

    def begin_again(self, exchange: int, listening: Sequence[int]) -> None:
        """Start another exchange, of whole blocks from nodes that have them, preferably `listening` ones."""
        present = self.present
        sends = dict.fromkeys(present, 0)
        senders: list[int] = []
        for holders in self.original.holders:
            able = [node for node in holders if node in sends]
            able.sort(key=lambda node: (node not in listening, sends[node]))
            senders.append(able[0] if able else NOBODY)
            if able:
                sends[able[0]] += 1
        self.life = move(self.life, ExchangeLife.EXCHANGING, _TRANSITIONS)
        self.coding = replace(self.coding, exchange=exchange, senders=tuple(senders), present=tuple(present))
        self.broken = ""
        self.irregular = True
        self._plan = []
        self.begun, self.relayed, self.reports = set(), set(), {}

    @property
    def parts(self) -> list[Drawn]:
        """The samples behind the sum, in one piece unless blocks are left out."""
        whole = len(self.plan.blocks) == len(self.plan.holders)
        return [self.drawn] if whole else self._samples(self.plan.blocks)

    @property
    def left_out(self) -> list[Drawn]:
        """The samples of blocks that no node has any more."""
        return self._samples(sorted(set(range(len(self.plan.holders))) - set(self.plan.blocks)))

    def _samples(self, blocks: Sequence[int]) -> list[Drawn]:
        parts = [self.drawn.part(block, len(self.plan.holders), self.least) for block in blocks]
        return [part for part in parts if part.count]
