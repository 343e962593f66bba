"""The compressor of a whole model's gradients: one compressor and one state per tensor, and payloads
by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .payload import Payload
from .step import Step
from .tensors import ModelTensors


class ModelCompressor(ModelTensors):
    """A compressor of a model's gradients, step by step; its `ledger` keeps residuals and states between
    steps.

    It must not be used by several threads at once. Two of them with the same arguments and gradients produce
    the same bits, under any plan and any order in which gradients arrive.
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
        measured: bool = False,
    ) -> Step:
        """Begin a step; return the `Step`, to which the gradients are added one by one.

        Args:
            samples: number of samples over which the mean gradients are taken, at least 1.
            version: version of the parameters at which they are computed.
            step: number of the step, from 0, by which `delay` counts; None for the version.
            epoch: passes over the training samples so far, fractional.
            workers: number of workers in the round, at least 1, by which `clip` is scaled.
            wanted: numbers of the parts to send; None for all. The ledger's contents for other parts stay as
                they are.
            flush: True for a worker's last push: send everything in the ledger too, of all parts, as float32.
            measured: True if the server measures norms at this version: where the indices are drawn, send the
                gradient without the residual.
        """
        if samples < 1:
            raise ValueError(f"samples: expected at least 1, got {samples}")
        number = version if step is None else step
        return Step(self, samples, version, number, epoch, workers, wanted, flush, measured)

    def compress(self, gradients: Sequence[torch.Tensor | None], samples: int, **step: Any) -> list[Payload]:
        """Compress all gradients of a step and commit it; return the payloads.

        Args:
            gradients: gradient of each tensor, in manifest order; None where the loss does not depend on the
                tensor. A gradient on a GPU is compressed there if its compressor can, otherwise on the host.
            samples: number of samples over which the mean gradients were taken.
            step: the other arguments of `begin`.

        Returns:
            Payloads that lie end to end in flat order; none at a version at which `delay` sends nothing.

        Raises:
            NonFiniteGradient: a gradient contains an infinity or a NaN. Nothing was changed.
            ValueError: number, shape or type of the gradients differ from the specs.
        """
        return self._whole(self.begin(samples, **step), gradients)

    def flush(self, gradients: Sequence[torch.Tensor | None], *, workers: int = 1) -> list[Payload]:
        """Encode these gradients and everything in the ledger as float32; return the payloads. The ledger is
        then empty.

        Args:
            gradients: gradient of each tensor, in manifest order; None where there is none.
            workers: number of workers in the round, at least 1.
        """
        return self._whole(self.begin(1, version=0, workers=workers, flush=True), gradients)

    def _whole(self, step: Step, gradients: Sequence[torch.Tensor | None]) -> list[Payload]:
        """Add all gradients to a step and commit it; return the payloads in flat order."""
        if len(gradients) != len(self.specs):
            raise ValueError(f"expected {len(self.specs)} gradients, got {len(gradients)}")
        sent: dict[int, list[Payload]] = {}
        for index in reversed(range(len(gradients))):
            sent.update(step.add(index, gradients[index]))
        step.commit()
        in_order = [part for unit in reversed(self.plan.units) for part in unit.parts]
        return [payload for part in in_order for payload in sent.get(part, ())]
