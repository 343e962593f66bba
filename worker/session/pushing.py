"""A push before its commit: gradients are added in any order, and complete parts leave at once."""

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
    """A push before its commit, from `Session.begin_step` to `Session.commit` or `Session.abandon`.

    Attributes:
        seq: number of the push.
        assignment: assignment that the push answers.
        samples: number of samples behind the mean gradients.
        plan: plan that divides the gradients into parts.
        checksums: CRC-32C of the bytes of each part that was sent, by number of the part.
        sent_bytes: bytes of the payloads that were sent.
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
        """
        Args:
            connection: sends the parts.
            metrics: measures compressing and pushing.
            seq: number of the push.
            assignment: assignment that the push answers.
            samples: number of samples behind the mean gradients.
            compressing: compression of the step.
            auto: decides between compressing and float32, and measures both; None for a fixed compressor.
            learning_rates: learning rates of the server's step, by parameter group; empty to use the job's
                schedule.
        """
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
        # One rate stands for those of all groups.
        self._learning_rates = tuple(learning_rates[:1] if len({*learning_rates}) == 1 else learning_rates)

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add the gradient of a tensor, and send the parts that it completes. Add each tensor once.

        Args:
            index: index of the tensor in the manifest.
            gradient: gradient; None if the tensor has none. It must not change before the push ends.

        Raises:
            NonFiniteGradient: the gradient has an infinity or a NaN; the push can only be abandoned.
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
        """Send a part, and note its checksum and size."""
        self.sent_bytes += sum(payload.data.nbytes for payload in payloads)
        numbers = (self.seq, self.assignment.id, self.plan.number, part)
        header = part_header(*numbers, payloads, self._learning_rates)
        self.checksums[part] = self._connection.part(header, payloads)

    def cancel_remaining(self) -> None:
        """Send the remaining parts empty, where parts that were sent cannot be taken back.

        The gradients of the remaining parts stay in the residual.
        """
        for part in self._compressing.cancel_remaining():
            self._send(part, ())

    def commit(self, slices: int, *, undoable: bool) -> Compressed:
        """Commit the step to the residual ledger, and log its spikes, which were sent whole as float32.

        Args:
            slices: number of slices by which the ledger scales its residual.
            undoable: whether to keep the state that undoes the step if the push turns out to be redundant.

        Returns:
            The payloads that were sent, with the state that the ledger needs to undo the step.
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
