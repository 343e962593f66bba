"""The mode `turns`: workers take turns. One worker at a time computes a gradient, and the server makes a
version from each.

A turn begins when the last version is published. It ends when the member has pushed, or when it is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradwire.common.configuration import option
from gradwire.common.stored import DERIVED
from gradwire.server.job import events as e
from gradwire.server.job.modes.mode import Mode
from gradwire.server.job.modes.options import ModeOptions, needs_mean
from gradwire.server.job.roster import Member, Name
from gradwire.server.job.state import JobState
from gradwire.server.job.waiting import Awaited, waiting_for
from gradwire.server.job.work import AssignedWork
from gradwire.settings import ServerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnsOptions(ModeOptions):
    """Options of `turns`."""

    batches: int = option(1, "batches of --batch-size samples in a turn", least=1)

    @property
    def work(self) -> str:
        return "gradients"

    def check(self, settings: ServerSettings) -> None:
        needs_mean(settings)  # a turn has one gradient

    def create(self, state: JobState) -> Mode:
        return Turns(state, self.batches)


@dataclass
class Turns(Mode):
    """The rules. All fields are saved with the job but those marked DERIVED."""

    _state: JobState = field(metadata=DERIVED)
    batches: int = field(metadata=DERIVED)
    holder: Name | None = None  # whose turn it is
    last: int = -1  # rank of the last holder
    accepted: e.Apply | None = None  # the push that the shard is to apply
    applying: bool = False

    @property
    def quiet(self) -> bool:
        return self.holder is None and self.accepted is None and not self.applying

    def advance(self, now: float) -> list[e.Action]:
        if self.accepted is not None:
            return self.drain(now)
        state = self._state
        idle = [member for member in state.roster.ready() if member.work is None]
        if not self.quiet or not idle or not state.may_step():
            return []
        drawn = state.samples.draw(self.batches * state.rules.batch_size)
        if drawn is None:
            return []
        member = next((each for each in idle if each.rank > self.last), idle[0])
        self.holder, self.last = member.id, member.rank
        due = state.evaluation_due
        asked = state.ask_for_evaluation(member, due, state.assignments + 1, now)
        state.wait_from(now)
        return state.assign_samples(
            *(member, drawn, now),
            world=1,
            progress=state.samples.progress,
            evaluate_epoch=due if asked else 0,
            evaluations=state.evaluations.newest,
        )

    def take(self, member: Member, work: AssignedWork, event: e.Pushed, now: float) -> int | None:
        state, self.holder = self._state, None
        state.samples.settle(work.drawn)
        self.accepted = e.Apply(
            version=state.version + 1,
            contributions=(
                e.Contribution(key=event.key, rank=member.rank, samples=event.samples, loss=event.loss),
            ),
            rate_factor=state.rate_factor(state.samples.progress, self.steps + 0.5),
            opened_at=work.given_at,
        )
        return state.version + 1

    def drain(self, now: float) -> list[e.Action]:
        order, self.accepted = self.accepted, None
        if order is None:
            return []
        self.applying = True
        return [order]

    def done(self, event: e.Published | e.SnapshotInstalled) -> None:
        self._state.version, self.applying = event.version, False

    def holds(self, key: e.PushKey) -> bool:
        return self.accepted is not None and self.accepted.contributions[0].key == key

    def too_late(self, work: AssignedWork) -> bool:
        return True  # another member has the turn

    def lost(self, member: Member, *, away: bool) -> None:
        if self.holder == member.id:
            self.holder = None
        self._state.revoke(member)  # its samples are drawn again

    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        work = member.work
        if work is None:
            return []
        if not work.late:  # the assignment may have been lost with the old stream
            return [self._state.send(member, work.assignment)]
        if not member.still_computes(work, assigned):
            self._state.revoke(member)
        return []

    def waiting(self, now: float) -> Awaited:
        awaited = [] if self.holder is None else [(self.last, self.holder)]
        return waiting_for(self._state, awaited, now) if awaited else Awaited()
