# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels over matrices of low rank; `low_rank` describes them, and `matrices` the layout of a call.

Threads claim chunks of rows, cut by the shape alone, and each sum has a fixed order, so that threads change
no bit. Two rows of a matrix are read at a time, and four basis vectors, so that a loaded number serves
several products.

Vectors over columns are packed side by side: sixteen elements of each, and then the next sixteen. Apart they
would lie a power of two apart, as the rows of most matrices do, and drive each other out of the first-level
cache. Missing vectors and elements are zeros.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from . import vectors as v
from .compiling import block_of, fetch_add, kernel
from .dense import _clip, read_float32
from .matrices import CHUNKS, COLUMNS, NUMBERS, PANEL, ROWS, SUMS, TALL, WIDE
from .shared import FLOAT32_MAX, LANES


@njit
def _pack(numbers, skipped, count, length, at, vectors, packed):
    """Copy `count` vectors of `length` elements, from number `skipped` on, side by side.

    Args:
        at: index of the first vector among the `vectors` of `packed`.
        packed: receives the vectors; elements beyond `length` stay.
    """
    for k in range(count):
        for i in range(length):
            place = (i // LANES * vectors + at + k) * LANES + i % LANES
            packed[place] = numbers[skipped + k * length + i]


@njit
def _pack_rows(numbers, skipped, count, rows, first, stop, at, vectors, packed):
    """Copy the elements of `count` vectors over rows, from row `first` to `stop`, row after row."""
    for k in range(count):
        for row in range(first, stop):
            packed[(row - first) * vectors + at + k] = numbers[skipped + k * rows + row]


@njit
def _rest(address, first, count, padded):
    """Return `count` elements after an address, from index `first` on, as a vector that ends with zeros."""
    for k in range(LANES):
        padded[k] = read_float32(address, first + k) if k < count else np.float32(0.0)
    return v.load(padded, 0)


@njit
def _rest_of(array, first, count, padded):
    for k in range(LANES):
        padded[k] = array[first + k] if k < count else np.float32(0.0)
    return v.load(padded, 0)


@njit
def _step(x, y, right, sums, at, a, b, s, t):
    """Multiply sixteen elements of two rows, x and y, with four basis vectors.

    Args:
        right, sums: basis vectors over columns, and the sums over rows that grow by a * x + b * y.
        at: index of the elements in both.
        a, b: four coefficients of each row, in every lane.
        s, t: sums over columns of each row, which are returned with the products added.
    """
    q0, q1 = v.load(right, at), v.load(right, at + LANES)
    q2, q3 = v.load(right, at + 2 * LANES), v.load(right, at + 3 * LANES)
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
        v.store(sums, at + k * LANES, v.add(v.load(sums, at + k * LANES), more))
    return s, t


@njit
def _four(left, at):
    """Return four coefficients, each in every lane."""
    return (
        v.all_floats(left[at]),
        v.all_floats(left[at + 1]),
        v.all_floats(left[at + 2]),
        v.all_floats(left[at + 3]),
    )


@kernel
def project(cursor, layout, rank, gradients, residual, places, bases, coordinates, sums, faults):
    """Multiply each M = gradient + residual with its bases on both sides, in one pass.

    Args:
        gradients: address of each gradient.
        residual: holds the residual of each matrix from index places[matrix] on; empty for zeros.
        bases: numbers of all matrices.
        coordinates: receives M times each vector over columns, as the vectors over rows of each matrix.
        sums: receives for each chunk its part of M^T times each vector over rows, packed.
        faults: receives for each chunk 0, or a NaN if an element of the gradient is not finite.
    """
    zero, vectors = v.all_floats(np.float32(0.0)), -(-rank // PANEL) * PANEL
    right = np.zeros(vectors * layout[WIDE].max(), np.float32)
    left = np.zeros(vectors * layout[TALL].max(), np.float32)
    padded, also_padded, packed = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32), -1
    chunk = fetch_add(cursor, 1)
    while chunk < layout[CHUNKS, -1]:
        m = block_of(layout, chunk)
        rows, columns, wide, tall = layout[ROWS, m], layout[COLUMNS, m], layout[WIDE, m], layout[TALL, m]
        whole, number, gradient = columns // LANES * LANES, chunk - layout[CHUNKS, m], gradients[m]
        start, stop = number * tall, min((number + 1) * tall, rows)
        if packed != m:
            right[: vectors * wide] = np.float32(0.0)
            _pack(bases, layout[NUMBERS, m] + rank * rows, rank, columns, 0, vectors, right)
            packed = m
        _pack_rows(bases, layout[NUMBERS, m], rank, rows, start, stop, 0, vectors, left)
        here = sums[layout[SUMS, m] + number * vectors * wide :][: vectors * wide]
        here[:] = np.float32(0.0)
        over_columns, older = coordinates[layout[NUMBERS, m] :], residual[places[m] :]
        fault = zero
        for row in range(start, stop, 2):
            alone = row + 1 == stop
            one, two = row * columns, (row if alone else row + 1) * columns
            for first in range(0, vectors, PANEL):
                a = _four(left, (row - start) * vectors + first)
                b = (zero, zero, zero, zero) if alone else _four(left, (row + 1 - start) * vectors + first)
                s, t = (zero, zero, zero, zero), (zero, zero, zero, zero)
                for k in range(0, whole, LANES):
                    x = v.load_floats(gradient, np.uint64(4 * (one + k)))
                    y = v.load_floats(gradient, np.uint64(4 * (two + k)))
                    if first == 0:
                        fault = v.add(fault, v.add(v.multiply(x, zero), v.multiply(y, zero)))
                    if residual.size > 0:
                        x = v.saturated_sum(x, v.load(older, one + k))
                        y = v.saturated_sum(y, v.load(older, two + k))
                    s, t = _step(x, y, right, here, k * vectors + first * LANES, a, b, s, t)
                if whole < columns:
                    x = _rest(gradient, one + whole, columns - whole, padded)
                    y = _rest(gradient, two + whole, columns - whole, also_padded)
                    fault = v.add(fault, v.add(v.multiply(x, zero), v.multiply(y, zero)))
                    if residual.size > 0:
                        x = v.saturated_sum(x, _rest_of(older, one + whole, columns - whole, padded))
                        y = v.saturated_sum(y, _rest_of(older, two + whole, columns - whole, also_padded))
                    s, t = _step(x, y, right, here, whole * vectors + first * LANES, a, b, s, t)
                for k in range(min(PANEL, rank - first)):
                    over_columns[(first + k) * rows + row] = v.sum_floats(s[k])
                    if not alone:
                        over_columns[(first + k) * rows + row + 1] = v.sum_floats(t[k])
        faults[chunk] = v.sum_floats(fault)
        chunk = fetch_add(cursor, 1)


@kernel
def combine(cursor, layout, rank, sums, coordinates):
    """Add up the chunks of `project` in order, as the vectors over columns of each matrix, and replace
    coordinates beyond float32 by its limit, and those that have both signs by 0."""
    vectors, m = -(-rank // PANEL) * PANEL, fetch_add(cursor, 1)
    while m < layout.shape[1] - 1:
        columns, wide = layout[COLUMNS, m], layout[WIDE, m]
        at, size = layout[SUMS, m], vectors * wide
        total, out = sums[at : at + size], coordinates[layout[NUMBERS, m] : layout[NUMBERS, m + 1]]
        for more in range(at + size, layout[SUMS, m + 1], size):
            for i in range(size):
                total[i] += sums[more + i]
        skipped = rank * layout[ROWS, m]
        for k in range(rank):
            for i in range(columns):
                out[skipped + k * columns + i] = total[(i // LANES * vectors + k) * LANES + i % LANES]
        for i in range(out.size):
            out[i] = np.float32(0.0) if np.isnan(out[i]) else _clip(out[i], FLOAT32_MAX)
        m = fetch_add(cursor, 1)


@njit
def _products(left, right, one, two, at, vectors):
    """Return sixteen elements of two rows of the sum of all outer products."""
    x = y = v.all_floats(np.float32(0.0))
    for k in range(vectors):
        q = v.load(right, at + k * LANES)
        x = v.add(x, v.multiply(q, v.all_floats(left[one + k])))
        y = v.add(y, v.multiply(q, v.all_floats(left[two + k])))
    return x, y


@kernel
def expand(cursor, layout, rank, gradients, residual, places, bases, coordinates, corrected, out):
    """Write S Q^T + A (R - C Q)^T of each matrix to `out`, or subtract it from gradient + residual.

    Args:
        gradients: address of each gradient; none to write the products themselves.
        residual: holds the residuals as `out` does; empty for zeros.
        places: index of the first element of each matrix in `out`.
        bases, coordinates: numbers of all matrices.
        corrected: R - C Q of each matrix, in the places of R.
        out: receives the matrices; it may be `residual`.
    """
    zero, vectors = v.all_floats(np.float32(0.0)), 2 * rank
    right = np.zeros(vectors * layout[WIDE].max(), np.float32)
    left = np.zeros(vectors * layout[TALL].max(), np.float32)
    padded, packed = np.zeros(LANES, np.float32), -1
    chunk = fetch_add(cursor, 1)
    while chunk < layout[CHUNKS, -1]:
        m = block_of(layout, chunk)
        rows, columns, tall = layout[ROWS, m], layout[COLUMNS, m], layout[TALL, m]
        whole, number, at = columns // LANES * LANES, chunk - layout[CHUNKS, m], layout[NUMBERS, m]
        older, to = residual[places[m] :], out[places[m] :]
        start, stop = number * tall, min((number + 1) * tall, rows)
        if packed != m:
            right[: vectors * layout[WIDE, m]] = np.float32(0.0)
            _pack(bases, at + rank * rows, rank, columns, 0, vectors, right)
            _pack(corrected, at + rank * rows, rank, columns, rank, vectors, right)
            packed = m
        _pack_rows(coordinates, at, rank, rows, start, stop, 0, vectors, left)
        _pack_rows(bases, at, rank, rows, start, stop, rank, vectors, left)
        for row in range(start, stop, 2):
            other = min(row + 1, stop - 1)
            one, two = row * columns, other * columns
            a, b = (row - start) * vectors, (other - start) * vectors
            for k in range(0, whole, LANES):
                x, y = _products(left, right, a, b, k * vectors, vectors)
                if gradients.size > 0:
                    # Both rows are read before one is written: a last row by itself is both.
                    given = v.load_floats(gradients[m], np.uint64(4 * (one + k)))
                    also = v.load_floats(gradients[m], np.uint64(4 * (two + k)))
                    if residual.size > 0:
                        given = v.saturated_sum(given, v.load(older, one + k))
                        also = v.saturated_sum(also, v.load(older, two + k))
                    x, y = v.subtract(given, x), v.subtract(also, y)
                v.store(to, one + k, v.saturated_sum(x, zero))
                v.store(to, two + k, v.saturated_sum(y, zero))
            if whole < columns:
                x, y = _products(left, right, a, b, whole * vectors, vectors)
                if gradients.size > 0:
                    given = _rest(gradients[m], one + whole, columns - whole, padded)
                    also = _rest(gradients[m], two + whole, columns - whole, padded)
                    if residual.size > 0:
                        given = v.saturated_sum(given, _rest_of(older, one + whole, columns - whole, padded))
                        also = v.saturated_sum(also, _rest_of(older, two + whole, columns - whole, padded))
                    x, y = v.subtract(given, x), v.subtract(also, y)
                v.store(padded, 0, v.saturated_sum(x, zero))
                for k in range(columns - whole):
                    to[one + whole + k] = padded[k]
                v.store(padded, 0, v.saturated_sum(y, zero))
                for k in range(columns - whole):
                    to[two + whole + k] = padded[k]
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


@njit
def _doubles(numbers, skipped, rank, length):
    """Return `rank` vectors as float64, (rank, length), from number `skipped` on."""
    found = np.empty((rank, length))
    for k in range(rank):
        for i in range(length):
            found[k, i] = numbers[skipped + k * length + i]
    return found


@kernel
def correct(cursor, layout, rank, bases, coordinates, out):
    """Write R - C Q with C = (A S^T + R Q^T) / 2 of each matrix, from float64, in the places of R.

    bases, coordinates: numbers of all matrices: A and Q, S and R.
    """
    m = fetch_add(cursor, 1)
    while m < layout.shape[1] - 1:
        rows, columns = layout[ROWS, m], layout[COLUMNS, m]
        at = layout[NUMBERS, m]
        over = at + rank * rows
        a, s = _doubles(bases, at, rank, rows), _doubles(coordinates, at, rank, rows)
        q, r = _doubles(bases, over, rank, columns), _doubles(coordinates, over, rank, columns)
        rest, here, most = out[over : layout[NUMBERS, m + 1]], np.empty(columns), np.float64(FLOAT32_MAX)
        for k in range(rank):
            here[:] = r[k]
            for j in range(rank):
                part = (_dot(a[k], s[j]) + _dot(r[k], q[j])) / 2.0
                for i in range(columns):
                    here[i] -= part * q[j, i]
            for i in range(columns):
                rest[k * columns + i] = np.float32(min(max(here[i], -most), most))
        m = fetch_add(cursor, 1)


@kernel
def orthonormal(cursor, layout, rank, bases, coordinates, least, out):
    """Make the coordinates of each matrix orthonormal, those over rows and those over columns.

    bases, coordinates: numbers of all matrices.
    """
    m = fetch_add(cursor, 1)
    while m < layout.shape[1] - 1:
        rows, columns, at = layout[ROWS, m], layout[COLUMNS, m], layout[NUMBERS, m]
        for first, length in ((at, rows), (at + rank * rows, columns)):
            given, old = _doubles(coordinates, first, rank, length), _doubles(bases, first, rank, length)
            made = _orthonormal(given, old, least)
            for k in range(rank):
                for i in range(length):
                    out[first + k * length + i] = np.float32(made[k, i])
        m = fetch_add(cursor, 1)


@njit
def _orthonormal(given, old, least):
    """Make the vectors of `given` orthonormal, in order, by the modified Gram-Schmidt process.

    A vector is replaced if less than the fraction `least` of its length is left. The first of the vectors
    `old`, from its own index on, of which more is left takes its place; otherwise a unit vector does.

    Args:
        given, old: float64 (vectors, length), at most as many vectors as their length; `old` orthonormal.
    """
    vectors, length = given.shape
    out = np.empty((vectors, length))
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
    return out
