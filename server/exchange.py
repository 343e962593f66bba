"""One worker's Exchange stream: what it sends becomes events, what is decided goes back.

A part is stored only when all of it is here and valid, and a push counts once all of its parts are stored and
it is committed. What is not valid is answered with a refusal, and the stream goes on. What makes no sense on
the stream itself ends it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from ..compressors import Payload
from ..proto import messages as m
from ..proto.refusal import Reason, Refusal, Refused, refused, sentence
from ..proto.service import Malformed
from ..proto.transfer import Assembly
from .conductor import Conductor
from .job import events as e
from .job import refusals
from .metrics import SENDER, compressor_label
from .pacing import Came
from .relay import Uploads
from .shard.inbox import Inbox
from .streams import Context, Outbox, WorkerStream

log = logging.getLogger("gradwire.server")
T = TypeVar("T")
Requests = AsyncIterator[m.WorkerMessage | Malformed]

SMALL_PART_BYTES = 1 << 17  # below this a thread costs more than the scan that it takes off the loop
SCANS_AT_ONCE = 4  # of one worker
# Bytes that were changed on their way: the worker sends them again.
DAMAGED = (Reason.CHECKSUM, Reason.CHUNK)
# Why a push of a worker is not decided on.
NO_MEMBER = (Reason.FENCED, Reason.NOT_A_MEMBER)
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
        stream.outbox.send(replace(attached.reply, stored=self._conductor.arrivals(*stream.id).stored))
        self._conductor.perform(attached.actions)
        writer = asyncio.create_task(stream.outbox.pump(context, self._metrics.sent_raw))
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
                case m.Part():
                    uploads.end()
                    await self._take(stream, message)
                case m.Commit():
                    uploads.end()
                    self._committed(stream, message)
                case m.Abandon():
                    self._abandoned(stream, message)
                case m.Packet() | m.Snapshot():
                    uploads.begin(message)
                case m.Heartbeat():
                    activity = message.activity[:MAX_TEXT_CHARACTERS]
                    conductor.happen(e.Heard(*stream.id, activity=activity))
                case m.Ready():
                    stream.plan = message.plan
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
                case m.Profile():
                    self._profiled(stream, message)
                case m.Leave():
                    reason = message.reason[:1024] or "no reason given"
                    conductor.happen(e.Left(*stream.id, failed=message.failed, reason=reason))
                    return
                case Malformed():
                    raise Refused(unreadable(message, stream.worker))
                case m.Hello() | m.Batch():
                    text = f"{type(message).__name__} in the middle of a stream"
                    raise Refused(Refusal(reason=Reason.MALFORMED, worker=stream.worker, message=text))

    async def _take(self, stream: WorkerStream, message: m.Part | m.Chunk) -> None:
        """Take in a piece of a part, and store the part when it is complete."""
        part = message if isinstance(message, m.Part) else stream.inbox.arriving(message.transfer)
        try:
            if isinstance(message, m.Part):
                self._begin(stream, message)
            else:
                stream.inbox.add(message)
            complete = stream.inbox.take()
        except Refused as error:
            if part is None:  # the stream itself is at fault
                raise
            stream.inbox.drop(part)
            self._refuse(stream, part.seq, error, part.part)
            return
        if complete is None:
            return
        size, waited = stream.inbox.since()
        self._conductor.arrived(Came(stream.worker, size, time.monotonic(), waited))
        if complete[1].size <= SMALL_PART_BYTES:
            self._store(stream, complete[0], complete[1].checksum, complete[1].finish)
            return
        # The stream is read on during the scan, as far as memory for a few parts goes.
        while len(stream.scans) >= SCANS_AT_ONCE:
            await asyncio.wait(stream.scans, return_when=asyncio.FIRST_COMPLETED)
        scan = asyncio.create_task(self._scan(stream, *complete))
        stream.scans.add(scan)
        scan.add_done_callback(stream.scans.discard)

    def _begin(self, stream: WorkerStream, part: m.Part) -> None:
        shard, mode = self._conductor.shard, self._core.mode
        if mode.exchanges:
            raise Refused(refusals.not_of_mode(stream.worker, part.seq, coded=True))
        if shard.manifest is None:
            raise Refused(refusals.not_initialized(stream.worker, f"push {part.seq}"))
        arrivals, older = self._conductor.arrivals(*stream.id), part.plan < shard.plan.number
        wanted = arrivals.wants(part.seq, part.part, part.assignment)
        unwanted = arrivals.unwanted(part.seq)
        if wanted and not older and not self._core.unwanted(*stream.id, part.assignment):
            stream.inbox.begin(part, shard.manifest, shard.plan)
            return
        stream.inbox.drop(part)
        if wanted or unwanted:  # on a new stream again: the hint may have been lost with the old one
            self._conductor.give_up(stream, part.seq)
        self._say_stored(stream, part)
        self._deliver(stream)  # it may be here from the stream before, which delivers nothing any more

    async def _scan(self, stream: WorkerStream, part: m.Part, assembly: Assembly) -> None:
        checked = await asyncio.to_thread(_outcome_of, assembly.finish)
        try:
            self._store(stream, part, assembly.checksum, checked)
        except Refused as error:  # nobody waits for a scan
            stream.outbox.end(error.refusal, final=error.refusal.reason is Reason.FENCED)

    def _store(
        self, stream: WorkerStream, part: m.Part, checksum: int, finish: Callable[[], list[Payload]]
    ) -> None:
        """A part is here whole. finish: returns its payloads, or raises Refused where they are not valid."""
        arrivals, shard = self._conductor.arrivals(*stream.id), self._conductor.shard
        if part.plan != shard.plan.number:  # there is a new one since it began to come
            self._deliver(stream)
            return
        try:
            payloads = finish()
            self._rate(stream, part)
        except Refused as error:
            self._refuse(stream, part.seq, error)
            return
        if arrivals.store(part.seq, part.part, checksum):
            key = e.PushKey(*stream.id, part.seq)
            shard.put(key, part.part, payloads, part.assignment, part.learning_rates)
            self._deliver(stream)
        self._say_stored(stream, part)

    def _rate(self, stream: WorkerStream, part: m.Part) -> None:
        """Have control look at the learning rates that come with a push. Raises Refused."""
        arrivals, manifest = self._conductor.arrivals(*stream.id), self._conductor.shard.manifest
        assert manifest is not None
        arrivals.check_rates(part, max(1, len(manifest.groups)))
        rates = part.learning_rates
        self._conductor.happen(
            e.Rated(*stream.id, seq=part.seq, assignment=part.assignment, learning_rates=rates)
        )

    def _say_stored(self, stream: WorkerStream, part: m.Part) -> None:
        """To a worker that waits for that before it sends another part."""
        if self._conductor.shard.plan.credit:
            stream.outbox.send(m.Stored(seq=part.seq, parts=(part.part,)))

    def _committed(self, stream: WorkerStream, commit: m.Commit) -> None:
        arrivals, exchanges = self._conductor.arrivals(*stream.id), self._core.mode.exchanges
        try:
            if arrivals.over(commit.seq):  # told again: nothing in it is checked anew
                self._repeat(stream, commit)
                return
            if (commit.exchanged is not None) != exchanges:
                raise Refused(refusals.not_of_mode(stream.worker, commit.seq, coded=exchanges))
            if not math.isfinite(commit.loss):
                raise self._not(commit, stream, Reason.NON_FINITE, "loss", "a finite number", commit.loss)
            if commit.parts and (commit.exchanged is not None or not commit.samples):
                limit = "none where samples is 0 or packets were exchanged"
                raise self._not(commit, stream, Reason.TENSOR, "parts", limit, commit.parts)
            if commit.samples and not commit.parts and commit.exchanged is None:
                raise self._not(commit, stream, Reason.TENSOR, "parts", "some, with samples", 0)
            arrivals.commit(commit)
        except Refused as error:
            if error.refusal.reason in NO_MEMBER:
                raise
            self._refuse(stream, commit.seq, error)
            return
        self._deliver(stream)

    def _repeat(self, stream: WorkerStream, commit: m.Commit) -> None:
        """Answer for a push that is over as it was answered for. Raises Refused."""
        arrivals = self._conductor.arrivals(*stream.id)
        refusal, member = arrivals.refusal(commit.seq), self._core.roster.get(stream.id)
        if refusal is not None:
            decision = m.Decision.REFUSED
            stream.outbox.send(m.Outcome(seq=commit.seq, decision=decision, refusal=refusal))
            return
        if member is not None and commit.seq > member.last_seq:  # control has never heard of it: abandoned
            raise Refused(refusals.sequence(stream.worker, commit.seq, arrivals.through + 1))
        self._decide(stream, commit)

    @staticmethod
    def _not(
        commit: m.Commit, stream: WorkerStream, reason: Reason, field: str, limit: str, value: object
    ) -> Refused:
        where = f"push {commit.seq} {field}"
        return refused(reason, worker=stream.worker, field=where, limit=limit, value=str(value))

    def _abandoned(self, stream: WorkerStream, abandon: m.Abandon) -> None:
        arrivals = self._conductor.arrivals(*stream.id)
        stream.inbox.drop_push(abandon.seq)
        if not arrivals.over(abandon.seq):
            arrivals.close(abandon.seq)
            self._conductor.shard.drop(e.PushKey(*stream.id, abandon.seq))
            self._deliver(stream)

    def _deliver(self, stream: WorkerStream) -> None:
        """Have every push decided on that is complete, in order."""
        arrivals = self._conductor.arrivals(*stream.id)
        while stream.outbox.ended_with is None:
            try:
                complete = arrivals.next(self._core.plan)
            except Refused as error:  # what is stored is not what was sent
                seq = min(arrivals.open)
                arrivals.forget(seq)
                self._conductor.shard.drop(e.PushKey(*stream.id, seq))
                self._refuse(stream, seq, error, again=True)
                continue
            if complete is None:
                return
            commit, parts = complete
            unwanted = arrivals.unwanted(commit.seq)
            try:
                if not unwanted:
                    self._check_parts(stream, commit, parts)
                elif not self._core.unwanted(*stream.id, commit.assignment):  # its member got the work back
                    arrivals.forget(commit.seq)
                    again = refusals.given_up(stream.worker, commit.seq)
                    self._refuse(stream, commit.seq, Refused(again), again=True)
                    continue
                self._decide(stream, commit)
            except Refused as error:
                if error.refusal.reason in NO_MEMBER:  # it may come back, and then be one
                    raise
                self._refuse(stream, commit.seq, error)
            else:
                arrivals.close(commit.seq)

    def _check_parts(self, stream: WorkerStream, commit: m.Commit, parts: frozenset[int]) -> None:
        """Raises Refused for other parts than the assignment asks for."""
        member = self._core.roster.members.get(stream.worker)
        work = member.work if member is not None else None
        if not commit.parts or commit.plan != self._core.plan or work is None or work.id != commit.assignment:
            return
        plan, asked = self._conductor.shard.plan, work.assignment
        alone = frozenset(self._conductor.shard.asked(work.id))
        expected = alone or plan.slice(asked.slice, max(1, asked.slices))
        if parts != expected and (alone or len(parts) != len(plan.parts)):
            raise Refused(refusals.parts(stream.worker, commit.seq, len(parts), len(expected), asked))

    def _refuse(
        self, stream: WorkerStream, seq: int, error: Refused, part: int | None = None, *, again: bool = False
    ) -> None:
        """Answer for a push, or a part that is to be sent again. Any other push is forgotten."""
        damaged = error.refusal.reason in DAMAGED
        arrivals = self._conductor.arrivals(*stream.id)
        if not again and not (part is not None and damaged):
            part = None
            if not arrivals.over(seq):  # what is over may still have to be applied
                arrivals.close(seq, error.refusal)
                self._conductor.shard.drop(e.PushKey(*stream.id, seq))
        self._metrics.push_refused(error.refusal.reason)
        log.warning("refused push %d: %s", seq, error)
        decision = m.Decision.REFUSED
        stream.outbox.send(m.Outcome(seq=seq, decision=decision, refusal=error.refusal, part=part))

    def _decide(self, stream: WorkerStream, commit: m.Commit) -> None:
        """Raises Refused."""
        event = e.Pushed(
            *stream.id,
            seq=commit.seq,
            assignment=commit.assignment,
            base_version=commit.base_version,
            samples=commit.samples,
            loss=commit.loss,
            exchanged=commit.exchanged,
            plan=commit.plan,
            computing_s=commit.computing_seconds,
        )
        payloads = self._conductor.shard.payloads(event.key)
        result = self._conductor.decide(event)
        outcome = result.reply.outcome
        if outcome.decision is m.Decision.REFUSED and not result.reply.repeated:
            self._metrics.push_refused(outcome.refusal.reason if outcome.refusal else Reason.STALE)
        elif not result.reply.repeated:
            self._metrics.push_accepted(payloads, outcome.version - 1 - commit.base_version)
        counted = self._conductor.shard.counted(event.key)
        if counted and outcome.decision is m.Decision.REFUSED:
            outcome = replace(outcome, counted=tuple(sorted(counted)))
        stream.outbox.send(outcome)
        self._conductor.perform(result.actions)

    def _profiled(self, stream: WorkerStream, profile: m.Profile) -> None:
        manifest = self._conductor.shard.manifest
        if manifest is None:
            raise Refused(refusals.not_initialized(stream.worker, "profile"))
        elements = [spec.elements for spec in manifest.specs]
        others = (profile.compressing_seconds, profile.step_seconds)
        seconds = (profile.forward_seconds, profile.backward_seconds, others)
        kept, count = profile.kept, len(elements)
        checks = (
            ("tensors", all(len(each) == count for each in (*seconds[:2], kept)), f"{count} of each kind"),
            ("steps", profile.steps > 0, "at least 1"),
            ("seconds", all(math.isfinite(s) and s >= 0 for each in seconds for s in each), "0 or more"),
            ("kept", all(map(int.__le__, kept, elements)), "no more than the tensor has"),
            ("processor_share", 0 <= profile.processor_share <= 1, "0 to 1"),
            (
                "machine",
                len(profile.machine) <= MAX_TEXT_CHARACTERS,
                f"up to {MAX_TEXT_CHARACTERS} characters",
            ),
        )
        for field, right, limit in checks:
            if not right:
                where = f"profile {field}"
                raise refused(Reason.TENSOR, worker=stream.worker, field=where, limit=limit, value="another")
        self._conductor.plans.profiled(*stream.id, profile)

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


def _outcome_of(finish: Callable[[], list[Payload]]) -> Callable[[], list[Payload]]:
    """Run it here; what is returned gives its result, or raises Refused, elsewhere."""
    try:
        payloads = finish()
    except Refused as error:
        failure = error

        def fail() -> list[Payload]:
            raise failure

        return fail
    return lambda: payloads


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
