"""The compiled kernels over linear, binary and ternary codes against the plain ones, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, product

import numpy as np
import numpy.typing as npt
import plain_codes
import plain_linear
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import unaligned

from gradwire.compressors import (
    CodeFormat,
    LinearPayload,
    PayloadError,
    check_data,
    pack_codes,
    reduce_payloads,
    set_threads,
    unpack_codes,
)
from gradwire.compressors.kernels import FLOAT32_MAX, cpu, linear
from gradwire.compressors.kernels.shared import CHUNK
from gradwire.compressors.payload import code_bytes

Array = npt.NDArray[np.float32]
Raw = npt.NDArray[np.uint8]

# Around the borders of a vector (16), a word (8, 16, 32), a group of binary sums (64), a block (2048, 4096)
# and a thread's chunk.
SMALL = [0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 2049, 4095, 4096, 4097]
LARGE = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4097]
SIZES = [*SMALL, *LARGE]
BITS = range(2, 9)
# One that divides blocks, some that do not, and one as long as any tensor here.
BUCKETS = [32, 96, 512, 4128, 1 << 24]
HUGE = 3.4e38


def gradient(elements: int, seed: int = 0) -> Array:
    """All magnitudes from denormal to huge, both zeros, and values half-way between codes."""
    rng = np.random.default_rng([elements, seed])
    magnitudes = rng.choice(np.array([1e-44, 1e-30, 1e-3, 0.1, 1.0, 7e4, 1e30]), elements)
    values: Array = (rng.standard_normal(elements) * magnitudes).astype(np.float32)
    special = np.array([0.0, -0.0, 0.5, -1.5, 2.5, HUGE, -HUGE, 1e-45], np.float32)
    where = rng.integers(0, max(1, elements), min(elements, 40))
    values[where] = rng.choice(special, where.size)
    return values


def scales_for(values: Array, bits: int, bucket: int) -> Array:
    """Some that fit, some far too small, a zero, and 1, which leaves ties."""
    scales = plain_linear.bucket_maxima(values, np.zeros_like(values), bucket) / np.float32(2 ** (bits - 1))
    scales[1::3] *= np.float32(1e-3)
    scales[2::4] = 1.0
    scales[3:4] = 0.0
    return scales


def same_bits(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> bool:
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


def random_codes(bits: int, elements: int, payloads: int) -> list[Raw]:
    rng = np.random.default_rng([bits, elements])
    size = code_bytes(bits, elements)
    return [unaligned(rng.integers(0, 256, size, np.uint8)) for _ in range(payloads)]


def check_quantizing(
    bits: int, elements: int, quantize: Callable[[Array, Raw], None], expected: Callable[[Array, Raw], None]
) -> None:
    """Both write the same bits over whatever stood in `data`, and leave the same residual."""
    residuals = [gradient(elements, seed=1) * np.float32(0.01) for _ in range(2)]
    datas = [np.full(code_bytes(bits, elements), 0xFF, np.uint8) for _ in range(2)]
    for kernel, residual, data in zip((quantize, expected), residuals, datas, strict=True):
        kernel(residual, data)
    assert same_bits(*datas)
    assert same_bits(*residuals)


def check_quantize_linear(bits: int, bucket: int, elements: int, seed: int | None) -> None:
    values = gradient(elements)
    scales = scales_for(values, bits, bucket)
    check_quantizing(
        bits,
        elements,
        lambda residual, data: linear.quantize_linear(
            bits, bucket, values, residual, scales, data, seed=seed
        ),
        lambda residual, data: plain_linear.quantize_linear(
            bits, bucket, values, residual, scales, data, seed=seed
        ),
    )


def check_add_linear(bits: int, bucket: int, elements: int) -> None:
    datas, rng = random_codes(bits, elements, 3), np.random.default_rng(0)
    scales = [rng.random(-(-elements // bucket), np.float32) for _ in datas]
    weights = np.array([0.1, 0.3, 0.77], np.float32)
    for keep in (False, True):
        sums = [np.full(elements, 0.3, np.float32) for _ in range(2)]
        linear.add_linear(bits, bucket, datas, scales, weights, sums[0], keep=keep)
        plain_linear.add_linear(bits, bucket, datas, scales, weights, sums[1], keep=keep)
        assert same_bits(*sums)


def check_binary(elements: int) -> None:
    values = gradient(elements)
    check_quantizing(
        1,
        elements,
        lambda residual, data: linear.quantize_binary(values, residual, -0.3, 0.7, data),
        lambda residual, data: plain_linear.quantize_binary(values, residual, -0.3, 0.7, data),
    )
    datas = random_codes(1, elements, 3)
    tables = np.random.default_rng(0).random((3, 2), np.float32)
    for keep in (False, True):
        sums = [np.full(elements, 0.3, np.float32) for _ in range(2)]
        cpu.add_quantized(CodeFormat.BINARY, datas, tables, sums[0], keep=keep)
        plain_codes.add_quantized(CodeFormat.BINARY, datas, tables, sums[1], keep=keep)
        assert same_bits(*sums)


def check_ternary(elements: int, level: float) -> None:
    values = gradient(elements)
    check_quantizing(
        2,
        elements,
        lambda residual, data: linear.quantize_ternary(values, residual, level, data, seed=9),
        lambda residual, data: plain_linear.quantize_ternary(values, residual, level, data, seed=9),
    )


def check_scales(elements: int, bucket: int) -> None:
    values, none = gradient(elements), np.zeros(elements, np.float32)
    for residual, plain in ((values[::-1].copy(), values[::-1].copy()), (None, none)):
        for name in ("bucket_maxima", "bucket_norms", "bucket_means"):
            expected = getattr(plain_linear, name)(values, plain, bucket)
            assert same_bits(getattr(linear, name)(values, residual, bucket), expected)


def check_signs(elements: int, bucket: int) -> None:
    values = gradient(elements)
    scales = scales_for(values, 1, bucket)
    check_quantizing(
        1,
        elements,
        lambda residual, data: linear.quantize_signs(bucket, values, residual, scales, data),
        lambda residual, data: plain_linear.quantize_signs(bucket, values, residual, scales, data),
    )


@pytest.mark.parametrize("elements", SIZES)
def test_scales(elements: int) -> None:
    # The plain ones take long for many buckets.
    for bucket in BUCKETS if elements in SMALL else BUCKETS[3:]:
        check_scales(elements, bucket)


def test_scales_of_what_is_easy_to_say() -> None:
    values = np.zeros(100, np.float32)
    values[[0, 1, 40, 41, 99]] = 3.0, -4.0, -HUGE, HUGE, -1e-45
    assert linear.bucket_maxima(values, None, 32).tolist() == [4.0, np.float32(HUGE), 0.0, np.float32(1e-45)]
    # The second one's norm exceeds the largest float32.
    largest = np.finfo(np.float32).max
    assert linear.bucket_norms(values, None, 32).tolist() == [5.0, largest, 0.0, np.float32(1e-45)]
    means = linear.bucket_means(values, None, 32).tolist()
    # The last bucket has 4 elements; a quarter of the smallest number rounds to 0.
    assert means == [7 / 32, np.float32(2 * HUGE / 32), 0.0, 0.0]
    assert linear.bucket_means(np.full(40, largest), None, 32).tolist() == [largest, largest]
    # A sum saturates.
    assert linear.bucket_maxima(values, values.copy(), 32)[1] == largest


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("bits", BITS)
def test_quantize_linear(bits: int, seed: int | None) -> None:
    for elements, bucket in product(SMALL, BUCKETS):
        check_quantize_linear(bits, bucket, elements, seed)


@pytest.mark.parametrize("seed", [None, 2**64 - 1])
@pytest.mark.parametrize("elements", LARGE)
@pytest.mark.parametrize(("bits", "bucket"), [(8, 4128), (5, 512), (2, 1 << 24)])
def test_quantize_linear_by_chunks(bits: int, bucket: int, elements: int, seed: int | None) -> None:
    check_quantize_linear(bits, bucket, elements, seed)


@pytest.mark.parametrize("elements", SIZES)
def test_quantize_signs(elements: int) -> None:
    for bucket in (32, 96, 4096, 1 << 24):
        check_signs(elements, bucket)


def test_signs_by_hand() -> None:
    """Zero of either sign is positive, and one bit stands for +1."""
    values = np.array([0.5, -1.5, 0.0, -0.0, HUGE], np.float32)
    residual, data = np.array([0.0, 0.0, -1e-45, 0.0, HUGE], np.float32), np.zeros(4, np.uint8)
    linear.quantize_signs(32, values, residual, np.ones(1, np.float32), data)
    assert data.tolist() == [0b11001, 0, 0, 0]
    assert residual.tolist() == [-0.5, -0.5, 1.0, -1.0, np.finfo(np.float32).max]
    assert plain_linear.unpack_signed(1, data, 5).tolist() == [1, -1, -1, 1, 1]
    assert not linear.has_forbidden_linear(1, 5, data)


@pytest.mark.parametrize("bits", [1, *BITS])
def test_add_linear(bits: int) -> None:
    for elements, bucket in product(SMALL, BUCKETS):
        check_add_linear(bits, bucket, elements)


@pytest.mark.parametrize("elements", LARGE)
@pytest.mark.parametrize(("bits", "bucket"), [(8, 4128), (5, 512), (2, 1 << 24), (1, 4096), (1, 96)])
def test_add_linear_by_chunks(bits: int, bucket: int, elements: int) -> None:
    check_add_linear(bits, bucket, elements)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1e-45, HUGE, -HUGE])
@pytest.mark.parametrize("bits", BITS)
def test_a_constant_is_sent_as_the_last_code(bits: int, value: float) -> None:
    values, residual = np.full(40, value, np.float32), np.zeros(40, np.float32)
    scales = linear.bucket_maxima(values, None, 64) / np.float32(2 ** (bits - 1) - 1)
    data = np.zeros(code_bytes(bits, 40), np.uint8)
    linear.quantize_linear(bits, 64, values, residual, scales, data, seed=None)
    last = 2 ** (bits - 1) - 1 if scales[0] > 0 else 0
    assert set(plain_linear.unpack_signed(bits, data, 40).tolist()) == {int(np.sign(value)) * last}


def test_codes_by_hand() -> None:
    """Ties to even, saturation, and the order of bits."""
    values = np.array([0.5, 1.5, -0.5, -1.5, 2.5, 9.0, -9.0, 0.0], np.float32)
    residual, data = np.zeros(8, np.float32), np.zeros(4, np.uint8)
    linear.quantize_linear(3, 32, values, residual, np.ones(1, np.float32), data, seed=None)
    codes = [0, 2, 0, -2, 2, 3, -3, 0]
    assert residual.tolist() == (values - np.array(codes)).tolist()
    packed = sum((code % 8) << (3 * i) for i, code in enumerate(codes))
    assert int.from_bytes(data.tobytes(), "little") == packed


@pytest.mark.parametrize("bits", BITS)
def test_rounding_at_random_is_unbiased(bits: int) -> None:
    """The mean of 1000 draws is within 5 of its standard deviations, each at most 0.5 / sqrt(1000)."""
    draws, last = 1000, 2 ** (bits - 1) - 1
    values = np.linspace(-last, last, 97, dtype=np.float32)
    data, mean = np.zeros(code_bytes(bits, 97), np.uint8), np.zeros(97)
    for seed in range(draws):
        residual, one = np.zeros(97, np.float32), np.ones(1, np.float32)
        linear.quantize_linear(bits, 128, values, residual, one, data, seed=seed)
        codes = plain_linear.unpack_signed(bits, data, 97)
        assert (np.abs(codes - values) < 1).all()
        mean += codes / draws
    assert np.abs(mean - values).max() < 2.5 / draws**0.5
    assert abs((mean - values).mean()) < 2.5 / (97 * draws) ** 0.5


def test_ternary_is_unbiased() -> None:
    """The mean of many draws is the value; a single draw has a standard deviation of at most half a level."""
    draws, values = 1000, np.linspace(-1.0, 1.0, 97, dtype=np.float32)
    data, mean = np.zeros(CodeFormat.SIGNED_2BIT.code_bytes(97), np.uint8), np.zeros(97)
    table = CodeFormat.SIGNED_2BIT.table(np.ones(1, np.float32))
    for seed in range(draws):
        linear.quantize_ternary(values, np.zeros(97, np.float32), 1.0, data, seed=seed)
        mean += table[unpack_codes(2, data, 97)] / draws
    assert np.abs(mean - values).max() < 2.5 / draws**0.5
    assert abs((mean - values).mean()) < 2.5 / (97 * draws) ** 0.5


def test_a_seed_repeats_its_bits_and_another_gives_others() -> None:
    values, scales = gradient(1000).clip(-1, 1), np.full(1, 0.01, np.float32)

    def codes(seed: int) -> bytes:
        data = np.zeros(code_bytes(8, 1000), np.uint8)
        linear.quantize_linear(8, 1024, values, np.zeros(1000, np.float32), scales, data, seed=seed)
        return data.tobytes()

    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    assert [codes(seed) for seed in seeds] == [codes(seed) for seed in seeds]
    assert len({codes(seed) for seed in seeds}) == len(seeds)
    assert codes(-1) == codes(2**64 - 1)


@pytest.mark.parametrize("elements", SIZES)
def test_side_sums(elements: int) -> None:
    values, residual = gradient(elements), gradient(elements, seed=1)
    assert linear.side_sums(values, residual) == plain_linear.side_sums(values, residual)


def test_side_sums_by_hand() -> None:
    values = np.array([1.0, -0.0, -2.0, HUGE, 0.25], np.float32)
    residual = np.array([1.0, -0.0, -2.0, HUGE, -0.5], np.float32)
    assert linear.side_sums(values, residual) == (float(np.finfo(np.float32).max), 3, -4.25, 2)


@pytest.mark.parametrize("elements", SIZES)
def test_binary(elements: int) -> None:
    check_binary(elements)


def test_the_rest_of_a_binary_code_stays_finite() -> None:
    values, residual = np.array([HUGE, -HUGE], np.float32), np.zeros(2, np.float32)
    linear.quantize_binary(values, residual, HUGE, -HUGE, np.zeros(4, np.uint8))
    assert residual.tolist() == [np.finfo(np.float32).max, np.finfo(np.float32).min]


@pytest.mark.parametrize("level", [1.5, 0.0, 1e-45, HUGE])
def test_ternary(level: float) -> None:
    for elements in SIZES:
        check_ternary(elements, level)


@pytest.mark.parametrize("bits", BITS)
def test_the_forbidden_code_is_found_wherever_it_stands(bits: int) -> None:
    forbidden = 2 ** (bits - 1)
    allowed = np.array([code for code in range(2**bits) if code != forbidden], np.int32)
    for elements in (1, 8, 9, 31, 1000, CHUNK + 3, 2 * CHUNK):
        codes = np.random.default_rng(0).choice(allowed, elements)
        packed = pack_codes(bits, codes)
        # Padding is not looked at.
        packed[-1] |= 0x80 if elements * bits % 32 else 0
        assert not linear.has_forbidden_linear(bits, elements, unaligned(packed))
        for position in {0, 1, elements // 2, elements - 2, elements - 1} & {*range(elements)}:
            # Swapped in rather than packed anew, which takes long.
            broken, at = packed.copy(), position * bits
            value = int.from_bytes(broken[at // 8 : at // 8 + 2].tobytes(), "little")
            value = value & ~((2**bits - 1) << at % 8) | forbidden << at % 8
            size = min(2, broken.size - at // 8)
            broken[at // 8 : at // 8 + 2] = np.frombuffer(value.to_bytes(2, "little")[:size], np.uint8)
            assert linear.has_forbidden_linear(bits, elements, unaligned(broken))
            assert plain_linear.has_forbidden_linear(bits, elements, broken)


FINITE = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)
LEVELS = st.floats(width=32, min_value=2.0**-100, max_value=2.0**100)


@settings(max_examples=60)
@given(
    values=st.lists(st.tuples(FINITE, FINITE), max_size=200),
    bits=st.sampled_from(BITS),
    bucket=st.sampled_from([32, 64, 256]),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
def test_what_is_sent_and_what_is_left_make_up_the_whole(
    values: list[tuple[float, float]], bits: int, bucket: int, seed: int | None
) -> None:
    pairs = np.array(values, np.float32).reshape(-1, 2)
    left, residual = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    whole = left + residual
    scales = linear.bucket_maxima(whole, None, bucket) / np.float32(2 ** (bits - 1) - 1)
    data = np.zeros(code_bytes(bits, left.size), np.uint8)
    linear.quantize_linear(bits, bucket, left, residual, scales, data, seed=seed)
    assert not linear.has_forbidden_linear(bits, left.size, data)
    sent = np.zeros_like(left)
    linear.add_linear(bits, bucket, [data], [scales], np.ones(1, np.float32), sent)
    # One rounding: half a unit in the last place of the residual.
    error = np.abs(sent.astype(np.float64) + residual - whole)
    assert (error <= 2.0**-24 * np.abs(residual)).all()
    # The scale's own rounding moves the last code a little; where the scale is denormal, by more.
    step = plain_linear.per_element(scales, bucket, left.size).astype(np.float64)
    assert (np.abs(residual) <= step * (0.5001 if seed is None else 1.0001) + 64 * 2.0**-149).all()


@settings(max_examples=40)
@given(values=st.lists(FINITE, max_size=200), level=LEVELS)
def test_binary_and_ternary_codes_leave_what_they_do_not_send(values: list[float], level: float) -> None:
    whole = np.array(values, np.float32)
    sent, residual = np.zeros_like(whole), np.zeros_like(whole)
    data = np.zeros(code_bytes(1, whole.size), np.uint8)
    linear.quantize_binary(whole, residual, -level, level, data)
    cpu.add_quantized(CodeFormat.BINARY, [data], np.array([[-level, level]], np.float32), sent)
    assert same_bits(sent, np.where(whole >= 0, np.float32(level), np.float32(-level)))
    assert same_bits(residual, whole - sent)
    data = np.zeros(CodeFormat.SIGNED_2BIT.code_bytes(whole.size), np.uint8)
    residual[:] = 0.0
    linear.quantize_ternary(whole, residual, level, data, seed=1)
    assert not plain_codes.has_forbidden_code(CodeFormat.SIGNED_2BIT, data)
    codes = unpack_codes(2, data, whole.size)
    sent = CodeFormat.SIGNED_2BIT.table(np.array([level], np.float32))[codes]
    assert np.array_equal(residual, whole - sent)
    assert (np.sign(sent) * np.sign(whole) >= 0).all()
    assert (codes[np.abs(whole) >= np.float32(level)] != 0).all()


def test_the_number_of_threads_does_not_show() -> None:
    elements, bucket = 5 * CHUNK + 123, 4128
    values = np.random.default_rng(0).standard_normal(elements, np.float32)
    results: list[list[bytes]] = []
    for count in (1, 2, 5):
        set_threads(count)
        scales = linear.bucket_maxima(values, None, bucket) / np.float32(15)
        datas, residuals = [raw(code_bytes(bits, elements)) for bits in (5, 2, 1)], zeros(elements)
        linear.quantize_linear(5, bucket, values, residuals, scales, datas[0], seed=1)
        linear.quantize_ternary(values, residuals, 2.0, datas[1], seed=1)
        linear.quantize_binary(values, residuals, -1.0, 1.0, datas[2])
        means, signs = linear.bucket_means(values, residuals, 4096), raw(code_bytes(1, elements))
        linear.quantize_signs(4096, values, residuals, means, signs)
        out, one = zeros(elements), np.ones(1, np.float32)
        linear.add_linear(1, 4096, [signs], [means], one, out)
        linear.add_linear(5, bucket, datas[:1], [scales], one, out)
        cpu.add_quantized(CodeFormat.BINARY, datas[2:], np.array([[-1.0, 1.0]], np.float32), out)
        norms, sides = (
            linear.bucket_norms(values, None, bucket),
            np.array(linear.side_sums(values, residuals)),
        )
        arrays: list[npt.NDArray[np.generic]] = [*datas, means, signs, residuals, out, norms, sides]
        results.append([array.tobytes() for array in arrays])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("elements", SIZES)
def test_without_a_residual_codes_are_those_with_one_of_zeros(elements: int) -> None:
    values, datas = gradient(elements), [raw(code_bytes(bits, elements)) for bits in (5, 2, 1)]
    again = [data.copy() for data in datas]
    signs = [raw(code_bytes(1, elements)) for _ in range(2)]
    linear.quantize_signs(64, values, np.zeros_like(values), linear.bucket_maxima(values, None, 64), signs[0])
    linear.quantize_signs(64, values, None, linear.bucket_maxima(values, None, 64), signs[1])
    assert same_bits(signs[0], signs[1])
    scales = linear.bucket_maxima(values, None, 64)
    for residual, (linear_codes, ternary, binary) in ((np.zeros_like(values), datas), (None, again)):
        sides = linear.side_sums(values, residual)
        assert sides == plain_linear.side_sums(values, np.zeros_like(values))
        for seed in (None, 3):
            rest = None if residual is None else residual.copy()
            linear.quantize_linear(5, 64, values, rest, scales, linear_codes, seed=seed)
        rest = None if residual is None else residual.copy()
        linear.quantize_ternary(values, rest, 2.0, ternary, seed=1)
        rest = None if residual is None else residual.copy()
        linear.quantize_binary(values, rest, -1.0, 1.0, binary)
    assert all(np.array_equal(one, other) for one, other in zip(datas, again, strict=True))


def zeros(size: int) -> Array:
    return np.zeros(size, np.float32)


def raw(size: int) -> Raw:
    return np.zeros(size, np.uint8)


def quantize(
    *, bits: int = 4, bucket: int = 32, given: Array | None = None, residual: int = 40, scales: int = 2
) -> None:
    values = zeros(40) if given is None else given
    linear.quantize_linear(bits, bucket, values, zeros(residual), zeros(scales), raw(20), seed=None)


def add(*, bits: int = 4, bucket: int = 32, data: int = 20, scales: int = 2, arrays: int = 1) -> None:
    linear.add_linear(bits, bucket, [raw(data)], [zeros(scales)] * arrays, zeros(1), zeros(40))


MISFITS: dict[str, tuple[Callable[[], object], str]] = {
    "1 bit": (lambda: quantize(bits=1), "bits: expected 2 to 8, got 1"),
    "9 bits": (lambda: add(bits=9), "bits: "),
    "odd bucket": (
        lambda: quantize(bucket=48),
        "bucket: expected a multiple of 32 from 32 to 16777216, got 48",
    ),
    "no bucket": (lambda: add(bucket=0), "bucket: "),
    "bucket of a maximum": (lambda: linear.bucket_maxima(zeros(40), None, 31), "bucket: "),
    "negative bucket": (lambda: linear.bucket_norms(zeros(40), None, -32), "bucket: "),
    "strided values": (lambda: linear.bucket_maxima(zeros(80)[::2], None, 32), "gradient: "),
    "strided gradient": (lambda: quantize(given=zeros(80)[::2]), "gradient: "),
    "short residual": (lambda: quantize(residual=39), "residual: "),
    "few scales": (lambda: quantize(scales=1), "scales: "),
    "many scales": (lambda: add(scales=3), "scales: "),
    "two scales arrays": (lambda: add(arrays=2), "scales: expected one array per payload, 1, got 2"),
    "short codes": (lambda: add(data=16), "data: "),
    "codes to scan": (lambda: linear.has_forbidden_linear(4, 40, raw(16)), "data: "),
    "residual of sides": (lambda: linear.side_sums(zeros(40), zeros(39)), "residual: "),
    "bucket of signs": (
        lambda: linear.quantize_signs(40, zeros(40), zeros(40), zeros(1), raw(8)),
        "bucket: expected a multiple of 32",
    ),
    "few scales of signs": (
        lambda: linear.quantize_signs(32, zeros(40), zeros(40), zeros(1), raw(8)),
        "scales: ",
    ),
    "long signs": (lambda: linear.quantize_signs(32, zeros(40), None, zeros(2), raw(12)), "data: "),
    "0 bits": (lambda: add(bits=0), "bits: expected 1 to 8, got 0"),
    "long bits": (lambda: linear.quantize_binary(zeros(40), zeros(40), 0, 1, raw(12)), "data: "),
    "few tables": (
        lambda: cpu.add_quantized(CodeFormat.BINARY, [raw(8)] * 2, zeros(2).reshape(1, 2), zeros(40)),
        "tables: ",
    ),
    "short trits": (lambda: linear.quantize_ternary(zeros(40), zeros(40), 1, raw(8), seed=0), "data: "),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_machine_code_would_misread_is_refused(case: str) -> None:
    call, message = MISFITS[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_many_tensors_have_the_bits_and_the_checks_of_each_alone(bits: int) -> None:
    counts, bucket, seeds = [33, 1, 4096, 200, 2100], 32, [5, 6, 7, 8, 1 << 63]
    borders = [0, *accumulate(counts)]
    values, weights = gradient(borders[-1]), np.array([0.5, -3.0], np.float32)
    payloads = list[LinearPayload]()
    for count, start, seed in zip(counts, borders, seeds, strict=False):
        given = values[start : start + count]
        scales = linear.bucket_maxima(given, None, bucket) / np.float32(max(1, 2 ** (bits - 1) - 1))
        scales = np.minimum(scales, FLOAT32_MAX / np.float32(2 ** (bits - 1)))
        codes = np.zeros(code_bytes(bits, count), np.uint8)
        if bits > 1:
            linear.quantize_linear(bits, bucket, given, None, scales, codes, seed=seed)
        data = np.concatenate([scales.view(np.uint8), codes])
        payloads.append(LinearPayload(elements=count, bits=bits, bucket=bucket, data=data))
    together = np.concatenate([each.data for each in payloads])
    if bits > 1:
        assert (
            np.concatenate(linear.round_each(bits, bucket, values, counts, seeds)).tobytes()
            == together.tobytes()
        )
    sums = linear.add_each(bits, bucket, counts, [together, together], weights)
    for each, start in zip(payloads, borders, strict=False):
        one = np.empty(each.elements, np.float32)
        reduce_payloads([each, each], [*weights.tolist()], one)
        assert sums[start : start + one.size].tobytes() == one.tobytes()
    assert linear.are_valid(bits, bucket, counts, together)
    ends = [*accumulate(each.data.size for each in payloads)]
    for end, payload in zip(ends, payloads, strict=True):
        for place in (3, 4 * payload.buckets, payload.data.size - 1):  # a scale, the first code, padding
            for value in (0x80, 0xFF, 0x88):
                damaged = together.copy()
                here = damaged[end - payload.data.size : end]
                here[place] = value
                try:
                    check_data(replace(payload, data=here.copy()))
                    sound = True
                except PayloadError:
                    sound = False
                assert linear.are_valid(bits, bucket, counts, damaged) == sound
