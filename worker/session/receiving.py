"""From the headers and chunks of one stream to parts of updates and packets, whole and checked. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...compressors import Payload, Plan
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.plans import plan_of
from ...proto.transfer import (
    PACKETS,
    Assembly,
    TransferBuffer,
    packet_transfer,
    part_assembly,
    part_transfer,
)
from .attempts import BrokenError


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A part of an update whose bytes have all arrived and been checked."""

    update: m.Update
    payloads: Sequence[Payload]


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedPacket:
    """A coded packet of another worker, whole. data: uint32, shape (header.elements,)."""

    header: m.Packet
    data: npt.NDArray[np.uint32]


class Receiver:
    """Receives one stream. Parts of updates arrive one after the other, packets between their chunks."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._update: tuple[m.Update, Assembly] | None = None
        self._packets: dict[int, tuple[m.Packet, TransferBuffer]] = {}  # by transfer

    def plan(self, message: m.PlanAnnouncement, manifest: Manifest | None) -> Plan:
        """Return the plan of the following updates. Raises BrokenError or Refused."""
        if manifest is None:
            raise BrokenError("a plan came before this worker was ready")
        return plan_of(message, manifest, worker=self._worker)

    def begin_update(self, update: m.Update, manifest: Manifest | None, plan: Plan | None) -> None:
        """Raises BrokenError or Refused, before anything is allocated."""
        if manifest is None or plan is None:
            raise BrokenError("an update came before this worker was ready, or before a plan")
        if update.plan != plan.number or update.part >= len(plan.parts):
            known = f"there are {len(plan.parts)} of plan {plan.number}"
            raise BrokenError(f"part {update.part} of plan {update.plan} came, and {known}")
        part, transfer = plan.parts[update.part], part_transfer(update.version, update.part)
        self._update = update, part_assembly(transfer, update.payloads, part, manifest, worker=self._worker)

    def begin_packet(self, packet: m.Packet, manifest: Manifest | None) -> ReceivedPacket | None:
        """Begin a packet; returned if it is empty. Raises BrokenError, before anything is allocated."""
        limit = manifest.gradient_elements if manifest is not None else 0
        if packet.elements > limit:
            raise BrokenError(f"a packet of {packet.elements} elements came, and the model has {limit}")
        for transfer, (other, _) in list(self._packets.items()):  # of an exchange that was given up
            if other.exchange < packet.exchange:
                del self._packets[transfer]
        transfer = packet_transfer(packet)
        collection = TransferBuffer(transfer, 4 * packet.elements, worker=self._worker)
        self._packets[transfer] = packet, collection
        return self._finished_packet(transfer)

    def add(self, chunk: m.Chunk) -> ReceivedPacket | None:
        """Add a chunk. Returns its packet, if it is whole now. Raises BrokenError or Refused."""
        if chunk.transfer in self._packets:
            self._packets[chunk.transfer][1].add(chunk)
            return self._finished_packet(chunk.transfer)
        if chunk.transfer >= PACKETS:
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
        """Return an update whose bytes have all arrived; `Assembly.finish` checks them."""
        if self._update is None or not self._update[1].complete:
            return None
        complete, self._update = self._update, None
        return complete
