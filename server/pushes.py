"""The pushes of one worker's stream: a part goes to the shard once all of it is here and valid, and a push to
control once all of its parts are stored and it is committed. What is not valid is answered with a refusal."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from ..compressors import Payload
from ..proto import messages as m
from ..proto.refusal import Reason, Refused, refused
from ..proto.transfer import Assembly
from .conductor import Conductor
from .job import events as e
from .job import refusals
from .pacing import Came
from .shard.inbox import Arrivals
from .streams import WorkerStream

log = logging.getLogger("gradwire.server")

SMALL_PART_BYTES = 1 << 17  # below this a thread costs more than the scan that it takes off the loop
SCANS_AT_ONCE = 4  # of one worker
# Bytes that were changed on their way: the worker sends them again.
DAMAGED = (Reason.CHECKSUM, Reason.CHUNK)
# Why a push of a worker is not decided on.
NO_MEMBER = (Reason.FENCED, Reason.NOT_A_MEMBER)


class Pushes:
    """Their parts, commits and abandons, on one stream."""

    def __init__(self, conductor: Conductor, stream: WorkerStream) -> None:
        self._conductor = conductor
        self._core = conductor.core
        self._metrics = conductor.metrics
        self._stream = stream

    @property
    def _arrivals(self) -> Arrivals:
        return self._conductor.intake.of(*self._stream.id)

    async def take(self, message: m.Part | m.Chunk) -> None:
        """Take in a piece of a part, and store the part when it is complete. Raises Refused where the stream
        cannot go on."""
        self._stream.chunk_at = time.monotonic()
        part = message if isinstance(message, m.Part) else self._stream.inbox.arriving(message.transfer)
        try:
            if isinstance(message, m.Part):
                self._begin(message)
            else:
                self._stream.inbox.add(message)
            complete = self._stream.inbox.take()
        except Refused as error:
            if part is None:  # the stream itself is at fault
                raise
            self._stream.inbox.drop(part)
            self._refuse(part.seq, error, part.part)
            return
        if complete is None:
            return
        size, waited = self._stream.inbox.since()
        self._conductor.arrived(Came(self._stream.worker, size, time.monotonic(), waited))
        if complete[1].size <= SMALL_PART_BYTES:
            self._store(complete[0], complete[1].checksum, complete[1].finish)
            return
        # The stream is read on during the scan, as far as memory for a few parts goes.
        while len(self._stream.scans) >= SCANS_AT_ONCE:
            await asyncio.wait(self._stream.scans, return_when=asyncio.FIRST_COMPLETED)
        scan = asyncio.create_task(self._scan(*complete))
        self._stream.scans.add(scan)
        scan.add_done_callback(self._stream.scans.discard)

    def _begin(self, part: m.Part) -> None:
        shard, mode = self._conductor.shard, self._core.mode
        if mode.exchanges:
            raise Refused(refusals.not_of_mode(self._stream.worker, part.seq, coded=True))
        if shard.manifest is None:
            raise Refused(refusals.not_initialized(self._stream.worker, f"push {part.seq}"))
        arrivals, older = self._arrivals, part.plan < shard.plan.number
        wanted = arrivals.wants(part.seq, part.part, part.assignment)
        unwanted = arrivals.unwanted(part.seq)
        if wanted and not older and not self._core.unwanted(*self._stream.id, part.assignment):
            self._stream.inbox.begin(part, shard.manifest, shard.plan)
            return
        self._stream.inbox.drop(part)
        if wanted or unwanted:  # on a new stream again: the hint may have been lost with the old one
            self._conductor.intake.give_up(self._stream, part.seq)
        self._say_stored(part)
        self._deliver()  # it may be here from the stream before, which delivers nothing any more

    async def _scan(self, part: m.Part, assembly: Assembly) -> None:
        checked = await asyncio.to_thread(_outcome_of, assembly.finish)
        try:
            self._store(part, assembly.checksum, checked)
        except Refused as error:  # nobody waits for a scan
            self._stream.outbox.end(error.refusal, final=error.refusal.reason is Reason.FENCED)

    def _store(self, part: m.Part, checksum: int, finish: Callable[[], list[Payload]]) -> None:
        """A part is here whole. finish: returns its payloads, or raises Refused where they are not valid."""
        if part.plan != self._conductor.shard.plan.number:  # there is a new one since it began to come
            self._deliver()
            return
        try:
            payloads = finish()
            self._rate(part)
        except Refused as error:
            self._refuse(part.seq, error)
            return
        if self._conductor.intake.store(self._stream.id, part, checksum, payloads):
            self._deliver()
        self._say_stored(part)

    def _rate(self, part: m.Part) -> None:
        """Have control look at the learning rates that come with a push. Raises Refused."""
        manifest, rates = self._conductor.shard.manifest, part.learning_rates
        assert manifest is not None
        self._arrivals.check_rates(part, max(1, len(manifest.groups)))
        if not rates and not self._conductor.core.rules.script:
            return  # nobody's push has any
        rated = e.Rated(*self._stream.id, seq=part.seq, assignment=part.assignment, learning_rates=rates)
        self._conductor.happen(rated)

    def _say_stored(self, part: m.Part) -> None:
        """To a worker that waits for that before it sends another part."""
        if self._conductor.shard.plan.credit:
            self._stream.outbox.send(m.Stored(seq=part.seq, parts=(part.part,)))

    def committed(self, commit: m.Commit) -> None:
        """Have a push decided on, once all of it is here. Raises Refused where the stream cannot go on."""
        arrivals, exchanges = self._arrivals, self._core.mode.exchanges
        try:
            if arrivals.over(commit.seq):  # told again: nothing in it is checked anew
                self._repeat(commit)
                return
            if (commit.exchanged is not None) != exchanges:
                raise Refused(refusals.not_of_mode(self._stream.worker, commit.seq, coded=exchanges))
            if not math.isfinite(commit.loss):
                raise self._not(commit, Reason.NON_FINITE, "loss", "a finite number", commit.loss)
            if commit.parts and (commit.exchanged is not None or not commit.samples):
                limit = "none where samples is 0 or packets were exchanged"
                raise self._not(commit, Reason.TENSOR, "parts", limit, commit.parts)
            if commit.samples and not commit.parts and commit.exchanged is None:
                raise self._not(commit, Reason.TENSOR, "parts", "some, with samples", 0)
            arrivals.commit(commit)
        except Refused as error:
            if error.refusal.reason in NO_MEMBER:
                raise
            self._refuse(commit.seq, error)
            return
        self._deliver()

    def _repeat(self, commit: m.Commit) -> None:
        """Answer for a push that is over as it was answered for. Raises Refused."""
        arrivals = self._arrivals
        refusal, member = arrivals.refusal(commit.seq), self._core.roster.get(self._stream.id)
        if refusal is not None:
            decision = m.Decision.REFUSED
            self._stream.outbox.send(m.Outcome(seq=commit.seq, decision=decision, refusal=refusal))
            return
        if member is not None and commit.seq > member.last_seq:  # control has never heard of it: abandoned
            raise Refused(refusals.sequence(self._stream.worker, commit.seq, arrivals.through + 1))
        self._decide(commit)

    def _not(self, commit: m.Commit, reason: Reason, field: str, limit: str, value: object) -> Refused:
        where = f"push {commit.seq} {field}"
        return refused(reason, worker=self._stream.worker, field=where, limit=limit, value=str(value))

    def abandoned(self, abandon: m.Abandon) -> None:
        """Keep nothing of a push. Raises Refused where the stream cannot go on."""
        arrivals = self._arrivals
        self._stream.inbox.drop_push(abandon.seq)
        if not arrivals.over(abandon.seq):
            self._conductor.intake.close(self._stream.id, abandon.seq)
            self._deliver()

    def _deliver(self) -> None:
        """Have every push decided on that is complete, in order."""
        arrivals = self._arrivals
        while self._stream.outbox.ended_with is None:
            try:
                complete = arrivals.next(self._core.plan)
            except Refused as error:  # what is stored is not what was sent
                seq = min(arrivals.open)
                self._conductor.intake.close(self._stream.id, seq, again=True)
                self._refuse(seq, error, again=True)
                continue
            if complete is None:
                return
            commit, parts = complete
            unwanted = arrivals.unwanted(commit.seq)
            try:
                if not unwanted:
                    self._check_parts(commit, parts)
                elif not self._core.unwanted(*self._stream.id, commit.assignment):
                    # Its member got the work back.
                    self._conductor.intake.close(self._stream.id, commit.seq, again=True)
                    again = refusals.given_up(self._stream.worker, commit.seq)
                    self._refuse(commit.seq, Refused(again), again=True)
                    continue
                self._decide(commit)
            except Refused as error:
                if error.refusal.reason in NO_MEMBER:  # it may come back, and then be one
                    raise
                self._refuse(commit.seq, error)
            else:
                arrivals.close(commit.seq)

    def _check_parts(self, commit: m.Commit, parts: frozenset[int]) -> None:
        """Raises Refused for other parts than the assignment asks for."""
        member = self._core.roster.members.get(self._stream.worker)
        work = member.work if member is not None else None
        if not commit.parts or commit.plan != self._core.plan or work is None or work.id != commit.assignment:
            return
        plan, asked = self._conductor.shard.plan, work.assignment
        alone = frozenset(self._conductor.shard.asked(work.id))
        expected = alone or plan.slice(asked.slice, max(1, asked.slices))
        if parts != expected and (alone or len(parts) != len(plan.parts)):
            raise Refused(refusals.parts(self._stream.worker, commit.seq, len(parts), len(expected), asked))

    def _refuse(self, seq: int, error: Refused, part: int | None = None, *, again: bool = False) -> None:
        """Answer for a push, or a part that is to be sent again. Any other push is forgotten."""
        damaged = error.refusal.reason in DAMAGED
        arrivals = self._arrivals
        if not again and not (part is not None and damaged):
            part = None
            if not arrivals.over(seq):  # what is over may still have to be applied
                self._conductor.intake.close(self._stream.id, seq, error.refusal)
        self._metrics.push_refused(error.refusal.reason)
        log.warning("refused push %d: %s", seq, error)
        decision = m.Decision.REFUSED
        self._stream.outbox.send(m.Outcome(seq=seq, decision=decision, refusal=error.refusal, part=part))

    def _decide(self, commit: m.Commit) -> None:
        """Raises Refused."""
        event = e.Pushed(
            *self._stream.id,
            seq=commit.seq,
            assignment=commit.assignment,
            base_version=commit.base_version,
            samples=commit.samples,
            loss=commit.loss,
            exchanged=commit.exchanged,
            plan=commit.plan,
            computing_s=commit.computing_seconds,
            learning_rates=self._arrivals.rates(commit.seq),
        )
        result = self._conductor.push(event)
        outcome = result.reply.outcome
        counted = self._conductor.shard.counted(event.key)
        if counted and outcome.decision is m.Decision.REFUSED:
            outcome = replace(outcome, counted=tuple(sorted(counted)))
        self._stream.outbox.send(outcome)
        self._conductor.perform(result.actions)


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
