"""The calls of gradwire.v4.ParameterServer: each message becomes an event, or is refused.

This room checks all that arrives over the wire, before it reaches the state machine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from ...common.configuration import shared
from ...common.free_memory import give_back
from ...common.naming import MAX_LABEL_CHARACTERS, NAME_RULE, shown, why_no_label, why_no_name
from ...common.parts import LEAST_BYTES, Plan
from ...common.rate import Rate
from ...common.version import __version__
from ...compressors import AUTO, compressor_for, compressor_of, known_compressor
from ...proto import messages as m
from ...proto.job import job_message
from ...proto.manifest import Manifest
from ...proto.refusal import Reason, Refusal, Refused, refused
from ...proto.service import Malformed, RefusalLog, abort, unbatched
from ...proto.transfer import MAX_PARTS
from ...proto.wire import CHUNK_BYTES
from ...settings import JobSettings, JobTerms, ServerSettings
from ..conductor import Conductor
from ..durable.journal import JournalError
from ..durable.resuming import Resumed, put_in
from ..job import events as e
from ..job import initial, limits, refusals
from ..job.modes.options import ModeOptions
from ..shard.model_state import Values
from ..shard.moments import recall_of
from ..shard.shard import Image
from ..streams.outbox import Context
from ..streams.outbox import differences as of_workers
from .access import Access
from .exchange import WorkerCall, expect, unreadable
from .fetching import Fetches
from .model_state import StateCalls
from .status import status_of
from .uploading import Upload

log = logging.getLogger("gradwire.server")
T = TypeVar("T")
Handler = Callable[[Any, Context], Awaitable[Any]]
FirstCheckpoint = Callable[[Conductor, Manifest, Image, Plan, Values], Awaitable[None]]

HEARTBEATS_PER_LEASE = 5
FIRST_MESSAGE_S = 10.0
JOINS_PER_S, JOINS_AT_ONCE = 100.0, 1000


class Service:
    """Handlers of all calls, for one job. The daemon creates it and hands its handlers to gRPC."""

    def __init__(
        self,
        conductor: Conductor,
        options: ServerSettings,
        mode: ModeOptions,
        job: str,
        access: Access,
        resumed: Resumed | None = None,
        first_checkpoint: FirstCheckpoint | None = None,
    ) -> None:
        """
        Args:
            resumed: model with which the job begins; None to begin with the first worker's.
            first_checkpoint: writes the checkpoint of version 0; None for a job that is not stored."""
        self._access, self._resumed, self._first_checkpoint = access, resumed, first_checkpoint
        announced = options
        if options.overlap == "both" and not mode.steps_parts(options):
            announced = replace(options, overlap="backward")
            clipped = " and --clip-norm" if options.clip_norm else ""
            text = "--overlap both: replaced by backward, because mode %s, aggregation %s%s need whole pushes"
            log.warning(text, options.mode, options.aggregation, clipped)
        self._job = JobTerms(id=job, work=mode.work, **shared(JobSettings, announced))
        self._chosen = compressor_of(options.compressor)[0]
        self._usual = AUTO if options.compressor == AUTO else str(self._chosen)
        self._conductor = conductor
        self._core = conductor.core
        self._metrics = conductor.metrics
        self._options = options
        self._lossless, self._slices = mode.lossless, mode.slices
        self._refused = RefusalLog()
        self._joins = Rate(JOINS_PER_S, JOINS_AT_ONCE)
        self._upload: Upload | None = None  # has begun; the next call of its worker may continue it
        self._fetches = Fetches(job)
        self._states = StateCalls(conductor, self._fetches, self._next_in_time)

    @property
    def job(self) -> JobTerms:
        """The job as members and the status hear of it, with the epochs that a script has named."""
        return replace(self._job, epochs=self._core.state.rules.epochs)

    def handlers(self) -> dict[str, Handler]:
        """Return the handler of each method by name, for `proto.service.generic_handler`."""
        by_name: dict[str, Handler] = {
            "Join": self._join,
            "Initialize": self._initialize,
            "Fetch": self._fetch,
            "Exchange": self._exchange,
            "Status": self._status,
            "PutState": self._put_state,
            "GetState": self._get_state,
            "GetOptimizer": self._get_optimizer,
        }
        return {name: self._guarded(handler) for name, handler in by_name.items()}

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler that refuses remote peers in protected mode, and that ends refused calls with a
        typed status."""

        @functools.wraps(handler)
        async def guarded(request: Any, context: Context) -> Any:
            peer = context.peer()  # gRPC forgets it when the peer disconnects
            try:
                self._access.check_peer(peer)
                if isinstance(request, Malformed):
                    raise Refused(unreadable(request))
                return await handler(request, context)
            except Refused as error:
                self._metrics.refusal(error.refusal.reason)
                self._refused.warn(peer, error.refusal)
                await abort(context, error.refusal)
            # Another server may continue the job, so the worker should try again.
            except JournalError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

        return guarded

    async def _join(self, request: m.JoinRequest, context: Context) -> m.JoinResponse:
        """Handle Join: make a worker a member, and return the terms of the job."""
        _check_name(request.worker)
        self._check_token(context, request.worker)
        compressor = request.compressor or self._usual  # a worker without its own takes the job's
        if compressor == AUTO != self._usual:  # a worker's own `auto` has no bases
            compressor = str(compressor_of(AUTO)[0])
        if why_no_label(compressor):
            raise refused(
                Reason.NAME,
                worker=request.worker,
                field="compressor",
                limit=f"1 to {MAX_LABEL_CHARACTERS} printable characters",
                value=shown(compressor),
                remedy="choose another --compressor",
            )
        if not self._joins.take(time.monotonic()):  # not refused, because the worker should try again
            text = f"more than {JOINS_PER_S:g} workers per second join; try again"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
        known = known_compressor(compressor)
        if self._lossless and (known is None or not known.lossless):
            raise Refused(refusals.lossy_compressor(request.worker, compressor))
        has_bases = self._chosen.shared or (known is not None and known.shared)
        may_have = self._usual == AUTO or (has_bases and known != self._chosen)
        if may_have and compressor != self._usual:
            raise Refused(refusals.other_bases(request.worker, compressor, self._usual))
        event = e.Joined(
            worker=request.worker,
            incarnation=request.incarnation,
            compressor=compressor if self._core.mode.pushes_parts else "none",
        )
        admission = self._conductor.happen(event)
        if request.software not in ("", __version__):
            log.warning(
                "worker %s has gradwire %s, and this server %s; run the same release on both sides",
                *(request.worker, shown(request.software), __version__),
            )
        return m.JoinResponse(
            job=job_message(self.job),
            limits=m.Limits(
                chunk_bytes=CHUNK_BYTES,
                lease_seconds=self._options.lease_seconds,
                heartbeat_seconds=self._options.lease_seconds / HEARTBEATS_PER_LEASE,
                progress_seconds=self._options.progress_seconds,
            ),
            workers=admission.workers,
            rank=admission.rank,
            version=admission.version,
            initialize=admission.initialize,
            epoch=admission.epoch,
            software=__version__,
        )

    async def _initialize(self, requests: AsyncIterator[Any], context: Context) -> m.InitializeResponse:
        """Handle Initialize: receive the model of the first worker, and open the shard with it."""
        header = await _first(requests, m.InitializeHeader)
        self._check_job(header.job, header.worker, context)
        why = initial.check_uploader(self._core.state, header.worker, header.incarnation)
        if why is not None:
            raise Refused(why)
        manifest = Manifest.from_message(
            header.manifest, worker=header.worker, max_bytes=self._options.max_model_bytes
        )
        if manifest.epochs and not self._options.script:
            raise refused(
                Reason.MODEL,
                worker=header.worker,
                field="epochs",
                limit="0, because gc-server --epochs has the number for its --task",
                value=str(manifest.epochs),
                remedy="use gc-worker, or start the server with --script",
            )
        if manifest.epochs and self._options.epochs not in (JobSettings().epochs, manifest.epochs):
            raise refused(
                Reason.MODEL,
                worker=header.worker,
                field="epochs",
                limit=f"{self._options.epochs}, of gc-server --epochs",
                value=str(manifest.epochs),
                remedy="leave that option out, because the script brings its number of epochs",
            )
        epochs = manifest.epochs or limits.epochs(self._options)
        if header.epoch >= epochs:
            raise refused(
                Reason.SIZE,
                worker=header.worker,
                field="first epoch",
                limit=f"at most {epochs}, the epochs of the job",
                value=str(header.epoch + 1),
                remedy="the script has trained on all of them; start the server with more --epochs",
            )
        member = self._core.state.roster.members[header.worker]
        compressor = known_compressor(member.compressor)
        least_bytes = LEAST_BYTES if compressor is None else compressor.least_part_bytes
        chosen, _ = compressor_for(self._options.compressor, manifest.specs)
        uncut = [i for i, spec in enumerate(manifest.specs) if chosen.coordinates(spec.shape)]
        plan = self._conductor.plans.planner.first(manifest, self._slices, least_bytes, uncut)
        if len(plan.parts) > MAX_PARTS:
            raise refused(
                Reason.SIZE,
                worker=header.worker,
                field="manifest",
                limit=f"{MAX_PARTS} parts",
                value=f"{len(plan.parts)} parts",
                remedy="start the server with larger --part-bytes",
            )
        member_id = header.worker, header.incarnation
        if self._upload is None or not self._upload.is_of(header):
            if header.asks:
                return m.InitializeResponse(version=0)
            self._upload = Upload(header, manifest)
        upload = self._upload
        if header.asks:
            return m.InitializeResponse(version=0, held=upload.held)
        try:
            await self._receive(upload, header, requests)
        finally:
            self._conductor.uploaded = ""
        self._upload = None
        state, moments = upload.finish()
        if self._resumed is not None:
            put_in(self._resumed.tensors, manifest, upload.values.data, state, header.worker)
        event = e.Initialized(
            *member_id,
            fingerprint=manifest.fingerprint,
            train_samples=manifest.train_samples,
            data=manifest.data,
            least=min(2, max(1, header.least_samples)),
            buffers=any(entry.kind is m.EntryKind.BUFFER for entry in manifest.entries),
            epoch=header.epoch,
            steps=header.steps,
            epochs=manifest.epochs,
        )
        shard = self._conductor.shard

        def accept() -> e.Result[None]:
            differences = of_workers(self._conductor.streams.values(), manifest.to_message())
            accepted = self._conductor.decide(replace(event, differences=differences))
            self._conductor.state.open(manifest.entries, state)
            return accepted

        async def keep(image: Image, plan: Plan) -> None:
            assert self._first_checkpoint is not None
            await self._first_checkpoint(self._conductor, manifest, image, plan, state)

        written = None if self._first_checkpoint is None else keep
        recall, bases = (recall_of(moments) if moments else None), None
        if self._resumed is not None:
            recall, bases = self._resumed.recall, self._resumed.bases
            if moments:
                log.warning(
                    "--resume: the optimizer's state that worker %r has loaded is ignored", header.worker
                )
        try:
            initialized = await shard.open(manifest, upload.values, plan, accept, written, recall, bases)
        except asyncio.CancelledError:  # the connection broke before the answer, and the worker will ask
            self._upload = self._upload or upload
            raise
        give_back()
        self._metrics.received_raw(manifest.raw_bytes)
        log.info(
            "model received: %d tensors, %d parameters, %d training samples from worker %r",
            *(manifest.parameters, manifest.gradient_elements, manifest.train_samples, header.worker),
        )
        largest = 4 * max(part.elements for part in plan.parts)
        if manifest.epochs not in (0, self._options.epochs):
            log.info("the scripts train %d epochs", manifest.epochs)
        log.info("plan: %d parts of at most %d bytes, overlap %s", len(plan.parts), largest, self.job.overlap)
        if moments:
            log.info("the optimizer continues from the state that worker %r has loaded", header.worker)
        if header.epoch:
            text = "the job begins with epoch %d, after %d steps, as the script of worker %r requests"
            log.info(text, header.epoch + 1, header.steps, header.worker)
        self._conductor.perform(initialized.actions)
        # The optimizer's state and the bases come with a snapshot: another numpy may draw other bases.
        replaced = self._resumed is not None or bool(shard.reported.coordinates)
        self._resumed = None
        return m.InitializeResponse(version=0, replaced=replaced)

    async def _receive(
        self, upload: Upload, header: m.InitializeHeader, requests: AsyncIterator[Any]
    ) -> None:
        """Receive the chunks of an upload that are missing. Raises Refused, also if another call continues
        the upload meanwhile."""
        upload.check_start(header)
        held = upload.held
        while not upload.complete:
            chunk = await self._next_in_time(requests, header.worker)
            upload.check_start(replace(header, held=held))
            upload.add(chunk)
            held = upload.held
            self._conductor.uploaded = f"; {upload.share} arrived"
            # Heartbeats on another stream of the connection wait behind the upload.
            self._conductor.happen(e.KeepAlive(header.worker, header.incarnation))

    async def _next_in_time(self, requests: AsyncIterator[Any], worker: str) -> m.Chunk:
        """Return the next chunk of an upload. Raises Refused if it is late."""
        lease_s = self._options.lease_seconds
        try:
            return await asyncio.wait_for(expect(requests, m.Chunk, worker), lease_s)
        except TimeoutError:
            field, limit = "initial parameters", f"a chunk every {lease_s:g} s"
            raise refused(Reason.CHUNK, worker=worker, field=field, limit=limit, value="none") from None

    async def _fetch(self, request: m.FetchRequest, context: Context) -> None:
        """Handle Fetch: send the parameters."""
        self._check_job(request.job, "", context)
        shard, manifest = self._conductor.shard, self._conductor.shard.reported.manifest
        if manifest is None:
            text = "the job has no parameters yet"
            raise Refused(Refusal(reason=Reason.NOT_INITIALIZED, message=text, remedy="try again later"))
        await self._fetches.send(shard, manifest, context.write)
        self._metrics.sent_raw(manifest.raw_bytes)

    async def _put_state(self, requests: AsyncIterator[Any], context: Context) -> m.PutStateResponse:
        header = await _first(requests, m.StateHeader)
        self._check_job(header.job, header.worker, context)
        return await self._states.put(header, requests)

    async def _get_state(self, request: m.GetStateRequest, context: Context) -> None:
        self._check_job(request.job, request.worker, context)
        await self._states.get(request, self.job.id, context)

    async def _get_optimizer(self, request: m.GetOptimizerRequest, context: Context) -> None:
        self._check_job(request.job, request.worker, context)
        await self._states.get_optimizer(request, context)

    async def _status(self, request: m.StatusRequest, context: Context) -> m.StatusResponse:
        """Handle Status: return the state of the job."""
        return status_of(self._conductor, self.job, request)

    async def _exchange(self, requests: AsyncIterator[Any], context: Context) -> None:
        """Handle Exchange: serve a worker's stream."""
        messages = unbatched(requests, "WorkerMessage")
        hello = await _first(messages, m.Hello)
        self._check_job(hello.job, hello.worker, context)
        await WorkerCall(self._conductor).run(hello, messages, context)

    def _check_token(self, context: Context, worker: str) -> None:
        """Raise Refused if the call's token is missing or not valid for the worker. worker: "" for a call
        that names no worker."""
        if worker:
            _check_name(worker)
        metadata: Any = context.invocation_metadata() or ()
        self._access.check(dict(metadata), worker)

    def _check_job(self, job: str, worker: str, context: Context) -> None:
        """Raise Refused if the call's token is not valid, or if the call names another job."""
        self._check_token(context, worker)
        if job and job != self.job.id:
            raise refused(
                Reason.UNKNOWN_JOB,
                worker=worker,
                field="job",
                limit=self.job.id,
                value=job,
                remedy="the server has restarted with another job; start the worker again",
            )


def _check_name(worker: str) -> None:
    """Raise Refused if the worker's id is not a valid name."""
    if why_no_name(worker):
        raise refused(
            Reason.NAME,
            field="worker id",
            limit=NAME_RULE,
            value=shown(worker),
            remedy="choose another --worker-id",
        )


async def _first(requests: AsyncIterator[Any], expected: type[T]) -> T:
    """Return the first message of a stream. Raises Refused if it is late or of another kind."""
    try:
        return await asyncio.wait_for(expect(requests, expected), FIRST_MESSAGE_S)
    except TimeoutError:
        field, limit = "stream", f"a {expected.__name__} within {FIRST_MESSAGE_S:g} s"
        raise refused(Reason.MALFORMED, field=field, limit=limit, value="nothing") from None
