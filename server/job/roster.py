"""Members: ranks, leases, incarnations, work, and the outcomes of their pushes.

Each worker id has one live member. A new incarnation fences one that is disconnected or silent, and is
refused while that one is alive. A member that reconnects within its lease keeps its place in the round, which
waits for it. A member whose lease has expired is kept among the departed with its outcomes, so that the same
incarnation may return and learn the outcome of its last push. Outcomes and departed members are bounded.

On a new stream a worker names the last assignment that it received: a later one is sent again, or its samples
go to another member. If all members are lost before any has pushed, the samples go out under new assignment
ids, so that a late push is recognised. The last push of a worker that leaves is dense and empties its
residual.

A member (`Life`; `Roster.become` is the only way from one state to another):

    JOINED      admitted, no stream open    -> LOADING (stream opens), GONE
    LOADING     stream open, loads its      -> LISTENING (ready), JOINED (stream breaks), GONE
                model and data
    LISTENING   ready, stream open: can be  -> AWAY (stream breaks), RETURNING (a new stream replaces the old
                given work                     one), GONE
    AWAY        ready, stream broken; its   -> RETURNING (stream opens), GONE
                lease still runs
    RETURNING   stream open again, has not  -> LISTENING (says what it has), AWAY (stream breaks), GONE
                said yet what it has
    GONE        left, lease over, fenced    -> JOINED (the same incarnation returns)
                or suspended

Its work (`WorkLife`):

    ASSIGNED    its push becomes part of a version     -> LATE, REVOKED
    LATE        its round or plan is over: the push    -> REVOKED
                is refused, and the worker keeps the
                gradient in its residual
    REVOKED     taken from a member that was lost; its -> ASSIGNED or LATE, if the member returns before
                samples are given out again               anybody has drawn the samples

What may not happen: rounds counting on a member that is JOINED, LOADING or GONE; two live members of one
worker; two outcomes of one push; work of a member in two places (`give` and `relieve` alone change it).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ...common.stored import DERIVED, stored
from ...proto.messages import Assignment, Outcome
from ...proto.refusal import Refused
from . import refusals
from .modes.share_fit import ShareFit
from .samples import Drawn
from .transitions import move

OUTCOMES_PER_MEMBER = 16
DEPARTED_MEMBERS = 1024
MAX_MEMBERS = 4096

Name = tuple[str, int]  # worker and incarnation: names a member


@stored("member-life")
class Life(Enum):
    JOINED = "joined"
    LOADING = "loading"
    LISTENING = "listening"
    AWAY = "away"
    RETURNING = "returning"
    GONE = "gone"


_TRANSITIONS = {
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


@stored("work-life")
class WorkLife(Enum):
    ASSIGNED = "assigned"
    LATE = "late"
    REVOKED = "revoked"


_WORK_TRANSITIONS = {
    WorkLife.ASSIGNED: frozenset({WorkLife.LATE, WorkLife.REVOKED}),
    WorkLife.LATE: frozenset({WorkLife.REVOKED}),
    WorkLife.REVOKED: frozenset({WorkLife.ASSIGNED, WorkLife.LATE}),
}


@stored("work")
@dataclass(kw_only=True, slots=True)
class AssignedWork:
    """An assignment that a member has not answered yet.

    Attributes:
        share: samples that the member was due; at the end of an epoch it may have got fewer.
        counted: samples that its push stands for; None for all that were drawn.
        interrupted: the member's stream broke meanwhile.
    """

    assignment: Assignment
    drawn: Drawn
    given_at: float
    share: int = 0
    counted: int | None = None
    life: WorkLife = WorkLife.ASSIGNED
    interrupted: bool = False

    @property
    def id(self) -> int:
        return self.assignment.id

    @property
    def late(self) -> bool:
        return self.life is WorkLife.LATE

    @property
    def samples(self) -> int:
        """Number of samples that its push stands for."""
        return self.drawn.count if self.counted is None else self.counted

    @property
    def shared(self) -> bool:
        """Whether others are given the same samples."""
        return self.assignment.slices > 1 or self.assignment.stragglers > 0

    def become(self, life: WorkLife) -> None:
        self.life = move(self.life, life, _WORK_TRANSITIONS)


@stored("member")
@dataclass(kw_only=True, slots=True)
class Member:
    worker: str
    incarnation: int
    rank: int
    heard_at: float
    compressor: str = ""
    activity: str = ""
    stalled_s: float = 0.0  # time without progress of its training thread, by its last heartbeat
    first: bool = True  # had yet to finish its first step then, which takes longer
    named_s: float = 0.0  # `stalled_s` when the log last named it; 0 if not, or it has made progress since
    suspended: bool = False  # because of that; until it is ready again
    life: Life = Life.JOINED
    fingerprint: bytes = b""
    data: int = 0  # checksum of some training samples
    train_samples: int = 0  # in its epoch; 0: not known
    version: int | None = None  # of its replica, once all that was sent so far has arrived
    pushes: int = 0
    work: AssignedWork | None = None  # changed by `Roster.give` and `Roster.relieve` alone
    revoked: AssignedWork | None = None  # the last work taken from it, because it was lost
    succeeded: list[int] = field(default_factory=list[int])  # its last assignments that others took over
    collection: int = 0  # of buffers: the last that it was asked to contribute to
    newcomer: int = 0  # assignments until it takes over the job's buffers; 0: it has
    after: int = 0  # the version that its last push became: it gets work once that is published
    clock: int | None = None  # pushes completed, counted from the others' clock when it joined
    pace: ShareFit | None = None
    last_seq: int = 0  # of the pushes that were decided
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

    def still_computes(self, work: AssignedWork, assigned: int) -> bool:
        """Return whether a member on a new stream still computes this work: it has it and its version.

        Args:
            assigned: id of the last assignment that it received.
        """
        return work.id == assigned and self.version is not None and self.version >= work.assignment.version

    @property
    def listening(self) -> bool:
        """Whether it can be sent an assignment now."""
        return self.life is Life.LISTENING

    @property
    def ready(self) -> bool:
        """Whether rounds count on it: it has its model and a lease."""
        return self.life in _READY

    def succeed(self, assignment: int) -> None:
        """Remember that another member has taken over this assignment."""
        self.succeeded = [*self.succeeded, assignment][-OUTCOMES_PER_MEMBER:]

    def remember(self, outcome: Outcome) -> None:
        """Keep the outcome of a push, to answer duplicates with."""
        self.last_seq = outcome.seq
        self.outcomes[outcome.seq] = outcome
        while len(self.outcomes) > OUTCOMES_PER_MEMBER:
            self.outcomes.popitem(last=False)


@stored("roster")
@dataclass(kw_only=True, slots=True)
class Roster:
    lease_s: float
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    departed: OrderedDict[str, Member] = field(default_factory=OrderedDict[str, Member])
    ready_members: int = 0
    computing: Counter[int] = field(default_factory=Counter[int])  # members at work, by version
    _in_order: list[Member] = field(default_factory=list[Member], metadata=DERIVED)  # empty: to be sorted

    def join(
        self, worker: str, incarnation: int, compressor: str, now: float
    ) -> tuple[Member, Member | None]:
        """Admit a worker; the second member is the incarnation that it replaces, if any.

        Raises:
            Refused: FENCED for an older incarnation, DUPLICATE_WORKER while another one is alive, SIZE for a
                member too many.
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
        """Return the member of that incarnation, also a departed one."""
        worker, incarnation = name
        for member in (self.members.get(worker), self.departed.get(worker)):
            if member is not None and member.incarnation == incarnation:
                return member
        return None

    def present(self, name: Name) -> Member | None:
        """Return the member of that incarnation while it has a lease."""
        member = self.members.get(name[0])
        return member if member is not None and member.incarnation == name[1] else None

    def become(self, member: Member, life: Life) -> None:
        """Change the state of a member, as `_TRANSITIONS` allows."""
        self.ready_members -= member.ready
        member.life = move(member.life, life, _TRANSITIONS)
        self.ready_members += member.ready

    def give(self, member: Member, work: AssignedWork) -> None:
        """Assign this work to a member, in place of any that it had."""
        self.relieve(member)
        member.work = work
        self.computing[work.assignment.version] += 1

    def relieve(self, member: Member) -> AssignedWork | None:
        """Take a member's work from it and return the work; None if it has none."""
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
        """Return the live member and renew its lease.

        Args:
            revive: also readmit the same incarnation after its lease has expired.

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
        """Update the last-heard time of members. Unknown workers are ignored."""
        for worker, at in heard.items():
            if worker in self.members:
                self.members[worker].heard_at = at

    def expired(self, now: float) -> list[Member]:
        """Members whose lease is over, in rank order."""
        return [member for member in self.by_rank() if now - member.heard_at > self.lease_s]

    def remove(self, member: Member) -> None:
        """Move a member to the departed."""
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
        """Members that rounds count on, in rank order; some may be reconnecting."""
        return [member for member in self.by_rank() if member.ready]

    def listening(self) -> list[Member]:
        """Members that can be sent an assignment now, in rank order."""
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
        """Return the rank that a worker had, unless another has it now; otherwise the lowest free rank."""
        others = [each for each in self.members.values() if known is None or each.worker != known.worker]
        taken = {each.rank for each in others}
        if known is not None and known.rank not in taken:
            return known.rank
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)
