"""Arrivals: the modes `stale` and `async`. Each accepted push is applied by itself and makes a version.

Accepted pushes are applied one at a time, in the order of arrival. A member:

    idle      | gets samples at the current version         | -> computing; held back (stale); evaluating
    computing | its push is accepted, or refused as late    | -> queued; idle
    queued    | its push waits for the shard, or is applied | -> idle, once its version is published
    held back | is too far ahead of the slowest member      | -> idle, once the slowest has caught up

The mode `stale` bounds how far members may drift apart (stale synchronous parallel, Ho et al., NIPS 2013). A
member's clock is the number of its accepted pushes; other members see the last one once it is published. A
member gets work only while its clock is at most `bound` ahead of the slowest ready member's. So at clock c it
computes with all contributions up to clock c - bound - 1. With a bound of 0, all members finish a clock
before any begins the next. The staleness of a push is the number of clocks that it is behind the newest
accepted push. A member that joins starts at the clock of the slowest.

A member that takes more than twice as long as the others gets fewer samples at a time (`share_fit`) until it
answers as often as they do, and its pushes have less weight accordingly. Otherwise the bound would make all
members as slow as it is.

Invariants:

- The shard applies one push at a time.
- No push is accepted that is staler than the bound, or whose version the shard no longer keeps.
- No push is accepted while a new plan waits.
- No work is assigned while a push is being applied: a snapshot would be of the next version.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....common.stored import DERIVED
from ....proto.messages import Assignment
from .. import events as e
from ..roster import Member, Name
from ..samples import Drawn
from ..state import JobState
from ..waiting import Awaited, describe, waiting_for
from ..work import AssignedWork, WorkLife
from .mode import Mode
from .share_fit import ShareFit


@dataclass
class Arrivals(Mode):
    """The modes `stale` and `async`.

    A push must not take time in proportion to the number of members, so indices of members, by worker, are
    kept up to date instead: the fields marked DERIVED.

    Attributes:
        _queue: orders for accepted pushes that wait for the shard, oldest first.
        _visible: clocks that other members can see, by worker.
    """

    _state: JobState = field(metadata=DERIVED)
    bound: int | None = field(metadata=DERIVED)  # clocks that a member may be ahead of the slowest
    inverse: bool = field(metadata=DERIVED)  # True to divide a gradient by its staleness in versions
    compensated: bool = field(metadata=DERIVED)  # the shard keeps the base versions of gradients
    _promised: int = 0  # version of the newest accepted push
    _newest: int = -1  # clock of the newest accepted push; -1 before the first
    _queue: deque[e.Apply] = field(default_factory=deque[e.Apply])
    _applying: Name | None = None  # worker and incarnation whose push is being applied; None while none is
    _largest_staleness: int = 0  # in clocks if bounded, else in versions
    _stuck_since: float = 0.0  # time from which members have waited for the slowest
    _epoch_version: int = 0  # version with which the last epoch was complete
    _idle: set[str] = field(default_factory=set[str], metadata=DERIVED)  # workers that may get work
    _held_back: set[str] = field(default_factory=set[str], metadata=DERIVED)  # too far ahead
    _held_at: int = field(default=0, metadata=DERIVED)  # the slowest member's clock then
    _visible: dict[str, int] = field(default_factory=dict[str, int], metadata=DERIVED)
    _clocks: Counter[int] = field(default_factory=Counter[int], metadata=DERIVED)  # workers at each
    _times: dict[str, float] = field(default_factory=dict[str, float], metadata=DERIVED)  # of whole shares
    _sorted_times: list[float] = field(default_factory=list[float], metadata=DERIVED)  # ascending

    @property
    def quiet(self) -> bool:
        return self._promised == self._state.version

    @property
    def status(self) -> Mapping[str, int]:
        return {"largest_staleness": self._largest_staleness}

    def restored(self) -> None:
        self._held_back, self._clocks, self._visible = set(), Counter(), {}
        self._sorted_times, self._times = [], {}
        for member in self._state.roster.members.values():
            self._index_clock(member)
            self._index_time(member)
        self._idle = {each.worker for each in self._state.roster.listening() if each.work is None}

    def advance(self, now: float) -> list[e.Action]:
        return [*self._assign_work(now), *self._apply_next()]

    # ---- indices

    def _index_clock(self, member: Member) -> None:
        """Index the clock of `member` that other members can see: without a push that is not published
        yet."""
        before = self._visible.pop(member.worker, None)
        if before is not None:
            self._clocks[before] -= 1
            if not self._clocks[before]:
                del self._clocks[before]
        if member.clock is not None:
            unpublished = member.after > self._state.version
            self._visible[member.worker] = member.clock - unpublished
            self._clocks[member.clock - unpublished] += 1

    def _index_time(self, member: Member) -> None:
        self._unindex_time(member.worker)
        pace = member.pace
        if pace is not None and pace.is_reference(self._state.rules.batch_size):
            self._times[member.worker] = pace.seconds
            insort(self._sorted_times, pace.seconds)

    def _unindex_time(self, worker: str) -> None:
        seconds = self._times.pop(worker, None)
        if seconds is not None:
            del self._sorted_times[bisect_left(self._sorted_times, seconds)]

    def _slowest(self) -> int:
        """Return the smallest visible clock. There are few different clocks where there is a bound."""
        return min(self._clocks, default=0)

    # ---- assigning work

    def _assign_work(self, now: float) -> list[e.Action]:
        """Assign work to idle members, in rank order, as long as samples are left."""
        state = self._state
        # While a push is being applied, a snapshot would be of the next version. While a plan waits, the
        # pushes for new assignments would be late.
        if self._applying is not None or state.plan_due:
            return []
        idle = self._idle
        if self._held_back and (self._slowest() != self._held_at or self._evaluation_due()):
            idle |= self._held_back
            self._held_back = set()
        actions: list[e.Action] = []
        members = state.roster.members
        computing = sum(each.work is not None and not each.work.late for each in members.values())
        ahead = self._promised - state.version + computing  # steps that are not published yet
        for member in sorted((members[each] for each in idle), key=lambda member: member.rank):
            # 1. The member cannot get work, or has some.
            if not member.listening or member.work is not None:
                idle.discard(member.worker)
                continue
            # 2. Its last push is not published yet, or it evaluates a version.
            if member.after > state.version:
                continue
            if state.evaluations.is_by(member.id):
                continue
            # 3. An evaluation is due.
            due = self._evaluation_due()
            if state.ask_for_evaluation(member, due, state.assignments + 1, now):
                # An evaluation takes time, so the member does nothing else at that version.
                assignment = Assignment(
                    id=0,
                    version=state.version,
                    progress=state.samples.progress,
                    evaluate_epoch=due,
                    evaluations=state.evaluations.newest,
                )
                actions.append(state.assign(member, assignment))
                continue
            # 4. It is too far ahead of the slowest member.
            if self._too_far_ahead(self._clock(member)):
                self._held_back.add(member.worker)
                self._held_at = self._slowest()
                idle.discard(member.worker)
                continue
            # 5. It gets samples.
            member.pace = member.pace or ShareFit(share=state.rules.batch_size)
            drawn = state.samples.draw(member.pace.share) if state.may_step(ahead) else None
            batches = [] if drawn is None else [drawn.count]
            at_once = state.accumulation.batches
            while drawn is not None and len(batches) < at_once and state.samples.has_more_of(drawn.epoch):
                more = state.samples.draw(member.pace.share)
                assert more is not None
                drawn = drawn.with_more(more)
                batches.append(more.count)
            if drawn is None:  # no samples are left, so no member has to wait for the slowest
                idle |= self._held_back
                self._held_back = set()
                break
            terms: dict[str, Any] = {}
            if at_once > 1:
                terms = {"batches": tuple(batches), "steps": 1, "accumulate": at_once}
            actions += state.assign_samples(
                member,
                drawn,
                now,
                share=member.pace.share,
                position=member.rank,
                world=state.roster.ready_members,
                progress=state.samples.progress,
                evaluations=state.evaluations.newest,
                total_steps=state.total_steps(state.version + ahead + 1, state.rules.batch_size),
                **terms,
            )
            ahead += 1
            idle.discard(member.worker)
        if not self._held_back:
            self._stuck_since = now
        return actions

    def _evaluation_due(self) -> int:
        """Return the number of the evaluation that can be made at this version; 0 for none."""
        state = self._state
        due = state.evaluation_due if state.version >= self._epoch_version else 0
        return due if state.evaluations.wants(due) else 0

    def _clock(self, member: Member) -> int:
        """Return the member's clock; a member without one starts at the clock of the slowest ready member."""
        if member.clock is None:
            clocks = [each.clock for each in self._state.roster.ready() if each.clock is not None]
            member.clock = min(clocks, default=self._newest + 1)
            self._index_clock(member)
        return member.clock

    def _too_far_ahead(self, clock: int) -> bool:
        return self.bound is not None and clock - self._slowest() > self.bound

    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        work = member.work
        if work is not None and not member.still_computes(work, assigned):
            # The assignment never arrived. The member gets another one, at the then current version.
            self._state.samples.give_back(work.drawn, settled=work.late)
            self._state.roster.relieve(member)
        elif work is not None:
            work.interrupted = True
        self._idle.add(member.worker)
        return []

    def freed(self, member: Member) -> None:
        self._idle.add(member.worker)

    # ---- further batches

    def more(self, member: Member, work: AssignedWork, event: e.MoreWanted) -> list[e.Action]:
        state = self._state
        if not state.samples.has_more_of(work.drawn.epoch):
            # The gradients of its batches go into the member's next step.
            self._settle(work.drawn)
            answer = state.exhaust(member, work)
            state.roster.relieve(member)
            self._idle.add(member.worker)
            return answer
        actions: list[e.Action] = []
        for _ in range(event.wanted):
            if state.samples.has_more_of(work.drawn.epoch):
                more = state.samples.draw(work.share)
                assert more is not None
                actions = state.extend(member, work, more, (more.count,), steps=1)
        return actions

    def _settle(self, drawn: Drawn) -> None:
        """Settle samples, and note the version with which their epoch is complete."""
        epoch = self._state.epoch
        self._state.samples.settle(drawn)
        if self._state.epoch > epoch:
            self._epoch_version = self._promised

    # ---- taking pushes

    def take(self, member: Member, work: AssignedWork, event: e.Pushed, now: float) -> int | None:
        state = self._state
        took, given = event.batches or len(work.batches), len(work.batches)
        work.drawn = state.requeue_rest(work.drawn, work.batches, took)
        clock = self._clock(member)
        if event.samples:
            state.accumulation.learn(took, given)
        epoch = state.epoch
        state.samples.settle(work.drawn)
        self._idle.add(member.worker)
        clocks = max(0, self._newest - clock)
        if self.bound is not None and clocks > self.bound:
            member.clock = None  # the member starts again at the clock of the slowest
            self._index_clock(member)
            return None
        if state.plan_due:  # the new plan comes into force once the pushes accepted so far are applied
            return None
        base_version = work.assignment.version
        versions = self._promised - base_version
        self._largest_staleness = max(self._largest_staleness, versions if self.bound is None else clocks)
        self._newest = max(self._newest, clock)
        member.clock = clock + 1
        self._promised += 1
        member.after = self._promised
        self._index_clock(member)
        if state.epoch > epoch:
            self._epoch_version = self._promised
        self._fit_share(member, work, now)
        middle = state.samples.progress - work.drawn.count / 2 / state.samples.per_epoch
        weight = work.share / state.rules.batch_size
        contribution = e.Contribution(key=event.key, rank=member.rank, samples=event.samples, loss=event.loss)
        self._queue.append(
            e.Apply(
                version=self._promised,
                contributions=(contribution,),
                rate_factor=state.rate_factor(middle, state.version + 0.5),
                weight=weight / (max(1, versions) if self.inverse else 1),
                opened_at=work.given_at,
                base_version=base_version,
                clocks_stale=None if self.bound is None else clocks,
            )
        )
        state.wait_from(now)
        return self._promised

    def _fit_share(self, member: Member, work: AssignedWork, now: float) -> None:
        """Fit the member's share to the time that it took, if other members would wait for it."""
        pace = member.pace
        if self.bound is None or pace is None or work.interrupted:
            return
        if work.drawn.count < pace.share * self._state.accumulation.batches:
            return  # the time is not comparable: the member was away, or got less than its share
        pace.note(now - work.given_at)
        self._unindex_time(member.worker)
        pace.adapt(self._sorted_times, self._state.rules.batch_size)
        self._index_time(member)

    def holds(self, key: e.PushKey) -> bool:
        return any(each.contributions[0].key == key for each in self._queue)

    def too_late(self, work: AssignedWork) -> bool:
        older = work.assignment.plan != self._state.plan
        return older or (self.compensated and work.assignment.version < self._state.version)

    def plan_adopted(self) -> None:
        for member in self._state.roster.members.values():
            if member.work is not None and not member.work.late:
                self._state.samples.settle(member.work.drawn)
                member.work.become(WorkLife.LATE)

    def lost(self, member: Member, *, away: bool) -> None:
        member.clock = None
        member.pace = None
        self._idle.discard(member.worker)
        self._held_back.discard(member.worker)
        self._index_clock(member)
        self._unindex_time(member.worker)
        self._state.revoke(member)

    # ---- applying

    def drain(self, now: float) -> list[e.Action]:
        return self._apply_next()

    def _apply_next(self) -> list[e.Action]:
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
            self._index_clock(member)

    def waiting(self, now: float) -> Awaited:
        state, slowest = self._state, self._slowest()
        ready, evaluations = state.roster.ready(), state.evaluations
        busy = [each for each in ready if each.work is not None or evaluations.is_by(each.id)]
        published = [each for each in state.roster.listening() if each.after <= state.version]
        stuck = [each for each in published if each.work is None and self._too_far_ahead(each.clock or 0)]
        if stuck:
            awaited = [each for each in ready if self._visible.get(each.worker) == slowest]
        else:  # all samples are assigned, so members without work wait for those that compute
            names_of_busy = {each.worker for each in busy}
            awaited = busy if any(each.worker not in names_of_busy for each in published) else []
        names = ", ".join(describe(state, each.id, each.rank, now) for each in awaited or busy)
        if not awaited:  # no member waits for another one; name those that compute
            computing = names or "the server"
            text = (
                f"version {state.version + 1} is being computed ({state.waited(now)} so far) by {computing}"
            )
            return Awaited(subject="computed", text=text, for_others=False)
        found = waiting_for(state, [(each.rank, each.id) for each in awaited], now)
        if not stuck:
            return found
        seconds = now - self._stuck_since
        ahead = ", ".join(f"{each.name} at clock {each.clock}" for each in stuck)
        text = (
            f"{ahead}: a step begins at most {self.bound} ahead of the slowest, which is at clock "
            f"{slowest}; has waited {seconds:.1f} s for {names}"
        )
        return replace(found, text=text, seconds=seconds)
