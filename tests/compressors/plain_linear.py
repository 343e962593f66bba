"""Results of the kernels over linear, binary and ternary codes, defined in plain numpy.

The code is meant to be checked by eye; tests hold the compiled kernels to it bit for bit. Sums and products
are rounded to float32 after each operation, as written, unless a docstring says otherwise.

A linear code is a two's-complement integer of 2 to 8 bits, or a sign of 1 bit: 1 for +1, 0 for -1. Its value
is the integer or sign times the float32 scale of its bucket. A bucket is a fixed number of consecutive
elements, a multiple of 32; the last one may be short. The most negative integer is never sent, so that both
signs reach equally far. A binary code is one bit, an index of two levels.

Codes are packed without gaps, as by `gradwire.compressors.pack_codes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from plain_codes import add_saturating, ordered_sum

from gradwire.compressors.kernels import FLOAT32_MAX
from gradwire.compressors.kernels.shared import MULTIPLIERS, STEP
from gradwire.compressors.payload import Bytes, Float32, pack_codes, unpack_codes


def unpack_signed(bits: int, data: Bytes, elements: int) -> npt.NDArray[np.int32]:
    """Return the integers in two's complement, or the signs, that the codes of `elements` elements stand
    for."""
    codes = unpack_codes(bits, data, elements)
    if bits == 1:
        return 2 * codes - 1
    return codes - ((codes >> (bits - 1)) << bits)


def uniform(seed: int, elements: int) -> Float32:
    """Return a random number in [0, 1), a multiple of 2**-24, for each element.

    Each number depends only on the seed and the element's index. So the number of threads does not change it,
    and any range can be computed alone. The last step of splitmix64 is left out: it would not change the
    upper 24 bits.
    """
    with np.errstate(over="ignore"):
        state = np.uint64(seed % 2**64) + np.arange(1, elements + 1, dtype=np.uint64) * np.uint64(STEP)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
        state = (state ^ (state >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def per_element(scales: Float32, bucket: int, elements: int) -> Float32:
    """Return for every element the scale of its bucket."""
    return np.repeat(scales, bucket)[:elements] if bucket < elements else np.repeat(scales, elements)


def bucket_maxima(gradient: Float32, residual: Float32, bucket: int) -> Float32:
    """Return the largest magnitude of gradient + residual in each bucket, float32 of shape (buckets,)."""
    sizes = np.abs(add_saturating(gradient, residual))
    return np.array(
        [sizes[start : start + bucket].max() for start in range(0, sizes.size, bucket)], np.float32
    )


def bucket_norms(gradient: Float32, residual: Float32, bucket: int) -> Float32:
    """Return the Euclidean norm of gradient + residual in each bucket, limited to the largest float32.

    The squares are added in float64 by `plain_codes.ordered_sum`, whose blocks begin anew with each bucket.
    """
    squares = add_saturating(gradient, residual).astype(np.float64) ** 2
    norms = [
        np.sqrt(ordered_sum(squares[start : start + bucket])) for start in range(0, squares.size, bucket)
    ]
    return np.minimum(np.array(norms, np.float64), np.float64(FLOAT32_MAX)).astype(np.float32)


def bucket_means(gradient: Float32, residual: Float32, bucket: int) -> Float32:
    """Return the mean magnitude of gradient + residual in each bucket, float32 of shape (buckets,).

    They are added in float64 by `plain_codes.ordered_sum`, whose blocks begin anew with each bucket.
    """
    sizes = np.abs(add_saturating(gradient, residual)).astype(np.float64)
    each = [sizes[start : start + bucket] for start in range(0, sizes.size, bucket)]
    return np.array([ordered_sum(values) / values.size for values in each], np.float64).astype(np.float32)


def quantize_linear(
    bits: int,
    bucket: int,
    gradient: Float32,
    residual: Float32,
    scales: Float32,
    data: Bytes,
    *,
    seed: int | None,
) -> None:
    """Round r = gradient + residual to a multiple of its bucket's scale; write codes to `data`, the error to
    `residual`.

    A multiple beyond the last code becomes the last code.

    Args:
        bits: bits of a code, 2 to 8.
        bucket: elements that share a scale.
        scales: scale of each bucket, not negative; its product with the last code is finite. Scale 0 gives
            code 0.
        seed: None to round to nearest, ties to even. Otherwise rounding is stochastic: up with the
            probability that makes the expected value r.
    """
    total, scale = add_saturating(gradient, residual), per_element(scales, bucket, gradient.size)
    last = np.float32(2 ** (bits - 1) - 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        multiple = np.where(scale > 0, total / scale, np.float32(0.0))
    if seed is None:
        rounded = np.rint(np.clip(multiple, -last, last))
    else:
        rounded = np.floor(np.clip(multiple + uniform(seed, total.size), -last, last))
    codes = rounded.astype(np.int32)
    residual[:] = total - codes.astype(np.float32) * scale
    data[:] = pack_codes(bits, codes)


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
    """Add weight * scale * code to `out`, one payload after the other.

    Args:
        datas, scales, weights: packed codes, bucket scales and weight of each payload.
        keep: True to add to the values in `out`; False to start from zeros.
    """
    if not keep:
        out[:] = 0.0
    for data, scale, weight in zip(datas, scales, weights, strict=True):
        worth = per_element(weight * scale, bucket, out.size)
        out += worth * unpack_signed(bits, data, out.size).astype(np.float32)


def has_forbidden_linear(bits: int, elements: int, data: Bytes) -> bool:
    """Return True if the code of any element is the most negative integer, which is never sent; False for
    signs."""
    return bits > 1 and bool((unpack_codes(bits, data, elements) == 2 ** (bits - 1)).any())


def side_sums(gradient: Float32, residual: Float32) -> tuple[float, int, float, int]:
    """Sum the non-negative and the negative elements of gradient + residual separately, by
    `plain_codes.ordered_sum`.

    An element of the other side adds zero to a sum, and keeps its place in the order.

    Returns:
        Sum and number of the elements that are at least 0, then sum and number of the negative elements.
    """
    total = add_saturating(gradient, residual).astype(np.float64)
    upper = total >= 0
    count = int(upper.sum())
    positive, negative = ordered_sum(np.where(upper, total, 0.0)), ordered_sum(np.where(upper, 0.0, total))
    return positive, count, negative, total.size - count


def quantize_binary(gradient: Float32, residual: Float32, low: float, high: float, data: Bytes) -> None:
    """Send `high` where r = gradient + residual is at least 0, otherwise `low`; leave the error in
    `residual`.

    Args:
        data: receives the packed codes, one bit an element: 1 for `high`.
    """
    total = add_saturating(gradient, residual)
    upper = total >= 0
    residual[:] = add_saturating(total, -np.where(upper, np.float32(high), np.float32(low)))
    data[:] = pack_codes(1, upper.astype(np.int32))


def quantize_signs(bucket: int, gradient: Float32, residual: Float32, scales: Float32, data: Bytes) -> None:
    """Send the bucket's scale with the sign of r = gradient + residual, 0 as positive; leave the error in
    `residual`.

    Args:
        bucket: elements that share a scale.
        scales: scale of each bucket.
        data: receives the packed codes, one bit an element: 1 for positive.
    """
    total, scale = add_saturating(gradient, residual), per_element(scales, bucket, gradient.size)
    upper = total >= 0
    residual[:] = add_saturating(total, np.where(upper, -scale, scale))
    data[:] = pack_codes(1, upper.astype(np.int32))


def quantize_ternary(gradient: Float32, residual: Float32, level: float, data: Bytes, *, seed: int) -> None:
    """Send `level` with the sign of r = gradient + residual, with probability |r| / level, and zero
    otherwise.

    Args:
        residual: replaced by the quantization error.
        level: magnitude to send; 0 sends zeros only.
        data: receives the packed codes of `CodeFormat.SIGNED_2BIT`.
        seed: seed of the random numbers.
    """
    total, size = add_saturating(gradient, residual), np.float32(level)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        sent = (uniform(seed, total.size) < np.abs(total) / size) & (size > 0)
    codes = np.where(sent, np.where(total > 0, 3, 2), 0)
    residual[:] = total - np.array([0, 0, -size, size], np.float32)[codes]
    data[:] = pack_codes(2, codes)
