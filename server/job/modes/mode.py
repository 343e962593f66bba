"""The contract of a mode, which decides who gets which samples, and when pushes become a version.

`core` and the shell call these methods and never ask which mode it is. `Mode` refuses what only one mode can
do. Workers do not know the mode either: the job message names a kind of work (`worker/training/work`).

Within one event a mode first records the event, then assigns work, then orders what can be applied. So
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
    """A dataclass whose fields are its saved state (`storage.values`)."""

    @property
    @abstractmethod
    def quiet(self) -> bool:
        """Whether no accepted push is left to apply and no round is open."""

    @abstractmethod
    def take(self, member: Member, work: AssignedWork, event: e.Pushed, now: float) -> int | None:
        """Take a push that answers `work`, which `core` has just removed from the member.

        Returns:
            The version that the push becomes part of; None if it is too late.
        """

    def check_rates(self, event: e.RatesReceived | e.Pushed) -> None:
        """Compare the learning rates of a push, a part of which has arrived or which is about to be taken.
        Raises Refused for a push that cannot be applied together with the others."""
        return

    @abstractmethod
    def too_late(self, work: AssignedWork) -> bool:
        """Whether a push for this revoked work could no longer be part of a version."""

    @abstractmethod
    def holds(self, key: e.PushKey) -> bool:
        """Whether this accepted push has yet to be passed to the shard in an `Apply`."""

    @abstractmethod
    def lost(self, member: Member, *, away: bool) -> None:
        """Revoke the work of a member that was removed, now or when its round closes.

        Args:
            away: the member's lease is over, and the same incarnation may return.
        """

    @abstractmethod
    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        """Called when a member is ready on a new stream. assigned: id of the last assignment it received."""

    @abstractmethod
    def done(self, event: e.Published | e.SnapshotInstalled) -> None:
        """Called when the shard has carried out an `Apply` or an `InstallSnapshot`."""

    @abstractmethod
    def advance(self, now: float) -> list[e.Action]:
        """Assign work to all members that may have some, then order what can be applied."""

    def drain(self, now: float) -> list[e.Action]:
        """Order accepted pushes to be applied without the missing ones, and assign nothing more: the server
        stops. Called again after each version."""
        return []

    @abstractmethod
    def waiting(self, now: float) -> Awaited:
        """Return the members that the training waits for. Looks at every member.

        `ranks` are those of members that have not answered their assignments while others wait for them.
        """

    def divided(self) -> None:
        """Called when a new plan comes into force: pushes for work assigned before are too late."""
        return

    def begun(self, version: int, *, whole: bool) -> None:
        """Called when the shard starts applying the round that produces `version`; it can no longer be rolled
        back. whole: whether all of its parts are final."""
        return

    def due(self, now: float) -> bool:
        """Whether the passage of time alone allows an action."""
        return False

    def restored(self) -> None:
        """Called when the job gets its parameters or is loaded: compute the fields marked DERIVED."""
        return

    # ---- only for modes in which workers exchange packets and the server has a snapshot of their replicas

    def targets(self, member: Member, event: e.PacketStarted) -> e.Targets:
        """Return the workers that get a packet whose header has arrived. Raises Refused."""
        raise Refused(refusals.not_coded(member.worker))

    def happened(self, member: Member, event: e.OfExchange) -> list[e.Action]:
        """Called when a packet or a snapshot has arrived. Raises Refused."""
        raise Refused(refusals.not_coded(member.worker))

    def packet_elements(self, exchange: int, elements: int) -> int | None:
        """Elements of a packet of this exchange, for gradients of `elements`; None if it is not running."""
        return None

    def wants_copy(self, worker: str, version: int, *, leaving: bool = False) -> bool:
        """Whether to install this worker's snapshot of a version. leaving: the worker is about to leave."""
        return False

    @property
    def shares_samples(self) -> bool:
        """Whether several members may get the same samples."""
        return False

    @property
    def pushes_parts(self) -> bool:
        """Whether a push carries parts of a gradient. If not, workers send each other packets, and a push
        only reports the exchange."""
        return True
