"""The contract of every compressor in the registry, independent of its algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gradwire.compressors import (
    Compressor,
    LayerRule,
    ModelCompressor,
    Payload,
    Random,
    StepContext,
    TensorSpec,
    create,
    decode,
    parse_compressor,
    payload_bytes,
    validate,
)
from gradwire.compressors.feedback import ErrorFeedback, FeedbackState
from gradwire.compressors.four_bit import FourBit, RunningMagnitude
from gradwire.compressors.registry import BUILT_IN

VARIANTS = [
    "4bit:levels=group1",
    "4bit:levels=groups",
    "4bit:levels=groups,scale=mean",
    "2bit:threshold=0.01,scale=mean",
    "1bit:block=4096",
    "1bit:block=32,decay=1",
    "qsgd:bits=2,feedback=on",
    "qsgd:bits=8,norm=l2,bucket=64,feedback=on",
    "topk:ratio=3,values=float32",
    "topk:ratio=10,values=4bit",
    "topk:ratio=10,values=1bit",
    "gcac:ratio=2,values=8bit",
    "randk:ratio=4,values=fp16",
    "randk:ratio=4,draw=uniform",
    "krngc:ratio=5,momentum=0",
    "krngc:reading=literal,momentum=0",
    "threshold:tau=0.5,scale=mean",
    "topk:ratio=10,decay=1,delay=2",
]
# Compressors with bases need those of a job: `test_bases` and the files of each.
ALONE = [name for name in BUILT_IN if not parse_compressor(name).shared]
LOSSY = [name for name in ALONE if BUILT_IN[name].wrapping is not None]
# Momentum adds what was never in a gradient; it has tests of its own.
WITH_FEEDBACK = ["none", *(f"{name}:feedback=on,momentum=0" for name in LOSSY), *VARIANTS]
WITHOUT_FEEDBACK = [f"{name}:feedback=off" for name in LOSSY]
SPECS = [*ALONE, *VARIANTS, *WITHOUT_FEEDBACK]
SIZES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 127, 128, 129, 1000, 4099]
FLOAT32_MAX = float(np.finfo(np.float32).max)

Array = npt.NDArray[np.float32]


def context(step: int = 0, samples: int = 32) -> StepContext:
    return StepContext(samples=samples, version=step, random=Random((0, 0, step)), shared=Random((step,)))


def gradient(elements: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elements, generator=generator) * 0.02


def compress(compressor: Compressor, gradients: list[torch.Tensor]) -> tuple[list[Payload], object]:
    """Some steps in a row; every payload is checked on the way."""
    state = compressor.init(TensorSpec(name="w", shape=(gradients[0].numel(),)))
    payloads: list[Payload] = []
    for step, values in enumerate(gradients):
        payload, state = compressor.compress(values, state, context(step))
        validate(payload)
        assert payload.elements == values.numel()
        assert payload.data.size == payload_bytes(payload)
        payloads.append(payload)
    return payloads, state


@pytest.mark.parametrize("spec", SPECS)
def test_any_size_gives_a_valid_payload_that_decodes_to_that_size(spec: str) -> None:
    for elements in SIZES:
        payloads, _ = compress(create(spec), [gradient(elements, seed) for seed in range(3)])
        for payload in payloads:
            values = decode(payload)
            assert values.dtype == np.float32
            assert values.shape == (elements,)
            assert np.isfinite(values).all(), elements


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_inputs_give_the_same_bits_whatever_torchs_defaults_are(
    spec: str, other_defaults: Callable[[], None]
) -> None:
    given = [gradient(1000, seed) for seed in range(3)]

    def steps() -> list[Payload]:
        whole = ModelCompressor([TensorSpec(name="w", shape=(1000,))], spec, LayerRule(), 0, 0)
        found, _ = compress(create(spec), given)
        for step, one in enumerate(given):
            found += whole.compress([one], 1, version=step)
        return found

    expected = steps()
    other_defaults()
    for one, other in zip(steps(), expected, strict=True):
        assert np.array_equal(one.data, other.data)


@pytest.mark.parametrize("spec", SPECS)
def test_the_gradient_is_not_written_to(spec: str) -> None:
    original = gradient(1000)
    given = original.clone()
    compress(create(spec), [given, given])
    assert torch.equal(given, original)


@pytest.mark.parametrize("odd", [gradient(2000)[::2], gradient(1000).double()], ids=["strided", "float64"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_gradient_of_another_layout_or_type_is_refused_or_read_right(spec: str, odd: torch.Tensor) -> None:
    (expected,), _ = compress(create(spec), [odd.float().contiguous()])
    try:
        (payload,), _ = compress(create(spec), [odd])
    except ValueError:
        return
    assert np.array_equal(payload.data, expected.data)


@pytest.mark.parametrize("spec", SPECS)
def test_a_payload_does_not_change_when_the_gradient_does(spec: str) -> None:
    values = gradient(1000)
    payloads, _ = compress(create(spec), [values])
    before = payloads[0].data.copy()
    values.fill_(7.0)
    assert np.array_equal(payloads[0].data, before)


CASES: dict[str, Array] = {
    "ordinary": gradient(4099).numpy(),
    "zero": np.zeros(33, np.float32),
    "constant": np.full(33, 0.25, np.float32),
    "negative constant": np.full(33, -3.0, np.float32),
    "huge": np.array([1e30, -1e30, 1e-3, 0.0, 3.0], np.float32),
    "largest": np.array([FLOAT32_MAX, -FLOAT32_MAX, 1.0], np.float32),
    "tiny": np.array([1e-30, -1e-30, 0.0], np.float32),
    "denormal": np.array([1e-45, -1e-45, 1e-40], np.float32),
    "negative zero": np.array([-0.0, 0.0], np.float32),
    "mixed": np.array([1e-30, 1e30, -0.5, 65504.0, 65520.0, 1e-8], np.float32),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spec", WITH_FEEDBACK)
def test_nothing_is_lost(spec: str, case: str) -> None:
    """sent + residual == gradient + old residual, but for one rounding of each side."""
    values = torch.from_numpy(CASES[case])
    compressor = create(spec)
    state = compressor.init(TensorSpec(name="w", shape=tuple(values.shape)))
    for step in range(4):
        old = state.residual.numpy().copy() if isinstance(state, FeedbackState) else np.zeros_like(values)
        payload, state = compressor.compress(values, state, context(step))
        validate(payload)
        new = state.residual.numpy() if isinstance(state, FeedbackState) else np.zeros_like(values)
        total = np.clip(values.numpy().astype(np.float64) + old, -FLOAT32_MAX, FLOAT32_MAX)
        # The sum is rounded to float32, then the difference is: half a unit in the last place each.
        assert np.isfinite(new).all()
        sent = decode(payload).astype(np.float64)
        size = np.abs(total) + np.abs(sent)
        assert (np.abs(sent + new - total) <= np.maximum(size * 2.0**-23, 2.0**-149)).all()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if isinstance(create(spec), ErrorFeedback)])
def test_one_pass_feedback_leaves_the_same_bits_as_two(spec: str) -> None:
    fused = create(spec)
    assert isinstance(fused, ErrorFeedback)
    unfused = replace(fused, compressor=_WithoutFusion(fused.compressor))
    gradients = [gradient(1003, seed) * 10.0 ** (seed - 2) for seed in range(6)]
    ours, state = compress(fused, gradients)
    theirs, other = compress(unfused, gradients)
    for one, two in zip(ours, theirs, strict=True):
        assert np.array_equal(one.data, two.data)
    assert isinstance(state, FeedbackState)
    assert isinstance(other, FeedbackState)
    assert np.array_equal(state.residual.numpy().view(np.uint32), other.residual.numpy().view(np.uint32))


class _WithoutFusion:
    """Hides `compress_with_residual`. The running magnitude is that of the gradient, not of the sum."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def init(self, spec: TensorSpec) -> object:
        return self._compressor.init(spec)

    def compress(self, gradient: torch.Tensor, state: object, context: StepContext) -> tuple[Payload, object]:
        payload, following = self._compressor.compress(gradient, state, context)
        if isinstance(self._compressor, FourBit) and context.magnitudes is not None:
            assert isinstance(state, RunningMagnitude)
            following = state.updated(context.magnitudes)
        return payload, following
