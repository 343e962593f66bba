"""One worker's Exchange stream at the server: what is still to be written, and the push that is arriving."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from ..proto.messages import ServerMessage
from ..proto.refusal import Refusal
from ..proto.wire import encode_server
from .shard.inbox import Inbox
from .shard.store import Broadcast

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class WorkerStream:
    """A worker that is connected."""

    worker: str
    incarnation: int
    outbox: Outbox
    inbox: Inbox

    @property
    def id(self) -> tuple[str, int]:
        return self.worker, self.incarnation


class Outbox:
    """Messages for one worker, in order. A broadcast that is still being encoded keeps its place."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | Broadcast | Awaitable[Broadcast] | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.ended_with: Refusal | None = None
        self.final = False

    def send(self, message: ServerMessage) -> None:
        self.put(encode_server(message))

    def put(self, item: bytes | Broadcast | Awaitable[Broadcast]) -> None:
        """Send what is encoded, or will be."""
        self._queue.put_nowait(item)

    def end(self, why: Refusal, *, final: bool) -> None:
        """End the stream. final: the worker shall not come back, and gets what is queued first if it can."""
        if self.ended_with is None:
            self.ended_with, self.final = why, final
            self._queue.put_nowait(None)
            self.ended.set()

    async def pump(self, context: Context, on_broadcast: Callable[[Broadcast], None]) -> None:
        """Write until the end. `on_broadcast` is told of each broadcast that has gone out."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, bytes):
                await context.write(item)
                continue
            broadcast = item if isinstance(item, Broadcast) else await item
            for message in broadcast.messages:
                await context.write(message)
            on_broadcast(broadcast)
