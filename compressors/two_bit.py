"""`2bit`: one threshold, three values. MXNet's gradient compression, the baseline of the 4-bit paper.

Source: MXNet's "Gradient Compression" documentation and the kernel behind it. With residual e:

    r = g + e;  v = t if r >= t, -t if r <= -t, else 0;  send code(v);  e = r - v

Codes 11, 10, 00 stand for t, -t, 0; 01 is never sent. The comparison includes the threshold itself.
Deviations: MXNet puts the first element of a byte in its highest bits, we put it in the lowest, as everywhere
else on our wire. See also `quantizers.Scale` for the factor between a summed and a mean gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .base import Stateless
from .kernels import devices
from .payload import CodeFormat, Float64, QuantizedPayload
from .quantizers import TwoBitOptions
from .thresholds import OnePass, block_payload


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoBit(OnePass, Stateless):
    """The compressor `2bit`: quantizes to {-t, 0, t}. Stateless; meant to be used with error feedback."""

    options: TwoBitOptions = field(default_factory=TwoBitOptions)

    def compress_blocks(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        states: Sequence[None],
        samples: int,
    ) -> tuple[QuantizedPayload, list[None], Float64]:
        format = CodeFormat.SIGNED_2BIT
        level = self.options.threshold / self.options.scale.factor(samples)
        levels = np.full(len(gradients), level, np.float32)
        data, totals, _ = devices.quantize_blocks(format, gradients, residual, left, levels)
        return block_payload(format, gradients, levels, data), list(states), totals
