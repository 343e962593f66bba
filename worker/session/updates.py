"""Updates of the replica: parts of the next version, until all of them are here."""

from __future__ import annotations

import logging

from ...compressors import Plan
from ...proto import messages as m
from ...proto.replicas import is_checked
from ..metrics import WorkerMetrics
from .connection import Connection
from .receiving import Received
from .replica import Replica

log = logging.getLogger("gradwire.worker")


class Updates:
    """Takes the replica from version to version, and tells the connection which one it has."""

    def __init__(self, replica: Replica, connection: Connection, metrics: WorkerMetrics) -> None:
        self._replica = replica
        self._connection = connection
        self._metrics = metrics
        self._arriving: dict[int, Received] = {}  # parts of the next version
        self._arriving_version = 0
        self._raw_arrived = 0
        self._checked = 0, 0  # version and checksum that was taken there

    def adopt(self, plan: Plan) -> None:
        """Take over a plan. Parts of an incomplete update are dropped: the next update is whole."""
        self._arriving.clear()
        self._replica.adopt(plan)

    def add(self, received: Received, *, early: bool) -> None:
        """Keep a part of an update until all parts are here: the server may still ask for something at the
        present version. early: apply the part at once; the replica can go back."""
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
                self._checked = self._replica.version, self._replica.checksum()

    def let_go_if_drifted(self, assignment: m.Assignment) -> bool:
        """Compare checksums with the server's. If they differ, let go of the replica and ask for another.

        Returns:
            Whether they differ.
        """
        version, checksum = self._checked
        if not version or assignment.checked != version or assignment.checksum == checksum:
            return False
        log.warning(
            "the parameters are not the server's at version %d, and are replaced by those. Does the model or "
            "the script change parameters in place, as Embedding(max_norm=...) does? The server never hears "
            "of that; with --downlink none its values replace such changes at every version",
            version,
        )
        self._metrics.drifts.inc()
        self._let_go()
        self._connection.let_go(version)
        return True

    def go_back(self, version: int) -> None:
        """Called when the server has lost the versions after this one."""
        log.warning(
            "the server has gone back from version %s to %d: what was pushed between is lost, because it had "
            "not been written down",
            *(self._replica.version, version),
        )
        self._let_go()

    def _let_go(self) -> None:
        self._arriving.clear()
        self._replica.let_go()
        self._checked = 0, 0

    def count(self) -> None:
        """Count the bytes of the last update, now that there is work at its version."""
        self._metrics.raw_down.inc(self._raw_arrived)
        self._raw_arrived = 0
