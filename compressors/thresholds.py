"""The common part of the threshold compressors (`2bit`, `4bit`) and others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .base import Fused, StepContext
from .kernels import Magnitudes, devices
from .payload import Bytes, CodeFormat, Float32, Float64, QuantizedPayload


class OnePass(Fused, ABC):
    """A base class for quantizers that compress several consecutive tensors in one pass over memory
    (contract: `base.InBlocks`)."""

    __slots__ = ()

    @abstractmethod
    def compress_blocks(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        states: Sequence[Any],
        samples: int,
    ) -> tuple[QuantizedPayload, list[Any], Float64]:
        """Compress several tensors, as `base.InBlocks` says."""

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, state: Any, context: StepContext
    ) -> tuple[QuantizedPayload, Any]:
        payload, (state,), _ = self.compress_blocks([gradient], residual, residual, [state], context.samples)
        return payload, state


def magnitudes(gradient: torch.Tensor, context: StepContext) -> Magnitudes:
    """Return the magnitudes of the gradient: those in `context` if the caller knows them, otherwise
    measured."""
    return context.magnitudes or devices.magnitudes(gradient)


def block_payload(
    format: CodeFormat, gradients: Sequence[torch.Tensor], levels: Float32, data: Bytes
) -> QuantizedPayload:
    """Return a quantized payload with a block for each tensor; levels and packed codes lie end to end."""
    sizes = np.array([gradient.numel() for gradient in gradients], np.int64)
    return QuantizedPayload(
        format=format,
        elements=int(sizes.sum()),
        levels=levels,
        sizes=sizes if sizes.size > 1 else None,
        data=data,
    )
