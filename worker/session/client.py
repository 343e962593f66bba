"""The worker's side of the wire: one connection to the server, used from the training thread.

gRPC runs on an event loop in a thread of its own, so that heartbeats go out while the training thread
computes. The training thread calls plain methods and takes what arrived from `next`.

A stream that breaks is opened again, with pauses, for as long as `give_up_s`; each attempt is logged. A push
is kept until its outcome is known, and sent again as the same bytes on the new stream: the server recognises
it. What the server refuses for good is raised from `next` as `Refused`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
import uvloop

from ...compressors import Payload
from ...proto import messages as m
from ...proto.channel import CLIENT_OPTIONS
from ...proto.manifest import Manifest
from ...proto.refusal import Reason, Refused
from ...proto.service import Malformed, Meter, Stub
from ...proto.transfer import encode_chunks, packet_transfer
from ...proto.wire import encode_worker
from .attempts import Attempts, BrokenError, UnreachableError, translated
from .receiving import Received, ReceivedPacket, Receiver

log = logging.getLogger("gradwire.worker")
T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 5.0
LAST_WORD_S = 1.0
FLUSH_POLL_S = 0.02


Incoming = (
    Received | ReceivedPacket | m.Assignment | m.Outcome | m.Waiting | m.InitializeRequest | m.SnapshotRequest
)


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A header and the bytes that follow it. Nobody may write to them until they are sent; those of a push
    stay as they are until the server has decided on it, so that it can be sent again.

    They are framed while they are sent, chunk by chunk: that overlaps with the network, and keeps no second
    copy.
    """

    header: m.Push | m.Packet | m.Snapshot
    transfer: int
    parts: Sequence[npt.NDArray[np.uint8]]
    chunk_bytes: int

    def messages(self) -> Iterator[bytes]:
        yield encode_worker(self.header)
        yield from encode_chunks(self.transfer, self.parts, self.chunk_bytes)


class Client:
    def __init__(
        self,
        address: str,
        *,
        worker: str,
        incarnation: int,
        connect_s: float,
        give_up_s: float,
        sent: Meter,
        received: Meter,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.activity = "starting"  # goes out with each heartbeat
        self.reconnects = 0
        self._address = address
        self._connect_s = connect_s
        self._give_up_s = give_up_s
        self._meters = (sent, received)
        self._incoming: queue.SimpleQueue[Incoming | BaseException] = queue.SimpleQueue()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client", daemon=True)
        self._thread.start()
        self._stub: Stub = self._call(self._open())
        self._reply: m.JoinResponse | None = None
        self._manifest: Manifest | None = None
        self._version: int | None = None
        self._pending: dict[int, Outgoing] = {}  # pushes without an outcome, in order of seq
        self._evaluation: m.Evaluation | None = None
        self._outbox: asyncio.Queue[bytes | Outgoing] | None = None
        self._exchange: asyncio.Task[None] | None = None
        self._left = False
        self._assigned = 0  # id of the last assignment
        self._writing = False
        self._running = 0  # the exchange that it is about

    # ---- for the training thread

    def join(self, software: str, compressor: str, compressors: Sequence[str]) -> m.JoinResponse:
        """Become a member, and open the stream on which the server hears of this worker from now on.

        Raises:
            Refused: the server does not want this worker.
            UnreachableError: nobody answered for `connect_s`.
        """
        request = m.JoinRequest(
            worker=self.worker,
            incarnation=self.incarnation,
            software=software,
            compressors=tuple(compressors),
            compressor=compressor,
        )
        self._reply = reply = self._call(self._join(request))
        self._exchange = self._call(self._start(self._keep_exchanging()))
        return reply

    def initialize(self, manifest: Manifest, values: Sequence[Any]) -> bool:
        """Upload the initial parameters: one flat uint8 array of float32 bytes per tensor.

        Returns:
            Whether they are the job's now. Where another worker was asked meanwhile, or the server has them
            already, perhaps from an attempt of which the answer was lost, a snapshot follows.

        Raises:
            Refused, UnreachableError.
        """
        assert self._reply is not None
        header = m.InitializeHeader(
            job=self._reply.job.id,
            worker=self.worker,
            incarnation=self.incarnation,
            manifest=manifest.to_message(),
        )
        messages: list[Any] = [header, *encode_chunks(0, values)]

        async def upload() -> None:
            attempts = Attempts(self._address, self._give_up_s)
            while True:
                try:
                    await translated(self._stub.initialize(_stream(messages)))
                    return
                except BrokenError as broken:
                    await attempts.pause(str(broken))

        try:
            self._call(upload())
            self._version = 0
            return True
        except Refused as refused:
            if refused.refusal.reason in (Reason.ALREADY_INITIALIZED, Reason.NOT_A_MEMBER):
                return False
            raise

    def ready(self, manifest: Manifest) -> None:
        """Say that work may come."""

        def say() -> None:  # on the loop, so that a stream that is just being opened does not say it too
            self._manifest = manifest
            self._enqueue(encode_worker(self._ready_message()))

        self._loop.call_soon_threadsafe(say)

    def next(self, timeout_s: float) -> Incoming | None:
        """What arrived next, None after the timeout.

        Raises:
            Refused: the server ended the stream for good.
            UnreachableError: the stream could not be opened again for `give_up_s`.
        """
        try:
            item = self._incoming.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def push(self, header: m.Push, payloads: Sequence[Payload]) -> None:
        """Send a push. Nobody may write to the payloads until its outcome has come."""
        assert self._reply is not None
        parts = [payload.data for payload in payloads]
        chunk_bytes = self._reply.limits.chunk_bytes
        pending = Outgoing(header, header.seq, parts, chunk_bytes)
        self._loop.call_soon_threadsafe(self._send_push, pending)

    def send_packet(self, header: m.Packet, data: npt.NDArray[np.uint32]) -> None:
        """Send a coded packet. If the stream breaks it is lost: the server has the exchange done anew."""
        self._send_once(header, packet_transfer(header), [data.view(np.uint8)])

    def send_snapshot(self, header: m.Snapshot, values: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Send the replica, every tensor as float32 bytes. If the stream breaks the server asks again."""
        self._send_once(header, header.version, values)

    def flush(self) -> None:
        """Wait until everything has been written, or there is no stream to write to."""

        async def busy() -> bool:
            return self._outbox is not None and (self._writing or not self._outbox.empty())

        while self._call(busy()):
            time.sleep(FLUSH_POLL_S)

    def _send_once(
        self, header: m.Packet | m.Snapshot, transfer: int, parts: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        assert self._reply is not None
        outgoing = Outgoing(header, transfer, parts, self._reply.limits.chunk_bytes)
        self._loop.call_soon_threadsafe(self._enqueue, outgoing)

    def stepped(self, version: int | None) -> None:
        """The replica has got to a version by itself."""

        def note() -> None:
            if self._version is not None and version is not None:
                self._version = max(self._version, version)

        self._loop.call_soon_threadsafe(note)

    def resend(self) -> None:
        """Send every push that has no outcome once more, after the server found one damaged."""

        def send() -> None:
            for pending in self._pending.values():
                self._enqueue(pending)

        self._loop.call_soon_threadsafe(send)

    def settle(self, seq: int) -> None:
        """Forget a push that the server has refused for good."""
        self._loop.call_soon_threadsafe(self._pending.pop, seq, None)

    def report(self, evaluation: m.Evaluation) -> None:
        """Report what was measured; told again after a reconnect."""
        self._evaluation = evaluation
        self._send_soon(evaluation)

    def leave(self, reason: str, *, failed: bool) -> None:
        """Say goodbye, if the server can be told within a few seconds. Safe to call twice."""
        if self._left:
            return
        self._left = True
        with contextlib.suppress(Exception):
            self._call(self._leave(m.Leave(failed=failed, reason=reason)), LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """Drop the connection and end the thread."""

        async def shut() -> None:
            if self._exchange is not None:
                self._exchange.cancel()
                await asyncio.gather(self._exchange, return_exceptions=True)
            await self._channel.close(None)

        with contextlib.suppress(Exception):
            self._call(shut(), LEAVE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LEAVE_TIMEOUT_S)

    # ---- on the loop

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    async def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(coroutine)

    async def _open(self) -> Stub:
        self._channel = grpc.aio.insecure_channel(self._address, options=CLIENT_OPTIONS)
        return Stub(self._channel, sent=self._meters[0], received=self._meters[1])

    async def _join(self, request: m.JoinRequest) -> m.JoinResponse:
        attempts = Attempts(self._address, self._connect_s)
        while True:
            try:
                reply: m.JoinResponse | Malformed = await translated(
                    self._stub.join(request, timeout=CALL_TIMEOUT_S)
                )
                if isinstance(reply, Malformed):
                    raise UnreachableError(f"{self._address} answers, but not as a gc-server: {reply.text}")
                return reply
            except BrokenError as broken:
                await attempts.pause(str(broken))
            except Refused as refused:
                # Perhaps the same worker, restarted: its old stream may take a moment to be missed.
                if refused.refusal.reason is not Reason.DUPLICATE_WORKER or attempts.over:
                    raise
                await attempts.pause(str(refused))

    async def _keep_exchanging(self) -> None:
        """Keep a stream open until the worker leaves or there is no hope; then tell the training thread."""
        try:
            attempts = Attempts(self._address, self._give_up_s)
            while True:
                progress = asyncio.Event()
                opened_at = time.monotonic()
                try:
                    await self._one_stream(progress)
                    if self._left:
                        return
                    reason = "the server closed the stream"
                except BrokenError as broken:
                    reason = str(broken)
                # A stream that only ever breaks, such as one too slow for the lease, is not progress.
                if progress.is_set() or time.monotonic() - opened_at > self._give_up_s:
                    attempts = Attempts(self._address, self._give_up_s)
                self.reconnects += 1
                await attempts.pause(reason)
        except (Refused, UnreachableError) as error:
            self._incoming.put(error)
        except Exception as error:
            log.exception("the client failed")
            self._incoming.put(error)

    async def _one_stream(self, progress: asyncio.Event) -> None:
        """One Exchange call from Hello to its end. Raises BrokenError or Refused."""
        assert self._reply is not None
        call = self._stub.exchange()
        outbox: asyncio.Queue[bytes | Outgoing] = asyncio.Queue()
        hello = m.Hello(job=self._reply.job.id, worker=self.worker, incarnation=self.incarnation)
        outbox.put_nowait(encode_worker(hello))
        if self._manifest is not None:
            outbox.put_nowait(encode_worker(self._ready_message()))
        if self._evaluation is not None:
            outbox.put_nowait(encode_worker(self._evaluation))
        for pending in self._pending.values():
            outbox.put_nowait(pending)
        self._outbox, self._writing = outbox, False

        async def write() -> None:
            while True:
                item = await outbox.get()
                if isinstance(item, Outgoing) and self._is_of_no_use(item.header):
                    continue
                self._writing = True
                for message in (item,) if isinstance(item, bytes) else item.messages():
                    await call.write(message)
                self._writing = False

        async def beat() -> None:
            assert self._reply is not None
            while True:
                await asyncio.sleep(self._reply.limits.heartbeat_seconds)
                if outbox.empty():  # otherwise the server hears of us anyway
                    outbox.put_nowait(encode_worker(m.Heartbeat(activity=self.activity)))

        reader = asyncio.create_task(self._read(call, progress))
        tasks = [reader, asyncio.create_task(write()), asyncio.create_task(beat())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                # Where the call has ended, reading it tells why; another fault is the writer's own.
                await asyncio.wait((reader,), timeout=LAST_WORD_S)
            await translated(next(task for task in tasks if task.done()))
        finally:
            self._outbox = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _read(self, call: AsyncIterator[m.ServerMessage | Malformed], progress: asyncio.Event) -> None:
        assert self._reply is not None
        receiver = Receiver(self.worker, self._reply.limits.chunk_bytes)
        async for message in call:
            match message:
                case m.Update():
                    receiver.begin_update(message, self._manifest)
                case m.Packet():
                    self._hand_over(receiver.begin_packet(message, self._manifest))
                case m.Chunk():
                    self._hand_over(receiver.add(message))
                case m.Outcome():
                    progress.set()
                    # A refusal is settled by the training thread, which may want to send it again.
                    if message.decision is m.Decision.ACCEPTED:
                        self._pending.pop(message.seq, None)
                    self._incoming.put(message)
                case m.Assignment():
                    if message.coding is not None:
                        self._running = message.coding.exchange
                    if message.id > self._assigned:
                        progress.set()
                    self._assigned = message.id
                    self._incoming.put(message)
                case m.Waiting() | m.InitializeRequest() | m.SnapshotRequest():
                    self._incoming.put(message)
                case m.Welcome():
                    log.info("connected as rank %d, server at version %d", message.rank, message.version)
                case Malformed():
                    raise BrokenError(f"the server's message cannot be read: {message.text}")
            complete = receiver.take_update()
            if complete is not None:
                update, assembly = complete
                payloads = await asyncio.to_thread(assembly.finish)
                self._incoming.put(Received(update, payloads))
                self._version = update.version

    def _hand_over(self, packet: ReceivedPacket | None) -> None:
        if packet is not None:
            self._incoming.put(packet)

    def _is_of_no_use(self, header: m.Push | m.Packet | m.Snapshot) -> bool:
        """Whether it is a packet of an exchange that has been given up."""
        return isinstance(header, m.Packet) and header.exchange < self._running

    def _ready_message(self) -> m.Ready:
        assert self._manifest is not None
        return m.Ready(fingerprint=self._manifest.fingerprint, version=self._version, assigned=self._assigned)

    def _send_push(self, pending: Outgoing) -> None:
        self._pending[pending.transfer] = pending
        self._enqueue(pending)

    def _enqueue(self, item: bytes | Outgoing) -> None:
        if self._outbox is not None:  # otherwise it goes out when the stream is open again
            self._outbox.put_nowait(item)

    def _send_soon(self, message: m.WorkerMessage) -> None:
        self._loop.call_soon_threadsafe(self._enqueue, encode_worker(message))

    async def _leave(self, message: m.Leave) -> None:
        if self._outbox is None or self._exchange is None:
            return
        self._outbox.put_nowait(encode_worker(message))
        await asyncio.wait((self._exchange,), timeout=LEAVE_TIMEOUT_S - 1)


async def _stream(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message
