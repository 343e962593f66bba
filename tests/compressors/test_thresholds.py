"""`4bit` and `2bit` on examples worked by hand, and what the papers say in prose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.compressors import CodeFormat, QuantizedPayload, Random, StepContext, TensorSpec, create, decode
from gradwire.compressors.feedback import FeedbackState
from gradwire.compressors.four_bit import GROUP_1, GROUP_2, GROUP_3, choose_group


def context(samples: int = 1, version: int = 0) -> StepContext:
    return StepContext(samples=samples, version=version, random=Random((0,)))


def compress(
    spec: str, *steps: list[float], samples: int = 1
) -> tuple[list[QuantizedPayload], list[list[float]]]:
    """Payloads and residuals after each step."""
    compressor = create(spec)
    state = compressor.init(TensorSpec(name="w", shape=(len(steps[0]),)))
    payloads: list[QuantizedPayload] = []
    residuals: list[list[float]] = []
    for step, values in enumerate(steps):
        payload, state = compressor.compress(torch.tensor(values), state, context(samples, step))
        assert isinstance(payload, QuantizedPayload)
        assert isinstance(state, FeedbackState)
        payloads.append(payload)
        residuals.append([float(value) for value in state.residual])
    return payloads, residuals


# Mean magnitude 0.21, so the first group: 0.04 0.07 0.1 0.2 0.3 0.4 0.6.
GRADIENT = [0.35, -0.35, 0.05, -0.04, 0.0401, 0.7, 0.0, -0.15]
#   codes:   0xD    0x5   0x9    0x0     0x9  0xF  0x0    0x3     the even index in the low nibble
PACKED = [0x5D, 0x09, 0xF9, 0x30]
SENT = [0.3, -0.3, 0.04, 0.0, 0.04, 0.6, 0.0, -0.1]


def test_4bit_by_hand() -> None:
    (payload,), (residual,) = compress("4bit:levels=groups", GRADIENT)
    assert payload.format is CodeFormat.SIGNED_4BIT
    assert payload.levels.tolist() == np.array(GROUP_1, np.float32).tolist()
    assert payload.data.tolist() == PACKED
    assert decode(payload).tolist() == np.array(SENT, np.float32).tolist()
    assert residual == pytest.approx([0.05, -0.05, 0.01, -0.04, 0.0001, 0.1, 0.0, -0.05], abs=1e-7)


def test_4bit_sends_the_threshold_below_and_never_the_one_that_is_met() -> None:
    """Strictly greater: a value on a threshold takes the next lower one."""
    on = np.array(GROUP_1, np.float32)
    above = np.nextafter(on, np.float32(np.inf))
    (payload,), _ = compress("4bit:levels=group1", [*on.tolist(), *above.tolist(), *(-above).tolist()])
    values = decode(payload)
    assert values[:7].tolist() == [0.0, *on[:-1].tolist()]
    assert values[7:14].tolist() == on.tolist()
    assert values[14:].tolist() == (-on).tolist()


def test_4bit_adds_what_was_left_to_the_next_gradient() -> None:
    (_, second), residuals = compress("4bit:levels=group1", [0.03, -0.03, 0.5], [0.03, -0.03, 0.05])
    assert decode(second).tolist() == np.array([0.04, -0.04, 0.1], np.float32).tolist()
    assert residuals[1] == pytest.approx([0.02, -0.02, 0.05])


def test_the_last_word_is_padded_with_zero() -> None:
    (payload,), _ = compress("4bit:levels=group1", [-1.0] * 9)
    assert payload.data.tolist() == [0x77] * 4 + [0x07, 0, 0, 0]


@pytest.mark.parametrize(
    ("magnitude", "group"),
    [(0.0, GROUP_3), (0.099, GROUP_3), (0.1, GROUP_1), (0.5, GROUP_1), (0.501, GROUP_2), (1e30, GROUP_2)],
)
def test_the_group_follows_the_mean_magnitude(magnitude: float, group: tuple[float, ...]) -> None:
    assert choose_group(magnitude) is group


def test_the_group_is_chosen_by_the_gradient_and_not_by_the_residual() -> None:
    (first, second), _ = compress("4bit:levels=groups", [3.0, -3.0], [0.01, -0.01])
    assert first.levels.tolist() == np.array(GROUP_2, np.float32).tolist()
    assert second.levels.tolist() == np.array(GROUP_3, np.float32).tolist()


@pytest.mark.parametrize("spec", ["4bit:levels=groups", "4bit:levels=group1", "2bit"])
def test_the_scale_makes_a_mean_gradient_look_like_a_sum(spec: str) -> None:
    """The erratum: the gradient of 32 samples, as a mean, gets the codes of the sum. 32 divides exactly."""
    (by_sum,), (left_of_sum,) = compress(spec, GRADIENT, samples=1)
    (by_mean,), (left_of_mean,) = compress(spec, [value / 32 for value in GRADIENT], samples=32)
    assert by_mean.data.tolist() == by_sum.data.tolist()
    assert (by_mean.levels * 32).tolist() == by_sum.levels.tolist()
    assert (np.array(left_of_mean) * 32).tolist() == left_of_sum


@pytest.mark.parametrize("spec", ["4bit:levels=groups,scale=mean", "2bit:scale=mean"])
def test_without_the_scale_thresholds_are_as_printed(spec: str) -> None:
    (one,), _ = compress(spec, GRADIENT, samples=1)
    (many,), _ = compress(spec, GRADIENT, samples=32)
    assert one.levels.tolist() == many.levels.tolist()


def test_running_levels_follow_the_gradient() -> None:
    gradient = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    steps = gradient.tolist(), (gradient * 1000).tolist(), gradient.tolist()
    payloads, _ = compress("4bit:levels=running", *steps)
    small, _ = compress("4bit:levels=running", (gradient / 1024).tolist())
    assert small[0].data.tolist() == payloads[0].data.tolist()  # no absolute scale: same codes at any
    assert payloads[0].levels[1] == pytest.approx(np.abs(gradient).mean())
    # A step's own gradient is not in its levels, so that one pass can find both.
    assert payloads[1].levels[1] == payloads[0].levels[1]
    # The mean of two steps: weights 0.9 and 1, made to add up to one.
    expected = np.abs(gradient).mean() * (0.9 + 1000) / 1.9
    assert payloads[2].levels[1] == pytest.approx(expected)


def test_running_levels_are_the_nearest_so_that_what_is_left_has_either_sign() -> None:
    """Cut off towards zero, what is left would have the sign of the gradient, and Adam loses by that."""
    gradient = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    (payload,), (left,) = compress("4bit", gradient.tolist())
    within = np.abs(gradient) > payload.levels[0]
    rest, level = np.array(left)[within], decode(payload)[within]
    assert (np.abs(rest) <= np.abs(level) / 2).all()
    assert 0.3 < (np.sign(rest) != np.sign(gradient[within])).mean() < 0.7


def test_running_levels_do_not_starve_the_rows_of_an_embedding() -> None:
    """32 rows of 50 000 are touched: what they get in one step is most of their gradient, not 1 % of it."""
    gradient = np.zeros((50_000, 16), np.float32)
    gradient[:32] = np.random.default_rng(0).standard_normal((32, 16))
    compressor = create("4bit:levels=running")
    state = compressor.init(TensorSpec(name="embedding.weight", shape=gradient.shape))
    payload, _ = compressor.compress(torch.from_numpy(gradient.reshape(-1)), state, context())
    sent = decode(payload).reshape(gradient.shape)
    assert not sent[32:].any()
    assert np.abs(sent[:32]).sum() > 0.6 * np.abs(gradient[:32]).sum()


def test_running_levels_are_the_mean_of_the_elements_that_are_not_zero() -> None:
    payloads, _ = compress("4bit", [1.0, -3.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, 8.0, 0.0], [0.0] * 4)
    # One element of 8 against two of 2 from the step before; the step of zeros between them does not count.
    following = (0.9 * 4 + 8) / (0.9 * 2 + 1)
    assert [payload.levels[1] for payload in payloads] == pytest.approx([2, 2, 2, following])


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-30, 1e30, 3.4e38])
def test_running_levels_are_valid_at_any_magnitude(value: float) -> None:
    (payload,), _ = compress("4bit:levels=running", [value, -value])
    assert np.isfinite(payload.levels).all()
    assert payload.levels[0] > 0
    assert (np.diff(payload.levels) > 0).all()


def test_2bit_by_hand_as_in_mxnet() -> None:
    """MXNet: at least the threshold 11, at most its negative 10, otherwise 00; the rest is kept."""
    payloads, residuals = compress(
        "2bit:scale=mean", [0.5, -0.5, 0.25, -0.75, 0.0, 1.25], [0.0, 0.0, 0.25, -0.25, 0.49, 0.0]
    )
    # Lowest index in the lowest bits: 10 00 10 11, then .. .. 11 00.
    assert payloads[0].data.tolist() == [0b10_00_10_11, 0b00_00_11_00, 0, 0]
    assert decode(payloads[0]).tolist() == [0.5, -0.5, 0.0, -0.5, 0.0, 0.5]
    assert residuals[0] == [0.0, 0.0, 0.25, -0.25, 0.0, 0.75]
    assert decode(payloads[1]).tolist() == [0.0, 0.0, 0.5, -0.5, 0.0, 0.5]
    assert residuals[1] == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.49, 0.25])


def test_2bit_threshold_is_an_option() -> None:
    (payload,), _ = compress("2bit:threshold=0.25,scale=mean", [0.25, 0.24])
    assert payload.levels.tolist() == [0.25]
    assert decode(payload).tolist() == [0.25, 0.0]
