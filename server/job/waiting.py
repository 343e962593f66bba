"""The members that the job waits for, in words for the log and the status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...proto.messages import Phase
from . import events as e
from . import progress
from .roster import Member, Name
from .state import JobState

REPORT_AFTER_S = 1.0  # a round that waits longer is reported, with the members it waits for
REPORT_EVERY_S = 10.0  # interval at which the same report is repeated
STALLED_SHOWN_S = 10.0  # seconds without progress from which a member's description has them


@dataclass(frozen=True, kw_only=True, slots=True)
class Awaited:
    """A condition that the job waits for."""

    ranks: tuple[int, ...] = ()
    subject: str = ""  # text without times, which is the same for repeated reports of one condition
    text: str = ""  # message for the log and the status; empty if the job waits for nothing
    usual: bool = False  # healthy jobs wait like this too, so no warning is logged
    for_others: bool = True  # True if the job waits for members; False if only this server is at work
    seconds: float | None = None  # of waiting so far; None for the time since `JobState.waiting_since`


def seconds_of(state: JobState, waiting: Awaited, now: float) -> float:
    """Return the seconds for which the job has waited for a condition."""
    since = now if state.waiting_since is None else state.waiting_since
    return now - since if waiting.seconds is None else waiting.seconds


def report(state: JobState, waiting: Awaited, now: float) -> list[e.Action]:
    """Report a condition that the job has waited for too long, unless it was reported lately."""
    waited = seconds_of(state, waiting, now)
    if not waiting.text or waited < (REPORT_AFTER_S if waiting.for_others else REPORT_EVERY_S):
        return []
    if state.reported is not None:
        subject, at = state.reported
        if subject == waiting.subject and now - at < REPORT_EVERY_S:
            return []
    state.reported = (waiting.subject, now)
    return [e.Report(ranks=waiting.ranks, seconds=waited, text=waiting.text, usual=waiting.usual)]


def describe_waiting(state: JobState, now: float) -> Awaited:
    """Return the condition that the job waits for before training, and after it. During training, its mode
    knows.
    """
    waited = state.waited(now)
    members = state.roster.members
    match state.phase:
        case Phase.EMPTY:
            if state.initializer is None:
                return _of("a first worker to upload the initial parameters", waited, usual=True)
            member = members.get(state.initializer[0])
            name = _named(member) if member else state.initializer[0]
            usual = member is not None and not member.suspended
            return _of(f"{name} to upload the initial parameters", waited, usual=usual)
        case Phase.GATHERING:
            have = state.roster.ready()
            needed = 1 if state.started_at is not None else state.rules.min_workers
            names = ", ".join(member.name for member in have) or "none"
            unready = [
                member for member in state.roster.by_rank() if not member.ready and not member.suspended
            ]
            loading = "".join(f"; {_named(member)} is loading" for member in unready)
            suspended = progress.name_suspended(state)
            gone = "".join(
                f"; {each.worker} is lost: {each.reason}"
                for each in state.lost[-1:]
                if each.worker not in members
            )
            usual = state.started_at is None and not suspended and not gone
            text = f"workers: have {len(have)} of {needed} ({names}){loading}{suspended}{gone}"
            return _of(text, waited, usual=usual)
        case Phase.FINISHING if state.evaluations.asked is not None:
            member = state.roster.members[state.evaluations.asked.by[0]]
            ranks, usual = (member.rank,), member.attached and not progress.hangs(state, member)
            return _of(f"{member.name} to evaluate the last version", waited, ranks, usual=usual)
        case Phase.FINISHING:
            names = ", ".join(member.name for member in state.roster.by_rank())
            return _of(f"{names} to return and evaluate the last version", waited)
        case _:
            return Awaited()


def waiting_for(state: JobState, members: Sequence[tuple[int, Name]], now: float) -> Awaited:
    """Return the condition that the next version waits for these members.

    Args:
        members: rank in the round, and worker and incarnation, of each awaited member.
    """
    ranks = tuple(rank for rank, _ in members)
    names = ", ".join(describe(state, name, rank, now) for rank, name in members)
    found = [state.roster.present(name) for _, name in members]
    # A first step takes longer than later ones, so waiting for it is no reason for a warning.
    usual = all(each is not None and each.attached and not each.pushes for each in found)
    doing = Counter(each.activity for each in found if each is not None and each.activity)
    if usual and len(members) > 1 and doing:  # at the front, because long log lines are cut at the end
        names = f"members that are {doing.most_common(1)[0][0]}: {names}"
    text = f"version {state.version + 1} has waited {state.waited(now)} for {names}"
    return Awaited(ranks=ranks, subject=f"{ranks}", text=text, usual=usual)


def describe_reunion(state: JobState, now: float) -> Awaited:
    """Return the condition that the job waits for members to return to a restarted server."""
    away = [member for member in state.roster.by_rank() if not member.listening]
    names = ", ".join(member.name for member in away)
    return _of(f"{names} to return", state.waited(now), tuple(member.rank for member in away))


def describe(state: JobState, name: Name, rank: int, now: float) -> str:
    """Return a text about an awaited member: its rank, worker, connection, activity, and when it was last
    heard.
    """
    member = state.roster.present(name)
    if member is None:
        return f"rank {rank} ({name[0]}, gone)"
    link = "connected" if member.attached else "disconnected"
    doing = f", {member.activity}" if member.activity else ""
    if member.stalled_s >= STALLED_SHOWN_S:
        doing += f", no progress for {member.stalled_s:.0f} s"
    # After a restart of the server `heard_at` is in the future: the lease begins later.
    heard = "not heard yet" if member.heard_at > now else f"heard {now - member.heard_at:.1f} s ago"
    return f"rank {rank} ({member.worker}, {link}, {heard}{doing})"


def _named(member: Member) -> str:
    return f"rank {member.rank} ({', '.join(filter(None, (member.worker, member.activity)))})"


def _of(subject: str, waited: str, ranks: tuple[int, ...] = (), *, usual: bool = False) -> Awaited:
    text = f"the job has waited {waited} for {subject}"
    return Awaited(ranks=ranks, subject=subject, text=text, usual=usual)
