# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels that read linear and binary codes: sums of many payloads, and the scan for what is never sent.

To add, payload after payload is read into vectors, for a block of sums that stays in the first-level cache.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from . import vectors as v
from .blocks import CHUNK_PIECES, ELEMENTS, PIECES, WORDS
from .compiling import block_of, elements_of, fetch_add, kernel
from .dense import read_float32
from .lazy import CHUNK, LANES
from .linear_loops import BLOCK, load_uint64

# Sixteen signed bytes, as float32.
load_integers = v.load_at(
    v.FLOATS,
    ir.VectorType(v.I8, LANES),
    lambda builder, loaded: builder.sitofp(builder.sext(loaded, v.WORDS.llvm), v.FLOATS.llvm),
)


@intrinsic
def load_codes(typingctx, address, offset, bits):
    """Sixteen codes of 2 to 7 bits from `offset` bytes after an address, as float32.

    They are the integers in two's complement. As many bytes are read as the codes have, and up to 6 more.
    """

    def codegen(context, builder, signature, args):
        address, offset, bits = args
        lanes = ir.VectorType(v.I64, LANES)
        # Eight codes fit in a word: every lane gets the word that holds its code, and moves it down.
        halves = ir.Constant(lanes, ir.Undefined)
        for half in (0, 1):
            place = builder.add(builder.add(address, offset), builder.mul(bits, v.I64(half)))
            word = builder.load(builder.inttoptr(place, v.I64.as_pointer()), align=1)
            halves = builder.insert_element(halves, word, v.I32(half))
        words = builder.shuffle_vector(halves, halves, ir.Constant(v.WORDS.llvm, [0] * 8 + [1] * 8))
        every = v.broadcast(builder, bits)
        down = builder.mul(every, ir.Constant(lanes, [*range(8)] * 2))
        codes = builder.trunc(builder.lshr(words, down), v.WORDS.llvm)
        # Up and down again: what stood above is gone, the sign is everywhere above.
        up = builder.sub(v.WORDS.constant(32), builder.trunc(every, v.WORDS.llvm))
        codes = builder.ashr(builder.shl(codes, up), up)
        return builder.sitofp(codes, v.FLOATS.llvm)

    return v.FLOATS(types.uint64, types.uint64, types.uint64), codegen


@intrinsic
def choose(typingctx, word, shift, a, b):
    """In lane j, a where bit shift + j of a 64-bit word is set, else b."""

    def codegen(context, builder, signature, args):
        bits = builder.trunc(builder.lshr(args[0], args[1]), ir.IntType(LANES))
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
        return builder.select(mask, args[2], args[3])

    return a(types.uint64, types.uint64, a, b), codegen


@njit
def _code(bits, address, i):
    """Code i as float32."""
    place = i * bits
    x = np.int64(v.load_byte(address, np.uint64(place // 8))) >> (place % 8)
    if place % 8 + bits > 8:
        x |= np.int64(v.load_byte(address, np.uint64(place // 8 + 1))) << (8 - place % 8)
    return np.float32((x << (64 - bits)) >> (64 - bits))


@njit
def _add_codes(bits, bucket, address, size, scales, weight, out, first, end):
    """Add one payload to the block of `out` from `first`, a multiple of 32, to `end`."""
    width, index, start = np.uint64(bits), first // bucket, first
    # Where sixteen codes can be read at once. `load_codes` reads up to 6 bytes too many.
    whole = min(end, (size if bits == 8 else size - 6) * 8 // bits) // LANES * LANES
    while start < end:
        stop = min((index + 1) * bucket, end)
        worth = weight * read_float32(scales, index)
        worths = v.all_floats(worth)
        # Two roundings: LLVM may not fuse them unless told to.
        if bits == 8:
            for i in range(start, min(stop, whole), LANES):
                product = v.multiply(worths, load_integers(address, np.uint64(i)))
                v.store(out, i, v.add(v.load(out, i), product))
        else:
            for i in range(start, min(stop, whole), LANES):
                product = v.multiply(worths, load_codes(address, np.uint64(i * bits // 8), width))
                v.store(out, i, v.add(v.load(out, i), product))
        for i in range(max(start, whole), stop):
            out[i] += worth * _code(bits, address, i)
        start, index = stop, index + 1


@kernel
def add_linear(cursor, bits, bucket, addresses, size, scales, weights, out, keep):
    """`linear_reference.add_linear` on top of `out` if `keep`, otherwise of zero.

    addresses, scales: uint64 (payloads,), where codes and scales begin. size: of a payload's codes, in bytes.
    """
    start = fetch_add(cursor, CHUNK)
    while start < out.size:
        for first in range(start, min(start + CHUNK, out.size), BLOCK):
            end = min(first + BLOCK, out.size)
            if not keep:
                out[first:end] = np.float32(0.0)
            for w in range(addresses.size):
                # The same payload's next block; the processor itself follows only so many streams.
                for ahead in range(0, BLOCK * bits // 8, 64):
                    v.prefetch(addresses[w], np.uint64(end * bits // 8 + ahead))
                _add_codes(bits, bucket, addresses[w], size, scales[w], weights[w], out, first, end)
        start = fetch_add(cursor, CHUNK)


@kernel
def add_binary(cursor, addresses, tables, layout, out, keep):
    """`reference.add_quantized` of codes of one bit.

    addresses: uint64 (payloads,), where codes begin. tables: flat, by payload, then by block.
    layout: of the blocks (`blocks.layout_of`).
    """
    blocks = layout.shape[1] - 1
    first = fetch_add(cursor, CHUNK_PIECES)
    while first < layout[PIECES, -1]:
        pieces_end = min(first + CHUNK_PIECES, layout[PIECES, -1])
        for block in range(block_of(layout, first), block_of(layout, pieces_end - 1) + 1):
            start, stop = elements_of(layout, block, first, pieces_end)
            at, code = layout[ELEMENTS, block], 4 * layout[WORDS, block]
            whole = start + (stop - start) // 64 * 64
            for i in range(start, whole, 64):
                o = at + i
                if keep:
                    a, b, c, d = v.load(out, o), v.load(out, o + 16), v.load(out, o + 32), v.load(out, o + 48)
                else:
                    a = b = c = d = v.all_floats(np.float32(0.0))
                for w in range(addresses.size):
                    word = load_uint64(addresses[w], np.uint64(code + i // 8))
                    worth = 2 * (w * blocks + block)
                    low, high = v.all_floats(tables[worth]), v.all_floats(tables[worth + 1])
                    a = v.add(a, choose(word, np.uint64(0), high, low))
                    b = v.add(b, choose(word, np.uint64(16), high, low))
                    c = v.add(c, choose(word, np.uint64(32), high, low))
                    d = v.add(d, choose(word, np.uint64(48), high, low))
                v.store(out, o, a)
                v.store(out, o + 16, b)
                v.store(out, o + 32, c)
                v.store(out, o + 48, d)
            for i in range(whole, stop):
                total = out[at + i] if keep else np.float32(0.0)
                for w in range(addresses.size):
                    byte = v.load_byte(addresses[w], np.uint64(code + i // 8))
                    total += tables[2 * (w * blocks + block) + ((byte >> (i % 8)) & 1)]
                out[at + i] = total
        first = fetch_add(cursor, CHUNK_PIECES)


@njit
def _read_codes(bits, address, size, group):
    """A word with the eight codes of group `group` in its low bits. size: of all codes, in bytes."""
    offset = group * bits
    if offset + 8 <= size:
        return load_uint64(address, np.uint64(offset))
    x = np.uint64(0)
    for k in range(size - offset):
        x |= np.uint64(v.load_byte(address, np.uint64(offset + k))) << np.uint64(8 * k)
    return x


@kernel
def find_code(cursor, bits, address, elements, size, found):
    """Set found[0] if any element's code is the one that is never sent: the top bit alone.

    Eight codes of a word at once: adding ones to all but the top bit carries into it unless they were 0.
    """
    tops = ones = np.uint64(0)
    for k in range(8):
        tops |= np.uint64(1) << np.uint64(bits * k + bits - 1)
        ones |= np.uint64(2 ** (bits - 1) - 1) << np.uint64(bits * k)
    groups = elements // 8
    start = fetch_add(cursor, CHUNK // 8)
    while start < groups:
        stop = min(start + CHUNK // 8, groups)
        hits = np.uint64(0)
        for k in range(start, stop):
            x = _read_codes(bits, address, size, k)
            hits |= x & ~((x & ones) + ones)
        if hits & tops != 0:
            found[0] = 1
        start = fetch_add(cursor, CHUNK // 8)
    if elements % 8 and start < groups + CHUNK // 8:  # only the thread that came first to the end
        x = _read_codes(bits, address, size, groups)
        valid = (np.uint64(1) << np.uint64(elements % 8 * bits)) - np.uint64(1)
        if x & ~((x & ones) + ones) & tops & valid != 0:
            found[0] = 1
