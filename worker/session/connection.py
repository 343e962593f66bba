"""One worker's connection to the server, for the thread that owns it: calls, and the messages of one stream.

gRPC runs on an event loop in a thread of its own, so that heartbeats go out while the owner computes. The
owner calls plain methods and takes what arrived from `next`. Calls are made again while the connection is
broken, for as long as `give_up_s`; `stream` keeps the stream open; `outgoing` says what is sent again on a
new one. No method waits for the server, except those that say what they raise, `flush` and `leave`.

The stream begins with `Hello`, before the worker loads its data, so that the server hears of it meanwhile.
`Ready` follows when it can take work, and says which version it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import uvloop

from ...common.naming import own_name
from ...compressors import Payload
from ...proto import messages as m
from ...proto.channel import credentials_of, dial
from ...proto.entries import of_kind
from ...proto.findings import Target
from ...proto.manifest import Manifest
from ...proto.moments import Moments, MomentValues, encode_moments
from ...proto.reaching import reach
from ...proto.refusal import Reason, Refused
from ...proto.service import Malformed, Meter, Stub
from ...proto.state import EntryValues, encode_values
from ...proto.transfer import Bytes, chunk_checksums, encode_chunks, packet_transfer, part_transfer
from ...settings import WorkerSettings, access_files, parse_address
from ..metrics import WorkerMetrics
from .attempts import CALL_TIMEOUT_S, Attempts, BrokenError, UnreachableError, translated
from .outgoing import Transfer
from .progress import Progress
from .stream import LEAVE_TIMEOUT_S, Incoming, Stream

T = TypeVar("T")

MAX_ERROR_CHARACTERS = 512
FLUSH_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Earlier:
    """State of an earlier job, brought by the worker that begins a new one.

    Attributes:
        moments: state that the server's optimizer continues from.
        epoch: number of the first epoch to train on, from 0.
        steps: number of steps taken in earlier epochs.
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
        self._address = address
        self._connect_s, self._give_up_s = connect_s, give_up_s
        self._meters = (sent, received)
        self._stream = Stream(
            address, self.progress, worker=worker, incarnation=incarnation, give_up_s=give_up_s
        )
        self._outgoing = self._stream.outgoing
        self._streaming: asyncio.Task[None] | None = None  # from `join` on
        self._reply: m.JoinResponse
        self._heard_lost_versions = 0  # how often the owner's thread has heard of lost versions
        self._left = False
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="connection", daemon=True)
        self._thread.start()
        self._stub: Stub = self._call(self._open())

    # ---- for the owner's thread

    @property
    def rank(self) -> int:
        """The rank that the server said last: a member that was lost may come back with another."""
        return self._stream.rank

    @property
    def reconnects(self) -> int:
        """Number of times the stream was opened again."""
        return self._stream.reconnects

    @property
    def activity(self) -> str:
        """The owner's activity, for heartbeats."""
        return self.progress.activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self.progress.moved(activity)

    def moved(self) -> None:
        """Note that the owner makes progress."""
        self.progress.moved()

    @property
    def sent(self) -> tuple[int, float]:
        """Bytes of transfers that went out so far, and the seconds during which there were some to write."""
        return self._outgoing.sent

    @property
    def away_s(self) -> float:
        """Seconds since there was a stream on which the server has answered; 0 while there is one."""
        since = self._stream.away_since
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
        self._reply = reply = self._call(self._join(request))
        self._stream.rank = reply.rank
        self.progress.stated_s = reply.limits.progress_seconds

        async def start() -> asyncio.Task[None]:
            return asyncio.create_task(self._stream.run(self._stub, request, reply))

        self._streaming = self._call(start())
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
        """Upload buffers, before the commit of their push or the report of their evaluation. The server drops
        late ones. of: other fields of the header.

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
        """Return the state of the server's optimizer, and the version of the parameters that it belongs to.

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
        """Return the next message that arrived; None after the timeout.

        Raises:
            Refused: the server ended the stream for good.
            UnreachableError: the stream could not be opened again for `give_up_s`.
        """
        try:
            with self.progress.waiting():
                item = self._stream.incoming.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, m.Welcome):
            self._heard_lost_versions += 1
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
        """Send without a limit of the rate until the next assignment."""
        self._soon(self._outgoing.pace, 0)

    def flush(self) -> None:
        """Wait until everything has been written, or there is no stream to write to."""

        async def idle() -> bool:
            return self._outgoing.idle

        while not self._call(idle()):
            time.sleep(FLUSH_POLL_S)

    def stepped(self, version: int) -> None:
        """Note the replica's version. Ignored if the server has lost that version meanwhile, which the owner
        hears with the next `Welcome`: otherwise the next stream would claim it again."""
        heard = self._heard_lost_versions

        def note() -> None:
            if heard == self._stream.lost_versions:
                self._outgoing.version = max(version, self._outgoing.version or 0)

        self._soon(note)

    def let_go(self, drifted: int) -> None:
        """Open the stream anew without a replica. drifted: version at which it differed from the server's."""

        def reopen() -> None:
            self._outgoing.version, self._outgoing.drifted = None, drifted
            self._stream.reopen.set()

        self._soon(reopen)

    def report(self, evaluation: m.Evaluation) -> None:
        """Report an evaluation; it is sent again after a reconnect."""
        self._soon(self._outgoing.report, evaluation)

    def profile(self, profile: m.Profile) -> None:
        """Send what was measured of steps; lost if the stream breaks."""

        self._soon(self._outgoing.say, profile)

    def leave(self, reason: str, *, failed: bool) -> None:
        """Say goodbye, if there is a stream and the server can be told within a few seconds. Safe to call
        twice."""
        if self._left:
            return
        self._left = self._stream.leaving = True
        if self._streaming is None:
            return
        goodbye = self._stream.say_goodbye(m.Leave(failed=failed, reason=reason), self._streaming)
        with contextlib.suppress(Exception):
            self._call(goodbye, LEAVE_TIMEOUT_S)

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
        """Make a call, and again while the connection is broken. Raises Refused or UnreachableError."""
        attempts = Attempts(self._address, self._give_up_s)
        while True:
            try:
                found: T = await translated(call())
                return found
            except BrokenError as broken:
                await attempts.pause(str(broken))

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
        """Raise UnreachableError if TLS fails. gRPC says UNAVAILABLE then, and waiting does not help."""
        found = await asyncio.to_thread(lambda: [*reach(self._target)][-1])
        if found.check == "tls" and found.state == "wrong" and not found.unreachable:
            raise UnreachableError(f"{self._address}: {found.text}; {found.remedy}")


async def _stream(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


def connection_of(settings: WorkerSettings, metrics: WorkerMetrics) -> Connection:
    """Return a connection as a worker's options describe it, which has not joined yet."""
    return Connection(
        parse_address(settings.server),
        worker=settings.worker_id or own_name(),
        incarnation=time.time_ns(),
        connect_s=settings.connect_seconds,
        give_up_s=settings.give_up_seconds,
        sent=metrics.wire_up.inc,
        received=metrics.wire_down.inc,
        files=access_files(settings),
    )
