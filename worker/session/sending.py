"""The messages of one stream that wait to be written, and their order. No I/O.

Short messages go first, between two chunks. Transfers follow in the order in which they were queued, unless
the plan gives its parts *turns*, positions in the order of sending. A part with a smaller turn is sent before
waiting parts, and between the chunks of a part that is being sent: up to four are being sent at once, each
interrupted by the next. No part overtakes a commit that was queued before it. The plan may also have a
*credit*: the number of parts that may be sent before the server has confirmed one with `Stored`.

The header of the part that is written first has the push's learning rates, the other headers have none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...common.parts import Plan
from ...compressors.packing import Packing
from ...proto import messages as m
from ...proto.transfer import MAX_ARRIVING, Pack, encode_chunks
from ...proto.wire import encode_worker
from .throttle import Throttle


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A header and the bytes that follow it in chunks.

    The bytes must not change until they are sent; a push's bytes, until the server has decided on the push.
    Chunks are framed while they are sent. That overlaps with the network, and makes no second copy.

    Attributes:
        data: the bytes, end to end, flat uint8.
        checksums: running CRC-32C at the end of each chunk; None to compute it while sending.
    """

    header: m.PartHeader | m.Packet | m.Snapshot
    number: int
    data: Sequence[npt.NDArray[np.uint8]]
    chunk_bytes: int
    checksums: Sequence[int] | None = None

    @property
    def count(self) -> int:
        """Number of messages: the header and the chunks."""
        return 1 + -(-sum(each.size for each in self.data) // self.chunk_bytes)

    def messages(self, pack: Pack) -> Iterator[bytes]:
        """Yield the serialized header, then each serialized chunk. pack: packs chunks (`encode_chunks`)."""
        yield encode_worker(self.header)
        yield from encode_chunks(self.number, self.data, self.chunk_bytes, self.checksums, pack)


@dataclass(slots=True)
class _TransferInProgress:
    """A transfer that is being written.

    Attributes:
        turn: position in the plan's order of sending; 0 without one.
    """

    transfer: Transfer
    turn: int
    messages: Iterator[bytes]
    left: int


class SendQueue:
    """The messages that wait to be written to the present stream. Belongs to the event loop's thread.

    Attributes:
        exchange: number of the exchange of the last assignment; packets of earlier exchanges are not sent.
        sent: bytes written so far, and seconds so far during which there were bytes to write.
        packing: packs the chunks of transfers, by the rate of `link`, which the writer measures.
    """

    def __init__(self, unsettled: Container[int]) -> None:
        """unsettled: numbers of the pushes without an outcome; parts of others take no credit."""
        self._unsettled = unsettled
        self.plan: Plan | None = None
        self.exchange = 0
        self.sent = 0, 0.0
        self.open = False
        self._urgent: deque[bytes] = deque()
        self._queue: deque[bytes | Transfer] = deque()
        self._sending: list[_TransferInProgress] = []  # each interrupts the one before it
        self._unanswered: set[tuple[int, int]] = set()  # parts sent, not confirmed: (seq, number)
        self._rated: set[int] = set()  # pushes whose learning rates the stream has brought to the server
        self.packing = Packing()
        self.link = self.packing.open_link()
        self._more = asyncio.Event()
        self._writing = False  # whether a message is being written
        self._throttle = Throttle()
        self._busy_since: float | None = None

    @property
    def idle(self) -> bool:
        """True if all queued messages are written, or there is no stream."""
        return not (self.open and (self._queue or self._urgent or self._sending or self._writing))

    def open_stream(self) -> None:
        """Begin a new stream, with nothing queued."""
        self.open, self._writing = True, False
        for held in (self._queue, self._urgent, self._sending, self._unanswered, self._rated):
            held.clear()

    def end_stream(self) -> None:
        """End the stream. Queued messages are lost."""
        self.open = False
        self._queue.clear()

    def say(self, message: m.WorkerMessage) -> bool:
        """Queue a short message before all waiting chunks. Returns True if it is queued; False if there is no
        stream, so that the message is lost."""
        if self.open:
            self._urgent.append(encode_worker(message))
            self._more.set()
        return self.open

    def put(self, item: bytes | Transfer) -> None:
        """Queue an item at the end; a transfer moves before waiting transfers with a later turn.

        A transfer never moves before a serialized message, such as the commit of an earlier push.
        """
        if not self.open:
            return
        queue = self._queue
        at = len(queue)
        if isinstance(item, Transfer):
            waits = self._writing or bool(self._sending) or bool(queue)
            if isinstance(item.header, m.PartHeader) and waits:
                item = replace(item, header=replace(item.header, waited=True))
            turn = self._turn(item)
            while at and isinstance(before := queue[at - 1], Transfer) and self._turn(before) > turn:
                at -= 1
        queue.insert(at, item)
        self._more.set()

    def answered(self, parts: set[tuple[int, int]]) -> None:
        """Return the credit of parts, given as (seq, number)."""
        self._unanswered -= parts
        self._more.set()

    def settle(self, seq: int) -> None:
        """Called when a push has its outcome: return the credit of its parts."""
        self._rated.discard(seq)
        self.answered({each for each in self._unanswered if each[0] == seq})

    def drop(self, parts: set[tuple[int, int]]) -> None:
        """Remove parts, given as (seq, number), from the queue and from the transfers being written."""
        self.answered(parts)
        self._sending = [each for each in self._sending if _name(each.transfer) not in parts]
        self._queue = deque(item for item in self._queue if _name(item) not in parts)

    def rate_again(self, seq: int) -> None:
        """Send a push's learning rates with its next part, although the stream has brought them before."""
        self._rated.discard(seq)

    def limit_rate(self, rate: int) -> None:
        """Limit the rate of transfers, in bytes per second; 0 for no limit. Short messages are exempt."""
        self._throttle.set(rate)
        self._more.set()

    async def next(self) -> bytes:
        """Wait for the next message to write, and return it serialized.

        A call also means that the previous message has been written.
        """
        self._writing = False
        self._count_busy()
        while (message := self.more()) is None:
            self._more.clear()
            self.link.paused()
            waits = self._sending or self._queue
            self._busy_since = asyncio.get_running_loop().time() if waits else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause() if self._may_send() else None):
                    await self._more.wait()
            self._count_busy()
        self._writing = True
        self._busy_since = asyncio.get_running_loop().time()
        return message

    def _count_busy(self) -> None:
        if self._busy_since is not None:
            count, seconds = self.sent
            self.sent = count, seconds + asyncio.get_running_loop().time() - self._busy_since
            self._busy_since = None

    def more(self) -> bytes | None:
        """Return the next message that may be written now, serialized; None if all have to wait.

        1. A short message.
        2. A commit or other queued message, if no transfer is being written.
        3. The next message of the transfer that is being written, after beginning those that may interrupt.
        """
        queue = self._queue
        # 1.
        if self._urgent:
            return self._urgent.popleft()
        # 2.
        if queue and isinstance(queue[0], bytes) and not self._sending:
            message = queue.popleft()
            assert isinstance(message, bytes)
            return message
        # 3.
        while self._may_send() and not self._pause() and self._may_begin():
            self._begin()
        if not self._sending or self._pause():
            return None
        sending = self._sending[-1]
        message = next(sending.messages)
        sending.left -= 1
        if not sending.left:
            self._sending.pop()
        self._throttle.sent(len(message), asyncio.get_running_loop().time())
        self.sent = self.sent[0] + len(message), self.sent[1]
        return message

    def _may_send(self) -> bool:
        """Return True if a transfer has a message that is written as soon as the rate limit allows."""
        return bool(self._sending) or self._may_begin()

    def _may_begin(self) -> bool:
        """Return True if the first waiting item is a transfer that may begin now: the plan's credit allows
        another part, and all transfers that are being sent, fewer than `MAX_ARRIVING`, have later turns."""
        first = self._queue[0] if self._queue else None
        if not isinstance(first, Transfer):
            return False
        credit = 0 if self.plan is None else self.plan.credit
        if credit and len(self._unanswered) >= credit and isinstance(first.header, m.PartHeader):
            return False
        if not self._sending:
            return True
        return len(self._sending) < MAX_ARRIVING and self._turn(first) < self._sending[-1].turn

    def _begin(self) -> None:
        """Begin to write the first waiting transfer; drop it if it is a packet of an earlier exchange."""
        item = self._queue.popleft()
        assert isinstance(item, Transfer)
        if isinstance(item.header, m.Packet) and item.header.exchange < self.exchange:
            return
        if isinstance(item.header, m.PartHeader) and item.header.seq in self._unsettled:
            seq = item.header.seq
            if self.plan is not None and self.plan.credit:
                self._unanswered.add((seq, item.header.part))
            if seq in self._rated:
                item = replace(item, header=replace(item.header, learning_rates=()))
            self._rated.add(seq)
        self._sending.append(
            _TransferInProgress(item, self._turn(item), item.messages(self.packing), item.count)
        )

    def _turn(self, item: Transfer) -> int:
        """Return a part's position in the plan's order of sending; 0 without one."""
        plan, header = self.plan, item.header
        if (
            plan is None
            or not plan.turns
            or not isinstance(header, m.PartHeader)
            or header.plan != plan.number
        ):
            return 0
        return plan.turns[header.part]

    def _pause(self) -> float:
        return self._throttle.pause(asyncio.get_running_loop().time())


def _name(item: bytes | Transfer) -> tuple[int, int] | None:
    """Return (seq, number) of a part of a push; None for any other item."""
    if isinstance(item, Transfer) and isinstance(item.header, m.PartHeader):
        return item.header.seq, item.header.part
    return None
