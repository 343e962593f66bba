"""PutState, GetState and GetOptimizer. Workers upload buffers before the commit of their push. Workers that
join or evaluate download buffers and frozen parameters. Scripts download the optimizer's state to save it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ...proto import messages as m
from ...proto.entries import entry_bytes, of_kind
from ...proto.manifest import Manifest
from ...proto.refusal import Reason, Refused, refused
from ...proto.state import TRANSFER, EntryValues, encode_values
from ...proto.transfer import ChunkValidator
from ..conductor import Conductor
from ..job import events as e
from ..job import refusals
from ..shard.model_state import Deposit, ModelState
from ..streams.outbox import Context
from .fetching import Fetches

NextChunk = Callable[[AsyncIterator[Any], str], Awaitable[m.Chunk]]


class StateCalls:
    """Handlers of the calls that transfer buffers, frozen parameters and optimizer state. `Service` creates
    it."""

    def __init__(self, conductor: Conductor, fetches: Fetches, next_chunk: NextChunk) -> None:
        """
        Args:
            fetches: limits the number of downloads at a time.
            next_chunk: returns the next chunk of a worker's upload; raises Refused if the chunk is late."""
        self._conductor = conductor
        self._fetches = fetches
        self._next_chunk = next_chunk

    @property
    def _state(self) -> ModelState:
        return self._conductor.state

    async def _read(
        self, chunks: ChunkValidator, requests: AsyncIterator[Any], member: tuple[str, int]
    ) -> None:
        """Pass the chunks of an upload to `chunks` until it is complete. Each chunk renews the member's
        lease."""
        while not chunks.complete:
            chunks.add(await self._next_chunk(requests, member[0]))
            self._conductor.happen(e.KeepAlive(*member))

    async def put(self, header: m.StateHeader, requests: AsyncIterator[Any]) -> m.PutStateResponse:
        """Handle PutState: receive a worker's buffers, for a push or an evaluation. Raises Refused if the
        server has not asked for these buffers, or the upload is invalid."""
        member = header.worker, header.incarnation
        self._conductor.happen(e.KeepAlive(*member))
        self._manifest(header.worker)
        entries = of_kind(self._state.entries, frozen=False)
        if not entries or header.frozen:
            limit = "only buffers, of a model that has buffers"
            got = "frozen parameters" if header.frozen else "buffers, and the model has none"
            raise refused(Reason.TENSOR, worker=header.worker, field="state", limit=limit, value=got)
        why = self._why_not(header)
        if why is not None:  # read all chunks: a worker that is still writing would not see the refusal
            size = sum(map(entry_bytes, entries))
            await self._read(ChunkValidator(TRANSFER, size, worker=header.worker), requests, member)
            raise why
        received = EntryValues(entries, worker=header.worker)
        await self._read(received, requests, member)
        values = received.finish()
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
        """Return the refusal of buffers that the server has not asked for or no longer needs; None for
        expected ones."""
        core, member = self._conductor.core, (header.worker, header.incarnation)
        if header.seq:
            right = core.state.collects(*member, header.collection)
            got = f"buffers of push {header.seq} for collection {header.collection}"
        else:
            right = core.state.evaluates(*member, header.epoch)
            got = f"buffers of the evaluation of epoch {header.epoch}"
        if right:
            return None
        limit = "buffers that the worker was asked for"
        return refused(Reason.STALE, worker=header.worker, field="state", limit=limit, value=got)

    async def get(self, request: m.GetStateRequest, job: str, context: Context) -> None:
        """Handle GetState: send the buffers of an epoch's evaluation, or the current ones, to a worker. Send
        the frozen parameters too, unless the worker's digest shows that it has them. Raises Refused if the
        job has no parameters yet, or the worker stops reading."""
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

    async def get_optimizer(self, request: m.GetOptimizerRequest, context: Context) -> None:
        """Handle GetOptimizer: send the optimizer's state. Raises Refused if the job has no parameters yet,
        or the worker stops reading."""
        self._manifest(request.worker)
        sent = await self._fetches.send_moments(self._conductor.shard, context.write)
        self._conductor.metrics.sent_raw(sent)

    def _manifest(self, worker: str) -> Manifest:
        """Return the model's manifest. Raises Refused if the job has no parameters yet."""
        manifest = self._conductor.shard.reported.manifest
        if manifest is None:
            raise Refused(refusals.not_initialized(worker, "state"))
        return manifest
