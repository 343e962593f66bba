"""The order of steps: the next actions of a job, after each event that may allow some."""

from __future__ import annotations

from ...proto.messages import Phase
from . import ending
from . import events as e
from .modes.mode import Mode
from .state import JobState


def advance(state: JobState, mode: Mode, now: float) -> list[e.Action]:
    """Take all steps that are possible now: assign work, apply complete rounds, change the phase."""
    return [*_train(state, mode, now), *paused(state, mode)]


def paused(state: JobState, mode: Mode) -> list[e.Action]:
    """Report a requested pause once no accepted push is left to apply and no round is open."""
    idle = state.phase is not Phase.RUNNING or mode.quiet
    return [e.Paused()] if state.closing and idle else []


def _train(state: JobState, mode: Mode, now: float) -> list[e.Action]:
    if not state.training:
        return ending.finish(state, mode, now) if state.phase is Phase.FINISHING else []
    started = state.started_at is not None
    state.check_limits(now)
    # 1. Training is complete: evaluate the last version.
    if started and mode.quiet and state.done:
        return ending.begin(state, mode, now)
    # 2. Too few members are ready: wait for more.
    if mode.quiet and state.roster.ready_members < (1 if started else state.rules.min_workers):
        _gather(state, now)
        return []
    # 3. Train.
    if state.phase is Phase.GATHERING:
        state.phase = Phase.RUNNING
        state.wait_from(now)
    if state.started_at is None:
        state.started_at = now
    state.reunion = state.apart
    actions = [*_adopt_plan(state, mode), *mode.advance(now)]
    if mode.quiet and state.done:  # the last round was dissolved
        return [*actions, *_train(state, mode, now)]
    if mode.quiet and not state.roster.ready_members:
        _gather(state, now)
    return actions


def _gather(state: JobState, now: float) -> None:
    """Wait for members."""
    if state.phase is Phase.RUNNING:
        state.phase = Phase.GATHERING
        state.wait_from(now)


def _adopt_plan(state: JobState, mode: Mode) -> list[e.Action]:
    """Put the prepared plan in force, unless accepted pushes of the old plan are still to be applied."""
    if not state.plan_due or not mode.quiet:
        return []
    state.plan, state.planned = state.plan + 1, False
    mode.plan_adopted()
    members: dict[str, int] = {}
    for member in state.roster.listening():
        if member.version is not None:
            members[member.worker], member.version = member.version, state.version
    return [
        e.Note(text=f"plan {state.plan} is in force from version {state.version}"),
        e.Adopt(plan=state.plan, version=state.version, members=members),
    ]
