"""The Exchange stream of one worker, on its event loop: opened again, with pauses, whenever it breaks.

| the stream | what follows |
|---|---|
| is open | messages are read, queued ones are written (`outgoing`), heartbeats leave |
| breaks, or the server closes it | a pause, and another stream; after `give_up_s`, `UnreachableError` |
| is refused because the server does not know this member | the worker joins again, and opens another |
| is refused for another reason | `Refused` |
| another replica is needed (`reopen`) | a pause, and another stream |
| ends after the worker's goodbye | nothing |

The time limit `give_up_s` starts anew after a stream on which the server decided something, or that lasted
longer than the limit. Messages, and the error that ends the membership, reach the thread that owns the
connection through the queue `incoming`. Nothing here waits for that thread: heartbeats leave while it
computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
from collections.abc import AsyncIterator
from typing import Any

from ...common.parts import Plan
from ...proto import messages as m
from ...proto.client import Client
from ...proto.refusal import Reason, Refused
from ...proto.service import Malformed, Stub, unbatched
from ...proto.wire import gather
from .attempts import CALL_TIMEOUT_S, Attempts, BrokenError, UnreachableError, translated
from .outgoing import Outgoing
from .progress import Progress
from .receiving import Received, ReceivedPacket, Receiver

log = logging.getLogger("gradwire.worker")

LEAVE_TIMEOUT_S = 5.0
LAST_WORD_S = 10.0  # longest wait for the reader after the writer has failed: it may have messages to read
SMALL_PART_BYTES = 1 << 16  # up to this size, checking on another thread would cost more than the check


Incoming = (
    Plan
    | Received
    | ReceivedPacket
    | m.Assignment
    | m.Outcome
    | m.Waiting
    | m.InitializeRequest
    | m.SnapshotRequest
    | m.Save
    | m.Welcome
    | m.Evaluations
)


class _ReopenedError(Exception):
    """This worker ends a stream itself, because a new one brings it the server's parameters."""


class Stream:
    """Keeps an Exchange stream open, and passes messages between it and the owner's thread.

    Runs on the connection's event loop. Other threads may read the attributes of plain types.

    Attributes:
        incoming: messages that have arrived, and the error that ends the membership, for the owner's thread.
        leaving: True if the worker leaves, so that no new stream follows when this one ends.
        away_since: monotonic seconds since which no stream has been welcomed; None while one is.
        lost_versions: number of times that the server has lost versions that the replica had.
    """

    def __init__(
        self, address: str, progress: Progress, *, worker: str, incarnation: int, give_up_s: float
    ) -> None:
        """give_up_s: seconds without a usable stream after which the connection ends."""
        self.outgoing = Outgoing()
        self.incoming: queue.SimpleQueue[Incoming | BaseException] = queue.SimpleQueue()
        self.reopen = asyncio.Event()
        self.leaving = False
        self.rank = self.reconnects = self.lost_versions = 0
        self.away_since: float | None = time.monotonic()
        self._address, self._give_up_s = address, give_up_s
        self._progress = progress
        self._worker, self._incarnation = worker, incarnation
        self._reported_stall = False

    async def run(self, client: Client, request: m.JoinRequest, reply: m.JoinResponse) -> None:
        """Keep a stream open until the worker leaves or an error ends the membership.

        The error is put into `incoming`. request: request to repeat if the server does not know this member
        any more.
        """
        try:
            attempts = Attempts(self._address, self._give_up_s)
            while True:
                progress = asyncio.Event()
                opened_at = time.monotonic()
                try:
                    await self._one_stream(await translated(client.stub()), reply, progress)
                    if self.leaving:
                        return
                    broken = BrokenError("the server closed the stream")
                except _ReopenedError:  # on purpose, so this is no failure of the link
                    log.info("fetching the server's parameters on a new stream")
                    self.reconnects += 1
                    continue
                except BrokenError as error:
                    broken = error
                except Refused as refused:
                    if refused.refusal.reason is not Reason.NOT_A_MEMBER:
                        raise
                    # The server was restored to a time before this worker joined: join as the same worker.
                    broken = BrokenError(str(refused))
                    with contextlib.suppress(BrokenError):
                        stub = await translated(client.stub())
                        await translated(stub.join(request, timeout=CALL_TIMEOUT_S))
                # A stream that always breaks, such as one too slow for the lease, is not progress.
                if progress.is_set() or time.monotonic() - opened_at > self._give_up_s:
                    attempts = Attempts(self._address, self._give_up_s)
                self.reconnects += 1
                await client.renew()
                try:
                    await attempts.explain(broken, client)
                except UnreachableError as error:
                    if not progress.is_set():
                        raise
                    log.warning("the stream breaks again and again: %s", error)  # but work gets done
                await attempts.pause(str(broken), broken.remedy)
        except (Refused, UnreachableError) as error:
            self.incoming.put(error)
        except Exception as error:
            log.exception("the connection failed")
            self.incoming.put(error)

    async def _one_stream(self, stub: Stub, reply: m.JoinResponse, progress: asyncio.Event) -> None:
        """Run one Exchange call, from Hello to its end. Raises BrokenError or Refused. progress: event to set
        once the server has decided something on this stream."""
        call = stub.exchange()
        outgoing = self.outgoing
        self.reopen.clear()
        hello = m.Hello(job=reply.job.id, worker=self._worker, incarnation=self._incarnation)
        outgoing.open_stream(hello, ready=not self._progress.may_be_suspended)

        async def write() -> None:
            while True:
                message = gather(await outgoing.queue.next(), outgoing.queue.more)
                began = time.monotonic()
                await call.write(message)
                outgoing.queue.link.wrote(len(message), time.monotonic() - began)

        async def beat() -> None:
            while True:
                await asyncio.sleep(reply.limits.heartbeat_seconds)
                self._report_if_stalled()
                outgoing.say(
                    m.Heartbeat(activity=self._progress.activity, stalled_seconds=self._progress.stalled_s)
                )

        reader = asyncio.create_task(self.read(call, progress))
        reopen = asyncio.create_task(self.reopen.wait())
        tasks: list[asyncio.Task[Any]] = [
            reader,
            asyncio.create_task(write()),
            asyncio.create_task(beat()),
            reopen,
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reopen.done():
                raise _ReopenedError
            if not reader.done():
                # If the call has ended, the reader raises the reason; otherwise the writer's error counts.
                await asyncio.wait((reader,), timeout=LAST_WORD_S)
            await translated(next(task for task in tasks if task.done()))
        finally:
            if self.away_since is None:
                self.away_since = time.monotonic()
            outgoing.end_stream()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    def _report_if_stalled(self) -> None:
        """Log once when the owner's thread stalls; once it has resumed, tell the server that it can work."""
        progress = self._progress
        if not progress.may_be_suspended:
            self.outgoing.wake()
            self._reported_stall = False
        elif progress.begun and not self._reported_stall:
            self._reported_stall = True
            log.error(
                "no progress for %.0f s (%s): the server suspends this worker after %.0f s without progress "
                "(gc-server --progress-seconds), until it continues. Its stack:\n%s",
                *(progress.stalled_s, progress.activity, progress.limit_s, progress.stack()),
            )

    async def read(self, call: AsyncIterator[m.ServerMessage | Malformed], progress: asyncio.Event) -> None:
        """Read the messages of one stream until it ends, and put them into `incoming`.

        Args:
            progress: event to set once the server has decided something: an outcome or a new assignment.

        Raises:
            BrokenError: a message is malformed or out of order.
            Refused: a message names values that this worker's model does not allow.
        """
        receiver, outgoing = Receiver(self._worker), self.outgoing
        messages: AsyncIterator[m.ServerMessage | Malformed] = unbatched(call, "ServerMessage")
        async for message in messages:
            arrived: Incoming | None = None
            match message:
                case m.Update():
                    receiver.begin_update(message, outgoing.manifest, outgoing.queue.plan, outgoing.shared)
                case m.PlanAnnouncement():
                    arrived = outgoing.queue.plan = receiver.plan(message, outgoing.manifest)
                case m.Packet():
                    arrived = receiver.begin_packet(message, outgoing.manifest)
                case m.Chunk():
                    arrived = receiver.add(message)
                case m.Outcome():
                    progress.set()
                    if message.decision is m.Decision.ACCEPTED:
                        outgoing.settle(message.seq)  # a refused push may have to be sent again
                    elif message.part is not None:
                        outgoing.stored(message.seq, (message.part,))  # the part is not in flight any more
                    arrived = message
                case m.Assignment():
                    if message.coding is not None:
                        outgoing.queue.exchange = message.coding.exchange
                    if message.id > outgoing.assigned:
                        progress.set()
                    outgoing.assigned = message.id
                    outgoing.queue.limit_rate(message.pace)
                    arrived = message
                case m.Waiting() | m.Evaluations() | m.InitializeRequest() | m.SnapshotRequest() | m.Save():
                    arrived = message
                case m.Unwanted():
                    outgoing.unwanted(message.seq)
                case m.Stored():
                    outgoing.stored(message.seq, message.parts)
                case m.Welcome():
                    self.away_since = None
                    log.log(
                        # A warning has told of the break; it is over for readers of warnings alone, too.
                        logging.WARNING if self.reconnects else logging.INFO,
                        "connected %sas rank %d, server at version %d",
                        *("again " if self.reconnects else "", message.rank, message.version),
                    )
                    self.rank = message.rank
                    outgoing.welcome(message)
                    if message.evaluations is not None:
                        self.incoming.put(message.evaluations)
                    if outgoing.version is not None and outgoing.version > message.newest:
                        outgoing.version, arrived = None, message
                        self.lost_versions += 1
                case m.Batch():
                    raise BrokenError("the server sent a batch inside a batch")
                case Malformed():
                    raise BrokenError(f"the server's message cannot be read: {message.text}")
            complete = receiver.take_update()
            if complete is not None:
                update, assembly = complete
                if assembly.size <= SMALL_PART_BYTES:
                    payloads = assembly.finish()
                else:
                    payloads = await asyncio.to_thread(assembly.finish)
                arrived = Received(update, payloads)
            if arrived is not None:
                self.incoming.put(arrived)

    async def say_goodbye(self, message: m.Leave, running: asyncio.Task[None]) -> None:
        """Send the last message, and wait a few seconds until the server has closed the stream. running: task
        of `run`, which ends with the stream."""
        # A first stream carries the goodbye even before its welcome; a later one without a welcome is lost.
        lost = self.reconnects > 0 and self.away_since is not None
        if lost or not self.outgoing.say(message):
            return
        await asyncio.wait((running,), timeout=LEAVE_TIMEOUT_S - 1)
