"""The contract of a mode, which decides which samples each member gets, and when pushes become a version.

The files `core` and the shell call these methods and never ask which mode it is. `Mode` has a default for
each method that only some modes need. Workers do not know the mode either: the job message names a kind of
work (`worker/training/work`).

Within one event a mode first records the event, then assigns work, then orders the shard to apply complete
pushes. So assignments leave at their version before the shard makes the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ....proto.refusal import Refused
from .. import events as e
from .. import refusals
from ..roster import Member
from ..state import JobState
from ..waiting import Awaited
from ..work import AssignedWork


class Exchanges(ABC):
    """The rules of a mode in which workers exchange packets, and the server has a copy of their replicas."""

    @abstractmethod
    def targets(self, member: Member, event: e.PacketStarted) -> e.Targets:
        """Return the workers that get a packet whose header has arrived; None if it is to be discarded.

        Raises:
            Refused: PACKET; the packet breaks the rules of its exchange.
        """

    @abstractmethod
    def received(self, member: Member, event: e.OfExchange) -> list[e.Action]:
        """Called when a member's packet was relayed or damaged, or its snapshot has arrived. Return the
        actions that follow."""

    @abstractmethod
    def packet_elements(self, exchange: int, elements: int) -> int | None:
        """Return the number of elements in a packet of an exchange; None if the exchange is not running."""

    @abstractmethod
    def wants_copy(self, worker: str, version: int, *, leaving: bool = False) -> bool:
        """Return True if this worker's snapshot of a version should be installed.

        Args:
            leaving: True if the worker sends it without a request, because it leaves.
        """


class Mode(ABC):
    """The rules of one mode, with the data that they need.

    A subclass is a dataclass whose fields are its saved state (`storage.values`), but for those marked
    DERIVED. One of these is `_state`. A mode reads it, draws and settles `samples`, advances `version`, and
    assigns work by the methods `assign_samples`, `assign`, `send` and `extend`. Core changes the rest.
    """

    _state: JobState

    @property
    @abstractmethod
    def quiet(self) -> bool:
        """True while no accepted push is left to apply and no round is open."""

    @abstractmethod
    def take(self, member: Member, work: AssignedWork, event: e.Pushed, now: float) -> int | None:
        """Decide on a push for `work`, which is not late, and which the member no longer has.

        Returns:
            The version that the push becomes part of; None if it is too late.
        """

    def freed(self, member: Member) -> None:
        """Called when a member has answered late work, and has none any more."""
        return

    @abstractmethod
    def too_late(self, work: AssignedWork) -> bool:
        """Return True if a push for this revoked work could no longer be part of a version."""

    @abstractmethod
    def holds(self, key: e.PushKey) -> bool:
        """Return True if the accepted push `key` has yet to be passed to the shard in an `Apply`."""

    @abstractmethod
    def lost(self, member: Member, *, away: bool) -> None:
        """Revoke the work of a member that was removed, now or when its round closes.

        Args:
            away: True if the member's lease has expired, and the same incarnation may return.
        """

    @abstractmethod
    def resume(self, member: Member, assigned: int, now: float) -> list[e.Action]:
        """Called when a member is ready on a new stream: send its assignment again, or revoke it.

        Args:
            assigned: id of the last assignment that the member received.
        """

    @abstractmethod
    def done(self, event: e.Published | e.SnapshotInstalled) -> None:
        """Called when the shard has carried out an `Apply` or an `InstallSnapshot`: advance to the version
        of `event`."""

    @abstractmethod
    def advance(self, now: float) -> list[e.Action]:
        """Assign work to all members that may have some, then order the shard to apply complete pushes."""

    @abstractmethod
    def waiting(self, now: float) -> Awaited:
        """Return the members that the training waits for, with a text. It looks at every member.

        Its `ranks` are those of members that have not answered their assignments while other members wait for
        them.
        """

    def drain(self, now: float) -> list[e.Action]:
        """Order the shard to apply accepted pushes without the missing ones, and assign no more work: the
        server stops. Called again after each version."""
        return []

    def check_rates(self, event: e.RatesReceived | e.Pushed) -> None:
        """Check the learning rates of a push, when a part of it arrives and again when it is committed.

        Raises:
            Refused: the push cannot be applied together with the other pushes of its version.
        """
        return

    def check_batches(self, work: AssignedWork, event: e.Pushed) -> None:
        """Check the number of batches that a push stands for.

        Raises:
            Refused: the push has to stand for all batches of the work, and does not.
        """
        return

    def more(self, member: Member, work: AssignedWork, event: e.MoreWanted) -> list[e.Action]:
        """Called when a member has computed all batches of `work`, which is not late, and its script
        accumulates gradients of more: extend the work, now or with the next `advance`, or end it if its epoch
        has no samples left.

        Returns:
            Actions that answer at once.

        Raises:
            Refused: the work cannot be extended.
        """
        raise Refused(refusals.not_extended(member.worker))

    def plan_adopted(self) -> None:
        """Called when a new plan comes into force: pushes for work assigned before are too late."""
        return

    def apply_started(self, version: int, *, whole: bool) -> None:
        """Called when the shard starts applying the round that produces `version`; it can no longer be rolled
        back.

        Args:
            whole: True if all parts of the round are final.
        """
        return

    def due(self, now: float) -> bool:
        """Return True if the passage of time alone allows an action at `now`."""
        return False

    def restored(self) -> None:
        """Compute the fields marked DERIVED. Called when the job gets its parameters or is loaded."""
        return

    @property
    def steps(self) -> int:
        """Number of steps of one worker so far, which schedules of the learning rate count."""
        return self._state.version

    @property
    def terms(self) -> Mapping[str, Any]:
        """Fields that this mode sets in assignments without samples, too."""
        return {}

    @property
    def status(self) -> Mapping[str, int]:
        """Values of this mode for the status, by field of `proto.messages.StatusResponse`."""
        return {}

    @property
    def gauges(self) -> Mapping[str, float]:
        """Values of this mode for operators, by attribute of `server.metrics.ServerMetrics`."""
        return {"local_steps": 1}

    @property
    def shares_samples(self) -> bool:
        """True if several members may get the same samples."""
        return False

    @property
    def exchanges(self) -> Exchanges | None:
        """The rules of packets, where workers exchange these and a push only reports the exchange; None where
        a push carries parts of a gradient."""
        return None

    @property
    def pushes_parts(self) -> bool:
        """True if a push carries parts of a gradient."""
        return self.exchanges is None

    def exchanging(self, worker: str) -> Exchanges:
        """Return the rules of packets. Raises Refused for a packet of `worker` where there are none."""
        if self.exchanges is None:
            raise Refused(refusals.not_coded(worker))
        return self.exchanges
