"""Kernels over linear, binary and ternary codes, on several threads. The number of threads changes no bit.

A linear code is a two's-complement integer of 2 to 8 bits, or a sign of 1 bit: 1 for +1, 0 for -1. Its value
is the integer or sign times the float32 scale of its bucket. A bucket is a fixed number of consecutive
elements, a multiple of 32; the last one may be short. The most negative integer is never sent, so that both
signs reach equally far. A binary code is one bit, an index of two levels.

Machine code trusts the sizes and addresses that it receives, so every array is checked in this file first. A
residual is replaced by the quantization error; None stands for zeros, and the error is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from ..payload import BUCKET_STEP, Bytes, CodeFormat, Float32, Float64, Int64, check_linear, code_bytes
from .checks import address, addresses, check, checked_pair, code_addresses, in_order
from .lazy import linear_loops, linear_sums
from .shared import FLOAT32_MAX, SUM_BLOCK
from .threads import run


def bucket_maxima(gradient: Float32, residual: Float32 | None, bucket: int) -> Float32:
    """Return the largest magnitude of gradient + residual in each bucket, float32 of shape (buckets,)."""
    left = checked_pair(gradient, residual)
    bucket, pieces = _cut(bucket, gradient.size)
    maxima = np.zeros(pieces, np.uint32)
    run(linear_loops.piece_maxima, gradient.size, gradient, left, bucket, maxima.reshape(-1))
    largest: Float32 = maxima.max(axis=1).view(np.float32)
    return largest


def bucket_norms(gradient: Float32, residual: Float32 | None, bucket: int) -> Float32:
    """Return the Euclidean norm of gradient + residual in each bucket, float32 of shape (buckets,)."""
    totals = _bucket_sums(gradient, residual, bucket, squared=True)
    norms: Float32 = np.minimum(np.sqrt(totals), np.float64(FLOAT32_MAX)).astype(np.float32)
    return norms


def bucket_means(gradient: Float32, residual: Float32 | None, bucket: int) -> Float32:
    """Return the mean magnitude of gradient + residual in each bucket, float32 of shape (buckets,)."""
    totals = _bucket_sums(gradient, residual, bucket, squared=False)
    counts = np.minimum(bucket, gradient.size - bucket * np.arange(totals.size))
    means: Float32 = (totals / counts).astype(np.float32)
    return means


def _bucket_sums(gradient: Float32, residual: Float32 | None, bucket: int, *, squared: bool) -> Float64:
    """Return the sum of the magnitudes of gradient + residual, or of their squares, in each bucket: float64
    of shape (buckets,)."""
    left = checked_pair(gradient, residual)
    bucket, pieces = _cut(bucket, gradient.size)
    sums = np.zeros(pieces)
    given = gradient, left, bucket, sums.reshape(-1), np.zeros(sums.size, np.int64)
    run(linear_loops.piece_sums, gradient.size, *given, squared)
    # Accumulating adds the pieces one after the other; `sum` would use another order, with other bits.
    totals: Float64 = np.add.accumulate(sums, axis=1)[:, -1]
    return totals


def quantize_linear(
    bits: int,
    bucket: int,
    gradient: Float32,
    residual: Float32 | None,
    scales: Float32,
    data: Bytes,
    *,
    seed: int | None,
) -> None:
    """Round gradient + residual to multiples of each bucket's scale; write the codes to `data`, the error to
    `residual`.

    Args:
        bits: bits of a code, 2 to 8.
        scales: scale of each bucket, finite and not negative; a bucket with scale 0 gets codes 0.
        data: receives the packed codes.
        seed: seed of stochastic rounding; None rounds to nearest, ties to even.
    """
    check_linear(bits, bucket, fewest=2)
    left = checked_pair(gradient, residual)
    check("scales", scales, np.float32, _buckets(bucket, gradient.size))
    check("data", data, np.uint8, code_bytes(bits, gradient.size), written=True)
    way = linear_loops.NEAREST if seed is None else linear_loops.AT_RANDOM
    _quantize(way, bits, bucket, gradient, left, scales, scales, data, seed or 0)


def add_linear(
    bits: int,
    bucket: int,
    datas: Sequence[Bytes],
    scales: Sequence[Float32],
    weights: Float32,
    out: Float32,
    *,
    keep: bool = True,
) -> None:
    """Add the weighted values of linear payloads to `out`, one payload after the other.

    Args:
        bits: bits of a code, 1 to 8.
        datas: packed codes of each payload.
        scales: scales of each payload's buckets.
        weights: one float32 for each payload.
        keep: True to add to the values in `out`; False to start from zeros.
    """
    check("out", out, np.float32, out.size, written=True)
    check("weights", weights, np.float32, len(datas))
    if len(scales) != len(datas):
        raise ValueError(f"scales: expected one array per payload, {len(datas)}, got {len(scales)}")
    size, buckets = code_bytes(bits, out.size), _buckets(bucket, out.size, bits)
    for scale in scales:
        check("scales", scale, np.float32, buckets)
    at = code_addresses(datas, size), size, addresses(scales)
    run(linear_sums.add_linear, out.size, bits, bucket, *at, weights, out, keep)


def round_each(
    bits: int, bucket: int, values: Float32, counts: Sequence[int], seeds: Sequence[int]
) -> list[Bytes]:
    """Round several tensors to multiples of each bucket's scale, up or down at random, without bias; return
    the scales and codes of each.

    A scale takes the largest magnitude of its bucket as the largest integer.

    Args:
        bits: bits of a code, 2 to 8.
        values: the tensors, end to end.
        counts: number of elements of each tensor.
        seeds: seed of each tensor's random numbers.
    """
    check_linear(bits, bucket, fewest=2)
    check("values", values, np.float32, sum(counts))
    ends = _ends(bits, bucket, counts)
    data = np.empty(ends[-1], np.uint8)
    given = values, _starts(counts), np.array(seeds, np.uint64), data.view(np.float32), data
    run(linear_loops.round_each, values.size, bits, bucket, *given, ends)
    return [data[start:end] for start, end in pairwise(ends.tolist())]


def add_each(
    bits: int,
    bucket: int,
    counts: Sequence[int],
    datas: Sequence[Bytes],
    weights: Float32,
) -> Float32:
    """Return the weighted sums of linear payloads of several tensors, end to end; payloads are added in their
    order.

    Args:
        bits: bits of a code, 1 to 8.
        counts: number of elements of each tensor.
        datas: for each payload, scales and codes of each tensor, end to end.
        weights: one float32 for each payload.
    """
    check_linear(bits, bucket)
    check("weights", weights, np.float32, len(datas))
    ends, out = _ends(bits, bucket, counts), np.empty(sum(counts), np.float32)
    for data in datas:
        check("data", data, np.uint8, int(ends[-1]))
    given = bits, bucket, _starts(counts), ends, addresses(datas), weights, out
    run(linear_sums.add_each, out.size * len(datas), *given)
    return out


def are_valid(bits: int, bucket: int, counts: Sequence[int], data: Bytes) -> bool:
    """Return False if a scale of these tensors is not from 0 to a finite product with every code, a code is
    the most negative integer, or padding is not 0. data: scales and codes of each tensor, end to end."""
    check_linear(bits, bucket)
    ends, found = _ends(bits, bucket, counts), np.zeros(1, np.uint8)
    check("data", data, np.uint8, int(ends[-1]))
    given = bits, bucket, _starts(counts), ends, address(data), found
    run(linear_sums.find_each, sum(counts), *given)
    return not found[0]


def has_forbidden_linear(bits: int, elements: int, data: Bytes) -> bool:
    """Return True if the code of any of the `elements` elements is the most negative integer, which is never
    sent; False for codes of 1 bit, which are signs.
    """
    check_linear(bits, BUCKET_STEP)
    size = code_bytes(bits, elements)
    check("data", data, np.uint8, size)
    if bits == 1:
        return False
    found = np.zeros(1, np.uint8)
    run(linear_sums.find_code, elements, bits, address(data), elements, size, found)
    return bool(found[0])


def side_sums(gradient: Float32, residual: Float32 | None) -> tuple[float, int, float, int]:
    """Sum the non-negative and the negative elements of gradient + residual separately.

    Returns:
        Sum and number of the elements that are at least 0, then sum and number of the negative elements.
    """
    left = checked_pair(gradient, residual)
    blocks = -(-gradient.size // SUM_BLOCK)
    uppers, lowers, counts = np.zeros(blocks), np.zeros(blocks), np.zeros(blocks, np.int64)
    run(linear_loops.side_sums, gradient.size, gradient, left, uppers, lowers, counts)
    count = int(counts.sum())
    return in_order(uppers), count, in_order(lowers), gradient.size - count


def quantize_binary(
    gradient: Float32, residual: Float32 | None, low: float, high: float, data: Bytes
) -> None:
    """Send `high` for each element of gradient + residual that is at least 0, and `low` for every other
    element.

    Args:
        data: receives the packed codes, one bit an element: 1 for `high`.
    """
    left = checked_pair(gradient, residual)
    check("data", data, np.uint8, code_bytes(1, gradient.size), written=True)
    lows, highs = np.array([low], np.float32), np.array([high], np.float32)
    _quantize(linear_loops.SIDES, 1, gradient.size, gradient, left, lows, highs, data)


def quantize_signs(
    bucket: int, gradient: Float32, residual: Float32 | None, scales: Float32, data: Bytes
) -> None:
    """Send the bucket's scale with the sign of each element of gradient + residual, 0 as positive.

    Args:
        scales: scale of each bucket, finite and not negative.
        data: receives the packed codes, one bit an element: 1 for positive.
    """
    left = checked_pair(gradient, residual)
    check("scales", scales, np.float32, _buckets(bucket, gradient.size))
    check("data", data, np.uint8, code_bytes(1, gradient.size), written=True)
    _quantize(linear_loops.SIDES, 1, bucket, gradient, left, -scales, scales, data)


def quantize_ternary(
    gradient: Float32, residual: Float32 | None, level: float, data: Bytes, *, seed: int
) -> None:
    """Send `level` with the sign of r = gradient + residual, with probability |r| / level, and zero
    otherwise.

    Args:
        level: magnitude to send; 0 sends zeros only.
        data: receives the packed codes of `CodeFormat.SIGNED_2BIT`.
        seed: seed of the random numbers.
    """
    left = checked_pair(gradient, residual)
    check("data", data, np.uint8, CodeFormat.SIGNED_2BIT.code_bytes(gradient.size), written=True)
    levels = np.array([level], np.float32)
    _quantize(linear_loops.TERNARY, 2, gradient.size, gradient, left, levels, levels, data, seed)


def _quantize(
    way: int,
    bits: int,
    bucket: int,
    gradient: Float32,
    left: Float32,
    lows: Float32,
    highs: Float32,
    data: Bytes,
    seed: int = 0,
) -> None:
    """Run the one kernel of all these codes; `linear_loops.quantize` has the arguments."""
    given = way, bits, max(1, bucket), gradient, left, lows, highs, data, np.uint64(seed % 2**64)
    run(linear_loops.quantize, gradient.size, *given)


def warm_up() -> None:
    """Compile every kernel of this module, or load it from the cache."""
    ones = np.ones(17, np.float32)
    data = np.zeros(code_bytes(8, ones.size), np.uint8)
    scales = bucket_maxima(ones, None, BUCKET_STEP)
    bucket_norms(ones, None, BUCKET_STEP)
    quantize_linear(8, BUCKET_STEP, ones, np.zeros_like(ones), scales, data, seed=None)
    add_linear(8, BUCKET_STEP, [data], [scales], scales, np.zeros_like(ones))
    has_forbidden_linear(8, ones.size, data)
    data = np.zeros(code_bytes(1, ones.size), np.uint8)
    (rounded,) = round_each(8, BUCKET_STEP, ones, [17], [0])
    add_each(8, BUCKET_STEP, [17], [rounded], scales)
    are_valid(8, BUCKET_STEP, [17], rounded)
    side_sums(ones, ones)
    quantize_binary(ones, np.zeros_like(ones), -1.0, 1.0, data)
    data = np.zeros(CodeFormat.SIGNED_2BIT.code_bytes(ones.size), np.uint8)
    quantize_ternary(ones, np.zeros_like(ones), 1.0, data, seed=0)


def _starts(counts: Sequence[int]) -> Int64:
    """Return the first element of each tensor, and the end of the last."""
    return np.array([0, *accumulate(counts)], np.int64)


def _ends(bits: int, bucket: int, counts: Sequence[int]) -> Int64:
    """Return the first byte of the scales and codes of each tensor, and the end of the last."""
    sizes = [4 * -(-count // bucket) + code_bytes(bits, count) for count in counts]
    return np.array([0, *accumulate(sizes)], np.int64)


def _buckets(bucket: int, elements: int, bits: int = 8) -> int:
    """Return the number of buckets that `elements` elements fill; the last one may be short."""
    check_linear(bits, bucket)
    return -(-elements // bucket)


def _cut(bucket: int, elements: int) -> tuple[int, tuple[int, int]]:
    """Return how the elements are cut into buckets, and buckets into pieces of `SUM_BLOCK` elements.

    Returns:
        The bucket length, at most `elements`; and the shape of an array with one entry for each piece:
            (buckets, pieces of a bucket).
    """
    buckets = _buckets(bucket, elements)
    bucket = min(bucket, max(elements, 1))
    return bucket, (buckets, -(-bucket // SUM_BLOCK))
