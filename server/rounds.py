"""Rounds: the modes `sync` and `local`. What is given out together is applied together.

When a round opens, the ready members that are idle are frozen as its members, and each is given its part of
the next samples. It closes when each of them has pushed or is lost, or when all ready members but `backup`
have; contributions are handed on in rank order whatever order they came in. Its partitions close one by one,
and the version is complete when all of them are published. A worker that joins meanwhile takes part from the
next round on.

An accepted push stays accepted, also when its worker is lost before the round closes. One that comes too
late is refused as stale: its worker takes the gradient back into its residual, and takes part again in the
round after that. Until then it counts among those that `backup` allows to be missing.

In local mode the parts are larger: enough samples for as many local steps as `interval` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..proto.messages import Assignment
from ..proto.refusal import Refused
from . import events as e
from . import refusals
from .roster import Member, Work
from .samples import Drawn
from .state import JobState
from .waiting import Waiting, describe


@dataclass(kw_only=True, slots=True)
class Round:
    """Members are frozen when it opens; `contributions[partition][rank]`."""

    version: int
    opened_at: float
    drawn: Drawn
    steps: int
    rate_factor: float
    members: dict[int, Member] = field(repr=False)  # by rank
    work: dict[int, Work]
    needed: int  # contributions that close it
    contributions: list[dict[int, e.Contribution]]
    lost: set[int] = field(default_factory=set[int])
    closed: set[int] = field(default_factory=set[int])  # partitions handed over to be applied
    published: set[int] = field(default_factory=set[int])

    def missing(self, partition: int) -> list[int]:
        """Ranks that this partition has not heard of."""
        return sorted(set(self.members) - self.lost - set(self.contributions[partition]))

    def complete(self, partition: int) -> bool:
        """Whether it waits for nobody."""
        return not self.missing(partition) or len(self.contributions[partition]) >= self.needed

    def rank_of(self, member: Member) -> int | None:
        """The member's rank in this round, None if it takes no part."""
        return next((rank for rank, other in self.members.items() if other is member), None)


class Rounds:
    def __init__(self, state: JobState) -> None:
        self._state = state
        self.round: Round | None = None
        self._first: tuple[float, float] | None = None  # loss and rate factor of the first round
        self._loss = math.nan  # of the last round

    @property
    def quiet(self) -> bool:
        return self.round is None

    # ---- giving out work

    def offer(self, now: float) -> list[e.Action]:
        state, rules = self._state, self._state.rules
        ready = state.roster.ready()
        idle = [member for member in ready if member.work is None]
        if self.round is not None or not idle:
            return []
        steps = self._steps()
        drawn = state.samples.draw(rules.batch_size * steps * len(idle))
        if drawn is None:
            return []
        parts = drawn.divided(len(idle))
        members = idle[: len(parts)]
        late = len(ready) - len(idle)
        progress = state.samples.progress
        rate_factor = rules.rate_factor(progress + drawn.count / 2 / state.samples.per_epoch)
        work: dict[int, Work] = {}
        actions: list[e.Action] = []
        for position, (member, part) in enumerate(zip(members, parts, strict=True)):
            state.assignments += 1
            due = state.epoch_to_evaluate
            evaluate = position == 0 and state.ask_for_evaluation(member, due, state.assignments, now)
            assignment = Assignment(
                id=state.assignments,
                version=state.version,
                epoch=part.epoch,
                ranges=part.ranges,
                position=position,
                world=len(members),
                progress=progress,
                learning_rate=rules.learning_rate * rate_factor,
                evaluate_epoch=due if evaluate else 0,
            )
            work[member.rank] = member.work = Work(
                assignment=assignment, drawn=part, given_at=now, undecided=set(range(state.partitions))
            )
            if member.listening:  # whoever is reconnecting hears of it when it is back
                actions.append(state.send(member, assignment))
        self.round = Round(
            version=state.version,
            opened_at=now,
            drawn=drawn,
            steps=steps,
            rate_factor=rate_factor,
            members={member.rank: member for member in members},
            work=work,
            needed=max(1, min(len(members), len(members) + late - rules.backup)),
            contributions=[{} for _ in range(state.partitions)],
        )
        state.local_steps = steps
        state.wait_from(now)
        return actions

    def _steps(self) -> int:
        planned = self._state.rules.local_steps
        if planned is None:
            return 1
        if self._first is None:
            return planned.first
        loss, factor = self._first
        now = self._state.rules.rate_factor(self._state.samples.progress)
        return planned.following(self._loss / loss if loss else math.nan, factor / now if now else math.inf)

    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        state, work = self._state, member.work
        if work is None:
            return []
        if not work.settled:
            # Its round is open: what it was told may not have arrived.
            assignment = work.assignment
            state.ask_for_evaluation(member, assignment.evaluate_epoch, assignment.id, now)
            return [state.send(member, assignment)]
        if work.assignment.id != assigned:  # it never heard of it, and will not answer
            self._void(member, settled=True)
        return []

    # ---- taking pushes

    def take(self, member: Member, work: Work, event: e.Pushed, now: float) -> int | None:
        round_ = self.round
        rank = round_.rank_of(member) if round_ is not None else None
        if round_ is None or rank is None or work.settled or event.partition in round_.closed:
            return None
        round_.contributions[event.partition][rank] = e.Contribution(
            rank=rank, samples=event.samples, loss=event.loss, content=event.content
        )
        return round_.version + 1

    def happened(self, member: Member, event: e.OfMode, now: float) -> list[e.Action]:
        raise Refused(refusals.not_coded(member.worker))

    def wants_copy(self, worker: str, version: int) -> bool:
        return False

    def too_late(self, work: Work) -> bool:
        return True  # its round has closed

    def lost(self, member: Member) -> None:
        round_ = self.round
        rank = round_.rank_of(member) if round_ is not None else None
        work = member.work
        if round_ is None or rank is None or (work is not None and work.settled):
            if work is not None:
                self._void(member, settled=work.settled)
            return
        round_.lost.add(rank)
        if not any(round_.contributions) and set(round_.members) <= round_.lost:
            # Everyone is gone and nothing came: its samples are drawn again, by whoever comes.
            self.round = None
            for each in round_.members.values():
                if each.work is not None:
                    self._void(each, settled=False)

    def _void(self, member: Member, *, settled: bool) -> None:
        """Take its work from a member; the samples go to somebody else."""
        assert member.work is not None
        self._state.samples.give_back(member.work.drawn, settled=settled)
        member.void, member.work = member.work, None

    # ---- closing

    def proceed(self, now: float) -> list[e.Action]:
        round_ = self.round
        if round_ is None:
            return []
        actions: list[e.Action] = []
        for partition in range(self._state.partitions):
            if partition in round_.closed or not round_.complete(partition):
                continue
            round_.closed.add(partition)
            in_rank_order = [each for _, each in sorted(round_.contributions[partition].items())]
            actions.append(
                e.Apply(
                    partition=partition,
                    version=round_.version + 1,
                    contributions=tuple(in_rank_order),
                    rate_factor=1.0 if self._state.rules.local_steps else round_.rate_factor,
                    opened_at=round_.opened_at,
                )
            )
        if actions:
            self._state.wait_from(now)
        if actions and len(round_.closed) == self._state.partitions:
            self._settle(round_)
        return actions

    def _settle(self, round_: Round) -> None:
        """Account for the samples of a round that has closed."""
        for rank, work in round_.work.items():
            member = round_.members[rank]
            if member.work is not work or any(rank in each for each in round_.contributions):
                self._state.samples.settle(work.drawn)
            elif rank in round_.lost:
                self._void(member, settled=False)
            else:  # it is late: its gradient will go into its residual
                self._state.samples.settle(work.drawn)
            if member.work is work:
                work.settled = True
        given = [each for each in round_.contributions[0].values() if each.samples]
        samples = sum(each.samples for each in given)
        if samples:
            self._loss = sum(each.loss * each.samples for each in given) / samples
            if self._first is None:
                self._first = self._loss, round_.rate_factor
            if self._state.rules.local_steps is not None:
                most = max(work.drawn.count for work in round_.work.values())
                self._state.all_local_steps += -(-most // self._state.rules.batch_size)

    def published(self, event: e.Published) -> None:
        round_ = self.round
        assert round_ is not None
        assert event.version == round_.version + 1
        assert event.partition in round_.closed
        round_.published.add(event.partition)
        if len(round_.published) == self._state.partitions:
            self.round = None
            self._state.version = event.version

    # ---- what is waited for

    def missing(self) -> Sequence[int]:
        round_ = self.round
        if round_ is None:  # the next one opens when somebody has finished what is too late
            return [member.rank for member in self._state.roster.ready() if member.work is not None]
        open_ = [p for p in range(self._state.partitions) if not round_.complete(p)]
        return sorted({rank for partition in open_ for rank in round_.missing(partition)})

    def waiting(self, now: float) -> Waiting:
        since = self._state.waited(now)
        missing = self.missing()
        version = self._state.version + 1
        if not missing:
            if self.round is None:
                return Waiting()
            return Waiting(
                subject="computed", text=f"version {version} is being computed {since}", for_others=False
            )
        members = {member.rank: member for member in self._state.roster.by_rank()}
        if self.round is not None:
            members = {**members, **self.round.members}
        names = ", ".join(describe(self._state, members[rank], rank, now) for rank in missing)
        return Waiting(
            ranks=tuple(missing), subject=f"{missing}", text=f"version {version} waits {since} for {names}"
        )

    def snapshot(self) -> Mapping[str, object]:
        return {"round": repr(self.round), "first": self._first, "loss": repr(self._loss)}
