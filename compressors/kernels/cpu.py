"""Kernels over quantized and dense payloads, on several threads. The number of threads changes no bit.

Compiled code trusts the sizes and addresses that it receives, so every array is checked in this file before a
loop runs. Sums and products are rounded to float32 after each operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..payload import Bytes, CodeFormat, DenseFormat, Float32, Float64, Int64
from . import linear
from .blocks import ELEMENTS, WORDS, layout_of
from .checks import address, addresses, check, check_signed, checked_pair, code_addresses, in_order
from .lazy import codes, dense, linear_loops, linear_sums
from .shared import LANES, SUM_BLOCK, Magnitudes
from .threads import run

# A sum with at least this many elements bypasses the cache: the cache would have evicted it before it is
# read.
STREAM_ELEMENTS = 1 << 22

# The number by which the loops in `dense` know each format.
_NUMBERS = {format: number for number, format in enumerate(DenseFormat)}


def magnitudes(values: Float32) -> Magnitudes:
    sums, counts = block_magnitudes(values)
    return Magnitudes(in_order(sums), int(counts.sum()))


def block_magnitudes(values: Float32) -> tuple[Float64, Int64]:
    """Sum the absolute values, and count the non-zero elements, of each block of `SUM_BLOCK` elements."""
    check("values", values, np.float32, values.size)
    blocks = -(-values.size // SUM_BLOCK)
    sums, counts = np.zeros(blocks), np.zeros(blocks, np.int64)
    none = np.empty(0, np.float32)
    run(linear_loops.piece_sums, values.size, values, none, SUM_BLOCK, sums, counts, False)
    return sums, counts


def sampled_magnitudes(
    tensors: npt.NDArray[np.uint64], sizes: Int64, largest: int, stride: int
) -> tuple[Float64, Int64]:
    """Return the sum of absolute values and the number of non-zero elements of each tensor, or of a sample of
    it.

    Args:
        tensors: address of each tensor's first float32, which the caller has checked.
        largest: number of elements up to which all of a tensor is read.
        stride: of a larger tensor, the first 16 of every `stride` elements are read.
    """
    check("sizes", sizes, np.int64, sizes.size)
    check("tensors", tensors, np.uint64, sizes.size)
    totals, nonzero = np.empty(sizes.size), np.empty(sizes.size, np.int64)
    dense.sampled_magnitudes(tensors, sizes, largest, stride, totals, nonzero)
    return totals, nonzero


def quantize(
    format: CodeFormat,
    gradient: Float32,
    residual: Float32 | None,
    levels: Float32,
    data: Bytes,
    *,
    share: float = 1.0,
) -> None:
    """Quantize r = gradient + residual; write the codes to `data` and the quantization error to `residual`.

    SIGNED_4BIT sends the largest level X with share * X < |r|, strictly, and leaves |r| - X with the sign of
    r. SIGNED_2BIT sends its one level X if X <= |r|, and ignores `share`.

    Args:
        residual: replaced by the error; None for zeros, and the error is dropped.
        levels: the format's positive levels, ascending.
        data: receives the packed codes, `format.code_bytes(elements)` bytes.
        share: fraction of a level from which it is sent.
    """
    left = checked_pair(gradient, residual)
    sizes = np.array([gradient.size], np.int64)
    quantize_at(format, addresses([gradient]), sizes, left, left, levels, data, share=share)


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
    """Quantize several tensors in one pass, each as `quantize` does; the arguments are those of
    `quantize_at`, but for the gradients: one flat float32 array for each block."""
    for gradient in gradients:
        check("gradient", gradient, np.float32, gradient.size)
    sizes = np.array([gradient.size for gradient in gradients], np.int64)
    return quantize_at(format, addresses(gradients), sizes, residual, left, levels, data, share=share)


def quantize_at(
    format: CodeFormat,
    gradients: npt.NDArray[np.uint64],
    sizes: Int64,
    residual: Float32,
    left: Float32,
    levels: Float32,
    data: Bytes,
    *,
    share: float = 1.0,
) -> tuple[Float64, Int64]:
    """Quantize several tensors in one pass, each with its own levels.

    Args:
        format: SIGNED_4BIT or SIGNED_2BIT.
        gradients: address of each block's first float32, which the caller has checked, shape (blocks,).
        sizes: number of elements of each block, shape (blocks,).
        residual: residuals of all blocks, end to end; empty for zeros, and the errors are dropped.
        left: receives the quantization errors of all blocks, end to end; `residual` itself, or memory that
            does not overlap it.
        levels: `format.level_count` levels of each block, end to end.
        data: receives the packed codes; those of each block begin with a new 32-bit word.
        share: fraction of a level from which SIGNED_4BIT sends it.

    Returns:
        The sum of absolute values (float64) and the number of non-zero elements (int64) of each gradient,
            shape (blocks,). If a sum is not finite, the block's codes and errors are undefined.
    """
    check_signed(format)
    layout = layout_of(format.bits, sizes)
    elements, words, pieces = (int(count) for count in layout[:, -1])
    check("gradients", gradients, np.uint64, sizes.size)
    check("residual", residual, np.float32, elements if residual.size else 0)
    check("left", left, np.float32, residual.size, written=True)
    check("levels", levels, np.float32, sizes.size * format.level_count)
    check("data", data, np.uint8, 4 * words, written=True)
    in_place = address(left) == address(residual)
    if not in_place and np.may_share_memory(left, residual):
        raise ValueError("left: expected the same memory as residual, or memory that does not overlap it")
    # An empty `left` takes no errors, wherever it lies.
    stream = left.size > 0 and not in_place and elements >= STREAM_ELEMENTS and address(left) % 64 == 0
    sums, counts = np.empty(pieces), np.empty(pieces, np.int64)
    kernel = codes.quantize_blocks_4bit if format.bits == 4 else codes.quantize_blocks_2bit
    given = gradients, residual, left, levels, np.float32(share), layout, data
    run(kernel, elements, *given, sums, counts, stream)
    totals, nonzero = np.empty(sizes.size), np.empty(sizes.size, np.int64)
    codes.add_pieces(layout, sums, counts, totals, nonzero)
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
    """Add the decoded values of quantized payloads to `out`, one payload after the other.

    Args:
        datas: packed codes of each payload.
        tables: weighted value of each code, shape (payloads, blocks, 2**bits), or (payloads, 2**bits) for one
            block.
        keep: True to add to the values in `out`; False to start from zeros.
        sizes: number of elements of each block, shape (blocks,); None for one block.
    """
    layout = layout_of(format.bits, np.array([out.size], np.int64) if sizes is None else sizes)
    starts, words = layout[ELEMENTS], layout[WORDS]
    flat = tables.reshape(-1)
    check("out", out, np.float32, int(starts[-1]), written=True)
    check("tables", flat, np.float32, len(datas) * (starts.size - 1) * 2**format.bits)
    codes_at = code_addresses(datas, 4 * int(words[-1]))
    if format.bits == 1:
        run(linear_sums.add_binary, out.size, codes_at, flat, layout, out, keep)
        return
    if format is CodeFormat.CODEBOOK_8BIT:
        run(codes.sum_8bit, out.size, codes_at, flat, layout, out, keep)
        return
    kernel = codes.sum_4bit if format is CodeFormat.SIGNED_4BIT else codes.sum_2bit
    stream = not keep and out.size >= STREAM_ELEMENTS and address(out) % 64 == 0
    stream = stream and not (starts % LANES).any()
    run(kernel, out.size, codes_at, _table_of_16(tables, format), layout, out, keep, stream)


def add_dense(
    format: DenseFormat, datas: Sequence[Bytes], weights: Float32, out: Float32, *, keep: bool = True
) -> None:
    """Add `weights[w]` times the values of payload w to `out`, one payload after the other.

    keep: True to add to the values in `out`; False to start from zeros.
    """
    check("out", out, np.float32, out.size, written=True)
    check("weights", weights, np.float32, len(datas))
    codes_at = code_addresses(datas, format.element_bytes * out.size)
    run(dense.sum_dense, out.size, _NUMBERS[format], codes_at, weights, out, keep)


def encode_dense(format: DenseFormat, gradient: Float32, residual: Float32 | None, data: Bytes) -> None:
    """Round gradient + residual to a 16-bit format; write the bytes to `data` and the rounding error to
    `residual`.

    A residual of None stands for zeros, and the error is dropped.
    """
    if format is DenseFormat.FLOAT32:
        raise ValueError("format: expected one of 16 bits, got float32")
    check("data", data, np.uint8, format.element_bytes * gradient.size, written=True)
    left = checked_pair(gradient, residual)
    run(dense.round_dense, gradient.size, _NUMBERS[format], gradient, left, data.view(np.uint16))


def decode_dense(format: DenseFormat, data: Bytes, out: Float32) -> None:
    """Convert the values in `data` to float32, exactly, and write them to `out`."""
    check("out", out, np.float32, out.size, written=True)
    check("data", data, np.uint8, format.element_bytes * out.size)
    run(dense.widen, out.size, _NUMBERS[format], address(data), out)


def has_forbidden_code(format: CodeFormat, data: Bytes) -> bool:
    """Return True if any code in `data`, padding included, is the one code that is never sent."""
    check_signed(format)
    if format is CodeFormat.SIGNED_4BIT:  # code 8 is the most negative integer of four bits
        return linear.has_forbidden_linear(4, 2 * data.size, data)
    check("data", data, np.uint8, data.size // 4 * 4)
    return bool((data & ~(data >> 1) & 0x55).any())


def all_finite(format: DenseFormat, data: Bytes) -> bool:
    elements = data.size // format.element_bytes
    check("data", data, np.uint8, elements * format.element_bytes)
    found = np.zeros(1, np.uint8)
    run(dense.find_non_finite, elements, _NUMBERS[format], address(data), elements, found)
    return not found[0]


def warm_up() -> None:
    """Compile every kernel of this module, or load it from the cache."""
    ones = np.ones(17, np.float32)
    magnitudes(ones)
    sampled_magnitudes(addresses([ones]), np.array([ones.size]), ones.size, LANES)
    for code_format in (CodeFormat.SIGNED_4BIT, CodeFormat.SIGNED_2BIT):
        levels = np.arange(1, code_format.level_count + 1, dtype=np.float32)
        data = np.zeros(code_format.code_bytes(ones.size), np.uint8)
        quantize_blocks(code_format, [ones], ones, np.zeros_like(ones), levels, data)
        add_quantized(code_format, [data], code_format.table(levels)[None], np.zeros_like(ones))
        has_forbidden_code(code_format, data)
    for code_format in (CodeFormat.BINARY, CodeFormat.CODEBOOK_8BIT):
        data = np.zeros(code_format.code_bytes(ones.size), np.uint8)
        tables = np.ones((1, 2**code_format.bits), np.float32)
        add_quantized(code_format, [data], tables, np.zeros_like(ones))
    for format in DenseFormat:
        data = np.zeros(format.element_bytes * ones.size, np.uint8)
        if format is not DenseFormat.FLOAT32:
            encode_dense(format, ones, np.zeros_like(ones), data)
        decode_dense(format, data, np.zeros_like(ones))
        add_dense(format, [data], ones[:1], np.zeros_like(ones))
        all_finite(format, data)


def _table_of_16(tables: Float32, format: CodeFormat) -> Float32:
    """Return the tables, flat, with each repeated to fill 16 entries.

    A vector lookup takes four bits as its index. For shorter codes the upper ones belong to the next code.
    """
    entries = 2**format.bits
    return np.tile(tables.reshape(-1, entries), (1, LANES // entries)).reshape(-1)
