"""What the threshold compressors share: how absolute thresholds meet PyTorch's gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .base import StepContext
from .kernels import Magnitudes, devices
from .payload import Bytes, CodeFormat, Float32, QuantizedPayload


def magnitudes(gradient: torch.Tensor, context: StepContext) -> Magnitudes:
    """The gradient's: the caller's, if it has them, or a read pass of our own."""
    return context.magnitudes or devices.magnitudes(gradient)


def block_payload(
    format: CodeFormat, gradients: Sequence[torch.Tensor], levels: Float32, data: Bytes
) -> QuantizedPayload:
    """Of consecutive tensors, a block for each. levels, data: of all blocks, end to end."""
    sizes = np.array([gradient.numel() for gradient in gradients], np.int64)
    return QuantizedPayload(
        format=format,
        elements=int(sizes.sum()),
        levels=levels,
        sizes=sizes if sizes.size > 1 else None,
        data=data,
    )
