# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels over matrices of low rank; `low_rank` describes them.

Factors have one row for each basis vector, padded with zeros to whole vectors and to a multiple of `PANEL`
rows. Two rows of the matrix are read at a time, and four basis vectors, so that a loaded number serves
several products. Rows are cut into chunks by the shape alone, and each sum has a fixed order, so that threads
change no bit.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from . import vectors as v
from .compiling import fetch_add, kernel
from .dense import _clip
from .shared import FLOAT32_MAX, LANES

PANEL = 4  # basis vectors of a pass over two rows


@njit
def _here(gradient, residual, at):
    """Return sixteen elements of the saturating sum gradient + residual; of the gradient if `residual` is
    empty."""
    if residual.size == 0:
        return v.load(gradient, at)
    return v.saturated_sum(v.load(gradient, at), v.load(residual, at))


@njit
def _rest(gradient, residual, first, count, padded):
    """Return the last `count` elements of a row, from index `first` on, as a vector that ends with zeros."""
    for k in range(LANES):
        value = np.float32(0.0)
        if k < count:
            value = gradient[first + k]
            if residual.size > 0:
                value = _clip(value + residual[first + k], FLOAT32_MAX)
        padded[k] = value
    return v.load(padded, 0)


@njit
def _step(x, y, right, sums, at, wide, a, b, s, t):
    """Multiply sixteen elements of two rows, x and y, with four basis vectors.

    Args:
        right, sums: basis vectors over columns, and the sums over rows that grow by a * x + b * y.
        at: index of the elements in the first of the four rows of both.
        wide: length of a row of both.
        a, b: four coefficients of each row, in every lane.
        s, t: sums over columns of each row, which are returned with the products added.
    """
    q0, q1 = v.load(right, at), v.load(right, at + wide)
    q2, q3 = v.load(right, at + 2 * wide), v.load(right, at + 3 * wide)
    s = (
        v.add(s[0], v.multiply(x, q0)),
        v.add(s[1], v.multiply(x, q1)),
        v.add(s[2], v.multiply(x, q2)),
        v.add(s[3], v.multiply(x, q3)),
    )
    t = (
        v.add(t[0], v.multiply(y, q0)),
        v.add(t[1], v.multiply(y, q1)),
        v.add(t[2], v.multiply(y, q2)),
        v.add(t[3], v.multiply(y, q3)),
    )
    for k in range(PANEL):
        more = v.add(v.multiply(x, a[k]), v.multiply(y, b[k]))
        v.store(sums, at + k * wide, v.add(v.load(sums, at + k * wide), more))
    return s, t


@njit
def _four(factors, first, rows, row):
    """Return the elements of four basis vectors over rows at one row, each in every lane."""
    return (
        v.all_floats(factors[first * rows + row]),
        v.all_floats(factors[(first + 1) * rows + row]),
        v.all_floats(factors[(first + 2) * rows + row]),
        v.all_floats(factors[(first + 3) * rows + row]),
    )


@kernel
def project(cursor, gradient, residual, columns, left, right, over_columns, over_rows, tall, faults):
    """Multiply M = gradient + residual with the basis vectors of both sides, in one pass.

    Args:
        columns: length of a row of M.
        left, right: basis vectors over rows and over columns, end to end.
        over_columns: receives M times each vector of `right`, end to end.
        over_rows: receives for each chunk the part of M^T times each vector of `left`, (chunks, vectors,
            padded columns).
        tall: rows of a chunk, an even number.
        faults: receives for each chunk 0, or a NaN if an element of the gradient is not finite.
    """
    chunks, vectors, wide = over_rows.shape
    rows, whole, zero = gradient.size // columns, columns // LANES * LANES, v.all_floats(np.float32(0.0))
    padded, also_padded = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    chunk = fetch_add(cursor, 1)
    while chunk < chunks:
        sums, fault = over_rows[chunk].reshape(-1), zero
        sums[:] = np.float32(0.0)
        for row in range(chunk * tall, min((chunk + 1) * tall, rows), 2):
            alone = row + 1 == min((chunk + 1) * tall, rows)
            one, two = row * columns, (row if alone else row + 1) * columns
            for k in range(0, whole, LANES):
                fault = v.add(fault, v.multiply(v.load(gradient, one + k), zero))
                fault = v.add(fault, v.multiply(v.load(gradient, two + k), zero))
            if whole < columns:
                empty = residual[:0]
                x = _rest(gradient, empty, one + whole, columns - whole, padded)
                y = _rest(gradient, empty, two + whole, columns - whole, also_padded)
                fault = v.add(fault, v.multiply(x, zero))
                fault = v.add(fault, v.multiply(y, zero))
            for first in range(0, vectors, PANEL):
                a = _four(left, first, rows, row)
                b = (zero, zero, zero, zero) if alone else _four(left, first, rows, row + 1)
                s, t = (zero, zero, zero, zero), (zero, zero, zero, zero)
                for k in range(0, whole, LANES):
                    x, y = _here(gradient, residual, one + k), _here(gradient, residual, two + k)
                    s, t = _step(x, y, right, sums, first * wide + k, wide, a, b, s, t)
                if whole < columns:
                    x = _rest(gradient, residual, one + whole, columns - whole, padded)
                    y = _rest(gradient, residual, two + whole, columns - whole, also_padded)
                    s, t = _step(x, y, right, sums, first * wide + whole, wide, a, b, s, t)
                for k in range(PANEL):
                    over_columns[(first + k) * rows + row] = v.sum_floats(s[k])
                    if not alone:
                        over_columns[(first + k) * rows + row + 1] = v.sum_floats(t[k])
        faults[chunk] = v.sum_floats(fault)
        chunk = fetch_add(cursor, 1)


@njit
def _products(left, right, rows, row, other, at, wide, vectors):
    """Return sixteen elements of two rows of the sum of all outer products."""
    x = y = v.all_floats(np.float32(0.0))
    for k in range(vectors):
        q = v.load(right, k * wide + at)
        x = v.add(x, v.multiply(q, v.all_floats(left[k * rows + row])))
        y = v.add(y, v.multiply(q, v.all_floats(left[k * rows + other])))
    return x, y


@kernel
def expand(cursor, gradient, residual, columns, left, right, wide, tall, out):
    """Write the sum of the outer products of `left` and `right` to `out`, or subtract it from a matrix.

    Args:
        gradient, residual: the matrix is their saturating sum; an empty gradient to write the products
            themselves, an empty residual for zeros.
        columns: length of a row of the matrix.
        left: vectors over rows, end to end, as many as `right` has.
        right: vectors over columns, each padded to `wide` elements, end to end.
        tall: rows that a thread claims at a time, an even number.
        out: receives the matrix, which may be `residual`.
    """
    rows, vectors, whole = out.size // columns, right.size // wide, columns // LANES * LANES
    zero, padded = v.all_floats(np.float32(0.0)), np.zeros(LANES, np.float32)
    chunk = fetch_add(cursor, 1)
    while chunk * tall < rows:
        for row in range(chunk * tall, min((chunk + 1) * tall, rows), 2):
            other = min(row + 1, rows - 1)
            for k in range(0, whole, LANES):
                x, y = _products(left, right, rows, row, other, k, wide, vectors)
                one, two = row * columns + k, other * columns + k
                if gradient.size > 0:
                    # Both rows are read before one is written: a last row by itself is both.
                    given, also = _here(gradient, residual, one), _here(gradient, residual, two)
                    x, y = v.subtract(given, x), v.subtract(also, y)
                v.store(out, one, v.saturated_sum(x, zero))
                v.store(out, two, v.saturated_sum(y, zero))
            if whole < columns:
                x, y = _products(left, right, rows, row, other, whole, wide, vectors)
                one, two = row * columns + whole, other * columns + whole
                if gradient.size > 0:
                    given = _rest(gradient, residual, one, columns - whole, padded)
                    x = v.subtract(given, x)
                    given = _rest(gradient, residual, two, columns - whole, padded)
                    y = v.subtract(given, y)
                v.store(padded, 0, v.saturated_sum(x, zero))
                for k in range(columns - whole):
                    out[one + k] = padded[k]
                v.store(padded, 0, v.saturated_sum(y, zero))
                for k in range(columns - whole):
                    out[two + k] = padded[k]
        chunk = fetch_add(cursor, 1)


@njit
def _dot(a, b):
    total = 0.0
    for k in range(a.size):
        total += a[k] * b[k]
    return total


@njit
def _remove(vector, others, count):
    """Subtract the projections on the first `count` of the orthonormal vectors `others`, twice, because once
    leaves rounding errors."""
    for _ in range(2):
        for k in range(count):
            other = others[k]
            part = _dot(vector, other)
            for i in range(vector.size):
                vector[i] -= part * other[i]


@kernel
def correct(a, s, q, r, out):
    """Write r - c q with c = (a s^T + r q^T) / 2 to `out`. All are float64, (vectors, length)."""
    out[:] = r
    for k in range(r.shape[0]):
        for j in range(q.shape[0]):
            part = (_dot(a[k], s[j]) + _dot(r[k], q[j])) / 2.0
            for i in range(out.shape[1]):
                out[k, i] -= part * q[j, i]


@kernel
def orthonormal(given, old, least, out):
    """Make the vectors of `given` orthonormal, in order, by the modified Gram-Schmidt process.

    A vector is replaced if less than the fraction `least` of its length is left. The first of the vectors
    `old`, from its own index on, of which more is left takes its place; otherwise a unit vector does.

    Args:
        given, old: float64 (vectors, length), at most as many vectors as their length; `old` orthonormal.
        out: receives the result, float64 (vectors, length).
    """
    vectors, length = given.shape
    for k in range(vectors):
        attempt = -1
        while True:
            here = out[k]
            if attempt < 0:
                for i in range(length):
                    here[i] = given[k, i]
            elif attempt < vectors:
                for i in range(length):
                    here[i] = old[(k + attempt) % vectors, i]
            else:
                for i in range(length):
                    here[i] = 1.0 if i == attempt - vectors else 0.0
            before = np.sqrt(_dot(here, here))
            if attempt >= 0:
                before = 1.0
            if before > 0.0:
                for i in range(length):
                    here[i] /= before
                _remove(here, out, k)
                left = np.sqrt(_dot(here, here))
                if left > (least if attempt < vectors else 0.5 / np.sqrt(length)):
                    for i in range(length):
                        here[i] /= left
                    break
            attempt += 1
