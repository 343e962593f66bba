# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels over packed codes: quantization with error feedback, and the sum of many payloads.

The sum reads 32-bit words as lanes. Shifting 16 words right by 4j leaves code j of each word in its low bits.
So a payload costs one load per 128 elements, then a shift, a lookup and an addition per 16. The sums are
accumulated in registers in this transposed order, and reordered once, after the last payload.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.misc.special import literally

from . import code_vectors as c
from . import vectors as v
from .blocks import CHUNK_PIECES, ELEMENTS, PIECES, WORDS
from .compiling import block_of, copy, elements_of, fetch_add, kernel
from .dense import bits_of, read_float32
from .shared import LANES, SUM_BLOCK

# Bytes ahead of the current ones to prefetch: one page, where the processor's own prefetching stops.
AHEAD = 4096
# Elements of a gradient that are summed, and then quantized while they are still in the first-level cache.
PART = 1024
# The kind of levels each of which is twice the one below: then a code is a difference of exponents.
DOUBLING = 8


@njit
def _tables(bits, levels, share, block):
    """Return the vectors that `_code` needs of one block's levels: thresholds, values, exponent base."""
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
    # Any float above the lowest threshold is at least the next float above it; `base` is half of that one, so
    # that `power` counts from 1 there.
    base = v.all_words(np.uint32(bits_of(values[0, 0]) + np.uint32(1) - np.uint32(1 << 23)))
    thirds, worths = v.load(flat, 0), v.load(flat, LANES)
    return lowest, second, fourth, sixth, thirds, worths, base


@njit
def _kind(bits, levels, share, block):
    """Return the algorithm for one block's codes, `DOUBLING` or the number of bits.

    It is `DOUBLING` for 4 bits if each of the seven thresholds is exactly twice the one below it.
    """
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
    """Quantize sixteen elements.

    Args:
        kind: the algorithm, from `_kind`.
        tables: the vectors from `_tables`.
        total: gradient + residual; clipped here to the finite range.

    Returns:
        The codes and the quantization errors.
    """
    lowest, second, fourth, sixth, thirds, worths, base = tables
    sign = v.sign(total)
    size = v.saturated(v.xor(total, sign))
    if kind == 2:
        beyond = v.at_least(size, lowest)
        code = v.where(beyond, v.all_words(2), v.all_words(0))
        code = v.where(v.at_least(total, lowest), v.all_words(3), code)
        # The sign is applied before the subtraction, so that an error of zero is +0 for negative elements,
        # too.
        worth = v.where(beyond, v.xor(lowest, sign), v.all_floats(np.float32(0.0)))
        return code, v.subtract(v.xor(size, sign), worth)
    if kind == DOUBLING:
        code = c.power(size, base)
    else:
        # Binary search in seven thresholds: against the fourth, then the second or sixth, then one of the odd
        # ones.
        beyond = v.above(size, fourth)
        index = v.where(beyond, v.all_words(2), v.all_words(0))
        index = v.add_mask(index, v.above(size, v.where(beyond, sixth, second)))
        code = v.add_mask(v.twice(index), v.above(size, c.lookup_four(thirds, index)))
    worth = c.lookup_eight(worths, code)
    code = v.where(v.above(total, lowest), v.bitwise_or(code, v.all_words(8)), code)
    return code, v.xor(v.subtract(size, worth), sign)


@njit
def _quantize_part(kind, bits, tables, gradient, residual, left, data, code_at, at, first, end, past):
    """Quantize the elements of a block from `first` to `end`, a multiple of 16 elements.

    Args:
        gradient: address of the block's gradient.
        residual, left: empty for zeros, and the errors are dropped.
        at: index of the block's first element in `residual` and `left`.
        code_at: index of the block's first byte in `data`.
        past: True to write the quantization errors past the cache.
    """
    kept, ahead = residual.size > 0, np.uint64(residual.ctypes.data + AHEAD)
    for i in range(first, end, LANES):
        total = v.load_floats(gradient, np.uint64(4 * i))
        if kept:
            v.prefetch(ahead, np.uint64(4 * (at + i)))
            total = v.add(total, v.load(residual, at + i))
        code, rest = _code(kind, tables, total)
        c.store_codes(data, code_at + (i * bits >> 3), code, bits)
        if past:
            v.stream(left, at + i, rest)
        elif kept:
            v.store(left, at + i, rest)


@njit
def _quantize_blocks(
    bits, cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream
):
    """Quantize all blocks, piece by piece, and measure the gradient of each piece."""
    bits = literally(bits)
    # For the last elements of a block, fewer than a vector: gradient, residual and error; and their codes.
    padded, packed = np.zeros(3 * LANES, np.float32), np.zeros(LANES * bits // 8, np.uint8)
    padded_at, kept = np.uint64(padded.ctypes.data), residual.size > 0
    first = fetch_add(cursor, CHUNK_PIECES)
    while first < layout[PIECES, -1]:
        pieces_end = min(first + CHUNK_PIECES, layout[PIECES, -1])
        for block in range(block_of(layout, first), block_of(layout, pieces_end - 1) + 1):
            start, stop = elements_of(layout, block, first, pieces_end)
            given, at, byte = gradients[block], layout[ELEMENTS, block], 4 * layout[WORDS, block]
            tables = _tables(bits, levels, share, block)
            doubling = _kind(bits, levels, share, block) == DOUBLING
            past = stream and at % LANES == 0
            for begin in range(start, stop, SUM_BLOCK):
                end = min(begin + SUM_BLOCK, stop)
                whole = begin + (end - begin) // LANES * LANES
                lanes, count = v.no_doubles(), v.all_words(0)
                # Measure a part, then quantize it: one loop for both would need more registers than most
                # processors have.
                for part in range(begin, whole, PART):
                    last = min(part + PART, whole)
                    for i in range(part, last, LANES):
                        v.prefetch(given, np.uint64(4 * i + AHEAD))
                        here = v.load_floats(given, np.uint64(4 * i))
                        lanes = v.add_widened(lanes, v.magnitude(here))
                        count = v.add_mask(count, v.nonzero(here))
                    if doubling:
                        _quantize_part(
                            DOUBLING, bits, tables, given, residual, left, data, byte, at, part, last, past
                        )
                    else:
                        _quantize_part(
                            bits, bits, tables, given, residual, left, data, byte, at, part, last, past
                        )
                if whole < end:
                    padded[:] = np.float32(0.0)
                    for k in range(end - whole):
                        padded[k] = read_float32(given, whole + k)
                    if kept:
                        copy(residual, at + whole, at + end, padded, LANES)
                    here = v.load(padded, 0)
                    lanes = v.add_widened(lanes, v.magnitude(here))
                    count = v.add_mask(count, v.nonzero(here))
                    rests = padded[LANES:]
                    _quantize_part(bits, bits, tables, padded_at, rests, rests, packed, 0, 0, 0, LANES, False)
                    if kept:
                        copy(rests, 0, end - whole, left, at + whole)
                    # The zeros behind the elements have code 0, which is the padding.
                    copy(packed, 0, ((end - whole) * bits + 31) // 32 * 4, data, byte + whole * bits // 8)
                piece = layout[PIECES, block] + begin // SUM_BLOCK
                sums[piece], counts[piece] = v.sum_doubles(lanes), v.sum_words(count)
        first = fetch_add(cursor, CHUNK_PIECES)
    if stream:
        v.fence()


@kernel
def quantize_blocks_4bit(
    cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream
):
    """Quantize several blocks to codes of 4 bits, as `cpu.quantize_blocks` says.

    The magnitudes are written piece by piece; `add_pieces` sums them for each block.

    Args:
        gradients: address of each block's gradient, uint64 (blocks,).
        residual, left: residuals of all blocks, and the errors that replace them; empty for zeros, and the
            errors are dropped.
        sums, counts: receive the sum of |gradient| (float64) and the number of non-zero elements (int64) of
            each piece.
        stream: True to write the errors past the cache; `left` must then begin at a multiple of 64 bytes.
    """
    _quantize_blocks(4, cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream)


@kernel
def quantize_blocks_2bit(
    cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream
):
    """Quantize several blocks to codes of 2 bits; the arguments are those of `quantize_blocks_4bit`."""
    _quantize_blocks(2, cursor, gradients, residual, left, levels, share, layout, data, sums, counts, stream)


@kernel
def add_pieces(layout, sums, counts, totals, nonzero):
    """Sum the magnitudes of each block's pieces, in order.

    Args:
        sums, counts: sum of |gradient| and number of non-zero elements of each piece.
        totals, nonzero: receive the sum and the number of each block, float64 and int64 (blocks,).
    """
    for block in range(totals.size):
        total, count = 0.0, 0
        for piece in range(layout[PIECES, block], layout[PIECES, block + 1]):
            total += sums[piece]
            count += counts[piece]
        totals[block], nonzero[block] = total, count


@njit
def _byte_of(bits, layout, piece):
    """Return the index of the byte in a payload at which the codes of a piece begin."""
    block = block_of(layout, piece)
    return 4 * layout[WORDS, block] + (piece - layout[PIECES, block]) * (SUM_BLOCK * bits // 8)


@njit
def _sum(bits, cursor, addresses, tables, layout, out, keep, stream):
    """Add the values of all payloads' codes to `out`, for the code width `bits`."""
    bits = literally(bits)
    group = 16 * 32 // bits  # elements in sixteen words, which are 64 bytes
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
                sums = c.load_sums(out, at + i, bits) if keep else c.no_sums(bits)
                # A processor prefetches only a few streams on its own. While this page is summed, the next
                # page of each payload is prefetched, one payload after the other: as many cache lines per
                # group as there are payloads.
                byte = code + i * bits // 8
                line = byte % AHEAD // 64 * payloads
                page = byte - byte % AHEAD + AHEAD
                ahead = np.uint64(page if page < end else beyond)
                for w in range(payloads):
                    v.prefetch(addresses[line // (AHEAD // 64)] + ahead, np.uint64(line % (AHEAD // 64) * 64))
                    line += 1
                    words = v.load_words(addresses[w], np.uint64(byte))
                    sums = c.add_codes(sums, v.load(tables, 16 * (w * blocks + block)), words)
                if stream:
                    c.stream_sums(out, at + i, sums)
                else:
                    c.store_sums(out, at + i, sums)
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
    """Add payloads of 4-bit codes to `out`, one payload after the other.

    Args:
        addresses: address of each payload's codes, uint64 (payloads,).
        tables: weighted value of each code, by payload, then by block, float32 (16 * payloads * blocks,).
        stream: True to write past the cache; `out` and each block in it must then begin at a multiple of 64
            bytes.
    """
    _sum(4, cursor, addresses, tables, layout, out, keep, stream)


@kernel
def sum_2bit(cursor, addresses, tables, layout, out, keep, stream):
    """Add payloads of 2-bit codes to `out`; the arguments are those of `sum_4bit`.

    A table holds its four entries four times, because its index has four bits, two of them the next code's.
    """
    _sum(2, cursor, addresses, tables, layout, out, keep, stream)


@kernel
def sum_8bit(cursor, addresses, tables, layout, out, keep):
    """Add payloads of 8-bit codes to `out`; the arguments are those of `sum_4bit`, with 256 entries a table.

    It works element by element, because such a table does not fit a vector lookup.
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
