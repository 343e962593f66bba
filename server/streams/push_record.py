"""The record of one push at the server: its state and its stored parts. `push_ledger` explains the states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...compressors import Payload
from ...proto import messages as m
from ...proto.refusal import Reason, Refusal, refused
from ...proto.transfer import digest, payload_header
from ..job.events import Pushed, PushKey
from ..job.transitions import move

MAX_LOCAL_RATES = 1024  # parameter groups whose rates of local steps are compared


class PushLife(Enum):
    """State of a push. The table at the head of `push_ledger` explains the states."""

    OPEN = "open"
    COMMITTED = "committed"
    UNWANTED = "unwanted"
    ACCEPTED = "accepted"
    APPLIED = "applied"
    STALE = "stale"
    REDUNDANT = "redundant"
    ABANDONED = "abandoned"
    REFUSED = "refused"


UNDECIDED = frozenset({PushLife.OPEN, PushLife.COMMITTED, PushLife.UNWANTED})
_OVER = frozenset({PushLife.STALE, PushLife.REDUNDANT, PushLife.ABANDONED, PushLife.REFUSED})
_TRANSITIONS: Mapping[PushLife, frozenset[PushLife]] = {
    PushLife.OPEN: UNDECIDED | {PushLife.ABANDONED, PushLife.REFUSED},
    PushLife.COMMITTED: UNDECIDED | {PushLife.ACCEPTED} | _OVER,
    PushLife.UNWANTED: frozenset({PushLife.UNWANTED, PushLife.OPEN}) | _OVER,
    PushLife.ACCEPTED: frozenset({PushLife.APPLIED}),
    **dict.fromkeys({PushLife.APPLIED} | _OVER, frozenset[PushLife]()),
}
_REFUSED_AS = {Reason.STALE: PushLife.STALE, Reason.REDUNDANT: PushLife.REDUNDANT}


@dataclass(slots=True)
class PushRecord:
    """One push.

    Attributes:
        assignment: id of the assignment that it answers; 0 before a part or the commit has named it.
        rates: learning rates by parameter group, which its first header brought; None before.
        commit: the commit; None before it arrives.
        checksums: crc32c of each stored part, by number.
        payloads: payloads of each stored part, by number, end to end; empty where the push contributes
            nothing to the part.
    """

    life: PushLife = PushLife.OPEN
    assignment: int = 0
    rates: tuple[float, ...] | None = None
    commit: m.Commit | None = None
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    payloads: dict[int, Sequence[Payload]] = field(default_factory=dict[int, Sequence[Payload]])

    def become(self, life: PushLife) -> None:
        """Change the state. Only a transition that `_TRANSITIONS` lists is allowed."""
        self.life = move(self.life, life, _TRANSITIONS)

    def become_refused(self, refusal: Refusal | None) -> None:
        """Change the state to that of a push which control has refused for this reason."""
        self.become(
            PushLife.REFUSED if refusal is None else _REFUSED_AS.get(refusal.reason, PushLife.REFUSED)
        )

    def differs(self, commit: m.Commit) -> bool:
        """Return True if the stored parts differ, in number or checksums, from those that a commit states."""
        return digest(self.checksums) != commit.digest or len(self.checksums) != commit.parts

    def header(self, seq: int, part: int, plan: int) -> m.PartHeader:
        """Return the header of a stored part, without learning rates. plan: number of its plan."""
        return m.PartHeader(
            seq=seq,
            assignment=self.assignment,
            part=part,
            plan=plan,
            payloads=tuple(map(payload_header, self.payloads[part])),
        )

    def clear(self) -> None:
        """Drop the stored parts."""
        self.checksums.clear()
        self.payloads.clear()

    def take_rates(self, worker: str, part: m.PartHeader, groups: int) -> None:
        """Record the learning rates of the push. Its first header has them, and others may repeat them.
        Raises Refused (GROUP) if the rates are invalid or differ from those that the push has."""
        rates = part.learning_rates
        if not rates and self.rates is not None:
            return
        limit, value = "", str(len(rates))
        if len(rates) not in (0, 1, groups):
            limit = f"{groups}, one for each parameter group, or 1 for all groups, or none"
        rates = rates * groups if len(rates) == 1 else rates
        wrong = [group for group, rate in enumerate(rates) if not 0 <= rate < math.inf]
        if not limit and wrong:
            limit, value = "finite numbers of at least 0", f"{rates[wrong[0]]} for group {wrong[0]}"
        if not limit and self.rates not in (None, rates):
            limit, value = "those of the push's first part", "others"
        if limit:
            where = f"push {part.seq}, part {part.part} learning_rates"
            raise refused(Reason.GROUP, worker=worker, field=where, limit=limit, value=value)
        self.rates = rates


@dataclass(slots=True)
class Account:
    """The pushes of one member.

    Attributes:
        through: every push up to this seq is closed, unless it is undecided: a later push may be abandoned or
            refused while parts of an earlier one are sent again.
        pushes: undecided pushes, and accepted ones whose parts wait to be applied, by seq.
        refusals: reasons of the last pushes that were refused without control, by seq.
    """

    through: int
    pushes: dict[int, PushRecord] = field(default_factory=dict[int, PushRecord])
    refusals: dict[int, Refusal] = field(default_factory=dict[int, Refusal])

    @property
    def undecided(self) -> dict[int, PushRecord]:
        """Pushes that control has not decided on, by seq, ascending."""
        return {seq: push for seq, push in sorted(self.pushes.items()) if push.life in UNDECIDED}

    def is_closed(self, seq: int) -> bool:
        """Return True if a push is decided, abandoned or refused."""
        return seq <= self.through and seq not in self.undecided

    def image(self) -> dict[str, Any]:
        """Return the account as plain values, for `Account.of`; the pushes are without their parts."""
        pushes = {
            seq: (push.life.value, push.assignment, push.rates, push.commit)
            for seq, push in self.pushes.items()
        }
        return {"through": self.through, "refusals": dict(self.refusals), "pushes": pushes}

    @classmethod
    def of(cls, image: Mapping[str, Any]) -> Account:
        """Return the account that `image` has described, with pushes that have no parts."""
        pushes = {
            seq: PushRecord(PushLife(life), *others) for seq, (life, *others) in image["pushes"].items()
        }
        return cls(image["through"], pushes, dict(image["refusals"]))


@dataclass(frozen=True, slots=True)
class Due:
    """A push whose worker is due an answer.

    Attributes:
        event: the event by which control learns of the push and decides on it.
        refusal: reason why control does not decide; None if it does. After CHECKSUM and CHUNK the worker
            sends the whole push again.
        repeated: True if the refusal answers a copy of the commit.
    """

    event: Pushed
    refusal: Refusal | None = None
    repeated: bool = False


def pushed(key: PushKey, commit: m.Commit, rates: tuple[float, ...] = ()) -> Pushed:
    """Return the event by which control learns of a committed push. rates: learning rates of the push, by
    parameter group."""
    return Pushed(
        *key[:2],
        seq=commit.seq,
        assignment=commit.assignment,
        base_version=commit.base_version,
        samples=commit.samples,
        loss=commit.loss,
        exchanged=commit.exchanged,
        plan=commit.plan,
        computing_s=commit.computing_seconds,
        batch=commit.batch,
        batches=commit.batches,
        steps=commit.steps,
        learning_rates=rates,
        local_rates=commit.local_rates[:MAX_LOCAL_RATES],
    )
