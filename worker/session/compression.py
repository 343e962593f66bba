"""What a worker pushes of its gradients: all of every tensor, or where members of a round divide the tensors
among them, its slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...compressors import Compressed, Ledger, ModelCompressor, TensorSpec
from ...proto.messages import Assignment
from ...proto.shares import share


class Compression:
    """A `ModelCompressor` that follows the assignments."""

    def __init__(self, specs: Sequence[TensorSpec], compressor: ModelCompressor) -> None:
        self._specs = specs
        self._compressor = compressor
        self._slice = 0, 0  # number and count; 0 of 0 is all

    @property
    def ledger(self) -> Ledger:
        return self._compressor.ledger

    def compress(
        self,
        assignment: Assignment,
        gradients: Sequence[torch.Tensor],
        samples: int,
        *,
        rank: int,
        version: int,
        step: int,
        leaving: bool,
    ) -> tuple[Compressed, tuple[int, int]]:
        """Mean gradients, of whole tensors, for the slice that the assignment names.

        Args:
            rank, version, step: as for `ModelCompressor`.
            leaving: everything that is owed goes too, of whole tensors, as float32.

        Returns:
            What to send, and slice and slices for the header of the push.

        Raises:
            NonFiniteGradient: the ledger is as it was.
        """
        self._divide(assignment)
        compressor, (slice, slices) = self._compressor, self._slice
        # Members of a group compute the same and compress different slices.
        compressor.rank = rank * max(1, slices) + slice
        before = self.ledger.begin(undoable=slices > 1 or assignment.stragglers > 0)
        if leaving:
            payloads = compressor.flush(gradients, workers=assignment.world)
            return Compressed(payloads, self.ledger.ranges(), self.ledger.slices, before), (0, 0)
        payloads = compressor.compress(
            *(gradients, samples),
            version=version,
            step=step,
            epoch=assignment.progress,
            workers=assignment.world,
        )
        sent = Compressed(payloads, compressor.ranges, self.ledger.slices, before)
        return sent, (slice, slices) if payloads else (0, 0)

    def _divide(self, assignment: Assignment) -> None:
        given = assignment.slice, assignment.slices
        if given == self._slice:
            return
        self._slice = given
        slice, slices = given
        parts = [share(spec.elements, slice, slices) for spec in self._specs] if slices > 1 else None
        self._compressor.divide(parts, max(1, slices))
