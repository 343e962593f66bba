"""Steps whose gradients the server measures: what is sent and what is left, against plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flat import as_push, by_tensor

from gradwire.common.parts import ALIGNMENT, Plan, arrange
from gradwire.compressors import (
    LayerRule,
    ModelCompressor,
    Payload,
    PushTerms,
    SparsePayload,
    TensorSpec,
    cut,
    decode,
)
from gradwire.compressors.indices import decode_indices

Array = npt.NDArray[np.float32]

# Two dimensions: the compressor's. One: sent as bfloat16, and between the others.
SHAPES = [(30, 30), (7,), (1, 1), (5, 2000), (40,), (17, 3), (2, 900), (3,)]
SPECS = [TensorSpec(name=f"t{place}", shape=shape) for place, shape in enumerate(SHAPES)]
SIZES = [spec.elements for spec in SPECS]
DRAWN = [place for place, shape in enumerate(SHAPES) if len(shape) == 2]
LARGEST = np.finfo(np.float32).max


def plan_of(units: Sequence[int], *, merged: bool) -> Plan:
    return replace(arrange(SIZES, units[::-1], []), merged=merged)


PLANS = {
    "small tensors in one unit": plan_of([8], merged=False),
    "a unit for each tensor": plan_of([1] * 8, merged=False),
    "one merged unit": plan_of([8], merged=True),
    "merged units": plan_of([3, 5], merged=True),
    "tensors cut into parts": arrange(SIZES, [1] * 8, [908 + ALIGNMENT, 908 + 2 * ALIGNMENT]),
}
SPECS_OF = [
    "randk:ratio=4,values=float32",
    "randk:ratio=4",
    "randk:ratio=4,draw=uniform",
    "randk:ratio=4,values=4bit",
    "randk:ratio=4,decay=0.5",
    "randk:ratio=4,momentum=0.9",
    "randk:ratio=4,delay=2",
    "randk:ratio=4,feedback=off",
]


def compressor_of(spec: str, plan: Plan) -> ModelCompressor:
    return ModelCompressor(SPECS, spec, LayerRule(), seed=1, rank=0, plan=plan)


def gradients(seed: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.standard_normal(each).astype(np.float32)) for each in SHAPES]


def flat(tensors: Sequence[torch.Tensor]) -> Array:
    return np.concatenate([each.numpy().reshape(-1) for each in tensors])


def drawn(payloads: Sequence[Payload]) -> npt.NDArray[np.bool_]:
    """True for each element of the model whose value a sparse payload holds."""
    held = np.zeros(sum(SIZES), np.bool_)
    at = 0
    for payload in payloads:
        if isinstance(payload, SparsePayload):
            held[at + decode_indices(payload).astype(np.int64)] = True
        at += payload.elements
    return held


def saturated(values: Array) -> Array:
    return np.clip(values, -LARGEST, LARGEST)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("spec", SPECS_OF)
def test_the_gradient_is_sent_without_the_residual_and_the_rest_stays(spec: str, plan: Plan) -> None:
    subject = compressor_of(spec, plan)
    feedback, momentum = "feedback=off" not in spec, 0.9 if "momentum" in spec else 0.0
    decay = np.float32(0.5 if "decay" in spec else 1.0)
    of_randk = np.concatenate([np.full(size, place in DRAWN) for place, size in enumerate(SIZES)])
    residual, velocity = np.zeros(sum(SIZES), np.float32), np.zeros(sum(SIZES), np.float32)
    for version in range(8):
        measured = version in (2, 3, 7)
        given = gradients(version)
        payloads = subject.compress(given, 8, version=version, measured=measured)
        sent, held = np.concatenate([decode(each) for each in payloads] or [np.zeros(0, np.float32)]), None
        gradient = flat(given)
        if momentum:
            velocity = np.float32(momentum) * velocity + gradient
            gradient = velocity.copy()
        total = saturated(residual * decay + gradient)
        left = subject.ledger.residual.numpy()
        if sent.size:
            held = drawn(payloads)
            assert held[of_randk].any()
            assert not held[~of_randk].any()
            if measured and "4bit" not in spec:
                exact, tolerance = "float32" in spec, 1e-5 if momentum else 0.0
                np.testing.assert_allclose(
                    sent[held], gradient[held], rtol=0 if exact else 2**-8, atol=tolerance
                )
            expected = total - sent
        else:  # the delay holds it back
            expected = total
        if not feedback:
            expected = residual if measured else np.zeros_like(total)
        if momentum:  # fused multiply-add may round once where numpy rounds twice
            np.testing.assert_allclose(left[of_randk], expected[of_randk], rtol=1e-5, atol=1e-5)
            assert held is not None
            velocity[held & of_randk] = 0.0
        else:
            assert np.array_equal(left[of_randk], expected[of_randk])
        residual = left.copy()


def test_a_residual_near_the_largest_float_stays_finite() -> None:
    """Values are rounded up to bfloat16, so that the rest is larger than the residual was."""
    subject = compressor_of("randk:ratio=4", PLANS["a unit for each tensor"])
    subject.ledger.residual.fill_(float(LARGEST))
    back = [
        -torch.linspace(1.0e38, 1.2e38, size).view(shape) for size, shape in zip(SIZES, SHAPES, strict=True)
    ]
    payloads = subject.compress(back, 8, version=0, measured=True)
    sent, held = np.concatenate([decode(each) for each in payloads]), drawn(payloads)
    assert (sent[held] < flat(back)[held]).any()
    left = subject.ledger.residual.numpy()
    assert np.isfinite(left).all()
    assert (left[held] == LARGEST).any()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_without_feedback_a_push_that_came_back_waits_for_the_next_step(plan: Plan) -> None:
    spec = "randk:ratio=4,values=float32,feedback=off"
    subject = compressor_of(spec, plan)
    first = subject.compress(gradients(0), 8, version=0)
    subject.ledger.put_back(as_push(first))
    owed = subject.ledger.residual.clone()
    sent = subject.compress(gradients(1), 8, version=1, measured=True)
    alone = compressor_of(spec, plan).compress(gradients(1), 8, version=1)
    for place in DRAWN:
        assert np.array_equal(by_tensor(sent, SPECS)[place], by_tensor(alone, SPECS)[place])
    left = np.split(subject.ledger.residual.numpy(), np.cumsum(SIZES)[:-1])
    before = np.split(owed.numpy(), np.cumsum(SIZES)[:-1])
    assert all(np.array_equal(left[place], before[place]) for place in DRAWN)
    assert owed.any()
    subject.compress(gradients(2), 8, version=2)
    assert not subject.ledger.residual.any()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(
    "spec", ["topk:ratio=4", "dgc:ratio=4,warmup=0", "4bit", "l1", "threshold:tau=0.5", "none"]
)
def test_what_chooses_by_values_sends_the_same_bits_at_every_version(spec: str, plan: Plan) -> None:
    plain, measured = compressor_of(spec, plan), compressor_of(spec, plan)
    for version in range(4):
        sent = [
            each.compress(gradients(version), 8, version=version, measured=each is measured)
            for each in (plain, measured)
        ]
        assert [p.data.tobytes() for p in sent[0]] == [p.data.tobytes() for p in sent[1]]
        assert torch.equal(plain.ledger.residual, measured.ledger.residual)


def test_the_last_push_has_all_of_the_residual_at_a_measured_version_too() -> None:
    subject = compressor_of("randk:ratio=4,values=float32", PLANS["one merged unit"])
    subject.compress(gradients(0), 8, version=0)
    before = subject.ledger.residual.numpy().copy()
    step = subject.begin(PushTerms(samples=8, version=1, flush=True, measured=True))
    for place in reversed(range(len(SHAPES))):
        step.add(place, gradients(1)[place])
    step.finish()
    sent = np.concatenate(
        [
            decode(each)
            for unit in reversed(subject.plan.units)
            for part in unit.parts
            for each in step.sent[part]
        ]
    )
    assert np.array_equal(sent, before + flat(gradients(1)))
    assert not subject.ledger.residual.any()


@pytest.mark.parametrize("draw", ["stratified", "uniform"])
def test_a_draw_that_is_cut_keeps_its_seed_and_a_choice_by_values_has_none(draw: str) -> None:
    specs = [TensorSpec(name="w", shape=(100, 100))]
    for spec, seeded in ((f"randk:ratio=10,draw={draw}", True), ("topk:ratio=10", False)):
        (whole,) = ModelCompressor(specs, spec, LayerRule(), 1, 0).compress(
            [torch.randn(100, 100)], 8, version=0
        )
        assert isinstance(whole, SparsePayload)
        pieces = [each for start in (0, 3200, 6400) for each in cut(whole, start, min(10_000, start + 3600))]
        again = [*cut(pieces[0], 0, 100), *pieces]
        seeds = {each.seed for each in again if isinstance(each, SparsePayload)}
        assert seeds == {whole.seed}
        assert (whole.seed > 0) is seeded
