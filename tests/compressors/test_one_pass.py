"""One pass over many tensors: codes, what is left, and statistics, to the bits of the plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import plain_codes
import pytest
import torch
from test_blocks import SIZES
from test_kernels import SIGNED, gradient, levels_of, same_bits

from gradwire.compressors import CodeFormat, QuantizedPayload, decode, set_threads, validate
from gradwire.compressors.kernels import cpu, devices
from gradwire.compressors.kernels.shared import CHUNK, FLOAT32_MAX, SUM_BLOCK

Array = npt.NDArray[np.float32]

FOUR = CodeFormat.SIGNED_4BIT


def gradients_of(sizes: Sequence[int]) -> list[Array]:
    """At odd addresses, one in three values zero."""
    found: list[Array] = []
    for place, size in enumerate(sizes):
        memory = np.zeros(size + 3, np.float32)
        memory[3:] = np.roll(gradient(size), place)
        memory[3::3] = 0.0
        found.append(memory[3:])
    return found


def residual_of(elements: int) -> Array:
    return np.roll(gradient(elements), 1) * np.float32(0.01)


def all_levels(format: CodeFormat, blocks: int) -> Array:
    """Other ones for each block."""
    scales = np.linspace(0.5, 1.5, blocks, dtype=np.float32)
    levels: Array = (scales[:, None] * levels_of(format)).reshape(-1)
    return levels


def check(
    format: CodeFormat,
    gradients: Sequence[Array],
    residual: Array,
    *,
    in_place: bool,
    levels: Array | None = None,
    share: float = 1.0,
) -> None:
    if levels is None:
        levels = all_levels(format, len(gradients))
    size = sum(format.code_bytes(gradient.size) for gradient in gradients)
    results: list[tuple[bytes, ...]] = []
    for kernels in (cpu, plain_codes):
        before = residual.copy()
        # At a multiple of 64 bytes, where it may go past the cache.
        memory = np.full(residual.size + 16, 7.0, np.float32)
        first = -(memory.ctypes.data // 4) % 16
        left = before if in_place else memory[first : first + residual.size]
        data = np.full(size, 0xFF, np.uint8)
        totals, nonzero = kernels.quantize_blocks(format, gradients, before, left, levels, data, share=share)
        assert in_place or same_bits(before, residual)
        assert totals.dtype == np.float64
        results.append((left.tobytes(), data.tobytes(), totals.tobytes(), nonzero.tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize("stream", [0, 1 << 30])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("format", SIGNED)
def test_quantize_blocks(
    format: CodeFormat, name: str, in_place: bool, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "STREAM_ELEMENTS", stream)
    check(format, gradients_of(SIZES[name]), residual_of(sum(SIZES[name])), in_place=in_place)


CASES: dict[str, Array] = {
    "zeros": np.zeros(40, np.float32),
    "negative zeros": np.full(40, -0.0, np.float32),
    "constant": np.full(40, 0.25, np.float32),
    "negative constant": np.full(40, -0.25, np.float32),
    "on a level": np.tile(np.array([0.1, -0.1, 0.04, -0.04, 0.6, -0.6], np.float32), 7),
    "tiny": np.full(40, 1e-45, np.float32),
    "huge": np.tile(np.array([FLOAT32_MAX, -FLOAT32_MAX], np.float32), 20),
}


@pytest.mark.parametrize("owed", CASES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", SIGNED)
def test_special_values(format: CodeFormat, case: str, owed: str) -> None:
    for share in (1.0, 0.75) if format is FOUR else (1.0,):
        check(format, [CASES[case][:40]] * 2, np.tile(CASES[owed][:40], 2), in_place=True, share=share)


SMALLEST = float(np.finfo(np.float32).smallest_normal)
UNITS = [SMALLEST / 4, SMALLEST / 2, SMALLEST, 1.5 * SMALLEST, 1e-30, 0.04, 0.75, 3e3, 2.0**120, 2.6e36]


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("unit", UNITS)
def test_levels_each_double_the_next(unit: float, share: float) -> None:
    """Levels are those of `running`. Values lie at each level, next to it, and between."""
    levels = (unit * 2.0 ** np.arange(7)).astype(np.float32)
    assert np.isfinite(levels).all()
    at = np.float32(share) * levels
    near = [np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(np.inf)), levels]
    values = np.concatenate([*near, levels * np.float32(1.4), gradient(60)])
    values = np.concatenate([values, -values, np.array([0.0, -0.0, 1e-45], np.float32)])
    check(
        FOUR,
        [values, values[:50]],
        np.zeros(values.size + 50, np.float32),
        in_place=False,
        levels=np.tile(levels, 2),
        share=share,
    )


def test_some_blocks_with_levels_that_double() -> None:
    doubling = (0.01 * 2.0 ** np.arange(7)).astype(np.float32)
    levels = np.concatenate([doubling, levels_of(FOUR), doubling, np.nextafter(doubling, np.float32(1))])
    sizes = [5000, 77, 300, 4100]
    for share in (1.0, 0.75):
        check(FOUR, gradients_of(sizes), residual_of(sum(sizes)), in_place=True, levels=levels, share=share)


def test_the_number_of_threads_does_not_show() -> None:
    gradients = gradients_of([300, CHUNK - 7, 2 * CHUNK + 5, 4096])
    residual = residual_of(sum(each.size for each in gradients))
    for threads in (1, 2, 5):
        set_threads(threads)
        check(CodeFormat.SIGNED_4BIT, gradients, residual, in_place=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_total_says_which_gradient_is_not_finite_and_the_residual_is_still_there(bad: float) -> None:
    gradients = gradients_of([100, SUM_BLOCK + 50, 70])
    gradients[1][SUM_BLOCK + 45] = bad
    residual = residual_of(SUM_BLOCK + 220)
    before, left = residual.copy(), np.zeros_like(residual)
    format = CodeFormat.SIGNED_4BIT
    data = np.zeros(sum(format.code_bytes(each.size) for each in gradients), np.uint8)
    totals, _ = cpu.quantize_blocks(format, gradients, residual, left, all_levels(format, 3), data)
    assert np.isfinite(totals).tolist() == [True, False, True]
    assert same_bits(residual, before)


@pytest.mark.parametrize("format", SIGNED)
def test_without_a_residual_nothing_but_codes_is_written(
    monkeypatch: pytest.MonkeyPatch, format: CodeFormat
) -> None:
    monkeypatch.setattr(cpu, "STREAM_ELEMENTS", 0)
    gradients = gradients_of([SUM_BLOCK + 5])
    elements, levels = gradients[0].size, all_levels(format, 1)
    memory = np.full(elements + 64, 7, np.float32)
    at = -memory.ctypes.data % 64 // 4
    before, after = np.empty(0, np.float32), memory[at:][:0]  # empty, where a pass may bypass the cache
    data, alone = (np.empty(format.code_bytes(elements), np.uint8) for _ in range(2))

    cpu.quantize_blocks(format, gradients, before, after, levels, data)

    assert (memory == 7).all()
    plain_codes.quantize(format, gradients[0], np.zeros(elements, np.float32), levels, alone)
    assert data.tobytes() == alone.tobytes()


def test_torch_tensors() -> None:
    format, gradients = CodeFormat.SIGNED_4BIT, gradients_of([100, 9, 0, 5000])
    residual, levels = residual_of(5109), all_levels(format, 4)
    left, expected = torch.empty(5109), np.empty(5109, np.float32)
    data, totals, nonzero = devices.quantize_blocks(
        format, [torch.from_numpy(each) for each in gradients], torch.from_numpy(residual), left, levels
    )
    codes = np.empty_like(data)
    found = plain_codes.quantize_blocks(format, gradients, residual, expected, levels, codes)
    assert same_bits(data, codes)
    assert same_bits(left.numpy(), expected)
    assert same_bits(totals, found[0])
    assert same_bits(nonzero, found[1])
    payload = QuantizedPayload(
        format=format,
        elements=5109,
        levels=levels,
        sizes=np.array([each.size for each in gradients], np.int64),
        data=data,
    )
    validate(payload)
    sums = np.concatenate(gradients) + residual
    assert np.allclose(decode(payload) + expected, np.clip(sums, -FLOAT32_MAX, FLOAT32_MAX))


memory: Array = np.zeros(100, np.float32)


def call(
    *,
    format: CodeFormat = FOUR,
    gradients: Sequence[Array] = (memory[:40], memory[40:50]),
    residual: Array = memory[:50],
    left: Array = memory[:50],
    levels: int = 14,
    data: int = 28,
) -> None:
    cpu.quantize_blocks(
        format, gradients, residual, left, np.ones(levels, np.float32), np.zeros(data, np.uint8)
    )


MISFITS: dict[str, tuple[Callable[[], None], str]] = {
    "votes": (lambda: call(format=CodeFormat.VOTE), "format: expected signed codes"),
    "strided": (lambda: call(gradients=[memory[:80:2], memory[:10]]), "gradient: .* got strided"),
    "short residual": (lambda: call(residual=memory[:49]), "residual: "),
    "short rest": (lambda: call(left=memory[:49]), "left: "),
    "in each other's way": (lambda: call(left=memory[1:51]), "left: expected the same memory as residual"),
    "levels of one": (lambda: call(levels=7), "levels: "),
    "short codes": (lambda: call(data=24), "data: "),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_machine_code_would_misread_is_refused(case: str) -> None:
    misfit, message = MISFITS[case]
    with pytest.raises(ValueError, match=message):
        misfit()


def test_torch_tensors_of_another_layout_or_type_are_refused() -> None:
    residual, levels = torch.zeros(50), np.ones(7, np.float32)
    for odd in (torch.zeros(100)[::2], torch.zeros(50).double()):
        with pytest.raises(ValueError, match="gradient: expected contiguous"):
            devices.quantize_blocks(FOUR, [odd], residual, residual, levels)
