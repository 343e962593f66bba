"""Every element, in 4 or 2 bytes: `none`, `bf16`, `fp16`.

`none` sends float32 as it is. `bf16` and `fp16` round to nearest, ties to even, and saturate at their largest
finite value (about 3.39e38 and 65504), since a receiver refuses infinities. With error feedback the rounding
error, and what saturation cut off, stays with the worker for the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .base import Stateless, StepContext, as_array
from .kernels import cpu
from .payload import DenseFormat, DensePayload, Float32


def dense_payload(format: DenseFormat, values: Float32, residual: Float32 | None = None) -> DensePayload:
    """A copy of values (float32, shape (elements,)) in `format`.

    residual: added before; afterwards it holds what rounding has left. Not for FLOAT32.
    """
    if format is DenseFormat.FLOAT32:
        # A copy: the caller may overwrite its gradient while the payload waits to be acknowledged.
        return DensePayload(format=format, elements=values.size, data=values.copy().view(np.uint8))
    data = np.empty(values.size * format.element_bytes, np.uint8)
    cpu.encode_dense(format, values, residual, data)
    return DensePayload(format=format, elements=values.size, data=data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense(Stateless):
    """Send every element in `format`. It passes on what another compressor remembers, whose place it may
    take for a while."""

    format: DenseFormat

    def compress(self, gradient: torch.Tensor, state: Any, context: StepContext) -> tuple[DensePayload, Any]:
        return dense_payload(self.format, gradient.numpy()), state

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, state: Any, context: StepContext
    ) -> tuple[DensePayload, Any]:
        return dense_payload(self.format, gradient.numpy(), as_array(residual)), state
