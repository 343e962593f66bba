"""Jobs of coded mode whose workers send packets, report and hand over copies as they are told to."""

from __future__ import annotations

from typing import Any, TypeVar

from stepping import core_of, step

from gradwire.coded.exchanges import Coded
from gradwire.proto.messages import Exchanged
from gradwire.server.job import events as e

T = TypeVar("T")


class Job:
    """A job of workers a, b, c, … that are ready, and what it wants done."""

    def __init__(
        self, workers: int, redundancy: int | None = 2, samples: int = 80, blocks: str = "even", **rules: Any
    ) -> None:
        self.names = "abcdefgh"[:workers]
        mode = f"coded:redundancy={redundancy or 'auto'},blocks={blocks}"
        self.core = core_of(mode, min_workers=workers, **{"batch_size": 2, **rules})
        self.now = 0.0
        self.assigned: dict[str, e.Assign] = {}
        self.seq = dict.fromkeys(self.names, 0)
        for name in self.names:
            self.step(e.Joined(worker=name, incarnation=1))
        self.step(e.Initialized(worker="a", incarnation=1, fingerprint=b"", train_samples=samples))
        for name in self.names:
            self.come(name)

    @property
    def mode(self) -> Coded:
        assert isinstance(self.core.mode, Coded)
        return self.core.mode

    def step(self, event: e.Event[Any], after: float = 0.0) -> list[Any]:
        self.now += after
        actions: list[Any] = step(self.core, event, self.now)
        for action in actions:
            if isinstance(action, e.Assign):
                self.assigned[action.worker] = action
        return actions

    def come(self, name: str, version: int | None = 0, assigned: int = 0) -> list[Any]:
        return [
            *self.step(e.Attached(worker=name, incarnation=1)),
            *self.step(
                e.Prepared(worker=name, incarnation=1, fingerprint=b"", version=version, assigned=assigned)
            ),
        ]

    def send(self, name: str, **differing: int) -> list[Any]:
        """All packets of a worker. differing: checksums of blocks that are not what all others have."""
        assignment = self.assigned[name].assignment
        assert assignment.coding is not None
        assert self.mode.round is not None
        for index in self.mode.round.plan.sent_by[assignment.position]:
            exchange = assignment.coding.exchange
            terms = self.mode.round.plan.packets[index].terms if self.mode.round.compares else ()
            checksums = [differing.get(f"block{block}", block) for block, _ in terms]
            packet: dict[str, Any] = {"worker": name, "incarnation": 1, "exchange": exchange, "index": index}
            self.step(e.PacketStarted(**packet, checksums=checksums))
            actions = self.step(e.PacketRelayed(**packet))
            if some(actions, e.Assign):  # another exchange has replaced it
                return actions
        return []

    def report(self, name: str, crc32c: int = 0, seconds: float = 0.0, after: float = 0.0) -> list[Any]:
        assignment = self.assigned[name].assignment
        self.seq[name] += 1
        return self.step(
            e.Pushed(
                worker=name,
                incarnation=1,
                seq=self.seq[name],
                assignment=assignment.id,
                base_version=assignment.version,
                samples=1,
                exchanged=Exchanged(crc32c=crc32c, computing_seconds=seconds),
            ),
            after,
        )

    def copied(self, name: str, version: int) -> list[Any]:
        """The snapshot that was asked for comes, and is taken over."""
        (take,) = some(
            self.step(e.SnapshotReceived(worker=name, incarnation=1, version=version)), e.InstallSnapshot
        )
        assert take.key == (name, 1, version)
        return self.step(e.SnapshotInstalled(version=version))

    def round(self, checksums: str = "", **timing: float) -> list[Any]:
        """A whole one; returns what follows from the last report."""
        for name in self.names:
            self.send(name)
        actions: list[Any] = []
        for place, name in enumerate(self.names):
            actions = self.report(name, int(checksums[place]) if checksums else 0, **timing)
        return actions


def some(actions: list[Any], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]
