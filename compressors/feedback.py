"""Error feedback: what a step could not send is added to the next step's gradient.

    r = g + e;  send p = compress(r);  e = r - decode(p)

so that over time everything is sent. A wrapper around any compressor; one that offers
`compress_with_residual` does the same in a single pass over memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from .base import Compressor, FusedFeedback, StepContext, TensorSpec
from .kernels import FLOAT32_MAX
from .payload import Payload
from .reduction import add_payloads, decode
from .thresholds import magnitudes


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackState:
    """residual: float32, shape (elements,), updated in place. inner: the wrapped compressor's state."""

    residual: torch.Tensor
    inner: Any

    def restore(self, payload: Payload) -> None:
        """Put back what a payload that nobody accepted would have delivered."""
        add_payloads([payload], [1.0], self.residual.numpy())

    def residual_norm(self) -> float:
        """Euclidean norm of the residual, accumulated in float64."""
        return float(cast(torch.Tensor, torch.linalg.vector_norm(self.residual, dtype=torch.float64)))


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorFeedback:
    """A compressor that never forgets, made of one that does.

    The sum r saturates at the largest finite float32, so that finite gradients leave a finite residual.
    """

    compressor: Compressor

    def init(self, spec: TensorSpec) -> FeedbackState:
        return FeedbackState(residual=torch.zeros(spec.elements), inner=self.compressor.init(spec))

    def compress(
        self, gradient: torch.Tensor, state: FeedbackState, context: StepContext
    ) -> tuple[Payload, FeedbackState]:
        if isinstance(self.compressor, FusedFeedback):
            payload, inner = self.compressor.compress_with_residual(
                gradient, state.residual, state.inner, context
            )
        else:
            payload, inner = self._compress_unfused(gradient, state, context)
        return payload, FeedbackState(residual=state.residual, inner=inner)

    def _compress_unfused(
        self, gradient: torch.Tensor, state: FeedbackState, context: StepContext
    ) -> tuple[Payload, Any]:
        # The wrapped compressor sees r, but statistics that it asks for are those of the gradient.
        context = replace(context, magnitudes=magnitudes(gradient, context))
        total = (gradient + state.residual).clamp_(-float(FLOAT32_MAX), float(FLOAT32_MAX))
        payload, inner = self.compressor.compress(total, state.inner, context)
        torch.sub(total, torch.from_numpy(decode(payload)), out=state.residual)
        return payload, inner
