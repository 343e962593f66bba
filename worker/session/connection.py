"""One worker's connection to the server, for the thread that owns it: calls, and the messages of one stream.

The owner calls plain methods, and receives messages from `next`. `stream` keeps the stream open on the event
loop of `calls`, and `outgoing` decides which messages are sent again on a new one. Only methods that document
`Raises`, and `flush` and `leave`, wait for the server.

The stream begins with `Hello`, before the worker loads its data, so that the server hears of the worker while
it loads. The message `Ready` follows when the worker can take work, and names the version of its replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.addresses import parse_address
from ...common.configuration import UsageError
from ...common.naming import own_name
from ...compressors import Payload
from ...proto import messages as m
from ...proto.manifest import Manifest
from ...proto.transfer import chunk_checksums, packet_transfer, part_transfer
from ...proto.updates import NOTHING_SHARED, SharedSizes
from ...settings import WorkerSettings, access_files
from ..metrics import WorkerMetrics
from .calls import CLOSE_TIMEOUT_S, Calls
from .sending import Transfer
from .stream import LEAVE_TIMEOUT_S, Incoming, Stream

MAX_ERROR_CHARACTERS = 512
FLUSH_POLL_S = 0.02


class Connection(Calls):
    """A worker's connection to the server: calls and one stream, with reconnects. Belongs to one thread."""

    def __init__(self, address: str, **options: Any) -> None:
        """The arguments are those of `Calls`; `give_up_s` holds for the stream, too."""
        super().__init__(address, **options)
        self._stream = Stream(
            address,
            self.progress,
            worker=self.worker,
            incarnation=self.incarnation,
            give_up_s=self._give_up_s,
        )
        self._outgoing = self._stream.outgoing
        self.packing = self._outgoing.queue.packing
        self._streaming: asyncio.Task[None] | None = None  # from `join` on
        self._heard_lost_versions = 0  # number of times that `next` has reported lost versions to the owner
        self._left = False

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
        return self._outgoing.queue.sent

    @property
    def away_s(self) -> float:
        """Seconds without a stream that the server has welcomed; 0 while there is one."""
        since = self._stream.away_since
        return 0.0 if since is None else time.monotonic() - since

    def join(self, software: str, compressor: str, compressors: Sequence[str]) -> m.JoinResponse:
        """Join the job as a member, and open the stream, which stays open from now on. Returns the server's
        reply: job, terms, limits and rank."""
        request = m.JoinRequest(
            worker=self.worker,
            incarnation=self.incarnation,
            software=software,
            compressors=tuple(compressors),
            compressor=compressor,
        )
        self._reply = reply = self._call(self._join(request))
        self.packing.entropy = reply.job.settings.get("entropy", "off")
        self._stream.rank = reply.rank
        self.progress.stated_s = reply.limits.progress_seconds

        async def start() -> asyncio.Task[None]:
            return asyncio.create_task(self._stream.run(self._client, request, reply))

        self._streaming = self._call(start())
        return reply

    def ready(
        self,
        manifest: Manifest,
        *,
        restored: bool = False,
        accumulate: int = 0,
        shared: SharedSizes = NOTHING_SHARED,
    ) -> None:
        """Tell the server that this worker can take work.

        Args:
            accumulate: number of batches that an optimizer step of a script takes; 0 if not declared.
            shared: sizes of the job's state beside the values, by which updates are checked.
        """
        self.progress.begun = True
        self._soon(self._outgoing.ready, manifest, restored, accumulate, shared)

    def saved(self, version: int, error: str) -> None:
        """Report that this worker's own state of a version is saved, or not. Lost if the stream breaks.
        error: reason why the state was not saved; "" if it was."""
        self._soon(self._outgoing.say, m.Saved(version=version, error=error[:MAX_ERROR_CHARACTERS]))

    def next(self, timeout_s: float) -> Incoming | None:
        """Wait for the next message from the server, and return it; None if none arrives in time. Raises
        Refused once the server has ended the membership."""
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

    def queue_part(self, header: m.PartHeader, payloads: Sequence[Payload]) -> int:
        """Queue a part of a push for sending, and keep it for resending until the push is settled. Returns
        the CRC-32C of the part's bytes; 0 for an empty part. payloads: payloads of the part. No thread may
        write to them until the push is settled.
        """
        # The part's checksum follows from those of its chunks, so each byte is read once.
        data = [payload.data for payload in payloads]
        chunk_bytes = self._reply.limits.chunk_bytes
        checksums = chunk_checksums(data, chunk_bytes)
        number = part_transfer(header.seq, header.part)
        transfer = Transfer(header, number, data, chunk_bytes, checksums)
        self.progress.moved()
        self._soon(self._outgoing.queue_part, header.seq, header.part, transfer)
        return checksums[-1] if checksums else 0

    def queue_commit(self, commit: m.Commit) -> None:
        """Queue the commit of a push for sending, and keep it for resending until the push is settled."""
        self.progress.moved()
        self.progress.stepped = True
        self._soon(self._outgoing.queue_commit, commit)

    def abandon(self, seq: int) -> None:
        """Tell the server that a push will not be committed, and discard its parts."""
        self._soon(self._outgoing.abandon, seq)

    def settle(self, seq: int) -> None:
        """Discard a refused push, so that it is not sent again; accepted ones are discarded automatically."""
        self._soon(self._outgoing.settle, seq)

    def resend(self, seq: int, part: int | None) -> None:
        """Send a push again, because it arrived damaged. part: the damaged part; None for all of them."""
        self._soon(self._outgoing.resend, seq, part)

    def send(self, header: m.Packet | m.Snapshot, data: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Queue a coded packet or a snapshot for sending. It is lost if the stream breaks. data: bytes that
        follow the header, flat uint8. No thread may write to them until they are sent."""
        number = packet_transfer(header) if isinstance(header, m.Packet) else header.version
        transfer = Transfer(header, number, data, self._reply.limits.chunk_bytes)
        self._soon(self._outgoing.queue.put, transfer)

    def hurry(self) -> None:
        """Lift the limit on the sending rate until the next assignment arrives."""
        self._soon(self._outgoing.queue.limit_rate, 0)

    def flush(self) -> None:
        """Wait until all queued messages are written, or there is no stream."""

        async def idle() -> bool:
            return self._outgoing.queue.idle

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
        """Open a new stream that reports no version, so that the server sends a snapshot. drifted: version at
        which the replica differed from the server's parameters."""

        def reopen() -> None:
            self._outgoing.version, self._outgoing.drifted = None, drifted
            self._stream.reopen.set()

        self._soon(reopen)

    def repeat(self, message: m.Evaluation | m.Stop | m.More) -> None:
        """Send a message now and on each new stream, until another one of its type follows."""
        self._soon(self._outgoing.repeat, message)

    def stop_job(self, reason: str) -> None:
        """Ask the server to end the job; the reason is for its log."""
        self.repeat(m.Stop(reason=reason))

    def profile(self, profile: m.Profile) -> None:
        """Send measured durations of steps; they are lost if the stream breaks."""
        self._soon(self._outgoing.say, profile)

    def leave(self, reason: str, *, failed: bool) -> None:
        """Leave the job: tell the server, if there is a stream, and wait a few seconds for it to close.

        A second call does nothing.
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
            await self._cancel_open()
            if self._streaming is not None:
                self._streaming.cancel()
                await asyncio.gather(self._streaming, return_exceptions=True)
            await self._client.close()

        with contextlib.suppress(Exception):
            self._call(shut(), CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)


def connection_of(settings: WorkerSettings, metrics: WorkerMetrics) -> Connection:
    """Create a connection from a worker's options; it has not joined a job yet.

    Raises:
        UsageError: a file for access cannot be read, or there is a certificate without its key.
    """
    files = access_files(settings)
    for name, path in files.items():
        try:
            if path:
                Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"--{name.replace('_', '-')} {path}: cannot be read: {error.strerror}") from None
    if bool(files["tls_cert"]) != bool(files["tls_key"]):
        raise UsageError("--tls-cert and --tls-key: expected both or neither")

    def sent(count: int) -> None:
        metrics.wire_up.inc(count)  # looked up each time: its label may change

    def received(count: int) -> None:
        metrics.wire_down.inc(count)

    return Connection(
        parse_address(settings.server),
        worker=settings.worker_id or own_name(),
        incarnation=time.time_ns(),
        connect_s=settings.connect_seconds,
        give_up_s=settings.give_up_seconds,
        sent=sent,
        received=received,
        files=files,
    )
