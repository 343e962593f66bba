"""Rounds: the mode `sync`, and the base of `local` (`local_rounds`). Work that is assigned together is
applied together.

A round opens with the ready members that are idle; each gets a share of the next samples. The classes in
`division` decide which samples, and when enough pushes have arrived: all members have pushed or are lost, or
all but `backup`, or the number that a straggler code needs. The shard sums contributions in rank order. A
worker that joins meanwhile takes part from the next round, unless it fills a lost member's slot. The head of
`round` has the states of a round and of its slots. Work that is not late has a slot in the open round. When
the round closes, the work of slots without a push becomes late.

A push that arrives too late:

    stale     | the round closed without it: the worker puts the gradient back into its residual and takes
              | part again in the next round. Until then it counts as one of the missing that `backup` allows
    redundant | other members have pushed the same gradient (a straggler code), or another member has the
              | slot: the worker forgets the gradient

With `--overlap both` parts of the next version exist before the round closes, so only a member that has the
round's version can take a lost member's slot. The substitute computes the same samples, pushes the parts that
are not final (`Assignment.parts`) and contributes under the lost member's rank. If it is lost too, another
substitute takes over. If no member has the version, the round closes without those parts. A member that
returns after its slot was reassigned has its push refused as redundant, with the list of its parts that count
(`Outcome.counted`). Its ledger undoes the other parts. So each part contains each sample once.

A worker that computes or loads ahead is told the samples that it will get in the next round if nothing
changes (`_following`). These are not drawn yet. So a worker is told none at the end of an epoch, after
samples were requeued, or for a substitute.

A round of which no push is left, because the epoch has no further batches (`slots.extend`), is dissolved,
without a version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ....common.stored import DERIVED
from ....proto.messages import Range
from ....proto.refusal import Refused
from .. import events as e
from .. import refusals
from ..roster import Member
from ..state import JobState
from ..waiting import Awaited, waiting_for
from ..work import AssignedWork
from . import slots
from .division import Division, SampleShare, Sharing, divide, divide_batches
from .mode import Mode
from .round import Round, RoundLife, Slot

ToShard = e.MemberLost | e.Substitute | e.Exclude


@dataclass
class Rounds(Mode):
    """The mode `sync`: a member takes one step in a round.

    Attributes:
        in_parts: True if the shard may step a part as soon as every member has pushed it.
    """

    _state: JobState = field(metadata=DERIVED)
    sharing: Sharing = field(default=Sharing(), metadata=DERIVED)  # how members share the samples of a round
    in_parts: bool = field(default=False, metadata=DERIVED)
    begins_early: bool = field(default=False, metadata=DERIVED)  # the next round, before this version
    round: Round | None = None
    _next_steps: int = 0  # of the next round, where workers are told before it opens; else 0
    _told: list[ToShard] = field(default_factory=list[ToShard])  # leave with the next actions
    _note: str = ""  # the last log line about the division of rounds
    _warned_of_rates: bool = False  # True once the log has named members whose local steps have unequal rates

    takes_local_steps: ClassVar[bool] = False  # a member takes several steps, at the learning rate of the job

    @property
    def quiet(self) -> bool:
        return self.round is None and not self._told

    @property
    def shares_samples(self) -> bool:
        return self.sharing.redundancy > 1 or self.sharing.stragglers > 0

    def advance(self, now: float) -> list[e.Action]:
        extended = slots.extend(self._state, self.sharing, self.round, now) if self.round is not None else []
        if self.round is not None and self.round.empty and self.round.life is RoundLife.OPEN:
            slots.settle(self._state, self.round)
            self.round = None
        told, self._told = self._told, []
        return [*told, *extended, *self._open_or_fill(now), *self._close(now)]

    # ---- assigning work

    def _open_or_fill(self, now: float) -> list[e.Action]:
        """Fill lost slots of the open round, or open the next round."""
        state = self._state
        if self.round is not None and not self.round.vacant:
            return []
        ready = state.roster.ready()
        idle = [member for member in ready if member.work is None]
        if self.round is not None:
            return slots.fill(state, self.round, idle, now)
        if not idle or not state.may_step():
            return []
        # Divide the next samples among the idle members.
        steps, at_once = self._next_steps or self._steps(), state.accumulation.batches
        late = len(ready) - len(idle)
        drawing = self.sharing, state.samples, state.rules.batch_size, steps, len(idle), late
        if state.rules.script:  # its schedulers count the steps of its own member
            local, in_parts = self.takes_local_steps, self.in_parts
            division = divide_batches(*drawing, times=at_once, local=local, in_parts=in_parts)
        else:
            division = divide(*drawing, in_parts=self.in_parts)
        if division is None:
            return []
        planned = self._planned(division)
        progress = state.samples.progress
        count = sum(drawn.count for drawn, _ in division.portions())
        middle = progress + count / 2 / state.samples.per_epoch
        factor = state.rate_factor(middle, self.steps + planned / 2)
        self.round = round_ = Round(
            version=state.version,
            opened_at=now,
            progress=progress,
            rate_factor=factor,
            evaluations=state.evaluations.newest,
            local_rates=self._local_rates(count, planned, progress, factor),
            division=division,
            parts=self.in_parts,
            steps=planned,
            local_steps=self.steps if self.takes_local_steps else None,
            total_steps=self._total_steps(division, planned, steps),
        )
        self._opened(steps)
        # Find the samples of the round after this one, for members that compute or load ahead.
        self._next_steps = self._steps() if self.begins_early else 0
        following: list[tuple[Range, ...]] = []
        if (self.in_parts or self.begins_early) and not late and at_once == 1:
            each = state.rules.batch_size * (self._next_steps or steps)
            following = slots.following(state, round_, each, len(idle))
        actions: list[e.Action] = []
        for number, (member, part) in enumerate(zip(idle, division.parts, strict=False)):
            due = state.evaluation_due
            evaluate = number == 0 and state.ask_for_evaluation(member, due, state.assignments + 1, now)
            due = due if evaluate else 0
            expected = following[number] if number < len(following) else ()
            actions += slots.assign(
                state, round_, number, member, part, now, evaluate_epoch=due, next=expected
            )
        if state.version == 0 and (why := state.why_warmup_is_long(round_.total_steps)):
            actions.append(e.Note(text=why, warning=True))
        if division.note and division.note != self._note:
            self._note = division.note
            actions.append(e.Note(text=division.note))
        # The assignments precede `Open`, so members get this version before parts of the next one.
        if round_.parts:
            at_server = self._server_factor(round_)
            actions.append(e.Open(version=round_.version + 1, members=round_.members, rate_factor=at_server))
        state.wait_from(now)
        return actions

    def _total_steps(self, division: Division, planned: int, steps: int) -> int:
        """Return the number of steps of the whole job (`JobState.total_steps`).

        Args:
            division: division of the round that opens, which has drawn its samples.
            planned: number of steps in this round, which the end of an epoch may have cut.
        """
        state = self._state
        members = len(state.roster.members)  # those that are loading, late or away share later steps, too
        each_once = len([*division.portions()]) / len(division.parts)  # less where members share samples
        at_once = max(1, round(members * each_once)) * state.rules.batch_size
        return state.total_steps(self.steps + planned, at_once, of_version=steps)

    # Differences of local steps.

    def _steps(self) -> int:
        """Return the number of steps of a member in the next round."""
        return 1

    def _planned(self, division: Division) -> int:
        """Return the number of steps of the member with the most samples in a round."""
        return 1

    def _opened(self, steps: int) -> None:
        """Called when a round of that number of steps has opened."""

    def _local_rates(self, count: int, steps: int, progress: float, factor: float) -> tuple[float, ...]:
        """Return the learning rate of each local step; nothing if all are the same, or a script chooses
        them."""
        return ()

    def _server_factor(self, round_: Round) -> float:
        """Return the factor of the learning rate of the server's step."""
        return round_.rate_factor

    def _weights(self, round_: Round) -> Mapping[int, float] | None:
        """Return the weight of each slot's push in the sum; None for their samples."""
        return round_.division.weights(round_.answered)

    def _closed(self, round_: Round, now: float) -> None:
        """Called when a round closes, before its samples are settled."""

    def apply_started(self, version: int, *, whole: bool) -> None:
        if self.round is not None and self.round.version == version - 1:
            self.round.begun = True
            self.round.unfilled |= whole

    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        state, work, round_ = self._state, member.work, self.round
        if work is None:
            return []
        if not work.late:
            assert round_ is not None
            if work.shared or round_.parts:
                self._reopen(round_, round_.slot_of[work.id])
            if member.version is not None and member.version > round_.version:
                return []  # it has all of the next version, so it has pushed all parts
            # The assignment may have been lost with the old stream, so it is sent again.
            assignment = work.assignment
            state.ask_for_evaluation(member, assignment.evaluate_epoch, assignment.id, now)
            return [state.send(member, assignment)]
        if not member.still_computes(work, assigned):
            self._state.revoke(
                member, requeue=not work.shared
            )  # the assignment never arrived, so no push will answer it
        return []

    def _reopen(self, round_: Round, number: int) -> None:
        """Return a slot to its member, which was lost and is back."""
        if round_.parts and number in round_.lost:
            slot = round_.slots[number]
            self._told.append(slots.substitute(slot.work, slot))
        round_.reopen(number)

    # ---- further batches

    def more(self, member: Member, work: AssignedWork, event: e.MoreWanted) -> list[e.Action]:
        round_ = self.round
        assert round_ is not None
        if (why := self._fixed(round_)) and self._state.samples.has_more_of(work.drawn.epoch):
            took, given = event.batches + event.wanted, self._state.accumulation.batches
            raise Refused(refusals.undeclared_accumulation(member.worker, took, given, why))
        work.asked, work.stepped = event.wanted, event.steps
        return []

    def check_batches(self, work: AssignedWork, event: e.Pushed) -> None:
        took, round_ = event.batches or len(work.batches), self.round
        if round_ is not None and took < len(work.batches) and (why := self._fixed(round_)):
            given = self._state.accumulation.batches
            raise Refused(refusals.undeclared_accumulation(event.worker, took, given, why))

    def _fixed(self, round_: Round) -> str:
        """Return the option because of which the samples of a round are fixed when it opens; empty if they
        are not."""
        if round_.parts:
            return "--overlap both"
        return f"redundancy={self.sharing.redundancy}" if self.shares_samples else ""

    # ---- taking pushes

    def take(self, member: Member, work: AssignedWork, event: e.Pushed, now: float) -> int | None:
        round_ = self.round
        assert round_ is not None
        number = round_.slot_of[work.id]
        if round_.parts:
            self._reopen(round_, number)
            if not event.samples:
                self._told.append(e.Exclude(assignments=(work.id,)))
        part = self._covered(round_, number, work, event)
        contribution = e.Contribution(
            key=event.key,
            rank=round_.slots[number].rank,
            samples=event.samples,
            loss=event.loss,
            slice=part.slice,
        )
        round_.answer(number, contribution)
        if event.local_rates and event.samples:
            round_.local_rates_of[number] = event.local_rates
        if self.takes_local_steps:
            round_.computing[number] = event.computing_s, event.samples
        return round_.version + 1

    def _covered(self, round_: Round, number: int, work: AssignedWork, event: e.Pushed) -> SampleShare:
        """Return the share that a push stands for, after requeuing batches that its optimizer steps have not
        taken."""
        part = round_.division.parts[number]
        took, given = event.batches or len(work.batches), len(work.batches)
        steps = min(event.steps, took) if self.takes_local_steps else 1
        round_.stepped[number] = steps
        if event.samples and steps and not work.assignment.exhausted:
            round_.took = max(round_.took, (took // steps, -(-given // steps)))
        if took >= given or self._fixed(round_):
            return part
        drawn = self._state.requeue_rest(part.drawn, work.batches, took)
        covered = replace(part, drawn=drawn, samples=drawn.count, batches=work.batches[:took])
        round_.division = round_.division.with_part(number, covered)
        return covered

    def check_rates(self, event: e.RatesReceived | e.Pushed) -> None:
        round_, rates = self.round, event.learning_rates
        assert round_ is not None
        if rates and (self.takes_local_steps or not self._state.rules.script):
            raise Refused(refusals.rates_of_workers(event.worker, event.seq))
        if isinstance(event, e.RatesReceived) and not round_.parts:
            return
        round_.check_rates(event.worker, event.seq, rates)

    def holds(self, key: e.PushKey) -> bool:
        if self.round is None or self.round.life is not RoundLife.OPEN:
            return False
        return any(each.key == key for each in self.round.contributions.values())

    def too_late(self, work: AssignedWork) -> bool:
        return True  # its round has closed

    def lost(self, member: Member, *, away: bool) -> None:
        round_, work = self.round, member.work
        if work is None:
            return
        if work.late:
            self._state.revoke(member, requeue=not work.shared)
            return
        assert round_ is not None
        round_.lose(round_.slot_of[work.id])
        if round_.parts:
            self._told.append(e.MemberLost(assignments=(work.id,)))
        if self._state.roster.get(member.id) is None:  # another incarnation has replaced it
            self._state.roster.relieve(member)
        if not round_.contributions and not round_.open and not round_.ended and not round_.begun:
            # All members are lost before any has pushed: the round is undone and its samples go out again.
            self.round = None
            if round_.parts:
                self._told.append(e.Exclude(assignments=tuple(slot.work for slot in round_.slots)))
            for portion in round_.division.portions():
                slots.give_back(self._state, round_, *portion)

    # ---- closing

    def drain(self, now: float) -> list[e.Action]:
        """Close the open round without the pushes that are missing, because the server stops.

        Returns:
            The orders that apply the accepted pushes. Empty if there are none, or if they are useless without
                the missing ones, as in rounds whose members share samples.
        """
        round_ = self.round
        if round_ is None or round_.life is not RoundLife.OPEN or self.shares_samples:
            return []
        if not any(each.samples for each in round_.contributions.values()):
            return []
        missing = tuple(slot.work for slot in round_.missing)
        for number in list(round_.open):
            round_.lose(number)
        round_.unfilled = True
        told: list[e.Action] = [e.Exclude(assignments=missing)] if round_.parts and missing else []
        return [*told, *self._close(now)]

    def _close(self, now: float) -> list[e.Action]:
        round_ = self.round
        if round_ is None or round_.life is not RoundLife.OPEN or not round_.complete:
            return []
        round_.close()
        weights = self._weights(round_)
        in_rank_order = [
            each if weights is None else replace(each, weight=weights.get(number, 0.0))
            for number, each in sorted(round_.contributions.items())
        ]
        self._state.wait_from(now)
        self._closed(round_, now)
        slots.settle(self._state, round_)
        members = [
            member
            for member in self._state.roster.listening()
            if member.work is None and member.version == round_.version
        ]
        for member in members:
            member.version = round_.version + 1
        return [
            *self._name_unequal_rates(round_),
            e.Apply(
                version=round_.version + 1,
                contributions=tuple(in_rank_order),
                members=tuple(member.worker for member in members),
                rate_factor=self._server_factor(round_),
                opened_at=round_.opened_at,
            ),
        ]

    def _name_unequal_rates(self, round_: Round) -> list[e.Action]:
        """Warn, once in a job, of scripts whose local steps have unequal learning rates: the server averages
        their changes, and cannot see which of the rates is meant."""
        if self._warned_of_rates or not (text := round_.unequal_local_rates):
            return []
        self._warned_of_rates = True
        return [e.Note(text=text, warning=True)]

    def done(self, event: e.Published | e.SnapshotInstalled) -> None:
        round_ = self.round
        assert round_ is not None
        assert event.version == round_.version + 1
        assert round_.life is RoundLife.CLOSED
        self.round = None
        self._state.version = event.version

    def waiting(self, now: float) -> Awaited:
        state, round_ = self._state, self.round
        if round_ is None:  # the next round opens when a member has finished its late work
            missing = [(member.rank, member.id) for member in state.roster.ready() if member.work is not None]
        else:
            slots = [] if round_.complete else round_.missing
            computing = [slot for slot in slots if not self._asks(slot)]
            missing = sorted((slot.rank, slot.member) for slot in computing or slots)
        if missing:
            return waiting_for(state, missing, now)
        if round_ is None:
            return Awaited()
        text = f"version {state.version + 1} is being computed ({state.waited(now)} so far)"
        return Awaited(subject="computed", text=text, for_others=False)

    def _asks(self, slot: Slot) -> bool:
        """Return True if the member of a slot waits for further batches."""
        holder = slots.holder(self._state, slot)
        return holder is not None and holder.work is not None and holder.work.asked > 0
