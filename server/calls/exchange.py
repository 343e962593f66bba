"""One worker's Exchange stream: its messages become events, and outcomes go back.

`pushes` handles parts and commits, `relay` packets and snapshots. A message that is invalid for the stream as
a whole ends the stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from ...common.naming import MAX_LABEL_CHARACTERS, printable, shown, why_no_label
from ...proto import messages as m
from ...proto.refusal import Reason, Refusal, Refused, refused, sentence
from ...proto.service import Malformed
from ..conductor import Conductor
from ..job import events as e
from ..job import refusals
from ..metrics import SENDER
from ..reporting import shortened
from ..streams.arriving import ArrivingParts
from ..streams.outbox import Context, Outbox, WorkerStream, differences
from .pushes import Pushes
from .relay import Uploads

log = logging.getLogger("gradwire.server")
T = TypeVar("T")
Requests = AsyncIterator[m.WorkerMessage | Malformed]

MAX_EVALUATION_METRICS = 32
FAREWELL_S = 2.0  # time for a worker to read the queued messages before its stream is ended

MOST_WANTED = 10_000  # batches that a worker may ask for at once
MAX_REASON_CHARACTERS = 1024  # longest reason for which a worker leaves, or ends the job
MAX_TEXT_CHARACTERS = 128  # longest description of a worker's activity


class WorkerCall:
    """The service of one Exchange stream. `Service` creates one for each stream; `run` serves the stream from
    its Hello to its end."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._core = conductor.core
        self._metrics = conductor.metrics

    async def run(self, hello: m.Hello, requests: Requests, context: Context) -> None:
        """Serve the stream until it ends, from either side. A previous stream of the same worker is ended.
        Raises Refused if the worker is refused or must not reconnect; other ends of the stream abort the call
        as UNAVAILABLE."""
        stream = WorkerStream(hello.worker, hello.incarnation, Outbox(), ArrivingParts(hello.worker))
        attached = self._conductor.decide(e.Attached(*stream.id))
        previous = self._conductor.streams.get(hello.worker)
        self._conductor.streams[hello.worker] = stream
        if previous is not None:
            text = f"worker {hello.worker!r} has opened another stream"
            previous.outbox.end(Refusal(reason=Reason.FENCED, worker=hello.worker, message=text), final=False)
        compressor = self._core.state.roster.members[hello.worker].compressor
        SENDER.set(self._metrics.sender(hello.worker, compressor, self._conductor.streams))
        stream.outbox.send(replace(attached.reply, stored=self._conductor.ledger.stored(stream.id)))
        self._conductor.perform(attached.actions)
        link = self._conductor.packing.open_link()
        writer = asyncio.create_task(stream.outbox.pump(context, self._metrics.sent_update, link))
        reader = asyncio.create_task(self._read(stream, requests))
        ended = asyncio.create_task(stream.outbox.ended.wait())
        try:
            await asyncio.wait((writer, reader, ended), return_when=asyncio.FIRST_COMPLETED)
            if stream.outbox.final:
                await asyncio.wait((writer,), timeout=FAREWELL_S)
        finally:
            for task in (writer, reader, ended):
                task.cancel()
            ends = await asyncio.gather(writer, reader, return_exceptions=True)
            self._conductor.packing.close_link(link)
            if self._conductor.streams.get(stream.worker) is stream:
                del self._conductor.streams[stream.worker]
                self._conductor.happen(e.Detached(*stream.id))
        # The reason why the stream was ended explains all later errors on it.
        why = stream.outbox.ended_with
        if why is not None and stream.outbox.final:
            raise Refused(why)
        failures = [end for end in ends if isinstance(end, Exception)]
        if why is None and failures:
            lapsed = isinstance(failures[0], Refused) and failures[0].refusal.reason is Reason.NOT_A_MEMBER
            if not lapsed:
                raise failures[0]
            text = str(failures[0])  # the worker's lease is over, and it may become a member again
        elif why is not None:
            text = sentence(why)
        else:
            return
        await context.abort(grpc.StatusCode.UNAVAILABLE, text)

    def _prepare(self, event: e.Prepared) -> None:
        """Report to control that a worker has loaded its model. A worker with another model is lost at once,
        so that members that wait for enough workers learn the reason. Raises Refused."""
        try:
            self._conductor.happen(event)
        except Refused as refused:
            if refused.refusal.reason is Reason.MODEL:
                reason = refusals.brief(refused.refusal)
                self._conductor.happen(e.Left(event.worker, event.incarnation, failed=True, reason=reason))
            raise

    async def _read(self, stream: WorkerStream, requests: Requests) -> None:
        """Handle the worker's messages until it leaves. Raises Refused if the stream cannot continue."""
        conductor = self._conductor
        pushes, rules = Pushes(conductor, stream), conductor.core.mode.exchanges
        uploads = None if rules is None else Uploads(conductor, stream, rules)
        async for message in requests:
            if stream.outbox.ended_with is not None:
                return
            match message:
                case m.Chunk():
                    conductor.happen(e.KeepAlive(*stream.id))
                    if uploads is None:
                        await pushes.take(message)
                    else:
                        uploads.add(message)
                case m.PartHeader():
                    await pushes.take(message)
                case m.Commit():
                    if uploads is not None:
                        uploads.end()
                    pushes.committed(message)
                case m.Abandon():
                    pushes.abandoned(message)
                case m.Packet() | m.Snapshot():
                    if uploads is None:
                        raise Refused(refusals.not_coded(stream.worker))
                    uploads.begin(message)
                case m.Heartbeat():
                    activity = printable(message.activity[:MAX_TEXT_CHARACTERS])
                    stalled_s = message.stalled_seconds
                    if not 0 <= stalled_s < math.inf:
                        raise refused(
                            Reason.NON_FINITE,
                            worker=stream.worker,
                            field="heartbeat stalled_seconds",
                            limit="a finite number of seconds, 0 or more",
                            value=str(stalled_s),
                        )
                    conductor.happen(e.KeepAlive(*stream.id, activity=activity, stalled_s=stalled_s))
                case m.Ready():
                    stream.plan, stream.model = message.plan, message.model
                    manifest = conductor.shard.reported.manifest
                    model = None if manifest is None else manifest.to_message()
                    self._prepare(
                        e.Prepared(
                            *stream.id,
                            fingerprint=message.fingerprint,
                            version=message.version,
                            assigned=message.assigned,
                            data=message.data,
                            train_samples=message.train_samples,
                            drifted=message.drifted,
                            restored=message.restored,
                            difference=differences([stream], model).get(stream.worker, ("", "")),
                            accumulate=message.accumulate,
                        )
                    )
                case m.More():
                    conductor.happen(
                        e.MoreWanted(
                            *stream.id,
                            assignment=message.assignment,
                            batches=message.batches,
                            wanted=max(1, min(message.wanted, MOST_WANTED)),
                            steps=message.steps,
                        )
                    )
                case m.Saved():
                    self._saved(stream, message)
                case m.Evaluation():
                    self._evaluated(stream, message)
                case m.Profile():
                    self._profiled(stream, message)
                case m.Stop():
                    reason = printable(message.reason[:MAX_REASON_CHARACTERS]) or "no reason given"
                    conductor.happen(e.StopRequested(*stream.id, reason=reason))
                case m.Leave():
                    reason = printable(message.reason[:MAX_REASON_CHARACTERS]) or "no reason given"
                    conductor.happen(e.Left(*stream.id, failed=message.failed, reason=reason))
                    return
                case Malformed():
                    raise Refused(unreadable(message, stream.worker))
                case m.Hello() | m.Batch():
                    text = f"{type(message).__name__}: not allowed after the first message of a stream"
                    raise Refused(Refusal(reason=Reason.MALFORMED, worker=stream.worker, message=text))

    def _saved(self, stream: WorkerStream, message: m.Saved) -> None:
        """Record the version at which a worker has saved its own state, or log that it could not."""
        if message.error:
            text = "worker %r cannot save its state at version %d and continues without: %s"
            log.error(text, stream.worker, message.version, shortened(printable(message.error)))
        stream.saved = message.version

    def _profiled(self, stream: WorkerStream, profile: m.Profile) -> None:
        """Check a worker's measurements of its steps, and hand them to the planner. Raises Refused."""
        manifest = self._conductor.shard.reported.manifest
        if manifest is None:
            raise Refused(refusals.not_initialized(stream.worker, "profile"))
        forward, backward, densities = profile.forward_seconds, profile.backward_seconds, profile.densities
        seconds = (*forward, *backward, profile.compressing_seconds, profile.step_seconds)
        count = len(manifest.specs)
        checks = (  # name of the field, whether its values are valid, and their limit
            (
                "tensors",
                all(len(each) == count for each in (forward, backward, densities)),
                f"{count} of each kind",
            ),
            ("steps", profile.steps > 0, "at least 1"),
            ("seconds", all(math.isfinite(each) and each >= 0 for each in seconds), "0 or more"),
            ("densities", all(0 < each <= 1 for each in densities), "above 0, up to 1"),
            ("processor_share", 0 <= profile.processor_share <= 1, "0 to 1"),
            (
                "machine",
                not profile.machine or not why_no_label(profile.machine),
                f"up to {MAX_LABEL_CHARACTERS} printable characters",
            ),
        )
        for field, valid, limit in checks:
            if not valid:
                raise refused(
                    Reason.TENSOR,
                    worker=stream.worker,
                    field=f"profile {field}",
                    limit=limit,
                    value="other values",
                )
        self._conductor.plans.profiled(*stream.id, profile)

    def _evaluated(self, stream: WorkerStream, message: m.Evaluation) -> None:
        """Check the metrics of an evaluation, and report them to control. Raises Refused."""
        names = message.metrics
        if len(names) > MAX_EVALUATION_METRICS:
            limit, got = f"up to {MAX_EVALUATION_METRICS} metrics", f"{len(names)}"
            raise refused(Reason.SIZE, worker=stream.worker, field="evaluation", limit=limit, value=got)
        for name, value in names.items():
            if why_no_label(name):
                raise refused(
                    Reason.NAME,
                    worker=stream.worker,
                    field="evaluation metric",
                    limit=f"1 to {MAX_LABEL_CHARACTERS} printable characters, with no space at either end",
                    value=shown(name),
                    remedy="rename the metric",
                )
            if not math.isfinite(value):
                field, got = f"evaluation metric {name!r}", str(value)
                raise refused(
                    Reason.NON_FINITE,
                    worker=stream.worker,
                    field=field,
                    limit="a finite number",
                    value=got,
                    remedy="leave the metric out",
                )
        self._conductor.happen(
            e.EvaluationReported(
                *stream.id, version=message.version, epoch=message.epoch, metrics=message.metrics
            )
        )
        self._metrics.evaluated(message.metrics)


async def expect(requests: AsyncIterator[Any], expected: type[T], worker: str = "") -> T:
    """Return the next message of a stream, which has to be of one kind. Raises Refused (MALFORMED) if the
    message is of another kind or the stream has ended, or (CHECKSUM) if it was damaged."""
    message = await anext(aiter(requests), None)
    if isinstance(message, expected):
        return message
    if isinstance(message, Malformed):
        raise Refused(unreadable(message, worker))
    got = "the end of the stream" if message is None else type(message).__name__
    text = f"expected {expected.__name__}, got {got}"
    raise Refused(Refusal(reason=Reason.MALFORMED, worker=worker, message=text))


def unreadable(message: Malformed, worker: str = "") -> Refusal:
    """Return the refusal of bytes that are no valid message: CHECKSUM if they were damaged, else MALFORMED.
    worker: id of the sender; "" if unknown."""
    reason = Reason.CHECKSUM if message.damaged else Reason.MALFORMED
    return Refusal(reason=reason, worker=worker, message=message.text)
