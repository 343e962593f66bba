"""Whom or what the job waits for, in words. Nothing waits without saying on whom."""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.messages import Phase
from .state import JobState


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """ranks: who is missing. subject: what it is about, without times, to tell news from repetition.

    text: the whole story; empty while nothing is outstanding.
    for_others: whether it is for somebody else than this server.
    """

    ranks: tuple[int, ...] = ()
    subject: str = ""
    text: str = ""
    for_others: bool = True


def describe_waiting(state: JobState, now: float) -> Waiting:
    waited = 0.0 if state.waiting_since is None else now - state.waiting_since
    since = f"since {waited:.1f} s"
    members = state.roster.members
    match state.phase:
        case Phase.EMPTY:
            if state.initializer is None:
                return _of("a first worker to bring the initial parameters", since)
            member = members.get(state.initializer[0])
            who = member.name if member else state.initializer[0]
            return _of(f"{who} to upload the initial parameters", since)
        case Phase.GATHERING:
            have = state.roster.ready()
            needed = 1 if state.started else state.rules.min_workers
            names = ", ".join(member.name for member in have) or "none"
            return _of(f"workers: have {len(have)} of {needed} ({names})", since)
        case Phase.FINISHING if state.evaluation is not None:
            member = members[state.evaluation.by[0]]
            return _of(f"{member.name} to evaluate the last version", since, (member.rank,))
        case Phase.FINISHING:
            names = ", ".join(member.name for member in state.roster.by_rank())
            return _of(f"{names} to come back and evaluate the last version", since)
        case Phase.RUNNING if state.round is not None:
            missing = sorted({rank for p in range(state.partitions) for rank in state.round.missing(p)})
            if not missing:
                text = f"version {state.version + 1} is being computed {since}"
                return Waiting(subject="computed", text=text, for_others=False)
            names = ", ".join(_describe(state, rank, now) for rank in missing)
            text = f"version {state.version + 1} waits {since} for {names}"
            return Waiting(ranks=tuple(missing), subject=f"{missing}", text=text)
        case _:
            return Waiting()


def _of(subject: str, since: str, ranks: tuple[int, ...] = ()) -> Waiting:
    return Waiting(ranks=ranks, subject=subject, text=f"waiting {since} for {subject}")


def _describe(state: JobState, rank: int, now: float) -> str:
    assert state.round is not None
    worker, incarnation = state.round.members[rank]
    member = state.roster.members.get(worker)
    if member is None or member.incarnation != incarnation:
        return f"rank {rank} ({worker}, gone)"
    link = "connected" if member.attached else "disconnected"
    doing = f", {member.activity}" if member.activity else ""
    return f"rank {rank} ({worker}, {link}, heard {now - member.heard_at:.1f} s ago{doing})"
