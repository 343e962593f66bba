"""Validation, decoding and the weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import plain_codes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compressors import (
    CodeFormat,
    DenseFormat,
    DensePayload,
    Payload,
    PayloadError,
    QuantizedPayload,
    decode,
    pack_codes,
    payload_bytes,
    reduce_payloads,
    unpack_codes,
    validate,
)

Array = npt.NDArray[np.float32]


def quantized(format: CodeFormat, elements: int, seed: int = 0) -> QuantizedPayload:
    rng = np.random.default_rng(seed)
    allowed = sorted({*range(2**format.bits)} - {format.forbidden_code})
    codes = rng.choice(np.array(allowed, np.uint8), elements)
    levels = np.cumsum(rng.random(format.level_count) + 0.01).astype(np.float32)
    return QuantizedPayload(
        format=format, elements=elements, levels=levels, data=pack_codes(format.bits, codes)
    )


def dense(format: DenseFormat, elements: int, seed: int = 0) -> DensePayload:
    values = np.random.default_rng(seed).standard_normal(elements).astype(np.float32)
    data = np.zeros(elements * format.element_bytes, np.uint8)
    plain_codes.encode_dense(format, values, np.zeros_like(values), data)
    return DensePayload(format=format, elements=elements, data=data)


MAKERS: dict[str, Callable[[int, int], Payload]] = {
    "4bit": lambda elements, seed: quantized(CodeFormat.SIGNED_4BIT, elements, seed),
    "2bit": lambda elements, seed: quantized(CodeFormat.SIGNED_2BIT, elements, seed),
    "float32": lambda elements, seed: dense(DenseFormat.FLOAT32, elements, seed),
    "bfloat16": lambda elements, seed: dense(DenseFormat.BFLOAT16, elements, seed),
    "float16": lambda elements, seed: dense(DenseFormat.FLOAT16, elements, seed),
}


@pytest.mark.parametrize("elements", [0, 1, 7, 8, 9, 16, 1000])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_valid_payload_passes_and_decodes(kind: str, elements: int) -> None:
    payload = MAKERS[kind](elements, 0)
    validate(payload)
    assert payload.data.size == payload_bytes(payload)
    values = decode(payload)
    assert values.shape == (elements,)
    if isinstance(payload, QuantizedPayload):
        codes = unpack_codes(payload.format.bits, payload.data, elements)
        assert np.array_equal(values, payload.format.table(payload.levels)[codes])


def test_what_each_code_is_worth() -> None:
    levels = np.arange(1, 8, dtype=np.float32)
    four = CodeFormat.SIGNED_4BIT.table(levels)
    assert four.tolist() == [0, -1, -2, -3, -4, -5, -6, -7, 0, 1, 2, 3, 4, 5, 6, 7]
    assert CodeFormat.SIGNED_2BIT.table(levels[:1]).tolist() == [0, 0, -1, 1]


def flip(payload: QuantizedPayload, byte: int, value: int) -> QuantizedPayload:
    data = payload.data.copy()
    data[byte] = value
    return replace(payload, data=data)


FOUR = quantized(CodeFormat.SIGNED_4BIT, 11)
TWO = quantized(CodeFormat.SIGNED_2BIT, 19)
PLAIN = dense(DenseFormat.FLOAT32, 5)


def with_levels(*levels: float) -> QuantizedPayload:
    return replace(FOUR, levels=np.array(levels, np.float32))


BROKEN: dict[str, tuple[Payload, str, str]] = {
    "negative count": (replace(FOUR, elements=-1), "elements", "at least 0"),
    "too short": (replace(FOUR, data=FOUR.data[:-1].copy()), "data", "8 bytes for 11 elements"),
    "too long": (replace(FOUR, data=np.zeros(12, np.uint8)), "data", "8 bytes for 11 elements"),
    "count too large": (replace(FOUR, elements=17), "data", "12 bytes for 17 elements"),
    "data type": (replace(PLAIN, data=PLAIN.data.view(np.float32)), "data", "contiguous uint8"),
    "data shape": (replace(PLAIN, data=PLAIN.data.reshape(5, 4)), "data", "of one dimension"),
    "too few levels": (with_levels(1, 2, 3), "levels", r"float32 of shape \(7,\)"),
    "level type": (replace(FOUR, levels=FOUR.levels.astype(np.float64)), "levels", "float32"),
    "NaN level": (with_levels(1, 2, 3, np.nan, 5, 6, 7), "levels", "finite"),
    "infinite level": (with_levels(1, 2, 3, 4, 5, 6, np.inf), "levels", "finite"),
    "level of zero": (with_levels(0, 2, 3, 4, 5, 6, 7), "levels", "positive"),
    "negative level": (with_levels(-1, 2, 3, 4, 5, 6, 7), "levels", "positive"),
    "descending levels": (with_levels(1, 2, 4, 3, 5, 6, 7), "levels", "ascending"),
    "equal levels": (with_levels(1, 2, 3, 3, 5, 6, 7), "levels", "ascending"),
    "code 8, low": (flip(FOUR, 1, 0x18), "data", "got code 8"),
    "code 8, high": (flip(FOUR, 1, 0x81), "data", "got code 8"),
    "code 01": (flip(TWO, 0, 0b00_01_00_00), "data", "got code 1"),
    "padding in the last used byte": (flip(FOUR, 5, 0x91), "data", "zero padding"),
    "padding in the next byte": (flip(FOUR, 6, 0x01), "data", "zero padding"),
    "padding in the last byte": (flip(FOUR, 7, 0x90), "data", "zero padding"),
    "padding of 2 bits": (flip(TWO, 4, 0b11_00_00_00), "data", "zero padding"),
    "NaN": (replace(PLAIN, data=np.array([1, 2, np.nan, 4, 5], np.float32).view(np.uint8)), "data", "finite"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_payload_that_breaks_a_rule_is_refused(case: str) -> None:
    payload, field, message = BROKEN[case]
    with pytest.raises(PayloadError, match=message) as refusal:
        validate(payload)
    assert refusal.value.field == field


def sequential(payloads: list[Payload], weights: list[float], out: Array) -> None:
    """The definition, with numpy: multiply, round, add, round; one payload after the other."""
    for payload, weight in zip(payloads, weights, strict=True):
        out += np.float32(weight) * decode(payload)


def same_bits(one: Array, other: Array) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("elements", [0, 1, 127, 128, 129, 300, 9001])
@pytest.mark.parametrize("kind", MAKERS)
def test_the_sum_is_that_of_the_sequence(kind: str, elements: int) -> None:
    payloads = [MAKERS[kind](elements, seed) for seed in range(7)]
    weights = [0.1, 0.7, 0.2, 1.0, 1 / 3, 0.05, 0.6]
    out, expected = np.full(elements, 9.0, np.float32), np.zeros(elements, np.float32)
    reduce_payloads(payloads, weights, out)
    sequential(payloads, weights, expected)
    assert same_bits(out, expected)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(MAKERS)), st.floats(0, 2, width=32)), max_size=8),
    st.integers(0, 600),
    st.booleans(),
)
def test_any_mixture_of_kinds_sums_in_list_order(
    members: list[tuple[str, float]], elements: int, on_top: bool
) -> None:
    payloads = [MAKERS[kind](elements, seed) for seed, (kind, _) in enumerate(members)]
    weights = [weight for _, weight in members]
    out, expected = np.full(elements, 0.3, np.float32), np.zeros(elements, np.float32)
    if on_top:
        expected[:] = out
        reduce_payloads(payloads, weights, out, keep=True)
    else:
        reduce_payloads(payloads, weights, out)
    sequential(payloads, weights, expected)
    assert same_bits(out, expected)


def test_the_order_of_the_list_decides_the_last_bit() -> None:
    """Float sums depend on the order, so ranks must be put in order before the sum; it does not do it by
    itself."""
    payloads = [dense(DenseFormat.FLOAT32, 1000, seed) for seed in range(3)]
    forth, back = np.empty(1000, np.float32), np.empty(1000, np.float32)
    reduce_payloads(payloads, [0.1, 0.2, 0.7], forth)
    reduce_payloads(payloads[::-1], [0.7, 0.2, 0.1], back)
    assert not same_bits(forth, back)
    np.testing.assert_allclose(forth, back, rtol=1e-5, atol=1e-6)


def test_no_payloads_make_zeros() -> None:
    out = np.full(5, 3.0, np.float32)
    reduce_payloads([], [], out)
    assert out.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("payloads", "weights", "out", "message"),
    [
        ([PLAIN], [], np.zeros(5, np.float32), "one weight per payload, got 1 payloads and 0 weights"),
        ([PLAIN], [1.0], np.zeros(6, np.float32), "payloads of 6 elements, got one of 5"),
        ([replace(PLAIN, data=PLAIN.data[:8])], [1.0], np.zeros(5, np.float32), "20 bytes of data, got 8"),
        ([PLAIN], [1.0], np.zeros(5), "out: expected writable contiguous float32"),
        ([PLAIN], [1.0], np.zeros(10, np.float32)[::2], "out: expected writable contiguous float32"),
    ],
)
def test_sums_that_do_not_fit_are_refused(
    payloads: list[Payload], weights: list[float], out: Array, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reduce_payloads(payloads, weights, out)
