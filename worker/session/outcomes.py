"""Committed pushes whose outcome has not arrived, and the one rule for each outcome.

| outcome | residual ledger | then |
|---|---|---|
| accepted | leaves the push out of the residual (`keep`) | forgotten |
| stale: too late | puts it back into the residual, for the next push (`put_back`) | forgotten |
| redundant: others have pushed the same | takes the step back (`forget`) | forgotten |
| damaged on its way | – | sent again as the same bytes, at most `MAX_RESENDS` times |
| anything else | – | `Refused` ends the worker |

Parts that count all the same are neither put back nor forgotten. Outcomes arrive in any order, and may arrive
more than once: one of a push that is forgotten is ignored. A part may also be refused while its push is being
made; only damage can be mended then.
"""

from __future__ import annotations

import logging

from ...compressors import Compressed, Plan
from ...proto import messages as m
from ...proto.refusal import Reason, Refused, sentence
from ..metrics import WorkerMetrics
from .compression import Compression
from .connection import Connection

log = logging.getLogger("gradwire.worker")

DAMAGE = (Reason.CHECKSUM, Reason.CHUNK)
MAX_RESENDS = 3  # of a push that arrives damaged, or that the server had done without


class OpenPushes:
    """Any number of pushes, by their number.

    Attributes:
        making: seq of a push that is neither committed nor abandoned; None if there is none.
        last_accepted: seq of the last push that counts; 0 before the first.
    """

    def __init__(self, connection: Connection, compression: Compression, metrics: WorkerMetrics) -> None:
        self.making: int | None = None
        self.last_accepted = 0
        self._connection = connection
        self._compression = compression
        self._metrics = metrics
        self._open: dict[int, Compressed] = {}  # by seq
        self._plans: dict[int, Plan] = {}  # by seq, of those that have parts
        self._resends = 0

    def __len__(self) -> int:
        return len(self._open)

    def commit(self, commit: m.Commit, sent: Compressed, plan: Plan | None) -> None:
        """Send a commit. sent: what the ledger gave. plan: that its parts are of; None if it has none."""
        self._open[commit.seq] = sent
        if plan is not None:
            self._plans[commit.seq] = plan
        self._connection.commit(commit)

    def settle(self, outcome: m.Outcome) -> None:
        """Take in the outcome of a push; see the head of this file.

        Raises:
            Refused: for a reason that a worker does not survive.
        """
        sent = self._open.get(outcome.seq)
        if sent is None:
            refusal = outcome.refusal
            if outcome.seq == self.making and refusal is not None:  # only damage can be mended
                log.warning("push %d was refused: %s", outcome.seq, sentence(refusal))
                if refusal.reason not in DAMAGE or self._resends >= MAX_RESENDS:
                    raise Refused(refusal)
                self._resends += 1
                self._connection.resend(outcome.seq, outcome.part)
            return
        if outcome.decision is m.Decision.ACCEPTED:
            self._forget(outcome.seq)
            self.last_accepted = max(outcome.seq, self.last_accepted)
            self._resends = 0
            self._metrics.pushes.labels("accepted").inc()
            self._metrics.raw_up.inc(sum(payload.elements for payload in sent.payloads) * 4)
            self._compression.ledger.keep(sent)
            return
        assert outcome.refusal is not None
        reason = outcome.refusal.reason
        parts = [self._plans[outcome.seq].parts[part] for part in outcome.counted]
        counted = [(part.start, part.end) for part in parts]
        self._metrics.pushes.labels("refused").inc()
        self._metrics.refusals.labels(reason.label).inc()
        match reason:
            case Reason.STALE if sent.payloads:
                log.info("push %d came too late; its gradient goes out with the next push", outcome.seq)
                self._compression.ledger.put_back(sent, counted)
            case Reason.STALE:
                log.info("push %d came too late, and had nothing in it", outcome.seq)
            case Reason.REDUNDANT:
                log.info("push %d was not needed: others have pushed its gradient", outcome.seq)
                self._compression.ledger.forget(sent, counted)
            case Reason.CHECKSUM | Reason.CHUNK if self._resends < MAX_RESENDS:  # damaged on its way
                log.warning("push %d was refused: %s", outcome.seq, sentence(outcome.refusal))
                self._resends += 1
                self._connection.resend(outcome.seq, outcome.part)
                return
            case _:
                log.warning("push %d was refused: %s", outcome.seq, sentence(outcome.refusal))
                raise Refused(outcome.refusal)
        self._connection.settle(outcome.seq)
        self._resends = 0
        self._forget(outcome.seq)

    def _forget(self, seq: int) -> None:
        del self._open[seq]
        self._plans.pop(seq, None)
