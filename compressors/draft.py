"""The draft of a step: the gradients that it holds, and all that it will leave in the ledger.

The ledger's second buffer receives the unsent rest; states and statistics are copies. Nothing of the ledger
itself changes before the step is finished.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from ..common.parts import Unit
from .base import Compressor, NonFiniteGradient, Random, StepContext
from .feedback import ErrorFeedback
from .kernels import Magnitudes, devices
from .ledger import Ranges, gathered
from .payload import Payload
from .tensors import ModelTensors
from .terms import PushTerms


class Draft:
    """The contents of a step, by index of the tensor where they are a dict, a list or a set.

    Attributes:
        bases: bases of the step's version.
        gradients: gradients that are not compressed yet, float32 of shape (elements,).
        magnitudes: those of gradients that were measured.
        keep: number of elements to send, from a budget for the whole model. The draft then holds gradient
            plus residual already.
        states: states of the compressors after the step.
        usual: statistics by which spikes are found, after the step (`spikes.ROWS`).
        absent: tensors without a gradient.
        whole: tensors that are sent as float32, with their residual.
        kept: True if the ledger holds a residual or may hold one later. The draft is then written in full.
        compresses: True if the step compresses; False if it only adds to the draft, because `delay` sends
            nothing, or because a flush sends the draft itself.
        measured: True if gradients whose indices are drawn are sent without their residual.
    """

    def __init__(self, model: ModelTensors, terms: PushTerms, *, sends: bool) -> None:
        self.model, self.ledger, self.plan, self.terms = model, model.ledger, model.plan, terms
        self.bases = model.bases
        self.gradients: dict[int, torch.Tensor] = {}
        self.magnitudes: dict[int, Magnitudes] = {}
        self.keep: dict[int, int] = {}
        self.states = list(model.ledger.states)
        self.usual = model.ledger.usual.copy()
        self.absent: set[int] = set()
        self.whole: set[int] = set()
        self.kept = any(model.feedback) or terms.flush or not model.ledger.unused
        self.compresses = sends and not terms.flush
        self.measured = terms.measured and not terms.flush

    def hold(self, index: int, gradient: torch.Tensor, *, in_runs: bool) -> None:
        """Store a gradient as a contiguous tensor of shape (elements,), on a device that its compressor
        accepts.

        It is a view where possible. Its magnitudes are measured unless compressing checks it anyway.

        in_runs: True if the unit is compressed as soon as its last gradient is there. Raises ValueError for
        another shape or type, NonFiniteGradient for an infinity or a NaN.
        """
        spec = self.model.specs[index]
        if gradient.dtype != torch.float32:
            raise ValueError(f"gradient of {spec.name!r}: expected torch.float32, got {gradient.dtype}")
        if gradient.numel() != spec.elements:
            got = f"shape {tuple(gradient.shape)}"
            raise ValueError(f"gradient of {spec.name!r}: expected shape {spec.shape}, got {got}")
        gradient = gradient.detach().reshape(-1)
        on_host = gradient.device.type == "cpu" and not devices.on_gpu(gradient)
        if not on_host and not (self.model.on_gpu[index] and devices.has_kernels_for(gradient)):
            gradient = gradient.cpu()
        self.gradients[index] = gradient = gradient.contiguous()
        if gradient.device.type != "cpu":  # the ledger lies where any gradient is compressed
            self.ledger.to(gradient.device)
        if not (in_runs and self.model.checks[index] and on_host):
            self.measure(index)

    def measure(self, index: int) -> None:
        """Measure the magnitudes of a gradient; raise NonFiniteGradient if their sum is not finite."""
        self.magnitudes[index] = devices.magnitudes(self.gradients[index])
        if not math.isfinite(self.magnitudes[index].total):
            raise NonFiniteGradient(self.model.specs[index].name)

    def any_measured(self, indices: Iterable[int]) -> bool:
        return any(index in self.magnitudes for index in indices)

    def blame(self, indices: Iterable[int]) -> NoReturn:
        """Raise NonFiniteGradient for the first of these gradients that is not finite; one of them is not."""
        for index in indices:
            self.measure(index)
        raise AssertionError("expected a gradient that is not finite")

    def joined(self, indices: Sequence[int]) -> torch.Tensor:
        """Return the gradients of these tensors, end to end, on the device of the first."""
        device = self.gradients[indices[0]].device
        return torch.cat([self.gradients[index].to(device) for index in indices])

    def range_of(self, index: int) -> tuple[int, int]:
        """Return start and end of a tensor in flat order."""
        return self.plan.starts[index], self.plan.starts[index + 1]

    def context(self, index: int) -> StepContext:
        """Return the context in which a tensor is compressed."""
        model, terms = self.model, self.terms
        return StepContext(
            samples=terms.samples,
            version=terms.version,
            epoch=terms.epoch,
            random=self.random(index),
            shared=Random((model.seed, terms.version, model.numbers[index])),
            magnitudes=self.magnitudes.get(index),
            density=model.densities.get(index),
            keep=self.keep.get(index),
            bases=self.bases.values.get(index),
            alone=self.measured and model.drawn[index],
        )

    def random(self, index: int) -> Random:
        """Return the random numbers of a tensor in this step, on this rank."""
        model, terms = self.model, self.terms
        rank = model.rank if terms.rank is None else terms.rank
        return Random((model.seed, rank, terms.version, model.numbers[index]))

    def compress_as_one(
        self,
        indices: Sequence[int],
        compressor: Compressor,
        gradient: torch.Tensor,
        ranges: Ranges,
        context: StepContext,
    ) -> Payload:
        """Compress tensors as one, with the state of the first.

        gradient: their gradients, end to end, which take up these ranges in flat order. Raises
        NonFiniteGradient if the compressor finds one that is not finite.
        """
        first, ledger = indices[0], self.ledger
        try:
            if isinstance(compressor, ErrorFeedback):
                begun = first in self.keep
                state = ledger.opened(ranges, gradient.device, self.states[first], begun=begun)
                if begun:
                    payload, state = compressor.send(state, context)
                else:
                    payload, state = compressor.compress(gradient, state, context)
                ledger.write_back(ranges, state)
                self.states[first] = state.inner
                return payload
            if context.alone:
                for start, end in ranges:
                    self.leave(start, end)
            elif self.kept:
                if first not in self.keep:
                    gradient, context = (
                        self.plus_residual(gradient, ranges),
                        replace(context, magnitudes=None),
                    )
                for start, end in ranges:
                    ledger.draft[start:end].zero_()
            payload, self.states[first] = compressor.compress(gradient, self.states[first], context)
            return payload
        except FloatingPointError:
            self.blame(indices)

    def plus_residual(self, gradient: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        """Return gradient plus residual, for a compressor without error feedback.

        Such a tensor has a residual only if an earlier push of it was put back.
        """
        if not self.kept:
            return gradient
        return devices.saturate(gradient + gathered(self.ledger.residual, ranges, gradient.device))

    def accumulate(self, indices: Collection[int]) -> None:
        """Add the gradients of these tensors to the draft; the residual of those without a gradient stays."""
        for index in indices:
            start, end = self.range_of(index)
            if index in self.absent:
                self.leave(start, end)
                continue
            compressor, gradient = self.model.compressors[index], self.gradients[index]
            if isinstance(compressor, ErrorFeedback):
                state = self.ledger.opened([(start, end)], gradient.device, self.states[index])
                compressor.accumulate(gradient, state)
                self.ledger.write_back([(start, end)], state)
            else:
                self.ledger.draft[start:end].copy_(self.plus_residual(gradient, [(start, end)]))

    def leave(self, start: int, end: int) -> None:
        """Copy a range of residual and velocity to the draft unchanged."""
        if self.kept:
            self.ledger.draft[start:end].copy_(self.ledger.residual[start:end])
            if self.ledger.velocity is not None and self.ledger.draft_velocity is not None:
                self.ledger.draft_velocity[start:end].copy_(self.ledger.velocity[start:end])

    def undo(self, unit: Unit) -> None:
        """Reset all that was written for a unit to the state before the step."""
        self.leave(unit.start, unit.end)
        tensors = slice(unit.first, unit.last)
        self.states[tensors] = self.ledger.states[tensors]
        self.usual[:, tensors] = self.ledger.usual[:, tensors]
