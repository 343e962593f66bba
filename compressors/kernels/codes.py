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
from .compiling import block_of, chunks, copy, kernel, spans, take
from .dense import read_float32
from .late import CHUNK, LANES
from .reference import SUM_BLOCK

# Bytes ahead at which memory is asked for: one page, where the processor's own prefetching stops.
AHEAD = 4096
PART = 1024


@njit
def _total(gradient, residual, i, kept):
    """gradient + residual, if there is one; `_code` keeps it within the finite range."""
    v.prefetch(np.uint64(gradient.ctypes.data), np.uint64(4 * i + AHEAD))
    if not kept:
        return v.load(gradient, i)
    v.prefetch(np.uint64(residual.ctypes.data), np.uint64(4 * i + AHEAD))
    return v.add(v.load(gradient, i), v.load(residual, i))


@njit
def _tables(bits, levels, block):
    """What `_code` needs of a block's levels."""
    if bits == 2:
        level = v.all_floats(levels[block])
        return level, level, level, level, level, level
    first, thirds, below = 7 * block, np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for lane in range(LANES):
        thirds[lane] = levels[first + lane % 4 * 2]
        if lane % 4:
            below[lane] = levels[first + lane % 4 * 2 - 1]
    lowest, fourth = v.all_floats(levels[first]), v.all_floats(levels[first + 3])
    second, sixth = v.all_floats(levels[first + 1]), v.all_floats(levels[first + 5])
    return lowest, second, fourth, sixth, v.load(thirds, 0), v.load(below, 0)


@njit
def _code(bits, tables, total):
    """Sixteen codes, and what they leave of the total, once that is kept within the finite range."""
    lowest, second, fourth, sixth, thirds, below = tables
    sign = v.sign(total)
    size = v.saturated(v.differing(total, sign))
    if bits == 2:
        beyond = v.at_least(size, lowest)
        code = v.where(beyond, v.all_words(2), v.all_words(0))
        code = v.where(v.at_least(total, lowest), v.all_words(3), code)
        # What the level leaves of itself is +0, also where it is negative.
        worth = v.where(beyond, v.differing(lowest, sign), v.all_floats(np.float32(0.0)))
        return code, v.subtract(v.differing(size, sign), worth)
    # Binary search in seven levels: against the fourth, the second or sixth, and one of the other four.
    beyond = v.above(size, fourth)
    index = v.where(beyond, v.all_words(2), v.all_words(0))
    index = v.add_set(index, v.above(size, v.where(beyond, sixth, second)))
    third = v.lookup_four(thirds, index)
    beyond = v.above(size, third)
    code = v.add_set(v.twice(index), beyond)
    code = v.where(v.above(total, lowest), v.either(code, v.all_words(8)), code)
    # Something is left, or there was nothing: so it has the sign of the total.
    left = v.subtract(size, v.where(beyond, third, v.lookup_four(below, index)))
    return code, v.differing(left, sign)


@kernel
def quantize_4bit(cursor, gradient, residual, levels, data, elements):
    """`reference.quantize` for a multiple of 16 elements. residual: empty if nobody wants it."""
    kept, tables = residual.size > 0, _tables(4, levels, 0)
    for start in chunks(cursor, elements):
        for i in range(start, min(start + CHUNK, elements), LANES):
            code, left = _code(4, tables, _total(gradient, residual, i, kept))
            v.store_codes(data, i >> 1, code, 4)
            if kept:
                v.store(residual, i, left)


@kernel
def quantize_2bit(cursor, gradient, residual, levels, data, elements):
    """As `quantize_4bit`, for one level and codes of 2 bits."""
    kept, tables = residual.size > 0, _tables(2, levels, 0)
    for start in chunks(cursor, elements):
        for i in range(start, min(start + CHUNK, elements), LANES):
            code, left = _code(2, tables, _total(gradient, residual, i, kept))
            v.store_codes(data, i >> 2, code, 2)
            if kept:
                v.store(residual, i, left)


@njit
def _quantize_blocks(bits, cursor, gradients, residual, left, levels, layout, data, sums, counts, stream):
    bits = literally(bits)
    # The last elements of a block, fewer than a vector: gradient, residual and what is left; and their codes.
    given, owed, kept = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    packed = np.zeros(8, np.uint8)
    ahead = np.uint64(residual.ctypes.data + AHEAD)
    for first in chunks(cursor, layout[PIECES, -1], CHUNK_PIECES):
        for block, start, stop in spans(layout, first):
            gradient, at, code_at = gradients[block], layout[ELEMENTS, block], 4 * layout[WORDS, block]
            tables = _tables(bits, levels, block)
            past = stream and at % LANES == 0
            for begin in range(start, stop, SUM_BLOCK):
                end = min(begin + SUM_BLOCK, stop)
                whole = begin + (end - begin) // LANES * LANES
                lanes, count = v.no_doubles(), v.all_words(0)
                for part in range(begin, whole, PART):
                    rest = min(part + PART, whole)
                    for i in range(part, rest, LANES):
                        v.prefetch(gradient, np.uint64(4 * i + AHEAD))
                        here = v.load_floats(gradient, np.uint64(4 * i))
                        lanes = v.add_widened(lanes, v.magnitude(here))
                        count = v.add_set(count, v.nonzero(here))
                    for i in range(part, rest, LANES):
                        v.prefetch(ahead, np.uint64(4 * (at + i)))
                        here = v.load_floats(gradient, np.uint64(4 * i))
                        total = v.add(here, v.load(residual, at + i))
                        code, rest_ = _code(bits, tables, total)
                        v.store_codes(data, code_at + (i * bits >> 3), code, bits)
                        if past:
                            v.stream(left, at + i, rest_)
                        else:
                            v.store(left, at + i, rest_)
                if whole < end:
                    given[:], owed[:] = np.float32(0.0), np.float32(0.0)
                    for k in range(end - whole):
                        given[k] = read_float32(gradient, whole + k)
                        owed[k] = residual[at + whole + k]
                    here = v.load(given, 0)
                    lanes = v.add_widened(lanes, v.magnitude(here))
                    count = v.add_set(count, v.nonzero(here))
                    total = v.add(here, v.load(owed, 0))
                    code, rest = _code(bits, tables, total)
                    v.store_codes(packed, 0, code, bits)
                    v.store(kept, 0, rest)
                    copy(kept, 0, end - whole, left, at + whole)
                    # Zeros leave code 0, the padding.
                    size = ((end - whole) * bits + 31) // 32 * 4
                    copy(packed, 0, size, data, code_at + whole * bits // 8)
                piece = layout[PIECES, block] + begin // SUM_BLOCK
                sums[piece], counts[piece] = v.sum_doubles(lanes), v.sum_words(count)
    if stream:
        v.fence()


@kernel
def quantize_blocks_4bit(cursor, gradients, residual, left, levels, layout, data, sums, counts, stream):
    """`reference.quantize_blocks`, but for adding up what is found in each piece.

    gradients: uint64 (blocks,), where each begins. layout: of the blocks (`blocks.layout_of`).
    sums, counts: float64 and int64 (pieces,): of |gradient|, and of what is not zero.
    stream: write what is left past the cache; only if it starts at a multiple of 64 bytes.
    """
    _quantize_blocks(4, cursor, gradients, residual, left, levels, layout, data, sums, counts, stream)


@kernel
def quantize_blocks_2bit(cursor, gradients, residual, left, levels, layout, data, sums, counts, stream):
    """As `quantize_blocks_4bit`."""
    _quantize_blocks(2, cursor, gradients, residual, left, levels, layout, data, sums, counts, stream)


@kernel
def add_pieces(layout, sums, counts, totals, nonzero):
    """Add up what is found in the pieces of each block, in order."""
    for block in range(totals.size):
        total, count = 0.0, 0
        for piece in range(layout[PIECES, block], layout[PIECES, block + 1]):
            total += sums[piece]
            count += counts[piece]
        totals[block], nonzero[block] = total, count


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
