"""Quantizers, each against what its paper says: votes, means of both sides, rounding at random."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gradwire.compressors import (
    CodeFormat,
    LinearPayload,
    Payload,
    QuantizedPayload,
    Random,
    StepContext,
    TensorSpec,
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
