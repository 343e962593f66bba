"""The five calls of gradwire.v1.ParameterServer: what arrives becomes an event, or is refused.

Everything that comes over the wire is checked here, before the state machine hears of it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np

from ..compressors import DenseFormat, DensePayload, Payload
from ..proto import messages as m
from ..proto.manifest import Manifest
from ..proto.refusal import Reason, Refusal, Refused, refusal
from ..proto.service import Malformed, abort
from ..proto.transfer import Assembly, encode_chunks
from ..proto.wire import CHUNK_BYTES
from . import events as e
from .conductor import Conductor, PushContent
from .metrics import SENDER, compressor_label
from .store import BuildOptimizer, Store
from .streams import Context, Inbox, Outbox, Session

log = logging.getLogger("gradwire.server")
T = TypeVar("T")
Handler = Callable[[Any, Context], Awaitable[Any]]

SMALL_PUSH_ELEMENTS = 1 << 18  # below this a thread costs more than the scan that it takes off the loop
MAX_EVALUATION_METRICS = 32
MAX_NAME_CHARACTERS = 128
FAREWELL_S = 2.0  # for a worker to take what is still queued for it before its stream is ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    job: m.Job
    limits: m.Limits
    max_model_bytes: int
    protected: bool  # answer only peers on this machine
    software: str
    build_optimizer: BuildOptimizer


class Service:
    def __init__(self, conductor: Conductor, settings: Settings) -> None:
        self._conductor = conductor
        self._core = conductor.core
        self._metrics = conductor.metrics
        self._settings = settings
        self._fetching = asyncio.Lock()

    def handlers(self) -> dict[str, Handler]:
        """For `proto.service.generic_handler`."""
        by_name: dict[str, Handler] = {
            "Join": self._join,
            "Initialize": self._initialize,
            "Fetch": self._fetch,
            "Exchange": self._exchange,
            "Status": self._status,
        }
        return {name: self._guarded(handler) for name, handler in by_name.items()}

    def _guarded(self, handler: Handler) -> Handler:
        """Protected mode, and refusals as statuses."""

        @functools.wraps(handler)
        async def guarded(request: Any, context: Context) -> Any:
            try:
                if self._settings.protected and not is_loopback(context.peer()):
                    raise Refused(_protected(context.peer()))
                if isinstance(request, Malformed):
                    raise Refused(_unreadable(request))
                return await handler(request, context)
            except Refused as refused:
                self._metrics.refusal(refused.refusal.reason)
                log.warning("refused %s: %s", context.peer(), refused)
                await abort(context, refused.refusal)

        return guarded

    # ---- Join, Initialize, Fetch, Status

    async def _join(self, request: m.JoinRequest, context: Context) -> m.JoinReply:
        if request.protocol_version != m.PROTOCOL_VERSION:
            raise Refused(
                refusal(
                    Reason.PROTOCOL_VERSION,
                    worker=request.worker,
                    field="protocol version",
                    limit=f"{m.PROTOCOL_VERSION} (gradwire {self._settings.software})",
                    value=f"{request.protocol_version} (gradwire {request.software or 'unknown'})",
                    remedy="install the same release of gradwire on both sides",
                )
            )
        for field, value in (("worker id", request.worker), ("compressor", request.compressor)):
            if not 0 < len(value) <= MAX_NAME_CHARACTERS:
                raise Refused(
                    refusal(
                        Reason.SIZE,
                        worker=request.worker[:MAX_NAME_CHARACTERS],
                        field=field,
                        limit=f"1 to {MAX_NAME_CHARACTERS} characters",
                        value=f"{len(value)} characters",
                        remedy=f"choose another --{field.replace(' ', '-')}",
                    )
                )
        event = e.Joined(
            worker=request.worker, incarnation=request.incarnation, compressor=request.compressor
        )
        actions = self._conductor.decide(event)
        self._conductor.perform(actions)
        admit = next(action for action in actions if isinstance(action, e.Admit))
        return m.JoinReply(
            job=self._settings.job,
            limits=self._settings.limits,
            rank=admit.rank,
            version=admit.version,
            initialize=admit.initialize,
            software=self._settings.software,
        )

    async def _initialize(self, requests: AsyncIterator[Any], context: Context) -> m.InitializeReply:
        header = await _next(requests, m.InitializeHeader)
        self._check_job(header.job, header.worker)
        refused = self._core.check_initialize(header.worker, header.incarnation)
        if refused is not None:
            raise Refused(refused)
        manifest = Manifest.from_message(
            header.manifest, worker=header.worker, max_bytes=self._settings.max_model_bytes
        )
        payloads: list[Payload] = [
            DensePayload(format=DenseFormat.FLOAT32, elements=spec.elements, data=np.empty(0, np.uint8))
            for spec in manifest.specs
        ]
        names = [spec.name for spec in manifest.specs]
        assembly = Assembly(0, 0, payloads, chunk_bytes=CHUNK_BYTES, worker=header.worker, names=names)
        while not assembly.complete:
            assembly.add(await self._next_in_time(requests, header.worker))
        store = await self._conductor.on_reducer(self._build_store, manifest, assembly)
        actions = self._conductor.decide(
            e.Initialized(
                worker=header.worker,
                incarnation=header.incarnation,
                fingerprint=manifest.fingerprint,
                train_samples=manifest.train_samples,
                partitions=len(manifest.partitions),
            )
        )
        self._conductor.store = store
        self._metrics.initialized(manifest.raw_bytes)
        log.info(
            "%d tensors, %d parameters, %d training samples from %s",
            *(len(manifest.tensors), manifest.elements, manifest.train_samples, header.worker),
        )
        self._conductor.perform(actions)
        return m.InitializeReply(version=0)

    async def _next_in_time(self, requests: AsyncIterator[Any], worker: str) -> m.Chunk:
        """The next chunk of an upload; whoever stops sending does not keep the memory."""
        lease_s = self._settings.limits.lease_seconds
        try:
            return await asyncio.wait_for(_next(requests, m.Chunk), lease_s)
        except TimeoutError:
            limit, got = f"a chunk every {lease_s:g} s", "none"
            raise Refused(
                refusal(Reason.CHUNK, worker=worker, field="initial parameters", limit=limit, value=got)
            ) from None

    def _build_store(self, manifest: Manifest, assembly: Assembly) -> Store:
        # Copies, because the optimizer writes to the parameters and the buffer is one for all tensors.
        values = [payload.data.copy().view(np.float32) for payload in assembly.finish()]
        return Store(manifest, values, self._settings.job.downlink, self._settings.build_optimizer)

    async def _fetch(self, request: m.FetchRequest, context: Context) -> None:
        self._check_job(request.job, "")
        store = self._conductor.store
        if store is None:
            text = "the job has no parameters yet"
            raise Refused(Refusal(reason=Reason.NOT_INITIALIZED, message=text, remedy="try again later"))

        def encode() -> tuple[m.FetchHeader, list[bytes]]:
            parts = store.values()
            header = m.FetchHeader(
                job=self._settings.job.id,
                manifest=store.manifest.to_message(),
                version=store.version,
                chunk_bytes=CHUNK_BYTES,
            )
            return header, list(encode_chunks(store.version, 0, parts))

        async with self._fetching:  # each holds a copy of the parameters
            header, chunks = await self._conductor.on_reducer(encode)
            await context.write(header)
            for chunk in chunks:
                await context.write(chunk)
        self._metrics.sent_raw(store.manifest.raw_bytes)

    async def _status(self, request: m.StatusRequest, context: Context) -> m.StatusReply:
        core, now = self._core, time.monotonic()
        # The job is not over for anyone who asks before its last parameters are saved and hashed.
        saving = core.phase is m.Phase.FINISHED and not self._conductor.parameters_sha256
        return m.StatusReply(
            job=self._settings.job,
            phase=m.Phase.FINISHING if saving else core.phase,
            waiting=core.waiting(now).text,
            version=core.version,
            epoch=core.epoch,
            epoch_progress=core.epoch_progress,
            members=tuple(
                m.MemberStatus(
                    worker=member.worker,
                    rank=member.rank,
                    attached=member.attached,
                    heard_seconds=now - member.heard_at,
                    activity=member.activity,
                    compressor=member.compressor,
                    pushes=member.pushes,
                )
                for member in core.roster.by_rank()
            ),
            lost=tuple(core.lost),
            evaluations=tuple(core.evaluations),
            traffic=self._metrics.traffic(),
            pushes=self._metrics.accepted,
            refused_pushes=self._metrics.refused,
            train_loss=self._metrics.train_loss,
            training_seconds=self._conductor.training_seconds,
            parameters_sha256=self._conductor.parameters_sha256,
            software=self._settings.software,
        )

    # ---- Exchange

    async def _exchange(self, requests: AsyncIterator[Any], context: Context) -> None:
        hello = await _next(requests, m.Hello)
        self._check_job(hello.job, hello.worker)
        actions = self._conductor.decide(e.Attached(worker=hello.worker, incarnation=hello.incarnation))
        session = Session(hello.worker, hello.incarnation, Outbox(), Inbox(hello.worker))
        previous = self._conductor.sessions.get(hello.worker)
        self._conductor.sessions[hello.worker] = session
        if previous is not None:
            text = f"worker {hello.worker!r} has opened another stream"
            previous.outbox.end(Refusal(reason=Reason.FENCED, worker=hello.worker, message=text), final=False)
        SENDER.set(compressor_label(self._core.roster.members[hello.worker].compressor))
        self._conductor.perform(actions)
        writer = asyncio.create_task(
            session.outbox.pump(context, lambda broadcast: self._metrics.sent_raw(broadcast.raw_bytes))
        )
        reader = asyncio.create_task(self._read(session, requests))
        ended = asyncio.create_task(session.outbox.ended.wait())
        try:
            await asyncio.wait((writer, reader, ended), return_when=asyncio.FIRST_COMPLETED)
            if session.outbox.final:
                await asyncio.wait((writer,), timeout=FAREWELL_S)
        finally:
            for task in (writer, reader, ended):
                task.cancel()
            ends = await asyncio.gather(writer, reader, return_exceptions=True)
            if self._conductor.sessions.get(session.worker) is session:
                del self._conductor.sessions[session.worker]
                self._conductor.happen(e.Detached(worker=session.worker, incarnation=session.incarnation))
        # Why the stream was ended explains whatever else went wrong on it.
        why = session.outbox.ended_with
        if why is not None and session.outbox.final:
            raise Refused(why)
        failures = [end for end in ends if isinstance(end, Exception)]
        if why is None and failures:
            lapsed = isinstance(failures[0], Refused) and failures[0].refusal.reason is Reason.NOT_A_MEMBER
            if not lapsed:
                raise failures[0]
            text = str(failures[0])  # its lease is over; it was a member and may be one again
        elif why is not None:
            text = str(why)
        else:
            return
        await context.abort(grpc.StatusCode.UNAVAILABLE, text)

    async def _read(self, session: Session, requests: AsyncIterator[Any]) -> None:
        """Take in messages until the worker is done. Raises Refused where the stream cannot go on."""
        worker, incarnation = session.worker, session.incarnation
        conductor = self._conductor
        async for message in requests:
            if session.outbox.ended_with is not None:
                return
            match message:
                case m.Chunk():
                    conductor.happen(e.Heard(worker=worker, incarnation=incarnation))
                    await self._take(session, message)
                case m.Push():
                    await self._take(session, message)
                case m.Heartbeat():
                    activity = message.activity[:MAX_NAME_CHARACTERS]
                    conductor.happen(e.Heard(worker=worker, incarnation=incarnation, activity=activity))
                case m.Ready():
                    conductor.happen(
                        e.Prepared(
                            worker=worker,
                            incarnation=incarnation,
                            fingerprint=message.fingerprint,
                            version=message.version,
                        )
                    )
                case m.Evaluation():
                    self._evaluated(session, message)
                case m.Leave():
                    conductor.happen(
                        e.Left(
                            worker=worker,
                            incarnation=incarnation,
                            failed=message.failed,
                            reason=message.reason[:1024] or "no reason given",
                        )
                    )
                    return
                case Malformed():
                    raise Refused(_unreadable(message, worker))
                case _:
                    text = f"{type(message).__name__} in the middle of a stream"
                    raise Refused(Refusal(reason=Reason.MALFORMED, worker=worker, message=text))

    async def _take(self, session: Session, message: m.Push | m.Chunk) -> None:
        """Take in a part of a push, and hand it on when it is complete."""
        push = message if isinstance(message, m.Push) else session.inbox.current
        try:
            if isinstance(message, m.Push):
                store = self._conductor.store
                session.inbox.begin(message, store.manifest if store else None)
            else:
                session.inbox.add(message)
            complete = session.inbox.take()
            if complete is None:
                return
            push, assembly = complete
            if sum(header.elements for header in push.tensors) <= SMALL_PUSH_ELEMENTS:
                payloads = assembly.finish()
            else:
                payloads = await asyncio.to_thread(assembly.finish)
            if session.outbox.ended_with is None:  # it may have been ended during the scan
                self._pushed(session, push, payloads)
        except Refused as refused:
            # Without a push to answer for, or without a membership, the stream itself is at fault.
            if push is None or refused.refusal.reason in (Reason.FENCED, Reason.NOT_A_MEMBER):
                raise
            session.inbox.drop(push)
            self._metrics.push_refused(refused.refusal.reason)
            log.warning("refused push %d: %s", push.seq, refused)
            session.outbox.send(
                m.Outcome(
                    seq=push.seq,
                    partition=push.partition,
                    decision=m.Decision.REFUSED,
                    refusal=refused.refusal,
                )
            )

    def _pushed(self, session: Session, push: m.Push, payloads: list[Payload]) -> None:
        accepted, stale = self._core.accepted_pushes, self._core.stale_pushes
        actions = self._conductor.decide(
            e.Pushed(
                worker=session.worker,
                incarnation=session.incarnation,
                seq=push.seq,
                partition=push.partition,
                base_version=push.base_version,
                samples=push.samples,
                content=PushContent(payloads, push.loss),
            )
        )
        if self._core.accepted_pushes > accepted:  # neither changes for a duplicate
            self._metrics.push_accepted(payloads)
        elif self._core.stale_pushes > stale:
            self._metrics.push_stale(max(0, self._core.version - push.base_version))
        self._conductor.perform(actions)

    def _evaluated(self, session: Session, message: m.Evaluation) -> None:
        names = message.metrics
        if len(names) > MAX_EVALUATION_METRICS or any(len(name) > MAX_NAME_CHARACTERS for name in names):
            limit = f"up to {MAX_EVALUATION_METRICS} metrics, names of up to {MAX_NAME_CHARACTERS} characters"
            got = f"{len(names)} metrics"
            raise Refused(
                refusal(Reason.SIZE, worker=session.worker, field="evaluation", limit=limit, value=got)
            )
        for name, value in names.items():
            if not math.isfinite(value):
                field, got = f"evaluation metric {name!r}", str(value)
                raise Refused(
                    refusal(
                        Reason.NON_FINITE,
                        worker=session.worker,
                        field=field,
                        limit="a finite number",
                        value=got,
                        remedy="leave it out",
                    )
                )
        self._conductor.happen(
            e.Evaluated(
                worker=session.worker,
                incarnation=session.incarnation,
                version=message.version,
                epoch=message.epoch,
                metrics=message.metrics,
            )
        )
        for name in ("accuracy", "loss"):  # a bounded set of labels, whatever a task reports
            if name in message.metrics:
                self._metrics.validation.labels(name).set(message.metrics[name])

    def _check_job(self, job: str, worker: str) -> None:
        if job and job != self._settings.job.id:
            raise Refused(
                refusal(
                    Reason.UNKNOWN_JOB,
                    worker=worker,
                    field="job",
                    limit=self._settings.job.id,
                    value=job,
                    remedy="the server was restarted or runs another job; start the worker anew",
                )
            )


async def _next(requests: AsyncIterator[Any], expected: type[T]) -> T:
    """The next message of a stream. Raises Refused: MALFORMED if it is another kind or there is none."""
    message = await anext(aiter(requests), None)
    if isinstance(message, expected):
        return message
    if isinstance(message, Malformed):
        raise Refused(_unreadable(message))
    got = "the end of the stream" if message is None else type(message).__name__
    text = f"expected {expected.__name__}, got {got}"
    raise Refused(Refusal(reason=Reason.MALFORMED, message=text))


def _unreadable(message: Malformed, worker: str = "") -> Refusal:
    reason = Reason.CHECKSUM if message.damaged else Reason.MALFORMED
    return Refusal(reason=reason, worker=worker, message=message.text)


def is_loopback(peer: str) -> bool:
    """Whether a gRPC peer name is of this machine."""
    return peer.startswith(("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "ipv6:[::ffff:127.", "unix:"))


def _protected(peer: str) -> Refusal:
    return refusal(
        Reason.PROTECTED,
        field="peer",
        limit="a loopback address, because this server runs in protected mode",
        value=peer,
        remedy="if everyone who can reach its port may take part, start gc-server with --insecure",
    )
