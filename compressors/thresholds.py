"""Functions that the threshold compressors (`2bit`, `4bit`) and others share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .base import StepContext
from .kernels import Magnitudes, devices
from .payload import Bytes, CodeFormat, Float32, QuantizedPayload


def magnitudes(gradient: torch.Tensor, context: StepContext) -> Magnitudes:
    """Return the magnitudes of the gradient: those in `context` if the caller knows them, otherwise
    measured."""
    return context.magnitudes or devices.magnitudes(gradient)


def block_payload(
    format: CodeFormat, gradients: Sequence[torch.Tensor], levels: Float32, data: Bytes
) -> QuantizedPayload:
    """Return a quantized payload with a block for each of several consecutive tensors.

    Args:
        format: format of the codes.
        gradients: gradients of the tensors, whose sizes become those of the blocks.
        levels: levels of all blocks, end to end.
        data: packed codes of all blocks, end to end.
    """
    sizes = np.array([gradient.numel() for gradient in gradients], np.int64)
    return QuantizedPayload(
        format=format,
        elements=int(sizes.sum()),
        levels=levels,
        sizes=sizes if sizes.size > 1 else None,
        data=data,
    )
