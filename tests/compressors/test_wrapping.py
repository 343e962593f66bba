"""The wrapping of a compressor: clip -> delay -> momentum -> residual (decay) -> compressor -> masking."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from flat import as_push

from gradwire.common.spec import SpecError
from gradwire.compressors import (
    LayerRule,
    ModelCompressor,
    Payload,
    Random,
    SparsePayload,
    StepContext,
    TensorSpec,
    create,
    create_bare,
    decode,
    parse_compressor,
)
from gradwire.compressors.feedback import FeedbackState
from gradwire.compressors.indices import decode_indices

Array = npt.NDArray[np.float32]

SPECS = [
    TensorSpec(name="a.weight", shape=(6, 10)),
    TensorSpec(name="a.bias", shape=(6,)),
    TensorSpec(name="b.weight", shape=(4, 9)),
]
WEIGHTS = (0, 2)


def gradients(step: int, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(spec.shape, generator=generator) * size for spec in SPECS]


def model(spec: str) -> ModelCompressor:
    return ModelCompressor(SPECS, spec, LayerRule(), 1, 0)


def context(step: int = 0) -> StepContext:
    return StepContext(
        samples=1, version=step, epoch=math.inf, random=Random((step,)), shared=Random((step,))
    )


def one_tensor(spec: str, steps: list[torch.Tensor]) -> tuple[list[Array], FeedbackState]:
    """Return the values that each step sends, and the state after the last."""
    compressor = create(spec)
    state = compressor.init(TensorSpec(name="w", shape=tuple(steps[0].shape)))
    sent: list[Array] = []
    for step, gradient in enumerate(steps):
        payload, state = compressor.compress(gradient, state, context(step))
        sent.append(decode(payload))
    assert isinstance(state, FeedbackState)
    return sent, state


def vectors(steps: int, elements: int = 40) -> list[torch.Tensor]:
    return list(torch.randn(steps, elements, generator=torch.Generator().manual_seed(steps)))


CLIP, DELAY, MOMENTUM, DECAY, RATIO, WORKERS = 3.0, 3, 0.75, 0.5, 4, 4
FULL = f"topk:ratio={RATIO},values=float32,clip={CLIP},delay={DELAY},momentum={MOMENTUM},decay={DECAY}"
MISTAKES = [
    "clip after momentum",
    "clip each tensor",
    "clip to all of it",
    "clip what is sent",
    "delay before momentum",
    "decay the sum",
    "decay only when sending",
    "residual into the velocity",
    "no masking",
    "mask everything",
    "mask dense tensors too",
    "momentum for large tensors alone",
]


def clipped(values: list[Array], largest: float) -> list[Array]:
    norm = math.sqrt(sum(float((each.astype(np.float64) ** 2).sum()) for each in values))
    return [each * np.float32(min(1.0, largest / norm)) for each in values]


def reference(steps: int, mistake: str = "") -> list[list[Array] | None]:
    """Compute the formulas at the head of `feedback` in plain numpy; on request with one mistake in it."""
    velocity = [np.zeros(spec.elements, np.float32) for spec in SPECS]
    residual = [np.zeros(spec.elements, np.float32) for spec in SPECS]
    pending = [np.zeros(spec.elements, np.float32) for spec in SPECS]
    pushes: list[list[Array] | None] = []
    limit = CLIP if mistake == "clip to all of it" else CLIP / math.sqrt(WORKERS)
    for version in range(steps):
        holding, sent = bool((version + 1) % DELAY), list[Array]()
        g = [gradient.numpy().reshape(-1) for gradient in gradients(version)]
        if mistake == "clip each tensor":
            g = [clipped([each], limit)[0] for each in g]
        elif mistake not in ("clip after momentum", "clip what is sent"):
            g = clipped(g, limit)
        if mistake == "delay before momentum":
            pending = [one + other for one, other in zip(pending, g, strict=True)]
            if holding:
                pushes.append(None)
                continue
            g, pending = pending, [np.zeros_like(each) for each in pending]
        for i in range(len(g)):
            m = 0.0 if mistake.startswith("momentum for") and i not in WEIGHTS else MOMENTUM
            inflow = g[i] + residual[i] if mistake == "residual into the velocity" else g[i]
            velocity[i] = np.float32(m) * velocity[i] + inflow
        u = clipped(velocity, limit) if mistake == "clip after momentum" else velocity
        for i in range(len(g)):
            decay = np.float32(1.0 if mistake == "decay only when sending" and holding else DECAY)
            total = (u[i] + residual[i]) * decay if mistake == "decay the sum" else u[i] + decay * residual[i]
            residual[i] = total
            if holding:
                continue
            if i in WEIGHTS:
                chosen = np.argsort(-np.abs(total), kind="stable")[: int(total.size / RATIO)]
                out = np.zeros_like(total)
                out[chosen] = total[chosen]
                masked: Any = slice(None) if mistake == "mask everything" else chosen
                if mistake != "no masking":
                    velocity[i][masked] = 0.0
            else:
                out = torch.from_numpy(total).bfloat16().float().numpy()
                if mistake == "mask dense tensors too":
                    velocity[i][:] = 0.0
            residual[i] = total - out
            sent.append(out)
        if mistake == "clip what is sent" and sent:
            sent = clipped(sent, limit)
        pushes.append(None if holding else sent)
    return pushes


def ours(steps: int) -> list[list[Array] | None]:
    compressor, pushes = model(FULL), list[list[Array] | None]()
    for version in range(steps):
        payloads = compressor.compress(gradients(version), 8, version=version, workers=WORKERS)
        pushes.append([decode(payload) for payload in payloads] or None)
    return pushes


def alike(one: list[list[Array] | None], other: list[list[Array] | None]) -> bool:
    def same(a: list[Array] | None, b: list[Array] | None) -> bool:
        if a is None or b is None:
            return a is b
        return all(np.allclose(x, y, rtol=1e-2, atol=1e-6) for x, y in zip(a, b, strict=True))

    return all(same(a, b) for a, b in zip(one, other, strict=True))


def test_the_options_act_in_their_order() -> None:
    expected = reference(21)
    assert alike(ours(21), expected)
    assert [push is None for push in expected] == [True, True, False] * 7


@pytest.mark.parametrize("mistake", MISTAKES)
def test_any_other_order_would_send_something_else(mistake: str) -> None:
    """A mistake in the reference is noticed, so the comparison with it can fail."""
    assert not alike(ours(21), reference(21, mistake))


def test_without_masking_a_model_is_the_reference_that_leaves_it_out() -> None:
    compressor, pushes = model(f"{FULL},masking=off"), list[list[Array] | None]()
    for version in range(21):
        payloads = compressor.compress(gradients(version), 8, version=version, workers=WORKERS)
        pushes.append([decode(payload) for payload in payloads] or None)
    assert alike(pushes, reference(21, "no masking"))


@pytest.mark.parametrize(
    "spec", ["topk:masking=off", "dgc:feedback=off,masking=off", "krngc:momentum=0,masking=off"]
)
def test_masking_is_refused_without_momentum(spec: str) -> None:
    with pytest.raises(SpecError, match="masking: off needs a velocity to keep; set momentum"):
        create(spec)


@pytest.mark.parametrize("spec", ["8bit", "bf16", "4bit", "1bit", "1bit:block=32", "qsgd:feedback=on"])
def test_plain_sgd_on_dense_payloads_is_momentum_sgd_but_for_the_residual(spec: str) -> None:
    """Dense payloads are not masked, because they leave no element behind."""
    steps, weights = vectors(12), torch.zeros(40, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9)
    for gradient in steps:
        weights.grad = gradient
        optimizer.step()
    extra = "," if ":" in spec else ":"
    sent, state = one_tensor(f"{spec}{extra}momentum=0.9", steps)
    np.testing.assert_allclose(-(np.sum(sent, axis=0) + state.residual.numpy()), weights.detach(), atol=1e-4)


@pytest.mark.parametrize("spec", ["topk:ratio=8", "gcac:ratio=8", "dgc:ratio=8", "randk:ratio=8"])
def test_masking_clears_the_velocity_where_something_was_sent_and_nowhere_else(spec: str) -> None:
    compressor, gradient = create(f"{spec},momentum=0.9"), vectors(1)[0]
    state = compressor.init(TensorSpec(name="w", shape=(40,)))
    payload, state = compressor.compress(gradient, state, context())
    assert isinstance(payload, SparsePayload)
    expected = gradient.clone()
    expected[decode_indices(payload).astype(np.int64)] = 0.0
    assert 0 < payload.count < 40
    assert torch.equal(state.velocity, expected)


# Clipping


def norm(values: list[Array]) -> float:
    return math.sqrt(sum(float((each.astype(np.float64) ** 2).sum()) for each in values))


@pytest.mark.parametrize("workers", [1, 4, 9])
def test_clipping_is_to_the_norm_of_the_whole_model_over_the_root_of_the_workers(workers: int) -> None:
    compressor = model("l1:ratio=1,values=float32,clip=6")
    for size, version in ((0.001, 0), (1.0, 1), (1e30, 2), (3e37, 3)):
        given = [g.numpy().reshape(-1) for g in gradients(version, size)]
        payloads = compressor.compress(gradients(version, size), 8, version=version, workers=workers)
        factor = min(1.0, 6 / math.sqrt(workers) / norm(given))
        for payload, g, rel in zip(payloads, given, (1e-6, 2.0**-8, 1e-6), strict=True):
            np.testing.assert_allclose(decode(payload), g * factor, rtol=rel)


# Delay


@pytest.mark.parametrize("spec", ["bf16:delay=3", "1bit:delay=3", "krngc:delay=3", "randk:delay=3"])
def test_the_version_decides_when_a_push_is_due_and_not_how_many_steps_were_taken(spec: str) -> None:
    """All workers push at the same versions, also the one that joins later."""
    late = model(spec)
    sent = [late.compress(gradients(v), 8, version=v) for v in (10, 11, 12, 13, 14, 17)]
    elements = sum(spec.elements for spec in SPECS)
    assert [sum(each.elements for each in payloads) for payloads in sent] == [
        *(0, elements, 0, 0, elements, elements)
    ]


# Small tensors, and none of all this


@pytest.mark.parametrize(
    ("chosen", "small"),
    [
        ("topk", "bf16"),
        ("4bit:clip=1,delay=2", "bf16"),
        ("dgc", "bf16:momentum=0.9"),
        ("dgc:momentum=0", "bf16"),
        ("dgc:feedback=off", "bf16:feedback=off"),
        ("krngc:decay=0.25", "bf16:decay=0.25,momentum=0.9"),
        ("signsgd", "bf16:feedback=off"),
        ("qsgd:feedback=on,momentum=0.5", "bf16:momentum=0.5"),
        ("none", "none"),
        ("fp16:momentum=0.5", "fp16:momentum=0.5"),
    ],
)
def test_small_tensors_get_feedback_and_momentum_as_the_large_ones(chosen: str, small: str) -> None:
    assert LayerRule().choose(SPECS[1], parse_compressor(chosen)).text == small
    assert LayerRule().choose(SPECS[0], parse_compressor(chosen)).text == chosen
    create(small)


@pytest.mark.parametrize(
    "spec", ["topk", "dgc:ratio=4", "krngc:ratio=4", "4bit:levels=groups", "1bit", "1bit:block=32"]
)
def test_a_bare_compressor_keeps_nothing(spec: str) -> None:
    compressor, steps = create_bare(spec), vectors(4)
    state = compressor.init(TensorSpec(name="w", shape=tuple(steps[0].shape)))
    payload, state = compressor.compress(steps[0], state, context(0))
    for version, gradient in enumerate(steps[1:], 1):
        payload, state = compressor.compress(gradient, state, context(version))
    last, _ = create_bare(spec).compress(steps[3], state, context(3))
    again, _ = create_bare(spec).compress(steps[3], state, context(3))
    assert payload.data.tobytes() == last.data.tobytes() == again.data.tobytes()


@pytest.mark.parametrize("option", ["feedback=on", "decay=0.5", "momentum=0.9", "clip=1", "delay=2"])
def test_a_bare_compressor_takes_none_of_these_options(option: str) -> None:
    with pytest.raises(SpecError, match="unknown key"):
        create_bare(f"topk:{option}")


# What is refused


@pytest.mark.parametrize(
    "spec", ["topk:ratio=4", "krngc:ratio=4", "1bit", "1bit:block=32", "4bit", "gcac:values=4bit"]
)
@pytest.mark.parametrize("extra", ["momentum=0", "momentum=0.9", "delay=2,momentum=0"])
def test_a_refused_push_joins_the_residual(spec: str, extra: str) -> None:
    """All of it is there again; the velocity stays masked, since a payload does not say what it was."""
    compressor = model(f"{spec}{',' if ':' in spec else ':'}{extra}")
    payloads: list[Payload] = []
    version = 0
    while not payloads:
        payloads = compressor.compress(gradients(0), 8, version=version)
        version += 1
    compressor.ledger.put_back(as_push(payloads))
    assert compressor.ledger.norm() == pytest.approx(
        norm([version * g.numpy().reshape(-1) for g in gradients(0)]), rel=1e-5
    )


@pytest.mark.parametrize("spec", [FULL, "dgc:ratio=4", "krngc:ratio=4", "8bit:momentum=0.9,decay=0.9"])
def test_the_largest_gradients_leave_finite_payloads_and_residuals(spec: str) -> None:
    compressor = model(spec)
    for version in range(6):
        sign = -1.0 if version == 4 else 1.0
        huge = [torch.full(each.shape, sign * 3.4e38) for each in SPECS]
        for payload in compressor.compress(huge, 8, version=version):
            assert np.isfinite(decode(payload)).all()
        assert math.isfinite(compressor.ledger.norm())


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    "spec", ["topk:ratio=3,momentum=0.9", "4bit:momentum=0.9", "signsgd:feedback=on,momentum=0.9"]
)
def test_the_largest_gradients_leave_everything_finite(spec: str) -> None:
    """Velocity and residual saturate, also where a push comes back."""
    compressor = model(spec)
    for version in range(4):
        payloads = compressor.compress([torch.full(s.shape, LARGEST) for s in SPECS], 1, version=version)
        compressor.ledger.put_back(as_push(payloads))
        assert compressor.ledger.velocity is not None
        assert torch.isfinite(compressor.ledger.velocity).all()
        assert torch.isfinite(compressor.ledger.residual).all()
