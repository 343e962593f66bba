"""A worker's calls to the server, for the thread that owns them, and the event loop that makes them.

gRPC runs on an event loop in a thread of its own, so that heartbeats leave while the owner computes. Calls
are repeated while the connection is broken, for up to `give_up_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import uvloop

from ...compressors.packing import Packing
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
from ...proto.transfer import Bytes, Pack, encode_chunks
from .attempts import CALL_TIMEOUT_S, Attempts, BrokenError, UnreachableError, translated
from .progress import Progress

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Earlier:
    """State of an earlier job, uploaded by the worker that initializes a new one.

    Attributes:
        epoch: first epoch of the new job, counted from 0: the number of completed epochs.
    """

    moments: Moments
    epoch: int = 0
    steps: int = 0


class Calls:
    """A worker's calls to the server. The loop's thread serves one owner.

    A call raises Refused if the server refuses it for a reason that the call's text does not name, and
    UnreachableError if no attempt succeeds for `give_up_s` (`join`: for `connect_s`).
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
        """Start the event loop's thread; nothing is sent yet.

        Args:
            connect_s: seconds for which `join` tries to reach the server.
            give_up_s: seconds for which later calls try to reach the server.
            files: paths of the files for TLS and a token, by `Target`'s name of the argument; None for none.
        """
        self.worker, self.incarnation = worker, incarnation
        self.progress = Progress()
        self._target = Target.at(address, **(files or {}))
        self._address, self._connect_s, self._give_up_s = address, connect_s, give_up_s
        self._reply: m.JoinResponse
        self.packing = Packing()
        self._open = set[asyncio.Task[Any]]()  # only the loop's thread touches it
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="connection", daemon=True)
        self._thread.start()

        async def client() -> Client:
            return Client(self._target, sent=sent, received=received)

        self._client: Client = self._call(client())

    def initialize(
        self,
        manifest: Manifest,
        values: Sequence[Any],
        state: Mapping[str, Bytes] | None = None,
        least_samples: int = 1,
        earlier: Earlier | None = None,
    ) -> bool:
        """Upload the initial parameters.

        Returns False if the job begins with others: the server has asked another worker meanwhile, or has
        parameters already, possibly from an earlier attempt whose answer was lost. A snapshot follows then.

        Args:
            values: one flat uint8 array per tensor, with the bytes of its float32 values.
            least_samples: smallest number of samples that a batch may have.
        """
        header = m.InitializeHeader(
            job=self._reply.job.id,
            worker=self.worker,
            incarnation=self.incarnation,
            manifest=manifest.to_message(),
            least_samples=least_samples,
        )
        entries = of_kind(manifest.entries, frozen=True)
        if earlier is not None:
            moments, _ = encode_moments(earlier.moments)
            header = replace(header, moments=moments, epoch=earlier.epoch, steps=earlier.steps)

        def chunks(pack: Pack | None = None) -> Iterator[bytes]:
            """Yield the chunks, which are encoded again for each attempt: a list would be a second model."""
            yield from encode_chunks(0, values, pack=pack)
            yield from encode_values(entries, state or {})
            if earlier is not None:
                yield from encode_moments(earlier.moments)[1]

        header = replace(header, digest=_digest(chunks()))
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
            messages = chain([replace(header, held=held)], chunks(self.packing))
            return _readable(await stub.initialize(_stream(messages, held)))

        try:
            reply = self._call(self._again(upload))
            return not reply.replaced
        except Refused as refused:
            if refused.refusal.reason in (Reason.ALREADY_INITIALIZED, Reason.NOT_A_MEMBER):
                return False
            raise

    def put_state(self, entries: Sequence[m.Entry], values: Mapping[str, Bytes], **of: Any) -> None:
        """Upload buffers, before the commit of their push or the report of their evaluation.

        Late buffers are no error: the server drops them. of: the push or evaluation to which the buffers
        belong: further fields of `StateHeader`.
        """
        header = m.StateHeader(job=self._reply.job.id, worker=self.worker, incarnation=self.incarnation, **of)
        messages: list[Any] = [header, *encode_values(entries, values)]
        try:
            self._call(self._again(lambda stub, _: stub.put_state(_stream(messages))))
        except Refused as refused:
            if refused.refusal.reason not in (Reason.STALE, Reason.NOT_A_MEMBER):
                raise

    def get_state(self, manifest: Manifest, epoch: int, frozen: bytes) -> dict[str, Bytes]:
        """Download the job's buffers, and its frozen parameters if they differ from this worker's. Returns
        the bytes of each entry, by name.

        Args:
            epoch: number of the evaluation (`Assignment.evaluate_epoch`) for which the buffers are; 0 for the
                newest buffers.
            frozen: SHA-256 of this worker's frozen parameters.
        """
        request = m.GetStateRequest(job=self._reply.job.id, epoch=epoch, frozen=frozen, worker=self.worker)

        def values_of(header: m.StateHeader) -> EntryValues:
            return EntryValues(of_kind(manifest.entries, frozen=header.frozen), worker=self.worker)

        found: dict[str, Bytes]
        _, found = self._download(lambda stub: stub.get_state(request), m.StateHeader, values_of)
        return found

    def get_optimizer(self, manifest: Manifest) -> tuple[int, Moments]:
        """Download the state of the server's optimizer. Returns the version of the parameters to which the
        state belongs, and the state by tensor.
        """
        request = m.GetOptimizerRequest(job=self._reply.job.id, worker=self.worker)

        def values_of(header: m.OptimizerHeader) -> MomentValues:
            return MomentValues(header.moments, manifest, worker=self.worker)

        header, found = self._download(lambda stub: stub.get_optimizer(request), m.OptimizerHeader, values_of)
        return header.version, found

    def _download(
        self,
        call: Callable[[Stub], AsyncIterator[Any]],
        header_type: type[Any],
        values_of: Callable[..., Any],
    ) -> tuple[Any, Any]:
        """Download a header and the chunks of the values that it describes; return both."""

        async def download(stub: Stub, attempts: Attempts) -> tuple[Any, Any]:
            header: Any = None
            values: Any = None
            async for message in _counted(call(stub), attempts):
                if isinstance(message, header_type) and values is None:
                    header, values = message, values_of(message)
                elif isinstance(message, m.Chunk) and values is not None:
                    values.add(message)
                else:
                    kind = header_type.__name__
                    raise BrokenError(f"expected {kind} and its chunks, got another message from the server")
            if values is None or not values.complete:
                raise BrokenError("the server's answer is incomplete")
            return header, values.finish()

        return self._call(self._again(download))

    # ---- on the loop

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        try:
            self._check_alive()
        except RuntimeError:
            coroutine.close()
            raise
        with self.progress.waiting():
            return asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop).result(timeout_s)

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a call, which `_cancel_open` cancels if a signal interrupts the thread that waits for it."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            return await coroutine
        finally:
            self._open.discard(task)

    async def _cancel_open(self) -> None:
        """Cancel the other calls that are open, and wait for their end."""
        tasks = self._open - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_alive(self) -> None:
        """Raise RuntimeError if nothing can arrive any more, instead of waiting for ever."""
        if not self._thread.is_alive():
            raise RuntimeError(
                "the thread of the connection to the server has ended, or this process is a fork of the one "
                "that has joined; connect in the process that trains"
            )

    def _soon(self, function: Callable[..., object], *arguments: Any) -> None:
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


async def _stream(messages: Iterable[Any], held: int = 0) -> AsyncIterator[Any]:
    """Yield a header and chunks, but not the first `held` chunks; other tasks run while these are made."""
    for number, message in enumerate(messages):
        if not 0 < number <= held:
            yield message
        elif number % 16 == 0:
            await asyncio.sleep(0)


async def _counted(messages: AsyncIterator[T], attempts: Attempts) -> AsyncIterator[T]:
    """Yield the messages of a download, and note how many have arrived."""
    count = 0
    async for message in messages:
        count += 1
        attempts.reached(count)
        yield message


def _digest(chunks: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def _readable(reply: m.InitializeResponse | Malformed) -> m.InitializeResponse:
    """Return the reply. Raise BrokenError if it cannot be read."""
    if isinstance(reply, Malformed):
        raise BrokenError(f"the server's answer cannot be read: {reply.text}")
    return reply
