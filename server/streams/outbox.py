"""One worker's Exchange stream at the server: what is still to be written, and the parts that arrive."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from ...proto.messages import ServerMessage
from ...proto.refusal import Refusal
from ...proto.wire import encode_server, gather
from ..shard.store import Encoded
from .arriving import ArrivingParts
from .updates import Broadcast

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class WorkerStream:
    """A worker that is connected. scans: of parts that have come, while they run. following: the last update
    that it is sent as it grows. saved: the last version of which it has written down its own state, if it has
    any. plan: number of the last plan that it has, or has been sent. unwanted: open pushes that it was told
    to send no more of. chunk_at: when a piece of a part came last, in seconds of the monotonic clock."""

    worker: str
    incarnation: int
    outbox: Outbox
    arriving: ArrivingParts
    following: Broadcast | None = None
    plan: int = 0
    unwanted: frozenset[int] = frozenset()
    saved: int = -1
    chunk_at: float = 0.0
    scans: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def id(self) -> tuple[str, int]:
        return self.worker, self.incarnation


@dataclass(slots=True)
class _UpdateInProgress:
    """An update on its way. counted: whether its bytes count as parameters that were sent. seen: parts of it
    that have begun, or are among those that wait. messages: of the part that has begun."""

    update: Broadcast
    counted: bool
    seen: int = 0
    waiting: list[Encoded] = field(default_factory=list[Encoded])
    messages: deque[bytes] = field(default_factory=deque[bytes])

    def next(self) -> bytes | None:
        """None if the update has to grow first, or is through."""
        while not self.messages:
            self.waiting += self.update.parts[self.seen :]
            self.seen = len(self.update.parts)
            if not self.waiting:
                return None
            numbers = [part.number for part in self.waiting]
            first = numbers.index(max(numbers)) if self.update.last_first else 0
            self.messages.extend(self.waiting.pop(first).messages)
        return self.messages.popleft()


class Outbox:
    """Messages for one worker. Short ones overtake updates between two chunks; updates keep their order."""

    def __init__(self) -> None:
        self._urgent: deque[bytes] = deque()
        self._updates: deque[_UpdateInProgress | bytes] = deque()
        self._more = asyncio.Event()
        self.ended = asyncio.Event()
        self.ended_with: Refusal | None = None
        self.final = False

    def send(self, message: ServerMessage) -> None:
        """Send a message before what is left of any update."""
        self._urgent.append(encode_server(message))
        self._more.set()

    def put(self, message: bytes) -> None:
        """Send a message behind what waits already."""
        self._updates.append(message)
        self._more.set()

    def broadcast(self, update: Broadcast, *, counted: bool = True) -> None:
        """Send an update, as far as there is one and then as it grows."""
        self._updates.append(_UpdateInProgress(update, counted))
        update.listen(self._more.set)
        self._more.set()

    def end(self, why: Refusal, *, final: bool) -> None:
        """End the stream. final: the worker shall not come back, and gets what is queued first if it can."""
        if self.ended_with is None:
            self.ended_with, self.final = why, final
            self.ended.set()
            self._more.set()

    async def pump(self, context: Context, on_sent: Callable[[int], None]) -> None:
        """Write until the end. `on_sent` is told what an update that has gone out takes as float32."""
        while True:
            message = self._next(on_sent)
            if message is not None:
                await context.write(gather(message, lambda: self._next(on_sent)))
            elif self.ended_with is not None:
                return
            else:
                self._more.clear()
                await self._more.wait()

    def _next(self, on_sent: Callable[[int], None]) -> bytes | None:
        """A short message, or the next one of the first update; None if it has to grow first."""
        if self._urgent:
            return self._urgent.popleft()
        while self._updates:
            first = self._updates[0]
            if isinstance(first, bytes):
                self._updates.popleft()
                return first
            message = first.next()
            if message is not None:
                return message
            if not first.update.complete:
                return None
            self._updates.popleft()
            if first.counted:
                on_sent(first.update.raw_bytes)
        return None
