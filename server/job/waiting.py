"""What the job waits for, in words: the log and the status name the members that hold it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...proto.messages import Phase
from . import progress
from .roster import Member, Name
from .state import JobState

STALLED_SHOWN_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Awaited:
    ranks: tuple[int, ...] = ()  # of the missing members
    subject: str = ""  # the same for repeated reports: without times
    text: str = ""  # for people; empty while nothing is awaited
    usual: bool = False  # healthy jobs wait for it too, while members start or end: no warning
    for_others: bool = True  # for members, and not for this server
    seconds: float | None = None  # None: since `JobState.waiting_since`


def describe_waiting(state: JobState, now: float) -> Awaited:
    """Return what the job waits for before and after the training; in between its mode knows."""
    since = state.waited(now)
    members = state.roster.members
    match state.phase:
        case Phase.EMPTY:
            if state.initializer is None:
                return _of("a first worker to bring the initial parameters", since, usual=True)
            member = members.get(state.initializer[0])
            who = _named(member) if member else state.initializer[0]
            usual = member is not None and not member.suspended
            return _of(f"{who} to upload the initial parameters", since, usual=usual)
        case Phase.GATHERING:
            have = state.roster.ready()
            needed = 1 if state.started_at is not None else state.rules.min_workers
            names = ", ".join(member.name for member in have) or "none"
            coming = [
                member for member in state.roster.by_rank() if not member.ready and not member.suspended
            ]
            loading = "".join(f"; {_named(member)} gets ready" for member in coming)
            suspended = progress.name_suspended(state)
            gone = "".join(
                f"; {each.worker} is lost: {each.reason}"
                for each in state.lost[-1:]
                if each.worker not in members
            )
            usual = state.started_at is None and not suspended and not gone
            text = f"workers: have {len(have)} of {needed} ({names}){loading}{suspended}{gone}"
            return _of(text, since, usual=usual)
        case Phase.FINISHING if state.evaluations.asked is not None:
            member = state.roster.members[state.evaluations.asked.by[0]]
            ranks, usual = (member.rank,), member.attached and not progress.hangs(state, member)
            return _of(f"{member.name} to evaluate the last version", since, ranks, usual=usual)
        case Phase.FINISHING:
            names = ", ".join(member.name for member in state.roster.by_rank())
            return _of(f"{names} to come back and evaluate the last version", since)
        case _:
            return Awaited()


def waiting_for(state: JobState, members: Sequence[tuple[int, Name]], now: float) -> Awaited:
    """Return that the next version waits for these members, given by rank and name."""
    ranks = tuple(rank for rank, _ in members)
    names = ", ".join(describe(state, name, rank, now) for rank, name in members)
    found = [state.roster.present(name) for _, name in members]
    # First steps take longer.
    usual = all(each is not None and each.attached and not each.pushes for each in found)
    doing = Counter(each.activity for each in found if each is not None and each.activity)
    if usual and len(members) > 1 and doing:  # in front, because a log line is cut to the members' names
        names = f"members that are {doing.most_common(1)[0][0]}: {names}"
    text = f"version {state.version + 1} waits {state.waited(now)} for {names}"
    return Awaited(ranks=ranks, subject=f"{ranks}", text=text, usual=usual)


def describe_reunion(state: JobState, now: float) -> Awaited:
    """Return that the job waits for members to return to a restarted server."""
    away = [member for member in state.roster.by_rank() if not member.listening]
    names = ", ".join(member.name for member in away)
    return _of(f"{names} to come back", state.waited(now), tuple(member.rank for member in away))


def describe(state: JobState, name: Name, rank: int, now: float) -> str:
    """Describe an awaited member and its connection. rank: in its round."""
    member = state.roster.present(name)
    if member is None:
        return f"rank {rank} ({name[0]}, gone)"
    link = "connected" if member.attached else "disconnected"
    doing = f", {member.activity}" if member.activity else ""
    if member.stalled_s >= STALLED_SHOWN_S:
        doing += f", no progress for {member.stalled_s:.0f} s"
    return f"rank {rank} ({member.worker}, {link}, heard {max(0.0, now - member.heard_at):.1f} s ago{doing})"


def _named(member: Member) -> str:
    return f"rank {member.rank} ({', '.join(filter(None, (member.worker, member.activity)))})"


def _of(subject: str, since: str, ranks: tuple[int, ...] = (), *, usual: bool = False) -> Awaited:
    return Awaited(ranks=ranks, subject=subject, text=f"waiting {since} for {subject}", usual=usual)
