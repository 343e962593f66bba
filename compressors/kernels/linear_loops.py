# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels that produce linear, binary and ternary codes; `linear` describes these.

Each block of elements stays in the first-level cache and is read several times. Plain loops, which LLVM
vectorizes, compute random numbers and codes of one byte each. Then the codes are packed, eight at a time in a
64-bit word, by the same steps for every number of bits. The kernels in `linear_sums` read the packed codes.

Functions that run once per bucket are inlined by numba itself: numba counts references of an array that is
passed to a function, which takes longer than a short bucket.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from . import vectors as v
from .compiling import copy, fetch_add, kernel
from .dense import _clip, bits_of, residual_slice
from .shared import CHUNK, FLOAT32_MAX, LANES, MULTIPLIERS, STEP, SUM_BLOCK

# Elements whose codes, random numbers and sums stay in the first-level cache. A multiple of 64.
BLOCK = 2048
# Neighbouring float32 of this size are 1 apart. Adding it rounds a small number to an integer, ties to even,
# and leaves the integer's two's complement in the lowest bits; subtracting it gives the integer as a float32.
INTEGERS = np.float32(1.5 * 2**23)

load_uint64 = v.load_at(types.uint64, v.I64)


@intrinsic
def store_uint64(typingctx, address, offset, value):
    """Store a 64-bit word `offset` bytes after an address, at any alignment."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], builder.inttoptr(builder.add(*args[:2]), v.I64.as_pointer()), align=1)

    return types.void(types.uint64, types.uint64, types.uint64), codegen


def _add_squares(builder, sums, a):
    """Return sums + a * a in float64, where the square of a float32 is exact."""
    wide = builder.fpext(a, sums.type)
    return builder.fadd(sums, builder.fmul(wide, wide))


add_squares = v.binary(_add_squares)
# a / b of float32, without numba's check for zero: the check raises, and LLVM could not vectorize the loop.
divide = v.binary(ir.IRBuilder.fdiv)


@njit
def _total(gradient, residual, i):
    """Return sixteen elements of the saturating sum gradient + residual; of the gradient if `residual` is
    empty.
    """
    if residual.size == 0:
        return v.load(gradient, i)
    return v.saturated_sum(v.load(gradient, i), v.load(residual, i))


# ---- packing ----


@njit
def _pack(bits, codes, packed):
    """Pack codes of fewer than 8 bits: the low `bits` bits of each byte of `codes`, end to end, into
    `packed`.

    Args:
        codes: one code per byte without higher bits, a multiple of 8 codes.
        packed: receives the packed codes; 8 bytes longer than they are.
    """
    source, target = np.uint64(codes.ctypes.data), np.uint64(packed.ctypes.data)
    # Join neighbouring codes, then neighbouring pairs, then neighbouring fours.
    single, pair, four = np.uint64(8 - bits), np.uint64(16 - 2 * bits), np.uint64(32 - 4 * bits)
    for k in range(codes.size // 8):
        x = load_uint64(source, np.uint64(8 * k))
        x = (x & np.uint64(0x00FF00FF00FF00FF)) | ((x & np.uint64(0xFF00FF00FF00FF00)) >> single)
        x = (x & np.uint64(0x0000FFFF0000FFFF)) | ((x & np.uint64(0xFFFF0000FFFF0000)) >> pair)
        x = (x & np.uint64(0x00000000FFFFFFFF)) | ((x & np.uint64(0xFFFFFFFF00000000)) >> four)
        # All eight bytes are written; the next iteration overwrites all but the first `bits` of them.
        store_uint64(target, np.uint64(bits * k), x)


@njit
def _store(bits, codes, count, packed, data, first):
    """Pack codes[:count], one per byte, and write them to `data` at the place of element `first`.

    Args:
        count: number of codes; a multiple of 32 except at the end of `data`, where zeros fill the last word.
        packed: scratch memory, 8 bytes longer than the packed codes.
        first: index of the first element, a multiple of 32.
    """
    end = -(-count // 32) * 32
    codes[count:end] = np.uint8(0)
    rest = data[first * bits // 8 :]
    rest = rest[: min(rest.size, end * bits // 8)]
    if bits < 8:
        _pack(bits, codes[:end], packed)
        codes = packed
    for k in range(rest.size):
        rest[k] = codes[k]


# ---- scales ----


@njit
def _piece(p, bucket, elements):
    """Return start and end of piece p: each bucket is cut into pieces of `SUM_BLOCK` elements on its own."""
    pieces = -(-bucket // SUM_BLOCK)
    first = p // pieces * bucket + p % pieces * SUM_BLOCK
    return min(first, elements), min(first + SUM_BLOCK, (p // pieces + 1) * bucket, elements)


@njit
def _pad(gradient, residual, whole, last, padded):
    """Copy the elements from `whole` to `last` of gradient and residual into `padded`, followed by zeros."""
    padded[:] = np.float32(0.0)
    copy(gradient, whole, last, padded[0])
    if residual.size > 0:
        copy(residual, whole, last, padded[1])


@kernel
def piece_maxima(cursor, gradient, residual, bucket, maxima):
    """Write the largest magnitude of gradient + residual in each piece of a bucket, `SUM_BLOCK` elements at
    most.

    Args:
        maxima: receives the magnitudes as the bits of float32, uint32 (pieces,).
    """
    several = max(1, CHUNK // min(bucket, SUM_BLOCK))
    scratch = np.empty(SUM_BLOCK, np.float32)
    start = fetch_add(cursor, several)
    while start < maxima.size:
        for p in range(start, min(start + several, maxima.size)):
            first, last = _piece(p, bucket, gradient.size)
            g, e, largest = gradient[first:last], residual_slice(residual, scratch, first, last), np.uint32(0)
            for i in range(g.size):
                here = bits_of(_clip(g[i] + e[i], FLOAT32_MAX)) & np.uint32(0x7FFFFFFF)
                largest = here if here > largest else largest
            maxima[p] = largest
        start = fetch_add(cursor, several)


@njit
def _add_piece(sums, count, total, squared):
    """Add total * total if `squared`, otherwise |total|, to the sums in float64; count what is not zero."""
    added = add_squares(sums, total) if squared else v.add_widened(sums, v.magnitude(total))
    return added, v.add_mask(count, v.nonzero(total))


@kernel
def piece_sums(cursor, gradient, residual, bucket, sums, counts, squared):
    """Write the sum of magnitudes or squares of gradient + residual in each piece of a bucket, `SUM_BLOCK`
    elements at most, and the number of elements that are not zero.

    Args:
        sums, counts: receive the results, float64 and int64 (pieces,).
        squared: True to add squares, False to add magnitudes.
    """
    several = max(1, CHUNK // min(bucket, SUM_BLOCK))
    padded, address = np.empty((2, LANES), np.float32), np.uint64(gradient.ctypes.data)
    start = fetch_add(cursor, several)
    while start < sums.size:
        for p in range(start, min(start + several, sums.size)):
            first, last = _piece(p, bucket, gradient.size)
            whole = first + (last - first) // LANES * LANES
            lanes, count = v.no_doubles(), v.all_words(0)
            for i in range(first, whole, LANES):
                v.prefetch(address, np.uint64(4 * (i + SUM_BLOCK)))
                lanes, count = _add_piece(lanes, count, _total(gradient, residual, i), squared)
            if whole < last:
                _pad(gradient, residual, whole, last, padded)
                here = _total(padded[0], padded[1][: min(residual.size, LANES)], 0)
                lanes, count = _add_piece(lanes, count, here, squared)
            sums[p], counts[p] = v.sum_doubles(lanes), v.sum_words(count)
        start = fetch_add(cursor, several)


@njit
def _add_sides(gradient, residual, i, upper, lower, count):
    """Add sixteen elements of gradient + residual to the sums of non-negative and negative elements, and
    count the former.
    """
    total, zero = _total(gradient, residual, i), v.all_floats(np.float32(0.0))
    not_negative = v.at_least(total, zero)
    upper = v.add_widened(upper, v.where(not_negative, total, zero))
    lower = v.add_widened(lower, v.where(not_negative, zero, total))
    return upper, lower, v.add_mask(count, not_negative)


@kernel
def side_sums(cursor, gradient, residual, uppers, lowers, counts):
    """Sum the non-negative and the negative elements of gradient + residual in each block of `SUM_BLOCK`.

    Args:
        uppers, lowers: receive the sum of each block's non-negative and of its negative elements, float64.
        counts: receives the number of each block's non-negative elements, int64.
    """
    padded = np.empty((2, LANES), np.float32)
    start = fetch_add(cursor, CHUNK)
    while start < gradient.size:
        for first in range(start, min(start + CHUNK, gradient.size), SUM_BLOCK):
            last = min(first + SUM_BLOCK, gradient.size)
            whole = first + (last - first) // LANES * LANES
            upper, lower, count = v.no_doubles(), v.no_doubles(), v.all_words(0)
            for i in range(first, whole, LANES):
                upper, lower, count = _add_sides(gradient, residual, i, upper, lower, count)
            padding = 0
            if whole < last:
                _pad(gradient, residual, whole, last, padded)
                upper, lower, count = _add_sides(padded[0], padded[1], 0, upper, lower, count)
                padding = whole + LANES - last  # number of padding zeros, which count as not negative
            block = first // SUM_BLOCK
            uppers[block], lowers[block] = v.sum_doubles(upper), v.sum_doubles(lower)
            counts[block] = np.int64(v.sum_words(count)) - padding
        start = fetch_add(cursor, CHUNK)


# ---- quantize ----


@njit
def _fill_uniform(seed, first, noise):
    """Fill `noise` with the random numbers of the elements from `first` on: multiples of 2**-24 in [0, 1),
    which depend on the seed and the element's index alone."""
    state = seed + np.uint64(first) * np.uint64(STEP)
    for i in range(noise.size):
        state += np.uint64(STEP)
        x = (state ^ (state >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
        x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
        noise[i] = np.float32(np.int32(x >> np.uint64(40))) * np.float32(2.0**-24)


@njit(inline="always")
def _round_to_nearest(gradient, residual, codes, scale, last, mask):
    """Round each element to the nearest multiple of `scale`, ties to even; leave the error in `residual`."""
    for i in range(codes.size):
        total = _clip(gradient[i] + residual[i], FLOAT32_MAX)
        shifted = _clip(divide(total, scale), last) + INTEGERS
        codes[i] = bits_of(shifted) & mask
        residual[i] = total - (shifted - INTEGERS) * scale


@njit(inline="always")
def _round_at_random(gradient, residual, codes, scale, last, mask, noise):
    """Round each element to a multiple of `scale`, up or down at random; leave the error in `residual`."""
    for i in range(codes.size):
        total = _clip(gradient[i] + residual[i], FLOAT32_MAX)
        multiple = _clip(divide(total, scale) + noise[i], last)
        rounded = (multiple + INTEGERS) - INTEGERS
        rounded -= np.float32(1.0) if rounded > multiple else np.float32(0.0)
        codes[i] = bits_of(rounded + INTEGERS) & mask
        residual[i] = total - rounded * scale


@njit(inline="always")
def _round_to_zero(gradient, residual, codes):
    """Give each element code 0; leave the whole sum in `residual`."""
    for i in range(codes.size):
        codes[i] = np.uint8(0)
        residual[i] = _clip(gradient[i] + residual[i], FLOAT32_MAX)


@njit(inline="always")
def _send_sides(gradient, residual, codes, low, high):
    """Send `high` for each element that is at least 0, otherwise `low`; leave the error in `residual`."""
    for i in range(codes.size):
        total = _clip(gradient[i] + residual[i], FLOAT32_MAX)
        upper = total >= np.float32(0.0)
        codes[i] = np.uint8(upper)
        residual[i] = _clip(total - (high if upper else low), FLOAT32_MAX)


@njit(inline="always")
def _send_at_random(gradient, residual, codes, level, noise):
    """Send `level` with the sign of each element, with probability magnitude / level; leave the error in
    `residual`.
    """
    for i in range(codes.size):
        total = _clip(gradient[i] + residual[i], FLOAT32_MAX)
        sent = noise[i] < divide(abs(total), level)
        positive = total > np.float32(0.0)
        value = level if positive else -level
        codes[i] = (np.uint8(2) + np.uint8(positive)) if sent else np.uint8(0)
        residual[i] = total - (value if sent else np.float32(0.0))


# The ways of `quantize`: to the nearest multiple of the bucket's scale, to a neighbour at random, to one of
# two values, and to plus or minus the level or zero at random.
NEAREST, AT_RANDOM, SIDES, TERNARY = range(4)


@njit
def _quantize(way, bits, bucket, gradient, residual, lows, highs, data, seed, start, stop, scratch):
    """Quantize a range of elements from a multiple of `BLOCK` on; the arguments are those of `quantize`.

    scratch: memory for codes, packed codes, errors and random numbers of a block.
    """
    codes, packed, errors, noise = scratch
    last, mask = np.float32(2 ** (bits - 1) - 1), np.uint32(2**bits - 1)
    for first in range(start, min(stop, gradient.size), BLOCK):
        end = min(first + BLOCK, gradient.size)
        if way in (AT_RANDOM, TERNARY):
            _fill_uniform(seed, first, noise[: end - first])
        here, index, left = first, first // bucket, residual_slice(residual, errors, first, end)
        while here < end:
            high, stop_here = highs[index], min((index + 1) * bucket, end)
            # Slices, because LLVM knows that an index counted from 0 is not negative.
            g, c = gradient[here:stop_here], codes[here - first : stop_here - first]
            e = left[here - first : stop_here - first]
            if way == SIDES:
                _send_sides(g, e, c, lows[index], high)
            elif not high > 0:
                _round_to_zero(g, e, c)
            elif way == NEAREST:
                _round_to_nearest(g, e, c, high, last, mask)
            elif way == AT_RANDOM:
                _round_at_random(g, e, c, high, last, mask, noise[here - first : stop_here - first])
            else:
                _send_at_random(g, e, c, high, noise[here - first : stop_here - first])
            here, index = stop_here, index + 1
        _store(bits, codes, end - first, packed, data, first)


@njit
def _scratch():
    return (
        np.empty(BLOCK, np.uint8),
        np.empty(BLOCK + 8, np.uint8),
        np.empty(BLOCK, np.float32),
        np.empty(BLOCK, np.float32),
    )


@kernel
def quantize(cursor, way, bits, bucket, gradient, residual, lows, highs, data, seed):
    """Quantize gradient + residual bucket by bucket, to codes of `bits` bits.

    Args:
        residual: replaced by the quantization error; empty for zeros, and the error is dropped.
        lows, highs: values of each bucket, float32 (buckets,): SIDES sends `lows` for negative elements and
            `highs` for others; elsewhere `highs` is the scale or level, and one of 0 sends zeros.
        seed: seed of the random numbers, uint64.
    """
    scratch, start = _scratch(), fetch_add(cursor, CHUNK)
    while start < gradient.size:
        _quantize(
            way, bits, bucket, gradient, residual, lows, highs, data, seed, start, start + CHUNK, scratch
        )
        start = fetch_add(cursor, CHUNK)


@kernel
def round_each(cursor, bits, bucket, values, starts, seeds, words, data, places):
    """Round each of several tensors to multiples of the scales of its buckets, up or down at random.

    Args:
        values, starts: the tensors end to end, and the first element of each and the end of the last.
        seeds: seed of each tensor's random numbers, uint64.
        words, data: the same memory as float32 and as bytes, which receives scales and codes of each tensor.
        places: first byte of each tensor in `data`, and the end of the last.
    """
    levels, none = np.float32(2 ** (bits - 1) - 1), values[:0]
    most, scratch = divide(FLOAT32_MAX, np.float32(2 ** (bits - 1))), _scratch()
    tensor = fetch_add(cursor, 1)
    while tensor < seeds.size:
        given = values[starts[tensor] : starts[tensor + 1]]
        buckets = -(-given.size // bucket)
        scales = words[places[tensor] // 4 :][:buckets]
        for index in range(buckets):
            largest = np.float32(0.0)
            for value in given[index * bucket : (index + 1) * bucket]:
                largest = max(largest, _clip(abs(value), FLOAT32_MAX))
            scales[index] = min(divide(largest, levels), most)
        codes = data[places[tensor] + 4 * buckets : places[tensor + 1]]
        _quantize(
            AT_RANDOM, bits, bucket, given, none, scales, scales, codes, seeds[tensor], 0, given.size, scratch
        )
        tensor = fetch_add(cursor, 1)
