# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels over dense values and raw bytes: mostly plain loops, which LLVM vectorizes well.

They read received data through addresses, because a payload may lie anywhere in a message: read-only, at any
alignment. `FLOAT32`, `BFLOAT16` and `FLOAT16` are the positions of the formats in `DenseFormat`.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from . import vectors as v
from .compiling import fetch_add, kernel
from .shared import BFLOAT16_MAX, CHUNK, FLOAT16_MAX, FLOAT32_MAX, LANES

FLOAT32, BFLOAT16, FLOAT16 = range(3)
# Elements of a sum that stay in the first-level cache while one payload after the other is added to them.
BLOCK = 2048


def _reader(numba_type, llvm):
    """Return an intrinsic that reads element `index` of an array of this type at an address, at any
    alignment.
    """

    @intrinsic
    def read(typingctx, address, index):
        def codegen(context, builder, signature, args):
            pointer = builder.inttoptr(args[0], llvm.as_pointer())
            return builder.load(builder.gep(pointer, [args[1]]), align=1)

        return numba_type(types.uint64, types.int64), codegen

    return read


read_uint16 = _reader(types.uint16, ir.IntType(16))
read_uint32 = _reader(types.uint32, v.I32)
read_float32 = _reader(types.float32, ir.FloatType())


def _bitcast(source, target, llvm):
    """Return an intrinsic that reinterprets the bits of a `source` value as a `target` value."""

    @intrinsic
    def cast(typingctx, value):
        return target(source), lambda context, builder, signature, args: builder.bitcast(args[0], llvm)

    return cast


bits_of = _bitcast(types.float32, types.uint32, v.I32)
float_of = _bitcast(types.uint32, types.float32, ir.FloatType())


@kernel
def sampled_magnitudes(addresses, sizes, largest, stride, totals, nonzero):
    """Write the sum of absolute values and the number of non-zero elements of each tensor.

    Args:
        addresses: address of each tensor's first float32, uint64 (tensors,).
        largest: number of elements up to which all of a tensor is read.
        stride: of a larger tensor, the first 16 of every `stride` elements are read.
        totals, nonzero: receive the sums and counts, float64 and int64 (tensors,).
    """
    padded = np.zeros(LANES, np.float32)
    for tensor in range(sizes.size):
        address, size, lanes, count = addresses[tensor], sizes[tensor], v.no_doubles(), v.all_words(0)
        step = LANES if size <= largest else stride
        whole = size // step * step
        for i in range(0, whole, step):
            here = v.load_floats(address, np.uint64(4 * i))
            lanes, count = v.add_widened(lanes, v.magnitude(here)), v.add_mask(count, v.nonzero(here))
        if step == LANES and whole < size:
            padded[:] = np.float32(0.0)
            for k in range(size - whole):
                padded[k] = read_float32(address, whole + k)
            here = v.load(padded, 0)
            lanes, count = v.add_widened(lanes, v.magnitude(here)), v.add_mask(count, v.nonzero(here))
        totals[tensor], nonzero[tensor] = v.sum_doubles(lanes), v.sum_words(count)


@njit
def residual_slice(residual, scratch, first, end):
    """Return a writable view of residual[first:end], into which the caller writes the new error.

    For an empty `residual`, which means no error feedback, return a zeroed view of `scratch` instead; its
    contents are dropped.
    """
    if residual.size > 0:
        return residual[first:end]
    scratch[: end - first] = np.float32(0.0)
    return scratch[: end - first]


@njit
def _clip(value, limit):
    """Return `value`, limited to the range from -limit to limit; a NaN becomes `limit`."""
    value = value if value < limit else limit
    return value if value > -limit else -limit


@njit
def _bfloat16(value):
    """Return the bits of the nearest bfloat16, ties to even, clipped to the finite range."""
    bits = bits_of(_clip(value, BFLOAT16_MAX))
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@njit
def _float16(value):
    """Return the bits of the nearest float16, ties to even, clipped to the finite range."""
    bits = bits_of(_clip(value, FLOAT16_MAX))
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Case 1, a normal float16: the exponents differ by 112; 13 bits of the fraction are rounded away.
    odd = (size >> np.uint32(13)) & np.uint32(1)
    normal = np.uint32(size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    # Case 2, below 2**-14: the spacing of float32 just above 0.5 is that of small float16, so adding 0.5
    # rounds.
    small = np.uint32(bits_of(float_of(size) + np.float32(0.5)) - np.uint32(0x3F000000))
    rounded = small if size < np.uint32(0x38800000) else normal
    return rounded | ((bits >> np.uint32(16)) & np.uint32(0x8000))


@njit
def _from_bfloat16(bits):
    return float_of(np.uint32(np.uint32(bits) << np.uint32(16)))


@njit
def _from_float16(bits):
    size = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    # Read as float32 its exponent is too small by 112; multiplying is exact, for small values too.
    widened = bits_of(float_of(size) * np.float32(2.0**112))
    if size >= np.uint32(0x0F800000):  # an infinity or a NaN
        widened = np.uint32(widened | np.uint32(0x7F800000))
    return float_of(np.uint32(widened | ((np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))))


@njit
def _read(format, address, i):
    if format == FLOAT32:
        return read_float32(address, i)
    if format == BFLOAT16:
        return _from_bfloat16(read_uint16(address, i))
    return _from_float16(read_uint16(address, i))


@kernel
def widen(cursor, format, address, out):
    start = fetch_add(cursor, CHUNK)
    while start < out.size:
        values = out[start : min(start + CHUNK, out.size)]
        for k in range(values.size):
            values[k] = _read(format, address, start + k)
        start = fetch_add(cursor, CHUNK)


@njit
def _add(format, address, weight, first, sums):
    """Add weight * element (first + k) of the payload at `address` to sums[k], for each k.

    Multiplication and addition round separately: LLVM fuses them only on request.
    """
    done = 0
    if format != FLOAT16:
        weights, size = v.all_floats(weight), 4 if format == FLOAT32 else 2
        done = sums.size // LANES * LANES
        for k in range(0, done, LANES):
            here = np.uint64((first + k) * size)
            # Prefetch the same payload's next block: on its own a processor follows only a few streams.
            v.prefetch(address, np.uint64((first + k + BLOCK) * size))
            values = v.load_floats(address, here) if format == FLOAT32 else v.load_bfloats(address, here)
            v.store(sums, k, v.add(v.load(sums, k), v.multiply(weights, values)))
    rest, first = sums[done:], first + done
    for k in range(rest.size):
        rest[k] += weight * _read(format, address, first + k)


@kernel
def sum_dense(cursor, format, addresses, weights, out, keep):
    """Add `weights[w]` times the values of payload w to `out`, one payload after the other.

    Args:
        addresses: address of each payload, uint64 (payloads,).
    """
    start = fetch_add(cursor, CHUNK)
    while start < out.size:
        for first in range(start, min(start + CHUNK, out.size), BLOCK):
            sums = out[first : min(first + BLOCK, out.size)]
            if not keep:
                sums[:] = np.float32(0.0)
            for w in range(addresses.size):
                _add(format, addresses[w], weights[w], first, sums)
        start = fetch_add(cursor, CHUNK)


@kernel
def round_dense(cursor, format, gradient, residual, data):
    """Round gradient + residual to a 16-bit format; write the bits to `data` (uint16), the error to
    `residual`.
    """
    scratch = np.empty(CHUNK if residual.size == 0 else 0, np.float32)
    start = fetch_add(cursor, CHUNK)
    while start < gradient.size:
        stop = min(start + CHUNK, gradient.size)
        # Slices, because LLVM knows that an index counted from 0 is not negative; otherwise it would not
        # vectorize.
        g, e, out = gradient[start:stop], residual_slice(residual, scratch, start, stop), data[start:stop]
        if format == BFLOAT16:
            for i in range(g.size):
                total = _clip(g[i] + e[i], FLOAT32_MAX)
                bits = _bfloat16(total)
                out[i] = bits
                e[i] = total - _from_bfloat16(bits)
        else:
            for i in range(g.size):
                total = _clip(g[i] + e[i], FLOAT32_MAX)
                bits = _float16(total)
                out[i] = bits
                e[i] = total - _from_float16(bits)
        start = fetch_add(cursor, CHUNK)


@kernel
def find_non_finite(cursor, format, address, elements, found):
    """Set found[0] if the exponent of any of `elements` elements is all ones: an infinity or a NaN."""
    start = fetch_add(cursor, CHUNK)
    while start < elements:
        stop = min(start + CHUNK, elements)
        hits = np.uint32(0)
        if format == FLOAT32:
            mask = np.uint32(0x7F800000)
            for i in range(start, stop):
                hits |= np.uint32((read_uint32(address, i) & mask) == mask)
        else:
            mask = np.uint16(0x7F80) if format == BFLOAT16 else np.uint16(0x7C00)
            for i in range(start, stop):
                hits |= np.uint32((read_uint16(address, i) & mask) == mask)
        if hits != 0:
            found[0] = 1
        start = fetch_add(cursor, CHUNK)
