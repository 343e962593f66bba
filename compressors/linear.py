"""Signed integers times a scale: `8bit`, `qsgd`, and with three values `terngrad`.

`8bit`: round to the nearest of 255 values, evenly spaced up to the largest magnitude of each bucket of 4096
elements:

    scale = max|r| / 127;  q = round(r / scale)                           with r = g + e, ties to even

`qsgd`: round to one of the two neighbours among s = 2**(bits - 1) - 1 levels on either side of 0, at random,
so that the mean over the randomness is the value itself:

    scale = norm(r) / s;  q = floor(r / scale + u), u uniform in [0, 1)   for each bucket of 512 elements

Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding" (NeurIPS
2017). Their experiments use `norm=max`, our default; their theory is about `norm=l2`. Deviation: codes of a
fixed width instead of Elias codes. There is no error feedback by default, because the rounding has no bias.

`terngrad`: one of -s, 0, s, at random, with s = max|r|, but at most 2.5 times the root mean square:

    q = sign(r) with probability min(1, |r| / s), otherwise 0

Source: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning"
(NeurIPS 2017), with its clipping; every worker has a scale of its own. It takes two bits per element. There
is no error feedback by default, because clipping is the only bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from .base import Fused, Neighbours, Stateless, StepContext, as_array
from .entry import NoOptions
from .kernels import FLOAT32_MAX, linear
from .one_bit import SMALLEST_LEVEL
from .payload import (
    MAX_BUCKET,
    CodeFormat,
    Float32,
    LinearPayload,
    QuantizedPayload,
    code_bytes,
)
from .quantizers import Norm, QsgdOptions, TernGradOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(Fused, Stateless):
    """The compressors `8bit` and `qsgd`: signed integers times a scale per bucket. Stateless.

    Attributes:
        options: bits of a code, size of a bucket, and its norm.
        random: True to round to either neighbour with probabilities that make the mean exact, False to round
            to the nearest.
    """

    options: QsgdOptions
    random: bool

    def spanning(self, tensors: Neighbours) -> Linear:
        """Return this compressor: tensors are joined only where the last bucket of each is full."""
        return self

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, state: None, context: StepContext
    ) -> tuple[LinearPayload, None]:
        elements, values, left = gradient.numel(), gradient.numpy(), as_array(residual)
        bits, bucket = self.options.bits, self.options.bucket
        scales = self._scales(values, left)
        seed = int(context.rng.integers(2**63)) if self.random else None
        data = np.empty(scales.nbytes + code_bytes(bits, elements), np.uint8)
        data[: scales.nbytes] = scales.view(np.uint8)
        linear.quantize_linear(bits, bucket, values, left, scales, data[scales.nbytes :], seed=seed)
        return LinearPayload(elements=elements, bits=bits, bucket=bucket, data=data), None

    def _scales(self, gradient: Float32, residual: Float32 | None) -> Float32:
        norms = linear.bucket_maxima if self.options.norm is Norm.MAX else linear.bucket_norms
        # The largest scale whose multiples are all finite; larger values saturate.
        most = np.float32(FLOAT32_MAX / np.float32(2 ** (self.options.bits - 1)))
        levels = np.float32(2 ** (self.options.bits - 1) - 1)
        scales: Float32 = np.minimum(norms(gradient, residual, self.options.bucket) / levels, most)
        return scales


def eight_bit(options: NoOptions | None = None) -> Linear:
    return Linear(options=QsgdOptions(bits=8, bucket=4096), random=False)


def qsgd(options: QsgdOptions) -> Linear:
    return Linear(options=options, random=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class TernGrad(Fused, Stateless):
    """The compressor `terngrad`: sends one of three values, at random. Stateless."""

    options: TernGradOptions = field(default_factory=TernGradOptions)

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, state: None, context: StepContext
    ) -> tuple[QuantizedPayload, None]:
        format, elements = CodeFormat.SIGNED_2BIT, gradient.numel()
        values, left = gradient.numpy(), as_array(residual)
        level = self._level(values, left)
        data = np.empty(format.code_bytes(elements), np.uint8)
        seed = int(context.rng.integers(2**63))
        linear.quantize_ternary(values, left, level, data, seed=seed)
        levels = np.array([level], np.float32)
        return QuantizedPayload(format=format, elements=elements, levels=levels, data=data), None

    def _level(self, gradient: Float32, residual: Float32 | None) -> float:
        if not gradient.size:
            return SMALLEST_LEVEL
        norm = math.hypot(*linear.bucket_norms(gradient, residual, MAX_BUCKET).tolist())
        largest = float(linear.bucket_maxima(gradient, residual, MAX_BUCKET).max())
        largest = min(largest, self.options.sigmas * norm / math.sqrt(gradient.size))
        return float(np.float32(min(max(largest, SMALLEST_LEVEL), float(FLOAT32_MAX))))
