"""The final parts of rounds whose parts are stepped one by one, and the pushes that count in them.

A final part is stepped or about to be, which cannot be undone. A push counts in a part as soon as that part
is final, even if the push is refused later. A substitute for a lost member pushes only the other parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..job.events import Apply, PushKey
from ..shard.reports import Final

MAX_COUNTED = 1 << 10  # most pushes whose parts count although they were not applied as a whole


@dataclass(slots=True)
class _Round:
    """The open round.

    Attributes:
        final: numbers of the final parts.
        asked: numbers of the parts that a substitute has to push, by its assignment.
    """

    final: set[int] = field(default_factory=set[int])
    asked: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])


class FinalParts:
    """The open round's final parts. The conductor records them; the push ledger reads them."""

    def __init__(self) -> None:
        self._round: _Round | None = None
        self._counted: dict[PushKey, set[int]] = {}

    @property
    def stepping(self) -> bool:
        """True while a round is open whose parts are stepped one by one."""
        return self._round is not None

    def open_round(self) -> None:
        """Begin a round whose parts may be stepped before their pushes are decided."""
        self._round = _Round()

    def record(self, report: Final) -> None:
        """Record a final part, and the pushes that count in it."""
        assert self._round is not None, "no round is open"
        self._round.final.add(report.part)
        for key in report.keys:
            self._counted.setdefault(key, set()).add(report.part)

    def ask(self, assignment: int, parts: int) -> int:
        """Assign all parts of the plan that are not final to a substitute, by the id of its assignment.
        Return their number; 0 if no round is open. parts: number of parts in the plan."""
        if self._round is None:
            return 0
        missing = tuple(part for part in range(parts) if part not in self._round.final)
        self._round.asked[assignment] = missing
        return len(missing)

    def asked(self, assignment: int) -> tuple[int, ...]:
        """Return the numbers of the parts that a substitute has to push for its assignment, ascending; empty
        for other assignments."""
        return () if self._round is None else self._round.asked.get(assignment, ())

    def of(self, key: PushKey) -> tuple[int, ...]:
        """Return the parts of a push that a version contains although the push was never applied as a
        whole."""
        return tuple(sorted(self._counted.get(key, ())))

    def close_round(self, order: Apply | None = None) -> None:
        """End the round. order: names the pushes that are applied as a whole; None if there is a new plan."""
        self._round = None
        for each in () if order is None else order.contributions:
            self._counted.pop(each.key, None)
        while len(self._counted) > MAX_COUNTED:
            del self._counted[next(iter(self._counted))]

    def image(self) -> dict[PushKey, list[int]]:
        """Return the pushes that count in part, as `restore` takes them. An open round is not included."""
        return {key: sorted(parts) for key, parts in self._counted.items()}

    def restore(self, counted: Mapping[PushKey, Sequence[int]]) -> None:
        """Replace the state by one that `image` returned."""
        self._counted = {key: set(parts) for key, parts in counted.items()}
