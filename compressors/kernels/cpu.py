"""The kernels of `reference`, compiled: the functions of the same names, the same bits, on several threads.

What stands here is the border between Python and machine code: compiled code trusts the sizes and addresses
that it is given, so every array is checked on this side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..payload import Bytes, CodeFormat, DenseFormat, Float32, Float64, Int64
from .blocks import ELEMENTS, WORDS, layout_of
from .checks import address, addresses, check, check_signed, checked_pair, code_addresses, in_order
from .lazy import LANES, codes, dense, linear_sums
from .reference import SUM_BLOCK, Magnitudes
from .threads import run

# Sums at least this large bypass the cache: nothing of them would be left in it when they are read.
STREAM_ELEMENTS = 1 << 22

# Of a format, as the kernels know it.
_NUMBERS = {format: number for number, format in enumerate(DenseFormat)}


def magnitudes(values: Float32) -> Magnitudes:
    sums, counts = block_magnitudes(values)
    return Magnitudes(in_order(sums), int(counts.sum()))


def block_magnitudes(values: Float32) -> tuple[Float64, Int64]:
    """Of each `SUM_BLOCK` elements: the sum of their absolute values, and how many are not 0."""
    check("values", values, np.float32, values.size)
    blocks = -(-values.size // SUM_BLOCK)
    sums, counts = np.zeros(blocks), np.zeros(blocks, np.int64)
    run(dense.magnitudes, values.size, values, sums, counts)
    return sums, counts


def sampled_magnitudes(
    tensors: npt.NDArray[np.uint64], sizes: Int64, largest: int, stride: int
) -> tuple[Float64, Int64]:
    """Return the magnitudes of tensors that the caller has checked: by address, each of so many elements.

    largest, stride: of tensors of more than `largest` elements the kernel reads 16 of every `stride`.
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
    """See `reference.quantize`. residual: None stands for zeros, and nobody wants what is left."""
    check_signed(format)
    left = checked_pair(gradient, residual)
    check("levels", levels, np.float32, format.level_count)
    check("data", data, np.uint8, format.code_bytes(gradient.size), written=True)
    kernel = codes.quantize_4bit if format is CodeFormat.SIGNED_4BIT else codes.quantize_2bit
    whole = gradient.size // LANES * LANES
    run(kernel, whole, gradient, left, levels, np.float32(share), data, whole)
    rest = gradient.size - whole
    if rest:
        # The last few elements: the same kernel on a copy with zeros behind, which become the padding.
        padded = np.zeros((2, LANES), np.float32)
        padded[0, :rest] = gradient[whole:]
        if residual is not None:
            padded[1, :rest] = residual[whole:]
        packed = np.zeros(LANES * format.bits // 8, np.uint8)
        run(kernel, LANES, padded[0], padded[1], levels, np.float32(share), packed, LANES)
        if residual is not None:
            residual[whole:] = padded[1, :rest]
        tail = data[whole * format.bits // 8 :]
        tail[:] = packed[: tail.size]


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
    """See `reference.quantize_blocks`."""
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
    """`quantize_blocks` of gradients that the caller has checked: by address, each of so many elements."""
    check_signed(format)
    layout = layout_of(format.bits, sizes)
    elements, words, pieces = (int(count) for count in layout[:, -1])
    check("gradients", gradients, np.uint64, sizes.size)
    check("residual", residual, np.float32, elements)
    check("left", left, np.float32, elements, written=True)
    check("levels", levels, np.float32, sizes.size * format.level_count)
    check("data", data, np.uint8, 4 * words, written=True)
    in_place = address(left) == address(residual)
    if not in_place and np.may_share_memory(left, residual):
        raise ValueError("left: expected the memory of the residual, or other memory throughout")
    stream = not in_place and elements >= STREAM_ELEMENTS and address(left) % 64 == 0
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
    check("out", out, np.float32, out.size, written=True)
    check("weights", weights, np.float32, len(datas))
    codes_at = code_addresses(datas, format.element_bytes * out.size)
    run(dense.sum_dense, out.size, _NUMBERS[format], codes_at, weights, out, keep)


def encode_dense(format: DenseFormat, gradient: Float32, residual: Float32 | None, data: Bytes) -> None:
    """See `reference.encode_dense`. residual: as in `quantize`."""
    if format is DenseFormat.FLOAT32:
        raise ValueError("format: expected one of 16 bits, float32 has nothing to round")
    check("data", data, np.uint8, format.element_bytes * gradient.size, written=True)
    left = checked_pair(gradient, residual)
    run(dense.round_dense, gradient.size, _NUMBERS[format], gradient, left, data.view(np.uint16))


def decode_dense(format: DenseFormat, data: Bytes, out: Float32) -> None:
    check("out", out, np.float32, out.size, written=True)
    check("data", data, np.uint8, format.element_bytes * out.size)
    run(dense.widen, out.size, _NUMBERS[format], address(data), out)


def has_forbidden_code(format: CodeFormat, data: Bytes) -> bool:
    check_signed(format)
    words = data.size // 4
    check("data", data, np.uint8, 4 * words)
    found = np.zeros(1, np.uint8)
    run(dense.find_code, words, format.bits, address(data), words, found)
    return bool(found[0])


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
        quantize(code_format, ones, np.zeros_like(ones), levels, data)
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
    """Tables by code, flat, each repeated to 16 entries: a vector lookup sees a neighbour's bits, too."""
    entries = 2**format.bits
    return np.tile(tables.reshape(-1, entries), (1, LANES // entries)).reshape(-1)
