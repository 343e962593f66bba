"""`ternary`: send one of -level, 0, level, in two bits per element, deterministically.

    r = g + e;  m = a running mean of |r|;  send sign(r) * level where |r| > factor * m, else 0

The level is the mean of |r| over the elements that are sent, which minimizes the squared error for that
choice of elements. Source: Li, Zhang and Liu, "Ternary Weight Networks" (2016), which quantizes weights this
way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gradwire.compressors import CodeFormat, CompressorEntry, QuantizedPayload, TensorCoding, pack_codes

if TYPE_CHECKING:  # without torch, so that gc-plan reads the declaration at once
    import torch

    from gradwire.compressors import StepContext, TensorSpec

LIMITS = np.finfo(np.float32)


@dataclass(frozen=True, kw_only=True)
class TernaryOptions:
    """Options of `ternary`.

    Attributes:
        factor: threshold above which an element is sent, as a multiple of the running mean; 0 to 100.
        memory: weight of the old mean in each step's running mean; at least 0, below 1.
    """

    factor: float = 0.7
    memory: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.factor <= 100:
            raise ValueError(f"factor: expected 0 to 100, got {self.factor:g}")
        if not 0 <= self.memory < 1:
            raise ValueError(f"memory: expected at least 0 and below 1, got {self.memory:g}")


@dataclass(frozen=True, kw_only=True)
class Ternary:
    """The compressor. Its state for a tensor is the running mean of |r|; None before the first step."""

    options: TernaryOptions = field(default_factory=TernaryOptions)

    def init(self, spec: TensorSpec) -> float | None:
        """Return the state of a tensor before its first step."""
        return None

    def compress(
        self, gradient: torch.Tensor, state: float | None, context: StepContext
    ) -> tuple[QuantizedPayload, float]:
        """Return the payload for one tensor's gradient, residual included, and the new state."""
        values = gradient.numpy()  # includes the residual; a compressor must not write to it
        sizes = np.abs(values)
        now = float(sizes.mean(dtype=np.float64)) if sizes.size else 0.0
        mean = now if state is None else self.options.memory * state + (1 - self.options.memory) * now
        chosen = sizes > self.options.factor * mean
        level = float(sizes[chosen].mean(dtype=np.float64)) if chosen.any() else 0.0
        level = max(level, float(LIMITS.smallest_normal))  # the payload's format requires a positive level
        payload = QuantizedPayload(
            format=CodeFormat.SIGNED_2BIT,
            elements=values.size,
            levels=np.array([level], np.float32),
            data=pack_codes(2, np.where(chosen, np.where(values > 0, 3, 2), 0)),
        )
        return payload, mean


entry = CompressorEntry(
    options=TernaryOptions,
    build=lambda options: Ternary(options=options),
    sends=lambda options: TensorCoding(bits=2, tensor_bytes=4),
    nanoseconds=lambda options: 6.0,
)
