"""Parts of pushes that are arriving on one stream, and end with it. No I/O.

A part that is whole and valid goes to the push ledger (`push_ledger`), which belongs to the member.
"""

from __future__ import annotations

from ...compressors import Plan
from ...proto.manifest import Manifest
from ...proto.messages import Chunk, PartHeader
from ...proto.refusal import Reason, refused
from ...proto.transfer import MAX_ARRIVING, Assembly, part_assembly, part_transfer

MAX_DROPPING = 1 << 12  # parts of a stream that are remembered as unused, in case that chunks follow


class ArrivingParts:
    """Up to `MAX_ARRIVING` parts of one stream, each overtaken by the next. A refused part leaves nothing,
    and its chunks are dropped."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._arriving: dict[int, tuple[PartHeader, Assembly]] = {}  # by transfer
        self._dropping: dict[int, None] = {}  # the last transfers that are unused
        self._latest = 0  # the transfer that the last chunk or header was of
        self._bytes = 0  # received since a part was complete
        self._busy: bool | None = None  # whether they came without a pause; None before there are any

    def begin(self, header: PartHeader, manifest: Manifest, plan: Plan) -> None:
        """Take a header. Bytes of the same part that had arrived are forgotten: the worker has begun it anew.

        Raises:
            Refused: before anything is allocated.
        """
        self.drop(header)
        what = f"push {header.seq}, part {header.part}"
        if header.plan != plan.number:
            limit, value = f"plan {plan.number}", f"{header.plan}"
            raise refused(Reason.PLAN, worker=self.worker, field=what, limit=limit, value=value)
        if header.part >= len(plan.parts):
            limit, value = f"a part below {len(plan.parts)}", str(header.part)
            raise refused(Reason.PLAN, worker=self.worker, field=what, limit=limit, value=value)
        if len(self._arriving) >= MAX_ARRIVING:
            limit = f"{MAX_ARRIVING} parts on their way at once"
            raise refused(Reason.SIZE, worker=self.worker, field=what, limit=limit, value="one more")
        transfer = part_transfer(header.seq, header.part)
        assembly = part_assembly(
            transfer, header.payloads, plan.parts[header.part], manifest, worker=self.worker
        )
        del self._dropping[transfer]
        self._arriving[transfer], self._latest = (header, assembly), transfer

    def header(self, transfer: int) -> PartHeader | None:
        """Return the header of the part that a chunk belongs to; None if it is not arriving."""
        found = self._arriving.get(transfer)
        return None if found is None else found[0]

    @property
    def unfinished(self) -> PartHeader | None:
        """The part that began first of those that are arriving; None without any."""
        return next((header for header, _ in self._arriving.values()), None)

    def add(self, chunk: Chunk) -> None:
        """Take a chunk.

        Raises:
            Refused: it does not belong here or is damaged.
        """
        self._bytes += len(chunk.data)
        if chunk.transfer in self._dropping:
            return
        found = self._arriving.get(chunk.transfer)
        if found is None:
            got = f"transfer {chunk.transfer} at offset {chunk.offset}"
            raise refused(
                Reason.CHUNK, worker=self.worker, field="chunk", limit="the header of a part first", value=got
            )
        self._latest = chunk.transfer
        found[1].add(chunk)

    def take(self) -> tuple[PartHeader, Assembly] | None:
        """Return the part that the last chunk was of, and forget it here; None if it is not complete."""
        found = self._arriving.get(self._latest)
        if found is None or not found[1].complete:
            return None
        return self._arriving.pop(self._latest)

    def since(self) -> tuple[int, bool]:
        """Return how many bytes were received since the part before the one that was taken, and whether they
        came without a pause. Bytes of another part that it overtook are included."""
        found = self._bytes, bool(self._busy)
        self._bytes, self._busy = 0, True if self._arriving else None
        return found

    def drop(self, header: PartHeader) -> None:
        """Forget a part, and ignore the rest of its chunks."""
        if self._busy is None:
            self._busy = header.waited
        self._drop(part_transfer(header.seq, header.part))

    def drop_push(self, seq: int) -> None:
        """Forget all parts of a push that are arriving, and ignore the rest of their chunks."""
        for transfer, (header, _) in list(self._arriving.items()):
            if header.seq == seq:
                self._drop(transfer)

    def _drop(self, transfer: int) -> None:
        self._arriving.pop(transfer, None)
        self._dropping[transfer] = None
        while len(self._dropping) > MAX_DROPPING:
            del self._dropping[next(iter(self._dropping))]
