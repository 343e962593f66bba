"""Members: ranks, leases, incarnations, work, and the outcomes of their pushes.

Each worker id has one live member. A new incarnation fences one that is disconnected or silent, and is
refused while that one is alive. A member that reconnects within its lease keeps its slot in the round, which
waits for it. A member whose lease has expired moves to the departed members with its outcomes. So the same
incarnation may return and learn the outcome of its last push. Outcomes and departed members are bounded.

On a new stream a worker names the last assignment that it received. A later assignment is sent again, or its
samples go to another member. If all members are lost before any has pushed, the samples are assigned again
under new assignment ids, so that the server recognises a late push. The last push of a worker that leaves is
dense and empties its residual.

A member (`Life`; only `Roster.become` changes it):

    JOINED    | admitted, no stream open   | -> LOADING (stream opens), GONE
    LOADING   | stream open, loads its     | -> LISTENING (ready), JOINED (stream breaks), GONE
              | model and data             |
    LISTENING | ready, stream open: can be | -> AWAY (stream breaks), RETURNING (a new stream replaces the old
              | assigned work              |    one), GONE
    AWAY      | ready, stream broken; its  | -> RETURNING (stream opens), GONE
              | lease still runs           |
    RETURNING | stream open again, has not | -> LISTENING (reports its state), AWAY (stream breaks), GONE
              | reported its state yet     |
    GONE      | left, lease over, fenced   | -> JOINED (the same incarnation returns)
              | or suspended               |

Invariants:

- No round counts on a member that is JOINED, LOADING or GONE.
- A worker has at most one live member, and a push at most one outcome.
- Only `assign` and `relieve` change a member's work (`work`), so `Roster.computing` counts all of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ...common.stored import DERIVED, stored
from ...proto.messages import Outcome
from ...proto.refusal import Refused
from . import refusals
from .modes.share_fit import ShareFit
from .transitions import move
from .work import AssignedWork

OUTCOMES_PER_MEMBER = 16  # also the number of assignments remembered that substitutes took over
DEPARTED_MEMBERS = 1024
MAX_MEMBERS = 4096

Name = tuple[str, int]  # identity of a member: worker and incarnation


@stored("member-life")
class Life(Enum):
    """State of a member's connection, from joining to leaving.

    JOINED has no stream, LOADING loads its model, LISTENING can be sent work, AWAY has lost its stream,
    RETURNING has a new stream, GONE is no longer a member. The table at the head of this file has the
    transitions.
    """

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
# Groups of states, and the state that follows when a stream opens or breaks.
_ATTACHED = {Life.LOADING, Life.LISTENING, Life.RETURNING}
_READY = {Life.LISTENING, Life.AWAY, Life.RETURNING}
OPENED = {**dict.fromkeys(Life, Life.LOADING), **dict.fromkeys(_READY, Life.RETURNING)}
BROKEN = {**dict.fromkeys(Life, Life.JOINED), **dict.fromkeys(_READY, Life.AWAY)}


@stored("member")
@dataclass(kw_only=True, slots=True)
class Member:
    """One incarnation of a worker that has joined the job, present or departed."""

    worker: str
    incarnation: int  # a later process with the same worker id has a larger one
    rank: int
    heard_at: float  # last message, in seconds of the job's clock; the lease runs from here
    compressor: str = ""  # spec of its compressor, for the log
    activity: str = ""  # activity of its training thread, by its last heartbeat; empty if unknown
    stalled_s: float = 0.0  # seconds without progress of its training thread, by its last heartbeat
    first: bool = True  # it had not finished its first step, which takes longer, at its last heartbeat
    named_s: float = 0.0  # `stalled_s` when the log last named it; 0 if it has made progress since
    suspended: bool = False  # True from a hang of its training thread until it is ready again
    life: Life = Life.JOINED
    fingerprint: bytes = b""
    data: int = 0  # checksum of some of its training samples; 0 if unknown
    train_samples: int = 0  # number of samples in its epoch; 0 if unknown
    version: int | None = None  # of its replica, once it has all that was sent to it; None without one
    pushes: int = 0  # number of its accepted pushes
    empty: int = 0  # number of its last accepted pushes, in a row, that contribute nothing
    work: AssignedWork | None = None  # only `Roster.assign` and `Roster.relieve` change it
    revoked: AssignedWork | None = None  # the last work that was revoked, until it is resolved
    succeeded: list[int] = field(default_factory=list[int])  # assignments that substitutes took over
    collection: int = 0  # number of the last collection of buffers that it was asked to contribute to
    newcomer: int = 0  # number of assignments until it takes over the job's buffers; 0 if it has
    after: int = 0  # version that its last push became part of; it gets work once that is published
    clock: int | None = None  # accepted pushes, counted from the slowest member's clock when it joined
    pace: ShareFit | None = None  # share of samples that fits its speed; None in rounds
    last_seq: int = 0  # seq of its last decided push; 0 before the first
    outcomes: OrderedDict[int, Outcome] = field(default_factory=OrderedDict[int, Outcome])

    @property
    def id(self) -> Name:
        """Identity of the member: worker and incarnation."""
        return self.worker, self.incarnation

    @property
    def name(self) -> str:
        """Rank and worker of the member, for messages."""
        return f"rank {self.rank} ({self.worker})"

    @property
    def attached(self) -> bool:
        """True while the member's stream is open."""
        return self.life in _ATTACHED

    def still_computes(self, work: AssignedWork, assigned: int) -> bool:
        """Return True if the member, on a new stream, still computes `work`: it has the assignment and its
        version.

        Args:
            assigned: id of the last assignment that the member received.
        """
        return work.id == assigned and self.version is not None and self.version >= work.assignment.version

    @property
    def listening(self) -> bool:
        """True while an assignment can be sent to the member."""
        return self.life is Life.LISTENING

    @property
    def ready(self) -> bool:
        """True while rounds count on the member: it has its model, and its lease runs."""
        return self.life in _READY

    def succeed(self, assignment: int) -> None:
        """Record that another member has taken over this assignment."""
        self.succeeded = [*self.succeeded, assignment][-OUTCOMES_PER_MEMBER:]

    def remember(self, outcome: Outcome) -> None:
        """Record the outcome of a push, with which duplicates of the push are answered."""
        self.last_seq = outcome.seq
        self.outcomes[outcome.seq] = outcome
        while len(self.outcomes) > OUTCOMES_PER_MEMBER:
            self.outcomes.popitem(last=False)


@stored("roster")
@dataclass(kw_only=True, slots=True)
class Roster:
    """The members of a job, present and departed."""

    lease_s: float
    members: dict[str, Member] = field(default_factory=dict[str, Member])  # present members, by worker id
    departed: OrderedDict[str, Member] = field(default_factory=OrderedDict[str, Member])  # may return
    ready_members: int = 0  # number of present members that are ready
    computing: Counter[int] = field(default_factory=Counter[int])  # members at each version
    _in_order: list[Member] = field(default_factory=list[Member], metadata=DERIVED)  # empty: to be sorted

    def join(
        self, worker: str, incarnation: int, compressor: str, now: float
    ) -> tuple[Member, Member | None]:
        """Admit a worker to the job, and assign its rank.

        Returns:
            The member, and the earlier incarnation of the same worker that it replaces; None if it replaces
                none.

        Raises:
            Refused: FENCED for an older incarnation; DUPLICATE_WORKER while another incarnation is alive;
                SIZE if the job has `MAX_MEMBERS` members.
        """
        known = self.members.get(worker) or self.departed.get(worker)
        # 1. An older incarnation than the newest that is known: refuse it.
        if known is not None and incarnation < known.incarnation:
            raise Refused(refusals.fenced(worker, incarnation, known.incarnation))
        current = self.members.get(worker)
        # 2. The present incarnation repeats its request, because the reply was lost.
        if current is not None and incarnation == current.incarnation:
            current.heard_at = now
            return current, None
        # 3. A newer incarnation while the present one is alive: two processes use one worker id.
        if current is not None and current.attached and now - current.heard_at < self.lease_s / 2:
            raise Refused(refusals.duplicate_worker(worker, now - current.heard_at))
        # 4. A departed incarnation returns.
        if current is None and known is not None and incarnation == known.incarnation:
            return self._revive(known, now), None
        # 5. A new incarnation, of a new worker or in place of one that is disconnected or silent.
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
        """Return the present or departed member `name` (worker and incarnation); None if there is none."""
        worker, incarnation = name
        for member in (self.members.get(worker), self.departed.get(worker)):
            if member is not None and member.incarnation == incarnation:
                return member
        return None

    def present(self, name: Name) -> Member | None:
        """Return the present member `name` (worker and incarnation); None if there is none."""
        member = self.members.get(name[0])
        return member if member is not None and member.incarnation == name[1] else None

    def become(self, member: Member, life: Life) -> None:
        """Change the state of a member to `life`, as `_TRANSITIONS` allows."""
        self.ready_members -= member.ready
        member.life = move(member.life, life, _TRANSITIONS)
        self.ready_members += member.ready

    def assign(self, member: Member, work: AssignedWork) -> None:
        """Assign this work to a member, and relieve the member of its previous work."""
        self.relieve(member)
        member.work = work
        self.computing[work.assignment.version] += 1

    def relieve(self, member: Member) -> AssignedWork | None:
        """Remove a member's work and return it; None if the member has none."""
        work, member.work = member.work, None
        if work is not None:
            self.computing[work.assignment.version] -= 1
            if not self.computing[work.assignment.version]:
                del self.computing[work.assignment.version]
        return work

    def knows(self, worker: str) -> bool:
        """Return True if the worker is a member, or is remembered as a departed one."""
        return worker in self.members or worker in self.departed

    def find(self, worker: str, incarnation: int, now: float, *, revive: bool = False) -> Member:
        """Return the present member with this identity, and renew its lease.

        Args:
            revive: True to readmit a member whose lease has expired.

        Raises:
            Refused: FENCED if another incarnation of the worker is a member; NOT_A_MEMBER if the worker has
                not joined, or its lease has expired.
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
        """Return the members whose lease has expired, in rank order."""
        return [member for member in self.by_rank() if now - member.heard_at > self.lease_s]

    def remove(self, member: Member) -> None:
        """Move a member to the departed members, and forget the oldest of these if there are too many."""
        del self.members[member.worker]
        self._in_order = []
        self.become(member, Life.GONE)
        self.departed[member.worker] = member
        self.departed.move_to_end(member.worker)
        while len(self.departed) > DEPARTED_MEMBERS:
            self.relieve(self.departed.popitem(last=False)[1])

    def by_rank(self) -> list[Member]:
        """Return the present members in rank order."""
        if len(self._in_order) != len(self.members):
            self._in_order = sorted(self.members.values(), key=lambda member: member.rank)
        return self._in_order

    def attached(self) -> list[Member]:
        """Return the members with an open stream, in rank order."""
        return [member for member in self.by_rank() if member.attached]

    def ready(self) -> list[Member]:
        """Return the members that rounds count on, in rank order. Some may be reconnecting."""
        return [member for member in self.by_rank() if member.ready]

    def listening(self) -> list[Member]:
        """Return the members that an assignment can be sent to, in rank order."""
        return [member for member in self.by_rank() if member.listening]

    @property
    def versions(self) -> list[int | None]:
        """Versions of the members' replicas; None without one, 0 for a member that is away."""
        return [member.version if member.listening else 0 for member in self.members.values()]

    def _revive(self, member: Member, now: float) -> Member:
        """Readmit a departed member of the same incarnation."""
        del self.departed[member.worker]
        member.rank = self._rank_of(member)
        member.heard_at = now
        self.members[member.worker] = member
        self._in_order = []
        self.become(member, Life.JOINED)
        return member

    def _rank_of(self, known: Member | None) -> int:
        """Return the worker's former rank, unless another worker has it; otherwise the lowest free rank."""
        others = [each for each in self.members.values() if known is None or each.worker != known.worker]
        taken = {each.rank for each in others}
        if known is not None and known.rank not in taken:
            return known.rank
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)
