"""Coded packets and snapshots of the replica, which a worker exchanges in coded mode."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...proto import messages as m
from ..metrics import WorkerMetrics
from .connection import Connection
from .receiving import ReceivedPacket
from .replica import Replica


class PacketHandler(Protocol):
    """Handles the coded packets of one session. `Session.next` calls it."""

    def apply(self, exchange: int, version: int) -> None:
        """Called when all members have the sum of an exchange: step the replica to `version`.

        Nothing happens for exchange 0, for another exchange than the present one, or if the replica is not at
        `version` - 1. exchange: number of the exchange; 0 if the assignment names none.
        """
        ...

    def take(self, packet: ReceivedPacket) -> None:
        """Called when a packet of another worker has arrived: add it to the exchange."""
        ...

    def snapshot(self, version: int) -> None:
        """Called when the server requests the replica, which is at `version`: send it."""
        ...


class Packets:
    """Sends the coded packets and snapshots of one session."""

    def __init__(self, connection: Connection, replica: Replica, metrics: WorkerMetrics) -> None:
        self.handler: PacketHandler | None = None
        self._connection, self._replica, self._metrics = connection, replica, metrics

    def send(self, header: m.Packet, words: npt.NDArray[np.uint32]) -> None:
        """Send a coded packet. If the stream breaks it is lost, and the server repeats the exchange. words:
        words of the packet: uint32, shape (header.elements,)."""
        self._connection.send(header, [words.view(np.uint8)])
        self._metrics.raw_up.inc(words.nbytes)
        self._metrics.payload_up.inc(words.nbytes)

    def stepped(self, version: int) -> None:
        """Note that the worker itself has stepped its replica to `version`."""
        self._replica.version = version
        self._connection.stepped(version)
        self._metrics.version.set(version)

    def send_snapshot(self, *, leaving: bool) -> None:
        """Send a copy of the replica to the server, if it has a version. leaving: True if the worker leaves,
        so that no other worker may have the values; then wait until they are written. False to answer a
        request of the server.
        """
        version = self._replica.version
        if version is None:
            return
        # A copy, because the next step may be taken while it is being sent.
        values = [value.copy() for value in self._replica.values()]
        self._connection.send(m.Snapshot(version=version, leaving=leaving), values)
        self._metrics.raw_up.inc(self._replica.manifest.raw_bytes)
        if leaving:
            self._connection.flush()
