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
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ..common.stored import stored
from .base import Fused, StepContext, TensorSpec, as_array
from .dense import dense_payload
from .kernels import FLOAT32_MAX, devices, linear, low_rank
from .payload import (
    EXPONENTS,
    NO_BYTES,
    DenseFormat,
    Float32,
    LinearPayload,
    ProjectedPayload,
    ValuePayload,
    code_bytes,
)
from .projections import BUCKET, Factors, LowRankOptions
from .reduction import reduce_payloads


@stored("matrix-rows")
@dataclass(frozen=True, slots=True)
class MatrixRows:
    """The state of `LowRank` for one tensor, which never changes: the rows of its matrix."""

    rows: int


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors over rows and columns, (rank, rows) and (rank, columns): bases, or coordinates in them."""

    rows: Float32
    columns: Float32

    @staticmethod
    def of(flat: Float32, rank: int, rows: int) -> Vectors:
        """Return the vectors that lie end to end in `flat`, those over rows first."""
        return Vectors(flat[: rank * rows].reshape(rank, -1), flat[rank * rows :].reshape(rank, -1))

    def flat(self) -> Float32:
        return np.concatenate([self.rows.reshape(-1), self.columns.reshape(-1)])


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
        rank, rows = self.options.rank, spec.shape[0]
        # Integers, because the functions of normal numbers may round differently on another machine.
        drawn = np.random.default_rng(seed).integers(
            -(1 << 20), 1 << 20, self.options.coordinates(spec.shape)
        )
        given = Vectors.of(drawn.astype(np.float32), rank, rows)
        return self._orthonormal(given, Vectors(np.zeros_like(given.rows), np.zeros_like(given.columns)))

    def advance(self, spec: TensorSpec, bases: Float32, coordinates: Float32) -> Float32:
        rank, rows = self.options.rank, spec.shape[0]
        return self._orthonormal(Vectors.of(coordinates, rank, rows), Vectors.of(bases, rank, rows))

    def expand(self, spec: TensorSpec, bases: Float32, coordinates: Float32, out: Float32) -> None:
        low_rank.expand(*self._factors(bases, coordinates, spec.shape[0]), out)

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
        bases = Vectors.of(context.bases, self.options.rank, state.rows)
        vectors, left = (bases.rows, bases.columns), residual if left is None else left
        if devices.on_gpu(gradient):
            matrix, over_columns, over_rows = low_rank.project_there(gradient, residual, *vectors)
            payload, sent = self._payload(Vectors(over_columns, over_rows).flat(), gradient.numel(), context)
            if left is not None:
                low_rank.subtract_there(matrix, *self._factors(context.bases, sent, state.rows), left)
            return payload, state
        values, before, out = gradient.numpy(), as_array(residual), as_array(left)
        over_columns, over_rows, finite = low_rank.project(values, before, *vectors)
        if not finite:
            raise FloatingPointError("gradient with an infinity or a NaN")
        payload, sent = self._payload(Vectors(over_columns, over_rows).flat(), gradient.numel(), context)
        if out is not None:
            low_rank.expand(*self._factors(context.bases, sent, state.rows), out, values, before)
        return payload, state

    def _payload(
        self, coordinates: Float32, elements: int, context: StepContext
    ) -> tuple[ProjectedPayload, Float32]:
        """Return the coordinates in the format that the options name, and as a receiver decodes them."""
        exponent, sent = 0, np.empty_like(coordinates)
        values: ValuePayload
        if self.options.values is Factors.FLOAT16:
            largest = float(np.abs(coordinates).max())
            # The largest coordinate is then from 2**14 to 2**15.
            exponent = min(max(math.frexp(largest)[1] - 15, EXPONENTS[0]), EXPONENTS[1]) if largest else 0
            values = dense_payload(DenseFormat.FLOAT16, np.ldexp(coordinates, -exponent))
        else:
            values = _rounded(coordinates, self.options.values.bits, int(context.rng.integers(2**63)))
        reduce_payloads([values], [math.ldexp(1.0, exponent)], sent)
        form = replace(values, data=NO_BYTES)
        return ProjectedPayload(elements=elements, values=form, exponent=exponent, data=values.data), sent

    def _factors(self, bases: Float32, coordinates: Float32, rows: int) -> tuple[Float32, Float32]:
        """Return [S A]^T and [Q, R - Q C^T]^T: the factors of rec(S, R)."""
        basis = Vectors.of(bases, self.options.rank, rows)
        given = Vectors.of(coordinates, self.options.rank, rows)
        rest = low_rank.corrected(basis.rows, given.rows, basis.columns, given.columns)
        return np.concatenate([given.rows, basis.rows]), np.concatenate([basis.columns, rest])

    def _orthonormal(self, vectors: Vectors, old: Vectors) -> Float32:
        """Return the bases of the next version: the right one from products with the left one, and the
        reverse."""
        rows = low_rank.orthonormal(vectors.rows, old.rows)
        return Vectors(rows, low_rank.orthonormal(vectors.columns, old.columns)).flat()


def _rounded(values: Float32, bits: int, seed: int) -> LinearPayload:
    """Return values as integers times the scale of their bucket, rounded at random without bias."""
    most = np.float32(FLOAT32_MAX / np.float32(2 ** (bits - 1)))
    levels = np.float32(2 ** (bits - 1) - 1)
    scales = np.minimum(linear.bucket_maxima(values, None, BUCKET) / levels, most)
    data = np.empty(scales.nbytes + code_bytes(bits, values.size), np.uint8)
    data[: scales.nbytes] = scales.view(np.uint8)
    linear.quantize_linear(bits, BUCKET, values, None, scales, data[scales.nbytes :], seed=seed)
    return LinearPayload(elements=values.size, bits=bits, bucket=BUCKET, data=data)
