"""One round of coded mode: its members, the packets that were relayed, and the members that have the sum.

A round (`ExchangeLife`):

    EXCHANGING | packets are relayed; members report that | -> gone, once all present members have the sum;
               | they have the sum                        |    BROKEN (`exchanges` lists the causes)
    BROKEN     | the exchange cannot end                  | -> EXCHANGING, under a new number, with whole
               |                                          |    blocks from one holder each

Invariant: no report or packet of a broken exchange counts in the exchange that replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ..common.stored import DERIVED, stored
from ..proto.messages import Coding, Exchanged
from ..proto.refusal import Refused
from ..proto.shares import block_share
from ..server.job import events as e
from ..server.job import refusals
from ..server.job.loss_history import mean_loss
from ..server.job.roster import Name
from ..server.job.samples import Drawn
from ..server.job.transitions import move
from .arithmetic import NOBODY, ExchangePlan, PlannedPacket, plan, resent


@stored("exchange-life")
class ExchangeLife(Enum):
    """State of the running exchange: EXCHANGING while packets are relayed, BROKEN once it can no longer
    end."""

    EXCHANGING = "exchanging"
    BROKEN = "broken"


_TRANSITIONS = {
    ExchangeLife.EXCHANGING: frozenset({ExchangeLife.BROKEN}),
    ExchangeLife.BROKEN: frozenset({ExchangeLife.BROKEN, ExchangeLife.EXCHANGING}),
}


@stored("exchange-report")
@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """A member's report that it has the sum of an exchange."""

    samples: int  # number of samples that the member computed
    loss: float | None  # mean training loss over these samples; None if unknown
    exchanged: Exchanged  # times, checksum of the replica and number of clipped elements


@stored("coded-round")
@dataclass(kw_only=True, slots=True)
class CodedRound:
    """One round of coded mode. The fields begun, relayed, reports and `_plan` are those of the running
    exchange; the others last for the round.

    Attributes:
        checksums: node that sent the first checksum of a block, and this checksum, by block.
        _plan: plan of the running exchange; empty until it is needed.
    """

    version: int  # version at which members compute
    opened_at: float  # time at which the round opened, in seconds of the job's clock
    drawn: Drawn
    coding: Coding  # the running exchange, as assignments name it
    members: dict[int, Name]  # worker and incarnation of each member, by node
    least: int = 1  # smallest number of samples of a block that has any
    life: ExchangeLife = ExchangeLife.EXCHANGING
    broken: str = ""  # reason for which the exchange cannot end; empty while it is not broken
    disagreed: bool = False  # True if members computed the same block differently
    checksums: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    begun: set[int] = field(default_factory=set[int])  # indices of packets whose headers have arrived
    relayed: set[int] = field(default_factory=set[int])  # indices of packets that were relayed whole
    reports: dict[int, ExchangeReport] = field(default_factory=dict[int, ExchangeReport])  # by node
    lost: set[int] = field(default_factory=set[int])  # nodes whose members are lost
    irregular: bool = False  # its time is not comparable: an exchange was replaced, or a member evaluates
    _plan: list[ExchangePlan] = field(default_factory=list[ExchangePlan], metadata=DERIVED)
    _unsent: dict[int, int] = field(default_factory=dict[int, int], metadata=DERIVED)  # packets, by node
    _nodes: dict[Name, int] = field(default_factory=dict[Name, int], metadata=DERIVED)  # empty until needed

    @property
    def plan(self) -> ExchangePlan:
        """Plan of the running exchange: its packets, with their senders and targets."""
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
        """Plan of the round's first exchange."""
        return plan(len(self.members), self.coding.redundancy)

    def fail(self, why: str) -> None:
        """Mark the exchange as broken: it cannot end. `why` is the reason, for the log."""
        self.life = move(self.life, ExchangeLife.BROKEN, _TRANSITIONS)
        self.broken = why

    @property
    def compares(self) -> bool:
        """True if the exchange's packets have checksums of blocks that several nodes compute."""
        return self.coding.redundancy > 1 and not self.coding.senders

    def begin(self, sender: Name, event: e.PacketStarted) -> tuple[int, PlannedPacket] | None:
        """Begin a packet of the running exchange. Return the node that sends it, and its plan.

        Returns:
            None if the packet was relayed before.

        Raises:
            Refused: PACKET, for a packet of another sender, or a wrong number of checksums.
        """
        node, packets = self.node_of(sender), self.plan.packets
        if event.index >= len(packets) or packets[event.index].sender != node:
            limit = f"one of the {len(packets)} of exchange {event.exchange} that this worker has to send"
            raise Refused(refusals.packet(sender[0], limit, f"packet {event.index}"))
        if event.index in self.relayed:
            return None
        packet = packets[event.index]
        expected = len(packet.terms) if self.compares else 0
        if len(event.checksums) != expected:
            limit = f"{expected} checksums in packet {event.index}"
            raise Refused(refusals.packet(sender[0], limit, f"{len(event.checksums)}"))
        self.begun.add(event.index)
        return packet.sender, packet

    def differing(self, node: int, index: int, checksums: Sequence[int]) -> tuple[int, int] | None:
        """Record the checksums of a packet's blocks, and find a block that two nodes have computed
        differently.

        Returns:
            The first block that differs, and the other node that computed it; None if no block differs.
        """
        for (block, _), checksum in zip(self.plan.packets[index].terms, checksums, strict=True):
            first, expected = self.checksums.setdefault(block, (node, checksum))
            if checksum != expected:
                return block, first
        return None

    def relay(self, index: int) -> None:
        """Record that the packet with this index was relayed whole."""
        if index not in self.relayed:
            sender = self.plan.packets[index].sender  # `plan` also makes `_unsent`
            self._unsent[sender] -= 1
            self.relayed.add(index)

    def has_sent(self, node: int) -> bool:
        """Return True if all of a node's packets were relayed."""
        _ = self.plan  # also makes `_unsent`
        return self._unsent[node] == 0

    @property
    def present(self) -> list[int]:
        """Nodes whose members are not lost."""
        return [node for node in self.members if node not in self.lost]

    @property
    def complete(self) -> bool:
        """True once every present node has reported that it has the sum."""
        return len(self.reports) + len(self.lost) == len(self.members)

    @property
    def awaited(self) -> list[int]:
        """Nodes that the exchange waits for: those whose packets have not all been relayed. If there are
        none, those that have yet to report the sum."""
        missing = [node for node in self.present if node not in self.reports]
        return [node for node in missing if not self.has_sent(node)] or missing

    def node_of(self, name: Name) -> int | None:
        """Return the node of the member `name` (worker and incarnation); None if it has none in this
        round."""
        if not self._nodes:
            self._nodes.update((member, node) for node, member in self.members.items())
        return self._nodes.get(name)

    @property
    def loss(self) -> float:
        """Mean training loss over the samples of all reports; NaN without samples. A block counts once for
        each member that computed it."""
        return mean_loss([(report.loss, report.samples) for report in self.reports.values()])

    def begin_again(self, exchange: int, listening: Sequence[int]) -> None:
        """Start another exchange, of whole blocks from nodes that have them, in place of the broken one.

        Args:
            listening: nodes that can be sent an assignment now, which are preferred as senders.
        """
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
        """Samples behind the sum, in one piece unless blocks are left out."""
        whole = len(self.plan.blocks) == len(self.plan.holders)
        return [self.drawn] if whole else self._samples(self.plan.blocks)

    @property
    def left_out(self) -> list[Drawn]:
        """Samples of blocks that no present node has."""
        return self._samples(sorted(set(range(len(self.plan.holders))) - set(self.plan.blocks)))

    def _samples(self, blocks: Sequence[int]) -> list[Drawn]:
        total, count = self.drawn.count, len(self.plan.holders)
        bounds = [block_share(self.coding, total, block, count, self.least) for block in blocks]
        parts = [self.drawn.part(*each) for each in bounds]
        return [part for part in parts if part.count]


@stored("clipping")
@dataclass
class Clipping:
    """Gradient elements that were clipped, because fixed point has no larger ones."""

    elements: int = 0  # number of elements, of all workers
    steps: int = 0  # number of steps with such elements

    def add(self, version: int, elements: int) -> list[e.Action]:
        """Add the elements of the step that made `version`. Return a warning for the 1st, 2nd, 4th, 8th, …
        step with any."""
        self.elements += elements
        self.steps += elements > 0
        if not elements or self.steps & (self.steps - 1):
            return []
        text = (
            f"version {version}: {elements} gradient elements outside ±10 were clipped "
            f"(steps with clipping so far: {self.steps}); gradients are sums over the samples of a "
            "block: use a smaller --batch-size, more redundancy, or another mode"
        )
        return [e.Note(text=text, warning=True)]
