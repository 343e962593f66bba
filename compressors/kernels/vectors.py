# mypy: ignore-errors
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Vector operations for numba kernels: values of 16 lanes, one per float32 or 32-bit word.

LLVM vectorizes plain loops over packed codes badly: a table lookup becomes a gather, or scalar loads, and
packing defeats it altogether. So the few operations needed are spelled out here as numba intrinsics, and the
kernels are ordinary numba loops over them. LLVM splits 16 lanes into whatever registers the processor has;
only `lookup` is written once per kind of processor.
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
    """The type of a value of 16 lanes; exists inside kernels only."""

    def __init__(self, name, lane):
        super().__init__(name)
        self.llvm = ir.VectorType(lane, LANES)

    def constant(self, value):
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
    """An operation on one value: `emit` takes the builder and the operand. result: its type, if another."""

    @intrinsic
    def operation(typingctx, a):
        return (result or a)(a), lambda context, builder, signature, args: emit(builder, *args)

    return operation


def binary(emit, result=None):
    """As `unary`, on two values; the result is of the first one's type unless `result` says otherwise."""

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
# sums + a in float64, exact as far as a is concerned.
add_widened = binary(lambda builder, sums, a: builder.fadd(sums, builder.fpext(a, sums.type)))
# counts + 1 in every lane where the mask is set: less -1, which is how a processor has the mask at hand.
add_mask = binary(lambda builder, counts, mask: builder.sub(counts, builder.sext(mask, counts.type)))
# Where a number is not zero; a NaN is not.
nonzero = unary(lambda builder, a: builder.fcmp_unordered("!=", a, FLOATS.constant(0.0)), MASK)
# The sign bit alone, and the bits of either one but not of both: with the sign of a number, its magnitude.
sign = unary(lambda builder, a: _on_bits(builder, builder.and_, a, FLOATS.constant(-0.0)))
xor = binary(lambda builder, a, b: _on_bits(builder, builder.xor, a, b))
# Where the one mask is set and the other is not.
and_not = binary(lambda builder, mask, other: builder.and_(mask, builder.not_(other)))


def _call(builder, name, result, *args):
    """Call a function of LLVM's own."""
    signature = ir.FunctionType(result, [each.type for each in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def _on_bits(builder, emit, a, b):
    words = (builder.bitcast(each, WORDS.llvm) for each in (a, b))
    return builder.bitcast(emit(*words), a.type)


@intrinsic
def no_doubles(typingctx):
    """Zeros, to begin a float64 sum with."""
    return DOUBLES(), lambda context, builder, signature, args: DOUBLES.constant(0.0)


def _sum_lanes(result, zero, add):
    def emit(builder, a):
        total = zero
        for lane in range(LANES):
            total = add(builder, total, builder.extract_element(a, I32(lane)))
        return total

    return unary(emit, result)


# The lanes added up in their order, from zero.
sum_doubles = _sum_lanes(types.float64, ir.Constant(ir.DoubleType(), 0.0), ir.IRBuilder.fadd)
sum_words = _sum_lanes(types.uint32, I32(0), ir.IRBuilder.add)


@intrinsic
def where(typingctx, mask, a, b):
    """a where the mask is set, b elsewhere."""
    return a(mask, a, b), lambda context, builder, signature, args: builder.select(*args)


def broadcast(builder, value):
    """`value` in every lane."""
    lanes = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(lanes, value, I32(0))
    return builder.shuffle_vector(first, first, WORDS.constant(0))


def _broadcast(vector, scalar):
    @intrinsic
    def operation(typingctx, value):
        return vector(scalar), lambda context, builder, signature, args: broadcast(builder, *args)

    return operation


all_floats = _broadcast(FLOATS, types.float32)
all_words = _broadcast(WORDS, types.uint32)


# ---- memory ----


def _pointer(context, builder, array_type, array, index, target=FLOATS.llvm):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


@intrinsic
def load(typingctx, array, index):
    """Sixteen float32 from array[index]."""

    def codegen(context, builder, signature, args):
        return builder.load(_pointer(context, builder, signature.args[0], *args), align=4)

    return FLOATS(array, index), codegen


def _store(streaming):
    @intrinsic
    def operation(typingctx, array, index, vector):
        """Sixteen float32 to array[index]."""

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
# Past the cache, as `stream_sums`.
stream = _store(streaming=True)


def load_at(result, target, convert=None):
    """A load from `offset` bytes after an address, however aligned. target: what lies there, and `convert`
    makes of it what is returned."""

    @intrinsic
    def operation(typingctx, address, offset):
        def codegen(context, builder, signature, args):
            loaded = builder.load(builder.inttoptr(builder.add(*args), target.as_pointer()), align=1)
            return convert(builder, loaded) if convert else loaded

        return result(types.uint64, types.uint64), codegen

    return operation


def _from_bfloats(builder, halves):
    """A bfloat16 is the upper half of a float32."""
    words = builder.shl(builder.zext(halves, WORDS.llvm), WORDS.constant(16))
    return builder.bitcast(words, FLOATS.llvm)


load_words = load_at(WORDS, WORDS.llvm)
load_floats = load_at(FLOATS, FLOATS.llvm)
load_bfloats = load_at(FLOATS, ir.VectorType(ir.IntType(16), LANES), _from_bfloats)
load_byte = load_at(types.uint8, I8)


@intrinsic
def prefetch(typingctx, address, offset):
    """Ask for a cache line. An address beyond the end is ignored by the processor."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(builder.add(*args), I8.as_pointer())
        read, keep_in_all_caches, data = I32(0), I32(3), I32(1)
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, keep_in_all_caches, data)

    return types.void(types.uint64, types.uint64), codegen


@intrinsic
def fence(typingctx):
    """Order streaming stores, which bypass the cache, before whatever follows."""
    return types.void(), lambda context, builder, signature, args: builder.fence("seq_cst") and None


# ---- codes ----


def _target_has(feature):
    """Whether numba compiles for processors with it: not the same as whether this one has it, because numba
    can be told to, and an instruction that the target lacks aborts the process."""
    told = config.CPU_FEATURES
    return f"+{feature}" in (codegen.get_host_cpu_features() if told is None else told).split(",")


def _lookup(builder, table, index):
    """`table[index & 15]` for every lane of `index`."""
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
    """A permutation there knows eight entries: look up in both halves of the table, choose by bit 3."""
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
    """`table[index & 3]` for every lane of `index`. The four entries stand in the table four times over."""
    if _target_has("avx512f") or not _target_has("avx2"):
        return _lookup(builder, table, index)
    halves = [
        _call(builder, "llvm.x86.avx.vpermilvar.ps.256", entries.type, entries, part)
        for entries, part in zip(_halves(builder, table), _halves(builder, index), strict=True)
    ]
    return builder.shuffle_vector(*halves, ir.Constant(WORDS.llvm, list(range(LANES))))


def _lookup_eight(builder, table, index):
    """As `_lookup_four` for eight entries, which stand in the table twice, and an index below 8."""
    if _target_has("avx512f") or not _target_has("avx2"):
        return _lookup(builder, table, index)
    low, _ = _halves(builder, table)
    halves = [_call(builder, "llvm.x86.avx2.permps", low.type, low, part) for part in _halves(builder, index)]
    return builder.shuffle_vector(*halves, ir.Constant(WORDS.llvm, list(range(LANES))))


def _halves(builder, vector):
    """Lanes 0 to 7, and 8 to 15."""
    places = (ir.Constant(ir.VectorType(I32, 8), list(range(start, start + 8))) for start in (0, 8))
    return [builder.shuffle_vector(vector, vector, place) for place in places]


lookup_four = binary(_lookup_four)
lookup_eight = binary(_lookup_eight)


def _pack_avx2(builder, codes, width):
    """Each two of sixteen codes in a byte. The wider the lanes, the longer LLVM's own way of cutting them."""
    short, half = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(16), 8)
    # Codes 0-3, 8-11, 4-7, 12-15: instructions stay within 128 bits.
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
    """Pack sixteen codes of 2 or 4 bits (a literal) to array[index], the lowest in the lowest bits."""
    width = bits.literal_value

    def join(builder, lanes, shift):
        """Each lane or'ed with its upper half, moved down next to the lower one, then cut to bytes."""
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
    """first + lane."""

    def codegen(context, builder, signature, args):
        words = broadcast(builder, builder.trunc(args[0], I32))
        return builder.add(words, ir.Constant(WORDS.llvm, list(range(LANES))))

    return WORDS(types.int64), codegen


@intrinsic
def store_chosen(typingctx, indices, values, at, words, floats, mask):
    """The lanes where the mask is set, without gaps: words to indices[at…], floats to values[at…]; returns
    how many. Both arrays (uint32, float32) must have room for 16 lanes, whatever the mask."""

    def codegen(context, builder, signature, args):
        at, words, floats, mask = args[2:]
        for kind, array, lanes in zip(signature.args[:2], args[:2], (words, floats), strict=True):
            _store_compressed(builder, lanes, mask, _pointer(context, builder, kind, array, at, lanes.type))
        bits = builder.bitcast(mask, ir.IntType(LANES))
        return builder.zext(builder.ctpop(bits), I64)

    return types.int64(indices, values, types.int64, words, floats, mask), codegen


def _store_compressed(builder, values, mask, pointer):
    """The lanes that are set, without gaps."""
    lanes = "v16i32" if values.type == WORDS.llvm else "v16f32"
    if _target_has("avx512f"):
        # Not the form that stores only those lanes: on some processors that one takes a hundred cycles.
        name = f"llvm.x86.avx512.mask.compress.{lanes}"
        builder.store(_call(builder, name, values.type, values, values, mask), pointer, align=4)
        return
    place = builder.bitcast(pointer, values.type.element.as_pointer())
    _call(builder, f"llvm.masked.compressstore.{lanes}.p0", ir.VoidType(), values, place, mask)


def _any_lane(builder, mask):
    bits = builder.bitcast(mask, ir.IntType(LANES))
    return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))


any_lane = unary(_any_lane, types.boolean)


# ---- sums: as many vectors as a word has codes; vector j holds code j of sixteen words ----


def _interleave(builder, vectors):
    """Lane k of vector j becomes element k * len(vectors) + j. Each round merges sequences pairwise."""
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
    """The inverse of `_interleave`: each round splits every sequence into its even and its odd elements."""
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
    """Zeros."""
    sums = _sums_type(bits)

    def codegen(context, builder, signature, args):
        return context.make_tuple(builder, sums, [FLOATS.constant(0.0)] * sums.count)

    return sums(bits), codegen


@intrinsic(prefer_literal=True)
def load_sums(typingctx, array, index, bits):
    """From where they stand in order, in array[index]."""
    sums = _sums_type(bits)

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], *args[:2])
        parts = [builder.load(builder.gep(pointer, [I64(j)]), align=4) for j in range(sums.count)]
        return context.make_tuple(builder, sums, _separate(builder, parts))

    return sums(array, index, bits), codegen


def _store_sums(streaming):
    @intrinsic
    def operation(typingctx, array, index, sums):
        def codegen(context, builder, signature, args):
            pointer = _pointer(context, builder, signature.args[0], *args[:2])
            for j, part in enumerate(_interleave(builder, cgutils.unpack_tuple(builder, args[2]))):
                _put(builder, part, builder.gep(pointer, [I64(j)]), streaming)

        return types.void(array, index, sums), codegen

    return operation


store_sums = _store_sums(streaming=False)
# Past the cache: spares reading what will be overwritten. The address must be a multiple of 64.
stream_sums = _store_sums(streaming=True)


@intrinsic
def add_codes(typingctx, sums, table, words):
    """Add what every code in sixteen words is worth."""

    def codegen(context, builder, signature, args):
        vectors = cgutils.unpack_tuple(builder, args[0])
        for j, vector in enumerate(vectors):
            codes = builder.lshr(args[2], WORDS.constant(32 // len(vectors) * j))
            vectors[j] = builder.fadd(vector, _lookup(builder, args[1], codes))
        return context.make_tuple(builder, sums, vectors)

    return sums(sums, table, words), codegen


def _power(builder, a, base):
    """How often a positive number can be halved before its bits are below those of `base`, from 0 to 7."""
    exponent = builder.ashr(builder.sub(builder.bitcast(a, WORDS.llvm), base), WORDS.constant(23))
    zero, seven = WORDS.constant(0), WORDS.constant(7)
    exponent = builder.select(builder.icmp_signed("<", exponent, seven), exponent, seven)
    return builder.select(builder.icmp_signed(">", exponent, zero), exponent, zero)


power = binary(_power, WORDS)


@njit
def saturated(size):
    """Sixteen magnitudes, kept within the finite range; a NaN becomes its end."""
    largest = all_floats(FLOAT32_MAX)
    return where(above(largest, size), size, largest)


@njit
def saturated_sum(a, b):
    """Sixteen a + b, kept within the finite range."""
    total = add(a, b)
    largest, smallest = all_floats(FLOAT32_MAX), all_floats(-FLOAT32_MAX)
    total = where(above(largest, total), total, largest)
    return where(above(total, smallest), total, smallest)
