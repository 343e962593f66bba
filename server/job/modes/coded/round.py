"""One round of coded mode: who takes part, which packets have been handed on, and who has the sum.

exchanging  Packets are handed on; members report that they have the sum. The round is over when all have.
            Next: broken, if a packet was damaged, a member was lost, or two members computed a block
            differently.
broken      The exchange cannot end. Next: exchanging again, under a new number, with whole blocks from
            one holder each.
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


_LIVES = {
    ExchangeLife.EXCHANGING: frozenset({ExchangeLife.BROKEN}),
    ExchangeLife.BROKEN: frozenset({ExchangeLife.BROKEN, ExchangeLife.EXCHANGING}),
}


@stored("exchange-report")
@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """What a member has said after an exchange."""

    samples: int
    loss: float
    exchanged: Exchanged


@stored("coded-round")
@dataclass(kw_only=True, slots=True)
class CodedRound:
    """Its members, by node, are frozen when it opens.

    coding: of the running exchange, as workers are told it. begun: packets of the exchange that have
    begun to come. relayed: those handed on whole. reports: by node, of the exchange. broken: why it
    cannot end. disagreed: whether members had computed the same block differently. checksums: of blocks,
    each with the node that was the first to send it. irregular: its time says nothing, because an
    exchange was replaced or somebody evaluates. _plan: of the running exchange, once it was needed;
    _unsent: packets that each node has still to send in it.
    """

    version: int
    opened_at: float
    drawn: Drawn
    coding: Coding
    members: dict[int, Name]
    least: int = 1  # samples of a block that has any
    life: ExchangeLife = ExchangeLife.EXCHANGING
    broken: str = ""
    disagreed: bool = False
    checksums: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    begun: set[int] = field(default_factory=set[int])
    relayed: set[int] = field(default_factory=set[int])
    reports: dict[int, ExchangeReport] = field(default_factory=dict[int, ExchangeReport])
    lost: set[int] = field(default_factory=set[int])
    irregular: bool = False
    _plan: list[ExchangePlan] = field(default_factory=list[ExchangePlan], metadata=DERIVED)
    _unsent: dict[int, int] = field(default_factory=dict[int, int], metadata=DERIVED)
    _nodes: dict[Name, int] = field(default_factory=dict[Name, int], metadata=DERIVED)

    @property
    def plan(self) -> ExchangePlan:
        """Of the running exchange."""
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
        """Of the first exchange."""
        return plan(len(self.members), self.coding.redundancy)

    def fail(self, why: str) -> None:
        """The exchange cannot end."""
        self.life = move(self.life, ExchangeLife.BROKEN, _LIVES)
        self.broken = why

    @property
    def compares(self) -> bool:
        """Whether packets of the exchange have checksums of blocks that several nodes compute."""
        return self.coding.redundancy > 1 and not self.coding.senders

    def differing(self, node: int, index: int, checksums: Sequence[int]) -> tuple[int, int] | None:
        """Take note of the blocks in a packet of this node: the first that another node has computed
        differently, and that node."""
        for (block, _), checksum in zip(self.plan.packets[index].terms, checksums, strict=True):
            first, expected = self.checksums.setdefault(block, (node, checksum))
            if checksum != expected:
                return block, first
        return None

    def relay(self, index: int) -> None:
        """A packet has been handed on whole."""
        if index not in self.relayed:
            sender = self.plan.packets[index].sender  # which also counts what is unsent, if nobody has yet
            self._unsent[sender] -= 1
            self.relayed.add(index)

    def has_sent(self, node: int) -> bool:
        """Whether all of a node's packets were handed on."""
        _ = self.plan  # counts what is unsent, if nobody has yet
        return self._unsent[node] == 0

    @property
    def present(self) -> list[int]:
        return [node for node in self.members if node not in self.lost]

    @property
    def complete(self) -> bool:
        """Whether every node that is present has said that it has the sum."""
        return len(self.reports) + len(self.lost) == len(self.members)

    @property
    def missing(self) -> list[int]:
        """Nodes that have not said that they have the sum."""
        return [node for node in self.present if node not in self.reports]

    @property
    def awaited(self) -> list[int]:
        """Nodes whose packets have not all come; if there are none, those that have yet to decode."""
        return [node for node in self.missing if not self.has_sent(node)] or self.missing

    def node_of(self, name: Name) -> int | None:
        if not self._nodes:
            self._nodes.update((member, node) for node, member in self.members.items())
        return self._nodes.get(name)

    @property
    def loss(self) -> float:
        """Mean over the samples of all reports, those of a block as often as it was computed."""
        samples = sum(report.samples for report in self.reports.values())
        total = sum(report.loss * report.samples for report in self.reports.values())
        return total / samples if samples else math.nan

    def begin_again(self, exchange: int, listening: Sequence[int]) -> None:
        """Plan another exchange, of whole blocks from nodes that have them; `listening` ones send first."""
        present = self.present
        sends = dict.fromkeys(present, 0)
        senders: list[int] = []
        for holders in self.original.holders:
            able = [node for node in holders if node in sends]
            able.sort(key=lambda node: (node not in listening, sends[node]))
            senders.append(able[0] if able else NOBODY)
            if able:
                sends[able[0]] += 1
        self.life = move(self.life, ExchangeLife.EXCHANGING, _LIVES)
        self.coding = replace(self.coding, exchange=exchange, senders=tuple(senders), present=tuple(present))
        self.broken = ""
        self.irregular = True
        self._plan = []
        self.begun, self.relayed, self.reports = set(), set(), {}

    @property
    def parts(self) -> list[Drawn]:
        """The samples behind the sum: all of them in one piece, unless blocks are left out."""
        whole = len(self.plan.blocks) == len(self.plan.holders)
        return [self.drawn] if whole else self._samples(self.plan.blocks)

    @property
    def left_out(self) -> list[Drawn]:
        """The samples of blocks that nobody has any more."""
        return self._samples(sorted(set(range(len(self.plan.holders))) - set(self.plan.blocks)))

    def _samples(self, blocks: Sequence[int]) -> list[Drawn]:
        parts = [self.drawn.part(block, len(self.plan.holders), self.least) for block in blocks]
        return [part for part in parts if part.count]
