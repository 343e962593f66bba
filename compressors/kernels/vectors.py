# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Vector operations for numba kernels: values of 16 lanes, each lane a float32 or a 32-bit word.

LLVM vectorizes plain loops over packed codes badly: a table lookup becomes a gather or scalar loads, and
packing is not vectorized at all. So the few operations needed are defined here as numba intrinsics, and the
kernels are ordinary numba loops over them. LLVM splits 16 lanes over the registers that the processor has;
only `lookup` has a version for each kind of processor.
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, codegen, config
from numba.extending import intrinsic, models, register_model

from .lazy import LANES
from .reference import FLOAT32_MAX

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


class _Vector(types.Type):
    """The numba type of a value of 16 lanes; such values exist inside kernels only.

    Attributes:
        llvm: the LLVM vector type.
    """

    def __init__(self, name, lane):
        super().__init__(name)
        self.llvm = ir.VectorType(lane, LANES)

    def constant(self, value):
        """Return an LLVM constant with `value` in every lane."""
        return ir.Constant(self.llvm, [value] * LANES)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm)


FLOATS = _Vector("float32x16", ir.FloatType())
DOUBLES = _Vector("float64x16", ir.DoubleType())
WORDS = _Vector("uint32x16", I32)
MASK = _Vector("bool16", ir.IntType(1))


# ---- arithmetic: each lane on its own, rounded to float32 after every operation ----


def unary(emit, result=None):
    """Return a numba intrinsic with one operand.

    Args:
        emit: function that takes the LLVM builder and the operand, and returns the result.
        result: numba type of the result; None for the operand's type.
    """

    @intrinsic
    def operation(typingctx, a):
        return (result or a)(a), lambda context, builder, signature, args: emit(builder, *args)

    return operation


def binary(emit, result=None):
    """Return a numba intrinsic with two operands.

    Args:
        emit: function that takes the LLVM builder and both operands, and returns the result.
        result: numba type of the result; None for the first operand's type.
    """

    @intrinsic
    def operation(typingctx, a, b):
        return (result or a)(a, b), lambda context, builder, signature, args: emit(builder, *args)

    return operation


add = binary(ir.IRBuilder.fadd)
multiply = binary(ir.IRBuilder.fmul)
subtract = binary(ir.IRBuilder.fsub)
above = binary(lambda builder, a, b: builder.fcmp_ordered(">", a, b), MASK)
at_least = binary(lambda builder, a, b: builder.fcmp_ordered(">=", a, b), MASK)
bitwise_or = binary(ir.IRBuilder.or_)
twice = unary(lambda builder, words: builder.shl(words, WORDS.constant(1)))
magnitude = unary(lambda builder, a: _call(builder, "llvm.fabs.v16f32", a.type, a))
# sums + a in float64; widening `a` is exact.
add_widened = binary(lambda builder, sums, a: builder.fadd(sums, builder.fpext(a, sums.type)))
# counts + 1 in every lane where the mask is set: minus -1, because a processor holds a set mask as -1.
add_mask = binary(lambda builder, counts, mask: builder.sub(counts, builder.sext(mask, counts.type)))
# Set where a number is not zero; a NaN is not zero.
nonzero = unary(lambda builder, a: builder.fcmp_unordered("!=", a, FLOATS.constant(0.0)), MASK)
# The sign bit alone; and the exclusive or of two numbers' bits, which with a number's sign gives its
# magnitude.
sign = unary(lambda builder, a: _on_bits(builder, builder.and_, a, FLOATS.constant(-0.0)))
xor = binary(lambda builder, a, b: _on_bits(builder, builder.xor, a, b))
# Set where the first mask is set and the other is not.
and_not = binary(lambda builder, mask, other: builder.and_(mask, builder.not_(other)))


def _call(builder, name, result, *args):
    """Call an LLVM intrinsic by its name."""
    signature = ir.FunctionType(result, [each.type for each in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def _on_bits(builder, emit, a, b):
    """Apply a bitwise operation to the bits of two floats."""
    words = (builder.bitcast(each, WORDS.llvm) for each in (a, b))
    return builder.bitcast(emit(*words), a.type)


@intrinsic
def no_doubles(typingctx):
    """Return sixteen float64 zeros, the start of a sum."""
    return DOUBLES(), lambda context, builder, signature, args: DOUBLES.constant(0.0)


def _sum_lanes(result, zero, add):
    """Return an intrinsic that adds up the lanes in order, from `zero` on."""

    def emit(builder, a):
        total = zero
        for lane in range(LANES):
            total = add(builder, total, builder.extract_element(a, I32(lane)))
        return total

    return unary(emit, result)


# The sum of the lanes, added in order from zero on.
sum_doubles = _sum_lanes(types.float64, ir.Constant(ir.DoubleType(), 0.0), ir.IRBuilder.fadd)
sum_words = _sum_lanes(types.uint32, I32(0), ir.IRBuilder.add)


@intrinsic
def where(typingctx, mask, a, b):
    """Return a in the lanes where the mask is set, and b in the others."""
    return a(mask, a, b), lambda context, builder, signature, args: builder.select(*args)


def broadcast(builder, value):
    """Return a vector with `value` in every lane."""
    lanes = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(lanes, value, I32(0))
    return builder.shuffle_vector(first, first, WORDS.constant(0))


def _broadcast(vector, scalar):
    """Return an intrinsic that converts a scalar to a vector with the scalar in every lane."""

    @intrinsic
    def operation(typingctx, value):
        return vector(scalar), lambda context, builder, signature, args: broadcast(builder, *args)

    return operation


all_floats = _broadcast(FLOATS, types.float32)
all_words = _broadcast(WORDS, types.uint32)


# ---- memory ----


def _pointer(context, builder, array_type, array, index, target=FLOATS.llvm):
    """Return the address of array[index], as a pointer to `target`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


@intrinsic
def load(typingctx, array, index):
    """Load sixteen float32 from array[index] on."""

    def codegen(context, builder, signature, args):
        return builder.load(_pointer(context, builder, signature.args[0], *args), align=4)

    return FLOATS(array, index), codegen


def _store(streaming):
    """Return an intrinsic that stores a vector, past the cache if `streaming`."""

    @intrinsic
    def operation(typingctx, array, index, vector):
        """Store sixteen float32 to array[index] and the elements after it."""

        def codegen(context, builder, signature, args):
            target = _pointer(context, builder, signature.args[0], *args[:2])
            _put(builder, args[2], target, streaming)

        return types.void(array, index, vector), codegen

    return operation


def _put(builder, vector, target, streaming):
    instruction = builder.store(vector, target, align=64 if streaming else 4)
    if streaming:
        instruction.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))


store = _store(streaming=False)
# Stores past the cache: the line is not read before it is overwritten. The address must be a multiple of 64.
stream = _store(streaming=True)


def load_at(result, target, convert=None):
    """Return an intrinsic that loads a value `offset` bytes after an address, at any alignment.

    Args:
        result: numba type of the loaded value.
        target: LLVM type of the value in memory.
        convert: function that takes the LLVM builder and the value in memory, and returns the result; None
            for the value itself.
    """

    @intrinsic
    def operation(typingctx, address, offset):
        def codegen(context, builder, signature, args):
            loaded = builder.load(builder.inttoptr(builder.add(*args), target.as_pointer()), align=1)
            return convert(builder, loaded) if convert else loaded

        return result(types.uint64, types.uint64), codegen

    return operation


def _from_bfloats(builder, halves):
    """Convert bfloat16 to float32: a bfloat16 is the upper half of a float32."""
    words = builder.shl(builder.zext(halves, WORDS.llvm), WORDS.constant(16))
    return builder.bitcast(words, FLOATS.llvm)


load_words = load_at(WORDS, WORDS.llvm)
load_floats = load_at(FLOATS, FLOATS.llvm)
load_bfloats = load_at(FLOATS, ir.VectorType(ir.IntType(16), LANES), _from_bfloats)
load_byte = load_at(types.uint8, I8)


@intrinsic
def prefetch(typingctx, address, offset):
    """Fetch the cache line at `offset` bytes after an address in advance; the processor ignores an invalid
    address.
    """

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(builder.add(*args), I8.as_pointer())
        read, keep_in_all_caches, data = I32(0), I32(3), I32(1)
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, keep_in_all_caches, data)

    return types.void(types.uint64, types.uint64), codegen


@intrinsic
def fence(typingctx):
    """Order stores that bypass the cache before all later loads and stores."""
    return types.void(), lambda context, builder, signature, args: builder.fence("seq_cst") and None


# ---- codes ----


def _target_has(feature):
    """Return True if numba compiles for processors with this feature.

    That may differ from this processor's features: numba can be configured, and an instruction that the
    target lacks aborts the process.
    """
    told = config.CPU_FEATURES
    return f"+{feature}" in (codegen.get_host_cpu_features() if told is None else told).split(",")


def _lookup(builder, table, index):
    """Return `table[index & 15]` in every lane of `index`."""
    if _target_has("avx512f"):
        return _call(builder, "llvm.x86.avx512.permvar.sf.512", table.type, table, index)
    if _target_has("avx2"):
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
    first, second = (ir.Constant(eight, list(range(start, start + 8))) for start in (0, 8))
    low, high = (builder.shuffle_vector(table, table, half) for half in (first, second))
    found = []
    for half in (first, second):
        part = builder.shuffle_vector(index, index, half)
        bit = builder.and_(part, ir.Constant(eight, [8] * 8))
        in_high = builder.icmp_unsigned("!=", bit, ir.Constant(eight, [0] * 8))
        from_high, from_low = (
            _call(builder, "llvm.x86.avx2.permps", table.type, table, part) for table in (high, low)
        )
        found.append(builder.select(in_high, from_high, from_low))
    return builder.shuffle_vector(*found, ir.Constant(WORDS.llvm, list(range(LANES))))


lookup = binary(_lookup)


def _lookup_four(builder, table, index):
    """Return `table[index & 3]` in every lane of `index`; the table holds its four entries four times."""
    if _target_has("avx512f") or not _target_has("avx2"):
        return _lookup(builder, table, index)
    halves = [
        _call(builder, "llvm.x86.avx.vpermilvar.ps.256", entries.type, entries, part)
        for entries, part in zip(_halves(builder, table), _halves(builder, index), strict=True)
    ]
    return builder.shuffle_vector(*halves, ir.Constant(WORDS.llvm, list(range(LANES))))


def _lookup_eight(builder, table, index):
    """Return `table[index]` in every lane, for an index below 8; the table holds its eight entries twice."""
    if _target_has("avx512f") or not _target_has("avx2"):
        return _lookup(builder, table, index)
    low, _ = _halves(builder, table)
    halves = [_call(builder, "llvm.x86.avx2.permps", low.type, low, part) for part in _halves(builder, index)]
    return builder.shuffle_vector(*halves, ir.Constant(WORDS.llvm, list(range(LANES))))


def _halves(builder, vector):
    """Return lanes 0 to 7 and lanes 8 to 15."""
    places = (ir.Constant(ir.VectorType(I32, 8), list(range(start, start + 8))) for start in (0, 8))
    return [builder.shuffle_vector(vector, vector, place) for place in places]


lookup_four = binary(_lookup_four)
lookup_eight = binary(_lookup_eight)


def _pack_avx2(builder, codes, width):
    """Pack each two of sixteen codes into a byte, with AVX2.

    LLVM's own truncation takes longer the wider the lanes are.
    """
    short, half = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(16), 8)
    # The order is now 0-3, 8-11, 4-7, 12-15, because AVX2 packs within halves of 128 bits.
    narrow = _call(builder, "llvm.x86.avx2.packusdw", short, *_halves(builder, codes))
    factors = ir.Constant(short, [1, 1 << width] * 8)
    pairs = _call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), narrow, factors)
    low, high = (
        builder.shuffle_vector(pairs, pairs, ir.Constant(ir.VectorType(I32, 4), list(range(at, at + 4))))
        for at in (0, 4)
    )
    joined = _call(builder, "llvm.x86.sse41.packusdw", half, low, high)
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
        if _target_has("avx2") and not _target_has("avx512f"):
            packed = _pack_avx2(builder, args[2], width)
        else:
            packed = join(builder, builder.bitcast(args[2], ir.VectorType(I64, 8)), 32 - width)
        if width == 2:
            packed = join(builder, builder.bitcast(packed, ir.VectorType(ir.IntType(16), 4)), 4)
        pointer = _pointer(context, builder, signature.args[0], *args[:2], packed.type)
        builder.store(packed, pointer, align=1)

    return types.void(array, index, codes, bits), codegen


# ---- selection ----


@intrinsic
def words_from(typingctx, first):
    """Return sixteen words: first + 0, first + 1, …, first + 15."""

    def codegen(context, builder, signature, args):
        words = broadcast(builder, builder.trunc(args[0], I32))
        return builder.add(words, ir.Constant(WORDS.llvm, list(range(LANES))))

    return WORDS(types.int64), codegen


@intrinsic
def store_chosen(typingctx, indices, values, at, words, floats, mask):
    """Store those lanes of `words` and `floats` whose mask is set, without gaps, and return their number.

    Args:
        indices, values: receive the words (uint32) and the floats (float32), with room for 16 lanes.
        at: index of the first stored lane in both arrays.
    """

    def codegen(context, builder, signature, args):
        at, words, floats, mask = args[2:]
        for kind, array, lanes in zip(signature.args[:2], args[:2], (words, floats), strict=True):
            _store_compressed(builder, lanes, mask, _pointer(context, builder, kind, array, at, lanes.type))
        bits = builder.bitcast(mask, ir.IntType(LANES))
        return builder.zext(builder.ctpop(bits), I64)

    return types.int64(indices, values, types.int64, words, floats, mask), codegen


def _store_compressed(builder, values, mask, pointer):
    """Store the lanes whose mask is set without gaps."""
    lanes = "v16i32" if values.type == WORDS.llvm else "v16f32"
    if _target_has("avx512f"):
        # Stores 16 lanes: the instruction that stores only the set ones takes a hundred cycles on some
        # processors.
        name = f"llvm.x86.avx512.mask.compress.{lanes}"
        builder.store(_call(builder, name, values.type, values, values, mask), pointer, align=4)
        return
    place = builder.bitcast(pointer, values.type.element.as_pointer())
    _call(builder, f"llvm.masked.compressstore.{lanes}.p0", ir.VoidType(), values, place, mask)


def _any_lane(builder, mask):
    """Return True if the mask is set in any lane."""
    bits = builder.bitcast(mask, ir.IntType(LANES))
    return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))


any_lane = unary(_any_lane, types.boolean)


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
        pointer = _pointer(context, builder, signature.args[0], *args[:2])
        parts = [builder.load(builder.gep(pointer, [I64(j)]), align=4) for j in range(sums.count)]
        return context.make_tuple(builder, sums, _separate(builder, parts))

    return sums(array, index, bits), codegen


def _store_sums(streaming):
    """Return an intrinsic that stores sums, past the cache if `streaming`."""

    @intrinsic
    def operation(typingctx, array, index, sums):
        """Store sums from array[index] on, in the order of the elements."""

        def codegen(context, builder, signature, args):
            pointer = _pointer(context, builder, signature.args[0], *args[:2])
            for j, part in enumerate(_interleave(builder, cgutils.unpack_tuple(builder, args[2]))):
                _put(builder, part, builder.gep(pointer, [I64(j)]), streaming)

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


@njit
def saturated(size):
    """Return sixteen magnitudes, limited to the largest finite float32; a NaN becomes that limit."""
    largest = all_floats(FLOAT32_MAX)
    return where(above(largest, size), size, largest)


@njit
def saturated_sum(a, b):
    """Return sixteen sums a + b, clipped to the finite float32 range."""
    total = add(a, b)
    largest, smallest = all_floats(FLOAT32_MAX), all_floats(-FLOAT32_MAX)
    total = where(above(largest, total), total, largest)
    return where(above(total, smallest), total, smallest)
