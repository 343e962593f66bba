"""Exchanges: the mode `coded`. Workers exchange coded packets of gradients, and take the steps themselves.

A round opens with the ready members that are idle as its nodes, numbered from 0. Every node gets all samples
of the round; the numbers determine the blocks that each node computes (`coding.plan`). The server relays the
packets. Each member reports when it has the sum of all blocks. Once all have it, the round closes, and the
next assignment names the exchange whose sum to apply (`Assignment.apply`). So a replica changes only when
every replica can. Optimizer state is part of a replica and of its manifest (`Tensor.state`), so every path
that moves parameters moves it too.

The head of `round` has the states of an exchange. A broken exchange is replaced: every block goes whole from
one member that has it to all others, under a new number, and sums of the old exchange are revoked. A block
that no present member has is left out, and its samples are drawn again. An exchange breaks when

- a packet is damaged;
- a member is lost before all of its packets are relayed;
- a member returns on another stream, and has missed packets;
- members computed a block differently, as the checksums in their packets show.

The parameters are at the workers; the server has an occasional copy (`copies`).

Invariants:

- No sum is applied that a present member lacks.
- No sum has blocks from two exchanges.
- A version number names one state of the training.

`tests/server/coded_histories` drives this file at random, with real exchanges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..common.stored import DERIVED
from ..proto.refusal import Refused
from ..server.job import events as e
from ..server.job import refusals
from ..server.job.modes.mode import Exchanges, Mode
from ..server.job.roster import Member, Name
from ..server.job.state import JobState
from ..server.job.waiting import Awaited, describe, waiting_for
from ..server.job.work import AssignedWork
from .arithmetic import MAX_NODES, packet_elements
from .blocks import Blocks
from .copies import HOPE_LEASES, Drift, ServerCopy
from .round import Clipping, CodedRound, ExchangeLife, ExchangeReport

MAX_DAMAGED = 3  # A member is removed if more exchanges in a row fail because of its packets.
SAID_DISAGREEMENTS = 4  # Steps in a row with differing gradients of a block, before the log has the remedy.


@dataclass
class Coded(Mode, Exchanges):
    """The mode `coded`."""

    _state: JobState = field(metadata=DERIVED)
    _blocks: Blocks  # decides how many members compute each block, and the sizes of blocks
    round: CodedRound | None = None
    _count: int = 0  # number of exchanges so far, which is the number of the last one
    _applied: int = 0  # number of the exchange whose sum made the version
    _uncoded: int = 0  # number of exchanges that replaced a broken one
    _have_sum: set[Name] = field(default_factory=set[Name])  # of the last round
    _clipping: Clipping = field(default_factory=Clipping)  # gradient elements that were clipped
    _damaged_by: Counter[Name] = field(default_factory=Counter[Name])  # exchanges in a row
    _disagreements: int = 0  # number of rounds in a row in which members computed a block differently
    _copy: ServerCopy = field(default_factory=ServerCopy)  # the server's copy of the parameters
    _drift: Drift = field(default_factory=Drift)  # members whose replicas differ

    @property
    def exchanges(self) -> Exchanges:
        return self

    @property
    def terms(self) -> Mapping[str, Any]:
        return {"apply": self._applied}

    @property
    def status(self) -> Mapping[str, int]:
        return {
            "redundancy": self._blocks.redundancy,
            "uncoded_exchanges": self._uncoded,
            "clipped_elements": self._clipping.elements,
        }

    @property
    def gauges(self) -> Mapping[str, float]:
        return {**super().gauges, "drifting": self._drift.found, "uncoded_exchanges": self._uncoded}

    @property
    def quiet(self) -> bool:
        return self.round is None and (self._copied or (not self._state.done and self._kept))

    @property
    def _copied(self) -> bool:
        return self._copy.version == self._state.version

    @property
    def _kept(self) -> bool:
        """True if a member has the current version, or a copy of it is being installed."""
        members = self._state.roster.members.values()
        return self._copy.loading is not None or any(map(self._is_current, members))

    def _away(self) -> list[Member]:
        """Return departed members that had the current version and may return with it."""
        return [member for member in self._state.roster.departed.values() if self._is_current(member)]

    def due(self, now: float) -> bool:
        return self._copy.gives_up(now, self._state.rules.lease_seconds)

    # ---- assigning work

    def advance(self, now: float) -> list[e.Action]:
        state = self._state
        actions: list[e.Action] = []
        if self.round is not None and self.round.life is ExchangeLife.BROKEN:
            actions += self._exchange_again(self.round, now)
        if self.round is not None and self.round.complete:
            actions += self._close(self.round, now)
        if self.round is None and not self._copied and not self._kept:
            if self._away() and self._copy.hopes(now, state.roster.ready_members, state.rules.lease_seconds):
                return actions
            actions += self._restart_from_copy()
        self._copy.hoping_since = None
        if self.round is None:
            actions += self._open(now)
        return actions

    def _open(self, now: float) -> list[e.Action]:
        state = self._state
        ready = state.roster.ready()[:MAX_NODES]
        if not ready:
            return []
        behind = [member for member in ready if not self._is_current(member)]
        actions: list[e.Action] = []
        if behind or self._copy.due or state.done:
            able = [member for member in ready if member.listening and self._is_current(member)]
            actions += self._copy.request(able, state.version, self._applied)
        if behind and not self._copied:
            return actions  # members without the current version get the copy once it has arrived
        drawn = state.samples.draw(state.rules.batch_size * len(ready)) if state.may_step() else None
        if drawn is None:
            return actions
        self._count += 1
        coding, note = self._blocks.divide(
            self._count, drawn.count, [each.id for each in ready], state.samples.least
        )
        actions += note
        self.round = round_ = CodedRound(
            version=state.version,
            opened_at=now,
            drawn=drawn,
            coding=coding,
            members={node: member.id for node, member in enumerate(ready)},
            least=state.samples.least,
        )
        state.wait_from(now)
        return actions + self._assign(round_, now, evaluate=True)

    def _assign(self, round_: CodedRound, now: float, *, evaluate: bool) -> list[e.Action]:
        """Assign the running exchange to every present member."""
        state = self._state
        due = state.evaluation_due if evaluate else 0
        middle = state.samples.progress + round_.drawn.count / 2 / state.samples.per_epoch
        actions: list[e.Action] = []
        for node in round_.present:
            member = self._member(round_, node)
            asked = state.ask_for_evaluation(member, due, state.assignments + 1, now)
            if asked:
                due, round_.irregular = 0, True
            if member.listening and self._is_current(member):
                member.version = state.version  # the assignment has it apply its sum first
            actions += state.assign_samples(
                member,
                round_.drawn,
                now,
                position=node,
                world=len(round_.members),
                progress=state.samples.progress,
                learning_rate=state.rules.learning_rate * state.rate_factor(middle, state.version + 0.5),
                evaluate_epoch=state.evaluation_due if asked else 0,
                coding=round_.coding,
                apply=self._applied,
            )
        return actions

    def _member(self, round_: CodedRound, node: int) -> Member:
        """Return the member that is node `node` of the round, which must be present."""
        member = self._state.roster.present(round_.members[node])
        assert member is not None
        return member

    def _is_current(self, member: Member) -> bool:
        """Return True if the member's replica is at the current version, or will be once it applies its
        sum."""
        version = self._state.version
        has_sum = member.id in self._have_sum
        return member.version == version or (has_sum and member.version == version - 1)

    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        self._copy.forget(member)
        round_, work = self.round, member.work
        node = round_.node_of(member.id) if round_ is not None else None
        if round_ is None or node is None or work is None:
            return []
        if not self._is_current(member) and not self._copied:
            self._drop_member(round_, member, node, f"{member.name} lost its parameters")
            return []
        missed = any(node in round_.plan.packets[index].targets for index in round_.begun)
        if assigned == work.assignment.id or missed:
            round_.fail(f"{member.name} lost its stream")
            return []
        if self._is_current(member):
            member.version = self._state.version
        return [self._state.send(member, work.assignment)]

    # ---- packets

    def received(self, member: Member, event: e.OfExchange) -> list[e.Action]:
        match event:
            case e.PacketRelayed():
                if self.round is not None and self.round.coding.exchange == event.exchange:
                    self.round.relay(event.index)
            case e.PacketDamaged():
                return self._damaged(member, event)
            case e.SnapshotReceived():
                if not self.wants_copy(member.worker, event.version, leaving=event.leaving):
                    return [e.Drop(key=event.key)]
                self._copy.arrived(event.version)
                return [e.InstallSnapshot(key=event.key)]
        return []

    def done(self, event: e.Published | e.SnapshotInstalled) -> None:
        self._copy.installed(event.version)

    def packet_elements(self, exchange: int, elements: int) -> int | None:
        round_ = self.round
        if round_ is None or round_.coding.exchange != exchange:
            return None
        return packet_elements(elements, round_.plan.slices)

    def targets(self, member: Member, event: e.PacketStarted) -> e.Targets:
        round_ = self.round
        if event.exchange > self._count:
            limit = f"an exchange up to {self._count}"
            raise Refused(refusals.packet(member.worker, limit, str(event.exchange)))
        if round_ is None or event.exchange != round_.coding.exchange:
            return None
        begun = round_.begin(member.id, event)
        if begun is None:
            return None
        node, packet = begun
        differing = round_.differing(node, event.index, event.checksums) if round_.compares else None
        if differing is not None:
            self._break_disagreed(round_, member, *differing)
        names = [round_.members[target] for target in packet.targets]
        targets = [self._state.roster.present(name) for name in names]
        return tuple(target.worker for target in targets if target is not None and target.listening)

    def _break_disagreed(self, round_: CodedRound, member: Member, block: int, node: int) -> None:
        """Break the exchange, because two members computed a block differently: decoding would return neither
        gradient.
        """
        if not round_.disagreed:
            round_.disagreed = True
            self._disagreements += 1
        other = self._state.roster.get(round_.members[node])
        name = round_.members[node][0] if other is None else other.name
        round_.fail(
            f"{name} and {member.name} computed different gradients of block {block}; possible causes: a NaN "
            "at one of them, augmentation without a seed, computers of different makes"
        )

    def _damaged(self, member: Member, event: e.PacketDamaged) -> list[e.Action]:
        """Break the exchange because of a member's packet. Disconnect the member if that repeats."""
        round_ = self.round
        node = round_.node_of(member.id) if round_ is not None else None
        if round_ is None or node is None or round_.coding.exchange != event.exchange:
            return []
        why = f"a packet of {member.name} was refused ({event.refusal.message})"
        if not self._blame(round_, member, why):
            return []
        limit = f"at least one of {MAX_DAMAGED + 1} exchanges in a row that succeeds"
        refusal = refusals.packet(member.worker, limit, why)
        return [e.Disconnect(*member.id, refusal=refusal, final=True)]

    def _blame(self, round_: CodedRound, member: Member, why: str) -> bool:
        """Break the exchange because of a member. Return True if that has repeated too often."""
        round_.fail(why)
        self._damaged_by[member.id] += 1
        return self._damaged_by[member.id] > MAX_DAMAGED

    def take(self, member: Member, work: AssignedWork, event: e.Pushed, now: float) -> int | None:
        round_ = self.round
        node = round_.node_of(member.id) if round_ is not None else None
        if round_ is None or node is None or event.exchanged is None:
            return None
        if round_.has_sent(node):
            self._damaged_by.pop(member.id, None)
        else:  # without a new exchange, the other members would wait for its other packets forever
            why = f"{member.name} has not sent all of its packets"
            if self._blame(round_, member, why):
                self._drop_member(round_, member, node, why)
                return None
        round_.reports[node] = ExchangeReport(event.samples, event.loss, event.exchanged)
        return round_.version + 1

    def too_late(self, work: AssignedWork) -> bool:
        return True

    def holds(self, key: e.PushKey) -> bool:
        return False

    def lost(self, member: Member, *, away: bool) -> None:
        if not away:
            self._have_sum.discard(member.id)
            member.version = None
        self._copy.forget(member)
        round_ = self.round
        node = round_.node_of(member.id) if round_ is not None else None
        if round_ is not None and node is not None:
            self._drop_member(round_, member, node, f"{member.name} is lost")

    def _drop_member(self, round_: CodedRound, member: Member, node: int, why: str) -> None:
        """Continue the round without a member. `why` is the reason to log if the exchange breaks."""
        self._state.roster.relieve(member)
        round_.lost.add(node)
        round_.reports.pop(node, None)
        if not round_.present:
            self._state.samples.give_back(round_.drawn)
            self.round = None
        elif not round_.has_sent(node):
            round_.fail(why)

    def _exchange_again(self, round_: CodedRound, now: float) -> list[e.Action]:
        """Replace the broken exchange by one of whole blocks, from members that have them."""
        self._count += 1
        broken = round_.broken
        listening = [node for node in round_.present if self._member(round_, node).listening]
        round_.begin_again(self._count, listening)
        text = f"version {round_.version + 1}: {broken}; gradients are sent again, uncoded"
        self._uncoded += 1
        often = self._disagreements if round_.disagreed else 0
        if often >= SAID_DISAGREEMENTS:
            text += (
                f"; this is step {often} in a row, and sends all gradients twice: seed the augmentation, or "
                "use --mode coded:redundancy=1"
            )
        notes: list[e.Action] = []
        if not often & (often - 1):  # the 1st, 2nd, 4th, 8th, …
            notes.append(e.Note(text=text, warning=True))
        return [*notes, *self._assign(round_, now, evaluate=False)]

    # ---- closing

    def _close(self, round_: CodedRound, now: float) -> list[e.Action]:
        state = self._state
        epochs = state.epoch
        reports = [round_.reports[node] for node in round_.present]
        for part in round_.parts:
            state.samples.settle(part)
            self._copy.since.append((state.version + 1, part))
        for part in round_.left_out:
            state.samples.give_back(part)
        if not round_.disagreed:
            self._disagreements = 0
        state.version += 1
        self._applied = round_.coding.exchange
        members = [self._member(round_, node) for node in round_.present]
        for member in members:
            member.version = state.version  # the member applies the sum with its next assignment
        self._have_sum = {member.id for member in members}
        self.round, self._copy.asked = None, None
        self._copy.due |= state.epoch > epochs
        self._blocks.measured(round_, now)
        closed = e.ExchangeCompleted(
            samples=sum(part.count for part in round_.parts),
            loss=round_.loss,
            opened_at=round_.opened_at,
            redundancy=round_.coding.redundancy,
        )
        checksums = [report.exchanged.crc32c for report in reports]
        clipped = sum(report.exchanged.clipped for report in reports)
        actions = [
            closed,
            *self._drift.compare(state.version, members, checksums),
            *self._clipping.add(state.version, clipped),
        ]
        if self._copy.due or self._drift.is_due(state.version):
            for member in members:  # a drifted member gets the server's copy before the next round
                if member.id in self._drift.names:
                    self._have_sum.discard(member.id)
                    member.version = None
            self._drift.names = set()
        return actions

    def wants_copy(self, worker: str, version: int, *, leaving: bool = False) -> bool:
        return self._copy.wants(worker, version, self._state.version, leaving=leaving)

    def _restart_from_copy(self) -> list[e.Action]:
        """Make the server's copy the next version, because no member has the current version any more."""
        state = self._state
        lost = state.version - self._copy.version
        state.version += 1
        self._applied, self._have_sum = 0, set()
        self._copy.relabel(state.version, state.samples)
        text = (
            f"all members with version {state.version - 1} are lost: the server's copy, {lost} "
            f"version{'' if lost == 1 else 's'} older, becomes version {state.version}, and the samples "
            "trained on since are assigned again"
        )
        return [e.Note(text=text, warning=True), e.Relabel(version=state.version)]

    # ---- waiting

    def waiting(self, now: float) -> Awaited:
        state, round_ = self._state, self.round
        waited = state.waited(now)
        if round_ is not None:
            awaited = [self._member(round_, node) for node in round_.awaited]
            return waiting_for(state, sorted((each.rank, each.id) for each in awaited), now)
        asked = state.roster.present(self._copy.asked) if self._copy.asked is not None else None
        if asked is not None:
            name = describe(state, asked.id, asked.rank, now)
            text = f"the job has waited {waited} for a copy of version {state.version} from {name}"
            return Awaited(ranks=(asked.rank,), subject="copy", text=text)
        here = [each for each in state.roster.by_rank() if self._is_current(each)]
        names = ", ".join(describe(state, each.id, each.rank, now) for each in here or self._away())
        text = f"the job has waited {waited} for members that have version {state.version}: {names}"
        if not here:
            wait_s = HOPE_LEASES * state.rules.lease_seconds
            text += (
                f"; once other members have waited {wait_s:g} s, training continues from the server's "
                f"copy, version {self._copy.version}"
            )
        return Awaited(subject="copy", text=text)
