"""PutState, GetState and GetOptimizer. Workers upload buffers before the commit of their push; those that
join or evaluate download buffers and frozen parameters; scripts download optimizer state to save it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ...proto import messages as m
from ...proto.entries import entry_bytes, of_kind
from ...proto.manifest import Manifest
from ...proto.moments import Moments, MomentValues
from ...proto.refusal import Reason, Refused, refused
from ...proto.state import TRANSFER, EntryValues, encode_values
from ...proto.transfer import Bytes, ChunkValidator
from ..conductor import Conductor
from ..job import events as e
from ..job import refusals
from ..shard.model_state import Deposit, ModelState
from ..streams.outbox import Context
from .fetching import Fetches

NextChunk = Callable[[AsyncIterator[Any], str], Awaitable[m.Chunk]]


class StateCalls:
    def __init__(self, conductor: Conductor, fetches: Fetches, next_chunk: NextChunk) -> None:
        """next_chunk: returns the next chunk of a worker's upload. Raises Refused if it is late."""
        self._conductor = conductor
        self._fetches = fetches
        self._next_chunk = next_chunk

    @property
    def _state(self) -> ModelState:
        return self._conductor.state

    async def receive(
        self, requests: AsyncIterator[Any], entries: Sequence[m.Entry], member: tuple[str, int]
    ) -> dict[str, Bytes]:
        """Return the values of entries, from the chunks that follow. Raises Refused."""
        values = EntryValues(entries, worker=member[0])
        await self._read(values, requests, member)
        return values.finish()

    async def _read(
        self, chunks: ChunkValidator, requests: AsyncIterator[Any], member: tuple[str, int]
    ) -> None:
        while not chunks.complete:
            chunks.add(await self._next_chunk(requests, member[0]))
            # Heartbeats on another stream of the connection wait behind the upload.
            self._conductor.happen(e.KeepAlive(*member))

    async def put(self, header: m.StateHeader, requests: AsyncIterator[Any]) -> m.PutStateResponse:
        """Raises Refused."""
        member = header.worker, header.incarnation
        self._conductor.happen(e.KeepAlive(*member))
        self._manifest(header.worker)
        entries = of_kind(self._state.entries, frozen=False)
        if not entries or header.frozen:
            limit = "buffers of a model that has some, and nothing else"
            got = "frozen parameters" if header.frozen else "those of a model that has none"
            raise refused(Reason.TENSOR, worker=header.worker, field="state", limit=limit, value=got)
        why = self._why_not(header)
        if why is not None:  # read to the end: a worker that still writes would not see why the call ended
            size = sum(map(entry_bytes, entries))
            await self._read(ChunkValidator(TRANSFER, size, worker=header.worker), requests, member)
            raise why
        values = await self.receive(requests, entries, member)
        why = self._why_not(header)
        if why is not None:
            raise why
        if header.seq:
            deposit = Deposit(collection=header.collection, values=values)
            self._conductor.put_buffers(e.PushKey(*member, header.seq), deposit)
        else:
            self._conductor.put_evaluated(header.epoch, values)
        return m.PutStateResponse()

    def _why_not(self, header: m.StateHeader) -> Refused | None:
        """Return the refusal of buffers that the server has not asked for, or no longer needs."""
        core, member = self._conductor.core, (header.worker, header.incarnation)
        if header.seq:
            right = core.collects(*member, header.collection)
            got = f"those of push {header.seq} for collection {header.collection}"
        else:
            right = core.evaluates(*member, header.epoch)
            got = f"those that epoch {header.epoch} is evaluated with"
        if right:
            return None
        limit = "buffers that the worker was asked for"
        return refused(Reason.STALE, worker=header.worker, field="state", limit=limit, value=got)

    async def get(self, request: m.GetStateRequest, job: str, context: Context) -> None:
        """Raises Refused."""
        self._manifest(request.worker)
        state = self._state
        frozen = request.frozen != state.frozen_digest
        values = dict(await state.of(request.epoch))
        if frozen:
            values |= state.frozen
        entries = of_kind(state.entries, frozen=frozen)
        header = m.StateHeader(job=job, epoch=request.epoch, frozen=frozen)
        await self._fetches.write((header, *encode_values(entries, values)), context.write)
        self._conductor.metrics.sent_raw(sum(values[entry.name].size for entry in entries))

    async def receive_moments(
        self, requests: AsyncIterator[Any], header: m.InitializeHeader, manifest: Manifest
    ) -> Moments:
        """Return the optimizer's state that a script uploads, from its header and chunks. Raises Refused."""
        values = MomentValues(header.moments, manifest, worker=header.worker)
        await self._read(values, requests, (header.worker, header.incarnation))
        return values.finish()

    async def get_optimizer(self, request: m.GetOptimizerRequest, context: Context) -> None:
        """Raises Refused."""
        self._manifest(request.worker)
        sent = await self._fetches.send_moments(self._conductor.shard, context.write)
        self._conductor.metrics.sent_raw(sent)

    def _manifest(self, worker: str) -> Manifest:
        manifest = self._conductor.shard.reported.manifest
        if manifest is None:
            raise Refused(refusals.not_initialized(worker, "state"))
        return manifest
