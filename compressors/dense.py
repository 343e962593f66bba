"""Every element, in 4 or 2 bytes: `none`, `bf16`, `fp16`.

`none` sends float32 unchanged. `bf16` and `fp16` round to nearest, ties to even. They saturate at their
largest finite value (about 3.39e38 and 65504), because a receiver refuses infinities. With error feedback the
errors of rounding and saturation stay with the worker for the next step.
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
    """Return a payload with a copy of values (float32, shape (elements,)) in `format`.

    residual: added to the values, and overwritten with the rounding error; None for no residual. It is
    ignored for FLOAT32.
    """
    if format is DenseFormat.FLOAT32:
        # A copy: the caller may overwrite its gradient while the payload waits to be acknowledged.
        return DensePayload(format=format, elements=values.size, data=values.copy().view(np.uint8))
    data = np.empty(values.size * format.element_bytes, np.uint8)
    cpu.encode_dense(format, values, residual, data)
    return DensePayload(format=format, elements=values.size, data=data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense(Stateless):
    """The compressors `none`, `bf16` and `fp16`: send every element in `format`.

    It returns the state unchanged, because it may replace another compressor for some steps.
    """

    format: DenseFormat

    def compress(self, gradient: torch.Tensor, state: Any, context: StepContext) -> tuple[DensePayload, Any]:
        return dense_payload(self.format, gradient.numpy()), state

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, state: Any, context: StepContext
    ) -> tuple[DensePayload, Any]:
        return dense_payload(self.format, gradient.numpy(), as_array(residual)), state
