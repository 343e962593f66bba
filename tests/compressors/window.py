"""`window`: a compressor with bases that shows the contract and nothing else.

The bases of a matrix are the number of its first element that is sent. It sends a quarter of the elements
from there on, around the end, as float32. The window moves on by its length, and by one more after a mean
whose first coordinate is positive: so bases that did not advance by the mean of all are noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradwire.compressors import (
    CompressorEntry,
    DenseFormat,
    DensePayload,
    NoOptions,
    ProjectedPayload,
    StepContext,
    TensorCoding,
    TensorSpec,
)
from gradwire.compressors.base import Fused, Stateless
from gradwire.compressors.payload import NO_BYTES, Float32


def count(shape: Sequence[int]) -> int:
    return math.prod(shape) // 4 if len(shape) > 1 else 0


def inside(elements: int, bases: Float32, size: int) -> Any:
    return (int(bases[0]) + np.arange(size)) % elements


class Window(Fused, Stateless):
    def start(self, spec: TensorSpec, seed: int) -> Float32:
        return np.array([seed % spec.elements], np.float32)

    def expand(self, spec: TensorSpec, bases: Float32, coordinates: Float32, out: Float32) -> None:
        out.fill(0.0)
        out[inside(spec.elements, bases, coordinates.size)] = coordinates

    def advance(self, spec: TensorSpec, bases: Float32, coordinates: Float32) -> Float32:
        more = coordinates.size + int(coordinates[0] > 0)
        return np.array([(int(bases[0]) + more) % spec.elements], np.float32)

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, state: Any, context: StepContext
    ) -> tuple[ProjectedPayload, Any]:
        assert context.bases is not None
        total = gradient if residual is None else residual.add_(gradient)
        where = inside(total.numel(), context.bases, total.numel() // 4)
        sent = total.numpy()[where]
        if residual is not None:
            residual[where] = 0.0
        form = DensePayload(format=DenseFormat.FLOAT32, elements=sent.size, data=NO_BYTES)
        return ProjectedPayload(elements=total.numel(), values=form, data=sent.view(np.uint8)), state


WINDOW = CompressorEntry(
    options=NoOptions,
    build=lambda options: Window(),
    sends=lambda options: TensorCoding(bits=32),
    coordinates=lambda options: count,
    downlink=lambda options: "an update of parameters has no bases",
)
