# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels over packed codes: quantize with feedback, and the sum of many payloads.

The sum reads 32-bit words as lanes: shifting 16 words right by 4j leaves code j of each word in its low bits,
so a payload costs one load per 128 elements and then a shift, a lookup and an addition per 16. The sums are
accumulated in that transposed order, in registers, and put in order once, after the last payload.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.misc.special import literally

from . import vectors as v
from .blocks import CHUNK_PIECES, ELEMENTS, PIECES, WORDS
from .compiling import block_of, chunks, kernel, spans, take
from .late import CHUNK
from .reference import SUM_BLOCK

# Bytes ahead at which memory is asked for: one page, where the processor's own prefetching stops.
AHEAD = 4096


@njit
def _total(gradient, residual, i, kept):
    """gradient + residual, if there is one, kept within the finite range."""
    v.prefetch(np.uint64(gradient.ctypes.data), np.uint64(4 * i + AHEAD))
    if not kept:
        return v.load(gradient, i)
    v.prefetch(np.uint64(residual.ctypes.data), np.uint64(4 * i + AHEAD))
    return v.saturated_sum(v.load(gradient, i), v.load(residual, i))


@kernel
def quantize_4bit(cursor, gradient, residual, levels, values, data, elements):
    """`reference.quantize` for a multiple of 16 elements. values: float32 (16,), the worth of each code.

    residual: empty if nobody wants it.
    """
    kept = residual.size > 0
    # Binary search in seven levels: against the fourth, then in tables of the candidates that are left.
    second, third = np.zeros(16, np.float32), np.zeros(16, np.float32)
    second[0], second[4] = levels[1], levels[5]
    third[0], third[2], third[4], third[6] = levels[0], levels[2], levels[4], levels[6]
    seconds, thirds, worth = v.load(second, 0), v.load(third, 0), v.load(values, 0)
    first, fourth = v.all_floats(levels[0]), v.all_floats(levels[3])
    for start in chunks(cursor, elements):
        for i in range(start, min(start + CHUNK, elements), 16):
            total = _total(gradient, residual, i, kept)
            size = v.magnitude(total)
            code = v.where(v.above(size, fourth), v.all_words(4), v.all_words(0))
            code = v.where(v.above(size, v.lookup(seconds, code)), v.either(code, v.all_words(2)), code)
            code = v.where(v.above(size, v.lookup(thirds, code)), v.either(code, v.all_words(1)), code)
            code = v.where(v.above(total, first), v.either(code, v.all_words(8)), code)
            v.store_codes(data, i >> 1, code, 4)
            if kept:
                v.store(residual, i, v.subtract(total, v.lookup(worth, code)))


@kernel
def quantize_2bit(cursor, gradient, residual, levels, values, data, elements):
    """As `quantize_4bit`, for one level and codes of 2 bits. values: float32 (16,), by the low two bits."""
    kept = residual.size > 0
    level, worth = v.all_floats(levels[0]), v.load(values, 0)
    for start in chunks(cursor, elements):
        for i in range(start, min(start + CHUNK, elements), 16):
            total = _total(gradient, residual, i, kept)
            code = v.where(v.at_least(v.magnitude(total), level), v.all_words(2), v.all_words(0))
            code = v.where(v.at_least(total, level), v.all_words(3), code)
            v.store_codes(data, i >> 2, code, 2)
            if kept:
                v.store(residual, i, v.subtract(total, v.lookup(worth, code)))


@njit
def _byte_of(bits, layout, piece):
    """Where the codes of a piece begin."""
    block = block_of(layout, piece)
    return 4 * layout[WORDS, block] + (piece - layout[PIECES, block]) * (SUM_BLOCK * bits // 8)


@njit
def _sum(bits, cursor, addresses, tables, layout, out, keep, stream):
    bits = literally(bits)
    group = 16 * 32 // bits  # elements in sixteen words, of 64 bytes
    payloads, blocks, pieces = addresses.size, layout.shape[1] - 1, layout[PIECES, -1]
    first = take(cursor, CHUNK_PIECES)
    while first < pieces:
        following = take(cursor, CHUNK_PIECES)
        end = _byte_of(bits, layout, min(first + CHUNK_PIECES, pieces))
        beyond = _byte_of(bits, layout, following)
        for block, start, stop in spans(layout, first):
            at, code = layout[ELEMENTS, block], 4 * layout[WORDS, block]
            whole = start + (stop - start) // group * group
            for i in range(start, whole, group):
                sums = v.load_sums(out, at + i, bits) if keep else v.no_sums(bits)
                # Processors follow only so many streams by themselves. While this page is summed, the next
                # one of each payload is asked for, one payload after the other: as many lines per group as
                # payloads.
                byte = code + i * bits // 8
                line = byte % AHEAD // 64 * payloads
                page = byte - byte % AHEAD + AHEAD
                ahead = np.uint64(page if page < end else beyond)
                for w in range(payloads):
                    v.prefetch(addresses[line // (AHEAD // 64)] + ahead, np.uint64(line % (AHEAD // 64) * 64))
                    line += 1
                    words = v.load_words(addresses[w], np.uint64(byte))
                    sums = v.add_codes(sums, v.load(tables, 16 * (w * blocks + block)), words)
                if stream:
                    v.stream_sums(out, at + i, sums)
                else:
                    v.store_sums(out, at + i, sums)
            for i in range(whole, stop):
                total = out[at + i] if keep else np.float32(0.0)
                for w in range(payloads):
                    byte = v.load_byte(addresses[w], np.uint64(code + i * bits // 8))
                    total += tables[16 * (w * blocks + block) + ((byte >> (i * bits % 8)) & (2**bits - 1))]
                out[at + i] = total
        first = following
    if stream:
        v.fence()


@kernel
def sum_4bit(cursor, addresses, tables, layout, out, keep, stream):
    """Add payloads up, in their order, on top of `out` if `keep`, otherwise of zero.

    addresses: uint64 (payloads,), where codes begin.
    tables: float32 (16 * payloads * blocks,), the worth of each code, by payload, then by block.
    layout: of the blocks (`blocks.layout_of`).
    stream: write past the cache; only if `out` starts at a multiple of 64 bytes, and each block in it.
    """
    _sum(4, cursor, addresses, tables, layout, out, keep, stream)


@kernel
def sum_2bit(cursor, addresses, tables, layout, out, keep, stream):
    """As `sum_4bit`; a table holds its four entries four times over, because neighbours reach its index."""
    _sum(2, cursor, addresses, tables, layout, out, keep, stream)
