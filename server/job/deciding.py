"""The outcome of a push: accepted, stale or redundant. `roster` has the states of the work that it answers.

Work that was taken from a lost member is *revoked*. If the member returns before another one has drawn the
samples, it gets the work back (`reinstate`); otherwise it keeps the gradient, and the samples count as
trained on (`reclaim`).
"""

from __future__ import annotations

from dataclasses import replace

from ...common.spec import parse_spec
from ...proto.messages import Decision, Outcome
from ...proto.refusal import Refused
from . import events as e
from . import refusals
from .modes.mode import Mode
from .roster import Member
from .state import JobState
from .work import AssignedWork, WorkLife

EMPTY_PUSHES = 10  # pushes without samples, in a row, after which a member is named


def decide(state: JobState, mode: Mode, member: Member, event: e.Pushed, now: float) -> e.Result[e.Decided]:
    """Decide the outcome of a committed push, or repeat it for a duplicate.

    Raises:
        Refused: the push is out of sequence, or its assignment does not allow it.
    """
    # 1. A duplicate of a decided push: repeat its outcome.
    known = member.outcomes.get(event.seq)
    if known is not None:
        waits = known.decision is Decision.ACCEPTED and mode.holds(event.key)
        drop: list[e.Action] = [] if waits else [e.Drop(key=event.key)]
        return e.Result(reply=e.Decided(outcome=known, repeated=True), actions=drop)
    # 2. An older push, whose outcome is forgotten. A gap is allowed: abandoned pushes leave gaps.
    if event.seq <= member.last_seq:
        raise Refused(refusals.sequence(member.worker, event.seq, member.last_seq + 1))
    work = member.work
    if work is None or work.id != event.assignment:
        # 3. A push for work that the member no longer has. Shared work is revoked only when another member
        # does it, so the push is redundant then, and stale otherwise.
        revoked = member.revoked is not None and member.revoked.id == event.assignment
        if revoked and event.samples:
            reclaim(state, member, event.assignment, event.batches or None)
        version = None
        redundant = not revoked and (mode.shares_samples or event.assignment in member.succeeded)
    else:
        # 4. A push for the member's work: the mode decides, unless it is too late.
        event = _check(state, mode, work, event)
        if work.late:
            end_late(state, mode, member, work, event.batches or len(work.batches))
            version = None
        else:
            state.roster.relieve(member)
            version = mode.take(member, work, event, now)
        redundant = version is None and work.assignment.stragglers > 0
    if version is None:
        state.stale_pushes += 1
        actions: list[e.Action] = [e.Drop(key=event.key)]
        refuse = refusals.redundant if redundant else refusals.stale
        why = refuse(member.worker, event.seq, event.assignment, state.version)
        outcome = Outcome(seq=event.seq, decision=Decision.REFUSED, refusal=why)
    else:
        state.accepted_pushes += 1
        member.pushes += 1
        actions = [*_note_push(state, member, event), *_compare_batches(state, member, event)]
        outcome = Outcome(seq=event.seq, decision=Decision.ACCEPTED, version=version)
    member.remember(outcome)
    return e.Result(reply=e.Decided(outcome=outcome), actions=actions)


def _check(state: JobState, mode: Mode, work: AssignedWork, event: e.Pushed) -> e.Pushed:
    """Return the push with no more batches than its work has. Raises Refused if it is not allowed."""
    if event.batches > len(work.batches):  # extended by an earlier server, whose machine lost power
        state.repeated_samples += max(0, event.samples - work.samples)
        event = replace(event, samples=min(event.samples, work.samples), batches=0)
    if event.samples > work.samples:
        raise Refused(refusals.samples(event.worker, event.seq, event.samples, work.samples))
    if event.base_version != work.assignment.version:
        got, expected = event.base_version, work.assignment.version
        raise Refused(refusals.base_version(event.worker, event.seq, got, expected))
    if event.samples and not work.late:
        if event.plan != state.plan and mode.pushes_parts:
            raise Refused(refusals.plan(event.worker, event.seq, event.plan, state.plan))
        mode.check_rates(event)
        mode.check_batches(work, event)
    return event


def end_late(state: JobState, mode: Mode, member: Member, work: AssignedWork, took: int) -> None:
    """End the late work of a member, which keeps the gradient of the first `took` batches."""
    if not work.shared:
        state.requeue_rest(work.drawn, work.batches, took, settled=True)
    state.roster.relieve(member)
    mode.freed(member)


def reinstate(state: JobState, mode: Mode, member: Member, assigned: int) -> None:
    """Give a returning member its revoked work back, unless another member has drawn its samples.

    Args:
        assigned: id of the last assignment that the member received.
    """
    revoked = member.revoked
    if revoked is None or member.work is not None or revoked.id != assigned:
        return
    late = mode.too_late(revoked)
    if not state.samples.take_back(revoked.drawn, settled=late):
        return
    if state.done:  # no further push would carry the gradient, which would stay in the member's residual
        state.samples.give_back(revoked.drawn, settled=True)
        return
    revoked.become(WorkLife.LATE if late else WorkLife.ASSIGNED)
    revoked.interrupted, member.revoked = True, None
    state.roster.assign(member, revoked)


def reclaim(state: JobState, member: Member, assignment: int, batches: int | None) -> None:
    """Settle the samples of a member's revoked work whose gradient it has, unless they were drawn again.

    The worker keeps the gradient, in its residual or for its script's next step. A later push sends it.

    Args:
        assignment: id of the work's assignment; other work is left alone.
        batches: number of its batches that the member has computed; None for all.
    """
    revoked = member.revoked
    if revoked is None or revoked.id != assignment:
        return
    member.revoked = None
    took = len(revoked.batches) if batches is None else batches
    if state.samples.take_back(revoked.drawn):
        state.requeue_rest(revoked.drawn, revoked.batches, took, settled=True)
    else:
        state.repeated_samples += sum(revoked.batches[:took])


def _note_push(state: JobState, member: Member, event: e.Pushed) -> list[e.Action]:
    """Return the lines of the log about an accepted push that says too little."""
    if event.samples:
        member.empty = 0
        if event.loss is not None or state.unlogged or not state.rules.script:
            return []
        state.unlogged = True
        text = (
            f"{member.name} does not know its training loss, so none is shown: its script can call "
            "job.log(loss=loss) before optimizer.step()"
        )
        return [e.Note(text=text)]
    member.empty += 1
    spec = parse_spec("compressor", member.compressor or state.rules.compressor)
    delay = spec.options.get("delay", "1")  # a push is empty as long as a compressor holds gradients back
    limit = EMPTY_PUSHES * (int(delay) if delay.isdecimal() else 1)
    return [_empty_handed(member)] if member.empty == limit else []


def _compare_batches(state: JobState, member: Member, event: e.Pushed) -> list[e.Action]:
    """Return a warning if another member trains on the same batches."""
    if not event.batch:
        return []
    other = state.same_batches.other(member.worker, event.batch, state.roster.members)
    if not other:
        return []
    text = (
        f"{member.name} and {state.roster.members[other].name} train on the same batches, so the job "
        "learns from the samples of one: give each rank samples of its own, by job.batches(dataset), by "
        "a DistributedSampler with rank=job.rank, or by a seed that depends on job.rank"
    )
    return [e.Note(text=text, warning=True)]


def empty_handed(*members: Member) -> list[e.Action]:
    """Return warnings that name the members none of whose pushes has contributed anything."""
    return [_empty_handed(member) for member in members if member.empty == member.pushes > 0]


def _empty_handed(member: Member) -> e.Note:
    text = (
        f"{member.name} contributes nothing: its last {member.empty} pushes had no gradient that counts; its "
        "own log says why"
    )
    return e.Note(text=text, warning=True)
