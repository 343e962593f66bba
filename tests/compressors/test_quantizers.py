"""Quantizers, each against what its paper says: votes, means of both sides, rounding at random."""

from __future__ import annotations

import dataclasses
import math
import re
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gradwire.common.spec import SpecError
from gradwire.compressors import (
    CodeFormat,
    LinearPayload,
    Payload,
    PayloadError,
    QuantizedPayload,
    Random,
    StepContext,
    TensorSpec,
    create,
    create_bare,
    decode,
    reduce_payloads,
    validate,
)

Array = npt.NDArray[np.float32]


def bare(spec: str, values: Array, seed: int = 0) -> Payload:
    """One step without feedback."""
    compressor = create_bare(spec)
    state = compressor.init(TensorSpec(name="w", shape=values.shape))
    context = StepContext(samples=1, version=0, random=Random((seed,)))
    payload, _ = compressor.compress(torch.from_numpy(values), state, context)
    validate(payload)
    return payload


def quantized(payload: Payload) -> QuantizedPayload:
    assert isinstance(payload, QuantizedPayload)
    return payload


def votes(*rows: Sequence[float]) -> list[Payload]:
    return [bare("signsgd", np.array(row, np.float32)) for row in rows]


def test_signsgd_is_decided_by_the_majority() -> None:
    """Each row is a worker; a zero votes for +, and the levels are 1, 2, 3, 4, 5."""
    rows = [[1, 1, 1, -1], [2, 2, -2, -2], [3, -3, -3, -3], [-4, -4, -4, 4], [5, 5, 5, 5]]
    expected = {1: [1, 1, 1, -1], 3: [1, 1, -1, -1], 4: [1, 0, -1, -1], 5: [1, 1, -1, -1]}
    for workers, signs in expected.items():
        payloads, out = votes(*rows[:workers]), np.empty(4, np.float32)
        reduce_payloads(payloads, [1 / workers] * workers, out)
        level = np.mean(range(1, workers + 1))
        np.testing.assert_allclose(out, np.array(signs) * level, rtol=1e-6)
    zero = bare("signsgd:level=unit", np.array([0.0, -0.0, -1e-45, 2.0], np.float32))
    assert decode(zero).tolist() == [1, 1, -1, 1]


def test_samples_weigh_the_size_of_a_majority_and_not_who_has_it() -> None:
    payloads, out = votes([1, -1], [-2, 2], [-3, 3]), np.empty(2, np.float32)
    reduce_payloads(payloads, [0.75, 0.125, 0.125], out)
    assert out.tolist() == [-1.375, 1.375]


def test_signsgd_sends_the_mean_magnitude_or_one() -> None:
    values = np.array([0.5, -1.5, 0.0, 4.0], np.float32)
    assert quantized(bare("signsgd", values)).levels.tolist() == [1.5]
    assert quantized(bare("signsgd:level=unit", values)).levels.tolist() == [1.0]
    assert decode(bare("signsgd", values)).tolist() == [1.5, -1.5, 1.5, 1.5]


def test_1bit_sends_the_means_of_both_sides() -> None:
    values = np.array([1, 2, 0, -4, -8, -0.0, 5], np.float32)
    assert decode(bare("1bit", values)).tolist() == pytest.approx([1.6, 1.6, 1.6, -6, -6, 1.6, 1.6])
    assert decode(bare("1bit", -np.abs(values) - 1)).tolist() == pytest.approx([-27 / 7] * 7)


def block_signs(total: Array, block: int) -> tuple[Array, Array]:
    """The formula: scales, float32, and decoded values."""
    blocks = [total[start : start + block] for start in range(0, total.size, block)]
    scales = [np.float32(math.fsum(np.abs(each).tolist()) / each.size) for each in blocks]
    pairs = zip(blocks, scales, strict=True)
    sent = [np.where(each >= 0, scale, -scale).astype(np.float32) for each, scale in pairs]
    return np.array(scales, np.float32), np.concatenate([np.empty(0, np.float32), *sent])


BLOCK_SIZES = [0, 1, 2, 31, 32, 33, 4095, 4096, 4097, 8191, 8192, 8193, 12_345]
SPREADS = {"normal": 1.0, "huge": 1e38, "tiny": 1e-40, "zeros": 0.0}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("elements", BLOCK_SIZES)
def test_1bit_by_blocks_sends_signs_and_the_mean_magnitude_of_each_block(elements: int, spread: str) -> None:
    compressor = create("1bit:block=4096")
    state = compressor.init(TensorSpec(name="w", shape=(elements,)))
    rng, residual = np.random.default_rng(elements), np.zeros(elements, np.float32)
    for step in range(4):
        values = (rng.standard_normal(elements).clip(-3, 3) * SPREADS[spread]).astype(np.float32)
        with np.errstate(over="ignore"):
            total = np.clip(values + residual, -np.finfo(np.float32).max, np.finfo(np.float32).max)
        scales, sent = block_signs(total, 4096)
        context = StepContext(samples=1, version=step, random=Random((step,)))
        payload, state = compressor.compress(torch.from_numpy(values), state, context)
        validate(payload)
        assert isinstance(payload, LinearPayload)
        assert payload.data.size == 4 * -(-elements // 4096) + 4 * -(-elements // 32)
        # The order in which magnitudes are added may move a scale by its last bit.
        np.testing.assert_allclose(payload.scales(), scales, rtol=2e-7, atol=1.5e-45)
        decoded = decode(payload)
        np.testing.assert_allclose(decoded, sent, rtol=2e-7, atol=1.5e-45)
        residual = (total - decoded).astype(np.float32)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38, 1e-45, -1e-40])
def test_1bit_by_blocks_sends_a_constant_exactly(value: float) -> None:
    values = np.full(5000, value, np.float32)
    assert np.array_equal(decode(bare("1bit:block=4096", values)), values)


def test_1bit_by_blocks_does_not_let_a_large_block_drown_a_small_one() -> None:
    values = np.random.default_rng(0).standard_normal(8192).astype(np.float32)
    values[4096:] *= 1e-3
    errors = [decode(bare(spec, values)) - values for spec in ("1bit", "1bit:block=4096")]
    whole, blocks = (np.linalg.norm(error[4096:]) / np.linalg.norm(values[4096:]) for error in errors)
    # Of a normal distribution a sign and its mean leave sqrt(1 - 2 / pi).
    assert blocks == pytest.approx(math.sqrt(1 - 2 / math.pi), rel=0.05)
    assert whole > 100


def test_blocks_of_1bit_are_added_with_weights_in_rank_order() -> None:
    rng = np.random.default_rng(1)
    given = [rng.standard_normal(10_000).astype(np.float32) for _ in range(3)]
    payloads, out = [bare("1bit:block=4096", each) for each in given], np.empty(10_000, np.float32)
    weights = np.array([0.5, 0.3, 0.2], np.float32)
    reduce_payloads(payloads, weights.tolist(), out)
    expected = np.zeros(10_000, np.float32)
    for weight, payload in zip(weights, payloads, strict=True):
        expected += weight * decode(payload)
    assert out.tobytes() == expected.tobytes()


SIGNS = bare("1bit:block=4096", np.linspace(-1, 1, 5000, dtype=np.float32))
assert isinstance(SIGNS, LinearPayload)
PADDED = np.concatenate([SIGNS.data[:-1], np.array([0x80], np.uint8)])


def scaled(scale: float) -> LinearPayload:
    """The same signs, with another scale for the second block."""
    assert isinstance(SIGNS, LinearPayload)
    scales = np.array([1, scale], np.float32).view(np.uint8)
    return dataclasses.replace(SIGNS, data=np.concatenate([scales, SIGNS.data[8:]]))


BAD_SIGNS = {
    "bits": (dataclasses.replace(SIGNS, bits=0), "bits: expected 1 to 8, got 0"),
    "bucket": (
        dataclasses.replace(SIGNS, bucket=4100),
        "bucket: expected a multiple of 32 from 32 to 16777216, got 4100",
    ),
    "size": (
        dataclasses.replace(SIGNS, data=SIGNS.data[:-4]),
        "data: expected 636 bytes for 5000 elements, got 632 bytes",
    ),
    **{
        f"a scale of {scale}": (scaled(scale), "scales: expected finite values from 0 to 3.4")
        for scale in (-1.0, math.inf, math.nan)
    },
    "padding": (dataclasses.replace(SIGNS, data=PADDED), "data: expected zero padding after the last code"),
}


@pytest.mark.parametrize("case", BAD_SIGNS)
def test_bad_payloads_of_signs_are_refused_by_field(case: str) -> None:
    payload, message = BAD_SIGNS[case]
    with pytest.raises(PayloadError, match=message):
        validate(payload)


@pytest.mark.parametrize("block", [-4096, 1, 33, 4097, (1 << 24) + 32])
def test_a_block_that_no_payload_can_have_is_refused(block: int) -> None:
    with pytest.raises(SpecError, match=rf"'1bit': block: expected 0, or a multiple of 32 .*, got {block}"):
        create(f"1bit:block={block}")
    assert decode(bare("1bit:block=0", np.ones(3, np.float32))).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("spec", "step"),  # between two neighbouring values, in units of the largest
    [("terngrad:sigmas=1000", 1.0), ("qsgd", 1 / 7), ("qsgd:bits=2", 1.0), ("qsgd:bits=8", 1 / 127)],
)
def test_random_rounding_has_no_bias(spec: str, step: float) -> None:
    base = np.array([*np.linspace(-0.99, 0.99, 30), 1.0, 0.0], np.float32) * 3
    repeats, draws = 128, 40
    sums = np.zeros(32)
    for seed in range(draws):
        values = decode(bare(spec, np.tile(base, repeats), seed))
        sums += values.reshape(repeats, 32).sum(axis=0, dtype=np.float64)
        # One of the two neighbours, never farther away.
        assert (np.abs(values.reshape(repeats, 32) - base) < 3 * step * 1.0001).all()
    error = sums / (repeats * draws) - base
    assert np.abs(error).max() < 5 * (3 * step / 2) / math.sqrt(repeats * draws)
    assert error[31] == 0  # zeros stay zeros


def test_qsgd_by_euclidean_norm_spreads_its_levels_up_to_that() -> None:
    payload = bare("qsgd:norm=l2,bucket=64", np.tile(np.array([3, 4, 0, 0], np.float32), 32))
    assert isinstance(payload, LinearPayload)
    assert payload.scales().tolist() == pytest.approx([20 / 7] * 2)


def test_terngrad_clips_at_two_and_a_half_root_mean_squares() -> None:
    values = np.array([100.0] + [1.0] * 399, np.float32)
    level = 2.5 * math.sqrt((100**2 + 399) / 400)
    payload = quantized(bare("terngrad", values))
    assert payload.format is CodeFormat.SIGNED_2BIT
    assert payload.levels[0] == pytest.approx(level)
    assert decode(payload)[0] == payload.levels[0]
    assert quantized(bare("terngrad:sigmas=1000", values)).levels[0] == 100


def test_8bit_is_off_by_half_a_step_of_its_bucket_at_most() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    values[4096:8192] *= 1000
    error = np.abs(decode(bare("8bit", values)) - values)
    for start in range(0, 10_000, 4096):
        part = slice(start, start + 4096)
        assert error[part].max() <= np.abs(values[part]).max() / 254 * 1.0001


def test_rows_without_gradient_move_as_the_page_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rows.py", "4bit", "1bit:block=4096,decay=0.97", "signsgd"])
    runpy.run_path(str(Path(__file__).with_name("rows.py")))
    moved = [float(each) for each in re.findall(r"without gradient ([\d.]+)", capsys.readouterr().out)]
    assert moved == [0.0, pytest.approx(0.0027, rel=0.2), pytest.approx(1.2, rel=0.1)]
