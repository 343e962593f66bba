"""Compression as assignments ask for it: all parts of the model; a slice, where the members of a round divide
the parts among them; or the parts that a lost worker had not pushed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ...compressors import (
    CompressorSpec,
    LayerRule,
    Ledger,
    ModelCompressor,
    Step,
    TensorSpec,
    advice,
    suited,
)
from ...optim.steps import OptimizerOptions
from ...proto.messages import Assignment
from ...settings import JobTerms

log = logging.getLogger("gradwire.worker")


def compression_of(
    spec: CompressorSpec,
    *,
    auto: bool,
    optimizer: OptimizerOptions,
    local: bool,
    specs: Sequence[TensorSpec],
    rule: LayerRule,
    terms: JobTerms,
    rank: int,
) -> Compression:
    """Return the compression for a job, and log what the user should know about the choice.

    Args:
        spec: compressor that was asked for; one that does not suit the optimizer is adapted to it.
        auto: whether the compressor is left where it loses; then it is taken as it is.
        optimizer: options of the job's optimizer.
        local: whether workers take the optimizer's steps.
    """
    chosen = spec if auto else suited(spec, optimizer, local=local)
    if chosen != spec:
        log.info("compressor %s, because the server's optimizer is %s", chosen, type(optimizer).__name__)
    for line in advice(chosen, optimizer, local=local):
        log.warning("%s", line)
    compressor = ModelCompressor(specs, chosen, rule, terms.seed, rank)
    return Compression(compressor, in_parts=terms.overlap == "both")


class Compression:
    """A `ModelCompressor` that follows the assignments.

    Attributes:
        compressor: that one.
    """

    def __init__(self, compressor: ModelCompressor, *, in_parts: bool = False) -> None:
        """in_parts: whether another worker may push the rest of what this one has begun to."""
        self.compressor = compressor
        self._in_parts = in_parts
        self._slice = 0, 0  # number and count; 0 of 0 is all

    @property
    def ledger(self) -> Ledger:
        return self.compressor.ledger

    def image(self) -> dict[str, Any]:
        """Return what the next step depends on, as plain values and tensors."""
        return {"ledger": self.ledger.image(), "slice": self._slice}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Continue from an `image`."""
        self.ledger.restore(image["ledger"])
        self._slice = image["slice"]

    def begin(
        self, assignment: Assignment, samples: int, *, rank: int, version: int, step: int, leaving: bool
    ) -> Step:
        """Begin the step that answers an assignment.

        Args:
            samples: behind the mean gradients.
            rank, version, step: as for `ModelCompressor`.
            leaving: everything that is owed goes too, of all parts, as float32; not where others count
                already.
        """
        given = assignment.slice, assignment.slices
        if given != self._slice:
            self._slice = given
            self.compressor.set_slices(max(1, assignment.slices))
        # Members of a group compute the same and send different parts.
        self.compressor.rank = rank * max(1, assignment.slices) + assignment.slice
        wanted = None
        if assignment.slices > 1:
            wanted = self.compressor.plan.slice(*given)
        elif assignment.parts:
            wanted = frozenset(assignment.parts)
        return self.compressor.begin(
            samples,
            version=version,
            step=step,
            epoch=assignment.progress,
            workers=assignment.world,
            wanted=wanted,
            flush=leaving and not assignment.parts,
        )

    def undoable(self, assignment: Assignment) -> bool:
        """Whether others compute the same, or may have to: then its push may turn out to be superfluous."""
        return self._in_parts or assignment.slices > 1 or assignment.stragglers > 0
