"""One bit per element: `1bit` and `signsgd`.

`1bit`, with residual e:

    r = g + e;  send (r >= 0) and the mean of r on either side of 0; a bit decodes to the mean of its side

`1bit:block=B` takes one scale per B consecutive elements of a tensor in place of the two means:

    r = g + e;  send (r >= 0) and s = mean|r| of each block; a bit decodes to s or -s

Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs" (Interspeech 2014). Deviation: they take the two means per column of a weight matrix,
we take them per tensor. The scale of a block is that of signSGD with error feedback (Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019), which takes one per tensor.

`signsgd`: workers send the sign of every element, and the server takes a majority vote. Each element of the
aggregate is the sign that more workers sent, 0 in a draw, times a level. Source: Bernstein et al., "signSGD
with Majority Vote" (ICLR 2019). There the level is 1, so that the learning rate alone is the size of a step
(`level=unit`). With `level=mean`, the default, it is the mean of |g| over the tensor, averaged over the
workers, so that a learning rate for SGD suits it too.

Both send the sign of 0 as positive. `signsgd` has no error feedback by default, because the aggregate of a
vote differs from the values that a worker sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from .base import Fused, Neighbours, Stateless, StepContext, as_array
from .kernels import FLOAT32_MAX, linear
from .payload import CodeFormat, LinearPayload, QuantizedPayload, code_bytes
from .quantizers import OneBitOptions, SignOptions, VoteLevel
from .thresholds import magnitudes

# A level has to be positive, even that of a tensor of zeros.
SMALLEST_LEVEL = float(np.finfo(np.float32).smallest_normal)


def binary_payload(
    gradient: torch.Tensor, residual: torch.Tensor | None, low: float, high: float
) -> QuantizedPayload:
    """Return the signs of gradient + residual as a payload of the levels `low` and `high`.

    residual: receives gradient + residual minus the decoded payload, in place; None for no residual.
    """
    levels = np.array([low, high], np.float32)
    data = np.empty(CodeFormat.BINARY.code_bytes(gradient.numel()), np.uint8)
    linear.quantize_binary(gradient.numpy(), as_array(residual), low, high, data)
    return QuantizedPayload(format=CodeFormat.BINARY, elements=gradient.numel(), levels=levels, data=data)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneBit(Fused, Stateless):
    """The compressor `1bit`: sends signs and the mean of either side."""

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, state: None, context: StepContext
    ) -> tuple[QuantizedPayload, None]:
        positive, positives, negative, negatives = linear.side_sums(gradient.numpy(), as_array(residual))
        # Rounded to float32, as they travel, so that the residual matches the values that receivers decode.
        low = float(np.float32(negative / max(1, negatives)))
        high = float(np.float32(positive / max(1, positives)))
        return binary_payload(gradient, residual, low, high), None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSigns(Fused, Stateless):
    """The compressor `1bit:block=B`: sends signs and the mean magnitude of each block."""

    block: int

    def spanning(self, tensors: Neighbours) -> BlockSigns:
        """Return this compressor: tensors are joined only where the last block of each is full."""
        return self

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, state: None, context: StepContext
    ) -> tuple[LinearPayload, None]:
        elements, values, left = gradient.numel(), gradient.numpy(), as_array(residual)
        scales = linear.bucket_means(values, left, self.block)
        data = np.empty(scales.nbytes + code_bytes(1, elements), np.uint8)
        data[: scales.nbytes] = scales.view(np.uint8)
        linear.quantize_signs(self.block, values, left, scales, data[scales.nbytes :])
        return LinearPayload(elements=elements, bits=1, bucket=self.block, data=data), None


def one_bit(options: OneBitOptions) -> OneBit | BlockSigns:
    return BlockSigns(block=options.block) if options.block else OneBit()


@dataclass(frozen=True, kw_only=True, slots=True)
class SignVote(Stateless):
    """The compressor `signsgd`: sends signs as votes. Stateless."""

    options: SignOptions = field(default_factory=SignOptions)

    def compress(
        self, gradient: torch.Tensor, state: None, context: StepContext
    ) -> tuple[QuantizedPayload, None]:
        level = 1.0
        if self.options.level is VoteLevel.MEAN:
            mean = magnitudes(gradient, context).total / max(1, gradient.numel())
            level = min(max(mean, SMALLEST_LEVEL), float(FLOAT32_MAX))
        signs = binary_payload(gradient, None, 0.0, 0.0)
        return replace(signs, format=CodeFormat.VOTE, levels=np.array([level], np.float32)), None
