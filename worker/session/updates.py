"""Updates of the replica: parts of the next version, until all of them are here."""

from __future__ import annotations

from ...compressors import Plan
from ...proto.replicas import is_checked
from ..metrics import WorkerMetrics
from .connection import Connection
from .receiving import Received
from .replica import Replica


class Updates:
    """Takes the replica from version to version, and tells the connection which one it has.

    Attributes:
        checked: the last version at which a checksum of the replica was taken, and that; (0, 0) before.
    """

    def __init__(self, replica: Replica, connection: Connection, metrics: WorkerMetrics) -> None:
        self._replica = replica
        self._connection = connection
        self._metrics = metrics
        self._arriving: dict[int, Received] = {}  # parts of the next version
        self._arriving_version = 0
        self._raw_arrived = 0
        self.checked = 0, 0

    def adopt(self, plan: Plan) -> None:
        """Have other parts from now on. What has come of an update that is not whole is of no use: the next
        one is."""
        self._arriving.clear()
        self._replica.adopt(plan)

    def add(self, received: Received, *, early: bool) -> None:
        """Keep a part of an update until all of them are here: this worker may still be asked for something
        at this version. early: apply it nevertheless; the replica can go back."""
        update = received.update
        if self._replica.version is None and not update.whole:
            return  # it was on its way when the replica was let go
        if update.version != self._arriving_version:
            self._arriving_version = update.version
            self._arriving.clear()
        self._arriving[update.part] = received
        if early and update.version - 1 == self._replica.version:
            with self._metrics.during("applying"):
                self._replica.apply(update, received.payloads, early=True)
        if len(self._arriving) < len(self._replica.plan.parts):
            return
        parts = list(self._arriving.values())
        self._arriving.clear()
        with self._metrics.during("applying"):
            for each in parts:
                self._replica.apply(each.update, each.payloads)
        # Of several updates in a row, uncompressed, the last alone would have done.
        self._raw_arrived = self._replica.manifest.raw_bytes
        if self._replica.version is not None:
            self._connection.stepped(self._replica.version)
            self._metrics.version.set(self._replica.version)
            if is_checked(self._replica.version):
                self.checked = self._replica.version, self._replica.checksum()

    def let_go(self) -> None:
        """Of the replica, which is not what the server takes it for."""
        self._arriving.clear()
        self._replica.let_go()
        self.checked = 0, 0

    def count(self) -> None:
        """Count what has come as received, now that there is work at the version to which it led."""
        self._metrics.raw_down.inc(self._raw_arrived)
        self._raw_arrived = 0
