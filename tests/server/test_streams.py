"""Messages on a worker's stream, and their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from gradwire.compressors.packing import LinkRate
from gradwire.proto import messages as m
from gradwire.proto.refusal import Reason, Refusal
from gradwire.proto.wire import BATCH_BYTES, decode_envelope
from gradwire.server.shard.store import Encoded
from gradwire.server.streams.outbox import Outbox
from gradwire.server.streams.updates import Broadcast

WHY = Refusal(reason=Reason.FENCED, message="over")


BATCH = 0x72  # the first byte of one


def part(*messages: str, whole: bool = True, short: bool = False, number: int = 0) -> Encoded:
    """short: whether they are put together with others."""
    filled = [
        message.encode() if short else message.encode().ljust(BATCH_BYTES, b"-") for message in messages
    ]
    size = len(messages)
    return Encoded(tuple(filled), 4 * size, whole=whole, number=number, payload_bytes=size)


def described(message: bytes) -> str:
    """A message of the server by its kind, one of the texts here by what is left without its filling."""
    found = message.decode().rstrip("-") if message.isascii() and message[:1].isalpha() else None
    return found or type(decode_envelope(message, "ServerMessage")).__name__


class Stream:
    """A worker's end, which takes a message only when it is told to."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.counted: list[int] = []
        self._may = asyncio.Semaphore(0)

    async def write(self, message: bytes) -> None:
        await self._may.acquire()
        if message[0] != BATCH:
            self.written.append(described(message))
            return
        batch = decode_envelope(message, "ServerMessage")
        self.written.append("+".join(map(described, batch.messages)))

    def count(self, raw_bytes: int, payload_bytes: int) -> None:
        assert raw_bytes == 4 * payload_bytes
        self.counted.append(raw_bytes)

    async def take(self, messages: int = 100) -> str:
        """Return all that has been written, after so many more messages."""
        for _ in range(messages):
            self._may.release()
        for _ in range(20):
            await asyncio.sleep(0)
        return " ".join(self.written)


@asynccontextmanager
async def pumped() -> AsyncGenerator[tuple[Outbox, Stream]]:
    """An outbox and its stream, whose writer has to end by itself."""
    outbox, stream = Outbox(), Stream()
    context: Any = stream
    writer = asyncio.create_task(outbox.pump(context, stream.count, LinkRate()))
    yield outbox, stream
    outbox.end(WHY, final=False)
    await asyncio.wait_for(writer, 10)


async def test_an_update_is_sent_while_it_grows_and_counts_once_it_is_whole() -> None:
    async with pumped() as (outbox, stream):
        update = Broadcast(1)
        update.add(part("a1", "a2"))
        outbox.broadcast(update)
        assert await stream.take() == "a1 a2"
        update.add(part("b1"))
        assert await stream.take() == "a1 a2 b1"
        assert stream.counted == []
        update.finish([part("c1")])
        assert await stream.take() == "a1 a2 b1 c1"
        assert stream.counted == [16]


async def test_of_parts_that_wait_the_one_nearest_to_the_input_may_go_first() -> None:
    """None goes between two messages of another; a second worker is behind, and is sent them otherwise."""
    async with pumped() as (outbox, stream):
        update = Broadcast(1, last_first=True)
        outbox.broadcast(update)
        update.add(part("a1", "a2", number=1))
        assert await stream.take(1) == "a1"
        for number, names in ((0, ("b1",)), (3, ("c1", "c2")), (2, ("d1",))):
            update.add(part(*names, number=number))
        assert await stream.take(3) == "a1 a2 c1 c2"
        update.finish([part("e1", number=4)])
        assert await stream.take() == "a1 a2 c1 c2 d1 e1 b1"  # the one before the last was being written
        assert stream.counted == [28]
        outbox.broadcast(update)
        assert (await stream.take()).endswith("e1 c1 c2 d1 a1 a2 b1")


async def test_two_updates_keep_their_order_however_they_grow() -> None:
    async with pumped() as (outbox, stream):
        first, second = Broadcast(1), Broadcast(2)
        outbox.broadcast(first, counted=False)
        outbox.broadcast(second)
        outbox.put(b"packet")
        second.finish([part("b1")])
        assert await stream.take() == ""
        first.add(part("a1"))
        assert await stream.take() == "a1"
        first.finish()
        assert await stream.take() == "a1 b1 packet"
        assert stream.counted == [4]


async def test_a_short_message_overtakes_what_is_left_of_any_update() -> None:
    async with pumped() as (outbox, stream):
        update = Broadcast(1)
        update.finish([part("a1", "a2", "a3")])
        outbox.broadcast(update)
        assert await stream.take(1) == "a1"
        outbox.send(m.InitializeRequest())
        assert await stream.take(2) == "a1 a2 InitializeRequest+a3"  # the second was being written already


async def test_a_short_message_does_not_wait_for_an_update_to_grow() -> None:
    async with pumped() as (outbox, stream):
        outbox.broadcast(Broadcast(1))
        assert await stream.take() == ""
        outbox.send(m.InitializeRequest())
        assert await stream.take() == "InitializeRequest"


async def test_a_stream_ends_though_an_update_still_grows_after_what_there_is_of_it() -> None:
    async with pumped() as (outbox, stream):
        update = Broadcast(1)
        update.add(part("a1", "a2"))
        outbox.broadcast(update)
        outbox.end(WHY, final=True)
        assert await stream.take() == "a1 a2"
        update.finish([part("b1")])
        assert await stream.take() == "a1 a2"
        assert stream.counted == []


async def test_an_update_is_the_same_for_whoever_joins_while_it_grows() -> None:
    async with pumped() as (outbox, stream):
        update, late, late_stream = Broadcast(1), Outbox(), Stream()
        outbox.broadcast(update)
        update.add(part("a1"))
        context: Any = late_stream
        writer = asyncio.create_task(late.pump(context, late_stream.count, LinkRate()))
        late.broadcast(update)
        update.finish([part("b1", whole=False)])
        assert await stream.take() == await late_stream.take() == "a1 b1"
        assert (update.whole, update.raw_bytes, update.wire_bytes) == (False, 8, 2 * BATCH_BYTES)
        late.end(WHY, final=False)
        await writer


async def test_short_messages_go_out_together_with_the_first_long_one_that_follows() -> None:
    async with pumped() as (outbox, stream):
        update = Broadcast(1)
        outbox.broadcast(update)
        update.add(part("a1", "a2", short=True))
        update.finish([part("b1", "b2")])
        outbox.send(m.InitializeRequest())
        assert await stream.take() == "InitializeRequest+a1+a2+b1 b2"
        assert stream.counted == [16]
