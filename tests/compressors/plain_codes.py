"""Results of the kernels over quantized and dense payloads, defined in plain numpy.

Nothing here is fast, and everything is meant to be checked by eye: tests hold the compiled kernels to these
functions bit for bit. All arrays are one-dimensional and C-contiguous, of float32 unless stated otherwise.
Sums and products are rounded to float32 after each operation, as written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradwire.compressors.kernels import FLOAT32_MAX, Magnitudes
from gradwire.compressors.kernels.shared import BFLOAT16_MAX, FLOAT16_MAX, LANES, SUM_BLOCK
from gradwire.compressors.payload import (
    Bytes,
    CodeFormat,
    DenseFormat,
    Float32,
    Float64,
    Int64,
    pack_codes,
    unpack_codes,
)


def magnitudes(values: Float32) -> Magnitudes:
    """Return the sum of absolute values and the number of non-zero elements of `values`."""
    return Magnitudes(ordered_sum(np.abs(values)), int(np.count_nonzero(values)))


def ordered_sum(values: npt.NDArray[np.floating]) -> float:
    """Return the sum of `values` in float64, added in a fixed order.

    Within a block of `SUM_BLOCK` elements, each of 16 lanes adds its elements: lane j adds j, j + 16, j + 32,
    …. Then the lanes are added in order, and then the blocks.
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
    """Return gradient + residual, clipped to the finite float32 range."""
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
    """Quantize r = gradient + residual; write the codes to `data` and the quantization error to `residual`.

    SIGNED_4BIT sends the largest level X with share * X < |r|, strictly, and leaves |r| - X with the sign of
    r. SIGNED_2BIT sends its one level X if X <= |r|, and ignores `share`.

    Args:
        levels: the format's positive levels, ascending.
        data: receives the packed codes.
        share: fraction of a level from which it is sent.
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
    """Quantize several tensors, each with its own levels, and return the statistics of `magnitudes` of each
    gradient.

    Args:
        gradients: one for each block.
        residual: residuals of all blocks, end to end.
        left: receives the quantization errors of all blocks; `residual` itself, or memory that does not
            overlap it.
        levels: `format.level_count` levels of each block, end to end.
        data: receives the packed codes; those of each block begin with a new 32-bit word.
        share: fraction of a level from which SIGNED_4BIT sends it.

    Returns:
        The sum of absolute values (float64) and the number of non-zero elements (int64) of each gradient,
            shape (blocks,). If a sum is not finite, the block's codes and errors are undefined.
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
    """Add `tables[w][block][code]` of each element to `out`, one payload after the other in the order given.

    Args:
        datas: packed codes of each payload.
        tables: weighted value of each code, shape (payloads, blocks, 2**bits), or (payloads, 2**bits) for one
            block.
        keep: True to add to the values in `out`; False to start from zeros.
        sizes: number of elements of each block, int64 of shape (blocks,), whose codes begin with a new 32-bit
            word; None for one block.
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
    """Add `weights[w]` times the values of payload w to `out`, one payload after the other.

    Args:
        datas: bytes of each payload, in `format`.
        keep: True to add to the values in `out`; False to start from zeros.
    """
    if not keep:
        out[:] = 0.0
    for data, weight in zip(datas, weights, strict=True):
        values = np.empty_like(out)
        decode_dense(format, data, values)
        out += weight * values


def encode_dense(format: DenseFormat, gradient: Float32, residual: Float32, data: Bytes) -> None:
    """Round r = gradient + residual to the nearest value of the format, ties to even; leave the error in
    `residual`.

    Args:
        data: receives the encoded values.
    """
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
    """Convert the values in `data` to float32, exactly, and write them to `out`."""
    if format is DenseFormat.FLOAT32:
        out[:] = data.view(np.float32)
    elif format is DenseFormat.FLOAT16:
        out[:] = data.view(np.float16)
    else:
        out[:] = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def has_forbidden_code(format: CodeFormat, data: Bytes) -> bool:
    """Return True if any code in `data`, padding included, is the one code that is never sent."""
    codes = unpack_codes(format.bits, data, data.size * 8 // format.bits)
    return bool((codes == format.forbidden_code).any())


def all_finite(format: DenseFormat, data: Bytes) -> bool:
    """Return True if `data` holds neither an infinity nor a NaN."""
    values = np.empty(data.size // format.element_bytes, np.float32)
    decode_dense(format, data, values)
    return bool(np.isfinite(values).all())
