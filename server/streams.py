"""One worker's Exchange stream at the server: what is still to be written, and the push that is arriving."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import grpc.aio

from ..compressors import Payload
from ..proto.manifest import Manifest
from ..proto.messages import Chunk, Push, ServerMessage
from ..proto.refusal import Reason, Refusal, Refused, refusal
from ..proto.transfer import Assembly, announced_payloads
from ..proto.wire import encode_server
from .store import Broadcast

Context = grpc.aio.ServicerContext[Any, Any]


class Outbox:
    """Messages for one worker, in order. A broadcast that is still being encoded keeps its place."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | Awaitable[Broadcast] | None] = asyncio.Queue()
        self.ended_with: Refusal | None = None
        self.final = False

    def send(self, message: ServerMessage) -> None:
        self._queue.put_nowait(encode_server(message))

    def send_broadcast(self, broadcast: Awaitable[Broadcast]) -> None:
        self._queue.put_nowait(broadcast)

    def end(self, refusal: Refusal | None, *, final: bool) -> None:
        """Write what is queued, then end the stream. final: the worker shall not come back."""
        if self.ended_with is None:
            self.ended_with, self.final = refusal, final
        self._queue.put_nowait(None)

    async def pump(self, context: Context, on_broadcast: Any) -> None:
        """Write until the end. `on_broadcast(broadcast)` is told of each one that has gone out."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, bytes):
                await context.write(item)
                continue
            broadcast = await item
            for message in broadcast.messages:
                await context.write(message)
            on_broadcast(broadcast)


class Inbox:
    """Assembles one push at a time. A push that is refused leaves nothing behind; its chunks are dropped."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._header: Push | None = None
        self._assembly: Assembly | None = None
        self._dropping: tuple[int, int] | None = None

    def begin(self, header: Push, manifest: Manifest | None) -> bool:
        """Take a push header. Returns whether the push is complete without any chunk.

        Raises:
            Refused: before anything is allocated.
        """
        self.drop(header)
        if manifest is None:
            why = "push before the job has its initial parameters"
            raise Refused(Refusal(reason=Reason.NOT_INITIALIZED, worker=self.worker, message=why))
        payloads: Sequence[Payload] = ()
        if header.samples > 0:
            payloads = announced_payloads(header.tensors, manifest, header.partition, worker=self.worker)
        elif header.tensors or header.partition >= len(manifest.partitions):
            raise Refused(
                refusal(
                    Reason.TENSOR,
                    worker=self.worker,
                    field=f"push {header.seq}",
                    limit="no tensors with samples = 0, in a partition that exists",
                    value=f"{len(header.tensors)} tensors in partition {header.partition}",
                )
            )
        if header.loss != header.loss or abs(header.loss) == float("inf"):
            raise Refused(
                refusal(
                    Reason.NON_FINITE,
                    worker=self.worker,
                    field=f"push {header.seq} loss",
                    limit="a finite number",
                    value=str(header.loss),
                )
            )
        self._assembly = Assembly(header.seq, header.partition, payloads, header.crc32c, worker=self.worker)
        self._header, self._dropping = header, None
        return self._assembly.complete

    def add(self, chunk: Chunk) -> bool:
        """Take a chunk. Returns whether the push is complete now.

        Raises:
            Refused: the chunk does not belong here or is damaged; the push is dropped.
        """
        if self._dropping == (chunk.transfer, chunk.partition):
            return False
        if self._assembly is None:
            raise Refused(
                refusal(
                    Reason.CHUNK,
                    worker=self.worker,
                    field="chunk",
                    limit="a push header first",
                    value=f"transfer {chunk.transfer} at offset {chunk.offset}",
                )
            )
        self._assembly.add(chunk)
        return self._assembly.complete

    def take(self) -> tuple[Push, Assembly]:
        """The complete push; the inbox is empty again."""
        assert self._header is not None and self._assembly is not None
        header, assembly = self._header, self._assembly
        self._header = self._assembly = None
        return header, assembly

    @property
    def current(self) -> Push | None:
        """The push that is arriving."""
        return self._header

    def drop(self, header: Push) -> None:
        """Forget what has arrived, and ignore the rest of this push."""
        self._header = self._assembly = None
        self._dropping = (header.seq, header.partition)
