"""A whole model's gradients: one compressor and one state per tensor, and payloads by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .payload import Payload
from .step import Step
from .tensors import ModelTensors


class ModelCompressor(ModelTensors):
    """Compresses a model's gradients step by step; `ledger` keeps what must be kept between steps.

    Not for use by several threads at once. Two of them made alike and fed alike produce the same bits,
    whatever the plan and the order in which gradients come.
    """

    def begin(
        self,
        samples: int,
        *,
        version: int,
        step: int | None = None,
        epoch: float = 0.0,
        workers: int = 1,
        wanted: frozenset[int] | None = None,
        flush: bool = False,
    ) -> Step:
        """A step: mean gradients over `samples` samples (at least 1), that are to come one by one.

        version: of the parameters they are computed at. step: what a delay counts, the version if not given.
        epoch: passes over the training samples so far.
        workers: that take part in the round, at least 1.
        wanted: parts that are sent, all if None; what the ledger holds of the others stays as it is.
        flush: send everything that is owed too, also what the ledger holds of the others, as float32: the
            last push of a worker.
        """
        if samples < 1:
            raise ValueError(f"samples: expected at least 1, got {samples}")
        return Step(self, samples, version, version if step is None else step, epoch, workers, wanted, flush)

    def compress(self, gradients: Sequence[torch.Tensor | None], samples: int, **step: Any) -> list[Payload]:
        """All of a step at once, as `begin` takes it.

        A gradient that is None does not exist, see `Step.add`. One that lies on a GPU is compressed there if
        its compressor can, otherwise on the host.
        Returns payloads that lie end to end in flat order; none at all at a version that a delay passes over.

        Raises:
            NonFiniteGradient: nothing was changed; the next step goes on as if this one had not been.
            ValueError: gradients of other number, shape or type than the specs say.
        """
        return self._whole(self.begin(samples, **step), gradients)

    def flush(self, gradients: Sequence[torch.Tensor | None], *, workers: int = 1) -> list[Payload]:
        """These gradients and everything that is owed, as float32. Nothing is left afterwards."""
        return self._whole(self.begin(1, version=0, workers=workers, flush=True), gradients)

    def _whole(self, step: Step, gradients: Sequence[torch.Tensor | None]) -> list[Payload]:
        if len(gradients) != len(self.specs):
            raise ValueError(f"expected {len(self.specs)} gradients, got {len(gradients)}")
        sent: dict[int, list[Payload]] = {}
        for place in reversed(range(len(gradients))):
            sent.update(step.add(place, gradients[place]))
        step.commit()
        in_order = [part for unit in reversed(self.plan.units) for part in unit.parts]
        return [payload for part in in_order for payload in sent.get(part, ())]
