"""Error feedback and momentum correction: the unsent rest of a step is added to the next step's gradient.

In this order, for each tensor, with gradient g, velocity u, residual e:

    momentum: u = momentum * u + g, and u takes the place of g below; only with momentum correction
    residual: r = u + decay * e;  send p = compress(r);  e = r - decode(p); decay 1 forgets nothing
    masking:  u = 0 at the elements that a sparse p holds, because their momentum has been sent; with
              masking=off u stays, as in equation 4-13 of the thesis on near-centroid compression

Where the server measures norms (`StepContext.alone`), p = compress(u): r - decode(p) still keeps everything
else, so that the older residual waits for a later step.

Before that, `budget` clips and `step` delays, once for the whole model. After that, the server applies the
weighted mean, then weight decay and the step of its optimizer. With momentum correction that optimizer has to
be plain SGD, or momentum would be applied twice.

Sources: error feedback, Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); momentum
correction and masking, Lin et al., "Deep Gradient Compression" (ICLR 2018), sections 3.1 and 3.3. Deviation:
the velocity of a payload that is not sparse is not masked, because the payload covers every element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..common.stored import stored
from .base import Compressor, StepContext, TensorSpec, is_fused, is_out_of_place
from .indices import decode_indices
from .kernels import devices
from .payload import Payload, SparsePayload
from .reduction import reduce_payloads
from .thresholds import magnitudes


@stored("feedback-state")
@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackState:
    """The state of `ErrorFeedback` for one tensor: float32 of shape (elements,), updated in place.

    Where a whole model is compressed they are views of a `Ledger`'s buffers.

    Attributes:
        residual: the residual; while `before` is set, only the buffer that receives the next one.
        velocity: None without momentum correction.
        before: the present residual, as long as `residual` does not hold it; None otherwise.
    """

    residual: torch.Tensor
    velocity: torch.Tensor | None
    inner: Any
    before: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorFeedback:
    """A wrapper that adds error feedback, and momentum correction if wanted, to a compressor.

    Sums saturate at the largest finite float32, which keeps the residual of finite gradients finite. The
    fields are those of `Wrapping`.
    """

    compressor: Compressor
    decay: float = 1.0
    momentum: float = 0.0
    masking: bool = True

    @property
    def plain(self) -> bool:
        return self.decay == 1.0 and not self.momentum

    def init(self, spec: TensorSpec) -> FeedbackState:
        residual = torch.zeros(spec.elements, dtype=torch.float32, device="cpu")
        return FeedbackState(
            residual=residual,
            velocity=torch.zeros_like(residual) if self.momentum else None,
            inner=self.compressor.init(spec),
        )

    def compress(
        self, gradient: torch.Tensor, state: FeedbackState, context: StepContext
    ) -> tuple[Payload, FeedbackState]:
        """Compress r = gradient or velocity + residual; leave r - decode(payload) as the next residual.

        A fused compressor adds, compresses and subtracts in one pass. For others these are three steps.
        """
        compressor = self.compressor
        # A fused compressor that reads the present residual and writes the next one to another buffer.
        if state.before is not None and self.plain and is_out_of_place(compressor) and not context.alone:
            sent = compressor.compress_with_residual(
                gradient, state.before, state.inner, context, state.residual
            )
            return self._masked(*sent, state)
        velocity = self._advance(gradient, state)
        if velocity is not gradient:
            context = replace(context, magnitudes=None)
        # A fused compressor that replaces the residual in place.
        if is_fused(compressor) and not context.alone:
            sent = compressor.compress_with_residual(velocity, state.residual, state.inner, context)
            return self._masked(*sent, state)
        devices.add_to(state.residual, velocity)
        # The gradient or velocity is sent alone. The residual keeps everything else, so that of before stays.
        if context.alone:
            return self.send(state, context, velocity)
        # The compressor gets r, but its statistics are those of the gradient or velocity alone.
        return self.send(state, replace(context, magnitudes=magnitudes(velocity, context)))

    def accumulate(self, gradient: torch.Tensor, state: FeedbackState) -> torch.Tensor:
        """Add the gradient to the residual, the first half of `compress`; return the tensor that was added.

        That is the velocity with momentum correction, otherwise the gradient itself.
        """
        velocity = self._advance(gradient, state)
        devices.add_to(state.residual, velocity)
        return velocity

    def send(
        self, state: FeedbackState, context: StepContext, given: torch.Tensor | None = None
    ) -> tuple[Payload, FeedbackState]:
        """Compress the accumulated residual, the second half of `compress`, and subtract the payload.

        Args:
            state: its residual holds the sum.
            context: its magnitudes, if given, are those of the tensor that was added last.
            given: tensor to compress instead of the sum.
        """
        total = state.residual if given is None else given
        payload, inner = self.compressor.compress(total, state.inner, context)
        reduce_payloads([payload], [-1.0], state.residual.numpy(), keep=True)
        devices.saturate(state.residual)
        return self._masked(payload, inner, state)

    def _advance(self, gradient: torch.Tensor, state: FeedbackState) -> torch.Tensor:
        """Apply decay and momentum; return the tensor to add to the residual."""
        if state.before is not None:
            state.residual.copy_(state.before)
        if self.decay != 1.0:
            state.residual.mul_(self.decay)
        if state.velocity is None:
            return gradient
        torch.add(gradient, state.velocity, alpha=self.momentum, out=state.velocity)
        return devices.saturate(state.velocity)

    def _masked(self, payload: Payload, inner: Any, state: FeedbackState) -> tuple[Payload, FeedbackState]:
        """Set the velocity of the elements in a sparse payload to 0, unless masking is off."""
        if self.masking and state.velocity is not None and isinstance(payload, SparsePayload):
            indices = decode_indices(payload)
            devices.put(state.velocity, indices, np.zeros(indices.size, np.float32))
        return payload, replace(state, inner=inner, before=None)


def without_feedback(compressor: Compressor) -> Compressor:
    """Return the compressor inside an `ErrorFeedback`; return any other compressor as it is."""
    return compressor.compressor if isinstance(compressor, ErrorFeedback) else compressor
