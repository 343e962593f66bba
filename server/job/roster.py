"""Who takes part: members with ranks, leases, incarnations, work, and the outcomes of their pushes.

One live member per worker id. A new incarnation fences the old one. A member whose lease has expired is
set aside with its outcomes, so that the same incarnation may come back and hear what became of its last
push. Outcomes and set-aside members are bounded.

ARCHITECTURE.md says what the states of a member and of its work mean.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ...proto.messages import Assignment, Outcome
from ...proto.refusal import Refused
from . import refusals
from .lives import move
from .modes.pace import Pace
from .samples import Drawn
from .saving import DERIVED

OUTCOMES_PER_MEMBER = 16
DEPARTED_MEMBERS = 1024
MAX_MEMBERS = 4096

Name = tuple[str, int]  # worker and incarnation: names a member


class Life(Enum):
    JOINED = "joined"
    LOADING = "loading"
    LISTENING = "listening"
    AWAY = "away"
    RETURNING = "returning"
    GONE = "gone"


_LIVES = {
    Life.JOINED: frozenset({Life.JOINED, Life.LOADING, Life.LISTENING, Life.GONE}),
    Life.LOADING: frozenset({Life.LOADING, Life.LISTENING, Life.JOINED, Life.GONE}),
    Life.LISTENING: frozenset({Life.LISTENING, Life.RETURNING, Life.AWAY, Life.GONE}),
    Life.AWAY: frozenset({Life.AWAY, Life.RETURNING, Life.LISTENING, Life.GONE}),
    Life.RETURNING: frozenset({Life.RETURNING, Life.LISTENING, Life.AWAY, Life.GONE}),
    Life.GONE: frozenset({Life.JOINED}),
}
_ATTACHED = {Life.LOADING, Life.LISTENING, Life.RETURNING}
_READY = {Life.LISTENING, Life.AWAY, Life.RETURNING}
OPENED = {**dict.fromkeys(Life, Life.LOADING), **dict.fromkeys(_READY, Life.RETURNING)}
BROKEN = {**dict.fromkeys(Life, Life.JOINED), **dict.fromkeys(_READY, Life.AWAY)}


class WorkLife(Enum):
    GIVEN = "given"
    LATE = "late"
    VOID = "void"


_WORK_LIVES = {
    WorkLife.GIVEN: frozenset({WorkLife.LATE, WorkLife.VOID}),
    WorkLife.LATE: frozenset({WorkLife.VOID}),
    WorkLife.VOID: frozenset({WorkLife.GIVEN, WorkLife.LATE}),
}


@dataclass(kw_only=True, slots=True)
class Work:
    """What a member was given to compute, until it has answered.

    interrupted: its stream broke meanwhile. share: samples that it was meant to get, though an epoch that
    ends may have had fewer. counted: those that its push speaks for, where these are not all.
    """

    assignment: Assignment
    drawn: Drawn
    given_at: float
    share: int = 0
    counted: int | None = None
    life: WorkLife = WorkLife.GIVEN
    interrupted: bool = False

    @property
    def id(self) -> int:
        return self.assignment.id

    @property
    def late(self) -> bool:
        return self.life is WorkLife.LATE

    @property
    def samples(self) -> int:
        """That its push speaks for."""
        return self.drawn.count if self.counted is None else self.counted

    @property
    def shared(self) -> bool:
        """Whether others are given the same samples."""
        return self.assignment.slices > 1 or self.assignment.stragglers > 0

    def become(self, life: WorkLife) -> None:
        self.life = move(self.life, life, _WORK_LIVES)


@dataclass(kw_only=True, slots=True)
class Member:
    worker: str
    incarnation: int
    rank: int
    heard_at: float
    compressor: str = ""
    activity: str = ""
    still_s: float = 0.0  # for which its training thread had made no progress, as it last said
    first: bool = True  # it had yet to finish a step then, which takes longer
    named_s: float = 0.0  # when the log last said so; 0 if it has not, or the thread has got on
    aside: bool = False  # because of that; until it says that it is ready
    life: Life = Life.JOINED
    fingerprint: bytes = b""
    data: int = 0  # checksum of some training samples
    version: int | None = None  # of its replica, once everything sent so far has arrived
    pushes: int = 0
    work: Work | None = None  # changed by `Roster.give` and `Roster.relieve` alone
    void: Work | None = None  # the last that was taken from it, because it was lost
    succeeded: list[int] = field(default_factory=list[int])  # the last assignments that others took over
    collection: int = 0  # of buffers: the last that it was asked to be a part of
    newcomer: int = 0  # assignments until it takes over the job's buffers; 0: it has
    after: int = 0  # the version that its last push became: it gets work once that is published
    clock: int | None = None  # pushes completed, counted from where the others stood when it came
    pace: Pace | None = None
    last_seq: int = 0  # of the pushes that were decided on
    outcomes: OrderedDict[int, Outcome] = field(default_factory=OrderedDict[int, Outcome])  # by seq

    @property
    def id(self) -> Name:
        return self.worker, self.incarnation

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank} ({self.worker})"

    @property
    def attached(self) -> bool:
        """Whether its stream is open."""
        return self.life in _ATTACHED

    def goes_on(self, work: Work, assigned: int) -> bool:
        """Whether it computes what it was given, back on a new stream. assigned: id of the last assignment
        that it got, which may have come before its version, and that was lost then."""
        return work.id == assigned and self.version is not None and self.version >= work.assignment.version

    @property
    def listening(self) -> bool:
        """Whether it can be told what to do now."""
        return self.life is Life.LISTENING

    @property
    def ready(self) -> bool:
        """Whether rounds count on it: it has its model, and keeps its lease."""
        return self.life in _READY

    def succeed(self, assignment: int) -> None:
        """Somebody else is given its place in a round."""
        self.succeeded = [*self.succeeded, assignment][-OUTCOMES_PER_MEMBER:]

    def remember(self, outcome: Outcome) -> None:
        """Keep what was decided on a push, for its duplicates."""
        self.last_seq = outcome.seq
        self.outcomes[outcome.seq] = outcome
        while len(self.outcomes) > OUTCOMES_PER_MEMBER:
            self.outcomes.popitem(last=False)


@dataclass(kw_only=True, slots=True)
class Roster:
    lease_s: float
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    departed: OrderedDict[str, Member] = field(default_factory=OrderedDict[str, Member])
    ready_members: int = 0
    computing: Counter[int] = field(default_factory=Counter[int])  # members at work, by version
    _in_order: list[Member] = field(
        default_factory=list[Member], metadata=DERIVED
    )  # by rank; empty when it has to be sorted anew

    def join(
        self, worker: str, incarnation: int, compressor: str, now: float
    ) -> tuple[Member, Member | None]:
        """Admit a worker; the second member is the incarnation that it replaces, if any.

        Raises:
            Refused: FENCED for an older incarnation, DUPLICATE_WORKER while another one is alive, SIZE where
                there are too many.
        """
        known = self.members.get(worker) or self.departed.get(worker)
        if known is not None and incarnation < known.incarnation:
            raise Refused(refusals.fenced(worker, incarnation, known.incarnation))
        current = self.members.get(worker)
        if current is not None and incarnation == current.incarnation:
            current.heard_at = now
            return current, None
        if current is not None and current.attached and now - current.heard_at < self.lease_s / 2:
            raise Refused(refusals.duplicate_worker(worker, now - current.heard_at))
        if current is None and known is not None and incarnation == known.incarnation:
            return self._revive(known, now), None
        if current is None and len(self.members) >= MAX_MEMBERS:
            raise Refused(refusals.too_many(worker, MAX_MEMBERS))
        self.departed.pop(worker, None)
        rank = self._rank_of(known)
        member = Member(
            worker=worker, incarnation=incarnation, rank=rank, heard_at=now, compressor=compressor
        )
        if current is not None:
            self.become(current, Life.GONE)
        self.members[worker] = member
        self._in_order = []
        return member, current

    def get(self, name: Name) -> Member | None:
        """The member of that incarnation, also one that is set aside."""
        worker, incarnation = name
        for member in (self.members.get(worker), self.departed.get(worker)):
            if member is not None and member.incarnation == incarnation:
                return member
        return None

    def present(self, name: Name) -> Member | None:
        """The member of that incarnation, if it has a lease."""
        member = self.members.get(name[0])
        return member if member is not None and member.incarnation == name[1] else None

    def become(self, member: Member, life: Life) -> None:
        """Go on to another state of its life."""
        self.ready_members -= member.ready
        member.life = move(member.life, life, _LIVES)
        self.ready_members += member.ready

    def give(self, member: Member, work: Work) -> None:
        """Let a member that has nothing to do have this."""
        self.relieve(member)
        member.work = work
        self.computing[work.assignment.version] += 1

    def relieve(self, member: Member) -> Work | None:
        """Take its work from a member, if it has any."""
        work, member.work = member.work, None
        if work is not None:
            self.computing[work.assignment.version] -= 1
            if not self.computing[work.assignment.version]:
                del self.computing[work.assignment.version]
        return work

    def knows(self, worker: str) -> bool:
        """Whether the worker is a member, or was one."""
        return worker in self.members or worker in self.departed

    def find(self, worker: str, incarnation: int, now: float, *, revive: bool = False) -> Member:
        """The live member, its lease renewed.

        Args:
            revive: also bring back the same incarnation after its lease has expired.

        Raises:
            Refused: FENCED or NOT_A_MEMBER.
        """
        member = self.members.get(worker)
        if member is None:
            departed = self.get((worker, incarnation))
            if departed is None:
                raise Refused(refusals.not_a_member(worker))
            if not revive:
                raise Refused(refusals.lease_over(worker, now - departed.heard_at, self.lease_s))
            member = self._revive(departed, now)
        if member.incarnation != incarnation:
            raise Refused(refusals.fenced(worker, incarnation, member.incarnation))
        member.heard_at = now
        return member

    def hear(self, heard: Mapping[str, float]) -> None:
        """When workers were heard of; of those that are no members nothing is said."""
        for worker, at in heard.items():
            if worker in self.members:
                self.members[worker].heard_at = at

    def expired(self, now: float) -> list[Member]:
        """Members whose lease is over, in rank order."""
        return [member for member in self.by_rank() if now - member.heard_at > self.lease_s]

    def remove(self, member: Member) -> None:
        """Set a member aside."""
        del self.members[member.worker]
        self._in_order = []
        self.become(member, Life.GONE)
        self.departed[member.worker] = member
        self.departed.move_to_end(member.worker)
        while len(self.departed) > DEPARTED_MEMBERS:
            self.relieve(self.departed.popitem(last=False)[1])

    def by_rank(self) -> list[Member]:
        if len(self._in_order) != len(self.members):
            self._in_order = sorted(self.members.values(), key=lambda member: member.rank)
        return self._in_order

    def attached(self) -> list[Member]:
        """Members with an open stream, in rank order."""
        return [member for member in self.by_rank() if member.attached]

    def ready(self) -> list[Member]:
        """Members that rounds count on, in rank order, also those that are reconnecting."""
        return [member for member in self.by_rank() if member.ready]

    def listening(self) -> list[Member]:
        """Members that can be told what to do now, in rank order."""
        return [member for member in self.by_rank() if member.listening]

    def _revive(self, member: Member, now: float) -> Member:
        del self.departed[member.worker]
        member.rank = self._rank_of(member)
        member.heard_at = now
        self.members[member.worker] = member
        self._in_order = []
        self.become(member, Life.JOINED)
        return member

    def _rank_of(self, known: Member | None) -> int:
        """That which a worker had, if nobody else has it now; otherwise the lowest that is free."""
        taken = {
            member.rank for member in self.members.values() if member.worker != getattr(known, "worker", "")
        }
        if known is not None and known.rank not in taken:
            return known.rank
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)
