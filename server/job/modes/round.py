"""One round of the modes `sync` and `local`: its slots, their members, and the contributions that have
arrived.

A round (`RoundLife`), and the outcome of pushes for its work:

    OPEN   | members compute; a push is accepted, or ignored | -> CLOSED (by `division`, enough pushes have
           | because another member has its slot             |    arrived)
    CLOSED | the shard has its `Apply`; a push is refused as | -> gone, once the shard has published the
           | stale, its work is LATE                         |    version

A slot of an open round (kept as the sets `open`, `lost` and `ended`, and the keys of `answered`):

    open               | its member computes                 | -> answered, lost
    answered           | its push is accepted                | -> answered, even if its member is lost
    ended              | its member's script accumulates gradients, and the epoch has no further batches: no
                       | push will come, and the gradients go into the member's next step
    lost               | its member is lost, before or after | -> open (the member returns, or a substitute
                       | it answered                         |    takes the slot), or unused
    lost, not answered | vacant, if the round needs it       | -> open, or given up (`unfilled`)

Invariants:

- The sum of a round contains each accepted push of the round.
- A slot has one member, and no part is summed from two members of one slot.
- No round is undone after the shard has begun to apply it (`begun`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ....common.stored import stored
from ....proto.refusal import Refused
from .. import events as e
from .. import refusals
from ..roster import Name
from ..transitions import move
from .division import Division, InParts, Sliced, StragglerCoded


@stored("round-life")
class RoundLife(Enum):
    """State of a round: OPEN while members compute, CLOSED once the shard is ordered to apply the pushes."""

    OPEN = "open"
    CLOSED = "closed"


_TRANSITIONS = {RoundLife.OPEN: frozenset({RoundLife.CLOSED}), RoundLife.CLOSED: frozenset[RoundLife]()}


@stored("round-place")
@dataclass(kw_only=True, slots=True)
class Slot:
    """The share of a round that one member computes."""

    rank: int  # rank of the slot's first member; contributions are summed in rank order
    member: Name
    work: int


@stored("round")
@dataclass(kw_only=True, slots=True)
class Round:
    """One round: its slots, in rank order, and the state of each slot, by its index.

    Attributes:
        local_rates_of: learning rates of scripts' last local steps, by slot.
        computing: seconds and number of samples of each member's local steps, by slot.
    """

    version: int  # version at which members compute
    opened_at: float  # time at which the round opened, in seconds of the job's clock
    progress: float  # epochs trained on when the round opened, with a fraction
    total_steps: int = 0  # of the whole job, if the members stay; 0 if only time ends it
    rate_factor: float  # factor of the base learning rate
    evaluations: int = 0  # number of the last one that was done when the round opened
    local_rates: tuple[float, ...] = ()  # of each local step; empty if all are the same, or a script chooses
    division: Division | InParts | Sliced | StragglerCoded
    parts: bool = False  # True if the shard may step parts before the round closes
    steps: int = 1  # number of steps that the member with the most samples takes, as planned
    local_steps: int | None = None  # of a member in earlier rounds; None where members take one step
    begun: bool = False  # True once the shard has started to step parts
    unfilled: bool = False  # lost slots stay empty: all parts are stepped, or no member could take them
    rates: tuple[float, ...] = ()  # by parameter group; empty for those of the job
    rated_by: str = ""  # id of the worker that was the first to send its rates; empty before
    local_rates_of: dict[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    life: RoundLife = RoundLife.OPEN
    slots: list[Slot] = field(default_factory=list[Slot])
    slot_of: dict[int, int] = field(default_factory=dict[int, int])  # by assignment
    contributions: dict[int, e.Contribution] = field(default_factory=dict[int, e.Contribution])  # by slot
    answered: dict[int, int] = field(default_factory=dict[int, int])  # samples of each contribution
    computing: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])
    stepped: dict[int, int] = field(default_factory=dict[int, int])  # optimizer steps of each script
    took: tuple[int, int] = (0, 0)  # most batches of a step, and the expected number
    open: set[int] = field(default_factory=set[int])  # slots that are neither answered, lost nor ended
    lost: set[int] = field(default_factory=set[int])  # slots whose members are lost
    ended: set[int] = field(default_factory=set[int])  # slots whose work has ended without a push

    @property
    def vacant(self) -> list[int]:
        """Slots that another member has to take over, so that the round can close."""
        if not self.lost or self.unfilled or self.life is not RoundLife.OPEN:
            return []
        return self.division.vacant(self.answered, self.lost, len(self.open))

    @property
    def missing(self) -> list[Slot]:
        """Slots that the round waits for."""
        return [self.slots[number] for number in sorted({*self.open, *self.vacant})]

    @property
    def complete(self) -> bool:
        """True once enough contributions have arrived to close the round."""
        lost = set[int]() if self.unfilled else self.lost
        return self.division.complete(self.answered, lost, len(self.open))

    def fill(self, number: int, rank: int, member: Name, work: int) -> None:
        """Assign slot `number` to a member. The number after the last one adds a slot."""
        slot = Slot(rank=rank, member=member, work=work)
        self.slots[number : number + 1] = [slot]
        self.slot_of[work] = number
        self.lost.discard(number)
        self.open.add(number)

    def lose(self, number: int) -> None:
        """Mark slot `number` as lost, because its member is lost."""
        self.lost.add(number)
        self.open.discard(number)

    def reopen(self, number: int) -> None:
        """Return slot `number` to its lost member, which is back before another member took the slot."""
        self.lost.discard(number)
        self.open.add(number)

    def end(self, number: int) -> None:
        """Mark slot `number` as ended: its member will not push for it."""
        self.open.discard(number)
        self.ended.add(number)

    @property
    def empty(self) -> bool:
        """True if the round is over, and no push has come: it is dissolved, and makes no version."""
        return bool(self.ended) and not self.contributions and self.complete

    def answer(self, number: int, contribution: e.Contribution) -> None:
        """Record `contribution`, the accepted push of the member of slot `number`."""
        self.contributions[number] = contribution
        self.answered[number] = contribution.samples
        self.open.discard(number)

    @property
    def members(self) -> dict[int, tuple[str, int, int]]:
        """Worker, incarnation and number of samples of each member, by id of its assignment."""
        pairs = zip(self.slots, self.division.parts, strict=False)
        return {slot.work: (*slot.member, part.samples) for slot, part in pairs}

    def check_rates(self, worker: str, seq: int, rates: tuple[float, ...]) -> None:
        """Raise Refused if a push has other learning rates than the first one of the round."""
        if not self.rated_by:
            self.rates, self.rated_by = rates, worker
        elif rates != self.rates:
            raise Refused(refusals.learning_rates(worker, seq, rates, self.rated_by, self.rates))

    @property
    def unequal_local_rates(self) -> str:
        """A warning that names two members whose local steps had unequal learning rates; empty if there are
        none."""
        rates = sorted(self.local_rates_of.items())
        others = [number for number, each in rates if each != rates[0][1]]
        if not others:
            return ""
        named = [
            f"rank {self.slots[number].rank} ({self.slots[number].member[0]}) "
            f"{', '.join(f'{rate:g}' for rate in self.local_rates_of[number])}"
            for number in (rates[0][0], others[0])
        ]
        return (
            f"version {self.version + 1}: local steps have unequal learning rates: {'; '.join(named)}. "
            "Choose rates that are equal on all ranks, by job.follow, job.progress or job.evaluation"
        )

    def close(self) -> None:
        """Close the round: the shard gets its `Apply`."""
        self.life = move(self.life, RoundLife.CLOSED, _TRANSITIONS)
