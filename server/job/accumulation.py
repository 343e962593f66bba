"""Gradient accumulation: how many batches a script's optimizer step takes.

A script that adds up the gradients of several batches calls `optimizer.step()` only after the last of them.
Versions, rounds, clocks and local steps count these calls. A script need not declare the number: a worker
whose assignment has no batches left asks for more (`More`), and the mode extends the assignment. The number
is then learned, so that later assignments have as many batches at once. Steps that the end of an epoch cuts
short teach nothing. A number that is too large does no harm: batches that a push does not cover are assigned
anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...common.stored import stored
from ...proto.refusal import Refused
from . import refusals


@stored("accumulation")
@dataclass
class Accumulation:
    """The number of batches that an optimizer step is expected to take."""

    batches: int = 1  # the number; 1 without accumulation
    declared: int = 0  # number that a worker has declared; 0 if none has
    declared_by: str = ""  # worker that was the first to declare it; empty if none has
    _last: int = 0  # number of batches that the last step took, if it was another one; otherwise 0

    def declare(self, worker: str, batches: int) -> None:
        """Note the number that a worker declares; 0 if it declares none.

        Raises:
            Refused: another worker has declared another number.
        """
        if not batches:
            return
        if self.declared and batches != self.declared:
            raise Refused(refusals.accumulation(worker, batches, self.declared_by, self.declared))
        if not self.declared:
            self.batches = self.declared = batches
            self.declared_by = worker

    def learn(self, took: int, given: int) -> None:
        """Learn from a step.

        Another number is believed the second time in a row: a script may pass over a batch, or add the
        gradients of an earlier epoch to a step. The end of an epoch, which cuts assignments, teaches nothing.
        """
        if took == self.batches:
            self._last = 0
        elif took > self.batches or took < given:
            if took == self._last:
                self.batches = took
            self._last = took if took != self.batches else 0
