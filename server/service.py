"""The shell around the state machine: gRPC calls become events, actions become messages and work.

All state is touched on one event loop; reducing, encoding and scanning run on worker threads in nogil code
while the loop goes on answering heartbeats. One reducer thread gives the store its single user and keeps
applies and snapshots in the order in which they were decided.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc.aio
import numpy as np

from ..compressors import DenseFormat, DensePayload, Payload
from ..proto import messages as m
from ..proto.manifest import Manifest
from ..proto.refusal import Reason, Refusal, Refused, refusal
from ..proto.service import Malformed, abort
from ..proto.transfer import Assembly, encode_chunks
from ..proto.wire import CHUNK_BYTES, crc32c
from . import events as e
from .core import Core
from .metrics import SENDER, Metrics, compressor_label
from .schedule import Constant
from .store import Broadcast, BuildOptimizer, DivergedError, Share, Store
from .streams import Context, Inbox, Outbox

log = logging.getLogger("gradwire.server")

SMALL_TRANSFER_BYTES = 256 << 10  # below this a thread costs more than the scan it would take off the loop
TICK_S = 0.25
MAX_METRICS = 32  # entries in an evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the service needs to know beyond the core's rules."""

    job: m.Job
    limits: m.Limits
    max_model_bytes: int
    protected: bool
    software: str
    schedule: Constant
    build_optimizer: BuildOptimizer
    on_finished: Callable[[Store], None]  # runs on the reducer thread


@dataclass(slots=True)
class _Session:
    worker: str
    incarnation: int
    outbox: Outbox
    inbox: Inbox


class Service:
    """Handlers of gradwire.v1.ParameterServer."""

    def __init__(self, core: Core, settings: Settings, metrics: Metrics) -> None:
        self.core = core
        self.metrics = metrics
        self.stopping = asyncio.Event()  # set when the server should end by itself
        self.failure = ""
        self._settings = settings
        self._reducer = ThreadPoolExecutor(1, "reducer")
        self._sessions: dict[str, _Session] = {}
        self._store: Store | None = None
        self._latest: dict[int, Broadcast] = {}
        self._snapshots: dict[int, asyncio.Task[Broadcast]] = {}
        self._applying: set[asyncio.Task[None]] = set()
        self._round_opened_at = 0.0
        self._started_at: float | None = None
        self._ended_at: float | None = None
        self._sha256 = ""

    def handlers(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """For `proto.service.generic_handler`."""
        by_name = {
            "Join": self.join,
            "Initialize": self.initialize,
            "Fetch": self.fetch,
            "Exchange": self.exchange,
            "Status": self.status,
        }
        return {name: self._guarded(handler) for name, handler in by_name.items()}

    def _guarded(self, handler: Callable[[Any, Context], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Protected mode, and refusals as statuses."""

        @functools.wraps(handler)
        async def guarded(request: Any, context: Context) -> Any:
            try:
                if self._settings.protected and not _is_loopback(context.peer()):
                    raise Refused(_protected(context.peer()))
                if isinstance(request, Malformed):
                    raise Refused(Refusal(reason=Reason.MALFORMED, message=request.text))
                return await handler(request, context)
            except Refused as refused:
                self.metrics.refusal(refused.refusal.reason)
                log.warning("refused %s: %s", context.peer(), refused)
                await abort(context, refused.refusal)

        return guarded

    # ---- calls

    async def join(self, request: m.JoinRequest, context: Context) -> m.JoinReply:
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
        if not request.worker or len(request.worker) > 128:
            got = f"{len(request.worker)} characters"
            raise Refused(refusal(Reason.SIZE, field="worker id", limit="1 to 128 characters", value=got))
        actions = self._decide(
            e.Joined(
                worker=request.worker, incarnation=request.incarnation, compressor=request.compressor[:128]
            )
        )
        admit = next(action for action in actions if isinstance(action, e.Admit))
        self._perform(actions)
        return m.JoinReply(
            job=self._settings.job,
            limits=self._settings.limits,
            rank=admit.rank,
            version=admit.version,
            initialize=admit.initialize,
            software=self._settings.software,
        )

    async def initialize(self, requests: AsyncIterator[Any], context: Context) -> m.InitializeReply:
        header = await _first(requests, m.InitializeHeader)
        self._check_job(header.job, header.worker)
        refused = self.core.check_initialize(header.worker, header.incarnation)
        if refused is not None:
            raise Refused(refused)
        manifest = Manifest.from_message(
            header.manifest, worker=header.worker, max_bytes=self._settings.max_model_bytes
        )
        payloads: list[Payload] = [
            DensePayload(format=DenseFormat.FLOAT32, elements=spec.elements, data=np.empty(0, np.uint8))
            for spec in manifest.specs
        ]
        assembly = Assembly(0, 0, payloads, header.crc32c, worker=header.worker)
        while not assembly.complete:
            assembly.add(await _next(requests, m.Chunk, header.worker))
            self._perform(self._decide(e.Heard(worker=header.worker, incarnation=header.incarnation)))
        store = await self._on_reducer(self._build_store, manifest, assembly)
        actions = self._decide(
            e.Initialized(
                worker=header.worker,
                incarnation=header.incarnation,
                fingerprint=manifest.fingerprint,
                train_samples=manifest.train_samples,
                partitions=len(manifest.partitions),
            )
        )
        self._store = store
        self.metrics.initialized(manifest.raw_bytes)
        log.info(
            "%d tensors, %d parameters, %d training samples from %s",
            *(len(manifest.tensors), manifest.elements, manifest.train_samples, header.worker),
        )
        self._perform(actions)
        return m.InitializeReply(version=0)

    def _build_store(self, manifest: Manifest, assembly: Assembly) -> Store:
        # Copies, because the optimizer writes to the parameters and the buffer is one for all tensors.
        values = [payload.data.copy().view(np.float32) for payload in assembly.finish()]
        return Store(manifest, values, self._settings.job.downlink, self._settings.build_optimizer)

    async def fetch(self, request: m.FetchRequest, context: Context) -> None:
        self._check_job(request.job, "")
        store = self._store
        if store is None:
            text = "the job has no parameters yet"
            raise Refused(Refusal(reason=Reason.NOT_INITIALIZED, message=text, remedy="try again later"))

        def encode() -> tuple[m.FetchHeader, list[bytes]]:
            parts = [p.detach().reshape(-1).numpy().view(np.uint8) for p in store.parameters]
            header = m.FetchHeader(
                job=self._settings.job.id,
                manifest=store.manifest.to_message(),
                version=store.version,
                crc32c=crc32c(parts),
                chunk_bytes=CHUNK_BYTES,
            )
            return header, list(encode_chunks(store.version, 0, parts))

        header, chunks = await self._on_reducer(encode)
        await context.write(header)
        for chunk in chunks:
            await context.write(chunk)
        self.metrics.sent_raw(store.manifest.raw_bytes)

    async def status(self, request: m.StatusRequest, context: Context) -> m.StatusReply:
        core, now = self.core, _now()
        # The job is not over for anyone who asks before its last parameters are hashed and saved.
        hashing = core.phase is m.Phase.FINISHED and not self._sha256
        return m.StatusReply(
            job=self._settings.job,
            phase=m.Phase.FINISHING if hashing else core.phase,
            waiting=core.waiting(now)[1],
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
            traffic=self.metrics.traffic(),
            pushes=self.metrics.accepted,
            refused_pushes=self.metrics.refused,
            train_loss=self.metrics.train_loss,
            training_seconds=(self._ended_at or now) - (self._started_at or now),
            parameters_sha256=self._sha256,
            software=self._settings.software,
        )

    async def exchange(self, requests: AsyncIterator[Any], context: Context) -> None:
        hello = await _first(requests, m.Hello)
        self._check_job(hello.job, hello.worker)
        actions = self._decide(e.Attached(worker=hello.worker, incarnation=hello.incarnation))
        previous = self._sessions.get(hello.worker)
        session = _Session(hello.worker, hello.incarnation, Outbox(), Inbox(hello.worker))
        self._sessions[hello.worker] = session
        if previous is not None:
            text = "the worker has opened another stream"
            superseded = Refusal(reason=Reason.FENCED, worker=hello.worker, message=text)
            previous.outbox.end(superseded, final=True)
        SENDER.set(compressor_label(self.core.roster.members[hello.worker].compressor))
        self._perform(actions)
        writer = asyncio.create_task(session.outbox.pump(context, self._sent))
        reader = asyncio.create_task(self._read(session, requests))
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            if writer.done():
                writer.result()
        finally:
            for task in (writer, reader):
                task.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)
            if self._sessions.get(session.worker) is session:
                del self._sessions[session.worker]
                self._perform(
                    self.core.step(e.Detached(worker=session.worker, incarnation=session.incarnation), _now())
                )
        if session.outbox.ended_with is not None:
            if session.outbox.final:
                await abort(context, session.outbox.ended_with)
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(session.outbox.ended_with))

    # ---- one worker's messages

    async def _read(self, session: _Session, requests: AsyncIterator[Any]) -> None:
        """Take in messages until the worker is done. Raises Refused where the stream cannot go on."""
        who = {"worker": session.worker, "incarnation": session.incarnation}
        async for message in requests:
            match message:
                case m.Chunk():
                    self._perform(self._decide(e.Heard(**who)))
                    await self._push_part(session, lambda chunk=message: session.inbox.add(chunk))
                case m.Push():
                    manifest = self._store.manifest if self._store else None
                    await self._push_part(
                        session, lambda header=message: session.inbox.begin(header, manifest), message
                    )
                case m.Heartbeat():
                    self._perform(self._decide(e.Heard(**who, activity=message.activity[:64])))
                case m.Ready():
                    self._perform(
                        self._decide(
                            e.Prepared(**who, fingerprint=message.fingerprint, version=message.version)
                        )
                    )
                case m.Evaluation():
                    self._evaluation(session, message)
                case m.Leave():
                    reason = message.reason[:1024] or "done"
                    self._perform(self._decide(e.Left(**who, failed=message.failed, reason=reason)))
                    return
                case _:
                    text = message.text if isinstance(message, Malformed) else type(message).__name__
                    raise Refused(Refusal(reason=Reason.MALFORMED, worker=session.worker, message=text))

    async def _push_part(
        self, session: _Session, take: Callable[[], bool], header: m.Push | None = None
    ) -> None:
        """Hand a header or chunk to the inbox, and the push on when it is complete."""
        push = header or session.inbox.current
        try:
            if not take():
                return
            push, assembly = session.inbox.take()
            started = _now()
            if sum(header.elements for header in push.tensors) * 4 <= SMALL_TRANSFER_BYTES:
                payloads = assembly.finish()
            else:
                payloads = await asyncio.to_thread(assembly.finish)
            log.debug("push %d of %s checked in %.4f s", push.seq, session.worker, _now() - started)
            self._pushed(session, push, payloads)
        except Refused as refused:
            if push is None or refused.refusal.reason in (Reason.FENCED, Reason.NOT_A_MEMBER):
                raise
            session.inbox.drop(push)
            self._answer_refused(session, push, refused.refusal)

    def _pushed(self, session: _Session, push: m.Push, payloads: list[Payload]) -> None:
        accepted = self.core.accepted_pushes
        stale = self.core.stale_pushes
        actions = self._decide(
            e.Pushed(
                worker=session.worker,
                incarnation=session.incarnation,
                seq=push.seq,
                partition=push.partition,
                base_version=push.base_version,
                samples=push.samples,
                content=(payloads, push.loss),
            )
        )
        if self.core.accepted_pushes > accepted:
            self.metrics.push_accepted(payloads)
            self.metrics.staleness.observe(0)
        elif self.core.stale_pushes > stale:
            self.metrics.push_refused(Reason.STALE)
            self.metrics.staleness.observe(max(0, self.core.version - push.base_version))
        self._perform(actions)

    def _answer_refused(self, session: _Session, push: m.Push, why: Refusal) -> None:
        self.metrics.push_refused(why.reason)
        log.warning("refused push %d: %s", push.seq, why)
        session.outbox.send(
            m.Outcome(seq=push.seq, partition=push.partition, decision=m.Decision.REFUSED, refusal=why)
        )

    def _evaluation(self, session: _Session, message: m.Evaluation) -> None:
        if len(message.metrics) > MAX_METRICS or any(len(name) > 64 for name in message.metrics):
            limit = f"up to {MAX_METRICS} metrics with names of up to 64 characters"
            got = f"{len(message.metrics)} metrics"
            raise Refused(
                refusal(Reason.SIZE, worker=session.worker, field="evaluation", limit=limit, value=got)
            )
        actions = self._decide(
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
                self.metrics.validation.labels(name).set(message.metrics[name])
        self._perform(actions)

    # ---- decisions and what follows from them

    def _decide(self, event: e.Event) -> list[e.Action]:
        """Actions of an event; they still have to be performed. Raises Refused."""
        actions = self.core.step(event, _now())
        for action in actions:
            if isinstance(action, e.Refuse):
                raise Refused(action.refusal)
        return actions

    def _perform(self, actions: list[e.Action]) -> None:
        for action in actions:
            match action:
                case e.Greet():
                    session = self._sessions[action.worker]
                    session.outbox.send(
                        m.Welcome(rank=action.rank, version=action.version, last_seq=action.last_seq)
                    )
                case e.RequestInitialize():
                    if action.worker in self._sessions:
                        self._sessions[action.worker].outbox.send(m.InitializeRequest())
                case e.Assign():
                    self._assign(action)
                case e.Answer():
                    if action.worker in self._sessions:
                        self._sessions[action.worker].outbox.send(action.outcome)
                case e.Apply():
                    task = asyncio.create_task(self._apply(action))
                    self._applying.add(task)
                    task.add_done_callback(self._applied)
                case e.Disconnect():
                    session = self._sessions.get(action.worker)
                    if session is not None and session.incarnation == action.incarnation:
                        session.outbox.end(action.refusal, final=action.final)
                case e.Report():
                    self._report(action)
                case e.Note():
                    log.log(logging.WARNING if action.warning else logging.INFO, "%s", action.text)
                case e.Finish():
                    task = asyncio.create_task(self._finish())
                    self._applying.add(task)
                    task.add_done_callback(self._applied)
                case e.Admit() | e.Refuse():
                    pass  # answered by whoever raised the event
        self._update_gauges()

    def _assign(self, action: e.Assign) -> None:
        session = self._sessions.get(action.worker)
        if session is None:
            return
        assignment = action.assignment
        if self._started_at is None:
            self._started_at = _now()
        if assignment.position == 0:
            self._round_opened_at = _now()
        if action.has != assignment.version:
            assert self._store is not None
            for partition in range(len(self._store.manifest.partitions)):
                session.outbox.send_broadcast(self._broadcast(partition, assignment.version, action.has))
        session.outbox.send(assignment)

    def _broadcast(self, partition: int, version: int, has: int | None) -> Awaitable[Broadcast]:
        """What takes a replica from `has` to `version`: the update if it can, a snapshot otherwise."""
        latest = self._latest.get(partition)
        if (
            latest is not None
            and latest.version == version
            and (latest.content is m.Content.VALUES or has == version - 1)
        ):
            return _ready(latest)
        known = self._snapshots.get(partition)
        if known is None:
            assert self._store is not None
            # Queued behind the reducer's earlier work and before the next apply, so it is of this version.
            known = asyncio.create_task(self._on_reducer(self._store.snapshot, partition))
            self._snapshots[partition] = known
        return asyncio.shield(known)

    async def _apply(self, action: e.Apply) -> None:
        assert self._store is not None
        store = self._store
        shares: list[Share] = []
        loss = 0.0
        samples = sum(contribution.samples for contribution in action.contributions)
        for contribution in action.contributions:
            payloads, mean_loss = contribution.content  # type: ignore[misc]
            shares.append(Share(contribution.samples, payloads))
            loss += mean_loss * contribution.samples
        factor = self._settings.schedule.factor(action.epoch, self._settings.job.epochs)
        started = _now()
        broadcast = await self._on_reducer(store.apply, action.partition, action.version, shares, factor)
        self.metrics.reduce_seconds.observe(_now() - started)
        self._snapshots.pop(action.partition, None)
        self._latest[action.partition] = broadcast
        if action.partition == 0:
            self._ended_at = _now()
            self.metrics.round_closed(
                self._ended_at - self._round_opened_at, samples, loss / samples if samples else math.nan
            )
        self._perform(self._decide(e.Published(partition=action.partition, version=action.version)))

    async def _finish(self) -> None:
        store = self._store
        assert store is not None

        def conclude() -> str:
            self._settings.on_finished(store)
            return store.sha256()

        self._sha256 = await self._on_reducer(conclude)
        log.info("job %s is finished at version %d", self._settings.job.id, self.core.version)

    def _applied(self, task: asyncio.Task[None]) -> None:
        """A round that cannot be applied ends the job: it would never close."""
        self._applying.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, DivergedError):
            self.failure = f"{error}; lower --learning-rate, or check the data"
        else:
            self.failure = f"round could not be applied: {error!r}"
            log.error("%s", self.failure, exc_info=error)
        self.stopping.set()

    def _report(self, action: e.Report) -> None:
        log.warning("%s", action.text)
        message = m.Waiting(ranks=action.ranks, seconds=action.seconds, text=action.text)
        for session in self._sessions.values():
            session.outbox.send(message)

    def _update_gauges(self) -> None:
        core = self.core
        self.metrics.members.set(len(core.roster.members))
        self.metrics.version.set(core.version)
        self.metrics.epoch.set(core.epoch + core.epoch_progress)
        self.metrics.missing.set(len(core.round.missing(0)) if core.round else 0)
        self.metrics.set_phase(core.phase)

    def _sent(self, broadcast: Broadcast) -> None:
        self.metrics.sent_raw(broadcast.raw_bytes)

    # ---- life

    async def tick(self) -> None:
        """Let time pass, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            before = len(self.core.lost)
            self._perform(self.core.step(e.Tick(), _now()))
            self.metrics.lost_members.inc(max(0, len(self.core.lost) - before))
            if self.core.waiting(_now())[1]:
                self.metrics.waiting_seconds.labels(self.core.phase.name.lower()).inc(TICK_S)

    async def stop(self, reason: str) -> None:
        """Refuse newcomers, finish the round that is being applied, tell the members and let them go."""
        self._perform(self.core.step(e.Stopping(reason=reason), _now()))
        if self._applying:
            await asyncio.wait(self._applying)

    def close(self) -> None:
        self._reducer.shutdown(wait=True)

    def readiness(self) -> tuple[bool, str]:
        """For /readyz: whether workers may come."""
        stopping = self.core.phase is m.Phase.STOPPING or self.stopping.is_set()
        return not stopping, "shutting down" if stopping else self.core.phase.name.lower()

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

    async def _on_reducer(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reducer, function, *arguments)


def _now() -> float:
    return time.monotonic()


async def _ready(broadcast: Broadcast) -> Broadcast:
    return broadcast


async def _next(requests: AsyncIterator[Any], expected: type[Any], worker: str = "") -> Any:
    """The next message of a stream. Raises Refused: MALFORMED if it is another kind or there is none."""
    message = await anext(aiter(requests), None)
    if isinstance(message, expected):
        return message
    got = "the end of the stream" if message is None else type(message).__name__
    text = message.text if isinstance(message, Malformed) else f"expected {expected.__name__}, got {got}"
    raise Refused(Refusal(reason=Reason.MALFORMED, worker=worker, message=text))


async def _first(requests: AsyncIterator[Any], expected: type[Any]) -> Any:
    return await _next(requests, expected)


def _is_loopback(peer: str) -> bool:
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
