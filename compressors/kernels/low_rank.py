"""Products of a matrix with few vectors, and the matrix that such products stand for, on several threads.

A matrix M lies row by row, and is the saturating sum of a gradient and a residual. Vectors over its rows or
columns lie in the rows of an array. The number of threads changes no bit, and neither does the processor:
each product and each sum is rounded to float32, in a fixed order.

Machine code trusts the sizes that it receives, so every array is checked in this file first.

On a GPU torch's products take their place: `project_there` and `subtract_there`. No other process needs their
bits: a worker's residual follows from the coordinates that it sends.
"""

from __future__ import annotations

import numpy as np
import torch

from ..payload import Float32
from .checks import check, checked_pair
from .lazy import low_rank_loops
from .shared import FLOAT32_MAX, LANES
from .threads import run

PANEL = 4  # as in `low_rank_loops`, which would import numba
# Each chunk of rows has sums over rows of its own, which take memory and time: few chunks, none too short.
MOST_CHUNKS, LEAST_ROWS = 16, 64
# A vector of which less than this fraction is left after the projections is replaced: the rest is rounding.
LEAST_LEFT = 1e-5


def project(
    gradient: Float32, residual: Float32 | None, left: Float32, right: Float32
) -> tuple[Float32, Float32, bool]:
    """Return the products of M = gradient + residual, of shape (rows, columns), with vectors.

    Args:
        left, right: vectors over rows and over columns, (vectors, rows) and (vectors, columns).

    Returns:
        `right` @ M.T and `left` @ M, clipped to finite float32; and False if an element of the gradient is
            not finite, where the products mean nothing.
    """
    rows, columns = left.shape[1], right.shape[1]
    pair = _checked(gradient, residual, rows, columns)
    tall = _tall(rows)
    padded_left, padded = _padded(left, 1), _padded(right, LANES)
    over_columns = np.zeros((len(padded), rows), np.float32)
    over_rows = np.empty((-(-rows // tall), *padded.shape), np.float32)
    faults = np.zeros(len(over_rows), np.float32)
    factors = padded_left.reshape(-1), padded.reshape(-1), over_columns.reshape(-1)
    run(low_rank_loops.project, gradient.size, gradient, pair, columns, *factors, over_rows, tall, faults)
    total = over_rows[0]
    with np.errstate(over="ignore", invalid="ignore"):
        for more in over_rows[1:]:
            total += more
    products = over_columns[: len(right)], total[: len(left), :columns]
    return _finite(products[0]), _finite(products[1]), bool(np.isfinite(faults).all())


def expand(
    left: Float32,
    right: Float32,
    out: Float32,
    gradient: Float32 | None = None,
    residual: Float32 | None = None,
) -> None:
    """Write `left`.T @ `right`, of shape (rows, columns), to `out`; or gradient + residual minus it.

    Args:
        left, right: vectors over rows and over columns, (vectors, rows) and (vectors, columns).
        out: receives the matrix, clipped to finite float32; it may be `residual`.
        gradient: None for the product itself.
    """
    rows, columns = left.shape[1], right.shape[1]
    check("out", out, np.float32, rows * columns, written=True)
    nothing = np.empty(0, np.float32)
    given = nothing if gradient is None else gradient
    pair = nothing if gradient is None else _checked(gradient, residual, rows, columns)
    factors, padded = np.ascontiguousarray(left).reshape(-1), _padded(right, LANES)[: len(right)]
    shape = padded.shape[1], _tall(rows)
    run(low_rank_loops.expand, out.size, given, pair, columns, factors, padded.reshape(-1), *shape, out)


def project_there(
    gradient: torch.Tensor, residual: torch.Tensor | None, left: Float32, right: Float32
) -> tuple[torch.Tensor, Float32, Float32]:
    """Return M = gradient + residual on the device of the gradient, and the products of `project`.

    The products come to the host in one copy, because each copy waits for the GPU.
    """
    total = gradient if residual is None else torch.add(gradient, residual)
    matrix = _clipped(total).view(left.shape[1], right.shape[1])
    factors = [torch.from_numpy(np.ascontiguousarray(each)).to(matrix.device) for each in (left, right)]
    over_columns, over_rows = factors[1] @ matrix.T, factors[0] @ matrix
    found = torch.cat([over_columns.reshape(-1), over_rows.reshape(-1)]).cpu().numpy()
    cut = over_columns.numel()
    return matrix, _finite(found[:cut].reshape(len(right), -1)), _finite(found[cut:].reshape(len(left), -1))


def subtract_there(matrix: torch.Tensor, left: Float32, right: Float32, out: torch.Tensor) -> None:
    """Write the matrix without `left`.T @ `right` to `out`, which lies on its device."""
    over_rows, over_columns = (
        torch.from_numpy(np.ascontiguousarray(each)).to(matrix.device) for each in (left, right)
    )
    rest = torch.addmm(matrix, over_rows.T, over_columns, alpha=-1)
    out.copy_(_clipped(rest).view(out.shape))


def corrected(a: Float32, s: Float32, q: Float32, r: Float32) -> Float32:
    """Return r - c @ q with c = (a @ s.T + r @ q.T) / 2, in float64 and then clipped to finite float32.

    a, s: vectors over rows, (vectors, rows). q, r: vectors over columns, (vectors, columns).
    """
    out = np.empty(r.shape, np.float64)
    low_rank_loops.correct(*(each.astype(np.float64) for each in (a, s, q, r)), out)
    return np.clip(out, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


def orthonormal(given: Float32, old: Float32) -> Float32:
    """Return the rows of `given` made orthonormal, in their order (modified Gram-Schmidt).

    A row that is 0, or depends on the rows before, is replaced by one of the orthonormal rows of `old` or by
    a unit vector. The rows are at most as many as their elements.
    """
    out = np.empty(given.shape, np.float64)
    arrays = given.astype(np.float64), old.astype(np.float64), LEAST_LEFT, out
    low_rank_loops.orthonormal(*arrays)
    return out.astype(np.float32)


def warm_up() -> None:
    """Compile every kernel of this module, or load it from the cache."""
    matrix, left, right = (
        np.ones(51, np.float32),
        np.eye(2, 3, dtype=np.float32),
        np.eye(2, 17, dtype=np.float32),
    )
    project(matrix, np.ones_like(matrix), left, right)
    expand(left, right, np.empty_like(matrix), matrix, matrix)
    corrected(left, left, right, right)
    orthonormal(left, left)


def _checked(gradient: Float32, residual: Float32 | None, rows: int, columns: int) -> Float32:
    """Check the arrays of a matrix of this shape; return the residual as the loops take it."""
    check("gradient", gradient, np.float32, rows * columns)
    return checked_pair(gradient, residual)


def _tall(rows: int) -> int:
    """Return the number of rows of a chunk, which is even."""
    return 2 * max(LEAST_ROWS // 2, -(-rows // (2 * MOST_CHUNKS)))


def _padded(vectors: Float32, lanes: int) -> Float32:
    """Return the vectors with zeros up to a multiple of `lanes` elements and of `PANEL` vectors."""
    count, length = vectors.shape
    padded = np.zeros((-(-count // PANEL) * PANEL, -(-length // lanes) * lanes), np.float32)
    padded[:count, :length] = vectors
    return padded


def _clipped(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-float(FLOAT32_MAX), float(FLOAT32_MAX))


def _finite(products: Float32) -> Float32:
    """Return the products with sums beyond float32 replaced by its limit, and those of both signs by 0."""
    if np.isfinite(products).all():  # many times as fast as the replacement
        return products
    most = float(FLOAT32_MAX)
    finite: Float32 = np.nan_to_num(products, nan=0.0, posinf=most, neginf=-most)
    return finite
