"""The contract that every compressor keeps.

A compressor is a pair of functions over explicit state, in the manner of an optax transformation:

    state = compressor.init(spec)
    payload, state = compressor.compress(gradient, state, context)

It never touches the network, protobuf, threads or the clock. The gradient is a flat, contiguous float32
tensor and is never written to. Arrays inside the state belong to the compressor and may be updated in place;
the returned state replaces the one passed in.

Error feedback is a wrapper (`feedback.ErrorFeedback`), so a compressor need not know about it. One that
can do both in a single pass over memory says so by also offering `compress_with_residual`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from .kernels import Magnitudes
from .payload import Payload


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A parameter tensor as the compressor knows it."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What a compressor may know about the step.

    samples: how many samples the mean gradient was taken over, at least 1.
    step: steps that this worker has pushed before, from 0.
    rng: seeded by job, rank and step, so that a run can be repeated bit for bit.
    magnitudes: of the gradient at hand, before any residual is added, where the caller knows them already;
        a compressor that needs them otherwise spends a read pass of its own.
    """

    samples: int
    step: int
    rng: np.random.Generator
    magnitudes: Magnitudes | None = None


class Compressor(Protocol):
    """Tensors in, payloads out."""

    def init(self, spec: TensorSpec) -> Any:
        """State for one tensor, before its first gradient."""
        ...

    def compress(self, gradient: torch.Tensor, state: Any, context: StepContext) -> tuple[Payload, Any]:
        """Compress `gradient` (float32, shape (elements,)); return the payload and the next state."""
        ...


@runtime_checkable
class FusedFeedback(Protocol):
    """A compressor that adds the residual, compresses, and leaves what was not sent, in one pass."""

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor, state: Any, context: StepContext
    ) -> tuple[Payload, Any]:
        """As `compress` of `gradient + residual`; afterwards `residual` (float32, in place) holds
        `gradient + residual - decode(payload)`. Bit for bit what the unfused path leaves."""
        ...
