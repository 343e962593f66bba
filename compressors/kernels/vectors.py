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

from .shared import FLOAT32_MAX, LANES

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


class _Vector(types.Type):
    """The numba type of a value of 16 lanes; such values exist inside kernels only."""

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
    """Return a numba intrinsic with two operands; the arguments are those of `unary`."""

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
magnitude = unary(lambda builder, a: call(builder, "llvm.fabs.v16f32", a.type, a))
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


def call(builder, name, result, *args):
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
sum_floats = _sum_lanes(types.float32, ir.Constant(ir.FloatType(), 0.0), ir.IRBuilder.fadd)
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


def pointer(context, builder, array_type, array, index, target=FLOATS.llvm):
    """Return the address of array[index], as a pointer to `target`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


@intrinsic
def load(typingctx, array, index):
    """Load sixteen float32 from array[index] on."""

    def codegen(context, builder, signature, args):
        return builder.load(pointer(context, builder, signature.args[0], *args), align=4)

    return FLOATS(array, index), codegen


def _store(streaming):
    """Return an intrinsic that stores a vector, past the cache if `streaming`."""

    @intrinsic
    def operation(typingctx, array, index, vector):
        """Store sixteen float32 to array[index] and the elements after it."""

        def codegen(context, builder, signature, args):
            target = pointer(context, builder, signature.args[0], *args[:2])
            put(builder, args[2], target, streaming)

        return types.void(array, index, vector), codegen

    return operation


def put(builder, vector, target, streaming):
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
        line = builder.inttoptr(builder.add(*args), I8.as_pointer())
        read, keep_in_all_caches, data = I32(0), I32(3), I32(1)
        call(builder, "llvm.prefetch.p0", ir.VoidType(), line, read, keep_in_all_caches, data)

    return types.void(types.uint64, types.uint64), codegen


@intrinsic
def fence(typingctx):
    """Order stores that bypass the cache before all later loads and stores."""
    return types.void(), lambda context, builder, signature, args: builder.fence("seq_cst") and None


def target_has(feature):
    """Return True if numba compiles for processors with this feature.

    That may differ from this processor's features: numba can be configured, and an instruction that the
    target lacks aborts the process.
    """
    told = config.CPU_FEATURES
    return f"+{feature}" in (codegen.get_host_cpu_features() if told is None else told).split(",")


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
            _store_compressed(builder, lanes, mask, pointer(context, builder, kind, array, at, lanes.type))
        bits = builder.bitcast(mask, ir.IntType(LANES))
        return builder.zext(builder.ctpop(bits), I64)

    return types.int64(indices, values, types.int64, words, floats, mask), codegen


def _store_compressed(builder, values, mask, target):
    """Store the lanes whose mask is set without gaps."""
    lanes = "v16i32" if values.type == WORDS.llvm else "v16f32"
    if target_has("avx512f"):
        # Stores 16 lanes: the instruction that stores only the set ones takes a hundred cycles on some
        # processors.
        name = f"llvm.x86.avx512.mask.compress.{lanes}"
        builder.store(call(builder, name, values.type, values, values, mask), target, align=4)
        return
    place = builder.bitcast(target, values.type.element.as_pointer())
    call(builder, f"llvm.masked.compressstore.{lanes}.p0", ir.VoidType(), values, place, mask)


def _any_lane(builder, mask):
    """Return True if the mask is set in any lane."""
    bits = builder.bitcast(mask, ir.IntType(LANES))
    return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))


any_lane = unary(_any_lane, types.boolean)


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
