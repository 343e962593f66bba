"""Parts, commits and abandons of one worker's stream. A complete and valid part goes to the push ledger
(`streams/push_ledger`). A push that is complete in the ledger goes to control, which decides. An invalid
part or commit is answered with a refusal."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from ...compressors import Payload
from ...proto import messages as m
from ...proto.refusal import Reason, Refused, refused
from ...proto.transfer import Assembly
from ..conductor import Conductor
from ..job import events as e
from ..job import refusals
from ..plans.rate_control import PartArrival
from ..streams.outbox import WorkerStream

log = logging.getLogger("gradwire.server")

# Largest part that is checked on the event loop, because a thread would cost more.
SMALL_PART_BYTES = 1 << 17
SCANS_AT_ONCE = 4  # Most parts of one worker that are checked at a time.
DAMAGED = (Reason.CHECKSUM, Reason.CHUNK)  # The bytes changed in transit, and the worker sends them again.
# Reasons that mean that the worker is not a member, so none of its pushes is decided.
NO_MEMBER = (Reason.FENCED, Reason.NOT_A_MEMBER)

MAX_LOCAL_RATES = 1024  # parameter groups whose rates of local steps are compared


class Pushes:
    """Handler of one stream's messages that concern pushes. It has no state of its own: the ledger and the
    stream remember. `WorkerCall` creates it."""

    def __init__(self, conductor: Conductor, stream: WorkerStream) -> None:
        self._conductor = conductor
        self._core = conductor.core
        self._metrics = conductor.metrics
        self._stream = stream
        self._ledger, self._reported = conductor.ledger, conductor.shard.reported

    def _key(self, seq: int) -> e.PushKey:
        """Return the key of this worker's push with a seq."""
        return e.PushKey(*self._stream.id, seq)

    async def take(self, message: m.PartHeader | m.Chunk) -> None:
        """Take a header or chunk of a part, and store the part once it is complete. A part that is refused
        does not end the stream.

        Raises:
            Refused: the message belongs to no part, so the stream cannot continue.
        """
        self._stream.chunk_at = time.monotonic()
        part = (
            message if isinstance(message, m.PartHeader) else self._stream.arriving.header(message.transfer)
        )
        try:
            if isinstance(message, m.PartHeader):
                self._begin(message)
            else:
                self._stream.arriving.add(message)
            complete = self._stream.arriving.take()
        except Refused as error:
            if part is None:  # the fault is not in a part but in the stream
                raise
            self._stream.arriving.drop(part)
            self._refuse(part.seq, error, part.part)
            return
        if complete is None:
            return
        size, waited = self._stream.arriving.since()
        self._conductor.arrived(PartArrival(self._stream.worker, size, time.monotonic(), waited))
        if complete[1].size <= SMALL_PART_BYTES:
            self._store(complete[0], complete[1].checksum, complete[1].finish)
            return
        # The stream is read during the scan, up to a limit on the parts in memory.
        while len(self._stream.scans) >= SCANS_AT_ONCE:
            await asyncio.wait(self._stream.scans, return_when=asyncio.FIRST_COMPLETED)
        scan = asyncio.create_task(self._scan(*complete))
        self._stream.scans.add(scan)
        scan.add_done_callback(self._stream.scans.discard)

    def _begin(self, part: m.PartHeader) -> None:
        """Begin to receive a part, or ignore its chunks if it is stored already or its push is no longer
        wanted. Raises Refused for an invalid header."""
        known, mode = self._reported, self._core.mode
        if not mode.pushes_parts:
            raise Refused(refusals.not_of_mode(self._stream.worker, part.seq, coded=True))
        if known.manifest is None:
            raise Refused(refusals.not_initialized(self._stream.worker, f"push {part.seq}"))
        key, older = self._key(part.seq), part.plan < known.plan.number
        needed = self._ledger.needs_part(key, part.part, part.assignment)
        unwanted = self._ledger.unwanted(key)
        if needed and not older and not self._core.state.unwanted(*self._stream.id, part.assignment):
            self._ledger.rate(self._stream.id, part, max(1, len(known.manifest.groups)))
            self._stream.arriving.begin(part, known.manifest, known.plan)
            return
        self._stream.arriving.drop(part)
        if needed or unwanted:  # also on a new stream, for `Unwanted` may have been lost with the old one
            self._ledger.stop_push(self._stream, part.seq)
        self._say_stored(part)
        self._deliver()  # the push may have become complete on the previous stream, after that had ended

    async def _scan(self, part: m.PartHeader, assembly: Assembly) -> None:
        """Check a large part on another thread, then store it."""
        (found,) = await asyncio.gather(asyncio.to_thread(assembly.finish), return_exceptions=True)

        def finish() -> list[Payload]:
            if isinstance(found, BaseException):
                raise found
            return found

        try:
            self._store(part, assembly.checksum, finish)
        except Refused as error:  # end the stream here, because no caller awaits a scan
            self._stream.outbox.end(error.refusal, final=error.refusal.reason is Reason.FENCED)

    def _store(self, part: m.PartHeader, checksum: int, finish: Callable[[], list[Payload]]) -> None:
        """Store a part whose bytes have all arrived, or refuse its push if the part is invalid.

        Args:
            part: header of the part.
            checksum: crc32c of its bytes.
            finish: returns the decoded payloads, or raises Refused if they are invalid.
        """
        if part.plan != self._reported.plan.number:  # a new plan has come into force during the scan
            self._deliver()
            return
        try:
            payloads = finish()
            self._report_rates(part)
        except Refused as error:
            self._refuse(part.seq, error)
            return
        if self._ledger.store(self._stream.id, part, checksum, payloads):
            self._deliver()
        self._say_stored(part)

    def _report_rates(self, part: m.PartHeader) -> None:
        """Report the learning rates of a push to control, with its first part, where scripts choose them.
        Raises Refused."""
        key = self._key(part.seq)
        rates = self._ledger.rates(key)
        if not self._ledger.begun(key) and (rates or self._conductor.core.state.rules.script):
            self._conductor.happen(
                e.RatesReceived(
                    *self._stream.id, seq=part.seq, assignment=part.assignment, learning_rates=rates
                )
            )

    def _say_stored(self, part: m.PartHeader) -> None:
        """Tell the worker that a part is stored, if the plan limits the number of unstored parts."""
        if self._reported.plan.credit:
            self._stream.outbox.send(m.Stored(seq=part.seq, parts=(part.part,)))

    def committed(self, commit: m.Commit) -> None:
        """Take the commit of a push, which is decided once all of its parts are stored. An invalid commit
        refuses the push.

        Raises:
            Refused: the worker is not a member, so the stream cannot continue.
        """
        pushes_parts = self._core.mode.pushes_parts
        try:
            if self._ledger.is_closed(self._key(commit.seq)):  # a repeated commit, which is not checked again
                self._repeat(commit)
                return
            if (commit.exchanged is None) != pushes_parts:
                raise Refused(refusals.not_of_mode(self._stream.worker, commit.seq, coded=not pushes_parts))
            if commit.loss is not None and not math.isfinite(commit.loss):
                raise self._not(commit, Reason.NON_FINITE, "loss", "a finite number", commit.loss)
            if commit.parts and (commit.exchanged is not None or not commit.samples):
                limit = "0, because the push has no samples or packets were exchanged"
                raise self._not(commit, Reason.TENSOR, "parts", limit, commit.parts)
            if commit.samples and not commit.parts and commit.exchanged is None:
                raise self._not(commit, Reason.TENSOR, "parts", "at least 1, because the push has samples", 0)
            self._ledger.commit(self._stream.id, commit)
        except Refused as error:
            if error.refusal.reason in NO_MEMBER:
                raise
            self._refuse(commit.seq, error)
            return
        self._deliver()

    def _repeat(self, commit: m.Commit) -> None:
        """Send the outcome of a closed push once more. Raises Refused for an abandoned push."""
        refusal = self._ledger.refusal(self._key(commit.seq))
        member = self._core.state.roster.get(self._stream.id)
        if refusal is not None:
            decision = m.Decision.REFUSED
            self._stream.outbox.send(m.Outcome(seq=commit.seq, decision=decision, refusal=refusal))
            return
        # Control knows no abandoned push, so this commit is out of sequence.
        if member is not None and commit.seq > member.last_seq:
            expected = self._ledger.through(self._stream.id) + 1
            raise Refused(refusals.sequence(self._stream.worker, commit.seq, expected))
        self._decide(commit)

    def _not(self, commit: m.Commit, reason: Reason, field: str, limit: str, value: object) -> Refused:
        """Return the exception that refuses a field of a commit."""
        where = f"push {commit.seq} {field}"
        return refused(reason, worker=self._stream.worker, field=where, limit=limit, value=str(value))

    def abandoned(self, abandon: m.Abandon) -> None:
        """Drop a push that the worker has abandoned, and decide on later pushes that waited for it.

        Raises:
            Refused: the worker is not a member, so the stream cannot continue.
        """
        self._stream.arriving.drop_push(abandon.seq)
        if not self._ledger.is_closed(self._key(abandon.seq)):
            self._ledger.abandon(self._key(abandon.seq))
            self._deliver()

    def _deliver(self) -> None:
        """Have control decide on this member's complete pushes, in order of seq."""
        while self._stream.outbox.ended_with is None:
            try:
                complete = self._ledger.next(self._stream.id, self._core.state.plan)
            except Refused as error:  # the stored parts differ from the committed ones
                seq = min(self._ledger.open(self._stream.id))
                self._ledger.start_over(self._key(seq))
                self._refuse(seq, error, again=True)
                continue
            if complete is None:
                return
            commit, parts = complete
            unwanted = self._ledger.unwanted(self._key(commit.seq))
            try:
                if not unwanted:
                    self._check_parts(commit, parts)
                elif not self._core.state.unwanted(*self._stream.id, commit.assignment):
                    # The member was assigned these samples again, so its push counts after all.
                    self._ledger.start_over(self._key(commit.seq))
                    again = refusals.given_up(self._stream.worker, commit.seq)
                    self._refuse(commit.seq, Refused(again), again=True)
                    continue
                self._decide(commit)
            except Refused as error:
                # Not refused for good: the worker may become a member again and commit once more.
                if error.refusal.reason in NO_MEMBER:
                    raise
                self._refuse(commit.seq, error)

    def _check_parts(self, commit: m.Commit, parts: frozenset[int]) -> None:
        """Raise Refused if the parts of a push are not those that its assignment requires."""
        member = self._core.state.roster.members.get(self._stream.worker)
        work = member.work if member is not None else None
        if (
            not commit.parts
            or commit.plan != self._core.state.plan
            or work is None
            or work.id != commit.assignment
        ):
            return
        plan, assigned = self._reported.plan, work.assignment
        substituted = frozenset(self._ledger.asked_parts(work.id))
        expected = substituted or plan.slice(assigned.slice, max(1, assigned.slices))
        if parts != expected and (substituted or len(parts) != len(plan.parts)):
            raise Refused(
                refusals.parts(self._stream.worker, commit.seq, len(parts), len(expected), assigned)
            )

    def _refuse(self, seq: int, error: Refused, part: int | None = None, *, again: bool = False) -> None:
        """Refuse a push, or one damaged part of it, and tell the worker.

        Args:
            seq: seq of the push.
            error: the refusal.
            part: number of the part at fault; None for the whole push. The worker sends a damaged part again.
            again: whether the worker sends the whole push again. Otherwise the ledger refuses the push for
                good.
        """
        damaged = error.refusal.reason in DAMAGED
        if not again and not (part is not None and damaged):
            part = None
            # A closed push keeps its state: if accepted, it may still be waiting to be applied.
            if not self._ledger.is_closed(self._key(seq)):
                self._ledger.refuse(self._key(seq), error.refusal)
        self._metrics.push_refused(error.refusal.reason)
        log.warning("refused push %d: %s", seq, error)
        decision = m.Decision.REFUSED
        self._stream.outbox.send(m.Outcome(seq=seq, decision=decision, refusal=error.refusal, part=part))

    def _decide(self, commit: m.Commit) -> None:
        """Have control decide on a push, send the outcome, and perform the actions that follow. Raises
        Refused."""
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
            batch=commit.batch,
            batches=commit.batches,
            steps=commit.steps,
            learning_rates=self._ledger.rates(self._key(commit.seq)),
            local_rates=commit.local_rates[:MAX_LOCAL_RATES],
        )
        result = self._conductor.push(event)
        outcome = result.reply.outcome
        counted = self._ledger.counted_parts(event.key)
        if counted and outcome.decision is m.Decision.REFUSED:
            outcome = replace(outcome, counted=tuple(sorted(counted)))
        self._stream.outbox.send(outcome)
        self._conductor.perform(result.actions)
