"""Quantized payloads of several tensors: every block is what a payload of its own would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import plain_codes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import gradient, unaligned

from gradwire.compressors import (
    CodeFormat,
    Payload,
    PayloadError,
    QuantizedPayload,
    add_update,
    check_announcement,
    decode,
    join,
    pack_codes,
    payload_bytes,
    reduce_payloads,
    unpack_codes,
    validate,
    wire_bytes,
)
from gradwire.compressors.kernels import cpu
from gradwire.compressors.kernels.shared import CHUNK, SUM_BLOCK

Array = npt.NDArray[np.float32]

FORMATS = list(CodeFormat)
SIZES: dict[str, list[int]] = {
    "none": [],
    "one": [77],
    "an empty one": [0],
    "empty ones": [0, 0, 5, 0, 129, 0, 0],
    "odd": [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 128, 129, 255, 256, 257],
    "around a piece": [SUM_BLOCK - 1, SUM_BLOCK, SUM_BLOCK + 1, 3 * SUM_BLOCK + 5],
    "many": [64] * 130 + [4096] * 70,
    "around a chunk": [5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4097, 300],
}


def block(format: CodeFormat, elements: int, rng: np.random.Generator) -> QuantizedPayload:
    allowed = sorted({*range(2**format.bits)} - {format.forbidden_code})
    codes = rng.choice(np.array(allowed, np.uint8), elements)
    levels = np.cumsum(rng.random(format.level_count) + 0.01).astype(np.float32)
    return QuantizedPayload(
        format=format, elements=elements, levels=levels, data=pack_codes(format.bits, codes)
    )


def blocks(format: CodeFormat, sizes: Sequence[int], seed: int = 0) -> list[QuantizedPayload]:
    rng = np.random.default_rng([seed, len(sizes)])
    return [block(format, elements, rng) for elements in sizes]


def whole(format: CodeFormat, parts: Sequence[QuantizedPayload]) -> QuantizedPayload:
    """Join payloads by hand, so that `join` is not what its own result is compared with."""
    return QuantizedPayload(
        format=format,
        elements=sum(part.elements for part in parts),
        levels=np.concatenate([part.levels for part in parts] or [np.empty(0, np.float32)]),
        sizes=np.array([part.elements for part in parts], np.int64),
        data=unaligned(np.concatenate([part.data for part in parts] or [np.empty(0, np.uint8)])),
    )


def each_alone(
    pushes: Sequence[Sequence[QuantizedPayload]], weights: Sequence[float], out: Array, *, keep: bool
) -> None:
    start = 0
    for parts in zip(*pushes, strict=True):
        end = start + parts[0].elements
        reduce_payloads(parts, weights, out[start:end], keep=keep)
        start = end


def same_bits(one: Array, other: Array) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_blocks_decode_and_add_up_as_each_by_itself(format: CodeFormat, name: str) -> None:
    pushes = [blocks(format, SIZES[name], seed) for seed in range(3)]
    weights = [0.3, 1 / 3, 0.6]
    payloads: list[Payload] = [whole(format, parts) for parts in pushes]
    elements = sum(SIZES[name])
    for payload, parts in zip(payloads, pushes, strict=True):
        validate(payload)
        assert payload.data.size == payload_bytes(payload)
        assert decode(payload).tobytes() == b"".join(decode(part).tobytes() for part in parts)
    for keep in (False, True):
        sums = [gradient(elements) for _ in range(2)]
        reduce_payloads(payloads, weights, sums[0], keep=keep)
        each_alone(pushes, weights, sums[1], keep=keep)
        assert same_bits(*sums)


def check_sums(format: CodeFormat, of: Sequence[int]) -> None:
    rng, sizes = np.random.default_rng(0), np.array(of, np.int64)
    total = sum(format.code_bytes(size) for size in of)
    datas = [unaligned(rng.integers(0, 256, total, np.uint8)) for _ in range(3)]
    tables = rng.standard_normal((3, sizes.size, 2**format.bits)).astype(np.float32)
    for keep in (False, True):
        memory = np.zeros(int(sizes.sum()) + 16, np.float32)
        first = -(memory.ctypes.data // 4) % 16
        sums = [memory[first : first + int(sizes.sum())], gradient(int(sizes.sum()))]
        sums[0][:] = sums[1]
        for kernels, out in zip((cpu, plain_codes), sums, strict=True):
            kernels.add_quantized(format, datas, tables, out, keep=keep, sizes=sizes)
        assert same_bits(*sums)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("format", [format for format in FORMATS if format is not CodeFormat.VOTE])
def test_the_kernels_are_the_plain_ones(
    format: CodeFormat, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (0, 1 << 30):
        monkeypatch.setattr(cpu, "STREAM_ELEMENTS", stream)
        check_sums(format, SIZES[name])


@given(
    st.sampled_from(FORMATS),
    st.lists(st.lists(st.integers(0, 40), max_size=4).map(tuple), min_size=1, max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
def test_payloads_of_other_blocks_add_up_to_the_same(
    format: CodeFormat, shapes: list[tuple[int, ...]], rest: int, keep: bool
) -> None:
    """However each payload's elements are divided: a vote is one vote."""
    elements = max(sum(sizes) for sizes in shapes) + rest
    divided = [blocks(format, [*sizes, elements - sum(sizes)], 7) for sizes in shapes]
    weights = [0.1 * (rank + 1) for rank in range(len(shapes))]
    sums = [np.full(elements, 0.3, np.float32) for _ in range(2)]
    reduce_payloads([whole(format, parts) for parts in divided], weights, sums[0], keep=keep)
    borders = sorted({0, elements} | {int(at) for sizes in shapes for at in np.cumsum(sizes)})
    codes = [np.concatenate([np.empty(0, np.int32), *map(unpacked, parts)]) for parts in divided]
    levels = [np.repeat(np.arange(len(parts)), [part.elements for part in parts]) for parts in divided]
    for start, end in pairwise(borders):
        alone = [
            QuantizedPayload(
                format=format,
                elements=end - start,
                levels=parts[int(level[start])].levels,
                data=pack_codes(format.bits, code[start:end]),
            )
            for parts, code, level in zip(divided, codes, levels, strict=True)
        ]
        reduce_payloads(alone, weights, sums[1][start:end], keep=keep)
    assert same_bits(*sums)


def unpacked(payload: QuantizedPayload) -> npt.NDArray[np.int32]:
    return unpack_codes(payload.format.bits, payload.data, payload.elements)


def test_an_update_of_blocks_is_added_to_a_parameter() -> None:
    update = whole(CodeFormat.SIGNED_4BIT, blocks(CodeFormat.SIGNED_4BIT, [30, 0, 70, 9000]))
    parameter = torch.full((9100,), 0.25)
    add_update(update, parameter)
    assert same_bits(parameter.numpy(), np.float32(0.25) + decode(update))


def test_what_is_on_the_wire() -> None:
    payload = whole(CodeFormat.SIGNED_4BIT, blocks(CodeFormat.SIGNED_4BIT, [9, 8, 0]))
    assert payload_bytes(payload) == 8 + 4 + 0
    assert wire_bytes(payload) == 12 + 3 * 7 * 4
    assert payload.block_sizes().tolist() == [9, 8, 0]
    assert FOUR.block_sizes().tolist() == [41]


FOUR = block(CodeFormat.SIGNED_4BIT, 41, np.random.default_rng(0))
BLOCKS = whole(CodeFormat.SIGNED_4BIT, blocks(CodeFormat.SIGNED_4BIT, [11, 8, 21]))
TWO = whole(CodeFormat.SIGNED_2BIT, blocks(CodeFormat.SIGNED_2BIT, [11, 16, 0, 21]))
BITS = whole(CodeFormat.BINARY, blocks(CodeFormat.BINARY, [11, 32, 21]))


def sized(*sizes: int) -> QuantizedPayload:
    return replace(BLOCKS, sizes=np.array(sizes, np.int64))


def leveled(index: int, value: float) -> QuantizedPayload:
    levels = BLOCKS.levels.copy()
    levels[index] = value
    return replace(BLOCKS, levels=levels)


def flipped(payload: QuantizedPayload, byte: int, value: int) -> QuantizedPayload:
    data = payload.data.copy()
    data[byte] = value
    return replace(payload, data=data)


BROKEN: dict[str, tuple[QuantizedPayload, str, str]] = {
    "negative size": (sized(11, -8, 37), "sizes", "at least 0 each, got -8"),
    "too few elements": (sized(11, 8, 20), "sizes", "40 elements in all, got 39"),
    "too many elements": (sized(11, 8, 2**63 - 1), "sizes", "40 elements in all, got 9223372036854775826"),
    "sizes that overflow": (sized(2**62, 2**62, 2**62), "sizes", "40 elements in all"),
    "size type": (replace(BLOCKS, sizes=np.array([11.0, 8, 21])), "sizes", "int64"),
    "size shape": (replace(BLOCKS, sizes=np.array([[11, 8, 21]], np.int64)), "sizes", "one dimension"),
    "a block too many": (sized(11, 8, 21, 0), "levels", r"shape \(28,\), got .*\(21,\)"),
    "a block too few": (sized(19, 21), "levels", r"shape \(14,\)"),
    "other blocks": (sized(10, 9, 21), "data", "28 bytes for 40 elements"),
    "NaN level": (leveled(15, np.nan), "levels", "finite"),
    "level of zero": (leveled(7, 0.0), "levels", "positive"),
    "equal levels": (leveled(9, float(BLOCKS.levels[8])), "levels", "ascending"),
    "code 8": (flipped(BLOCKS, 9, 0x81), "data", "got code 8"),
    "padding of the first": (flipped(BLOCKS, 7, 0x10), "data", "zero padding"),
    "padding of the last": (flipped(BLOCKS, 22, 0x90), "data", "zero padding"),
    "padding of 2 bits": (flipped(TWO, 3, 0xC0), "data", "zero padding"),
    "padding of bits": (flipped(BITS, 11, 0x80), "data", "zero padding"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_blocks_that_break_a_rule_are_refused(case: str) -> None:
    payload, field, message = BROKEN[case]
    with pytest.raises(PayloadError, match=message) as refusal:
        validate(payload)
    assert refusal.value.field == field


def test_levels_of_the_next_block_may_be_lower() -> None:
    descending = replace(BLOCKS, levels=BLOCKS.levels.reshape(3, 7)[::-1].reshape(-1).copy())
    check_announcement(descending)
    validate(BITS)


def raw(size: int) -> npt.NDArray[np.uint8]:
    return np.zeros(size, np.uint8)


def add(sizes: npt.NDArray[np.int64], *, data: int = 8, tables: int = 32, out: int = 9) -> None:
    cpu.add_quantized(
        CodeFormat.SIGNED_4BIT,
        [raw(data)],
        np.zeros(tables, np.float32),
        np.zeros(out, np.float32),
        sizes=sizes,
    )


MISFITS: dict[str, tuple[Callable[[], None], str]] = {
    "short codes": (lambda: add(np.array([8, 1]), data=4), "data: "),
    "few tables": (lambda: add(np.array([8, 1]), tables=16), "tables: "),
    "short sum": (lambda: add(np.array([8, 2])), "out: "),
    "negative size": (lambda: add(np.array([10, -1])), "sizes: expected values"),
    "sizes that overflow": (lambda: add(np.array([2**62, 2**62])), "sizes: expected values"),
    "narrow sizes": (lambda: add(np.array([8, 1]).astype(np.int32).view()), "sizes: expected int64"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_machine_code_would_misread_is_refused(case: str) -> None:
    call, message = MISFITS[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_joined_payloads_are_blocks() -> None:
    parts = blocks(CodeFormat.SIGNED_2BIT, [3, 0, 700])
    (payload,) = join(parts)
    assert isinstance(payload, QuantizedPayload)
    assert payload.block_sizes().tolist() == [3, 0, 700]
    assert same_bits(decode(payload), decode(whole(CodeFormat.SIGNED_2BIT, parts)))
