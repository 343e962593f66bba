# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Kernels that read linear and binary codes: sums of many payloads, and the search for the code that is never
sent.

A sum is computed block by block, so that it stays in the first-level cache while one payload after the other
is added to it.
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
from .linear_loops import BLOCK, divide, load_uint64
from .shared import CHUNK, FLOAT32_MAX, LANES

# Load sixteen signed bytes, as float32.
load_integers = v.load_at(
    v.FLOATS,
    ir.VectorType(v.I8, LANES),
    lambda builder, loaded: builder.sitofp(builder.sext(loaded, v.WORDS.llvm), v.FLOATS.llvm),
)


@intrinsic
def load_codes(typingctx, address, offset, bits):
    """Load sixteen two's-complement codes of 2 to 7 bits, `offset` bytes after an address, as float32.

    It reads the bytes of the codes, and up to 6 bytes more.
    """

    def codegen(context, builder, signature, args):
        address, offset, bits = args
        lanes = ir.VectorType(v.I64, LANES)
        # Eight codes fit in a word: every lane receives the word that holds its code, and shifts it down.
        halves = ir.Constant(lanes, ir.Undefined)
        for half in (0, 1):
            place = builder.add(builder.add(address, offset), builder.mul(bits, v.I64(half)))
            word = builder.load(builder.inttoptr(place, v.I64.as_pointer()), align=1)
            halves = builder.insert_element(halves, word, v.I32(half))
        words = builder.shuffle_vector(halves, halves, ir.Constant(v.WORDS.llvm, [0] * 8 + [1] * 8))
        every = v.broadcast(builder, bits)
        down = builder.mul(every, ir.Constant(lanes, [*range(8)] * 2))
        codes = builder.trunc(builder.lshr(words, down), v.WORDS.llvm)
        # Shift up and down again: this removes the codes above, and extends the sign.
        up = builder.sub(v.WORDS.constant(32), builder.trunc(every, v.WORDS.llvm))
        codes = builder.ashr(builder.shl(codes, up), up)
        return builder.sitofp(codes, v.FLOATS.llvm)

    return v.FLOATS(types.uint64, types.uint64, types.uint64), codegen


# Load the codes of sixteen elements, one bit each.
load_signs = v.load_at(types.uint64, ir.IntType(LANES), lambda builder, loaded: builder.zext(loaded, v.I64))


@intrinsic
def choose(typingctx, word, shift, a, b):
    """Return in lane j the value `a` if bit shift + j of a 64-bit word is set, otherwise `b`."""

    def codegen(context, builder, signature, args):
        bits = builder.trunc(builder.lshr(args[0], args[1]), ir.IntType(LANES))
        mask = builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
        return builder.select(mask, args[2], args[3])

    return a(types.uint64, types.uint64, a, b), codegen


@njit
def _code(bits, address, i):
    """Return code i as float32."""
    place = i * bits
    x = np.int64(v.load_byte(address, np.uint64(place // 8))) >> (place % 8)
    if bits == 1:
        return np.float32(2 * (x & 1) - 1)
    if place % 8 + bits > 8:
        x |= np.int64(v.load_byte(address, np.uint64(place // 8 + 1))) << (8 - place % 8)
    return np.float32((x << (64 - bits)) >> (64 - bits))


@njit
def _add_codes(bits, bucket, address, size, scales, weight, out, first, end):
    """Add one payload to the elements of `out` from `first`, a multiple of 32, to `end`."""
    width, index, start = np.uint64(bits), first // bucket, first
    # Up to here sixteen codes can be read at once: `load_codes` reads up to 6 bytes beyond them.
    whole = min(end, (size if bits in (1, 8) else size - 6) * 8 // bits) // LANES * LANES
    while start < end:
        stop = min((index + 1) * bucket, end)
        worth = weight * read_float32(scales, index)
        worths = v.all_floats(worth)
        # Multiplication and addition round separately: LLVM fuses them only on request.
        if bits == 8:
            for i in range(start, min(stop, whole), LANES):
                product = v.multiply(worths, load_integers(address, np.uint64(i)))
                v.store(out, i, v.add(v.load(out, i), product))
        elif bits == 1:
            negative = v.all_floats(-worth)
            for i in range(start, min(stop, whole), LANES):
                signs = load_signs(address, np.uint64(i // 8))
                v.store(out, i, v.add(v.load(out, i), choose(signs, np.uint64(0), worths, negative)))
        else:
            for i in range(start, min(stop, whole), LANES):
                product = v.multiply(worths, load_codes(address, np.uint64(i * bits // 8), width))
                v.store(out, i, v.add(v.load(out, i), product))
        for i in range(max(start, whole), stop):
            out[i] += worth * _code(bits, address, i)
        start, index = stop, index + 1


@kernel
def add_linear(cursor, bits, bucket, addresses, size, scales, weights, out, keep):
    """Add the weighted values of linear payloads to `out`, as `linear.add_linear` says.

    Args:
        addresses, scales: address of each payload's codes and of its scales, uint64 (payloads,).
        size: bytes of one payload's codes.
    """
    start = fetch_add(cursor, CHUNK)
    while start < out.size:
        for first in range(start, min(start + CHUNK, out.size), BLOCK):
            end = min(first + BLOCK, out.size)
            if not keep:
                out[first:end] = np.float32(0.0)
            for w in range(addresses.size):
                # Prefetch the same payload's next block: on its own a processor follows only a few streams.
                for ahead in range(0, BLOCK * bits // 8, 64):
                    v.prefetch(addresses[w], np.uint64(end * bits // 8 + ahead))
                _add_codes(bits, bucket, addresses[w], size, scales[w], weights[w], out, first, end)
        start = fetch_add(cursor, CHUNK)


@kernel
def add_each(cursor, bits, bucket, starts, places, addresses, weights, out):
    """Write the weighted sums of linear payloads of several tensors to `out`, end to end.

    Args:
        starts: first element of each tensor, and the end of the last.
        places: first byte of the scales of each tensor, which its codes follow, and the end of the last.
        addresses, weights: of each payload.
    """
    tensor = fetch_add(cursor, 1)
    while tensor < starts.size - 1:
        here = out[starts[tensor] : starts[tensor + 1]]
        here[:] = np.float32(0.0)
        skipped = 4 * -(-here.size // bucket)
        size = places[tensor + 1] - places[tensor] - skipped
        for w in range(weights.size):
            scales = addresses[w] + np.uint64(places[tensor])
            codes = scales + np.uint64(skipped)
            _add_codes(bits, bucket, codes, size, scales, weights[w], here, 0, here.size)
        tensor = fetch_add(cursor, 1)


@kernel
def add_binary(cursor, addresses, tables, layout, out, keep):
    """Add payloads of one-bit codes to `out`, as `cpu.add_quantized` says. The arguments are those of
    `codes.sum_4bit`, with two entries a table.
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
    """Return a word with the eight codes of group `group` in its low bits, without reading beyond `size`
    bytes.
    """
    offset = group * bits
    if offset + 8 <= size:
        return load_uint64(address, np.uint64(offset))
    x = np.uint64(0)
    for k in range(size - offset):
        x |= np.uint64(v.load_byte(address, np.uint64(offset + k))) << np.uint64(8 * k)
    return x


@njit
def _hits(bits, address, size, start, stop):
    """Return a word with the top bit of a code set if one of the codes of these groups is the one that is
    never sent, which has only its top bit set.

    Eight codes in a word are tested at once: adding ones to all bits below the top carries into it unless
    they were 0.
    """
    tops = ones = np.uint64(0)
    for k in range(8):
        tops |= np.uint64(1) << np.uint64(bits * k + bits - 1)
        ones |= np.uint64(2 ** (bits - 1) - 1) << np.uint64(bits * k)
    hits = np.uint64(0)
    for k in range(start, stop):
        x = _read_codes(bits, address, size, k)
        hits |= x & ~((x & ones) + ones)
    return hits & tops


@kernel
def find_code(cursor, bits, address, elements, size, found):
    """Set found[0] if the code of any element is the one that is never sent."""
    groups = elements // 8
    start = fetch_add(cursor, CHUNK // 8)
    while start < groups:
        if _hits(bits, address, size, start, min(start + CHUNK // 8, groups)) != 0:
            found[0] = 1
        start = fetch_add(cursor, CHUNK // 8)
    # The codes after the last whole group: only the thread whose claim was the first beyond the end tests
    # them.
    if elements % 8 and start < groups + CHUNK // 8:
        valid = (np.uint64(1) << np.uint64(elements % 8 * bits)) - np.uint64(1)
        if _hits(bits, address, size, groups, groups + 1) & valid != 0:
            found[0] = 1


@kernel
def find_each(cursor, bits, bucket, starts, places, address, found):
    """Set found[0] if the scales and codes of any of several tensors break a rule of linear codes.

    Padding is tested, too. starts, places: as for `add_each`.
    """
    most, tensor = divide(FLOAT32_MAX, np.float32(2 ** (bits - 1))), fetch_add(cursor, 1)
    while tensor < starts.size - 1:
        elements = starts[tensor + 1] - starts[tensor]
        buckets, scales = -(-elements // bucket), address + np.uint64(places[tensor])
        codes, size = scales + np.uint64(4 * buckets), places[tensor + 1] - places[tensor] - 4 * buckets
        sound = True
        for index in range(buckets):
            scale = read_float32(scales, index)
            sound &= scale >= 0 and scale <= most  # both are false for a NaN
        # A code of padding is 0 if the padding is.
        sound &= bits == 1 or _hits(bits, codes, size, 0, -(-elements // 8)) == 0
        used = elements * bits
        for place in range(used // 8, size):
            byte = v.load_byte(codes, np.uint64(place))
            sound &= byte >> (used % 8 if place == used // 8 else 0) == 0
        if not sound:
            found[0] = 1
        tensor = fetch_add(cursor, 1)
