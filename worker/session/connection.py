"""One worker's connection to the server: calls, and a stream that is opened again when it breaks.

gRPC runs on an event loop in a thread of its own, so that heartbeats go out while the thread that owns the
connection computes. That thread calls plain methods and takes what arrived from `next`.

A stream that breaks is opened again, with pauses, for as long as `give_up_s`; each attempt is logged.
`outgoing` says what is said again on the new stream. `next` raises what the server refuses for good.

A stream begins with `Hello`, before the worker loads its data, so that the server hears of it meanwhile.
`Ready` follows when it can take work, and says which version it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import uvloop

from ...compressors import Payload, Plan
from ...proto import messages as m
from ...proto.channel import credentials_of, dial
from ...proto.entries import of_kind
from ...proto.findings import Target
from ...proto.manifest import Manifest
from ...proto.moments import Moments, MomentValues, encode_moments
from ...proto.reaching import reach
from ...proto.refusal import Reason, Refused
from ...proto.service import Malformed, Meter, Stub, unbatched
from ...proto.state import EntryValues, encode_values
from ...proto.transfer import Bytes, chunk_checksums, encode_chunks, packet_transfer, part_transfer
from ...proto.wire import gather
from .attempts import Attempts, BrokenError, UnreachableError, translated
from .outgoing import Outgoing, Transfer
from .progress import Progress
from .receiving import Received, ReceivedPacket, Receiver

log = logging.getLogger("gradwire.worker")
T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
MAX_ERROR_CHARACTERS = 512
LEAVE_TIMEOUT_S = 5.0
LAST_WORD_S = 1.0
FLUSH_POLL_S = 0.02
SMALL_PART_BYTES = 1 << 16  # below this a thread costs more than the scan


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
)


@dataclass(frozen=True, slots=True)
class Earlier:
    """What the worker that begins a job brings from another one.

    Attributes:
        moments: that the server's optimizer continues from.
        epoch: number of the first epoch that is still to be trained on, from 0.
        steps: that were taken in those before.
    """

    moments: Moments
    epoch: int = 0
    steps: int = 0


class Connection:
    """See the head of this file."""

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
        files: Mapping[str, str] | None = None,
    ) -> None:
        """files: for TLS and a token, as in `Target`."""
        self._target = Target.at(address, **(files or {}))
        self.worker = worker
        self.incarnation = incarnation
        self.progress = Progress()  # goes out with each heartbeat
        self.reconnects = 0
        self._address = address
        self._connect_s = connect_s
        self._give_up_s = give_up_s
        self._meters = (sent, received)
        self._incoming: queue.SimpleQueue[Incoming | BaseException] = queue.SimpleQueue()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="connection", daemon=True)
        self._thread.start()
        self._stub: Stub = self._call(self._open())
        self._request: m.JoinRequest  # from `join` on, and what it was answered
        self._reply: m.JoinResponse
        self.rank = 0  # that the server has said last: a member that was lost may come back with another
        self._outgoing = Outgoing()
        self._reopen = asyncio.Event()  # the stream shall be another one
        self._streaming: asyncio.Task[None] | None = None
        self._set_backs = self._heard_set_backs = 0  # on the loop; of these, in the owner's thread
        self._away_since: float | None = time.monotonic()  # without a stream that the server has welcomed
        self._left = False
        self._named = False  # whether the log has said that the owner's thread hangs

    # ---- for the owner's thread

    @property
    def activity(self) -> str:
        """What the owner does."""
        return self.progress.activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self.progress.moved(activity)

    def moved(self) -> None:
        """The owner has got on with what it does."""
        self.progress.moved()

    @property
    def sent(self) -> tuple[int, float]:
        """Bytes of transfers that went out so far, and the seconds during which there were some to write."""
        return self._outgoing.sent

    @property
    def away_s(self) -> float:
        """Seconds since there was a stream on which the server has answered; 0 while there is one."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

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
        self._request = request
        self._reply = reply = self._call(self._join(request))
        self.rank = reply.rank
        self.progress.stated_s = reply.limits.progress_seconds
        self._streaming = self._call(self._start(self._keep_streaming()))
        return reply

    def initialize(
        self,
        manifest: Manifest,
        values: Sequence[Any],
        state: Mapping[str, Bytes] | None = None,
        least_samples: int = 1,
        earlier: Earlier | None = None,
    ) -> bool:
        """Upload the initial parameters: one flat uint8 array of float32 bytes per tensor.

        Args:
            state: bytes of buffers and frozen parameters, by name, if there are any.
            least_samples: of a batch.
            earlier: what the worker brings from another job; None for nothing.

        Returns:
            Whether they are the job's now. Where another worker was asked meanwhile, or the server has them
            already, perhaps from an attempt of which the answer was lost, a snapshot follows.

        Raises:
            Refused, UnreachableError.
        """
        header = m.InitializeHeader(
            job=self._reply.job.id,
            worker=self.worker,
            incarnation=self.incarnation,
            manifest=manifest.to_message(),
            least_samples=least_samples,
        )
        entries = of_kind(manifest.entries, frozen=True)
        chunks = [*encode_chunks(0, values), *encode_values(entries, state or {})]
        if earlier is not None:
            moments, of_moments = encode_moments(earlier.moments)
            header = replace(header, moments=moments, epoch=earlier.epoch, steps=earlier.steps)
            chunks += of_moments
        messages: list[Any] = [header, *chunks]
        try:
            reply = self._call(self._again(lambda: self._stub.initialize(_stream(messages))))
            if isinstance(reply, m.InitializeResponse) and reply.replaced:
                return False
            self.stepped(0)
            return True
        except Refused as refused:
            if refused.refusal.reason in (Reason.ALREADY_INITIALIZED, Reason.NOT_A_MEMBER):
                return False
            raise

    def put_state(self, entries: Sequence[m.Entry], values: Mapping[str, Bytes], **of: Any) -> None:
        """Upload buffers, before the commit of their push or the report of their evaluation. What comes too
        late is of no use to anybody. of: other fields of the header.

        Raises:
            Refused, UnreachableError.
        """
        header = m.StateHeader(job=self._reply.job.id, worker=self.worker, incarnation=self.incarnation, **of)
        messages: list[Any] = [header, *encode_values(entries, values)]
        try:
            self._call(self._again(lambda: self._stub.put_state(_stream(messages))))
        except Refused as refused:
            if refused.refusal.reason not in (Reason.STALE, Reason.NOT_A_MEMBER):
                raise

    def get_state(self, manifest: Manifest, epoch: int, frozen: bytes) -> dict[str, Bytes]:
        """The buffers of the job, by name, and its frozen parameters, if they are others than these.

        Args:
            epoch: as they are evaluated for this epoch; 0 for the newest.
            frozen: SHA-256 of this worker's frozen parameters.

        Raises:
            Refused, UnreachableError.
        """
        request = m.GetStateRequest(job=self._reply.job.id, epoch=epoch, frozen=frozen, worker=self.worker)

        async def download() -> dict[str, Bytes]:
            values: EntryValues | None = None
            async for message in self._stub.get_state(request):
                if isinstance(message, m.StateHeader) and values is None:
                    values = EntryValues(of_kind(manifest.entries, frozen=message.frozen), worker=self.worker)
                elif isinstance(message, m.Chunk) and values is not None:
                    values.add(message)
                else:
                    raise BrokenError("the server's answer is no state of the model")
            if values is None or not values.complete:
                raise BrokenError("the server's answer ends too early")
            return values.finish()

        return self._call(self._again(download))

    def get_optimizer(self, manifest: Manifest) -> tuple[int, Moments]:
        """What the server's optimizer remembers, and the version of the parameters that it belongs to.

        Raises:
            Refused, UnreachableError.
        """
        request = m.GetOptimizerRequest(job=self._reply.job.id, worker=self.worker)

        async def download() -> tuple[int, Moments]:
            values: MomentValues | None = None
            version = 0
            async for message in self._stub.get_optimizer(request):
                if isinstance(message, m.OptimizerHeader) and values is None:
                    version = message.version
                    values = MomentValues(message.moments, manifest, worker=self.worker)
                elif isinstance(message, m.Chunk) and values is not None:
                    values.add(message)
                else:
                    raise BrokenError("the server's answer is no state of an optimizer")
            if values is None or not values.complete:
                raise BrokenError("the server's answer ends too early")
            return version, values.finish()

        return self._call(self._again(download))

    def ready(self, manifest: Manifest, *, restored: bool = False) -> None:
        """Say that work may come. restored: to a worker that goes on from its own state."""
        self.progress.begun = True
        self._soon(self._outgoing.ready, manifest, restored)

    def saved(self, version: int, error: str) -> None:
        """Say that this worker's state of a version is written down, or why not; lost if the stream is."""
        self._soon(self._outgoing.say, m.Saved(version=version, error=error[:MAX_ERROR_CHARACTERS]))

    def next(self, timeout_s: float) -> Incoming | None:
        """What arrived next, None after the timeout.

        Raises:
            Refused: the server ended the stream for good.
            UnreachableError: the stream could not be opened again for `give_up_s`.
        """
        try:
            with self.progress.waiting():
                item = self._incoming.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, m.Welcome):
            self._heard_set_backs += 1
        return item

    def part(self, header: m.PartHeader, payloads: Sequence[Payload]) -> int:
        """Send a part of a push, and keep it until `settle`. Nobody may write to the payloads until then.

        Returns:
            crc32c of its bytes. Those of its chunks lead to it, so each byte is summed once.
        """
        data = [payload.data for payload in payloads]
        chunk_bytes = self._reply.limits.chunk_bytes
        checksums = chunk_checksums(data, chunk_bytes)
        number = part_transfer(header.seq, header.part)
        transfer = Transfer(header, number, data, chunk_bytes, checksums)
        self.progress.moved()
        self._soon(self._outgoing.part, header.seq, header.part, transfer)
        return checksums[-1] if checksums else 0

    def commit(self, commit: m.Commit) -> None:
        """Send the commit of a push, and keep it with its parts."""
        self.progress.moved()
        self.progress.stepped = True
        self._soon(self._outgoing.commit, commit)

    def abandon(self, seq: int) -> None:
        """Say that nothing will come of a push, and keep it no longer."""
        self._soon(self._outgoing.abandon, seq)

    def settle(self, seq: int) -> None:
        """Keep a push no longer: the server has refused it. An accepted one is not kept anyway."""
        self._soon(self._outgoing.settle, seq)

    def resend(self, seq: int, part: int | None) -> None:
        """Send a push, or a part of it, once more, after the server found it damaged."""
        self._soon(self._outgoing.resend, seq, part)

    def send(self, header: m.Packet | m.Snapshot, data: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Send a coded packet or a snapshot. If the stream breaks it is lost."""
        number = packet_transfer(header) if isinstance(header, m.Packet) else header.version
        transfer = Transfer(header, number, data, self._reply.limits.chunk_bytes)
        self._soon(self._outgoing.send, transfer)

    def hurry(self) -> None:
        """Send as fast as it goes until there is other work."""
        self._soon(self._outgoing.pace, 0)

    def flush(self) -> None:
        """Wait until everything has been written, or there is no stream to write to."""

        async def idle() -> bool:
            return self._outgoing.idle

        while not self._call(idle()):
            time.sleep(FLUSH_POLL_S)

    def stepped(self, version: int) -> None:
        """The replica has got to a version. Ignored if the server has lost that version meanwhile, which the
        owner's thread hears of with the next `Welcome`: otherwise the next stream would claim it again."""
        heard = self._heard_set_backs

        def note() -> None:
            if heard == self._set_backs:
                self._outgoing.version = max(version, self._outgoing.version or 0)

        self._soon(note)

    def let_go(self, drifted: int) -> None:
        """Open the stream anew and say that there is no replica: at a version it was not the server's."""

        def reopen() -> None:
            self._outgoing.version, self._outgoing.drifted = None, drifted
            self._reopen.set()

        self._soon(reopen)

    def report(self, evaluation: m.Evaluation) -> None:
        """Report what was measured; told again after a reconnect."""
        self._soon(self._outgoing.report, evaluation)

    def profile(self, profile: m.Profile) -> None:
        """Say what steps are made of; lost if the stream is."""

        def say() -> None:
            self._outgoing.say(profile)

        self._soon(say)

    def leave(self, reason: str, *, failed: bool) -> None:
        """Say goodbye, if there is a stream and the server can be told within a few seconds. Safe to call
        twice."""
        if self._left:
            return
        self._left = True
        with contextlib.suppress(Exception):
            self._call(self._leave(m.Leave(failed=failed, reason=reason)), LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """Drop the connection and end the thread."""

        async def shut() -> None:
            if self._streaming is not None:
                self._streaming.cancel()
                await asyncio.gather(self._streaming, return_exceptions=True)
            await self._channel.close(None)

        with contextlib.suppress(Exception):
            self._call(shut(), LEAVE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LEAVE_TIMEOUT_S)

    # ---- on the loop

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        with self.progress.waiting():
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def _soon(self, function: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    async def _again(self, call: Callable[[], Awaitable[T]]) -> T:
        """What a call gives, made again when the connection breaks. Raises Refused or UnreachableError."""
        attempts = Attempts(self._address, self._give_up_s)
        while True:
            try:
                found: T = await translated(call())
                return found
            except BrokenError as broken:
                await attempts.pause(str(broken))

    async def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(coroutine)

    async def _open(self) -> Stub:
        self._channel = dial(self._target)
        sent, received = self._meters
        return Stub(
            self._channel, sent=sent, received=received, metadata=lambda: credentials_of(self._target)
        )

    async def _join(self, request: m.JoinRequest) -> m.JoinResponse:
        attempts = Attempts(self._address, self._connect_s)
        while True:
            try:
                reply: m.JoinResponse | Malformed = await translated(
                    self._stub.join(request, timeout=CALL_TIMEOUT_S)
                )
                if isinstance(reply, Malformed) and reply.damaged:
                    raise BrokenError(reply.text)
                if isinstance(reply, Malformed):
                    raise UnreachableError(f"{self._address} answers, but not as a gc-server: {reply.text}")
                return reply
            except BrokenError as broken:
                await self._give_up_on_tls()
                await attempts.pause(str(broken))
            except Refused as refused:
                # Perhaps the same worker, restarted: its old stream may take a moment to be missed.
                if refused.refusal.reason is not Reason.DUPLICATE_WORKER or attempts.over:
                    raise
                await attempts.pause(str(refused))

    async def _give_up_on_tls(self) -> None:
        """gRPC calls all of it UNAVAILABLE: what TLS does not let pass will not get better by waiting. Raises
        UnreachableError."""
        found = await asyncio.to_thread(lambda: [*reach(self._target)][-1])
        if found.check == "tls" and found.state == "wrong" and not found.unreachable:
            raise UnreachableError(f"{self._address}: {found.text}; {found.remedy}")

    async def _keep_streaming(self) -> None:
        """Keep a stream open until the worker leaves or there is no hope; then tell the owner."""
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
                except Refused as refused:
                    if refused.refusal.reason is not Reason.NOT_A_MEMBER:
                        raise
                    # The server has gone back to before this worker joined: it joins as the same one.
                    reason = str(refused)
                    with contextlib.suppress(BrokenError):
                        await translated(self._stub.join(self._request, timeout=CALL_TIMEOUT_S))
                # A stream that only ever breaks, such as one too slow for the lease, is not progress.
                if progress.is_set() or time.monotonic() - opened_at > self._give_up_s:
                    attempts = Attempts(self._address, self._give_up_s)
                self.reconnects += 1
                await attempts.pause(reason)
        except (Refused, UnreachableError) as error:
            self._incoming.put(error)
        except Exception as error:
            log.exception("the connection failed")
            self._incoming.put(error)

    async def _one_stream(self, progress: asyncio.Event) -> None:
        """One Exchange call from Hello to its end. Raises BrokenError or Refused."""
        call = self._stub.exchange()
        outgoing = self._outgoing
        self._reopen.clear()
        hello = m.Hello(job=self._reply.job.id, worker=self.worker, incarnation=self.incarnation)
        outgoing.begin(hello, ready=not self.progress.still_beyond_stated)

        async def write() -> None:
            while True:
                await call.write(gather(await outgoing.next(), outgoing.more))

        async def beat() -> None:
            while True:
                await asyncio.sleep(self._reply.limits.heartbeat_seconds)
                still_s = self._watch()
                outgoing.beat(self.activity, still_s)

        reader = asyncio.create_task(self._read(call, progress))
        reopen = asyncio.create_task(self._reopen.wait())
        tasks: list[asyncio.Task[Any]] = [
            reader,
            asyncio.create_task(write()),
            asyncio.create_task(beat()),
            reopen,
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reopen.done():
                raise BrokenError("another replica is needed")
            if not reader.done():
                # Where the call has ended, reading it tells why; another fault is the writer's own.
                await asyncio.wait((reader,), timeout=LAST_WORD_S)
            await translated(next(task for task in tasks if task.done()))
        finally:
            if self._away_since is None:
                self._away_since = time.monotonic()
            outgoing.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    def _watch(self) -> float:
        """Seconds without progress of the owner's thread, which are logged if they are many."""
        progress, still_s = self.progress, self.progress.still_s
        if not progress.still_beyond_stated:
            self._outgoing.wake()
            self._named = False
        elif progress.begun and not self._named:
            self._named = True
            log.error(
                "no progress for %.0f s (%s): the server sets this worker aside after %.0f s "
                "(gc-server --progress-seconds), until it goes on. It is here:\n%s",
                *(still_s, progress.activity, progress.limit_s, progress.stack()),
            )
        return still_s

    async def _read(self, call: AsyncIterator[m.ServerMessage | Malformed], progress: asyncio.Event) -> None:
        receiver, outgoing = Receiver(self.worker), self._outgoing
        messages: AsyncIterator[m.ServerMessage | Malformed] = unbatched(call, "ServerMessage")
        async for message in messages:
            arrived: Incoming | None = None
            match message:
                case m.Update():
                    receiver.begin_update(message, outgoing.manifest, outgoing.plan)
                case m.PlanAnnouncement():
                    arrived = outgoing.plan = receiver.plan(message, outgoing.manifest)
                case m.Packet():
                    arrived = receiver.begin_packet(message, outgoing.manifest)
                case m.Chunk():
                    arrived = receiver.add(message)
                case m.Outcome():
                    progress.set()
                    if message.decision is m.Decision.ACCEPTED:
                        outgoing.settle(message.seq)  # a refused one may have to go out again
                    elif message.part is not None:
                        outgoing.stored(message.seq, (message.part,))  # it is on its way no longer
                    arrived = message
                case m.Assignment():
                    if message.coding is not None:
                        outgoing.exchange = message.coding.exchange
                    if message.id > outgoing.assigned:
                        progress.set()
                    outgoing.assigned = message.id
                    outgoing.pace(message.pace)
                    arrived = message
                case m.Waiting() | m.InitializeRequest() | m.SnapshotRequest() | m.Save():
                    arrived = message
                case m.Unwanted():
                    outgoing.unwanted(message.seq)
                case m.Stored():
                    outgoing.stored(message.seq, message.parts)
                case m.Welcome():
                    self._away_since = None
                    log.info("connected as rank %d, server at version %d", message.rank, message.version)
                    self.rank = message.rank
                    outgoing.welcome(message)
                    if outgoing.version is not None and outgoing.version > message.newest:
                        outgoing.version, arrived = None, message
                        self._set_backs += 1
                case m.Batch():
                    raise BrokenError("the server sent a batch in a batch")
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
                self._incoming.put(arrived)

    async def _leave(self, message: m.Leave) -> None:
        lost = self.reconnects > 0 and self._away_since is not None  # and not only about to be welcomed
        if self._streaming is None or lost or not self._outgoing.say(message):
            return
        await asyncio.wait((self._streaming,), timeout=LEAVE_TIMEOUT_S - 1)


async def _stream(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message
