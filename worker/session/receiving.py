"""Assembles the headers and chunks of one stream into checked parts of updates and packets. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...common.parts import Plan
from ...compressors import Payload
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.plans import plan_of
from ...proto.transfer import (
    PACKETS,
    Assembly,
    TransferBuffer,
    packet_transfer,
)
from ...proto.updates import NOTHING_SHARED, SharedSizes, update_assembly
from .attempts import BrokenError


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A part of an update whose bytes have all arrived and been checked.

    Attributes:
        payloads: payloads of the part, end to end, then those of the state beside it.
    """

    update: m.Update
    payloads: Sequence[Payload]


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedPacket:
    """A coded packet of another worker whose bytes have all arrived.

    Attributes:
        data: the packet's words: uint32, shape (header.elements,).
    """

    header: m.Packet
    data: npt.NDArray[np.uint32]


class Receiver:
    """Receives one stream: parts of updates one after the other, packets' chunks anywhere between."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._update: tuple[m.Update, Assembly] | None = None
        self._packets: dict[int, tuple[m.Packet, TransferBuffer]] = {}  # by transfer

    def plan(self, message: m.PlanAnnouncement, manifest: Manifest | None) -> Plan:
        """Check an announced plan and return it; it divides all following updates.

        Raises:
            BrokenError: this worker is not ready.
            Refused: the plan does not fit the model.
        """
        if manifest is None:
            raise BrokenError("a plan arrived before this worker was ready")
        return plan_of(message, manifest, worker=self._worker)

    def begin_update(
        self,
        update: m.Update,
        manifest: Manifest | None,
        plan: Plan | None,
        shared: SharedSizes = NOTHING_SHARED,
    ) -> None:
        """Check the header of a part of an update, and allocate memory for its chunks.

        shared: sizes of the job's state beside the values.

        Raises:
            BrokenError: the part is not of the plan, or this worker is not ready; nothing is allocated.
            Refused: the payloads do not fit the part; nothing is allocated.
        """
        if manifest is None or plan is None:
            raise BrokenError("an update arrived before this worker was ready, or before a plan")
        if update.plan != plan.number or update.part >= len(plan.parts):
            expected = f"expected one of {len(plan.parts)} parts of plan {plan.number}"
            raise BrokenError(f"update: {expected}, got part {update.part} of plan {update.plan}")
        part = plan.parts[update.part]
        self._update = update, update_assembly(update, part, manifest, shared, worker=self._worker)

    def begin_packet(self, packet: m.Packet, manifest: Manifest | None) -> ReceivedPacket | None:
        """Check the header of a coded packet, and allocate memory for its chunks.

        Incomplete packets of earlier exchanges are discarded. Returns the packet if it has no elements and is
        complete already; otherwise None. Raises BrokenError if the packet has more elements than the model;
        nothing is allocated.
        """
        limit = manifest.gradient_elements if manifest is not None else 0
        if packet.elements > limit:
            raise BrokenError(f"packet: expected at most {limit} elements, got {packet.elements}")
        for transfer, (other, _) in list(self._packets.items()):  # exchanges that the server has ended
            if other.exchange < packet.exchange:
                del self._packets[transfer]
        transfer = packet_transfer(packet)
        collection = TransferBuffer(transfer, 4 * packet.elements, worker=self._worker)
        self._packets[transfer] = packet, collection
        return self._finished_packet(transfer)

    def add(self, chunk: m.Chunk) -> ReceivedPacket | None:
        """Add a chunk to the packet or part of an update to which it belongs. Returns the chunk's packet if
        it is complete now; otherwise None. `take_update` returns updates.

        Raises:
            BrokenError: the chunk belongs to no packet or update.
            Refused: the chunk is damaged or out of order.
        """
        if chunk.transfer in self._packets:
            self._packets[chunk.transfer][1].add(chunk)
            return self._finished_packet(chunk.transfer)
        if chunk.transfer >= PACKETS:
            return None  # the rest of a packet of an exchange that the server has ended
        if self._update is None:
            raise BrokenError("a chunk arrived without an update")
        self._update[1].add(chunk)
        return None

    def _finished_packet(self, transfer: int) -> ReceivedPacket | None:
        """Return the packet of a transfer and forget it, if it is complete; otherwise None."""
        packet, collection = self._packets[transfer]
        if not collection.complete:
            return None
        del self._packets[transfer]
        return ReceivedPacket(packet, collection.data.view(np.uint32))

    def take_update(self) -> tuple[m.Update, Assembly] | None:
        """Return header and bytes of the present part of an update once all of the bytes have arrived;
        otherwise None. `Assembly.finish` checks them and returns the payloads."""
        if self._update is None or not self._update[1].complete:
            return None
        complete, self._update = self._update, None
        return complete
