# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Vector operations over packed codes: lookups in small tables, packing, and sums of many payloads.

Sums are one vector for each code of a 32-bit word: vector j belongs to code j of sixteen words.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .shared import LANES
from .vectors import FLOATS, I8, I32, I64, WORDS, binary, call, pointer, put, target_has

# ---- codes ----


def _lookup(builder, table, index):
    """Return `table[index & 15]` in every lane of `index`."""
    if target_has("avx512f"):
        return call(builder, "llvm.x86.avx512.permvar.sf.512", table.type, table, index)
    if target_has("avx2"):
        return _lookup_avx2(builder, table, index)
    memory = cgutils.alloca_once(builder, FLOATS.llvm)
    builder.store(table, memory)
    entries = builder.bitcast(memory, ir.FloatType().as_pointer())
    index = builder.and_(index, WORDS.constant(15))
    result = ir.Constant(FLOATS.llvm, ir.Undefined)
    for lane in range(LANES):
        entry = builder.load(builder.gep(entries, [builder.extract_element(index, I32(lane))]))
        result = builder.insert_element(result, entry, I32(lane))
    return result


def _lookup_avx2(builder, table, index):
    """Return `table[index & 15]` in every lane, with AVX2, whose permutations know eight entries.

    Both halves of the table are looked up, and bit 3 of the index selects one.
    """
    eight = ir.VectorType(I32, 8)
    low, high = _halves(builder, table)
    found = []
    for part in _halves(builder, index):
        bit = builder.and_(part, ir.Constant(eight, [8] * 8))
        in_high = builder.icmp_unsigned("!=", bit, ir.Constant(eight, [0] * 8))
        from_high, from_low = (
            call(builder, "llvm.x86.avx2.permps", half.type, half, part) for half in (high, low)
        )
        found.append(builder.select(in_high, from_high, from_low))
    return _whole(builder, found)


def _lookup_four(builder, table, index):
    """Return `table[index & 3]` in every lane of `index`; the table holds its four entries four times."""
    if target_has("avx512f") or not target_has("avx2"):
        return _lookup(builder, table, index)
    halves = [
        call(builder, "llvm.x86.avx.vpermilvar.ps.256", entries.type, entries, part)
        for entries, part in zip(_halves(builder, table), _halves(builder, index), strict=True)
    ]
    return _whole(builder, halves)


def _lookup_eight(builder, table, index):
    """Return `table[index]` in every lane, for an index below 8; the table holds its eight entries twice."""
    if target_has("avx512f") or not target_has("avx2"):
        return _lookup(builder, table, index)
    low, _ = _halves(builder, table)
    halves = [call(builder, "llvm.x86.avx2.permps", low.type, low, part) for part in _halves(builder, index)]
    return _whole(builder, halves)


def _halves(builder, vector):
    """Return lanes 0 to 7 and lanes 8 to 15."""
    places = (ir.Constant(ir.VectorType(I32, 8), list(range(start, start + 8))) for start in (0, 8))
    return [builder.shuffle_vector(vector, vector, place) for place in places]


def _whole(builder, halves):
    """Return the vector of these halves."""
    return builder.shuffle_vector(*halves, ir.Constant(WORDS.llvm, list(range(LANES))))


lookup_four = binary(_lookup_four)
lookup_eight = binary(_lookup_eight)


def _pack_avx2(builder, codes, width):
    """Pack each two of sixteen codes into a byte, with AVX2.

    LLVM's own truncation takes longer the wider the lanes are.
    """
    short, half = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(16), 8)
    # The order is now 0-3, 8-11, 4-7, 12-15, because AVX2 packs within halves of 128 bits.
    narrow = call(builder, "llvm.x86.avx2.packusdw", short, *_halves(builder, codes))
    factors = ir.Constant(short, [1, 1 << width] * 8)
    pairs = call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), narrow, factors)
    low, high = (
        builder.shuffle_vector(pairs, pairs, ir.Constant(ir.VectorType(I32, 4), list(range(at, at + 4))))
        for at in (0, 4)
    )
    joined = call(builder, "llvm.x86.sse41.packusdw", half, low, high)
    order = ir.Constant(ir.VectorType(I32, 8), [2 * place for place in (0, 1, 4, 5, 2, 3, 6, 7)])
    parts = builder.bitcast(joined, ir.VectorType(I8, LANES))
    return builder.shuffle_vector(parts, parts, order)


@intrinsic(prefer_literal=True)
def store_codes(typingctx, array, index, codes, bits):
    """Pack sixteen codes of 2 or 4 bits, and store them from array[index] on, the first code in the lowest
    bits.

    Args:
        array: receives the packed codes, uint8.
        codes: the codes, one in each 32-bit lane.
        bits: bits of a code, 2 or 4, a literal.
    """
    width = bits.literal_value

    def join(builder, lanes, shift):
        """Combine each lane's lower half with its upper half shifted down by `shift`, and truncate the lanes
        to bytes.
        """
        moved = builder.lshr(lanes, ir.Constant(lanes.type, [shift] * lanes.type.count))
        return builder.trunc(builder.or_(lanes, moved), ir.VectorType(I8, lanes.type.count))

    def codegen(context, builder, signature, args):
        if target_has("avx2") and not target_has("avx512f"):
            packed = _pack_avx2(builder, args[2], width)
        else:
            packed = join(builder, builder.bitcast(args[2], ir.VectorType(I64, 8)), 32 - width)
        if width == 2:
            packed = join(builder, builder.bitcast(packed, ir.VectorType(ir.IntType(16), 4)), 4)
        place = pointer(context, builder, signature.args[0], *args[:2], packed.type)
        builder.store(packed, place, align=1)

    return types.void(array, index, codes, bits), codegen


# ---- sums: one vector for each code of a word; vector j belongs to code j of sixteen words ----


def _interleave(builder, vectors):
    """Return vectors in which lane k of vector j has become element k * len(vectors) + j.

    Each round merges sequences of vectors pairwise.
    """
    low, high = (
        ir.Constant(WORDS.llvm, [start + lane // 2 + LANES * (lane % 2) for lane in range(LANES)])
        for start in (0, LANES // 2)
    )
    sequences = [[vector] for vector in vectors]
    while len(sequences) > 1:
        half = len(sequences) // 2
        pairs = zip(sequences[:half], sequences[half:], strict=True)
        sequences = [
            [builder.shuffle_vector(a, b, part) for a, b in zip(*pair, strict=True) for part in (low, high)]
            for pair in pairs
        ]
    return sequences[0]


def _separate(builder, vectors):
    """Invert `_interleave`: return vector j with every len(vectors)-th element, from element j on.

    Each round splits every sequence of vectors into its even and its odd elements.
    """
    even, odd = (ir.Constant(WORDS.llvm, list(range(start, 2 * LANES, 2))) for start in (0, 1))
    sequences = [vectors]
    while len(sequences[0]) > 1:
        sequences = [
            [builder.shuffle_vector(s[k], s[k + 1], part) for k in range(0, len(s), 2)]
            for part in (even, odd)
            for s in sequences
        ]
    return [sequence[0] for sequence in sequences]


def _sums_type(bits):
    return types.UniTuple(FLOATS, 32 // bits.literal_value)


@intrinsic(prefer_literal=True)
def no_sums(typingctx, bits):
    """Return sums of zero, one vector for each code of a 32-bit word."""
    sums = _sums_type(bits)

    def codegen(context, builder, signature, args):
        return context.make_tuple(builder, sums, [FLOATS.constant(0.0)] * sums.count)

    return sums(bits), codegen


@intrinsic(prefer_literal=True)
def load_sums(typingctx, array, index, bits):
    """Load sums from array[index] on, where they are in the order of the elements."""
    sums = _sums_type(bits)

    def codegen(context, builder, signature, args):
        place = pointer(context, builder, signature.args[0], *args[:2])
        parts = [builder.load(builder.gep(place, [I64(j)]), align=4) for j in range(sums.count)]
        return context.make_tuple(builder, sums, _separate(builder, parts))

    return sums(array, index, bits), codegen


def _store_sums(streaming):
    """Return an intrinsic that stores sums, past the cache if `streaming`."""

    @intrinsic
    def operation(typingctx, array, index, sums):
        """Store sums from array[index] on, in the order of the elements."""

        def codegen(context, builder, signature, args):
            place = pointer(context, builder, signature.args[0], *args[:2])
            for j, part in enumerate(_interleave(builder, cgutils.unpack_tuple(builder, args[2]))):
                put(builder, part, builder.gep(place, [I64(j)]), streaming)

        return types.void(array, index, sums), codegen

    return operation


store_sums = _store_sums(streaming=False)
# Stores past the cache: the line is not read before it is overwritten. The address must be a multiple of 64.
stream_sums = _store_sums(streaming=True)


@intrinsic
def add_codes(typingctx, sums, table, words):
    """Add the table's value of every code in sixteen words to the sums."""

    def codegen(context, builder, signature, args):
        vectors = cgutils.unpack_tuple(builder, args[0])
        for j, vector in enumerate(vectors):
            codes = builder.lshr(args[2], WORDS.constant(32 // len(vectors) * j))
            vectors[j] = builder.fadd(vector, _lookup(builder, args[1], codes))
        return context.make_tuple(builder, sums, vectors)

    return sums(sums, table, words), codegen


def _power(builder, a, base):
    """Return how often a positive number can be halved before its bits are below those of `base`, from 0 to
    7.
    """
    exponent = builder.ashr(builder.sub(builder.bitcast(a, WORDS.llvm), base), WORDS.constant(23))
    zero, seven = WORDS.constant(0), WORDS.constant(7)
    exponent = builder.select(builder.icmp_signed("<", exponent, seven), exponent, seven)
    return builder.select(builder.icmp_signed(">", exponent, zero), exponent, zero)


power = binary(_power, WORDS)
