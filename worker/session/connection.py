"""One worker's connection to the server, for the thread that owns it: calls, and the messages of one stream.

gRPC runs on an event loop in a thread of its own, so that heartbeats leave while the owner computes. The
owner calls plain methods, and receives messages from `next`. Calls are repeated while the connection is
broken, for up to `give_up_s`. `stream` keeps the stream open, and `outgoing` decides which messages are sent
again on a new one. Only methods that document `Raises`, and `flush` and `leave`, wait for the server.

The stream begins with `Hello`, before the worker loads its data, so that the server hears of the worker while
it loads. The message `Ready` follows when the worker can take work, and names the version of its replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
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
from ...proto.client import Client
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
    """State of an earlier job, uploaded by the worker that initializes a new one.

    Attributes:
        moments: state from which the server's optimizer continues.
        epoch: first epoch of the new job, counted from 0: the number of completed epochs.
        steps: number of steps taken in the completed epochs.
    """

    moments: Moments
    epoch: int = 0
    steps: int = 0


class Connection:
    """A worker's connection to the server: RPCs and one stream, with reconnects. Belongs to one thread.

    Attributes:
        worker: name of this worker.
        incarnation: number of this process among those with the same name; later ones are larger.
        progress: progress of the owner's thread, which heartbeats report.
    """

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
        """Start the event loop's thread; nothing is sent before `join`.

        Args:
            address: the server's host and port.
            worker: name of this worker.
            incarnation: number of this process, larger than those of earlier processes with the same name.
            connect_s: seconds for which `join` tries to reach the server.
            give_up_s: seconds for which later calls and the stream try to reach the server.
            sent: counts bytes written to the network.
            received: counts bytes read from the network.
            files: paths of the files for TLS and a token, by `Target`'s name of the argument; None for none.
        """
        self._target = Target.at(address, **(files or {}))
        self.worker = worker
        self.incarnation = incarnation
        self.progress = Progress()
        self._address = address
        self._connect_s, self._give_up_s = connect_s, give_up_s
        self._meters = (sent, received)
        self._stream = Stream(
            address, self.progress, worker=worker, incarnation=incarnation, give_up_s=give_up_s
        )
        self._outgoing = self._stream.outgoing
        self._streaming: asyncio.Task[None] | None = None  # from `join` on
        self._reply: m.JoinResponse
        self._heard_lost_versions = 0  # number of times that `next` has reported lost versions to the owner
        self._left = False
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="connection", daemon=True)
        self._thread.start()
        self._client: Client = self._call(self._open())

    # ---- for the owner's thread

    @property
    def rank(self) -> int:
        """Rank that the server assigned last, from 0. It may change when a lost member returns."""
        return self._stream.rank

    @property
    def reconnects(self) -> int:
        """Number of times that the stream was opened again."""
        return self._stream.reconnects

    @property
    def activity(self) -> str:
        """Activity of the owner's thread, such as "computing", which heartbeats report."""
        return self.progress.activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self.progress.moved(activity)

    def moved(self) -> None:
        """Note that the owner's thread makes progress now."""
        self.progress.moved()

    @property
    def sent(self) -> tuple[int, float]:
        """Bytes written to the stream so far, and seconds so far during which there were bytes to write."""
        return self._outgoing.sent

    @property
    def away_s(self) -> float:
        """Seconds without a stream that the server has welcomed; 0 while there is one."""
        since = self._stream.away_since
        return 0.0 if since is None else time.monotonic() - since

    def join(self, software: str, compressor: str, compressors: Sequence[str]) -> m.JoinResponse:
        """Join the job as a member, and open the stream, which stays open from now on.

        Args:
            software: version of this software, for messages.
            compressor: spec of the compressor that this worker uses.
            compressors: names of the compressors that this worker supports.

        Returns:
            The server's reply: job, terms, limits and rank.

        Raises:
            Refused: the server does not accept this worker.
            UnreachableError: no server answered for `connect_s`.
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
            return asyncio.create_task(self._stream.run(self._client, request, reply))

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
        """Upload the initial parameters.

        Args:
            manifest: names, shapes and groups of the tensors.
            values: one flat uint8 array per tensor, with the bytes of its float32 values.
            state: bytes of buffers and frozen parameters, by name; None if there are none.
            least_samples: smallest number of samples that a batch may have.
            earlier: state of an earlier job, from which this one continues; None without one.

        Returns:
            True if the job begins with these parameters. False if it begins with others: the server has asked
            another worker meanwhile, or has parameters already, possibly from an earlier attempt whose answer
            was lost. A snapshot follows in that case.

        Raises:
            Refused: the server refuses the parameters for another reason.
            UnreachableError: no attempt succeeded for `give_up_s`.
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
        header = replace(header, digest=_digest(chunks))
        asks = False  # from the second attempt on

        async def upload(stub: Stub, attempts: Attempts) -> m.InitializeResponse:
            """Send the chunks that the server does not hold yet."""
            nonlocal asks
            held = 0
            if asks:
                asking = _stream([replace(header, asks=True)])
                held = _readable(await stub.initialize(asking, timeout=CALL_TIMEOUT_S)).held
                attempts.reached(held)
            asks = True
            return _readable(await stub.initialize(_stream([replace(header, held=held), *chunks[held:]])))

        try:
            reply = self._call(self._again(upload))
            if reply.replaced:
                return False
            self.stepped(0)
            return True
        except Refused as refused:
            if refused.refusal.reason in (Reason.ALREADY_INITIALIZED, Reason.NOT_A_MEMBER):
                return False
            raise

    def put_state(self, entries: Sequence[m.Entry], values: Mapping[str, Bytes], **of: Any) -> None:
        """Upload buffers, before the commit of their push or the report of their evaluation.

        Late buffers are no error: the server drops them.

        Args:
            entries: names, shapes and dtypes of the buffers.
            values: bytes of each buffer, by name.
            of: the push or evaluation to which the buffers belong: further fields of `StateHeader`.

        Raises:
            Refused: the server refuses the buffers for another reason than lateness.
            UnreachableError: no attempt succeeded for `give_up_s`.
        """
        header = m.StateHeader(job=self._reply.job.id, worker=self.worker, incarnation=self.incarnation, **of)
        messages: list[Any] = [header, *encode_values(entries, values)]
        try:
            self._call(self._again(lambda stub, _: stub.put_state(_stream(messages))))
        except Refused as refused:
            if refused.refusal.reason not in (Reason.STALE, Reason.NOT_A_MEMBER):
                raise

    def get_state(self, manifest: Manifest, epoch: int, frozen: bytes) -> dict[str, Bytes]:
        """Download the job's buffers, and its frozen parameters if they differ from this worker's.

        Args:
            manifest: the model's entries.
            epoch: number of the evaluation (`Assignment.evaluate_epoch`) for which the buffers are; 0 for the
                newest buffers.
            frozen: SHA-256 of this worker's frozen parameters.

        Returns:
            The bytes of each entry, by name.

        Raises:
            Refused: the server refuses the request.
            UnreachableError: no attempt succeeded for `give_up_s`.
        """
        request = m.GetStateRequest(job=self._reply.job.id, epoch=epoch, frozen=frozen, worker=self.worker)

        async def download(stub: Stub, attempts: Attempts) -> dict[str, Bytes]:
            values: EntryValues | None = None
            async for message in _counted(stub.get_state(request), attempts):
                if isinstance(message, m.StateHeader) and values is None:
                    values = EntryValues(of_kind(manifest.entries, frozen=message.frozen), worker=self.worker)
                elif isinstance(message, m.Chunk) and values is not None:
                    values.add(message)
                else:
                    raise BrokenError("expected the model's state, got another message from the server")
            if values is None or not values.complete:
                raise BrokenError("the server's answer is incomplete")
            return values.finish()

        return self._call(self._again(download))

    def get_optimizer(self, manifest: Manifest) -> tuple[int, Moments]:
        """Download the state of the server's optimizer.

        Args:
            manifest: names and shapes of the tensors.

        Returns:
            The version of the parameters to which the state belongs, and the state by tensor.

        Raises:
            Refused: the server refuses the request.
            UnreachableError: no attempt succeeded for `give_up_s`.
        """
        request = m.GetOptimizerRequest(job=self._reply.job.id, worker=self.worker)

        async def download(stub: Stub, attempts: Attempts) -> tuple[int, Moments]:
            values: MomentValues | None = None
            version = 0
            async for message in _counted(stub.get_optimizer(request), attempts):
                if isinstance(message, m.OptimizerHeader) and values is None:
                    version = message.version
                    values = MomentValues(message.moments, manifest, worker=self.worker)
                elif isinstance(message, m.Chunk) and values is not None:
                    values.add(message)
                else:
                    raise BrokenError("expected the optimizer's state, got another message from the server")
            if values is None or not values.complete:
                raise BrokenError("the server's answer is incomplete")
            return version, values.finish()

        return self._call(self._again(download))

    def ready(self, manifest: Manifest, *, restored: bool = False, accumulate: int = 0) -> None:
        """Tell the server that this worker can take work.

        Args:
            manifest: the model's tensors and entries, by which the server checks that models agree.
            restored: whether the worker continues from its own saved state.
            accumulate: number of batches that an optimizer step of a script takes; 0 if not declared.
        """
        self.progress.begun = True
        self._soon(self._outgoing.ready, manifest, restored, accumulate)

    def saved(self, version: int, error: str) -> None:
        """Report that this worker's own state of a version is saved, or not. Lost if the stream breaks.

        Args:
            version: version that the server requested.
            error: reason why the state was not saved; "" if it was.
        """
        self._soon(self._outgoing.say, m.Saved(version=version, error=error[:MAX_ERROR_CHARACTERS]))

    def next(self, timeout_s: float) -> Incoming | None:
        """Wait for the next message from the server, and return it; None if none arrives in time.

        Args:
            timeout_s: seconds to wait at most.

        Raises:
            Refused: the server has ended the membership.
            UnreachableError: the stream could not be opened again for `give_up_s`.
        """
        try:
            with self.progress.waiting():
                item = self._stream.incoming.get(timeout=timeout_s)
        except queue.Empty:
            self._check_alive()
            return None
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, m.Welcome):
            self._heard_lost_versions += 1
        return item

    def part(self, header: m.PartHeader, payloads: Sequence[Payload]) -> int:
        """Queue a part of a push for sending, and keep it for resending until the push is settled.

        Args:
            header: header of the part.
            payloads: payloads of the part. No thread may write to them until the push is settled.

        Returns:
            The CRC-32C of the part's bytes; 0 for an empty part.
        """
        # The part's checksum follows from those of its chunks, so each byte is read once.
        data = [payload.data for payload in payloads]
        chunk_bytes = self._reply.limits.chunk_bytes
        checksums = chunk_checksums(data, chunk_bytes)
        number = part_transfer(header.seq, header.part)
        transfer = Transfer(header, number, data, chunk_bytes, checksums)
        self.progress.moved()
        self._soon(self._outgoing.part, header.seq, header.part, transfer)
        return checksums[-1] if checksums else 0

    def commit(self, commit: m.Commit) -> None:
        """Queue the commit of a push for sending, and keep it for resending until the push is settled."""
        self.progress.moved()
        self.progress.stepped = True
        self._soon(self._outgoing.commit, commit)

    def abandon(self, seq: int) -> None:
        """Tell the server that a push will not be committed, and discard its parts."""
        self._soon(self._outgoing.abandon, seq)

    def settle(self, seq: int) -> None:
        """Discard a refused push, so that it is not sent again; accepted ones are discarded automatically."""
        self._soon(self._outgoing.settle, seq)

    def resend(self, seq: int, part: int | None) -> None:
        """Send a push again, because it arrived damaged.

        Args:
            seq: number of the push.
            part: number of the damaged part; None to send the whole push.
        """
        self._soon(self._outgoing.resend, seq, part)

    def send(self, header: m.Packet | m.Snapshot, data: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Queue a coded packet or a snapshot for sending. It is lost if the stream breaks.

        Args:
            header: header of the packet or snapshot.
            data: bytes that follow the header, flat uint8. No thread may write to them until they are sent.
        """
        number = packet_transfer(header) if isinstance(header, m.Packet) else header.version
        transfer = Transfer(header, number, data, self._reply.limits.chunk_bytes)
        self._soon(self._outgoing.send, transfer)

    def hurry(self) -> None:
        """Lift the limit on the sending rate until the next assignment arrives."""
        self._soon(self._outgoing.limit_rate, 0)

    def flush(self) -> None:
        """Wait until all queued messages are written, or there is no stream."""

        async def idle() -> bool:
            return self._outgoing.idle

        while not self._call(idle()):
            time.sleep(FLUSH_POLL_S)

    def stepped(self, version: int) -> None:
        """Note the replica's version, which the next stream reports to the server.

        Ignored if the server has lost versions and the owner has not received that message yet: the next
        stream must not claim a lost version.
        """
        heard = self._heard_lost_versions

        def note() -> None:
            if heard == self._stream.lost_versions:
                self._outgoing.version = max(version, self._outgoing.version or 0)

        self._soon(note)

    def reopen_without_replica(self, drifted: int) -> None:
        """Open a new stream that reports no version, so that the server sends a snapshot.

        Args:
            drifted: version at which the replica differed from the server's parameters.
        """

        def reopen() -> None:
            self._outgoing.version, self._outgoing.drifted = None, drifted
            self._stream.reopen.set()

        self._soon(reopen)

    def report(self, evaluation: m.Evaluation) -> None:
        """Send the result of an evaluation, and send the last one again after a reconnect."""
        self._soon(self._outgoing.report, evaluation)

    def stop_job(self, reason: str) -> None:
        """Ask the server to end the job, now and on each new stream.

        Args:
            reason: text for the server's log.
        """
        self._soon(self._outgoing.stop, m.Stop(reason=reason))

    def ask(self, request: m.More) -> None:
        """Ask for further batches of an assignment, and ask again after a reconnect."""
        self._soon(self._outgoing.ask, request)

    def profile(self, profile: m.Profile) -> None:
        """Send measured durations of steps; they are lost if the stream breaks."""
        self._soon(self._outgoing.say, profile)

    def leave(self, reason: str, *, failed: bool) -> None:
        """Leave the job: tell the server, if there is a stream, and wait a few seconds for it to close.

        A second call does nothing.

        Args:
            reason: text for the server's log.
            failed: whether the worker leaves because of an error.
        """
        if self._left:
            return
        self._left = self._stream.leaving = True
        if self._streaming is None:
            return
        goodbye = self._stream.say_goodbye(m.Leave(failed=failed, reason=reason), self._streaming)
        with contextlib.suppress(Exception):
            self._call(goodbye, LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection and end the event loop's thread."""

        async def shut() -> None:
            if self._streaming is not None:
                self._streaming.cancel()
                await asyncio.gather(self._streaming, return_exceptions=True)
            await self._client.close()

        with contextlib.suppress(Exception):
            self._call(shut(), LEAVE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LEAVE_TIMEOUT_S)

    # ---- on the loop

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the event loop, and wait for its result."""
        try:
            self._check_alive()
        except RuntimeError:
            coroutine.close()
            raise
        with self.progress.waiting():
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def _check_alive(self) -> None:
        """Raise RuntimeError if nothing can arrive any more, instead of waiting for ever."""
        if not self._thread.is_alive():
            raise RuntimeError(
                "the thread of the connection to the server has ended, or this process is a fork of the one "
                "that has joined; connect in the process that trains"
            )

    def _soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the event loop call a function, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    async def _again(self, call: Callable[[Stub, Attempts], Awaitable[T]]) -> T:
        """Make a call, and repeat it while the connection is broken. Raises Refused or UnreachableError."""
        attempts = Attempts(self._address, self._give_up_s)
        while True:
            try:
                found: T = await translated(call(await translated(self._client.stub()), attempts))
                return found
            except BrokenError as broken:
                await attempts.explain(broken, self._client)
                await attempts.pause(str(broken), broken.remedy)

    async def _open(self) -> Client:
        sent, received = self._meters
        return Client(self._target, sent=sent, received=received)

    async def _join(self, request: m.JoinRequest) -> m.JoinResponse:
        """Repeat a join request until the server replies or `connect_s` has passed."""
        attempts = Attempts(self._address, self._connect_s)
        while True:
            try:
                reply: m.JoinResponse | Malformed = await translated(
                    (await translated(self._client.stub())).join(request, timeout=CALL_TIMEOUT_S)
                )
                if isinstance(reply, Malformed) and reply.damaged:
                    raise BrokenError(reply.text)
                if isinstance(reply, Malformed):
                    raise UnreachableError(f"{self._address} answers, but not as a gc-server: {reply.text}")
                return reply
            except BrokenError as broken:
                await self._give_up_on_tls()
                await attempts.explain(broken, self._client)
                await attempts.pause(str(broken), broken.remedy)
            except Refused as refused:
                # The other member may be this worker before a restart: the server loses it after a moment.
                if refused.refusal.reason is not Reason.DUPLICATE_WORKER or attempts.over:
                    raise
                await attempts.pause(str(refused))

    async def _give_up_on_tls(self) -> None:
        """Raise UnreachableError if TLS fails: gRPC reports UNAVAILABLE, but waiting does not help."""
        found = await asyncio.to_thread(lambda: [*reach(self._target)][-1])
        if found.check == "tls" and found.state == "wrong" and not found.unreachable:
            raise UnreachableError(f"{self._address}: {found.text}; {found.remedy}")


async def _stream(messages: Sequence[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


async def _counted(messages: AsyncIterator[T], attempts: Attempts) -> AsyncIterator[T]:
    """Yield the messages of a download, and note how many have arrived."""
    count = 0
    async for message in messages:
        count += 1
        attempts.reached(count)
        yield message


def _digest(chunks: Sequence[bytes]) -> bytes:
    """Return the SHA-256 over the chunks of an upload."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def _readable(reply: m.InitializeResponse | Malformed) -> m.InitializeResponse:
    """Return the reply. Raise BrokenError if it cannot be read."""
    if isinstance(reply, Malformed):
        raise BrokenError(f"the server's answer cannot be read: {reply.text}")
    return reply


def connection_of(settings: WorkerSettings, metrics: WorkerMetrics) -> Connection:
    """Create a connection from a worker's options; it has not joined a job yet.

    Args:
        settings: address, name, time limits and files for TLS and a token.
        metrics: counts the bytes on the wire.
    """
    return Connection(
        parse_address(settings.server),
        worker=settings.worker_id or own_name(),
        incarnation=time.time_ns(),
        connect_s=settings.connect_seconds,
        give_up_s=settings.give_up_seconds,
        sent=lambda count: metrics.wire_up.inc(count),  # looked up each time: its label may change
        received=lambda count: metrics.wire_down.inc(count),
        files=access_files(settings),
    )
