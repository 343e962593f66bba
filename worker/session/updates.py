"""Updates of the replica: collects the parts of the next version until all of them have arrived."""

from __future__ import annotations

import logging
from dataclasses import replace

from ...common.free_memory import give_back
from ...common.parts import Plan
from ...proto import messages as m
from ...proto.replicas import is_checked
from ..metrics import WorkerMetrics
from .connection import Connection
from .receiving import Received
from .replica import Replica

log = logging.getLogger("gradwire.worker")


class Updates:
    """Takes the replica from version to version, and reports each version to the connection."""

    def __init__(self, replica: Replica, connection: Connection, metrics: WorkerMetrics) -> None:
        self._replica = replica
        self._connection = connection
        self._metrics = metrics
        self._arriving: dict[int, Received] = {}  # parts of the next version
        self._arriving_version = 0
        self._raw_arrived = 0
        self._checked = 0, 0  # version of the last checksum, and the checksum

    def adopt(self, plan: Plan) -> None:
        """Divide the replica by a new plan, and drop an incomplete update's parts: the next one is whole."""
        self._arriving.clear()
        self._replica.adopt(plan)

    def add(self, received: Received, *, early: bool) -> None:
        """Collect a part of an update, and apply the update once all of its parts have arrived.

        Parts wait because the server may still request work at the present version; those of a snapshot for
        an invalid replica do not. early: True to apply the part at once. The replica can restore the previous
        values.
        """
        update = received.update
        if self._replica.version is None and not update.whole:
            return  # it was sent before the server heard that the replica is invalid
        self._metrics.payload_down.inc(sum(int(each.data.size) for each in received.payloads))
        snapshot = self._replica.version is None
        if update.version != self._arriving_version:
            self._arriving_version = update.version
            self._arriving.clear()
            if snapshot:
                self._replica.invalidate()
        if snapshot:
            with self._metrics.during("applying"):
                self._replica.apply(update, received.payloads)
            received = replace(received, payloads=())  # frees them: all together are a second model
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
        if snapshot:
            give_back()
        # For the metric: uncompressed, the last of several updates in a row would have been enough.
        self._raw_arrived = self._replica.manifest.raw_bytes
        if self._replica.version is not None:
            self._connection.stepped(self._replica.version)
            self._metrics.version.set(self._replica.version)
            if is_checked(self._replica.version):
                self._checked = self._replica.version, self._replica.checksum()

    def invalidate_if_drifted(self, assignment: m.Assignment) -> bool:
        """Compare the replica's last checksum with the server's; if they differ, request a snapshot. Returns
        True if the checksums differ, so that the replica is invalid until the snapshot arrives."""
        version, checksum = self._checked
        if not version or assignment.checked != version or assignment.checksum == checksum:
            return False
        log.warning(
            "the parameters are not the server's at version %d, and are replaced by the server's. Check "
            "whether the model or script changes parameters in place, as Embedding(max_norm=...) does: the "
            "server does not see such changes; with --downlink none it overwrites them at every version. "
            "With a compressor that has bases, a processor that rounds unlike the server's does this, too: "
            "name a --downlink there",
            version,
        )
        self._metrics.drifts.inc()
        self._invalidate()
        self._connection.reopen_without_replica(version)
        return True

    def go_back(self, version: int) -> None:
        """Called when the server has lost the versions after `version`: invalidate the replica."""
        log.warning(
            "the server has gone back from version %s to %d: pushes between them are lost, because the "
            "server had not saved them",
            *(self._replica.version, version),
        )
        self._invalidate()

    def _invalidate(self) -> None:
        """Drop the replica's version, so that only a snapshot can be applied."""
        self._arriving.clear()
        self._replica.invalidate()
        self._checked = 0, 0

    def count(self) -> None:
        """Add the last update's uncompressed bytes to the metrics; called when work at its version begins."""
        self._metrics.raw_down.inc(self._raw_arrived)
        self._raw_arrived = 0
