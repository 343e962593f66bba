"""What comes down one stream: headers and chunks become updates and packets, whole and checked. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...compressors import Payload
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.transfer import Assembly, Collection, announced_payloads, packet_transfer
from .attempts import BrokenError

MAX_UINT32 = 2**32 - 1  # versions are below, transfers of packets above


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """An update whose bytes have all arrived and been checked."""

    update: m.Update
    payloads: Sequence[Payload]


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedPacket:
    """A coded packet of another worker, whole. data: uint32, shape (header.elements,)."""

    header: m.Packet
    data: npt.NDArray[np.uint32]


class Receiver:
    """Of one stream. Updates come one after the other; packets come between and beside their chunks."""

    def __init__(self, worker: str, chunk_bytes: int) -> None:
        self._worker = worker
        self._chunk_bytes = chunk_bytes
        self._update: tuple[m.Update, Assembly] | None = None
        self._packets: dict[int, tuple[m.Packet, Collection]] = {}  # by transfer

    def begin_update(self, update: m.Update, manifest: Manifest | None) -> None:
        """Raises BrokenError or Refused, before anything is allocated."""
        if manifest is None:
            raise BrokenError("an update came before this worker was ready")
        announced = announced_payloads(update.tensors, manifest, worker=self._worker)
        assembly = Assembly(
            *(update.version, announced),
            chunk_bytes=self._chunk_bytes,
            worker=self._worker,
            names=[spec.name for spec in manifest.specs],
        )
        self._update = update, assembly

    def begin_packet(self, packet: m.Packet, manifest: Manifest | None) -> ReceivedPacket | None:
        """The packet, if it is empty. Raises BrokenError, before anything is allocated."""
        limit = manifest.gradient_elements if manifest is not None else 0
        if packet.elements > limit:
            raise BrokenError(f"a packet of {packet.elements} elements came, and the model has {limit}")
        for transfer, (other, _) in list(self._packets.items()):  # of an exchange that was given up
            if other.exchange < packet.exchange:
                del self._packets[transfer]
        transfer = packet_transfer(packet)
        collection = Collection(transfer, 4 * packet.elements, worker=self._worker)
        self._packets[transfer] = packet, collection
        return self._finished_packet(transfer)

    def add(self, chunk: m.Chunk) -> ReceivedPacket | None:
        """The packet, if this was its last chunk. Raises BrokenError or Refused."""
        if chunk.transfer in self._packets:
            self._packets[chunk.transfer][1].add(chunk)
            return self._finished_packet(chunk.transfer)
        if chunk.transfer > MAX_UINT32:
            return None  # the rest of a packet of an exchange that was given up
        if self._update is None:
            raise BrokenError("a chunk came without an update")
        self._update[1].add(chunk)
        return None

    def _finished_packet(self, transfer: int) -> ReceivedPacket | None:
        packet, collection = self._packets[transfer]
        if not collection.complete:
            return None
        del self._packets[transfer]
        return ReceivedPacket(packet, collection.data.view(np.uint32))

    def take_update(self) -> tuple[m.Update, Assembly] | None:
        """The update whose bytes have all come, still to be checked by `Assembly.finish`."""
        if self._update is None or not self._update[1].complete:
            return None
        complete, self._update = self._update, None
        return complete
