"""Rounds: the modes `sync` and `local`. What is given out together is applied together.

When a round opens, the ready members that are idle are frozen as its members, and each is given its part of
the next samples; `division` says which, and when what has come is enough: each has pushed or is lost, or all
ready members but `backup` have, or as many as a code needs. Contributions are handed on in rank order
whatever order they came in. A worker that joins meanwhile takes part from the next round on, unless a lost
member's place is to be filled.

An accepted push stays accepted, also when its worker is lost before the round closes. One that comes too
late is refused as stale: its worker takes the gradient back into its residual, and takes part again in the
round after that. Until then it counts among those that `backup` allows to be missing. In a coded round the
others have pushed its gradient too: there it is refused as redundant, and its worker forgets it.

In local mode the parts are larger: enough samples for as many local steps as `interval` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ....proto.messages import Assignment
from .. import events as e
from ..roster import Member, Work
from ..samples import Drawn
from ..state import JobState
from ..waiting import Waiting, describe
from .division import Division, Part, divide


@dataclass(kw_only=True, slots=True)
class Place:
    """Who has one part of a round. rank: that of its member when the round opened."""

    rank: int
    member: Member = field(repr=False)
    work: Work
    lost: bool = False


@dataclass(kw_only=True, slots=True)
class Round:
    """Places are in rank order; `contributions` are by place."""

    version: int
    opened_at: float
    progress: float  # of the job, when it opened
    rate_factor: float
    division: Division
    places: list[Place]
    contributions: dict[int, e.Contribution] = field(default_factory=dict[int, e.Contribution])
    closed: bool = False  # handed over to be applied

    @property
    def lost(self) -> set[int]:
        return {number for number, place in enumerate(self.places) if place.lost}

    @property
    def answered(self) -> dict[int, int]:
        """Samples behind the pushes that have come, by place."""
        return {number: each.samples for number, each in self.contributions.items()}

    @property
    def vacant(self) -> list[int]:
        """Places that have to be given to somebody else."""
        return [] if self.closed else self.division.vacant(self.answered, self.lost)

    @property
    def missing(self) -> list[Place]:
        """Places that have not answered."""
        absent = set(range(len(self.places))) - self.lost - set(self.contributions)
        return [self.places[number] for number in sorted({*absent, *self.vacant})]

    @property
    def complete(self) -> bool:
        """Whether it waits for nobody."""
        return self.division.complete(self.answered, self.lost)

    def place_of(self, work: Work) -> int | None:
        """Where it is part of this round, None if it is not."""
        return next((number for number, place in enumerate(self.places) if place.work is work), None)


class Rounds:
    def __init__(self, state: JobState) -> None:
        self._state = state
        self.round: Round | None = None
        self._first: tuple[float, float] | None = None  # loss and rate factor of the first round
        self._loss = math.nan  # of the last round
        self._note = ""  # the last thing said about how rounds are divided

    @property
    def quiet(self) -> bool:
        return self.round is None

    # ---- giving out work

    def offer(self, now: float) -> list[e.Action]:
        state, rules = self._state, self._state.rules
        ready = state.roster.ready()
        idle = [member for member in ready if member.work is None]
        if not idle:
            return []
        if self.round is not None:
            return self._fill(self.round, idle, now)
        steps = self._steps()
        division = divide(rules, state.samples, len(idle), len(ready) - len(idle), steps)
        if division is None:
            return []
        progress = state.samples.progress
        count = sum(drawn.count for drawn, _ in division.portions())
        self.round = round_ = Round(
            version=state.version,
            opened_at=now,
            progress=progress,
            rate_factor=rules.rate_factor(progress + count / 2 / state.samples.per_epoch),
            division=division,
            places=[],
        )
        actions: list[e.Action] = []
        for number, (member, part) in enumerate(zip(idle, division.parts, strict=False)):
            due = state.epoch_to_evaluate
            evaluate = number == 0 and state.ask_for_evaluation(member, due, state.assignments + 1, now)
            work, told = self._give(round_, member, part, now, evaluate_epoch=due if evaluate else 0)
            round_.places.append(Place(rank=member.rank, member=member, work=work))
            actions += told
        if division.note and division.note != self._note:
            self._note = division.note
            actions.append(e.Note(text=division.note))
        state.local_steps = steps
        state.wait_from(now)
        return actions

    def _give(
        self, round_: Round, member: Member, part: Part, now: float, *, evaluate_epoch: int = 0
    ) -> tuple[Work, list[e.Action]]:
        state = self._state
        state.assignments += 1
        assignment = Assignment(
            id=state.assignments,
            version=round_.version,
            epoch=part.drawn.epoch,
            ranges=part.drawn.ranges,
            position=part.position,
            world=part.world,
            progress=round_.progress,
            learning_rate=state.rules.learning_rate * round_.rate_factor,
            evaluate_epoch=evaluate_epoch,
            slice=part.slice,
            slices=part.slices,
            stragglers=part.stragglers,
        )
        member.work = work = Work(
            assignment=assignment,
            drawn=part.drawn,
            counted=part.samples,
            given_at=now,
        )
        # Whoever is reconnecting hears of it when it is back.
        return work, [state.send(member, assignment)] if member.listening else []

    def _fill(self, round_: Round, idle: Sequence[Member], now: float) -> list[e.Action]:
        """Give lost members' places, as far as the round needs them, to those who have nothing to do."""
        actions: list[e.Action] = []
        for number, member in zip(sorted(round_.vacant), idle, strict=False):
            place = round_.places[number]
            if place.member.work is place.work:
                place.member.work = None
            who = f"{place.member.name} is lost: {member.name} computes its part"
            text = f"{who} of version {round_.version + 1}"
            place.work, told = self._give(round_, member, round_.division.parts[number], now)
            place.member, place.lost = member, False
            actions += [e.Note(text=text), *told]
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
            place = self.round.place_of(work) if self.round is not None else None
            if self.round is not None and place is not None and work.shared:
                self.round.places[place].lost = False  # nobody else has been given it
            state.ask_for_evaluation(member, assignment.evaluate_epoch, assignment.id, now)
            return [state.send(member, assignment)]
        if work.assignment.id != assigned:  # it never heard of it, and will not answer
            self._void(member, settled=True)
        return []

    # ---- taking pushes

    def take(self, member: Member, work: Work, event: e.Pushed, now: float) -> int | None:
        round_ = self.round
        number = round_.place_of(work) if round_ is not None else None
        if round_ is None or number is None or work.settled or round_.closed:
            return None
        part = round_.division.parts[number]
        round_.contributions[number] = e.Contribution(
            rank=round_.places[number].rank,
            samples=event.samples,
            loss=event.loss,
            slice=part.slice,
            slices=part.slices,
            whole=part.slices > 0 and not event.slices,
            content=event.content,
        )
        return round_.version + 1

    def too_late(self, work: Work) -> bool:
        return True  # its round has closed

    def lost(self, member: Member) -> None:
        round_, work = self.round, member.work
        if work is None:
            return
        number = round_.place_of(work) if round_ is not None else None
        if round_ is None or number is None or work.settled:
            self._void(member, settled=work.settled)
            return
        round_.places[number].lost = True
        if not round_.contributions and all(place.lost for place in round_.places):
            # Everyone is gone and nothing came: its samples are drawn again, by whoever comes.
            self.round = None
            for drawn, places in round_.division.portions():
                self._return(round_, drawn, places)

    def _return(self, round_: Round, drawn: Drawn, places: Sequence[int]) -> None:
        """Samples of which nothing has come go out again."""
        for number in places:
            place = round_.places[number]
            if place.member.work is place.work:
                self._void(place.member, settled=False)
            elif not place.work.shared:
                self._state.samples.settle(drawn)
        if round_.places[places[0]].work.shared:
            self._state.samples.give_back(drawn)

    def _void(self, member: Member, *, settled: bool) -> None:
        """Take its work from a member; the samples go to somebody else, unless others have them anyway."""
        work, member.work = member.work, None
        assert work is not None
        if work.shared:
            return
        self._state.samples.give_back(work.drawn, settled=settled)
        member.void = work

    # ---- closing

    def proceed(self, now: float) -> list[e.Action]:
        round_ = self.round
        if round_ is None or round_.closed or not round_.complete:
            return []
        round_.closed = True
        weights = round_.division.weights(round_.answered)
        in_rank_order = [
            each if weights is None else replace(each, weight=weights.get(number, 0.0))
            for number, each in sorted(round_.contributions.items())
        ]
        self._state.wait_from(now)
        self._settle(round_)
        return [
            e.Apply(
                version=round_.version + 1,
                contributions=tuple(in_rank_order),
                rate_factor=1.0 if self._state.rules.local_steps else round_.rate_factor,
                opened_at=round_.opened_at,
            )
        ]

    def _settle(self, round_: Round) -> None:
        """Account for the samples of a round that has closed."""
        for drawn, places in round_.division.portions():
            answered = any(number in round_.contributions for number in places)
            if not answered and all(round_.places[number].lost for number in places):
                self._return(round_, drawn, places)
                continue
            # Who is late has the gradient go into its residual, or others have pushed it.
            self._state.samples.settle(drawn)
            for number in places:
                place = round_.places[number]
                if place.member.work is place.work and place.lost:
                    place.member.work = None
                elif place.member.work is place.work:
                    place.work.settled = True
        given = [each for each in round_.contributions.values() if each.samples]
        samples = sum(each.samples for each in given)
        if samples:
            self._loss = sum(each.loss * each.samples for each in given) / samples
            if self._first is None:
                self._first = self._loss, round_.rate_factor
            if self._state.rules.local_steps is not None:
                most = max(part.samples for part in round_.division.parts)
                self._state.all_local_steps += -(-most // self._state.rules.batch_size)

    def published(self, event: e.Published) -> None:
        round_ = self.round
        assert round_ is not None
        assert event.version == round_.version + 1
        assert round_.closed
        self.round = None
        self._state.version = event.version

    # ---- what is waited for

    def missing(self) -> Sequence[int]:
        round_ = self.round
        if round_ is None:  # the next one opens when somebody has finished what is too late
            return [member.rank for member in self._state.roster.ready() if member.work is not None]
        return [] if round_.complete else sorted({place.rank for place in round_.missing})

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
            members = {**members, **{place.rank: place.member for place in self.round.places}}
        names = ", ".join(describe(self._state, members[rank], rank, now) for rank in missing)
        return Waiting(
            ranks=tuple(missing), subject=f"{missing}", text=f"version {version} waits {since} for {names}"
        )

    def snapshot(self) -> Mapping[str, object]:
        return {"round": repr(self.round), "first": self._first, "loss": repr(self._loss)}
