"""Results of the kernels over matrices of low rank, defined in plain numpy.

Sums and products are rounded to float32 after each operation, in the order written here; tests hold the
compiled kernels to it bit for bit. Vectors over rows or columns lie in the rows of an array.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from plain_codes import add_saturating

from gradwire.compressors.kernels import FLOAT32_MAX
from gradwire.compressors.kernels.low_rank import LEAST_LEFT
from gradwire.compressors.kernels.matrices import LEAST_ROWS, MOST_CHUNKS
from gradwire.compressors.kernels.shared import LANES
from gradwire.compressors.payload import Float32, Float64


def finite(products: Float32) -> Float32:
    largest = float(FLOAT32_MAX)
    found: Float32 = np.nan_to_num(products, nan=0.0, posinf=largest, neginf=-largest)
    return found


def over_columns(matrix: Float32, right: Float32) -> Float32:
    """Return right @ matrix.T: each of sixteen lanes adds its products, then the lanes are added in order."""
    padding = (0, -matrix.shape[1] % LANES)
    blocks = np.pad(matrix, ((0, 0), padding)).reshape(len(matrix), -1, LANES)
    out = np.zeros((len(right), len(matrix)), np.float32)
    for vector, found in zip(
        np.pad(right, ((0, 0), padding)).reshape(len(right), -1, LANES), out, strict=True
    ):
        lanes = np.zeros((len(matrix), LANES), np.float32)
        for block, part in zip(blocks.transpose(1, 0, 2), vector, strict=True):
            lanes += block * part
        for lane in lanes.T:
            found += lane
    return finite(out)


def over_rows(matrix: Float32, left: Float32) -> Float32:
    """Return left @ matrix: rows are added in pairs within a chunk, and then the chunks."""
    rows = len(matrix)
    tall = 2 * max(LEAST_ROWS // 2, -(-rows // (2 * MOST_CHUNKS)))
    out = np.zeros((len(left), matrix.shape[1]), np.float32)
    for vector, found in zip(left, out, strict=True):
        for first in range(0, rows, tall):
            chunk = np.zeros(matrix.shape[1], np.float32)
            for row in range(first, min(first + tall, rows), 2):
                last = row + 1 == min(first + tall, rows)
                other = matrix[row] * np.float32(0.0) if last else matrix[row + 1] * vector[row + 1]
                chunk += matrix[row] * vector[row] + other
            found[:] = chunk if first == 0 else found + chunk
    return finite(out)


def product(left: Float32, right: Float32) -> Float32:
    """Return left.T @ right: outer products added one after the other."""
    out = np.zeros((left.shape[1], right.shape[1]), np.float32)
    for one, other in zip(left, right, strict=True):
        out += np.outer(one, other)
    return add_saturating(out, np.zeros_like(out))


def dot(one: Float64, other: Float64) -> np.float64:
    return np.float64(np.add.accumulate(np.concatenate([[0.0], one * other]))[-1])


def corrected(a: Float32, s: Float32, q: Float32, r: Float32) -> Float32:
    """Return r - c @ q with c = (a @ s.T + r @ q.T) / 2."""
    a64, s64, q64, r64 = (each.astype(np.float64) for each in (a, s, q, r))
    out = r64.copy()
    for k in range(len(r)):
        for j in range(len(q)):
            out[k] -= (dot(a64[k], s64[j]) + dot(r64[k], q64[j])) / 2.0 * q64[j]
    return np.clip(out, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


def orthonormal(given: Float32, old: Float32) -> Float32:
    """Return orthonormal rows by the modified Gram-Schmidt process, repeated once for each row."""
    found: list[Float64] = []
    length = given.shape[1]
    for k, row in enumerate(given.astype(np.float64)):
        olds = np.roll(old.astype(np.float64), -k, axis=0)
        units: npt.NDArray[np.float64] = np.eye(length)
        for attempt, start in enumerate([row, *olds, *units]):
            size = np.sqrt(dot(start, start)) if attempt == 0 else np.float64(1.0)
            if not size > 0:
                continue
            here = start / size
            for _ in range(2):
                for other in found:
                    here = here - dot(here, other) * other
            left = np.sqrt(dot(here, here))
            if left > (LEAST_LEFT if attempt <= len(given) else 0.5 / np.sqrt(length)):
                found.append(here / left)
                break
    return np.array(found).astype(np.float32)
