"""One worker's Exchange stream at the server: the messages still to be written, and the parts that are
arriving."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from ...compressors.packing import LinkRate
from ...proto.manifest import first_difference
from ...proto.messages import ModelManifest, ServerMessage
from ...proto.refusal import Refusal
from ...proto.wire import encode_server, gather
from ..job import refusals
from ..shard.store import Encoded
from .arriving import ArrivingParts
from .updates import Broadcast

Context = grpc.aio.ServicerContext[Any, Any]
STALLED_S = 60.0  # longest time without a chunk of a part that has begun


@dataclass(slots=True)
class WorkerStream:
    """The stream of one connected worker. `WorkerCall` creates it; the conductor lists it while it is open.

    Attributes:
        following: the last update that is sent to the worker while it grows; None before the first.
        plan: number of the last plan that the worker has or has been sent; 0 for none.
        unwanted: seq of the open pushes of which the worker was told to send no more.
        model: manifest of the worker's model; None if it has sent none.
        saved: the last version at which the worker saved its own state; -1 for none.
        chunk_at: time of the last header or chunk of a part, in seconds of the monotonic clock.
        scans: running checks of complete parts.
    """

    worker: str
    incarnation: int
    outbox: Outbox
    arriving: ArrivingParts
    following: Broadcast | None = None
    plan: int = 0
    unwanted: frozenset[int] = frozenset()
    saved: int = -1
    model: ModelManifest | None = None
    chunk_at: float = 0.0
    scans: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def id(self) -> tuple[str, int]:
        """The worker and its incarnation, which identify the member."""
        return self.worker, self.incarnation


@dataclass(slots=True)
class _UpdateInProgress:
    """An update that is being sent to one worker.

    Attributes:
        counted: whether its bytes count in the metric of sent parameters.
        seen: number of its parts that have been moved to `waiting`.
        waiting: parts that wait to be sent.
        messages: remaining messages of the part that is being sent.
    """

    update: Broadcast
    counted: bool
    seen: int = 0
    waiting: list[Encoded] = field(default_factory=list[Encoded])
    messages: Iterator[bytes] = field(default_factory=lambda: iter(()))

    def next(self) -> bytes | None:
        """Return the next message; None if all parts so far have been sent."""
        while (message := next(self.messages, None)) is None:
            self.waiting += self.update.parts[self.seen :]
            self.seen = len(self.update.parts)
            if not self.waiting:
                return None
            numbers = [part.number for part in self.waiting]
            first = numbers.index(max(numbers)) if self.update.last_first else 0
            self.messages = iter(self.waiting.pop(first).messages)
        return message


def differences(streams: Iterable[WorkerStream], model: ModelManifest | None) -> dict[str, tuple[str, str]]:
    """Return the first difference of each worker's model from `model`, by worker; see `first_difference`.
    model: the job's; None for none."""
    return {
        stream.worker: first_difference(model, stream.model)
        for stream in streams
        if model is not None and stream.model is not None and stream.model.fingerprint != model.fingerprint
    }


def end_stalled(streams: Iterable[WorkerStream], lease_s: float, now: float) -> None:
    """End each stream on which a part has begun and no chunk has arrived for `STALLED_S`, or for a lease if
    that is longer. The worker may send the part again on a new stream. now: seconds of the monotonic
    clock."""
    limit_s = max(STALLED_S, lease_s)
    for stream in streams:
        part, silent_s = stream.arriving.unfinished, now - stream.chunk_at
        if part is not None and silent_s > limit_s:
            stream.outbox.end(refusals.stalled(stream.worker, part.seq, part.part, limit_s), final=False)


class Outbox:
    """The queue of messages for one worker. Short messages overtake updates between two chunks; updates keep
    their order."""

    def __init__(self) -> None:
        self._urgent: deque[bytes] = deque()
        self._updates: deque[_UpdateInProgress | bytes] = deque()
        self._more = asyncio.Event()
        self.ended = asyncio.Event()
        self.ended_with: Refusal | None = None
        self.final = False

    def send(self, message: ServerMessage) -> None:
        """Queue a message before the rest of any update."""
        self._urgent.append(encode_server(message))
        self._more.set()

    def put(self, message: bytes) -> None:
        """Queue an encoded message behind all queued messages."""
        self._updates.append(message)
        self._more.set()

    def broadcast(self, update: Broadcast, *, counted: bool = True) -> None:
        """Queue an update, whose parts are sent as they are added. counted: whether its bytes count in the
        metric of sent parameters."""
        self._updates.append(_UpdateInProgress(update, counted))
        update.listen(self._more.set)
        self._more.set()

    def end(self, why: Refusal, *, final: bool) -> None:
        """End the stream; only the first call counts.

        Args:
            why: reason, which the worker receives.
            final: whether the worker must not reconnect. It then gets the queued messages first, if it reads
                them in time.
        """
        if self.ended_with is None:
            self.ended_with, self.final = why, final
            self.ended.set()
            self._more.set()

    async def pump(self, context: Context, on_sent: Callable[[int, int], None], link: LinkRate) -> None:
        """Write the queued messages until the stream ends. on_sent: called after each counted update with the
        bytes of its elements as float32, and of its payloads. link: measures the writes."""
        while True:
            message = self._next(on_sent)
            if message is not None:
                message = gather(message, lambda: self._next(on_sent))
                began = time.monotonic()
                await context.write(message)
                link.wrote(len(message), time.monotonic() - began)
            elif self.ended_with is not None:
                return
            else:
                link.paused()
                self._more.clear()
                await self._more.wait()

    def _next(self, on_sent: Callable[[int, int], None]) -> bytes | None:
        """Return a short message, or else the next message of the first update; None if there is none yet."""
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
                on_sent(first.update.raw_bytes, first.update.payload_bytes)
        return None
