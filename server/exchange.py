"""One worker's Exchange stream: what it sends becomes events, what is decided goes back.

A push is taken in only when all of it is here and valid; one that is not is answered with a refusal, and the
stream goes on. What makes no sense on the stream itself ends it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc

from ..compressors import Payload
from ..proto import messages as m
from ..proto.refusal import Reason, Refusal, Refused, refused, sentence
from ..proto.service import Malformed
from .conductor import Conductor
from .job import events as e
from .job import refusals
from .metrics import SENDER, compressor_label
from .relay import Uploads
from .shard.inbox import Inbox
from .streams import Context, Outbox, WorkerStream

log = logging.getLogger("gradwire.server")
T = TypeVar("T")
Requests = AsyncIterator[m.WorkerMessage | Malformed]

SMALL_PUSH_ELEMENTS = 1 << 18  # below this a thread costs more than the scan that it takes off the loop
MAX_EVALUATION_METRICS = 32
FAREWELL_S = 2.0  # for a worker to take what is still queued for it before its stream is ended
MAX_TEXT_CHARACTERS = 128  # of what a worker says about itself


class WorkerCall:
    """One stream; `run` serves it from its Hello to its end."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._core = conductor.core
        self._metrics = conductor.metrics

    async def run(self, hello: m.Hello, requests: Requests, context: Context) -> None:
        """Raises Refused where the stream cannot go on."""
        stream = WorkerStream(hello.worker, hello.incarnation, Outbox(), Inbox(hello.worker))
        attached = self._conductor.decide(e.Attached(*stream.id))
        previous = self._conductor.streams.get(hello.worker)
        self._conductor.streams[hello.worker] = stream
        if previous is not None:
            text = f"worker {hello.worker!r} has opened another stream"
            previous.outbox.end(Refusal(reason=Reason.FENCED, worker=hello.worker, message=text), final=False)
        SENDER.set(compressor_label(self._core.roster.members[hello.worker].compressor))
        stream.outbox.send(attached.reply)
        self._conductor.perform(attached.actions)
        writer = asyncio.create_task(
            stream.outbox.pump(context, lambda broadcast: self._metrics.sent_raw(broadcast.raw_bytes))
        )
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
            if self._conductor.streams.get(stream.worker) is stream:
                del self._conductor.streams[stream.worker]
                self._conductor.happen(e.Detached(*stream.id))
        # Why the stream was ended explains whatever else went wrong on it.
        why = stream.outbox.ended_with
        if why is not None and stream.outbox.final:
            raise Refused(why)
        failures = [end for end in ends if isinstance(end, Exception)]
        if why is None and failures:
            lapsed = isinstance(failures[0], Refused) and failures[0].refusal.reason is Reason.NOT_A_MEMBER
            if not lapsed:
                raise failures[0]
            text = str(failures[0])  # its lease is over; it was a member and may be one again
        elif why is not None:
            text = sentence(why)
        else:
            return
        await context.abort(grpc.StatusCode.UNAVAILABLE, text)

    async def _read(self, stream: WorkerStream, requests: Requests) -> None:
        """Take in messages until the worker is done. Raises Refused where the stream cannot go on."""
        conductor = self._conductor
        uploads = Uploads(conductor, stream)
        async for message in requests:
            if stream.outbox.ended_with is not None:
                return
            match message:
                case m.Chunk():
                    conductor.happen(e.Heard(*stream.id))
                    if not uploads.add(message):
                        await self._take(stream, message)
                case m.Push():
                    uploads.end()
                    await self._take(stream, message)
                case m.Packet() | m.Snapshot():
                    uploads.begin(message)
                case m.Heartbeat():
                    activity = message.activity[:MAX_TEXT_CHARACTERS]
                    conductor.happen(e.Heard(*stream.id, activity=activity))
                case m.Ready():
                    conductor.happen(
                        e.Prepared(
                            *stream.id,
                            fingerprint=message.fingerprint,
                            version=message.version,
                            assigned=message.assigned,
                        )
                    )
                case m.Evaluation():
                    self._evaluated(stream, message)
                case m.Leave():
                    reason = message.reason[:1024] or "no reason given"
                    conductor.happen(e.Left(*stream.id, failed=message.failed, reason=reason))
                    return
                case Malformed():
                    raise Refused(unreadable(message, stream.worker))
                case m.Hello():
                    text = "Hello in the middle of a stream"
                    raise Refused(Refusal(reason=Reason.MALFORMED, worker=stream.worker, message=text))

    async def _take(self, stream: WorkerStream, message: m.Push | m.Chunk) -> None:
        """Take in a part of a push, and hand it on when it is complete."""
        push = message if isinstance(message, m.Push) else stream.inbox.current
        try:
            if isinstance(message, m.Push):
                exchanges = self._core.mode.exchanges
                if (message.exchanged is not None) != exchanges:
                    raise Refused(refusals.not_of_mode(stream.worker, message.seq, coded=exchanges))
                member = self._core.roster.members.get(stream.worker)
                work = member.work if member is not None else None
                stream.inbox.begin(message, self._conductor.shard.manifest, work.assignment if work else None)
            else:
                stream.inbox.add(message)
            complete = stream.inbox.take()
            if complete is None:
                return
            push, assembly = complete
            if sum(header.elements for header in push.tensors) <= SMALL_PUSH_ELEMENTS:
                payloads = assembly.finish()
            else:
                payloads = await asyncio.to_thread(assembly.finish)
            if stream.outbox.ended_with is None:  # it may have been ended during the scan
                self._pushed(stream, push, payloads)
        except Refused as error:
            # Without a push to answer for, or without a membership, the stream itself is at fault.
            if push is None or error.refusal.reason in (Reason.FENCED, Reason.NOT_A_MEMBER):
                raise
            stream.inbox.drop(push)
            self._metrics.push_refused(error.refusal.reason)
            log.warning("refused push %d: %s", push.seq, error)
            outcome = m.Outcome(seq=push.seq, decision=m.Decision.REFUSED, refusal=error.refusal)
            stream.outbox.send(outcome)

    def _pushed(self, stream: WorkerStream, push: m.Push, payloads: list[Payload]) -> None:
        event = e.Pushed(
            *stream.id,
            seq=push.seq,
            assignment=push.assignment,
            base_version=push.base_version,
            samples=push.samples,
            loss=push.loss,
            slice=push.slice,
            slices=push.slices,
            exchanged=push.exchanged,
        )
        shard = self._conductor.shard
        new = push.exchanged is None and shard.put(event.key, payloads)
        try:
            result = self._conductor.decide(event)
        except Refused:
            if new:
                shard.drop(event.key)
            raise
        outcome = result.reply.outcome
        if outcome.decision is m.Decision.REFUSED and not result.reply.repeated:
            self._metrics.push_refused(outcome.refusal.reason if outcome.refusal else Reason.STALE)
        elif not result.reply.repeated:
            self._metrics.push_accepted(payloads, outcome.version - 1 - push.base_version)
        stream.outbox.send(outcome)
        self._conductor.perform(result.actions)

    def _evaluated(self, stream: WorkerStream, message: m.Evaluation) -> None:
        names = message.metrics
        if len(names) > MAX_EVALUATION_METRICS or any(len(name) > MAX_TEXT_CHARACTERS for name in names):
            limit = f"up to {MAX_EVALUATION_METRICS} metrics, names of up to {MAX_TEXT_CHARACTERS} characters"
            got = f"{len(names)} metrics"
            raise refused(Reason.SIZE, worker=stream.worker, field="evaluation", limit=limit, value=got)
        for name, value in names.items():
            if not math.isfinite(value):
                field, got = f"evaluation metric {name!r}", str(value)
                raise refused(
                    Reason.NON_FINITE,
                    worker=stream.worker,
                    field=field,
                    limit="a finite number",
                    value=got,
                    remedy="leave it out",
                )
        self._conductor.happen(
            e.Evaluated(*stream.id, version=message.version, epoch=message.epoch, metrics=message.metrics)
        )
        for name in ("accuracy", "loss"):  # a bounded set of labels, whatever a task reports
            if name in message.metrics:
                self._metrics.validation.labels(name).set(message.metrics[name])


async def expect(requests: AsyncIterator[Any], expected: type[T]) -> T:
    """The next message of a stream. Raises Refused: MALFORMED if it is another kind or there is none."""
    message = await anext(aiter(requests), None)
    if isinstance(message, expected):
        return message
    if isinstance(message, Malformed):
        raise Refused(unreadable(message))
    got = "the end of the stream" if message is None else type(message).__name__
    text = f"expected {expected.__name__}, got {got}"
    raise Refused(Refusal(reason=Reason.MALFORMED, message=text))


def unreadable(message: Malformed, worker: str = "") -> Refusal:
    """The refusal of bytes that are no message, or no longer one."""
    reason = Reason.CHECKSUM if message.damaged else Reason.MALFORMED
    return Refusal(reason=reason, worker=worker, message=message.text)
