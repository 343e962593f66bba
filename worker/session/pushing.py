"""A push in the making: gradients go in, in any order, and parts leave as soon as they are complete."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...compressors import Compressed, Payload, Step, described
from ...proto import messages as m
from ...proto.transfer import part_header
from ..metrics import WorkerMetrics
from .auto import Auto
from .connection import Connection

log = logging.getLogger("gradwire.worker")


class Pushing:
    """One step of one session. `Session.commit` or `Session.abandon` ends it.

    Attributes:
        samples: behind the mean gradients.
        plan: that its parts are of.
        checksums: crc32c of the bytes of each part that was sent, by part.
        sent_bytes: of their payloads.
    """

    def __init__(
        self,
        connection: Connection,
        metrics: WorkerMetrics,
        seq: int,
        assignment: m.Assignment,
        samples: int,
        compressing: Step,
        auto: Auto | None = None,
        learning_rates: Sequence[float] = (),
    ) -> None:
        """learning_rates: as in `Session.begin_step`. The rest is as there."""
        self.seq = seq
        self.assignment = assignment
        self.samples = samples
        self.plan = compressing.plan
        self.checksums: dict[int, int] = {}
        self.sent_bytes = 0
        self._connection = connection
        self._metrics = metrics
        self._compressing = compressing
        self._auto = auto
        self._learning_rates = tuple(learning_rates)

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Take the gradient of a tensor, None if it does not exist. Each comes once; nobody may write to it
        before the push ends.

        Raises:
            NonFiniteGradient: the step can only be abandoned.
        """
        with self._metrics.during("compressing"):
            began = 0.0 if self._auto is None else self._auto.now()
            done = self._compressing.add(index, gradient)
            if done and self._auto is not None:
                self._auto.compressed(index, self._auto.now() - began, done)
        if not done:
            return
        with self._metrics.during("pushing"):
            for part, payloads in done.items():
                self._send(part, payloads)

    def _send(self, part: int, payloads: Sequence[Payload]) -> None:
        self.sent_bytes += sum(payload.data.nbytes for payload in payloads)
        numbers = (self.seq, self.assignment.id, self.plan.number, part)
        header = part_header(*numbers, payloads, self._learning_rates)
        self.checksums[part] = self._connection.part(header, payloads)

    def cancel_remaining(self) -> None:
        """Send the remaining parts empty, because the others cannot be taken back. The gradients of the
        remaining parts stay in the ledger."""
        for part in self._compressing.cancel_remaining():
            self._send(part, ())

    def commit(self, slices: int, *, undoable: bool) -> Compressed:
        """Commit the step to the ledger, and log spikes, which were sent whole as float32.

        slices: the ledger's.
        """
        before = self._compressing.commit(undoable=undoable)
        if spikes := self._compressing.spikes:
            self._metrics.spikes.inc(len(spikes))
            where = self._connection.worker, self.assignment.version
            log.warning("worker %s, version %d: %s", *where, described(spikes))
        sent = self._compressing.sent
        payloads = [payload for part in sent.values() for payload in part]
        ranges: list[tuple[int, int]] = []
        for part, each in sent.items():
            at = self.plan.parts[part].start
            for payload in each:
                ranges.append((at, at + payload.elements))
                at += payload.elements
        return Compressed(payloads, ranges, slices, before)
