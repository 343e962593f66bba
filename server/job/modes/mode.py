"""What a mode decides: who is given which samples, and when pushes become a version.

`core` calls these and knows no mode. The order within one event is always: what happened (`take`, `lost`,
`resume`, `published`), then `offer`, then `proceed`, so that what is sent out is sent at the version before
what comes next is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .. import events as e
from ..roster import Member, Work
from ..waiting import Waiting


class Mode(Protocol):
    @property
    def quiet(self) -> bool:
        """Whether nothing that was accepted is still to be applied and no round is open."""
        ...

    def take(self, member: Member, work: Work, event: e.Pushed, now: float) -> int | None:
        """A push that answers `work`, which the member has no longer.

        Returns the version that it will be part of, None if it comes too late.
        """
        ...

    def too_late(self, work: Work) -> bool:
        """Whether a push for work that was taken from its member could no longer be part of a version."""
        ...

    def lost(self, member: Member) -> None:
        """The member is no longer one. Its work is taken from it, now or when its round closes."""
        ...

    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        """The member is back on a new stream; `assigned` is the id of the last assignment that it got."""
        ...

    def published(self, event: e.Published) -> None:
        """What `proceed` wanted applied is applied."""
        ...

    def offer(self, now: float) -> list[e.Action]:
        """Give work to whoever may have some."""
        ...

    def proceed(self, now: float) -> list[e.Action]:
        """What can be applied now."""
        ...

    def waiting(self, now: float) -> Waiting:
        """Whom the training waits for."""
        ...

    def missing(self) -> Sequence[int]:
        """Ranks that have been given work and have not answered, where others wait for them."""
        ...

    def snapshot(self) -> Mapping[str, object]:
        """What the mode remembers, as plain values."""
        ...
