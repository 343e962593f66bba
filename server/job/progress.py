"""Members whose training threads make no progress: when they are named, and when they are set aside.

Heartbeats come from another thread than the one that trains, so a lease says nothing of that. A member that
hangs loses its work like one whose lease is over, and its stream is cut off. Its worker reconnects, and says
that it is ready when its thread goes on; until then nobody waits for it. What it pushes then is stale, so
that its ledger puts it back, and how long it took is the measure for others.
"""

from __future__ import annotations

from ...progress import limit_s
from . import events as e
from .roster import Member
from .state import JobState

NAMED_AFTER = 0.5  # of the limit


def heard(state: JobState, member: Member, activity: str, still_s: float) -> list[e.Action]:
    """A heartbeat says what a member does, and for how long without progress."""
    actions: list[e.Action] = []
    if still_s < member.still_s:
        state.went_on(member)
    if still_s < member.named_s and not member.aside:
        member.named_s = 0.0
        actions.append(e.Note(text=f"{member.name} makes progress again"))
    member.activity, member.still_s, member.first = activity, still_s, not member.pushes
    return actions


def limit_of(state: JobState, member: Member) -> float:
    """Seconds without progress after which the member is set aside."""
    longest_s = state.longest_still_s.get(member.activity, 0.0)
    return limit_s(state.rules.progress_seconds, longest_s, first=not member.pushes)


def hangs(state: JobState, member: Member) -> bool:
    """Whether it is of no use to wait for it."""
    return member.aside or member.still_s > limit_of(state, member)


def name_slow(state: JobState) -> list[e.Action]:
    """Lines about members that may soon be set aside."""
    actions: list[e.Action] = []
    for member in state.roster.by_rank():
        limit = limit_of(state, member)
        if not member.named_s and member.still_s > NAMED_AFTER * limit:
            member.named_s = member.still_s
            actions.append(
                e.Note(text=f"{member.name} {describe(member)}; limit {limit:.0f} s", warning=True)
            )
    return actions


def to_set_aside(state: JobState) -> list[Member]:
    """Members that hang while others wait for them, in rank order."""
    return [
        member
        for member in state.roster.by_rank()
        if not member.aside and hangs(state, member) and (member.ready or _replaceable(state, member))
    ]


def _replaceable(state: JobState, member: Member) -> bool:
    """Whether it was asked for the initial parameters, and another one can bring them."""
    return state.initializer == member.id and state.version == 0 and bool(state.roster.listening())


def describe(member: Member) -> str:
    doing = f" ({member.activity})" if member.activity else ""
    return f"has made no progress for {member.still_s:.0f} s{doing}"


def aside(state: JobState) -> str:
    """Names of the members that are set aside, for what is waited for; empty if there are none."""
    names = ", ".join(member.name for member in state.roster.by_rank() if member.aside)
    return f"; set aside, because their training threads hang: {names}" if names else ""
