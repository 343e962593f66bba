"""Whom or what the job waits for, in words. Nothing waits without saying on whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..proto.messages import Phase

if TYPE_CHECKING:
    from .core import Core


def describe_waiting(core: Core, now: float) -> tuple[tuple[int, ...], str]:
    """Ranks that everything waits for, and the whole story; empty while nothing is outstanding."""
    waited = 0.0 if core.waiting_since is None else now - core.waiting_since
    since = f"since {waited:.1f} s"
    members = core.roster.members
    match core.phase:
        case Phase.EMPTY:
            if core.initializer is None:
                return (), f"waiting {since} for a first worker to bring the initial parameters"
            member = members.get(core.initializer[0])
            who = member.name if member else core.initializer[0]
            return (), f"waiting {since} for {who} to upload the initial parameters"
        case Phase.GATHERING:
            have = core.roster.ready()
            needed = 1 if core.started else core.rules.min_workers
            names = ", ".join(member.name for member in have) or "none"
            return (), f"waiting {since} for workers: have {len(have)} of {needed} ({names})"
        case Phase.FINISHING if core.evaluator is not None:
            member = members[core.evaluator[0]]
            return (member.rank,), f"waiting {since} for {member.name} to evaluate the last version"
        case Phase.RUNNING if core.round is not None:
            missing = sorted({rank for p in range(core.partitions) for rank in core.round.missing(p)})
            if not missing:
                return (), ""
            names = ", ".join(_describe(core, rank, now) for rank in missing)
            return tuple(missing), f"version {core.version + 1} waits {since} for {names}"
        case _:
            return (), ""


def _describe(core: Core, rank: int, now: float) -> str:
    assert core.round is not None
    worker, incarnation = core.round.members[rank]
    member = core.roster.members.get(worker)
    if member is None or member.incarnation != incarnation:
        return f"rank {rank} ({worker}, gone)"
    state = "connected" if member.attached else "disconnected"
    doing = f", {member.activity}" if member.activity else ""
    return f"rank {rank} ({worker}, {state}, heard {now - member.heard_at:.1f} s ago{doing})"
