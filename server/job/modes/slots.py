"""The slots of a round: their assignments, substitutes for lost members, further batches, and their samples
when the round closes.

Scripts that accumulate gradients (`accumulation`) may ask for further batches. Which samples they get must
not depend on the order in which they ask: work is extended once every open slot has asked, in rank order
(`extend`). If the epoch has none left, those that have taken local steps push them, and the work of the
others ends without a push.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....proto.messages import Range
from .. import events as e
from ..roster import Member
from ..samples import Drawn
from ..state import JobState
from ..work import AssignedWork, WorkLife
from .division import SampleShare, Sharing, divide_batches
from .round import Round, RoundLife, Slot


def holder(state: JobState, slot: Slot) -> Member | None:
    """Return the member of a slot, if it still has the work for it; None otherwise."""
    member = state.roster.get(slot.member)
    if member is None or member.work is None or member.work.id != slot.work:
        return None
    return member


def assign(
    state: JobState, round_: Round, number: int, member: Member, part: SampleShare, now: float, **terms: Any
) -> list[e.Action]:
    """Assign slot `number` of a round to a member. `terms` are more fields of its assignment."""
    at_once = state.accumulation.batches
    if len(part.batches) > 1 or at_once > 1:
        terms |= {"batches": part.batches, "accumulate": at_once}
    if at_once > 1:
        terms["steps"] = 1 if round_.local_steps is None else part.steps(at_once)
    actions = state.assign_samples(
        member,
        part.drawn,
        now,
        counted=part.samples,
        position=part.position,
        world=part.world,
        progress=round_.progress,
        total_steps=round_.total_steps,
        learning_rate=state.rules.learning_rate * round_.rate_factor,
        local_rates=round_.local_rates,
        evaluations=round_.evaluations,
        local_steps=round_.local_steps or 0,
        slice=part.slice,
        slices=part.slices,
        stragglers=part.stragglers,
        **terms,
    )
    round_.fill(number, member.rank, member.id, state.assignments)
    return actions


def fill(state: JobState, round_: Round, idle: Sequence[Member], now: float) -> list[e.Action]:
    """Assign the slots of lost members that the round needs to idle members."""
    actions: list[e.Action] = []
    # Once parts are stepped, the round's version cannot be sent to another member, so a substitute must
    # have it. If no ready member has it, the round closes without the lost members' parts.
    if round_.parts:
        ready = state.roster.ready()
        have = [each for each in ready if each.version == round_.version]
        if not have and not round_.open:
            left = tuple(round_.slots[each].work for each in round_.vacant)
            round_.unfilled = True
            return [e.Exclude(assignments=left)]
        idle = [member for member in have if member.work is None and member.listening]
    for number, member in zip(sorted(round_.vacant), idle, strict=False):
        slot = round_.slots[number]
        before = holder(state, slot)
        if before is not None:
            state.roster.relieve(before)
            before.succeed(slot.work)
        lost = f"rank {slot.rank} ({slot.member[0]}) is lost"
        text = f"{lost}: {member.name} computes its part of version {round_.version + 1}"
        actions.append(e.Note(text=text))
        rank = slot.rank
        assigned = assign(state, round_, number, member, round_.division.parts[number], now)
        round_.slots[number].rank = rank  # contributions are summed in the order of the slots
        if round_.parts:
            actions.append(substitute(slot.work, round_.slots[number]))
        actions += assigned
    return actions


def substitute(lost: int, slot: Slot) -> e.Substitute:
    worker, incarnation = slot.member
    return e.Substitute(lost=lost, assignment=slot.work, worker=worker, incarnation=incarnation)


def following(state: JobState, round_: Round, each: int, members: int) -> list[tuple[Range, ...]]:
    """Return the samples of each slot in the next round, if the same members are idle then.

    Returns:
        Nothing at the end of an epoch, because a member evaluates before the next one.
    """
    drawn = state.samples.peek(each * members)
    if not state.may_step(ahead=1):
        return []
    if drawn is None or drawn.epoch != round_.division.parts[0].drawn.epoch:
        return []
    return [part.ranges for part in drawn.divided(members, state.samples.least)]


def extend(state: JobState, sharing: Sharing, round_: Round, now: float) -> list[e.Action]:
    """Give members further batches, or end their work, once no member of the round computes."""
    if round_.life is not RoundLife.OPEN:
        return []
    asking: list[tuple[int, Member, AssignedWork]] = []
    for number in sorted(round_.open):
        member = holder(state, round_.slots[number])
        if member is None or member.work is None or not member.work.asked:
            return []
        asking.append((number, member, member.work))
    if not asking:
        return []
    state.wait_from(now)
    excluded: list[e.Action] = []
    actions: list[e.Action] = []
    if not state.samples.has_more_of(asking[0][2].drawn.epoch):
        for number, member, work in asking:
            answer = state.exhaust(member, work)
            if not work.stepped:  # otherwise it pushes the local steps that it has taken
                if round_.parts:
                    excluded.append(e.Exclude(assignments=(work.id,)))
                state.roster.relieve(member)
                round_.end(number)
            actions += answer
        return [*excluded, *actions]
    wanted = max(work.asked for _, _, work in asking)
    local = round_.local_steps is not None
    steps, times = (wanted, 1) if local else (1, wanted)
    drawing = sharing, state.samples, state.rules.batch_size, steps, len(asking), 0
    more = divide_batches(*drawing, times=times, local=local)
    assert more is not None
    for (number, member, work), part in zip(asking, more.parts, strict=False):
        round_.division = round_.division.with_part(number, round_.division.parts[number].with_more(part))
        terms: dict[str, Any] = {"steps": work.assignment.steps or round_.steps}
        actions += state.extend(member, work, part.drawn, part.batches, **terms)
    return actions


def settle(state: JobState, round_: Round) -> None:
    """Settle or requeue the samples of a round that has closed."""
    for drawn, numbers in round_.division.portions():
        # 1. Every slot of these samples is lost without a contribution: requeue them. Once the shard has
        # started to step, a part may contain a lost member's gradient, so they must not be drawn again.
        answered = round_.begun or any(number in round_.contributions for number in numbers)
        if not answered and all(number in round_.lost for number in numbers):
            give_back(state, round_, drawn, numbers)
            continue
        # 2. All other samples are settled: a contribution has their gradient, or a late member keeps it
        # in its residual.
        state.samples.settle(drawn)
        for number in numbers:
            member = holder(state, round_.slots[number])
            if member is None or member.work is None:
                continue
            if number in round_.lost or member.work.asked:  # who asks gets other work as the answer
                state.roster.relieve(member)
            else:
                member.work.become(WorkLife.LATE)
    if round_.took != (0, 0):
        state.accumulation.learn(*round_.took)


def give_back(state: JobState, round_: Round, drawn: Drawn, numbers: Sequence[int]) -> None:
    """Requeue samples without any contribution, and revoke their work."""
    state.samples.give_back(drawn)
    for number in numbers:
        member = holder(state, round_.slots[number])
        if member is not None:
            state.revoke(member, requeue=False)
