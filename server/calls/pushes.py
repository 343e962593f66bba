"""Parts, commits and abandons of one worker's stream. The push ledger (`streams/push_ledger`) says whether a
part is needed and which push is due; control decides on that push, and the worker is answered."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from ...compressors import Payload
from ...proto import messages as m
from ...proto.refusal import Reason, Refusal, Refused, refusal, sentence
from ...proto.transfer import Assembly
from ..conductor import Conductor
from ..job import events as e
from ..job import refusals
from ..plans.rate_control import PartArrival
from ..streams.outbox import WorkerStream
from ..streams.push_record import Due

log = logging.getLogger("gradwire.server")

# Largest part that is checked on the event loop, because a thread would cost more.
SMALL_PART_BYTES = 1 << 17
SCANS_AT_ONCE = 4  # Most parts of one worker that are checked at a time.
DAMAGED = (Reason.CHECKSUM, Reason.CHUNK)  # The bytes changed in transit, and the worker sends them again.
# Reasons that mean that the worker is not a member, so none of its pushes is decided.
NO_MEMBER = (Reason.FENCED, Reason.NOT_A_MEMBER)


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
        does not end the stream. Raises Refused if the message belongs to no part, so the stream cannot
        continue."""
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
            self._refuse(part.seq, error.refusal, part.part)
            return
        if complete is None:
            return
        size, unpacked, waited = self._stream.arriving.since()
        self._conductor.arrived(PartArrival(self._stream.worker, size, time.monotonic(), waited), unpacked)
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
        """Begin to receive a part, or ignore its chunks if it is not needed. Raises Refused for an invalid
        header."""
        if not self._ledger.arrive(self._stream, part):
            self._say_stored(part)
            # The push may have become complete on the previous stream, after that had ended.
            self._answer(self._ledger.next(self._stream))

    async def _scan(self, part: m.PartHeader, assembly: Assembly) -> None:
        """Check a large part on another thread, then store it, or refuse its push if the part is invalid."""
        # An exception is not raised here but in `_store`, which ignores the part if the plan has changed.
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
            checksum: crc32c of its bytes.
            finish: returns the decoded payloads, or raises Refused if they are invalid.
        """
        if part.plan != self._reported.plan.number:  # a new plan has come into force during the scan
            self._answer(self._ledger.next(self._stream))
            return
        try:
            due = self._ledger.store(self._stream, part, checksum, finish())
        except Refused as error:
            self._refuse(part.seq, error.refusal)
            return
        self._answer(due)
        self._say_stored(part)

    def _say_stored(self, part: m.PartHeader) -> None:
        """Tell the worker that a part is stored, if the plan limits the number of unstored parts."""
        if self._reported.plan.credit:
            self._stream.outbox.send(m.Stored(seq=part.seq, parts=(part.part,)))

    def committed(self, commit: m.Commit) -> None:
        """Take the commit of a push, which is decided once all of its parts are stored. An invalid commit
        refuses the push. Raises Refused if the worker is not a member, so the stream cannot continue."""
        try:
            due = self._ledger.commit(self._stream, commit, self._fault(commit))
        except Refused as error:
            self._refuse(commit.seq, error.refusal)
            return
        self._answer(due)

    def _fault(self, commit: m.Commit) -> Refusal | None:
        """Return the refusal of a commit that no worker of this job sends; None for a valid one."""
        worker, pushes_parts = self._stream.worker, self._core.mode.pushes_parts
        if (commit.exchanged is None) != pushes_parts:
            return refusals.not_of_mode(worker, commit.seq, coded=not pushes_parts)
        reason, field, limit, value = Reason.TENSOR, "parts", "", str(commit.parts)
        if commit.loss is not None and not math.isfinite(commit.loss):
            reason, field, limit, value = Reason.NON_FINITE, "loss", "a finite number", str(commit.loss)
        elif commit.parts and (commit.exchanged is not None or not commit.samples):
            limit = "0, because the push has no samples or packets were exchanged"
        elif commit.samples and not commit.parts and commit.exchanged is None:
            limit = "at least 1, because the push has samples"
        if not limit:
            return None
        return refusal(reason, worker=worker, field=f"push {commit.seq} {field}", limit=limit, value=value)

    def abandoned(self, abandon: m.Abandon) -> None:
        """Drop a push that the worker has abandoned, and decide on later pushes that waited for it. Raises
        Refused if the worker is not a member, so the stream cannot continue."""
        self._stream.arriving.drop_push(abandon.seq)
        self._ledger.abandon(self._key(abandon.seq))
        self._answer(self._ledger.next(self._stream))

    def _answer(self, due: Due | None) -> None:
        """Answer the worker about each push that is due, in order of seq: have control decide, send the
        outcome, and perform the actions that follow. Raises Refused if the worker is not a member."""
        while due is not None:
            event = due.event
            if due.refusal is not None:
                self._tell(event.seq, due.refusal, repeated=due.repeated)
            else:
                try:
                    outcome, actions = self._conductor.push(event)
                    self._stream.outbox.send(outcome)
                    self._conductor.perform(actions)
                except Refused as error:
                    # Not refused for good: the worker may become a member again and commit once more.
                    if error.refusal.reason in NO_MEMBER:
                        raise
                    self._refuse(event.seq, error.refusal)
            due = self._ledger.next(self._stream)

    def _refuse(self, seq: int, why: Refusal, part: int | None = None) -> None:
        """Refuse a push, or one damaged part of it, which the worker sends again, and tell the worker. part:
        number of the part at fault; None for the whole push."""
        if part is None or why.reason not in DAMAGED:
            part = None
            self._ledger.refuse(self._key(seq), why)
        self._tell(seq, why, part)

    def _tell(self, seq: int, why: Refusal, part: int | None = None, *, repeated: bool = False) -> None:
        """Tell the worker of a refusal. repeated: the refusal was counted and logged before."""
        if not repeated:
            self._metrics.push_refused(why.reason)
            log.warning("refused push %d: %s", seq, sentence(why))
        decision = m.Decision.REFUSED
        self._stream.outbox.send(m.Outcome(seq=seq, decision=decision, refusal=why, part=part))
