"""What a mode decides: who is given which samples, and when pushes become a version.

`core` and the shell ask these and never which mode it is. What one mode alone can do, `Mode` refuses. Workers
do not know the mode either: the job message names a kind of work (`worker/training/work`).

Within one event a mode takes in what happened, then gives out work, then says what can be applied. So
assignments leave at their version before the shard makes the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ....proto.refusal import Refused
from .. import events as e
from .. import refusals
from ..roster import AssignedWork, Member
from ..waiting import Awaited


class Mode(ABC):
    """A dataclass: its fields are what it remembers (`storage.values`)."""

    @property
    @abstractmethod
    def quiet(self) -> bool:
        """Whether nothing that was accepted is still to be applied and no round is open."""

    @abstractmethod
    def take(self, member: Member, work: AssignedWork, event: e.Pushed, now: float) -> int | None:
        """A push that answers `work`, which the member has no longer.

        Returns:
            The version that it will be part of, None if it comes too late.
        """

    def rate(self, member: Member, work: AssignedWork, event: e.RatesReceived | e.Pushed) -> None:
        """A push for `work` begins to come, or is about to be taken, for a step at learning rates of its own,
        or at those of the job. Raises Refused for what cannot be applied together with others."""
        return

    @abstractmethod
    def too_late(self, work: AssignedWork) -> bool:
        """Whether a push for work that was taken from its member could no longer be part of a version."""

    @abstractmethod
    def holds(self, key: e.PushKey) -> bool:
        """Whether an accepted push is still to be handed over to be applied."""

    @abstractmethod
    def lost(self, member: Member, *, away: bool) -> None:
        """The member is no longer one. Its work is taken from it, now or when its round closes.

        Args:
            away: its lease is over, and it may come back as the same one.
        """

    @abstractmethod
    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        """The member is back on a new stream; `assigned` is the id of the last assignment that it got."""

    @abstractmethod
    def done(self, event: e.Published | e.SnapshotInstalled) -> None:
        """Called when the shard has carried out an `Apply` or an `InstallSnapshot`."""

    @abstractmethod
    def advance(self, now: float) -> list[e.Action]:
        """Give work to everybody that may have some, then have applied what can be: so what is sent out is
        sent at the version before what comes next is applied."""

    def drain(self, now: float) -> list[e.Action]:
        """The server stops: have applied what was accepted, without what has not come; called again after
        each version. Nothing more is given out."""
        return []

    @abstractmethod
    def waiting(self, now: float) -> Awaited:
        """Whom the training waits for. Takes a look at every member.

        `ranks` are of those that have been given work and have not answered, where others wait for them.
        """

    def divided(self) -> None:
        """Called when a new plan comes into force: pushes for work assigned before are too late."""
        return

    def begun(self, version: int, *, whole: bool) -> None:
        """Called when the shard starts applying the round that produces `version`; it can no longer be rolled
        back. whole: whether all of its parts are final."""
        return

    def due(self, now: float) -> bool:
        """Whether time alone has changed what can be done."""
        return False

    def restored(self) -> None:
        """The members are others: those of a job that can begin, or of one that was saved. Make anew what
        follows from them."""
        return

    # ---- only where workers exchange packets, and the server has a copy of what they have

    def targets(self, member: Member, event: e.PacketStarted) -> e.Targets:
        """Return the workers that get a packet whose header has arrived. Raises Refused."""
        raise Refused(refusals.not_coded(member.worker))

    def happened(self, member: Member, event: e.OfExchange) -> list[e.Action]:
        """Called when a packet or a snapshot has arrived. Raises Refused."""
        raise Refused(refusals.not_coded(member.worker))

    def packet_elements(self, exchange: int, elements: int) -> int | None:
        """Elements of the packets of that exchange, for gradients of so many; None if it is not running."""
        return None

    def wants_copy(self, worker: str, version: int, *, leaving: bool = False) -> bool:
        """Whether a snapshot of this version by this worker, which may be leaving, is to be taken over."""
        return False

    @property
    def shares_samples(self) -> bool:
        """Whether several members may be given the same ones."""
        return False

    @property
    def pushes_parts(self) -> bool:
        """Whether a push carries parts of a gradient. If not, workers send each other packets, and a push
        says only what came of the exchange."""
        return True
