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
from .compiling import block_of, copy, elements_of, fetch_add, kernel
from .dense import bits_of, read_float32
from .lazy import CHUNK, LANES
from .reference import SUM_BLOCK

# Bytes ahead at which memory is asked for: one page, where the processor's own prefetching stops.
AHEAD = 4096
# Elements of a gradient that are added up, and then quantized while they are in the first-level cache.
PART = 1024
# Of levels each of which is the next lower one doubled: then a code is a difference of exponents.
DOUBLING = 8


@njit
def _total(gradient, residual, i, kept):
    """gradient + residual, if there is one; `_code` keeps it within the finite range."""
    v.prefetch(np.uint64(gradient.ctypes.data), np.uint64(4 * i + AHEAD))
    if not kept:
        return v.load(gradient, i)
    v.prefetch(np.uint64(residual.ctypes.data), np.uint64(4 * i + AHEAD))
    return v.add(v.load(gradient, i), v.load(residual, i))


@njit
def _tables(bits, levels, share, block):
    """What `_code` needs of a block's levels: where each begins to be sent, and what it is worth."""
    if bits == 2:
        level = v.all_floats(levels[block])
        return level, level, level, level, level, level, v.all_words(0)
    first, values = 7 * block, np.zeros((2, LANES), np.float32)
    for lane in range(LANES):
        values[0, lane] = share * levels[first + lane % 4 * 2]
        if lane % 8:
            values[1, lane] = levels[first + lane % 8 - 1]
    flat = values.reshape(-1)
    lowest, fourth = v.all_floats(values[0, 0]), v.all_floats(share * levels[first + 3])
    second, sixth = v.all_floats(share * levels[first + 1]), v.all_floats(share * levels[first + 5])
    # What is larger than the lowest one by anything is at least this much doubled.
    base = v.all_words(np.uint32(bits_of(values[0, 0]) + np.uint32(1) - np.uint32(1 << 23)))
    thirds, worths = v.load(flat, 0), v.load(flat, LANES)
    return lowest, second, fourth, sixth, thirds, worths, base


@njit
def _kind(bits, levels, share, block):
    """`DOUBLING` if each of the seven levels, and so where it begins to be sent, is the next lower one
    doubled, otherwise the bits."""
    if bits == 2:
        return bits
    lowest = bits_of(share * levels[7 * block])
    if lowest < np.uint32(1 << 23):
        return bits
    for k in range(1, 7):
        if bits_of(share * levels[7 * block + k]) != lowest + np.uint32(k << 23):
            return bits
    return DOUBLING


@njit
def _code(kind, tables, total):
    """Sixteen codes, and what they leave of the total, once that is kept within the finite range."""
    lowest, second, fourth, sixth, thirds, worths, base = tables
    sign = v.sign(total)
    size = v.saturated(v.xor(total, sign))
    if kind == 2:
        beyond = v.at_least(size, lowest)
        code = v.where(beyond, v.all_words(2), v.all_words(0))
        code = v.where(v.at_least(total, lowest), v.all_words(3), code)
        # What the level leaves of itself is +0, also where it is negative.
        worth = v.where(beyond, v.xor(lowest, sign), v.all_floats(np.float32(0.0)))
        return code, v.subtract(v.xor(size, sign), worth)
    if kind == DOUBLING:
        code = v.power(size, base)
    else:
        # Binary search in seven levels: against the fourth, the second or sixth, and one of the other four.
        beyond = v.above(size, fourth)
        index = v.where(beyond, v.all_words(2), v.all_words(0))
        index = v.add_mask(index, v.above(size, v.where(beyond, sixth, second)))
        code = v.add_mask(v.twice(index), v.above(size, v.lookup_four(thirds, index)))
    worth = v.lookup_eight(worths, code)
    code = v.where(v.above(total, lowest), v.bitwise_or(code, v.all_words(8)), code)
    return code, v.xor(v.subtract(size, worth), sign)


@njit
def _quantize(kind, bits, cursor, gradient, residual, levels, share, data, elements):
    kept, tables = residual.size > 0, _tables(bits, levels, share, 0)
    start = fetch_add(cursor, CHUNK)
    while start < elements:
        for i in range(start, min(start + CHUNK, elements), LANES):
            code, left = _code(kind, tables, _total(gradient, residual, i, kept))
            v.store_codes(data, i * bits >> 3, code, bits)
            if kept:
                v.store(residual, i, left)
        start = fetch_add(cursor, CHUNK)


@kernel
def quantize_4bit(cursor, gradient, residual, levels, share, data, elements):
    """`reference.quantize` for a multiple of 16 elements. residual: empty if nobody wants it."""
    if _kind(4, levels, share, 0) == DOUBLING:
        _quantize(DOUBLING, 4, cursor, gradient, residual, levels, share, data, elements)
    else:
        _quantize(4, 4, cursor, gradient, residual, levels, share, data, elements)


@kernel
def quantize_2bit(cursor, gradient, residual, levels, share, data, elements):
    """As `quantize_4bit`, for one level and codes of 2 bits."""
    _quantize(2, 2, cursor, gradient, residual, levels, share, data, elements)


@njit
def _quantize_part(kind, bits, tables, gradient, residual, left, data, code_at, at, first, end, past):
    """Elements of a block from `first` to `end`, a multiple of 16 of them.

    at, code_at: where the block begins in the residual and in the data. past: write what is left past the
    cache.
    """
    ahead = np.uint64(residual.ctypes.data + AHEAD)
    for i in range(first, end, LANES):
        v.prefetch(ahead, np.uint64(4 * (at + i)))
        total = v.add(v.load_floats(gradient, np.uint64(4 * i)), v.load(residual, at + i))
        code, rest = _code(kind, tables, total)
        v.store_codes(data, code_at + (i * bits >> 3), code, bits)
        if past:
            v.stream(left, at + i, rest)
        else:
            v.store(left, at + i, rest)


@njit
def _quantize_blocks(
    bits, cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream
):
    bits = literally(bits)
    # The last elements of a block, fewer than a vector: gradient, residual and what is left; and their codes.
    padded, packed = np.zeros(3 * LANES, np.float32), np.zeros(LANES * bits // 8, np.uint8)
    padded_at = np.uint64(padded.ctypes.data)
    first = fetch_add(cursor, CHUNK_PIECES)
    while first < layout[PIECES, -1]:
        pieces_end = min(first + CHUNK_PIECES, layout[PIECES, -1])
        for block in range(block_of(layout, first), block_of(layout, pieces_end - 1) + 1):
            start, stop = elements_of(layout, block, first, pieces_end)
            gradient, at, code_at = gradients[block], layout[ELEMENTS, block], 4 * layout[WORDS, block]
            tables = _tables(bits, levels, share, block)
            doubling = _kind(bits, levels, share, block) == DOUBLING
            past = stream and at % LANES == 0
            for begin in range(start, stop, SUM_BLOCK):
                end = min(begin + SUM_BLOCK, stop)
                whole = begin + (end - begin) // LANES * LANES
                lanes, count = v.no_doubles(), v.all_words(0)
                # In turn, because in one loop they would take more registers than most processors have.
                for part in range(begin, whole, PART):
                    last = min(part + PART, whole)
                    for i in range(part, last, LANES):
                        v.prefetch(gradient, np.uint64(4 * i + AHEAD))
                        here = v.load_floats(gradient, np.uint64(4 * i))
                        lanes = v.add_widened(lanes, v.magnitude(here))
                        count = v.add_mask(count, v.nonzero(here))
                    if doubling:
                        _quantize_part(
                            DOUBLING,
                            bits,
                            tables,
                            gradient,
                            residual,
                            left,
                            data,
                            code_at,
                            at,
                            part,
                            last,
                            past,
                        )
                    else:
                        _quantize_part(
                            bits, bits, tables, gradient, residual, left, data, code_at, at, part, last, past
                        )
                if whole < end:
                    padded[:] = np.float32(0.0)
                    for k in range(end - whole):
                        padded[k] = read_float32(gradient, whole + k)
                    copy(residual, at + whole, at + end, padded, LANES)
                    here = v.load(padded, 0)
                    lanes = v.add_widened(lanes, v.magnitude(here))
                    count = v.add_mask(count, v.nonzero(here))
                    rests = padded[LANES:]
                    _quantize_part(bits, bits, tables, padded_at, rests, rests, packed, 0, 0, 0, LANES, False)
                    copy(rests, 0, end - whole, left, at + whole)
                    # Zeros leave code 0, the padding.
                    copy(packed, 0, ((end - whole) * bits + 31) // 32 * 4, data, code_at + whole * bits // 8)
                piece = layout[PIECES, block] + begin // SUM_BLOCK
                sums[piece], counts[piece] = v.sum_doubles(lanes), v.sum_words(count)
        first = fetch_add(cursor, CHUNK_PIECES)
    if stream:
        v.fence()


@kernel
def quantize_blocks_4bit(
    cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream
):
    """`reference.quantize_blocks`, but for adding up what is found in each piece.

    gradients: uint64 (blocks,), where each begins. layout: of the blocks (`blocks.layout_of`).
    sums, counts: float64 and int64 (pieces,): of |gradient|, and of what is not zero.
    stream: write what is left past the cache; only if it starts at a multiple of 64 bytes.
    """
    _quantize_blocks(4, cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream)


@kernel
def quantize_blocks_2bit(
    cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream
):
    """As `quantize_blocks_4bit`."""
    _quantize_blocks(2, cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream)


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
    first = fetch_add(cursor, CHUNK_PIECES)
    while first < pieces:
        following = fetch_add(cursor, CHUNK_PIECES)
        pieces_end = min(first + CHUNK_PIECES, pieces)
        end, beyond = _byte_of(bits, layout, pieces_end), _byte_of(bits, layout, following)
        for block in range(block_of(layout, first), block_of(layout, pieces_end - 1) + 1):
            start, stop = elements_of(layout, block, first, pieces_end)
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


@kernel
def sum_8bit(cursor, addresses, tables, layout, out, keep):
    """Add payloads up as `sum_4bit` does, element by element: a table of 256 entries is no vector lookup.

    tables: float32 (256 * payloads * blocks,), the worth of each code, by payload, then by block.
    """
    payloads, blocks, pieces = addresses.size, layout.shape[1] - 1, layout[PIECES, -1]
    first = fetch_add(cursor, CHUNK_PIECES)
    while first < pieces:
        pieces_end = min(first + CHUNK_PIECES, pieces)
        for block in range(block_of(layout, first), block_of(layout, pieces_end - 1) + 1):
            start, stop = elements_of(layout, block, first, pieces_end)
            at, code = layout[ELEMENTS, block], 4 * layout[WORDS, block]
            for i in range(start, stop):
                total = out[at + i] if keep else np.float32(0.0)
                for w in range(payloads):
                    byte = v.load_byte(addresses[w], np.uint64(code + i))
                    total += tables[256 * (w * blocks + block) + byte]
                out[at + i] = total
        first = fetch_add(cursor, CHUNK_PIECES)
