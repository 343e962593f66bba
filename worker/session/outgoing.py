"""Queue of the messages that a worker writes to its stream, and sends again on a new stream. No I/O.

| message | is written | after a break |
|---|---|---|
| short: heartbeat, `Ready`, report, … | at once, between two chunks | `Ready`, last report, `Stop`: again |
| part of a push | after `welcome`, by its turn, while there is credit | again, unless the server has it |
| commit | after all messages queued before it | again |
| coded packet, snapshot | after all messages queued before it | lost: the server requests it again |

The header of the part that is written first has the push's learning rates, the other headers have none.

Parts are kept until their push is settled, so that a new stream, or a request after damage, gets the same
bytes. The plan may give its parts *turns*, positions in the order of sending. A part with a smaller turn is
sent before waiting parts, and between the chunks of a part that is being sent: up to four are being sent at
once, each interrupted by the next. No part overtakes the commit of an earlier push. The plan may also have a
*credit*: the number of parts that may be sent before the server has confirmed one with `Stored`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ...common.parts import Plan
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.transfer import MAX_ARRIVING, encode_chunks
from ...proto.wire import encode_worker
from .throttle import Throttle


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A header and the bytes that follow it in chunks.

    The bytes must not change until they are sent; a push's bytes, until the server has decided on the push.
    Chunks are framed while they are sent. That overlaps with the network, and makes no second copy.

    Attributes:
        header: header of the part, packet or snapshot.
        number: number of the transfer, which each chunk carries.
        data: the bytes, end to end, flat uint8.
        chunk_bytes: bytes of each chunk but the last.
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

    def messages(self) -> Iterator[bytes]:
        """Yield the serialized header, then each serialized chunk."""
        yield encode_worker(self.header)
        yield from encode_chunks(self.number, self.data, self.chunk_bytes, self.checksums)


@dataclass(slots=True)
class _UnsettledPush:
    """Messages of a push without an outcome, kept to be sent again.

    Attributes:
        plan: number of the plan that its parts belong to; 0 before the first part.
        parts: the parts that were queued, by number.
        commit: the commit; None before it was queued.
        rated: whether the present stream has brought the push's learning rates to the server.
        unwanted: whether the server does not need the parts, unless it requests the push again.
    """

    plan: int = 0
    parts: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    commit: m.Commit | None = None
    rated: bool = False
    unwanted: bool = False


@dataclass(slots=True)
class _TransferInProgress:
    """A transfer that is being written.

    Attributes:
        transfer: the transfer.
        turn: position in the plan's order of sending; 0 without one.
        messages: the messages that are not written yet.
        left: number of these messages.
    """

    transfer: Transfer
    turn: int
    messages: Iterator[bytes]
    left: int


class Outgoing:
    """The queue of the present stream, and the messages that are kept for the next one.

    Belongs to the event loop's thread.

    Attributes:
        manifest: the model's tensors; None until the worker can take work.
        plan: last plan that arrived; None before the first.
        version: version of the replica once all messages that have arrived are applied; None before the
            first version.
        drifted: version at which the replica differed from the server's, until it is reported; 0 for none.
        assigned: id of the last assignment that arrived.
        exchange: number of the exchange of the last assignment; packets of earlier exchanges are not sent.
        sent: bytes written so far, and seconds so far during which there were bytes to write.
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
        self._accumulate = 0
        self._pushes: dict[int, _UnsettledPush] = {}  # by seq, ascending
        self._evaluation: m.Evaluation | None = None
        self._stop: m.Stop | None = None
        self._asked: m.More | None = None
        self._queue: deque[bytes | Transfer] | None = None
        self._urgent: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._sending: list[_TransferInProgress] = []  # Each but the last is interrupted by the next.
        self._unanswered: set[tuple[int, int]] = set()  # Parts, as (seq, number), that use credit.
        self._welcome = False  # Whether the server has listed the parts that it has of open pushes.
        self._writing = False  # Whether the message returned last is still being written.
        self._sleeps = False  # Whether a Ready is withheld because the owner's thread is stalled.
        self._throttle = Throttle()
        self._busy_since: float | None = None

    @property
    def idle(self) -> bool:
        """Whether all queued messages are written, or there is no stream."""
        return self._queue is None or not (self._queue or self._urgent or self._sending or self._writing)

    def begin(self, hello: m.Hello, *, ready: bool = True) -> None:
        """Begin a new stream: queue `Hello`, `Ready`, the last evaluation and the last request for batches.
        Pushes wait for `welcome`.

        Args:
            hello: first message of the stream.
            ready: whether the owner's thread can take work; if not, `Ready` waits for `wake`.
        """
        self._queue, self._writing, self._welcome = deque(), False, False
        self._sending.clear()
        self._unanswered.clear()
        self._urgent.clear()
        for push in self._pushes.values():  # a restarted server may need parts that it declined before
            push.unwanted = push.rated = False
        self.say(hello)
        self._sleeps = not ready
        if self.manifest is not None and ready:
            self._say_ready(self.manifest)
        for again in (self._evaluation, self._stop, self._asked):
            if again is not None:
                self.say(again)

    def welcome(self, welcome: m.Welcome) -> None:
        """Send open pushes again, without the parts that the server has.

        1. A push that the server knows and this worker does not was abandoned: send `Abandon` again.
        2. A push under another plan than the server's: send only the commit.
        3. Any other push: send the parts that the server lacks, and the commit.

        Args:
            welcome: the server's list of the parts that it has, and its plan.
        """
        self._welcome = True
        known = {each.seq: frozenset(each.parts) for each in welcome.stored}
        for seq in known.keys() - self._pushes.keys():  # the first `Abandon` may have been lost
            self._put(encode_worker(m.Abandon(seq=seq)))
        for seq, push in self._pushes.items():
            older = push.plan != welcome.plan
            self._resend(push, frozenset(push.parts) if older else known.get(seq, frozenset()))

    def end(self) -> None:
        """End the stream. Until the next one, messages that are not kept for resending are lost."""
        self._queue = None

    def say(self, message: m.WorkerMessage) -> bool:
        """Queue a short message before all waiting chunks.

        Returns:
            True if it is queued; False if there is no stream, so that the message is lost.
        """
        if self._queue is None:
            return False
        self._urgent.append(encode_worker(message))
        self._more.set()
        return True

    def wake(self) -> None:
        """Send the `Ready` that was withheld because the owner's thread was stalled, if one was."""
        if self._sleeps and self._queue is not None:
            self._sleeps = False
            if self.manifest is not None:
                self._say_ready(self.manifest)

    def ready(self, manifest: Manifest, restored: bool = False, accumulate: int = 0) -> None:
        """Tell the server, now and on each new stream, that this worker can take work.

        Args:
            manifest: the model's tensors and entries.
            restored: whether the worker continues from its own saved state.
            accumulate: number of batches that an optimizer step of a script takes; 0 if not declared.
        """
        self.manifest, self._restored, self._sleeps = manifest, restored, False
        self._accumulate = accumulate
        self._say_ready(manifest)

    def report(self, evaluation: m.Evaluation) -> None:
        """Send the result of an evaluation, and keep it for resending until the next one."""
        self.wake()
        self._evaluation = evaluation
        self.say(evaluation)

    def stop(self, stop: m.Stop) -> None:
        """Ask the server to end the job, now and on each new stream."""
        self._stop = stop
        self.say(stop)

    def ask(self, request: m.More) -> None:
        """Ask for further batches of an assignment, and keep the request for resending until the next one.
        The server ignores it once the assignment is answered."""
        self._asked = request
        self.say(request)

    def send(self, transfer: Transfer) -> None:
        """Queue a transfer on the present stream. It is lost if the stream breaks."""
        self._put(transfer)

    def part(self, seq: int, number: int, transfer: Transfer) -> None:
        """Queue a part of a push, and keep it for resending until the push is settled.

        Args:
            seq: number of the push.
            number: number of the part in its plan.
            transfer: header and bytes of the part.
        """
        self.wake()
        push = self._pushes.setdefault(seq, _UnsettledPush())
        push.parts[number] = transfer
        if isinstance(transfer.header, m.PartHeader):
            push.plan = transfer.header.plan
        if self._welcome and not push.unwanted:
            self._put(transfer)

    def commit(self, commit: m.Commit) -> None:
        """Queue the commit of a push, and keep it for resending until the push is settled."""
        self.wake()
        self._pushes.setdefault(commit.seq, _UnsettledPush()).commit = commit
        if self._welcome:
            self._put(encode_worker(commit))

    def abandon(self, seq: int) -> None:
        """Discard a push that will not be committed, and tell the server."""
        self.wake()
        self.settle(seq)
        if self._welcome:
            self._put(encode_worker(m.Abandon(seq=seq)))

    def unwanted(self, seq: int) -> None:
        """Stop sending the parts of a push, which the server does not need; keep them for a later request."""
        push = self._pushes.get(seq)
        if push is None:
            return
        push.unwanted = True
        self._drop({(seq, part) for part in push.parts})

    def settle(self, seq: int) -> None:
        """Discard the messages of a push that has its outcome, and return the credit of its parts."""
        self._pushes.pop(seq, None)
        self._answered({each for each in self._unanswered if each[0] == seq})

    def stored(self, seq: int, parts: Iterable[int]) -> None:
        """Return the credit of parts that the server has stored or does not need.

        Args:
            seq: number of the push.
            parts: numbers of the parts.
        """
        self._answered({(seq, part) for part in parts})

    def _answered(self, parts: set[tuple[int, int]]) -> None:
        """Return the credit of parts, given as (seq, number)."""
        self._unanswered -= parts
        self._more.set()

    def _drop(self, parts: set[tuple[int, int]]) -> None:
        """Remove parts, given as (seq, number), from the queue and from the transfers being written."""
        self._answered(parts)
        self._sending = [each for each in self._sending if _name(each.transfer) not in parts]
        if self._queue is not None:
            self._queue = deque(item for item in self._queue if _name(item) not in parts)

    def resend(self, seq: int, part: int | None) -> None:
        """Send a push without an outcome, or one part of it, again; the queued copy is dropped.

        Args:
            seq: number of the push.
            part: number of the part; None for all parts and the commit.
        """
        push = self._pushes.get(seq)
        if push is None or not self._welcome:
            return
        push.rated = False
        if part is None:
            push.unwanted = False
            self._drop({(seq, number) for number in push.parts})
            self._resend(push, frozenset())
        elif part in push.parts and not push.unwanted:
            self._drop({(seq, part)})
            self._put(push.parts[part])

    def _resend(self, push: _UnsettledPush, known: frozenset[int]) -> None:
        """Queue the parts of a push that are not in `known`, and its commit."""
        for number, transfer in push.parts.items():
            if number not in known:
                self._put(transfer)
        if push.commit is not None:
            self._put(encode_worker(push.commit))

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
        """Add the seconds during which there were bytes to write to `sent`."""
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
        assert queue is not None
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
        """Return True if only the rate limit can keep a transfer's next message from being written."""
        return bool(self._sending) or self._may_begin()

    def _may_begin(self) -> bool:
        """Return True if credit and turns allow the first waiting transfer to begin or to interrupt."""
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
        assert self._queue is not None
        item = self._queue.popleft()
        assert isinstance(item, Transfer)
        if isinstance(item.header, m.Packet) and item.header.exchange < self.exchange:
            return
        name = _name(item)
        push = None if name is None else self._pushes.get(name[0])
        if name is not None and push is not None:
            if self.plan is not None and self.plan.credit:
                self._unanswered.add(name)
            if push.rated and isinstance(item.header, m.PartHeader):
                item = replace(item, header=replace(item.header, learning_rates=()))
            push.rated = True
        self._sending.append(_TransferInProgress(item, self._turn(item), item.messages(), item.count))

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
        """Return the seconds until the rate limit allows more bytes."""
        return self._throttle.pause(asyncio.get_running_loop().time())

    def _say_ready(self, manifest: Manifest) -> None:
        """Queue `Ready`, with the state of the replica and of the last assignment."""
        ready = m.Ready(
            fingerprint=manifest.fingerprint,
            version=self.version,
            assigned=self.assigned,
            plan=0 if self.plan is None else self.plan.number,
            data=manifest.data,
            train_samples=manifest.train_samples,
            drifted=self.drifted,
            restored=self._restored and self.version is None,
            model=manifest.to_message() if self.version is None and manifest.is_short else None,
            accumulate=self._accumulate,
        )
        self.drifted = 0
        self.say(ready)

    def _put(self, item: bytes | Transfer) -> None:
        """Queue an item at the end; a transfer moves before waiting transfers with a later turn.

        A transfer never moves before a serialized message, such as the commit of an earlier push.
        """
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
    """Return (seq, number) of a part of a push; None for any other item."""
    if isinstance(item, Transfer) and isinstance(item.header, m.PartHeader):
        return item.header.seq, item.header.part
    return None
