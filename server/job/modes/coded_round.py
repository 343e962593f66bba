"""One round of coded mode: who takes part, which packets have come, and who has the sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ....coding import NOBODY, Plan, plan, resent
from ....proto.messages import Exchanged
from ..roster import Member
from ..samples import Drawn


@dataclass(frozen=True, slots=True)
class Report:
    """What a member has said after an exchange."""

    samples: int
    loss: float
    exchanged: Exchanged


@dataclass(kw_only=True, slots=True)
class Round:
    """Its members, by node, are frozen when it opens; `plan` is that of the running exchange."""

    version: int
    opened_at: float
    drawn: Drawn
    redundancy: int
    plan: Plan
    exchange: int
    members: dict[int, Member] = field(repr=False)
    begun: set[int] = field(default_factory=set[int])  # packets of the exchange that have begun to come
    relayed: set[int] = field(default_factory=set[int])  # and those that were handed on whole
    reports: dict[int, Report] = field(default_factory=dict[int, Report])  # by node, of the exchange
    lost: set[int] = field(default_factory=set[int])
    broken: str = ""  # why the exchange cannot end
    irregular: bool = False  # its time says nothing: an exchange was replaced, or somebody evaluates

    @property
    def present(self) -> list[int]:
        return [node for node in self.members if node not in self.lost]

    @property
    def missing(self) -> list[int]:
        """Nodes that have not said that they have the sum."""
        return [node for node in self.present if node not in self.reports]

    @property
    def awaited(self) -> list[int]:
        """Nodes whose packets have not all come; if there are none, those that have yet to decode."""
        sending = [node for node in self.missing if not set(self.plan.sent_by(node)) <= self.relayed]
        return sending or self.missing

    def node_of(self, member: Member) -> int | None:
        return next((node for node, other in self.members.items() if other is member), None)

    @property
    def loss(self) -> float:
        """Mean over the samples of all reports, those of a block as often as it was computed."""
        samples = sum(report.samples for report in self.reports.values())
        total = sum(report.loss * report.samples for report in self.reports.values())
        return total / samples if samples else math.nan

    def begin_again(self, exchange: int) -> tuple[int, ...]:
        """Plan another exchange, of whole blocks from whoever has them; returns the sender of each block."""
        original = plan(len(self.members), self.redundancy)
        present = self.present
        sends = dict.fromkeys(present, 0)
        senders: list[int] = []
        for holders in original.holders:
            able = [node for node in holders if node in sends]
            able.sort(key=lambda node: (not self.members[node].listening, sends[node]))
            senders.append(able[0] if able else NOBODY)
            if able:
                sends[able[0]] += 1
        self.exchange, self.plan, self.broken = exchange, resent(original, senders, present), ""
        self.irregular = True
        self.begun, self.relayed, self.reports = set(), set(), {}
        return tuple(senders)

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
        parts = [self.drawn.part(block, len(self.plan.holders)) for block in blocks]
        return [part for part in parts if part.count]
