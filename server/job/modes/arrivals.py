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

A member that takes more than twice as long as the others is given fewer samples at a time (`pace`), and its
pushes weigh less accordingly: otherwise the bound would make everybody as slow as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....proto.messages import Assignment
from .. import events as e
from ..roster import Member, Work
from ..state import JobState
from ..waiting import Waiting, describe
from .pace import Pace


class Arrivals:
    def __init__(self, state: JobState, staleness: int | None) -> None:
        """staleness: the bound in clocks, None for no bound."""
        self._state = state
        self._bound = staleness
        self._promised = 0  # the last version that a push was told it will be
        self._newest = -1  # clock of the newest push accepted
        self._queue: deque[e.Apply] = deque()
        self._applying = False
        self._stuck_since = 0.0  # when somebody began to wait for the slowest
        self._epoch_version = 0  # the version with which the last epoch was complete

    @property
    def quiet(self) -> bool:
        return self._promised == self._state.version

    # ---- giving out work

    def offer(self, now: float) -> list[e.Action]:
        state = self._state
        if self._applying:  # a snapshot would be of the version after this one
            return []
        actions: list[e.Action] = []
        stuck = False
        for member in state.roster.listening():
            if member.work is not None or member.after > state.version:
                continue
            if state.evaluation is not None and state.evaluation.by is member:
                continue
            due = state.epoch_to_evaluate if state.version >= self._epoch_version else 0
            if state.ask_for_evaluation(member, due, state.assignments + 1, now):
                # It takes time, so nothing else is to be done at that version.
                assignment = Assignment(
                    id=0, version=state.version, progress=state.samples.progress, evaluate_epoch=due
                )
                actions.append(state.assign(member, assignment))
                continue
            if self._held(self._clock(member)):
                stuck = True
                continue
            member.pace = member.pace or Pace(share=state.rules.batch_size)
            drawn = state.samples.draw(member.pace.share)
            if drawn is None:
                break
            assign = state.assign(
                member,
                Assignment(
                    id=0,
                    version=state.version,
                    epoch=drawn.epoch,
                    ranges=drawn.ranges,
                    world=len(state.roster.ready()),
                    progress=state.samples.progress,
                ),
            )
            member.work = Work(
                assignment=assign.assignment,
                drawn=drawn,
                given_at=now,
                share=member.pace.share,
            )
            actions.append(assign)
        if not stuck:
            self._stuck_since = now
        return actions

    def _clock(self, member: Member) -> int:
        if member.clock is None:
            clocks = [each.clock for each in self._state.roster.ready() if each.clock is not None]
            member.clock = min(clocks, default=self._newest + 1)
        return member.clock

    def _reached(self, member: Member) -> int | None:
        """The member's clock, without a push that others cannot see yet."""
        unseen = member.after > self._state.version
        return None if member.clock is None else member.clock - unseen

    def _slowest(self) -> int:
        """Clock of the ready member that is furthest behind."""
        clocks = [self._reached(each) for each in self._state.roster.ready()]
        return min((clock for clock in clocks if clock is not None), default=0)

    def _held(self, clock: int) -> bool:
        return self._bound is not None and clock - self._slowest() > self._bound

    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        work = member.work
        if work is not None and work.assignment.id != assigned:
            # It never heard of it, and is given work anew, at the version that there is then.
            self._state.samples.give_back(work.drawn)
            member.work = None
        elif work is not None:
            work.interrupted = True
        return []

    # ---- taking pushes

    def take(self, member: Member, work: Work, event: e.Pushed, now: float) -> int | None:
        state, rules = self._state, self._state.rules
        clock = self._clock(member)
        epoch = state.epoch
        state.samples.settle(work.drawn)
        clocks = max(0, self._newest - clock)
        if self._bound is not None and clocks > self._bound:
            member.clock = None  # it starts again beside the slowest
            return None
        base_version = work.assignment.version
        versions = self._promised - base_version
        state.largest_staleness = max(state.largest_staleness, versions if self._bound is None else clocks)
        self._newest = max(self._newest, clock)
        member.clock = clock + 1
        self._promised += 1
        member.after = self._promised
        if state.epoch > epoch:
            self._epoch_version = self._promised
        self._judge(member, work, now)
        middle = state.samples.progress - work.drawn.count / 2 / state.samples.per_epoch
        weight = work.share / rules.batch_size
        contribution = e.Contribution(
            rank=member.rank, samples=event.samples, loss=event.loss, content=event.content
        )
        self._queue.append(
            e.Apply(
                version=self._promised,
                contributions=(contribution,),
                rate_factor=rules.rate_factor(middle),
                weight=weight / (max(1, versions) if rules.inverse else 1),
                opened_at=work.given_at,
                base_version=base_version,
                clocks_stale=None if self._bound is None else clocks,
            )
        )
        state.wait_from(now)
        return self._promised

    def _judge(self, member: Member, work: Work, now: float) -> None:
        """Fit the member's share to how long it took, if the others depend on that."""
        pace = member.pace
        if self._bound is None or pace is None or work.interrupted or work.drawn.count < pace.share:
            return  # its time says nothing: it was away, or an epoch that ended left it less than its share
        pace.note(now - work.given_at)
        ready = [each for each in self._state.roster.ready() if each is not member]
        pace.adapt([each.pace for each in ready if each.pace is not None], self._state.rules.batch_size)

    def too_late(self, work: Work) -> bool:
        return False

    def lost(self, member: Member) -> None:
        member.clock = None
        member.pace = None
        if member.work is not None:
            self._state.samples.give_back(member.work.drawn)
            member.void, member.work = member.work, None

    # ---- applying

    def proceed(self, now: float) -> list[e.Action]:
        if self._applying or not self._queue:
            return []
        self._applying = True
        members = self._state.roster.members.values()
        bases = {each.work.assignment.version for each in members if each.work is not None}
        bases |= {each.base_version for each in self._queue if each.base_version is not None}
        return [replace(self._queue.popleft(), bases=frozenset(bases))]

    def published(self, event: e.Published) -> None:
        assert self._applying
        assert event.version == self._state.version + 1
        self._applying = False
        self._state.version = event.version

    # ---- what is waited for

    def _stuck(self) -> list[Member]:
        """Members that could compute if others were not so far behind."""
        return [
            each
            for each in self._state.roster.listening()
            if each.work is None and each.after <= self._state.version and self._held(each.clock or 0)
        ]

    def missing(self) -> Sequence[int]:
        return [each.rank for each in self._awaited()]

    def _awaited(self) -> list[Member]:
        """Whom others wait for: the slowest where some are stuck; everybody who has something to do where
        others have nothing, because all samples are out."""
        state = self._state
        ready = state.roster.ready()
        if self._stuck():
            return [each for each in ready if self._reached(each) == self._slowest()]
        busy = self._busy()
        idle = any(each not in busy and each.after <= state.version for each in state.roster.listening())
        return busy if idle else []

    def _busy(self) -> list[Member]:
        evaluator = self._state.evaluation.by if self._state.evaluation is not None else None
        return [each for each in self._state.roster.ready() if each.work is not None or each is evaluator]

    def waiting(self, now: float) -> Waiting:
        state, stuck = self._state, self._stuck()
        awaited, since = self._awaited(), state.waited(now)
        members = awaited or self._busy()
        names = ", ".join(describe(state, each, each.rank, now) for each in members)
        ranks = tuple(each.rank for each in awaited)
        if not awaited:  # nobody waits, and still it is good to know who has not been heard of
            who = names or "the server"
            text = f"version {state.version + 1} is being computed {since} by {who}"
            return Waiting(subject="computed", text=text, for_others=False)
        if not stuck:
            text = f"version {state.version + 1} waits {since} for {names}"
            return Waiting(ranks=ranks, subject=f"{ranks}", text=text)
        since = f"since {now - self._stuck_since:.1f} s"
        ahead = ", ".join(f"{each.name} at clock {each.clock}" for each in stuck)
        text = (
            f"{ahead}: a step begins at most {self._bound} ahead of the slowest, which is at clock "
            f"{self._slowest()}; waits {since} for {names}"
        )
        return Waiting(ranks=ranks, subject=f"{ranks}", text=text, seconds=now - self._stuck_since)

    def snapshot(self) -> Mapping[str, object]:
        return {
            "promised": self._promised,
            "newest": self._newest,
            "queue": repr(self._queue),
            "applying": self._applying,
        }
