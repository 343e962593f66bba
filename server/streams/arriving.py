"""The parts of pushes that are arriving on one stream, and end with it. No I/O.

A complete and valid part moves to the push ledger (`push_ledger`), which belongs to the member.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...common.parts import Plan
from ...proto.announced import NO_BASES
from ...proto.manifest import Manifest
from ...proto.messages import Chunk, PartHeader
from ...proto.refusal import Reason, refused
from ...proto.transfer import MAX_ARRIVING, Assembly, part_assembly, part_transfer

MAX_DROPPING = 1 << 12  # most dropped parts of a stream whose further chunks are ignored


class ArrivingParts:
    """Up to `MAX_ARRIVING` incomplete parts of one stream. A later part may overtake an earlier one. A
    refused part is dropped with its remaining chunks. Each `WorkerStream` has one."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._arriving: dict[int, tuple[PartHeader, Assembly]] = {}  # header and bytes by transfer
        self._dropping: dict[int, None] = {}  # transfers that were dropped last
        self._latest = 0  # transfer of the last chunk or header
        self._bytes = self._unpacked = 0  # received since the last call of `since`, and before packing
        self._busy: bool | None = None  # whether they arrived without a pause; None before the first one

    def begin(
        self,
        header: PartHeader,
        manifest: Manifest,
        plan: Plan,
        coordinates: Mapping[int, int] = NO_BASES,
    ) -> None:
        """Begin a part with its header. Bytes of the same part that have arrived before are dropped, because
        the worker sends it anew. Raises Refused if the header does not match the plan or the manifest, or too
        many parts are arriving; no memory has been allocated. coordinates: number of coordinates of each
        tensor with bases."""
        self.drop(header)
        field = f"push {header.seq}, part {header.part}"
        if header.plan != plan.number:
            limit, value = f"plan {plan.number}", f"{header.plan}"
            raise refused(Reason.PLAN, worker=self.worker, field=field, limit=limit, value=value)
        if header.part >= len(plan.parts):
            limit, value = f"a part below {len(plan.parts)}", str(header.part)
            raise refused(Reason.PLAN, worker=self.worker, field=field, limit=limit, value=value)
        if len(self._arriving) >= MAX_ARRIVING:
            limit = f"{MAX_ARRIVING} incomplete parts at once"
            raise refused(Reason.SIZE, worker=self.worker, field=field, limit=limit, value="one more")
        transfer = part_transfer(header.seq, header.part)
        assembly = part_assembly(
            transfer,
            header.payloads,
            plan.parts[header.part],
            manifest,
            worker=self.worker,
            coordinates=coordinates,
        )
        del self._dropping[transfer]
        self._arriving[transfer], self._latest = (header, assembly), transfer

    def header(self, transfer: int) -> PartHeader | None:
        """Return the header of the part that a transfer belongs to; None if no such part is arriving."""
        found = self._arriving.get(transfer)
        return None if found is None else found[0]

    @property
    def unfinished(self) -> PartHeader | None:
        """Header of the arriving part that began first; None if no part is arriving."""
        return next((header for header, _ in self._arriving.values()), None)

    def add(self, chunk: Chunk) -> None:
        """Add a chunk to its part. Chunks of dropped parts are ignored. Raises Refused if the chunk belongs
        to no part, or is damaged."""
        self._bytes += len(chunk.data)
        if chunk.transfer in self._dropping:
            self._unpacked += len(chunk.data)
            return
        found = self._arriving.get(chunk.transfer)
        if found is None:
            got = f"transfer {chunk.transfer} at offset {chunk.offset}"
            raise refused(
                Reason.CHUNK, worker=self.worker, field="chunk", limit="the header of a part first", value=got
            )
        self._latest = chunk.transfer
        self._unpacked += len(found[1].add(chunk))

    def take(self) -> tuple[PartHeader, Assembly] | None:
        """Return and remove the part of the last chunk or header, if it is complete; otherwise None."""
        found = self._arriving.get(self._latest)
        if found is None or not found[1].complete:
            return None
        return self._arriving.pop(self._latest)

    def since(self) -> tuple[int, int, bool]:
        """Return the bytes that arrived since the previous call, their number before packing, and True when
        they arrived without a pause. Call it after each complete part; bytes of another part that it overtook
        are included."""
        found = self._bytes, self._unpacked, bool(self._busy)
        self._bytes = self._unpacked = 0
        self._busy = True if self._arriving else None
        return found

    def drop(self, header: PartHeader) -> None:
        """Drop a part, and ignore the rest of its chunks."""
        if self._busy is None:
            self._busy = header.waited
        self._drop(part_transfer(header.seq, header.part))

    def drop_push(self, seq: int) -> None:
        """Drop all arriving parts of a push, and ignore the rest of their chunks."""
        for transfer, (header, _) in list(self._arriving.items()):
            if header.seq == seq:
                self._drop(transfer)

    def _drop(self, transfer: int) -> None:
        """Drop a part by its transfer, and remember the transfer, so that later chunks of it are ignored."""
        self._arriving.pop(transfer, None)
        self._dropping[transfer] = None
        while len(self._dropping) > MAX_DROPPING:
            del self._dropping[next(iter(self._dropping))]
