"""What every kernel computes, in plain numpy.

Nothing here is fast, and everything here is meant to be checked by eye: the tests hold the compiled
kernels to these functions bit for bit. All arrays are one-dimensional and C-contiguous; `float32` unless
said otherwise. Sums and products are rounded to float32 after each operation, as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...common.stored import stored
from ..payload import Bytes, CodeFormat, DenseFormat, Float32, Float64, Int64
from ..payload import pack_codes as pack_codes
from ..payload import unpack_codes as unpack_codes

# The mean magnitude decides which thresholds a layer gets, so its sum must not depend on how many threads
# or vector lanes took part. It is defined over blocks of 256 rows by 16 lanes.
LANES = 16
SUM_BLOCK = LANES * 256

# Sums of gradient and residual saturate here, so that finite gradients leave finite residuals.
FLOAT32_MAX = np.finfo(np.float32).max
# Both 16-bit formats saturate at their largest finite value: an infinity would be refused by the receiver,
# and what saturation cuts off stays in the residual.
BFLOAT16_MAX = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]
FLOAT16_MAX = np.float32(65504.0)


@stored("magnitudes")
class Magnitudes(NamedTuple):
    """Of the elements of a tensor.

    total: the sum of their absolute values; not finite exactly if one of them is not.
    nonzero: how many are not zero.
    """

    total: float
    nonzero: int


def magnitudes(values: Float32) -> Magnitudes:
    return Magnitudes(ordered_sum(np.abs(values)), int(np.count_nonzero(values)))


def ordered_sum(values: npt.NDArray[np.floating]) -> float:
    """The sum as a float64, by a fixed order of additions.

    Within a block of `SUM_BLOCK`, lane j adds elements j, j + 16, j + 32, …; then lanes are added in order,
    then blocks.
    """
    total = 0.0
    for start in range(0, values.size, SUM_BLOCK):
        block = np.zeros(SUM_BLOCK)
        block[: min(SUM_BLOCK, values.size - start)] = values[start : start + SUM_BLOCK]
        lanes = np.zeros(LANES)
        for row in block.reshape(-1, LANES):
            lanes += row
        block_sum = 0.0
        for lane in lanes:
            block_sum += float(lane)
        total += block_sum
    return total


def add_saturating(gradient: Float32, residual: Float32) -> Float32:
    """`gradient + residual`, kept within the finite float32 range."""
    with np.errstate(over="ignore"):
        total: Float32 = np.clip(gradient + residual, -FLOAT32_MAX, FLOAT32_MAX)
    return total


def quantize(
    format: CodeFormat,
    gradient: Float32,
    residual: Float32,
    levels: Float32,
    data: Bytes,
    *,
    share: float = 1.0,
) -> None:
    """Quantize r = gradient + residual to levels; write codes to `data`, what is left to `residual`.

    SIGNED_4BIT sends the largest level X with share · X < |r|, strictly, and leaves |r| - X with the sign of
    r. SIGNED_2BIT sends its level X if X <= |r|, and knows no share.
    """
    total = add_saturating(gradient, residual)
    magnitude = np.abs(total)
    if format is CodeFormat.SIGNED_4BIT:
        index: Bytes = (magnitude[:, None] > np.float32(share) * levels).sum(axis=1, dtype=np.uint8)
        codes = index + 8 * ((total > 0) & (index > 0))
        left = magnitude - np.append(np.float32(0.0), levels)[index]
        residual[:] = np.where(np.signbit(total), -left, left)
    else:
        index = (magnitude >= levels[0]).astype(np.uint8)
        codes = 2 * index + ((total > 0) & (index > 0))
        residual[:] = total - format.table(levels)[codes]
    data[:] = pack_codes(format.bits, codes)


def quantize_blocks(
    format: CodeFormat,
    gradients: Sequence[Float32],
    residual: Float32,
    left: Float32,
    levels: Float32,
    data: Bytes,
    *,
    share: float = 1.0,
) -> tuple[Float64, Int64]:
    """Quantize several tensors in one pass, and say what `magnitudes` says of each gradient.

    gradients: one for each block. residual: of all of them, one after the other. left: what is left of them;
        the memory of `residual`, or none of it.
    levels: `format.level_count` of each block. data: the codes of each block, which begin a word. share: as
        in `quantize`.

    Returns totals (float64) and nonzero (int64), both of shape (blocks,). Where a total is not finite,
    anything may be in the codes and in what is left of the block.
    """
    totals, nonzero = np.zeros(len(gradients)), np.zeros(len(gradients), np.int64)
    left[:] = residual
    start = byte = 0
    for block, (gradient, own) in enumerate(
        zip(gradients, levels.reshape(-1, format.level_count), strict=True)
    ):
        end, stop = start + gradient.size, byte + format.code_bytes(gradient.size)
        totals[block], nonzero[block] = magnitudes(gradient)
        quantize(format, gradient, left[start:end], own, data[byte:stop], share=share)
        start, byte = end, stop
    return totals, nonzero


def add_quantized(
    format: CodeFormat,
    datas: Sequence[Bytes],
    tables: Float32,
    out: Float32,
    *,
    keep: bool = True,
    sizes: Int64 | None = None,
) -> None:
    """Add `tables[w][block][code]` to `out`, one payload after the other in the order given.

    sizes: int64, shape (blocks,): elements of each block, whose codes begin with a word of their own; None
        for one block.
    tables: what each code is worth, weight included: shape (len(datas), blocks, 2**format.bits), or without
        the second dimension for one block.
    keep: add to what `out` holds; otherwise to zeros.
    """
    if not keep:
        out[:] = 0.0
    blocks = [out.size] if sizes is None else sizes.tolist()
    tables = tables.reshape(len(datas), len(blocks), 2**format.bits)
    start = byte = 0
    for block, size in enumerate(blocks):
        end, stop = start + size, byte + format.code_bytes(size)
        for data, table in zip(datas, tables[:, block], strict=True):
            out[start:end] += table[unpack_codes(format.bits, data[byte:stop], size)]
        start, byte = end, stop


def add_dense(
    format: DenseFormat, datas: Sequence[Bytes], weights: Float32, out: Float32, *, keep: bool = True
) -> None:
    """Add `weights[w] * values` to `out`, one payload after the other; `keep` as in `add_quantized`."""
    if not keep:
        out[:] = 0.0
    for data, weight in zip(datas, weights, strict=True):
        values = np.empty_like(out)
        decode_dense(format, data, values)
        out += weight * values


def encode_dense(format: DenseFormat, gradient: Float32, residual: Float32, data: Bytes) -> None:
    """Round r = gradient + residual to nearest, ties to even; leave what rounding lost in `residual`."""
    total = add_saturating(gradient, residual)
    if format is DenseFormat.FLOAT32:
        rounded = total.view(np.uint8)
    elif format is DenseFormat.FLOAT16:
        rounded = np.clip(total, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16).view(np.uint8)
    else:
        bits = np.clip(total, -BFLOAT16_MAX, BFLOAT16_MAX).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    data[:] = rounded
    values = np.empty_like(total)
    decode_dense(format, data, values)
    residual[:] = total - values


def decode_dense(format: DenseFormat, data: Bytes, out: Float32) -> None:
    """Widen to float32, exactly."""
    if format is DenseFormat.FLOAT32:
        out[:] = data.view(np.float32)
    elif format is DenseFormat.FLOAT16:
        out[:] = data.view(np.float16)
    else:
        out[:] = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def has_forbidden_code(format: CodeFormat, data: Bytes) -> bool:
    """Whether any code, padding included, is the one that is never sent."""
    codes = unpack_codes(format.bits, data, data.size * 8 // format.bits)
    return bool((codes == format.forbidden_code).any())


def all_finite(format: DenseFormat, data: Bytes) -> bool:
    """Whether no element is an infinity or a NaN."""
    values = np.empty(data.size // format.element_bytes, np.float32)
    decode_dense(format, data, values)
    return bool(np.isfinite(values).all())
