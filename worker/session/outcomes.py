"""Committed pushes whose outcome has not arrived, and the one rule for each outcome.

| outcome | residual ledger | then |
|---|---|---|
| accepted | leaves the push out of the residual (`keep`) | forgotten |
| stale: too late | puts it back into the residual, for the next push (`put_back`) | forgotten |
| redundant: another worker has pushed the same | undoes the step (`forget`) | forgotten |
| damaged in transit | – | sent again as the same bytes, at most `MAX_RESENDS` times |
| any other | – | `Refused` ends the worker |

Parts of a refused push that count all the same are neither put back nor undone. Outcomes arrive in any order,
and may arrive more than once: the outcome of a forgotten push is ignored. A part may also be refused before
its push is committed; only damage can be repaired then.
"""

from __future__ import annotations

import logging

from ...common.parts import Plan
from ...compressors import Compressed
from ...proto import messages as m
from ...proto.refusal import Reason, Refused, sentence
from ..metrics import WorkerMetrics
from .compression import Compression
from .connection import Connection

log = logging.getLogger("gradwire.worker")

DAMAGE = (Reason.CHECKSUM, Reason.CHUNK)
MAX_RESENDS = 3  # in a row, of pushes that arrived damaged or whose parts the server had discarded


class OpenPushes:
    """The pushes whose outcome has not arrived, by seq. Its length is their number.

    Attributes:
        uncommitted: seq of the push that is neither committed nor abandoned; None if there is none.
        last_accepted: seq of the last accepted push; 0 before the first.
    """

    def __init__(self, connection: Connection, compression: Compression, metrics: WorkerMetrics) -> None:
        """
        Args:
            connection: sends commits, and sends damaged pushes again.
            compression: holds the residual ledger, to which outcomes are applied.
            metrics: counts accepted and refused pushes.
        """
        self.uncommitted: int | None = None
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
        """Send a commit, and keep the push until its outcome arrives.

        Args:
            commit: commit to send.
            sent: payloads of the push, with the state that the ledger needs to undo it.
            plan: plan of the push's parts; None if the push has no parts.
        """
        self._open[commit.seq] = sent
        if plan is not None:
            self._plans[commit.seq] = plan
        self._connection.commit(commit)

    def settle(self, outcome: m.Outcome) -> None:
        """Apply the outcome of a push to the ledger, and forget the push or send it again.

        1. The push is not committed: a part was refused. Send it again if it was damaged; raise otherwise.
        2. The push is forgotten already: ignore the outcome.
        3. Accepted: leave the push out of the residual.
        4. Stale: put it back into the residual.
        5. Redundant: undo the step.
        6. Damaged: send the push again.

        Args:
            outcome: outcome that has arrived.

        Raises:
            Refused: the push was refused for another reason, or damaged too often; the worker must end.
        """
        sent = self._open.get(outcome.seq)
        if sent is None:
            refusal = outcome.refusal
            if outcome.seq == self.uncommitted and refusal is not None:
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
                log.info("push %d arrived too late; its gradient leaves with the next push", outcome.seq)
                self._compression.ledger.put_back(sent, counted)
            case Reason.STALE:
                log.info("push %d arrived too late, and was empty", outcome.seq)
            case Reason.REDUNDANT:
                log.info("push %d was not needed: another worker has pushed its gradient", outcome.seq)
                self._compression.ledger.forget(sent, counted)
            case Reason.CHECKSUM | Reason.CHUNK if self._resends < MAX_RESENDS:  # damaged in transit
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
