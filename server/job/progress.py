"""Members whose training threads make no progress: when the log names them, and when they are suspended.

Heartbeats are sent by another thread than the one that trains, so a lease does not reveal a hang. The server
revokes a hanging member's work, as if its lease had expired, and closes its stream. The worker reconnects,
and is ready again once its training thread makes progress. No round waits for it until then. Its next push is
stale, so its ledger puts the gradient back. The time that it took counts for the limit of the other members.
"""

from __future__ import annotations

from ...common.liveness import limit_s
from ...proto.messages import Phase
from . import events as e
from .roster import Member
from .state import JobState

NAMED_AFTER = 0.5  # fraction of the limit after which the log names a member


def note_activity(state: JobState, member: Member, activity: str, stalled_s: float) -> list[e.Action]:
    """Record a heartbeat that tells a member's activity and the time without progress.

    Returns:
        A log line if a member that the log has named makes progress again.
    """
    actions: list[e.Action] = []
    if stalled_s < member.stalled_s:
        state.note_stall(member)
    if stalled_s < member.named_s and not member.suspended:
        member.named_s = 0.0
        actions.append(e.Note(text=f"{member.name} makes progress again"))
    member.activity, member.stalled_s, member.first = activity, stalled_s, not member.pushes
    return actions


def limit_of(state: JobState, member: Member) -> float:
    """Return the seconds without progress after which the member is suspended."""
    longest_s = state.longest_stalled_s.get(member.activity, 0.0)
    return limit_s(state.rules.progress_seconds, longest_s, first=not member.pushes)


def hangs(state: JobState, member: Member) -> bool:
    """Return True if the member is suspended, or has made no progress for longer than its limit."""
    return member.suspended or member.stalled_s > limit_of(state, member)


def name_slow(state: JobState) -> list[e.Action]:
    """Return log lines that name members which may soon be suspended. Each member is named once per stall."""
    actions: list[e.Action] = []
    for member in state.roster.by_rank():
        limit = limit_of(state, member)
        if not member.named_s and member.stalled_s > NAMED_AFTER * limit:
            member.named_s = member.stalled_s
            actions.append(
                e.Note(text=f"{member.name} {describe(member)}; limit {limit:.0f} s", warning=True)
            )
    return actions


def to_suspend(state: JobState) -> list[Member]:
    """Return the members to suspend, in rank order: they hang, and the job waits for them."""
    ending = state.phase is Phase.FINISHING  # which waits for any member to evaluate the last version
    return [
        member
        for member in state.roster.by_rank()
        if not member.suspended
        and hangs(state, member)
        and (member.ready or ending or _replaceable(state, member))
    ]


def _replaceable(state: JobState, member: Member) -> bool:
    """Return True if another member can upload the initial parameters that this one was asked for."""
    return state.initializer == member.id and state.version == 0 and bool(state.roster.listening())


def describe(member: Member) -> str:
    """Return a clause that tells how long the member has made no progress, and its activity."""
    doing = f" ({member.activity})" if member.activity else ""
    return f"has made no progress for {member.stalled_s:.0f} s{doing}"


def name_suspended(state: JobState) -> str:
    """Return a clause that names the suspended members; empty if there are none."""
    names = ", ".join(member.name for member in state.roster.by_rank() if member.suspended)
    return f"; suspended because their training threads hang: {names}" if names else ""
