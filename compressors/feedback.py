"""Error feedback and momentum correction: what a step could not send is added to the next step's gradient.

In this order, for each tensor, with gradient g, velocity u, residual e:

    u = momentum * u + g;  u is what takes the place of g below      (only with momentum correction)
    r = u + decay * e;  send p = compress(r);  e = r - decode(p)     (decay 1: nothing is ever forgotten)
    u = 0 at the elements that a sparse p holds                      (masking: their momentum has been sent)

What comes before, once for the whole model, is in `model`: clipping first, then the delay. What comes after
is the server's: the weighted mean, then weight decay and the step of its optimizer. With momentum correction
that has to be plain SGD, or momentum would be applied twice.

Sources: error feedback, Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); momentum
correction and masking, Lin et al., "Deep Gradient Compression" (ICLR 2018), sections 3.1 and 3.3. Deviation:
the velocity of a payload that is not sparse is not masked, because nothing of it was left behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .base import Compressor, FusedFeedback, StepContext, TensorSpec, takes_gpu
from .indices import decode_indices
from .kernels import FLOAT32_MAX, devices
from .payload import Payload, SparsePayload
from .reduction import add_payloads
from .thresholds import magnitudes

_LARGEST = float(FLOAT32_MAX)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackState:
    """residual, and velocity if there is momentum correction: float32, shape (elements,), updated in place;
    views of a `Ledger`'s buffers where a whole model is compressed. inner: the wrapped compressor's state."""

    residual: torch.Tensor
    velocity: torch.Tensor | None
    inner: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorFeedback:
    """A compressor that never forgets, made of one that does.

    decay: what a residual is multiplied with at each step, 1 to keep all of it. momentum: of the correction,
    0 for none. Sums saturate at the largest finite float32, so that finite gradients leave a finite residual.
    """

    compressor: Compressor
    decay: float = 1.0
    momentum: float = 0.0

    @property
    def on_gpu(self) -> bool:
        # What is not fused is subtracted from the residual on the host.
        return isinstance(self.compressor, FusedFeedback) and takes_gpu(self.compressor)

    def init(self, spec: TensorSpec) -> FeedbackState:
        return FeedbackState(
            residual=torch.zeros(spec.elements),
            velocity=torch.zeros(spec.elements) if self.momentum else None,
            inner=self.compressor.init(spec),
        )

    def compress(
        self, gradient: torch.Tensor, state: FeedbackState, context: StepContext
    ) -> tuple[Payload, FeedbackState]:
        if not isinstance(self.compressor, FusedFeedback):
            velocity = self.accumulate(gradient, state)
            if velocity is not gradient:
                context = replace(context, magnitudes=None)
            # The wrapped compressor sees r, but statistics that it asks for are those of what was added.
            context = replace(context, magnitudes=magnitudes(velocity, context))
            return self.send(state, context)
        velocity = self._advance(gradient, state)
        if velocity is not gradient:
            context = replace(context, magnitudes=None)
        payload, inner = self.compressor.compress_with_residual(
            velocity, state.residual, state.inner, context
        )
        if isinstance(payload, SparsePayload):
            self._mask(state, payload)
        return payload, replace(state, inner=inner)

    def accumulate(self, gradient: torch.Tensor, state: FeedbackState) -> torch.Tensor:
        """Half of `compress`: take the gradient into the residual, and return what was added to it."""
        velocity = self._advance(gradient, state)
        devices.add_to(state.residual, velocity)
        return velocity

    def send(self, state: FeedbackState, context: StepContext) -> tuple[Payload, FeedbackState]:
        """Compress what has been accumulated: the other half. context: the magnitudes, if given, are those
        of what was added last."""
        payload, inner = self.compressor.compress(state.residual, state.inner, context)
        add_payloads([payload], [-1.0], state.residual.numpy())
        if isinstance(payload, SparsePayload):
            self._mask(state, payload)
        return payload, replace(state, inner=inner)

    def _advance(self, gradient: torch.Tensor, state: FeedbackState) -> torch.Tensor:
        """One step of velocity and decay; returns what takes the gradient's place."""
        if self.decay != 1.0:
            state.residual.mul_(self.decay)
        if state.velocity is None:
            return gradient
        torch.add(gradient, state.velocity, alpha=self.momentum, out=state.velocity)
        return state.velocity.clamp_(-_LARGEST, _LARGEST)

    @staticmethod
    def _mask(state: FeedbackState, payload: SparsePayload) -> None:
        if state.velocity is not None:
            indices = decode_indices(payload)
            devices.put(state.velocity, indices, np.zeros(indices.size, np.float32))
