"""Low rank in one round trip: `lowrank`, two power iterations that lag by one version.

A tensor counts as a matrix M with a row for each index of its first dimension, n x m. A (n x r) and Q (m x r)
are the job's orthonormal bases of the version, the same everywhere:

    worker:  M = g + e;  S = M Q,  R = M^T A;  sends the coordinates C(S, R);  e = M - rec(C(S, R));
    rec:     rec(S, R) = S Q^T + A R^T - A C Q^T, with C = (A^T S + R^T Q) / 2: M on the span of either basis;
    next:    Q = orth(R), A = orth(S), of the mean S and R of all workers.

Both factors are known before the step begins, so that a step is one round trip, where PowerSGD's second
factor waits for the mean of its first. S and R are linear in M, so that a server adds up coordinates.

Coordinates travel as fp16, with a power of two as their scale, or as integers of 8 or 4 bits times the scale
of 128 of them. The integers are rounded up or down at random, so that their mean is exact. The first bases
are random.

A matrix whose coordinates are not clearly fewer than its elements travels as bf16, as vectors do.

Sources: PowerSGD, Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization" (NeurIPS 2019), for the power iteration with warm start and error feedback. Deviations: the
factors lag by one version, both projections are sent, and they are quantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from ..common.stored import stored
from .base import Fused, StepContext, TensorSpec, as_array
from .dense import dense_payload
from .kernels import devices, linear, low_rank
from .kernels.low_rank import Matrices, Sources
from .payload import (
    EXPONENTS,
    NO_BYTES,
    DenseFormat,
    DensePayload,
    Float32,
    LinearPayload,
    ProjectedPayload,
)
from .projections import BUCKET, Factors, LowRankOptions
from .reduction import sums_of_coordinates


@stored("matrix-rows")
@dataclass(frozen=True, slots=True)
class MatrixRows:
    """The state of `LowRank` for one tensor, which never changes: the rows of its matrix."""

    rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank(Fused):
    """The compressor `lowrank`."""

    options: LowRankOptions = field(default_factory=LowRankOptions)

    @property
    def out_of_place(self) -> bool:
        return True

    def init(self, spec: TensorSpec) -> MatrixRows:
        return MatrixRows(spec.shape[0])

    def start(self, spec: TensorSpec, seed: int) -> Float32:
        # Integers, because the functions of normal numbers may round differently on another machine.
        drawn = np.random.default_rng(seed).integers(
            -(1 << 20), 1 << 20, self.options.coordinates(spec.shape)
        )
        given = drawn.astype(np.float32)
        return self.advance(spec, np.zeros_like(given), given)

    def advance(self, spec: TensorSpec, bases: Float32, coordinates: Float32) -> Float32:
        return self.advance_each([spec], [bases], [coordinates])[0]

    def advance_each(
        self, specs: Sequence[TensorSpec], bases: Sequence[Float32], coordinates: Sequence[Float32]
    ) -> list[Float32]:
        matrices = self._matrices(specs)
        made = low_rank.orthonormal(matrices, np.concatenate(bases), np.concatenate(coordinates))
        return matrices.split(made)

    def expand(self, spec: TensorSpec, bases: Float32, coordinates: Float32, out: Float32) -> None:
        self.expand_each([spec], [bases], [coordinates], out, [0])

    def expand_each(
        self,
        specs: Sequence[TensorSpec],
        bases: Sequence[Float32],
        coordinates: Sequence[Float32],
        out: Float32,
        starts: Sequence[int],
    ) -> None:
        given = np.concatenate(bases), np.concatenate(coordinates)
        low_rank.expand(self._matrices(specs), *given, out, starts)

    def compress_with_residual(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        state: MatrixRows,
        context: StepContext,
        left: torch.Tensor | None = None,
    ) -> tuple[ProjectedPayload, MatrixRows]:
        if context.bases is None:
            raise ValueError("lowrank: expected the job's bases in the context, got None")
        matrices = Matrices(self.options.rank, ((state.rows, gradient.numel() // state.rows),))
        left, seeds = residual if left is None else left, [context.random.seed]
        if devices.on_gpu(gradient):
            return self._compress_there(matrices, gradient, residual, context, left), state
        sources = Sources([gradient], as_array(residual), [0])
        (payload,), (finite,) = self._compress(matrices, sources, context.bases, seeds, as_array(left))
        if not finite:
            raise FloatingPointError("gradient with an infinity or a NaN")
        return payload, state

    def compress_each(
        self,
        specs: Sequence[TensorSpec],
        gradients: Sequence[torch.Tensor],
        starts: Sequence[int],
        bases: Sequence[Float32],
        seeds: Sequence[int],
        residual: torch.Tensor,
        left: torch.Tensor,
    ) -> tuple[list[ProjectedPayload], list[bool]]:
        sources, before = Sources(gradients, residual.numpy(), starts), np.concatenate(bases)
        return self._compress(self._matrices(specs), sources, before, seeds, left.numpy())

    def _matrices(self, specs: Sequence[TensorSpec]) -> Matrices:
        return _matrices(self.options.rank, tuple(spec.shape for spec in specs))

    def _compress(
        self,
        matrices: Matrices,
        sources: Sources,
        bases: Float32,
        seeds: Sequence[int],
        left: Float32 | None,
    ) -> tuple[list[ProjectedPayload], list[bool]]:
        """Return payload of each matrix, and whether its gradient is finite; write the rest of `sources`
        to `left`."""
        coordinates, finite = low_rank.project(matrices, sources, bases)
        payloads = self._payloads(matrices, coordinates, seeds)
        if left is not None:
            sent = sums_of_coordinates([[each] for each in payloads], 1.0)
            low_rank.expand(matrices, bases, np.concatenate(sent), left, sources.starts, sources)
        return payloads, finite

    def _compress_there(
        self,
        matrices: Matrices,
        gradient: torch.Tensor,
        residual: torch.Tensor | None,
        context: StepContext,
        left: torch.Tensor | None,
    ) -> ProjectedPayload:
        """Compress on the gradient's device, as `_compress` does on the host."""
        assert context.bases is not None
        rank, ((rows, _),) = matrices.rank, matrices.shapes
        over_rows, over_columns = _vectors(context.bases, rank, rows)
        matrix, *products = low_rank.project_there(gradient, residual, over_rows, over_columns)
        coordinates = np.concatenate([each.reshape(-1) for each in products])
        (payload,) = self._payloads(matrices, coordinates, [context.random.seed])
        if left is not None:
            (sent,) = sums_of_coordinates([[payload]], 1.0)
            rest = _vectors(low_rank.corrected(matrices, context.bases, sent), rank, rows)[1]
            given = np.concatenate([_vectors(sent, rank, rows)[0], over_rows])
            low_rank.subtract_there(matrix, given, np.concatenate([over_columns, rest]), left)
        return payload

    def _payloads(
        self, matrices: Matrices, coordinates: Float32, seeds: Sequence[int]
    ) -> list[ProjectedPayload]:
        """Return the coordinates of each matrix in the format that the options name."""
        bits, numbers = self.options.values.bits, matrices.split(coordinates)
        elements = [rows * columns for rows, columns in matrices.shapes]
        if self.options.values is Factors.FLOAT16:
            return [_halves(size, each) for size, each in zip(elements, numbers, strict=True)]
        forms = [_form(each.size, bits) for each in numbers]
        datas = linear.round_each(bits, BUCKET, coordinates, [each.size for each in numbers], seeds)
        return [
            ProjectedPayload(elements=size, values=form, data=data)
            for size, form, data in zip(elements, forms, datas, strict=True)
        ]


@lru_cache(256)
def _matrices(rank: int, shapes: tuple[tuple[int, ...], ...]) -> Matrices:
    return Matrices(rank, tuple((shape[0], math.prod(shape[1:])) for shape in shapes))


@lru_cache(256)
def _form(count: int, bits: int) -> LinearPayload:
    return LinearPayload(elements=count, bits=bits, bucket=BUCKET, data=NO_BYTES)


def _halves(elements: int, coordinates: Float32) -> ProjectedPayload:
    """Return coordinates as float16, with an exponent that takes the largest to between 2**14 and 2**15."""
    largest = float(np.abs(coordinates).max())
    exponent = min(max(math.frexp(largest)[1] - 15, EXPONENTS[0]), EXPONENTS[1]) if largest else 0
    values = dense_payload(DenseFormat.FLOAT16, np.ldexp(coordinates, -exponent))
    form = DensePayload(format=values.format, elements=values.elements, data=NO_BYTES)
    return ProjectedPayload(elements=elements, values=form, exponent=exponent, data=values.data)


def _vectors(numbers: Float32, rank: int, rows: int) -> tuple[Float32, Float32]:
    """Return the vectors over rows, (rank, rows), and over columns, (rank, columns)."""
    return numbers[: rank * rows].reshape(rank, -1), numbers[rank * rows :].reshape(rank, -1)
