"""The kernels of `linear_reference`, compiled: functions of the same names, the same bits, several threads.

As in `cpu`, everything that machine code would trust is checked on this side of the border.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..payload import BUCKET_STEP, Bytes, CodeFormat, Float32, check_linear, code_bytes
from .checks import address, addresses, check, checked_pair, code_addresses, in_order
from .lazy import linear_loops, linear_sums
from .reference import FLOAT32_MAX, SUM_BLOCK
from .threads import run


def bucket_maxima(gradient: Float32, residual: Float32 | None, bucket: int) -> Float32:
    """See `linear_reference.bucket_maxima`. residual: None stands for zeros, here and below."""
    left = checked_pair(gradient, residual)
    bucket, pieces = _cut(bucket, gradient.size)
    maxima = np.zeros(pieces, np.uint32)
    run(linear_loops.piece_maxima, gradient.size, gradient, left, bucket, maxima.reshape(-1))
    largest: Float32 = maxima.max(axis=1).view(np.float32)
    return largest


def bucket_norms(gradient: Float32, residual: Float32 | None, bucket: int) -> Float32:
    left = checked_pair(gradient, residual)
    bucket, pieces = _cut(bucket, gradient.size)
    sums = np.zeros(pieces)
    run(linear_loops.piece_squares, gradient.size, gradient, left, bucket, sums.reshape(-1))
    # Accumulating adds one after the other, which `sum` does not.
    totals = np.add.accumulate(sums, axis=1)[:, -1]
    norms: Float32 = np.minimum(np.sqrt(totals), np.float64(FLOAT32_MAX)).astype(np.float32)
    return norms


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
    """See `linear_reference.quantize_linear`. What is left is dropped where there is no residual."""
    left = checked_pair(gradient, residual)
    check("scales", scales, np.float32, _buckets(bucket, gradient.size, bits))
    check("data", data, np.uint8, code_bytes(bits, gradient.size), written=True)
    rounding = seed is not None, _word(seed or 0)
    arguments = bits, bucket, gradient, left, scales, data
    run(linear_loops.quantize_linear, gradient.size, *arguments, *rounding)


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
    check("out", out, np.float32, out.size, written=True)
    check("weights", weights, np.float32, len(datas))
    if len(scales) != len(datas):
        raise ValueError(f"scales: expected one array per payload, {len(datas)}, got {len(scales)}")
    size, buckets = code_bytes(bits, out.size), _buckets(bucket, out.size, bits)
    for scale in scales:
        check("scales", scale, np.float32, buckets)
    at = code_addresses(datas, size), size, addresses(scales)
    run(linear_sums.add_linear, out.size, bits, bucket, *at, weights, out, keep)


def has_forbidden_linear(bits: int, elements: int, data: Bytes) -> bool:
    check_linear(bits, BUCKET_STEP)
    size = code_bytes(bits, elements)
    check("data", data, np.uint8, size)
    found = np.zeros(1, np.uint8)
    run(linear_sums.find_code, elements, bits, address(data), elements, size, found)
    return bool(found[0])


def side_sums(gradient: Float32, residual: Float32 | None) -> tuple[float, int, float, int]:
    left = checked_pair(gradient, residual)
    blocks = -(-gradient.size // SUM_BLOCK)
    uppers, lowers, counts = np.zeros(blocks), np.zeros(blocks), np.zeros(blocks, np.int64)
    run(linear_loops.side_sums, gradient.size, gradient, left, uppers, lowers, counts)
    count = int(counts.sum())
    return in_order(uppers), count, in_order(lowers), gradient.size - count


def quantize_binary(
    gradient: Float32, residual: Float32 | None, low: float, high: float, data: Bytes
) -> None:
    left = checked_pair(gradient, residual)
    check("data", data, np.uint8, code_bytes(1, gradient.size), written=True)
    lower, upper = np.float32(low), np.float32(high)
    run(linear_loops.quantize_binary, gradient.size, gradient, left, lower, upper, data)


def quantize_ternary(
    gradient: Float32, residual: Float32 | None, level: float, data: Bytes, *, seed: int
) -> None:
    left = checked_pair(gradient, residual)
    check("data", data, np.uint8, CodeFormat.SIGNED_2BIT.code_bytes(gradient.size), written=True)
    size, start = np.float32(level), _word(seed)
    run(linear_loops.quantize_ternary, gradient.size, gradient, left, size, data, start)


def warm_up() -> None:
    """As `cpu.warm_up`, for the kernels in here."""
    ones = np.ones(17, np.float32)
    data = np.zeros(code_bytes(8, ones.size), np.uint8)
    scales = bucket_maxima(ones, None, BUCKET_STEP)
    bucket_norms(ones, None, BUCKET_STEP)
    quantize_linear(8, BUCKET_STEP, ones, np.zeros_like(ones), scales, data, seed=None)
    add_linear(8, BUCKET_STEP, [data], [scales], scales, np.zeros_like(ones))
    has_forbidden_linear(8, ones.size, data)
    data = np.zeros(code_bytes(1, ones.size), np.uint8)
    side_sums(ones, ones)
    quantize_binary(ones, np.zeros_like(ones), -1.0, 1.0, data)
    data = np.zeros(CodeFormat.SIGNED_2BIT.code_bytes(ones.size), np.uint8)
    quantize_ternary(ones, np.zeros_like(ones), 1.0, data, seed=0)


def _buckets(bucket: int, elements: int, bits: int = 8) -> int:
    """How many buckets so many elements fill; the last one perhaps in part."""
    check_linear(bits, bucket)
    return -(-elements // bucket)


def _cut(bucket: int, elements: int) -> tuple[int, tuple[int, int]]:
    """The bucket, no longer than needed, and into how many pieces of `SUM_BLOCK` all buckets are cut."""
    buckets = _buckets(bucket, elements)
    bucket = min(bucket, max(elements, 1))
    return bucket, (buckets, -(-bucket // SUM_BLOCK))


def _word(seed: int) -> np.uint64:
    return np.uint64(seed % 2**64)
