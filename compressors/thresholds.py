"""What the threshold compressors share: how absolute thresholds meet PyTorch's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import torch

from .base import StepContext
from .kernels import Magnitudes, devices
from .payload import Bytes, CodeFormat, Float32, QuantizedPayload


class Scale(StrEnum):
    """Which gradient the absolute thresholds are meant for.

    The thresholds of MXNet and of the 4-bit paper come from a system whose gradient is the *sum* over the
    batch. PyTorch's is the mean, smaller by the number of samples; thresholds applied to it as printed are
    too coarse by that factor. (Not in the paper: an erratum of ours.)

    SUM: thresholds apply to gradient * samples. We divide the thresholds instead of multiplying the
        gradient: the residual stays in the domain of the mean, and the receiver need not know about it. The
        codes are the same, but for values within a rounding of a threshold where samples is no power of two.
    MEAN: thresholds apply to the gradient as PyTorch gives it.
    """

    SUM = "sum"
    MEAN = "mean"

    def factor(self, samples: int) -> float:
        """How many times larger than PyTorch's gradient, mean over so many samples, the one is that
        thresholds are meant for."""
        return float(samples) if self is Scale.SUM else 1.0


def check_threshold(name: str, value: float) -> None:
    # Far inside float32, so that it stays positive and finite when it is divided by the samples.
    if not 1e-20 <= value <= 1e20:
        raise ValueError(f"{name}: expected a number from 1e-20 to 1e20, got {value}")


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
