"""Arrivals: the modes `stale` and `async`. Each push is applied by itself, when it comes, as a version.

A member that has pushed is given its next samples once its push is published, at whatever version that is by
then. Pushes are applied one at a time in the order in which they came.

`stale` bounds how far members may drift apart (stale synchronous parallel, Ho et al., NIPS 2013). A member's
clock is the number of its pushes that are applied. It is given work only while its clock is at most
`staleness` ahead of the slowest ready member's, so that at clock c it computes with all that anyone has
contributed up to clock c - staleness - 1; with a bound of 0 all finish a clock before anyone begins the next.
The staleness of a push is how many clocks it is behind the newest push that has been accepted, which by that
rule is never more than the bound; a push that were older would be refused. Who joins starts at the clock of
the slowest.

A member that takes more than twice as long as the others is given fewer samples at a time (`pace`), until it
answers as often as they do, and its pushes weigh less accordingly: otherwise the bound would make everybody
as slow as it is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from ....common.stored import DERIVED
from ....proto.messages import Assignment
from .. import events as e
from ..roster import AssignedWork, Member, Name, WorkLife
from ..state import JobState
from ..waiting import Awaited, describe, waiting_for
from .mode import Mode
from .share_fit import ShareFit


@dataclass
class Arrivals(Mode):
    """Nothing that happens with every push looks at all members: the fields marked DERIVED, which are by
    worker, are kept up to date instead.

    bound: in clocks, None for no bound. inverse: whether a gradient is divided by its staleness. compensated:
    whether the shard keeps the versions at which gradients are being computed. _idle: may be given work.
    _held_back: were too far ahead of the slowest when it was at the clock _held_at. _reached: the clock that
    others can see, and _clocks: how many have reached which. _timed: seconds for a whole share, and _usual:
    the same in order.
    """

    _state: JobState = field(metadata=DERIVED)
    bound: int | None = field(metadata=DERIVED)
    inverse: bool = field(metadata=DERIVED)
    compensated: bool = field(metadata=DERIVED)
    _promised: int = 0  # the last version that a push was told it will be
    _newest: int = -1  # clock of the newest push accepted
    _queue: deque[e.Apply] = field(default_factory=deque[e.Apply])
    _applying: Name | None = None  # the member whose push is being applied
    _stuck_since: float = 0.0  # when somebody began to wait for the slowest
    _epoch_version: int = 0  # the version with which the last epoch was complete
    _idle: set[str] = field(default_factory=set[str], metadata=DERIVED)
    _held_back: set[str] = field(default_factory=set[str], metadata=DERIVED)
    _held_at: int = field(default=0, metadata=DERIVED)
    _clocks: Counter[int] = field(default_factory=Counter[int], metadata=DERIVED)
    _reached: dict[str, int] = field(default_factory=dict[str, int], metadata=DERIVED)
    _usual: list[float] = field(default_factory=list[float], metadata=DERIVED)
    _timed: dict[str, float] = field(default_factory=dict[str, float], metadata=DERIVED)

    @property
    def quiet(self) -> bool:
        return self._promised == self._state.version

    def restored(self) -> None:
        self._held_back, self._clocks, self._reached = set(), Counter(), {}
        self._usual, self._timed = [], {}
        for member in self._state.roster.members.values():
            self._count(member)
            self._time(member)
        self._idle = {each.worker for each in self._state.roster.listening() if each.work is None}

    def advance(self, now: float) -> list[e.Action]:
        return [*self._offer(now), *self._apply()]

    # ---- what is kept up to date

    def _count(self, member: Member) -> None:
        """The member's clock, as others can see it, has changed perhaps."""
        before = self._reached.pop(member.worker, None)
        if before is not None:
            self._clocks[before] -= 1
            if not self._clocks[before]:
                del self._clocks[before]
        if member.clock is not None:
            unseen = member.after > self._state.version
            self._reached[member.worker] = member.clock - unseen
            self._clocks[member.clock - unseen] += 1

    def _time(self, member: Member) -> None:
        """Its pace has changed perhaps."""
        self._untime(member.worker)
        pace = member.pace
        if pace is not None and pace.tells(self._state.rules.batch_size):
            self._timed[member.worker] = pace.seconds
            insort(self._usual, pace.seconds)

    def _untime(self, worker: str) -> None:
        seconds = self._timed.pop(worker, None)
        if seconds is not None:
            del self._usual[bisect_left(self._usual, seconds)]

    def _slowest(self) -> int:
        """Clock of the member that is furthest behind. There are few different ones where it matters."""
        return min(self._clocks, default=0)

    # ---- giving out work

    def _offer(self, now: float) -> list[e.Action]:
        state = self._state
        if self._applying is not None:  # a snapshot would be of the version after this one
            return []
        if state.plan_due:  # what were pushed for it would come too late
            return []
        idle = self._idle
        if self._held_back and (self._slowest() != self._held_at or self._evaluation_due()):
            idle |= self._held_back
            self._held_back = set()
        actions: list[e.Action] = []
        members = state.roster.members
        given = sum(each.work is not None and not each.work.late for each in members.values())
        ahead = self._promised - state.version + given  # steps under way
        for member in sorted((members[each] for each in idle), key=lambda member: member.rank):
            if not member.listening or member.work is not None:
                idle.discard(member.worker)
                continue
            if member.after > state.version:
                continue
            if state.evaluations.is_by(member.id):
                continue
            due = self._evaluation_due()
            if state.ask_for_evaluation(member, due, state.assignments + 1, now):
                # It takes time, so nothing else is to be done at that version.
                assignment = Assignment(
                    id=0, version=state.version, progress=state.samples.progress, evaluate_epoch=due
                )
                actions.append(state.assign(member, assignment))
                continue
            if self._held(self._clock(member)):
                self._held_back.add(member.worker)
                self._held_at = self._slowest()
                idle.discard(member.worker)
                continue
            member.pace = member.pace or ShareFit(share=state.rules.batch_size)
            drawn = state.samples.draw(member.pace.share) if state.may_step(ahead) else None
            if drawn is None:  # so nobody waits for the slowest
                idle |= self._held_back
                self._held_back = set()
                break
            actions += state.give(
                member,
                drawn,
                now,
                share=member.pace.share,
                world=state.roster.ready_members,
                progress=state.samples.progress,
                total_steps=state.total_steps(state.version + ahead + 1, state.rules.batch_size),
            )
            ahead += 1
            idle.discard(member.worker)
        if not self._held_back:
            self._stuck_since = now
        return actions

    def _evaluation_due(self) -> int:
        """The epoch that can be evaluated at this version, 0 for none."""
        state = self._state
        due = state.evaluation_due if state.version >= self._epoch_version else 0
        return due if state.evaluations.wants(due) else 0

    def _clock(self, member: Member) -> int:
        if member.clock is None:
            clocks = [each.clock for each in self._state.roster.ready() if each.clock is not None]
            member.clock = min(clocks, default=self._newest + 1)
            self._count(member)
        return member.clock

    def _held(self, clock: int) -> bool:
        return self.bound is not None and clock - self._slowest() > self.bound

    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        work = member.work
        if work is not None and not member.goes_on(work, assigned):
            # It never heard of it, and is given work anew, at the version that there is then.
            self._state.samples.give_back(work.drawn, settled=work.late)
            self._state.roster.relieve(member)
        elif work is not None:
            work.interrupted = True
        self._idle.add(member.worker)
        return []

    # ---- taking pushes

    def take(self, member: Member, work: AssignedWork, event: e.Pushed, now: float) -> int | None:
        state = self._state
        if work.late:  # the version that it began with is kept no longer, or its plan
            self._idle.add(member.worker)
            return None
        clock = self._clock(member)
        epoch = state.epoch
        state.samples.settle(work.drawn)
        self._idle.add(member.worker)
        clocks = max(0, self._newest - clock)
        if self.bound is not None and clocks > self.bound:
            member.clock = None  # it starts again beside the slowest
            self._count(member)
            return None
        if state.plan_due:  # it comes into force when what was accepted before is applied
            return None
        base_version = work.assignment.version
        versions = self._promised - base_version
        state.largest_staleness = max(state.largest_staleness, versions if self.bound is None else clocks)
        self._newest = max(self._newest, clock)
        member.clock = clock + 1
        self._promised += 1
        member.after = self._promised
        self._count(member)
        if state.epoch > epoch:
            self._epoch_version = self._promised
        self._judge(member, work, now)
        middle = state.samples.progress - work.drawn.count / 2 / state.samples.per_epoch
        weight = work.share / state.rules.batch_size
        contribution = e.Contribution(key=event.key, rank=member.rank, samples=event.samples, loss=event.loss)
        self._queue.append(
            e.Apply(
                version=self._promised,
                contributions=(contribution,),
                rate_factor=state.rate_factor(middle),
                weight=weight / (max(1, versions) if self.inverse else 1),
                opened_at=work.given_at,
                base_version=base_version,
                clocks_stale=None if self.bound is None else clocks,
            )
        )
        state.wait_from(now)
        return self._promised

    def _judge(self, member: Member, work: AssignedWork, now: float) -> None:
        """Fit the member's share to how long it took, if the others depend on that."""
        pace = member.pace
        if self.bound is None or pace is None or work.interrupted or work.drawn.count < pace.share:
            return  # its time says nothing: it was away, or an epoch that ended left it less than its share
        pace.note(now - work.given_at)
        self._untime(member.worker)
        pace.adapt(self._usual, self._state.rules.batch_size)
        self._time(member)

    def holds(self, key: e.PushKey) -> bool:
        return any(each.contributions[0].key == key for each in self._queue)

    def too_late(self, work: AssignedWork) -> bool:
        older = work.assignment.plan != self._state.plan
        return older or (self.compensated and work.assignment.version < self._state.version)

    def divided(self) -> None:
        for member in self._state.roster.members.values():
            if member.work is not None and not member.work.late:
                self._state.samples.settle(member.work.drawn)
                member.work.become(WorkLife.LATE)

    def lost(self, member: Member, *, away: bool) -> None:
        member.clock = None
        member.pace = None
        self._idle.discard(member.worker)
        self._held_back.discard(member.worker)
        self._count(member)
        self._untime(member.worker)
        work = self._state.roster.relieve(member)
        if work is not None:
            self._state.samples.give_back(work.drawn, settled=work.late)
            work.become(WorkLife.REVOKED)
            member.revoked = work

    # ---- applying

    def drain(self, now: float) -> list[e.Action]:
        return self._apply()

    def _apply(self) -> list[e.Action]:
        if self._applying is not None or not self._queue:
            return []
        following = self._queue.popleft()
        key = following.contributions[0].key
        self._applying = key.worker, key.incarnation
        if not self.compensated:
            return [following]
        bases = {each.base_version for each in (following, *self._queue) if each.base_version is not None}
        return [replace(following, bases=frozenset(bases | self._state.roster.computing.keys()))]

    def done(self, event: e.Published | e.SnapshotInstalled) -> None:
        assert self._applying is not None
        assert event.version == self._state.version + 1
        self._state.version = event.version
        member = self._state.roster.present(self._applying)
        self._applying = None
        if member is not None:
            self._count(member)

    # ---- what is waited for

    def _seen(self, member: Member) -> int | None:
        """The member's clock, without a push that others cannot see yet."""
        return self._reached.get(member.worker)

    def _stuck(self) -> list[Member]:
        """Members that could compute if others were not so far behind."""
        return [
            each
            for each in self._state.roster.listening()
            if each.work is None and each.after <= self._state.version and self._held(each.clock or 0)
        ]

    def _awaited(self) -> list[Member]:
        """Whom others wait for: the slowest where some are stuck; everybody who has something to do where
        others have nothing, because all samples are out."""
        state = self._state
        ready = state.roster.ready()
        if self._stuck():
            return [each for each in ready if self._seen(each) == self._slowest()]
        busy = self._busy()
        names = {each.worker for each in busy}
        listening = state.roster.listening()
        idle = any(each.worker not in names and each.after <= state.version for each in listening)
        return busy if idle else []

    def _busy(self) -> list[Member]:
        ready, evaluations = self._state.roster.ready(), self._state.evaluations
        return [each for each in ready if each.work is not None or evaluations.is_by(each.id)]

    def waiting(self, now: float) -> Awaited:
        state, stuck = self._state, self._stuck()
        awaited = self._awaited()
        names = ", ".join(describe(state, each.id, each.rank, now) for each in awaited or self._busy())
        if not awaited:  # nobody waits, and still it is good to know who has not been heard of
            who = names or "the server"
            text = f"version {state.version + 1} is being computed {state.waited(now)} by {who}"
            return Awaited(subject="computed", text=text, for_others=False)
        found = waiting_for(state, [(each.rank, each.id) for each in awaited], now)
        if not stuck:
            return found
        seconds = now - self._stuck_since
        ahead = ", ".join(f"{each.name} at clock {each.clock}" for each in stuck)
        text = (
            f"{ahead}: a step begins at most {self.bound} ahead of the slowest, which is at clock "
            f"{self._slowest()}; waits since {seconds:.1f} s for {names}"
        )
        return replace(found, text=text, seconds=seconds)
