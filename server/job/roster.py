"""Who takes part: members with ranks, leases, incarnations and the outcomes of their pushes.

One live member per worker id. A new incarnation fences the old one. A member whose lease has expired is
set aside with its outcomes, so that the same incarnation may come back and hear what became of its last
push. Outcomes and set-aside members are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ...proto.messages import Assignment, Outcome
from ...proto.refusal import Refused
from . import refusals
from .modes.pace import Pace
from .samples import Drawn

OUTCOMES_PER_MEMBER = 16
DEPARTED_MEMBERS = 1024


@dataclass(kw_only=True, slots=True)
class Work:
    """What a member was given to compute, until it has answered.

    settled: its round closed without it, so that its push
    will be refused. interrupted: its stream broke meanwhile. share: samples that it was meant to get, though
    an epoch that ends may have had fewer. counted: those that its push speaks for, where these are not all.
    """

    assignment: Assignment
    drawn: Drawn
    given_at: float
    share: int = 0
    counted: int | None = None
    settled: bool = False
    interrupted: bool = False

    @property
    def samples(self) -> int:
        """That its push speaks for."""
        return self.drawn.count if self.counted is None else self.counted

    @property
    def shared(self) -> bool:
        """Whether others are given the same samples."""
        return self.assignment.slices > 1 or self.assignment.stragglers > 0


@dataclass(kw_only=True, slots=True)
class Member:
    worker: str
    incarnation: int
    rank: int
    heard_at: float
    compressor: str = ""
    activity: str = ""
    attached: bool = False  # its stream is open
    listening: bool = False  # and on it the worker has said which version it has: it can be given work
    ready: bool = False  # it has its model; rounds count on it for as long as it keeps its lease
    fingerprint: bytes = b""
    version: int | None = None  # of its replica, once everything sent so far has arrived
    pushes: int = 0
    work: Work | None = None
    void: Work | None = None  # the last that was taken from it, because it was lost
    after: int = 0  # the version that its last push became: it gets work once that is published
    clock: int | None = None  # pushes completed, counted from where the others stood when it came
    pace: Pace | None = None
    last_seq: int = 0  # of the pushes that were decided on
    outcomes: OrderedDict[int, Outcome] = field(default_factory=OrderedDict[int, Outcome])  # by seq

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.worker})"

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

    def join(
        self, worker: str, incarnation: int, compressor: str, now: float
    ) -> tuple[Member, Member | None]:
        """Admit a worker; the second member is the incarnation that it replaces, if any.

        Raises:
            Refused: FENCED for an older incarnation, DUPLICATE_WORKER while another one is alive.
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
        self.departed.pop(worker, None)
        rank = current.rank if current is not None else self._free_rank()
        member = Member(
            worker=worker, incarnation=incarnation, rank=rank, heard_at=now, compressor=compressor
        )
        self.members[worker] = member
        return member, current

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
        if member is None and revive:
            departed = self.departed.get(worker)
            if departed is not None and departed.incarnation == incarnation:
                member = self._revive(departed, now)
        if member is None:
            departed = self.departed.get(worker)
            if departed is not None and departed.incarnation == incarnation:
                raise Refused(refusals.lease_over(worker, now - departed.heard_at, self.lease_s))
            raise Refused(refusals.not_a_member(worker))
        if member.incarnation != incarnation:
            raise Refused(refusals.fenced(worker, incarnation, member.incarnation))
        member.heard_at = now
        return member

    def expired(self, now: float) -> list[Member]:
        """Members whose lease is over, in rank order."""
        return [member for member in self.by_rank() if now - member.heard_at > self.lease_s]

    def remove(self, member: Member) -> None:
        """Set a member aside."""
        del self.members[member.worker]
        member.attached = member.listening = member.ready = False
        self.departed[member.worker] = member
        self.departed.move_to_end(member.worker)
        while len(self.departed) > DEPARTED_MEMBERS:
            self.departed.popitem(last=False)

    def by_rank(self) -> list[Member]:
        return sorted(self.members.values(), key=lambda member: member.rank)

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
        if any(other.rank == member.rank for other in self.members.values()):
            member.rank = self._free_rank()
        member.heard_at = now
        self.members[member.worker] = member
        return member

    def _free_rank(self) -> int:
        taken = {member.rank for member in self.members.values()}
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)
