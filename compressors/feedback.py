"""Error feedback and momentum correction: what a step could not send is added to the next step's gradient.

In this order, for each tensor, with gradient g, velocity u, residual e:

    u = momentum * u + g;  u is what takes the place of g below      (only with momentum correction)
    r = u + decay * e;  send p = compress(r);  e = r - decode(p)     (decay 1: nothing is ever forgotten)
    u = 0 at the elements that a sparse p holds                      (masking: their momentum has been sent)

What comes before, once for the whole model, is in `step`: clipping first, then the delay. What comes after
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

from ..common.stored import stored
from .base import Compressor, StepContext, TensorSpec, is_out_of_place, is_fused
from .indices import decode_indices
from .kernels import devices
from .payload import Payload, SparsePayload
from .reduction import reduce_payloads
from .thresholds import magnitudes


@stored("feedback-state")
@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackState:
    """residual, and velocity if there is momentum correction: float32, shape (elements,), updated in place;
    views of a `Ledger`'s buffers where a whole model is compressed. inner: the wrapped compressor's state.
    before: where the residual is as long as `residual` holds anything; None if that has it."""

    residual: torch.Tensor
    velocity: torch.Tensor | None
    inner: Any
    before: torch.Tensor | None = None


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
    def plain(self) -> bool:
        """Whether it only adds the residual to the gradient."""
        return self.decay == 1.0 and not self.momentum

    def init(self, spec: TensorSpec) -> FeedbackState:
        return FeedbackState(
            residual=torch.zeros(spec.elements),
            velocity=torch.zeros(spec.elements) if self.momentum else None,
            inner=self.compressor.init(spec),
        )

    def compress(
        self, gradient: torch.Tensor, state: FeedbackState, context: StepContext
    ) -> tuple[Payload, FeedbackState]:
        if state.before is not None and self.plain and is_out_of_place(self.compressor):
            sent = self.compressor.compress_with_residual(
                gradient, state.before, state.inner, context, state.residual
            )
            return self._masked(*sent, state)
        velocity = self._advance(gradient, state)
        if velocity is not gradient:
            context = replace(context, magnitudes=None)
        if is_fused(self.compressor):
            sent = self.compressor.compress_with_residual(velocity, state.residual, state.inner, context)
            return self._masked(*sent, state)
        devices.add_to(state.residual, velocity)
        # The wrapped compressor sees r, but statistics that it asks for are those of what was added.
        return self.send(state, replace(context, magnitudes=magnitudes(velocity, context)))

    def accumulate(self, gradient: torch.Tensor, state: FeedbackState) -> torch.Tensor:
        """Half of `compress`: take the gradient into the residual, and return what was added to it."""
        velocity = self._advance(gradient, state)
        devices.add_to(state.residual, velocity)
        return velocity

    def send(self, state: FeedbackState, context: StepContext) -> tuple[Payload, FeedbackState]:
        """Compress what has been accumulated: the other half. context: the magnitudes, if given, are those
        of what was added last."""
        payload, inner = self.compressor.compress(state.residual, state.inner, context)
        reduce_payloads([payload], [-1.0], state.residual.numpy(), keep=True)
        return self._masked(payload, inner, state)

    def _advance(self, gradient: torch.Tensor, state: FeedbackState) -> torch.Tensor:
        """One step of velocity and decay; returns what takes the gradient's place."""
        if state.before is not None:
            state.residual.copy_(state.before)
        if self.decay != 1.0:
            state.residual.mul_(self.decay)
        if state.velocity is None:
            return gradient
        torch.add(gradient, state.velocity, alpha=self.momentum, out=state.velocity)
        return devices.saturate(state.velocity)

    @staticmethod
    def _masked(payload: Payload, inner: Any, state: FeedbackState) -> tuple[Payload, FeedbackState]:
        """What `compress` returns, once the velocity of what a sparse payload holds is 0."""
        if state.velocity is not None and isinstance(payload, SparsePayload):
            indices = decode_indices(payload)
            devices.put(state.velocity, indices, np.zeros(indices.size, np.float32))
        return payload, replace(state, inner=inner, before=None)


def without_feedback(compressor: Compressor) -> Compressor:
    """The compressor itself, if it is in an `ErrorFeedback`."""
    return compressor.compressor if isinstance(compressor, ErrorFeedback) else compressor
