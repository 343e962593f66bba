"""What a worker pushes of its gradients: all parts of the model, or where members of a round divide these
among them, its slice, or where a lost worker had pushed some, the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...compressors import Ledger, ModelCompressor, Plan, Step
from ...proto.messages import Assignment


class Compression:
    """A `ModelCompressor` that follows the assignments."""

    def __init__(self, compressor: ModelCompressor, *, in_parts: bool = False) -> None:
        """in_parts: whether another worker may push the rest of what this one has begun to."""
        self._compressor = compressor
        self._in_parts = in_parts
        self._slice = 0, 0  # number and count; 0 of 0 is all

    def adopt(self, plan: Plan) -> None:
        """Divide the gradients otherwise, between two steps."""
        self._compressor.adopt(plan)

    @property
    def plan(self) -> Plan:
        return self._compressor.plan

    def unit_of(self, place: int) -> int:
        """Of a tensor, the number of its unit."""
        return self._compressor.unit_of[place]

    def send_whole(self, units: frozenset[int]) -> None:
        """See `ModelCompressor.send_whole`."""
        self._compressor.send_whole(units)

    @property
    def ledger(self) -> Ledger:
        return self._compressor.ledger

    def image(self) -> dict[str, Any]:
        """What the next step depends on, as the ledger's."""
        return {"ledger": self.ledger.image(), "slice": self._slice}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image`."""
        self.ledger.restore(image["ledger"])
        self._slice = image["slice"]

    @property
    def tensors(self) -> int:
        """How many gradients make a step."""
        return len(self._compressor.specs)

    def sent_shares(self, epoch: float) -> list[float]:
        """See `ModelCompressor.sent_shares`."""
        return self._compressor.sent_shares(epoch)

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
            self._compressor.divide(max(1, assignment.slices))
        # Members of a group compute the same and send different parts.
        self._compressor.rank = rank * max(1, assignment.slices) + assignment.slice
        wanted = None
        if assignment.slices > 1:
            wanted = self._compressor.plan.slice(*given)
        elif assignment.parts:
            wanted = frozenset(assignment.parts)
        return self._compressor.begin(
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
