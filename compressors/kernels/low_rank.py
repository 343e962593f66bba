"""Products of matrices with few vectors, and the matrices that such products stand for, on several threads.

One call serves matrices of one rank and of any shapes; `matrices` says how their bases and coordinates lie.
A matrix M lies row by row, and is the saturating sum of a gradient and a residual. The number of threads
changes no bit, and neither does the processor: each product and each sum is rounded to float32, in a fixed
order.

Machine code trusts the sizes that it receives, so every array is checked in this file first.

On a GPU torch's products take their place: `project_there` and `subtract_there`. No other process needs their
bits: a worker's residual follows from the coordinates that it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from ..payload import Float32, Int64
from .checks import check
from .lazy import low_rank_loops
from .matrices import CHUNKS, NUMBERS, SUMS, layout_of
from .shared import FLOAT32_MAX
from .threads import run

# A vector of which less than this fraction is left after the projections is replaced: the rest is rounding.
LEAST_LEFT = 1e-5
NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices that one call serves.

    Attributes:
        rank: number of basis vectors over rows, and over columns, of each.
        shapes: rows and columns of each.
    """

    rank: int
    shapes: tuple[tuple[int, int], ...]

    @property
    def layout(self) -> Int64:
        return layout_of(self.rank, self.shapes)

    @property
    def elements(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes)

    def split(self, numbers: Float32) -> list[Float32]:
        """Return the numbers of each matrix, given those of all, end to end."""
        ends = self.layout[NUMBERS].tolist()
        return [numbers[start:end] for start, end in pairwise(ends)]

    def places(self, starts: Sequence[int], size: int) -> Int64:
        """Return the places of the matrices in an array of `size` elements; raise ValueError if one does not
        fit."""
        for start, (rows, columns) in zip(starts, self.shapes, strict=True):
            if not 0 <= start <= size - rows * columns:
                raise ValueError(
                    f"matrix of {rows} x {columns} at {start}: expected it within {size} elements"
                )
        return np.array(starts, np.int64)

    def check(self, name: str, numbers: Float32) -> None:
        """Raise ValueError unless these can be the bases or coordinates of all matrices, end to end."""
        check(name, numbers, np.float32, int(self.layout[NUMBERS, -1]))


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The sums gradient + residual that are the matrices of a call.

    Attributes:
        gradients: gradient of each matrix: contiguous float32 of one dimension, on the host.
        residual: holds the residuals; None for zeros.
        starts: index of the first element of each matrix in `residual`.
    """

    gradients: Sequence[torch.Tensor]
    residual: Float32 | None
    starts: Sequence[int]

    def checked(self, matrices: Matrices) -> tuple[npt.NDArray[np.uint64], Float32, Int64]:
        """Return address of each gradient, residual and places, as the loops take them."""
        for (rows, columns), each in zip(matrices.shapes, self.gradients, strict=True):
            plain = each.dtype is torch.float32 and each.device.type == "cpu" and each.is_contiguous()
            if not plain or each.shape != (rows * columns,):
                expected = f"contiguous float32 of shape ({rows * columns},) on the host"
                raise ValueError(f"gradient: expected {expected}, got {each.dtype} of {each.shape}")
        at = np.array([each.data_ptr() for each in self.gradients], np.uint64)
        if self.residual is None:
            return at, NOTHING, np.zeros(at.size, np.int64)
        check("residual", self.residual, np.float32, self.residual.size)
        return at, self.residual, matrices.places(self.starts, self.residual.size)


def project(matrices: Matrices, sources: Sources, bases: Float32) -> tuple[Float32, list[bool]]:
    """Return the coordinates of all matrices, end to end: of each M the products with the vectors over
    columns and over rows of its bases, clipped to finite float32.

    The second value is False for each matrix of whose gradient an element is not finite. Its products mean
    nothing. bases: those of all matrices, end to end.
    """
    layout = matrices.layout
    coordinates, sums = np.empty(layout[NUMBERS, -1], np.float32), np.empty(layout[SUMS, -1], np.float32)
    faults = np.zeros(layout[CHUNKS, -1], np.float32)
    matrices.check("bases", bases)
    given = *sources.checked(matrices), bases, coordinates, sums
    run(low_rank_loops.project, matrices.elements, layout, matrices.rank, *given, faults)
    run(low_rank_loops.combine, sums.size, layout, matrices.rank, sums, coordinates)
    return coordinates, np.logical_and.reduceat(np.isfinite(faults), layout[CHUNKS, :-1]).tolist()


def expand(
    matrices: Matrices,
    bases: Float32,
    coordinates: Float32,
    out: Float32,
    starts: Sequence[int],
    sources: Sources | None = None,
) -> None:
    """Write the matrices with these coordinates to `out`, or `sources` minus them: S Q^T + A (R - C Q)^T with
    C = (A S^T + R Q^T) / 2, clipped to finite float32.

    Args:
        bases: A, over rows, and Q, over columns, of all matrices, end to end.
        coordinates: S, over rows, and R, over columns, of all matrices, end to end.
        out: receives each matrix from its index in `starts` on; it may be the residual of `sources`, and
            has its places.
    """
    check("out", out, np.float32, out.size, written=True)
    places = matrices.places(starts, out.size)
    gradients, residual = np.empty(0, np.uint64), NOTHING
    if sources is not None:
        gradients, residual, at = sources.checked(matrices)
        if residual.size and not np.array_equal(places, at):
            raise ValueError("starts: expected those of the residual")
    known = bases, coordinates, corrected(matrices, bases, coordinates)
    given = matrices.layout, matrices.rank, gradients, residual, places, *known, out
    run(low_rank_loops.expand, matrices.elements, *given)


def corrected(matrices: Matrices, bases: Float32, coordinates: Float32) -> Float32:
    """Return R - C Q of each matrix in the places of R, from float64; other places are undefined."""
    return _of_numbers(low_rank_loops.correct, matrices, bases, coordinates)


def orthonormal(matrices: Matrices, bases: Float32, coordinates: Float32) -> Float32:
    """Return the coordinates of all matrices, end to end, with their vectors made orthonormal, in their order
    (modified Gram-Schmidt): those over rows, and those over columns.

    A vector that is 0, or depends on the vectors before, is replaced by one of the orthonormal vectors of
    `bases` or by a unit vector. The rank is at most the rows and the columns of each matrix.
    """
    if any(min(shape) < matrices.rank for shape in matrices.shapes):
        raise ValueError(f"rank: expected at most the rows and columns, got {matrices}")
    return _of_numbers(low_rank_loops.orthonormal, matrices, bases, coordinates, LEAST_LEFT)


def _of_numbers(
    kernel: Callable[..., None], matrices: Matrices, bases: Float32, coordinates: Float32, *more: float
) -> Float32:
    matrices.check("bases", bases)
    matrices.check("coordinates", coordinates)
    out = np.empty_like(coordinates)
    run(kernel, out.size, matrices.layout, matrices.rank, bases, coordinates, *more, out)
    return out


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


def warm_up() -> None:
    """Compile every kernel of this module, or load it from the cache."""
    matrices, matrix = Matrices(2, ((3, 17),)), np.ones(51, np.float32)
    numbers = np.ones(40, np.float32)
    sources = Sources([torch.from_numpy(np.ones_like(matrix))], matrix.copy(), [0])
    project(matrices, sources, numbers)
    expand(matrices, numbers, numbers, np.empty_like(matrix), [0], sources)
    orthonormal(matrices, numbers, numbers)


def _clipped(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-float(FLOAT32_MAX), float(FLOAT32_MAX))


def _finite(products: Float32) -> Float32:
    """Return the products with sums beyond float32 replaced by its limit, and those of both signs by 0."""
    if np.isfinite(products).all():  # many times as fast as the replacement
        return products
    most = float(FLOAT32_MAX)
    finite: Float32 = np.nan_to_num(products, nan=0.0, posinf=most, neginf=-most)
    return finite
