"""The compiled kernels against the plain ones, bit for bit, and from many threads and processes at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import plain_codes
import pytest

from gradwire.compressors import CodeFormat, DenseFormat, pack_codes, set_threads, warm_up
from gradwire.compressors.kernels import cpu, threads
from gradwire.compressors.kernels.shared import CHUNK

Array = npt.NDArray[np.float32]

# Around the borders of a vector (16), a word (8, 16), a group of sums (128, 256), a block of magnitudes
# (4096), a prefetched page (8192, 16384) and a thread's chunk.
SMALL = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 255, 256, 257]
LARGE = [4095, 4096, 4097, 8191, 8192, 8193, 16385, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4097]
SIZES = [*SMALL, *LARGE]

SIGNED = [CodeFormat.SIGNED_4BIT, CodeFormat.SIGNED_2BIT]


def gradient(elements: int) -> Array:
    """All magnitudes from denormal to huge, both zeros, and values on the very thresholds."""
    rng = np.random.default_rng(elements)
    scales = rng.choice(np.array([1e-44, 1e-30, 1e-3, 0.1, 1.0, 7e4, 1e30]), elements)
    values: Array = (rng.standard_normal(elements) * scales).astype(np.float32)
    special = np.array([0.0, -0.0, 0.1, -0.1, 0.25, 3.4e38, -3.4e38, 65504, 65519, 65520, 6e-8], np.float32)
    special = np.append(special, levels_of(CodeFormat.SIGNED_4BIT))
    special = np.append(special, np.float32(-0.75) * levels_of(CodeFormat.SIGNED_4BIT))
    where = rng.integers(0, max(1, elements), min(elements, 40))
    values[where] = rng.choice(special, where.size)
    return values


def same_bits(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> bool:
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))


def levels_of(format: CodeFormat) -> Array:
    levels = [0.04, 0.07, 0.1, 0.2, 0.25, 0.4, 0.6] if format is CodeFormat.SIGNED_4BIT else [0.1]
    return np.array(levels, np.float32)


def unaligned(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A read-only copy at an odd address, as data inside a received message may be."""
    buffer = np.empty(data.size + 1, np.uint8)
    buffer[1:] = data
    buffer.flags.writeable = False
    return buffer[1:]


@pytest.mark.parametrize("elements", SIZES)
def test_magnitudes(elements: int) -> None:
    values = gradient(elements)
    values[::3] = 0.0
    assert cpu.magnitudes(values) == plain_codes.magnitudes(values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 100, 4999])
def test_the_total_is_not_finite_if_a_value_is_not(bad: float, position: int) -> None:
    values = np.zeros(5000, np.float32)
    values[position] = bad
    assert not np.isfinite(cpu.magnitudes(values).total)
    values[position] = np.finfo(np.float32).max
    assert np.isfinite(cpu.magnitudes(values).total)


def test_a_share_of_a_level_is_enough_to_send_it() -> None:
    """At three quarters of doubling levels that is the nearest one."""
    levels = (2.0 ** np.arange(7)).astype(np.float32)
    values = np.random.default_rng(0).uniform(-90, 90, 999).astype(np.float32)
    values = np.append(values, np.array([0.75, 0.76, -1.5, -1.51, 1.5, 64.0, -64.0], np.float32))
    left, data = np.zeros_like(values), np.empty(CodeFormat.SIGNED_4BIT.code_bytes(values.size), np.uint8)
    cpu.quantize(CodeFormat.SIGNED_4BIT, values, left, levels, data, share=0.75)
    sent = values - left
    assert sent[-7:].tolist() == [0.0, 1.0, -1.0, -2.0, 1.0, 64.0, -64.0]
    near = np.abs(values)[:, None] - levels
    large = np.abs(values) > 1
    assert np.array_equal(np.abs(left)[large], np.abs(near).min(axis=1)[large])


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("format", [DenseFormat.BFLOAT16, DenseFormat.FLOAT16])
def test_encode_dense(format: DenseFormat, elements: int) -> None:
    values = gradient(elements)
    residuals = [np.roll(values, 1) * np.float32(0.01) for _ in range(2)]
    datas = [np.zeros(elements * 2, np.uint8) for _ in range(2)]
    for kernels, residual, data in zip((cpu, plain_codes), residuals, datas, strict=True):
        kernels.encode_dense(format, values, residual, data)
    assert same_bits(*datas)
    assert same_bits(*residuals)
    assert cpu.all_finite(format, datas[0])


@pytest.mark.parametrize("format", [DenseFormat.BFLOAT16, DenseFormat.FLOAT16])
def test_every_16_bit_pattern_is_widened_exactly_and_rounds_to_itself(format: DenseFormat) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    wide, expected = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.float32)
    cpu.decode_dense(format, patterns.view(np.uint8), wide)
    plain_codes.decode_dense(format, patterns.view(np.uint8), expected)
    finite = np.isfinite(expected)
    assert same_bits(wide[finite], expected[finite])
    assert np.array_equal(np.isnan(wide), np.isnan(expected))
    residual = np.zeros(int(finite.sum()), np.float32)
    back = np.empty(residual.size, np.uint16)
    cpu.encode_dense(format, wide[finite], residual, back.view(np.uint8))
    # Negative zero is lost where a residual of zero is added to it; nothing else is.
    assert np.array_equal(back[wide[finite] != 0], patterns[finite & (expected != 0)])
    assert not residual.any()


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("format", DenseFormat)
def test_add_dense(format: DenseFormat, elements: int) -> None:
    datas: list[npt.NDArray[np.uint8]] = []
    for seed in range(3):
        data = np.zeros(elements * format.element_bytes, np.uint8)
        values = np.roll(np.clip(gradient(elements), -1e30, 1e30), seed)
        if format is DenseFormat.FLOAT32:
            data[:] = values.view(np.uint8)
        else:
            plain_codes.encode_dense(format, values, np.zeros_like(values), data)
        datas.append(unaligned(data))
    weights = np.array([0.1, 0.3, 0.77], np.float32)
    for keep in (False, True):
        sums = [np.full(elements, 0.3, np.float32) for _ in range(2)]
        for kernels, out in zip((cpu, plain_codes), sums, strict=True):
            kernels.add_dense(format, datas, weights, out, keep=keep)
        assert same_bits(*sums)


@pytest.mark.parametrize("format", SIGNED)
def test_the_forbidden_code_is_found_wherever_it_stands(format: CodeFormat) -> None:
    data = np.zeros(format.code_bytes(1000), np.uint8)
    allowed = sorted({*range(2**format.bits)} - {format.forbidden_code})
    codes = np.random.default_rng(0).choice(np.array(allowed, np.uint8), 1000)
    data[:] = pack_codes(format.bits, codes)
    assert not cpu.has_forbidden_code(format, unaligned(data))
    for position in (0, 1, 2, 3, 500, 998, 999):
        broken = codes.copy()
        broken[position] = format.forbidden_code
        assert cpu.has_forbidden_code(format, pack_codes(format.bits, broken))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", DenseFormat)
def test_a_value_that_is_not_finite_is_found_wherever_it_stands(format: DenseFormat, bad: float) -> None:
    for position in (0, 15, 16, 999):
        values = np.ones(1000, np.float32)
        values[position] = bad
        if format is DenseFormat.FLOAT32:
            data = values.view(np.uint8)
        elif format is DenseFormat.FLOAT16:
            data = values.astype(np.float16).view(np.uint8)
        else:
            data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        assert not cpu.all_finite(format, unaligned(data))


FOUR = CodeFormat.SIGNED_4BIT
HALF = DenseFormat.FLOAT16


def zeros(size: int) -> Array:
    return np.zeros(size, np.float32)


def raw(size: int) -> npt.NDArray[np.uint8]:
    return np.zeros(size, np.uint8)


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


strided: Array = zeros(64)[::2]
wide: Any = np.zeros(32)  # float64
levels_4, table_4 = levels_of(FOUR), FOUR.table(levels_of(FOUR))[None]
MISFITS: dict[str, tuple[Callable[[], object], str]] = {
    "strided": (lambda: cpu.magnitudes(strided), r"values: expected .*, got strided float32"),
    "float64": (lambda: cpu.magnitudes(wide), r"values: expected .*, got contiguous float64"),
    "two dimensions": (lambda: cpu.magnitudes(zeros(32).reshape(4, 8)), r"of shape \(4, 8\)"),
    "strided gradient": (lambda: cpu.quantize(FOUR, strided, zeros(32), levels_4, raw(16)), "gradient: "),
    "float64 gradient": (lambda: cpu.quantize(FOUR, wide, zeros(32), levels_4, raw(16)), "gradient: "),
    "strided residual": (lambda: cpu.quantize(FOUR, zeros(32), strided, levels_4, raw(16)), "residual: "),
    "short residual": (lambda: cpu.quantize(FOUR, zeros(32), zeros(31), levels_4, raw(16)), "residual: "),
    "fixed residual": (
        lambda: cpu.quantize(FOUR, zeros(32), read_only(zeros(32)), levels_4, raw(16)),
        "residual: expected a writeable array",
    ),
    "few levels": (lambda: cpu.quantize(FOUR, zeros(32), zeros(32), levels_4[:6], raw(16)), "levels: "),
    "strided levels": (lambda: cpu.quantize(FOUR, zeros(32), zeros(32), zeros(14)[::2], raw(16)), "levels: "),
    "short codes": (lambda: cpu.quantize(FOUR, zeros(32), zeros(32), levels_4, raw(12)), "data: "),
    "strided codes": (lambda: cpu.add_quantized(FOUR, [raw(32)[::2]], table_4, zeros(32)), "data: "),
    "few tables": (lambda: cpu.add_quantized(FOUR, [raw(16)] * 2, table_4, zeros(32)), "tables: "),
    "strided sum": (lambda: cpu.add_quantized(FOUR, [raw(16)], table_4, strided), "out: "),
    "few weights": (lambda: cpu.add_dense(HALF, [raw(64)] * 2, zeros(1), zeros(32)), "weights: "),
    "float64 sum": (lambda: cpu.add_dense(HALF, [raw(64)], zeros(1), wide), "out: "),
    "strided, to round": (lambda: cpu.encode_dense(HALF, strided, zeros(32), raw(64)), "gradient: "),
    "nothing to round": (
        lambda: cpu.encode_dense(DenseFormat.FLOAT32, zeros(32), zeros(32), raw(128)),
        "expected one of 16 bits, got float32",
    ),
    "short values": (lambda: cpu.decode_dense(HALF, raw(62), zeros(32)), "data: "),
    "half a word": (lambda: cpu.has_forbidden_code(FOUR, raw(18)), "data: "),
    "half a value": (lambda: cpu.all_finite(HALF, raw(63)), "data: "),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_machine_code_would_misread_is_refused(case: str) -> None:
    call, message = MISFITS[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_thread_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        set_threads(0)


def test_many_callers_at_once_do_not_disturb_each_other() -> None:
    values = gradient(2 * CHUNK + 77)
    expected = cpu.magnitudes(values)

    def call(index: int) -> bool:
        if index % 5 == 0:
            set_threads(1 + index % 3)  # resizing under way must not fail anyone's call
        return cpu.magnitudes(values) == expected

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(call, range(64)))


def test_kernels_work_in_a_forked_process() -> None:
    subprocess.run([sys.executable, str(Path(__file__).with_name("child.py"))], check=True, timeout=100)


def test_no_thread_is_started_by_importing() -> None:
    script = "import threading, gradwire.compressors; assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_helper_that_could_not_start_in_time_is_not_waited_for() -> None:
    release = threading.Event()
    busy = threads._pool.executor().submit(release.wait, 60)  # pyright: ignore[reportPrivateUsage]
    values = gradient(2 * CHUNK)
    assert cpu.magnitudes(values) == plain_codes.magnitudes(values)
    assert not busy.done()
    release.set()


def test_warm_up_can_be_called_again() -> None:
    warm_up()
