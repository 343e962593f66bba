"""What a worker says on its stream, and says again when the stream is a new one. No I/O.

The parts of a push are kept until it is settled, so that a new stream, or a request after damage, gets the
same bytes; what the server has of them already is not sent again. A coded packet or a snapshot is not kept:
if the stream breaks, the server asks for it anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ...compressors import Plan
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.transfer import encode_chunks
from ...proto.wire import encode_worker
from .throttle import Throttle


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A header and the bytes that follow it. Nobody may write to them until they are sent; those of a push
    stay as they are until the server has decided on it.

    They are framed while they are sent, chunk by chunk: that overlaps with the network, and keeps no second
    copy.
    """

    header: m.Part | m.Packet | m.Snapshot
    number: int
    data: Sequence[npt.NDArray[np.uint8]]
    chunk_bytes: int

    @property
    def count(self) -> int:
        """Of the messages."""
        return 1 + -(-sum(each.size for each in self.data) // self.chunk_bytes)

    def messages(self) -> Iterator[bytes]:
        yield encode_worker(self.header)
        yield from encode_chunks(self.number, self.data, self.chunk_bytes)


@dataclass(slots=True)
class _Push:
    """What has been said of a push, to be said again. plan: its number. parts: by number. unwanted: the
    server does without them, unless it asks for the push again."""

    plan: int = 0
    parts: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    commit: m.Commit | None = None
    unwanted: bool = False


@dataclass(slots=True)
class _Sending:
    """A transfer that is being written, and what is left of it."""

    transfer: Transfer
    messages: Iterator[bytes]
    left: int


class Outgoing:
    """The queue of the present stream, and what outlives it. Belongs to the event loop.

    Attributes:
        manifest: None until work may come. plan: the last that came.
        version: that the replica has, or has when everything that came is applied; None before the first.
        assigned: id of the last assignment that came.
        exchange: that it is about; packets of earlier ones are not sent any more.
        sent: bytes that were written so far, and the seconds during which there were some to write.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.plan: Plan | None = None
        self.version: int | None = None
        self.assigned = 0
        self.exchange = 0
        self.sent = 0, 0.0
        self._pushes: dict[int, _Push] = {}  # that are not settled, in order of seq
        self._evaluation: m.Evaluation | None = None
        self._queue: deque[bytes | Transfer] | None = None
        self._urgent: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._sending: _Sending | None = None
        self._welcome = False  # whether the server has said what it has of open pushes
        self._writing = False
        self._throttle = Throttle()
        self._busy_since: float | None = None

    @property
    def idle(self) -> bool:
        """Whether everything has been written, or there is no stream to write to."""
        return self._queue is None or not (self._queue or self._urgent or self._sending or self._writing)

    def begin(self, hello: m.Hello) -> None:
        """A stream has been opened. Pushes are not sent until the server has said what it has of them."""
        self._queue, self._sending, self._writing, self._welcome = deque(), None, False, False
        self._urgent.clear()
        for push in self._pushes.values():  # what was said of it may be news to the server
            push.unwanted = False
        self.say(hello)
        if self.manifest is not None:
            self._say_ready(self.manifest)
        if self._evaluation is not None:
            self.say(self._evaluation)

    def welcome(self, welcome: m.Welcome) -> None:
        """The server says what it has of pushes that it has not decided on: the rest goes out again. Of a
        push under another plan than its own that is the commit."""
        self._welcome = True
        known = {each.seq: frozenset(each.parts) for each in welcome.stored}
        for seq in known.keys() - self._pushes.keys():  # what was to say so may not have arrived
            self._put(encode_worker(m.Abandon(seq=seq)))
        for seq, push in self._pushes.items():
            older = push.plan != welcome.plan
            self._resend(push, frozenset(push.parts) if older else known.get(seq, frozenset()))

    def end(self) -> None:
        """The stream is gone. What is said meanwhile is lost, unless it is one of those that are kept."""
        self._queue = None

    def say(self, message: m.WorkerMessage) -> bool:
        """Say something short, before what is left of any transfer. Returns whether there is a stream."""
        if self._queue is None:
            return False
        self._urgent.append(encode_worker(message))
        self._more.set()
        return True

    def beat(self, activity: str) -> None:
        """A sign of life."""
        self.say(m.Heartbeat(activity=activity))

    def ready(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._say_ready(manifest)

    def report(self, evaluation: m.Evaluation) -> None:
        self._evaluation = evaluation
        self.say(evaluation)

    def send(self, transfer: Transfer) -> None:
        """Once, on this stream."""
        self._put(transfer)

    def part(self, seq: int, number: int, transfer: Transfer) -> None:
        """Now, and again until the push is settled."""
        push = self._pushes.setdefault(seq, _Push())
        push.parts[number] = transfer
        if isinstance(transfer.header, m.Part):
            push.plan = transfer.header.plan
        if self._welcome and not push.unwanted:
            self._put(transfer)

    def commit(self, commit: m.Commit) -> None:
        """As `part`."""
        self._pushes.setdefault(commit.seq, _Push()).commit = commit
        if self._welcome:
            self._put(encode_worker(commit))

    def abandon(self, seq: int) -> None:
        """Nothing will come of a push."""
        self._pushes.pop(seq, None)
        if self._welcome:
            self._put(encode_worker(m.Abandon(seq=seq)))

    def unwanted(self, seq: int) -> None:
        """The server does without the parts of a push: no more of them go out."""
        push = self._pushes.get(seq)
        if push is None:
            return
        push.unwanted = True
        if self._sending is not None and _is_of(self._sending.transfer, seq):
            self._sending = None
        if self._queue is not None:
            self._queue = deque(item for item in self._queue if not _is_of(item, seq))

    def settle(self, seq: int) -> None:
        self._pushes.pop(seq, None)

    def resend(self, seq: int, part: int | None) -> None:
        """A push that is not settled, or one part of it."""
        push = self._pushes.get(seq)
        if push is None or not self._welcome:
            return
        if part is None:
            push.unwanted = False
            self._resend(push, frozenset())
        elif part in push.parts and not push.unwanted:
            self._put(push.parts[part])

    def _resend(self, push: _Push, known: frozenset[int]) -> None:
        for number, transfer in push.parts.items():
            if number not in known:
                self._put(transfer)
        if push.commit is not None:
            self._put(encode_worker(push.commit))

    def pace(self, rate: int) -> None:
        """Send transfers at so many bytes per second; 0 for as fast as it goes. Nothing else waits for
        that."""
        self._throttle.set(rate)
        self._more.set()

    async def next(self) -> bytes:
        """The message that goes out next. What went out before has been written."""
        self._writing = False
        self._count_busy()
        while (message := self.more()) is None:
            self._more.clear()
            waits = self._sending is not None or self._queue
            self._busy_since = asyncio.get_running_loop().time() if waits else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause() if waits else None):
                    await self._more.wait()
            self._count_busy()
        self._writing = True
        self._busy_since = asyncio.get_running_loop().time()
        return message

    def _count_busy(self) -> None:
        """The time since there was something to write."""
        if self._busy_since is not None:
            count, seconds = self.sent
            self.sent = count, seconds + asyncio.get_running_loop().time() - self._busy_since
            self._busy_since = None

    def more(self) -> bytes | None:
        """The next message, if there is one: what is short before the next chunk of a transfer."""
        queue = self._queue
        assert queue is not None
        if self._urgent:
            return self._urgent.popleft()
        while self._sending is None and queue:
            if isinstance(queue[0], Transfer) and self._pause():
                return None
            item = queue.popleft()
            if isinstance(item, bytes):
                return item
            if not (isinstance(item.header, m.Packet) and item.header.exchange < self.exchange):
                self._sending = _Sending(item, item.messages(), item.count)
        sending = self._sending
        if sending is None or self._pause():
            return None
        message = next(sending.messages)
        sending.left -= 1
        if not sending.left:
            self._sending = None
        self._throttle.sent(len(message), asyncio.get_running_loop().time())
        self.sent = self.sent[0] + len(message), self.sent[1]
        return message

    def _pause(self) -> float:
        return self._throttle.pause(asyncio.get_running_loop().time())

    def _say_ready(self, manifest: Manifest) -> None:
        ready = m.Ready(
            fingerprint=manifest.fingerprint,
            version=self.version,
            assigned=self.assigned,
            plan=0 if self.plan is None else self.plan.number,
        )
        self.say(ready)

    def _put(self, item: bytes | Transfer) -> None:
        if self._queue is not None:
            waits = self._writing or self._sending is not None or bool(self._queue)
            if isinstance(item, Transfer) and isinstance(item.header, m.Part) and waits:
                item = replace(item, header=replace(item.header, waited=True))
            self._queue.append(item)
            self._more.set()


def _is_of(item: bytes | Transfer, seq: int) -> bool:
    """Whether it is a part of that push."""
    return isinstance(item, Transfer) and isinstance(item.header, m.Part) and item.header.seq == seq
