"""Results of evaluations, and the end of a job: a member evaluates the last version, then all are told to
leave."""

from __future__ import annotations

from collections.abc import Sequence

from ...proto.messages import Assignment, EpochStatus, Evaluations, Phase
from ...proto.refusal import Refusal
from . import deciding, refusals
from . import events as e
from .best_policy import parse_keep
from .modes.mode import Mode
from .roster import Member
from .state import JobState


def begin(state: JobState, mode: Mode, now: float) -> list[e.Action]:
    """End the training, and have the last version evaluated."""
    state.phase = Phase.FINISHING
    state.last_evaluation = max(state.evaluations_passed, state.evaluations.latest + 1)
    state.wait_from(now)
    why: list[e.Action] = [e.Note(text=f"the job ends: {state.stopped}")] if state.stopped else []
    why += deciding.empty_handed(*state.roster.by_rank())
    return [*why, *finish(state, mode, now), *release(state, mode, state.roster.listening())]


def finish(state: JobState, mode: Mode, now: float) -> list[e.Action]:
    """Ask a member to evaluate the last version, then tell all members to leave.

    Called again whenever a member returns or is lost; telling a member twice is harmless. Members stay until
    the evaluation has arrived, so that another one can evaluate if the first is lost.
    """
    if state.phase is Phase.FINISHED:
        return [_last(state, mode, member, finished=True) for member in state.roster.listening()]
    if state.phase is not Phase.FINISHING:
        return []
    if all(member.suspended for member in state.roster.members.values()):
        state.phase = Phase.FINISHED
        # Scripts that leave without an evaluation do not want one.
        lost = any(each.version == state.version for each in state.lost)
        text = "no member is left to evaluate the last version"
        return [e.Note(text=text, warning=lost), e.Finish()]
    # A member that still computes a late push would keep all others waiting.
    idle_first = sorted(state.roster.listening(), key=lambda member: member.work is not None)
    return [
        _last(state, mode, member, evaluate=state.last_evaluation)
        for member in idle_first
        if state.ask_for_evaluation(member, state.last_evaluation, state.assignments + 1, now)
    ]


def release(state: JobState, mode: Mode, members: Sequence[Member]) -> list[e.Action]:
    """Tell scripts that training is over, except the one that evaluates: their loops over batches end,
    and do not wait for the evaluation, which may wait for another job of the same scripts."""
    if state.phase is not Phase.FINISHING or not state.rules.script:
        return []
    return [
        _last(state, mode, member)
        for member in members
        if member.listening and not state.evaluations.is_by(member.id)
    ]


def _last(
    state: JobState, mode: Mode, member: Member, *, evaluate: int = 0, finished: bool = False
) -> e.Assign:
    assignment = Assignment(
        id=0,
        version=state.version,
        epoch=state.epoch,
        progress=state.samples.progress,
        evaluate_epoch=evaluate,
        finished=finished,
        trained=True,
        evaluations=state.evaluations.newest,
        **mode.terms,
    )
    return state.assign(member, assignment)


def over(state: JobState, worker: str) -> Refusal:
    """Return the refusal of a worker that comes after the end."""
    return refusals.finished(worker, state.stopped or f"all of its {state.rules.epochs} epochs are done")


def evaluated(state: JobState, member: Member, event: e.EvaluationReported) -> tuple[list[e.Action], bool]:
    """Record a member's evaluation, and finish the job if it is that of the last version.

    Returns:
        The actions that follow, and False if the evaluation was not asked for.
    """
    keep = parse_keep(state.rules.keep)
    started_at = state.started_at or 0.0
    if not state.evaluations.report(member.id, event.epoch, event.version, event.metrics, started_at, keep):
        text = f"evaluation {event.epoch} by {member.name} was not asked for and is ignored"
        return [e.Note(text=text, warning=True)], False
    found = ", ".join(f"{name} {value:.4f}" for name, value in sorted(event.metrics.items()))
    label = f"evaluation {event.epoch}"
    if state.rules.evaluate_every == "1epoch" and not state.stopped:  # the number is that of complete epochs
        label = f"after {event.epoch} epoch{'s' if event.epoch != 1 else ''}"
    text = f"{label}, version {event.version}: {found or 'no metric was logged'} (by {member.name})"
    actions = [e.Note(text=text), *_keep_best(state, event)]
    if state.rules.script:
        results = [each for each in state.evaluations.done if each.epoch == event.epoch]
        actions.append(e.TellEvaluations(evaluations=told(state, results)))
    if state.phase is Phase.FINISHING and event.epoch == state.last_evaluation:
        state.phase = Phase.FINISHED
    return actions, True


def told(state: JobState, results: Sequence[EpochStatus]) -> Evaluations:
    """Return the message to scripts with these results."""
    return Evaluations(results=tuple(results), best=dict(state.evaluations.best))


def _keep_best(state: JobState, event: e.EvaluationReported) -> list[e.Action]:
    keep = parse_keep(state.rules.keep)
    if keep is None:
        return []
    value = event.metrics.get(keep.metric)
    if value is None:
        names = ", ".join(sorted(event.metrics)) or "none"
        text = f"--keep {state.rules.keep}: no metric {keep.metric!r} in the evaluation, which has: {names}"
        return [e.Note(text=text, warning=True)]
    if not keep.better(value, state.best):
        return []
    state.best = value
    return [e.Best(epoch=event.epoch, version=event.version)]
