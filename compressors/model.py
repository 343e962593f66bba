"""The compressor of a whole model's gradients: one compressor and one state per tensor, and payloads
by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .payload import Payload
from .step import Step
from .tensors import ModelTensors
from .terms import PushTerms


class ModelCompressor(ModelTensors):
    """A compressor of a model's gradients, step by step; its `ledger` keeps residuals and states between
    steps.

    It must not be used by several threads at once. Two of them with the same arguments and gradients produce
    the same bits, under any plan and any order in which gradients arrive.
    """

    def begin(self, terms: PushTerms) -> Step:
        """Begin a step, to which the gradients are added one by one."""
        return Step(self, terms)

    def compress(self, gradients: Sequence[torch.Tensor | None], samples: int, **step: Any) -> list[Payload]:
        """Compress all gradients of a step; return the payloads.

        Args:
            gradients: gradient of each tensor, in manifest order; None where the loss does not depend on the
                tensor. A gradient on a GPU is compressed there if its compressor can, otherwise on the host.
            samples: number of samples over which the mean gradients were taken.
            step: the other fields of `PushTerms`.

        Returns:
            Payloads that lie end to end in flat order; none at a version at which `delay` sends nothing.

        Raises:
            NonFiniteGradient: a gradient contains an infinity or a NaN. Nothing was changed.
            ValueError: number, shape or type of the gradients differ from the specs.
        """
        return self._whole(self.begin(PushTerms(samples=samples, **step)), gradients)

    def flush(self, gradients: Sequence[torch.Tensor | None], *, workers: int = 1) -> list[Payload]:
        """Encode these gradients and everything in the ledger as float32; return the payloads. The ledger is
        then empty."""
        return self._whole(self.begin(PushTerms(samples=1, workers=workers, flush=True)), gradients)

    def _whole(self, step: Step, gradients: Sequence[torch.Tensor | None]) -> list[Payload]:
        """Add all gradients to a step and finish it; return the payloads in flat order."""
        if len(gradients) != len(self.specs):
            raise ValueError(f"expected {len(self.specs)} gradients, got {len(gradients)}")
        sent: dict[int, list[Payload]] = {}
        for index in reversed(range(len(gradients))):
            sent.update(step.add(index, gradients[index]))
        step.finish()
        in_order = [part for unit in reversed(self.plan.units) for part in unit.parts]
        return [payload for part in in_order for payload in sent.get(part, ())]
