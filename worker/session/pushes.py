"""The life of a push at the worker, from its first gradient until its outcome has taken effect here.

`server/streams/push_ledger` is the other end of the same life. The name of a push is (worker, incarnation,
seq). `seq` grows, and a new process is another incarnation, so no name is used twice.

    | state     | meaning                                                 | residual ledger     | next       |
    |-----------|---------------------------------------------------------|---------------------|------------|
    | open      | Gradients are added; each complete part leaves at once. | as before the push  | committed, |
    |           |                                                         |                     | abandoned, |
    |           |                                                         |                     | refused    |
    | committed | Nothing more comes. The commit follows the parts, and   | what was not sent   | accepted,  |
    |           | the outcome is not known.                               | is the residual     | stale,     |
    |           |                                                         |                     | redundant, |
    |           |                                                         |                     | refused    |
    | accepted  | A version will contain the push, whatever happens here. | `keep`              | applied    |
    | applied   | The replica has that version.                           |                     |            |
    | stale     | The push came too late.                                 | `put_back`: leaves  |            |
    |           |                                                         | with the next push  |            |
    | redundant | Another worker has pushed the same gradient.            | `forget`: as if it  |            |
    |           |                                                         | had not been added  |            |
    | abandoned | A gradient is not finite, or the push does not hold the | as before the push  |            |
    |           | step's gradients.                                       |                     |            |
    | refused   | The server cannot use the push. The worker ends.        |                     |            |

Parts of a stale or redundant push that count all the same are neither put back nor forgotten. Any number of
pushes may be committed. Their outcomes may come in any order and twice; the second one is ignored.

Damage in transit is no outcome: the same bytes are sent again, at most `MAX_RESENDS` times in a row.

If the stream breaks, `outgoing` holds the messages of every open and committed push. On the next stream the
worker sends the parts that the server lacks, then the commit if there is one.

If the worker dies before the commit, even after the last part, the push counts nowhere. The stored parts have
a name that no process can commit any more; the server drops them with the member, and gives its samples to
others. Only with `--overlap both` some parts may be final by then. They count, and a substitute pushes the
others.

If the worker dies after the commit, the push counts if the server had all of its parts. Otherwise its samples
are given to others, too. A worker saves its state only while no push is open or committed (`saving`), so a
restored residual never holds half of a push.

Must not happen:

- The ledger changes before the commit of a push, or twice by one push.
- A push is committed while an earlier one is open.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ...compressors import Compressed, Payload, PushTerms, Step, described
from ...proto import messages as m
from ...proto.refusal import Reason, Refused, sentence
from ...proto.transfer import digest, part_header
from ..metrics import WorkerMetrics
from .auto import Auto
from .compression import Compression
from .connection import Connection

log = logging.getLogger("gradwire.worker")

MAX_RESENDS = 3  # in a row, of pushes that arrived damaged or whose parts the server had discarded


class Push:
    """One push. `Pushes.begin` opens it; gradients are added to it in any order.

    Attributes:
        samples: number of samples behind the mean gradients; 0 without gradients.
        compressed: the payloads, and the state that the ledger needs when the outcome arrives; none before
            the commit.
    """

    def __init__(
        self,
        seq: int,
        assignment: m.Assignment,
        samples: int,
        of: Pushes,
        step: Step | None,
        learning_rates: Sequence[float],
    ) -> None:
        self.seq, self.assignment, self.samples = seq, assignment, samples
        self.plan = None if step is None else step.plan
        self.checksums: dict[int, int] = {}
        self.sent_bytes = 0
        self.compressed = Compressed()
        self._of, self._step = of, step
        # One rate stands for those of all groups.
        self._learning_rates = tuple(learning_rates[:1] if len({*learning_rates}) == 1 else learning_rates)

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add the gradient of a tensor, and send the parts that it completes. Add each tensor once.

        A gradient must not change before the push ends; None stands for a tensor without one. Raises
        NonFiniteGradient if it has an infinity or a NaN: the push can only be abandoned.
        """
        assert self._step is not None
        metrics, auto = self._of.metrics, self._of.auto
        with metrics.during("compressing"):
            began = 0.0 if auto is None else auto.now()
            done = self._step.add(index, gradient)
            if done and auto is not None:
                auto.compressed(index, auto.now() - began, done)
        if done:
            with metrics.during("pushing"):
                for part, payloads in done.items():
                    self._send(part, payloads)

    def cancel_remaining(self) -> None:
        """Send the remaining parts empty, where parts that were sent cannot be taken back.

        The gradients of the remaining parts stay in the residual.
        """
        assert self._step is not None
        for part in self._step.cancel_remaining():
            self._send(part, ())

    @property
    def holds_payloads(self) -> bool:
        """True if payloads were sent. False if the compressor's delay keeps all gradients in the residual."""
        return self._step is not None and any(self._step.sent.values())

    def _send(self, part: int, payloads: Sequence[Payload]) -> None:
        assert self.plan is not None
        self.sent_bytes += sum(payload.data.nbytes for payload in payloads)
        numbers = (self.seq, self.assignment.id, self.plan.number, part)
        header = part_header(*numbers, payloads, self._learning_rates)
        self.checksums[part] = self._of.connection.queue_part(header, payloads)

    def finish(self, slices: int, *, undoable: bool) -> None:
        """Write the step to the residual ledger, and log its spikes, which were sent whole as float32.

        Args:
            slices: number of slices by which the ledger scales its residual.
            undoable: True to keep the state that undoes the step if the push turns out to be redundant.
        """
        step, plan = self._step, self.plan
        if step is None or plan is None:
            return
        self._step = None
        before = step.finish(undoable=undoable)
        if step.spikes:
            self._of.metrics.spikes.inc(len(step.spikes))
            where = self._of.connection.worker, self.assignment.version
            log.warning("worker %s, version %d: %s", *where, described(step.spikes))
        payloads, ranges = list[Payload](), list[tuple[int, int]]()
        for part, each in step.sent.items():
            at = plan.parts[part].start
            for payload in each:
                payloads.append(payload)
                ranges.append((at, at + payload.elements))
                at += payload.elements
        self.compressed = Compressed(payloads, ranges, slices, before, step.bases)


class Pushes:
    """The open push and the committed ones. Its length is the number of the committed ones."""

    def __init__(
        self, connection: Connection, compression: Compression, metrics: WorkerMetrics, auto: Auto | None
    ) -> None:
        """auto: decides between compressing and float32, and measures both; None for a fixed compressor."""
        self.connection, self.metrics, self.auto = connection, metrics, auto
        self.seq = self.last_accepted = 0
        self._compression = compression
        self._open: Push | None = None
        self._committed: dict[int, Push] = {}  # by seq
        self._resends = 0

    def __len__(self) -> int:
        return len(self._committed)

    def begin(
        self,
        assignment: m.Assignment,
        terms: PushTerms,
        learning_rates: Sequence[float] = (),
        *,
        leaving: bool = False,
    ) -> Push:
        """Open a push of mean gradients; while leaving, it includes the whole residual.

        learning_rates: learning rates of the server's step, by parameter group of the manifest, if the owner
        has a scheduler, equal at all workers at a version; empty to use the job's schedule.
        """
        if self.auto is not None:
            self.auto.begin(terms.version if terms.step is None else terms.step)
        step = self._compression.begin(assignment, terms, leaving=leaving)
        if leaving:  # the rate limit was meant for fewer bytes
            self.connection.hurry()
        self.seq += 1
        self._open = Push(self.seq, assignment, terms.samples, self, step, learning_rates)
        return self._open

    def empty(self, assignment: m.Assignment) -> Push:
        """Return a push without gradients, to be committed at once."""
        self.seq += 1
        return Push(self.seq, assignment, 0, self, None, ())

    def commit(self, push: Push, **answer: Any) -> None:
        """Declare a push complete, after all of its gradients were added. answer: the other fields of
        `Commit`."""
        self._open = None
        assignment, checksums = push.assignment, push.checksums
        push.finish(self._compression.ledger.slices, undoable=self._compression.undoable(assignment))
        self._committed[push.seq] = push
        commit = m.Commit(
            seq=push.seq,
            assignment=assignment.id,
            base_version=assignment.version,
            parts=len(checksums),
            digest=digest(checksums),
            plan=push.plan.number if push.plan is not None and checksums else 0,
            **answer,
        )
        self.connection.queue_commit(commit)

    def abandon(self, push: Push) -> None:
        """Give up an open push, and tell the server; the residual is as before `begin`."""
        self._open = None
        self.connection.abandon(push.seq)

    def settle(self, outcome: m.Outcome) -> None:
        """Give a push its outcome, by the table at the head of this file.

        A part may be refused while its push is open; only damage can be repaired then. Raises Refused if the
        push was refused for a reason that no rule covers, or damaged too often.
        """
        seq, refusal = outcome.seq, outcome.refusal
        push = self._committed.get(seq)
        if push is None and (refusal is None or self._open is None or seq != self._open.seq):
            return  # settled before, or abandoned
        if refusal is None:
            assert push is not None
            self._committed.pop(seq)
            self.last_accepted = max(seq, self.last_accepted)
            self._resends = 0
            self.metrics.pushes.labels("accepted").inc()
            payloads = push.compressed.payloads
            self.metrics.raw_up.inc(sum(each.elements for each in payloads) * 4)
            self.metrics.payload_up.inc(sum(int(each.data.size) for each in payloads))
            self._compression.ledger.keep(push.compressed)
            return
        if push is not None:
            self.metrics.pushes.labels("refused").inc()
            self.metrics.refusals.labels(refusal.reason.label).inc()
        match refusal.reason:
            case Reason.STALE if push is not None and push.compressed.payloads:
                log.info("push %d arrived too late; its gradient leaves with the next push", seq)
                self._compression.ledger.put_back(push.compressed, _counted(push, outcome))
            case Reason.STALE if push is not None:
                log.info("push %d arrived too late, and was empty", seq)
            case Reason.REDUNDANT if push is not None:
                log.info("push %d was not needed: another worker has pushed its gradient", seq)
                self._compression.ledger.forget(push.compressed, _counted(push, outcome))
            case Reason.CHECKSUM | Reason.CHUNK if self._resends < MAX_RESENDS:  # damaged in transit
                log.warning("push %d was refused: %s", seq, sentence(refusal))
                self._resends += 1
                self.connection.resend(seq, outcome.part)
                return
            case _:
                log.warning("push %d was refused: %s", seq, sentence(refusal))
                raise Refused(refusal)
        self._committed.pop(seq)
        self._resends = 0
        self.connection.settle(seq)


def _counted(push: Push, outcome: m.Outcome) -> list[tuple[int, int]]:
    """Return the ranges of the parts of a refused push that count all the same."""
    if push.plan is None:
        return []
    parts = [push.plan.parts[part] for part in outcome.counted]
    return [(part.start, part.end) for part in parts]
