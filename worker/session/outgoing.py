"""The messages that a worker sends on its stream, and sends again when the stream is a new one. No I/O.

| message | goes out | after a break |
|---|---|---|
| short: heartbeat, `Ready`, evaluation | at once, between two chunks | `Ready`, the last evaluation: again |
| part of a push | after `welcome`, by its turn, while there is credit | again, unless the server has it |
| commit | after all that was queued before it | again |
| coded packet, snapshot | after all that was queued before it | lost: the server asks anew |

Parts are kept until their push is settled, so that a new stream, or a request after damage, gets the same
bytes. Where the plan gives its parts *turns*, a part with a lesser turn goes before those that wait, and
between the chunks of one that is being sent: up to four are under way at once, each overtaken by the next.
None overtakes the commit of an earlier push. Where the plan has a *credit*, a part is begun only while fewer
parts than that are under way without a `Stored`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ...compressors import Plan
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.transfer import MAX_ARRIVING, encode_chunks
from ...proto.wire import encode_worker
from .throttle import Throttle


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A header and the bytes that follow it. Nobody may write to them until they are sent; those of a push
    stay as they are until the server has decided on it.

    They are framed while they are sent, chunk by chunk: that overlaps with the network, and keeps no second
    copy.

    checksums: of the chunks, where they are known.
    """

    header: m.PartHeader | m.Packet | m.Snapshot
    number: int
    data: Sequence[npt.NDArray[np.uint8]]
    chunk_bytes: int
    checksums: Sequence[int] | None = None

    @property
    def count(self) -> int:
        """Number of messages."""
        return 1 + -(-sum(each.size for each in self.data) // self.chunk_bytes)

    def messages(self) -> Iterator[bytes]:
        yield encode_worker(self.header)
        yield from encode_chunks(self.number, self.data, self.chunk_bytes, self.checksums)


@dataclass(slots=True)
class _UnsettledPush:
    """Messages of a push, kept to be sent again. plan: its number. parts: by number. unwanted: the server
    does without the parts, unless it asks for the push again."""

    plan: int = 0
    parts: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    commit: m.Commit | None = None
    unwanted: bool = False


@dataclass(slots=True)
class _TransferInProgress:
    """A transfer that is being written, and what is left of it. turn: 0 if it has none."""

    transfer: Transfer
    turn: int
    messages: Iterator[bytes]
    left: int


class Outgoing:
    """The queue of the present stream, and what outlives it. Belongs to the event loop.

    Attributes:
        manifest: None until work may come. plan: the last that came.
        version: that the replica has, or has when everything that came is applied; None before the first.
        drifted: version at which the replica was found not to be the server's; said once.
        assigned: id of the last assignment that came.
        exchange: that it is about; packets of earlier ones are not sent any more.
        sent: bytes that were written so far, and the seconds during which there were some to write.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.plan: Plan | None = None
        self.version: int | None = None
        self.drifted = 0
        self.assigned = 0
        self.exchange = 0
        self.sent = 0, 0.0
        self._restored = False
        self._pushes: dict[int, _UnsettledPush] = {}  # that are not settled, in order of seq
        self._evaluation: m.Evaluation | None = None
        self._queue: deque[bytes | Transfer] | None = None
        self._urgent: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._sending: list[_TransferInProgress] = []  # each but the last has been overtaken by the next
        self._unanswered: set[tuple[int, int]] = set()  # parts, by seq and number, if the plan has a credit
        self._welcome = False  # whether the server has said what it has of open pushes
        self._writing = False
        self._sleeps = False  # the server is not to hear yet that work may come
        self._throttle = Throttle()
        self._busy_since: float | None = None

    @property
    def idle(self) -> bool:
        """Whether everything has been written, or there is no stream to write to."""
        return self._queue is None or not (self._queue or self._urgent or self._sending or self._writing)

    def begin(self, hello: m.Hello, *, ready: bool = True) -> None:
        """Begin a new stream. Pushes are not sent until `welcome`. ready: whether the owner's thread can take
        work; otherwise the server hears of that after `wake`."""
        self._queue, self._writing, self._welcome = deque(), False, False
        self._sending.clear()
        self._unanswered.clear()
        self._urgent.clear()
        for push in self._pushes.values():  # what was said of it may be news to the server
            push.unwanted = False
        self.say(hello)
        self._sleeps = not ready
        if self.manifest is not None and ready:
            self._say_ready(self.manifest)
        if self._evaluation is not None:
            self.say(self._evaluation)

    def welcome(self, welcome: m.Welcome) -> None:
        """Send open pushes again, except the parts that the server says it has. Of a push under another plan
        than the server's, only the commit is sent."""
        self._welcome = True
        known = {each.seq: frozenset(each.parts) for each in welcome.stored}
        for seq in known.keys() - self._pushes.keys():  # what was to say so may not have arrived
            self._put(encode_worker(m.Abandon(seq=seq)))
        for seq, push in self._pushes.items():
            older = push.plan != welcome.plan
            self._resend(push, frozenset(push.parts) if older else known.get(seq, frozenset()))

    def end(self) -> None:
        """End the stream. Messages are lost until the next one, unless they are kept."""
        self._queue = None

    def say(self, message: m.WorkerMessage) -> bool:
        """Send a short message before the rest of any transfer. Returns whether there is a stream."""
        if self._queue is None:
            return False
        self._urgent.append(encode_worker(message))
        self._more.set()
        return True

    def wake(self) -> None:
        """Say that work may come, if the server has not heard so because the owner's thread was stalled."""
        if self._sleeps and self._queue is not None:
            self._sleeps = False
            if self.manifest is not None:
                self._say_ready(self.manifest)

    def ready(self, manifest: Manifest, restored: bool = False) -> None:
        self.manifest, self._restored, self._sleeps = manifest, restored, False
        self._say_ready(manifest)

    def report(self, evaluation: m.Evaluation) -> None:
        self.wake()
        self._evaluation = evaluation
        self.say(evaluation)

    def send(self, transfer: Transfer) -> None:
        """Send a transfer once, on this stream."""
        self._put(transfer)

    def part(self, seq: int, number: int, transfer: Transfer) -> None:
        """Send a part; it is sent again until the push is settled."""
        self.wake()
        push = self._pushes.setdefault(seq, _UnsettledPush())
        push.parts[number] = transfer
        if isinstance(transfer.header, m.PartHeader):
            push.plan = transfer.header.plan
        if self._welcome and not push.unwanted:
            self._put(transfer)

    def commit(self, commit: m.Commit) -> None:
        """Send a commit; it is sent again until the push is settled."""
        self.wake()
        self._pushes.setdefault(commit.seq, _UnsettledPush()).commit = commit
        if self._welcome:
            self._put(encode_worker(commit))

    def abandon(self, seq: int) -> None:
        """Give up a push, and tell the server so."""
        self.wake()
        self.settle(seq)
        if self._welcome:
            self._put(encode_worker(m.Abandon(seq=seq)))

    def unwanted(self, seq: int) -> None:
        """Send no more parts of a push: the server does without them."""
        push = self._pushes.get(seq)
        if push is None:
            return
        push.unwanted = True
        self._drop({(seq, part) for part in push.parts})

    def settle(self, seq: int) -> None:
        self._pushes.pop(seq, None)
        self._answered({each for each in self._unanswered if each[0] == seq})

    def stored(self, seq: int, parts: Iterable[int]) -> None:
        """Return the credit of parts that the server has, or does not need."""
        self._answered({(seq, part) for part in parts})

    def _answered(self, parts: set[tuple[int, int]]) -> None:
        self._unanswered -= parts
        self._more.set()

    def _drop(self, parts: set[tuple[int, int]]) -> None:
        """Drop queued parts, by seq and number."""
        self._answered(parts)
        self._sending = [each for each in self._sending if _name(each.transfer) not in parts]
        if self._queue is not None:
            self._queue = deque(item for item in self._queue if _name(item) not in parts)

    def resend(self, seq: int, part: int | None) -> None:
        """Send an open push, or one part of it, again."""
        push = self._pushes.get(seq)
        if push is None or not self._welcome:
            return
        if part is None:
            push.unwanted = False
            self._drop({(seq, number) for number in push.parts})
            self._resend(push, frozenset())
        elif part in push.parts and not push.unwanted:
            self._drop({(seq, part)})
            self._put(push.parts[part])

    def _resend(self, push: _UnsettledPush, known: frozenset[int]) -> None:
        for number, transfer in push.parts.items():
            if number not in known:
                self._put(transfer)
        if push.commit is not None:
            self._put(encode_worker(push.commit))

    def pace(self, rate: int) -> None:
        """Send transfers at a rate in bytes per second, 0 for no limit. Short messages do not wait for it."""
        self._throttle.set(rate)
        self._more.set()

    async def next(self) -> bytes:
        """Wait for the next message. A call says that the previous one was written."""
        self._writing = False
        self._count_busy()
        while (message := self.more()) is None:
            self._more.clear()
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
        """Add the seconds since there was something to write."""
        if self._busy_since is not None:
            count, seconds = self.sent
            self.sent = count, seconds + asyncio.get_running_loop().time() - self._busy_since
            self._busy_since = None

    def more(self) -> bytes | None:
        """Return the next message, if there is one: a short one before the next chunk of a transfer."""
        queue = self._queue
        assert queue is not None
        if self._urgent:
            return self._urgent.popleft()
        if queue and isinstance(queue[0], bytes) and not self._sending:
            message = queue.popleft()
            assert isinstance(message, bytes)
            return message
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
        """Whether a transfer waits for nothing but the rate."""
        return bool(self._sending) or self._may_begin()

    def _may_begin(self) -> bool:
        """Whether it is the turn of the first transfer that waits."""
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
        assert self._queue is not None
        item = self._queue.popleft()
        assert isinstance(item, Transfer)
        if isinstance(item.header, m.Packet) and item.header.exchange < self.exchange:
            return
        name = _name(item)
        if name is not None and name[0] in self._pushes and self.plan is not None and self.plan.credit:
            self._unanswered.add(name)
        self._sending.append(_TransferInProgress(item, self._turn(item), item.messages(), item.count))

    def _turn(self, item: Transfer) -> int:
        """Return a part's turn in the plan; 0 for none."""
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

    def _say_ready(self, manifest: Manifest) -> None:
        ready = m.Ready(
            fingerprint=manifest.fingerprint,
            version=self.version,
            assigned=self.assigned,
            plan=0 if self.plan is None else self.plan.number,
            data=manifest.data,
            train_samples=manifest.train_samples,
            drifted=self.drifted,
            restored=self._restored and self.version is None,
        )
        self.drifted = 0
        self.say(ready)

    def _put(self, item: bytes | Transfer) -> None:
        """Queue a part before those with a later turn, but behind messages; anything else at the end."""
        queue = self._queue
        if queue is None:
            return
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


def _name(item: bytes | Transfer) -> tuple[int, int] | None:
    """Return the seq of a part's push and the part's number; None for anything else."""
    if isinstance(item, Transfer) and isinstance(item.header, m.PartHeader):
        return item.header.seq, item.header.part
    return None
