"""Assembles the push that is arriving on a stream: checks its header first, then takes its chunks."""

from __future__ import annotations

from collections.abc import Sequence

from ...compressors import Payload
from ...proto.manifest import Manifest
from ...proto.messages import Assignment, Chunk, Push
from ...proto.refusal import Reason, Refused, refused
from ...proto.transfer import Assembly, announced_payloads
from ...proto.wire import CHUNK_BYTES
from ..job import refusals


class Inbox:
    """Assembles one push at a time. A push that is refused leaves nothing behind; its chunks are dropped."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.current: Push | None = None  # the push that is arriving
        self._assembly: Assembly | None = None
        self._dropping: int | None = None  # seq of the push that was refused

    def begin(self, header: Push, manifest: Manifest | None, assigned: Assignment | None = None) -> None:
        """Take a push header. A push that was arriving is forgotten: the worker has begun anew.

        assigned: what the worker was given last, if it has not answered.

        Raises:
            Refused: before anything is allocated.
        """
        self.drop(header)
        if manifest is None:
            raise Refused(refusals.not_initialized(self.worker, f"push {header.seq}"))
        payloads = self._announced(header, manifest, assigned)
        if header.loss != header.loss or abs(header.loss) == float("inf"):
            raise self._refused(
                Reason.NON_FINITE, f"push {header.seq} loss", "a finite number", str(header.loss)
            )
        self.current, self._dropping = header, None
        names = [manifest.specs[tensor.tensor].name for tensor in header.tensors]
        self._assembly = Assembly(
            header.seq, payloads, chunk_bytes=CHUNK_BYTES, worker=self.worker, names=names
        )

    def _announced(self, header: Push, manifest: Manifest, assigned: Assignment | None) -> Sequence[Payload]:
        if header.slices:
            given = header.slice, header.slices
            answers = assigned if assigned is not None and assigned.id == header.assignment else None
            expected = given if answers is None else (answers.slice, answers.slices)
            if header.slice >= header.slices or given != expected:
                raise Refused(refusals.slice_of(self.worker, header.seq, given, answers))
        if header.samples > 0 and header.exchanged is None:
            return announced_payloads(
                header.tensors,
                manifest,
                worker=self.worker,
                slice=header.slice if header.slices else 0,
                slices=max(1, header.slices),
            )
        if header.tensors:
            raise self._refused(
                Reason.TENSOR,
                f"push {header.seq}",
                "no tensors where samples is 0 or packets were exchanged",
                f"{len(header.tensors)} tensors",
            )
        return ()

    def add(self, chunk: Chunk) -> None:
        """Take a chunk.

        Raises:
            Refused: it does not belong here or is damaged.
        """
        if self._dropping == chunk.transfer:
            return
        if self._assembly is None:
            got = f"transfer {chunk.transfer} at offset {chunk.offset}"
            raise self._refused(Reason.CHUNK, "chunk", "a push header first", got)
        self._assembly.add(chunk)

    def take(self) -> tuple[Push, Assembly] | None:
        """The push, if it is complete; the inbox is empty again then."""
        if self.current is None or self._assembly is None or not self._assembly.complete:
            return None
        complete = self.current, self._assembly
        self.current = self._assembly = None
        return complete

    def drop(self, header: Push) -> None:
        """Forget what has arrived, and ignore the rest of this push."""
        self.current = self._assembly = None
        self._dropping = header.seq

    def _refused(self, reason: Reason, field: str, limit: str, value: str) -> Refused:
        return refused(reason, worker=self.worker, field=field, limit=limit, value=value)
