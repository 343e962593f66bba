"""Slices at the worker: what is held back is never lost, whatever becomes of the slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gradwire.compressors import LayerRule, ModelCompressor, NonFiniteGradient, TensorSpec, decode
from gradwire.compressors.registry import BUILT_IN
from gradwire.proto.messages import Assignment
from gradwire.proto.shares import share
from gradwire.worker.session.compression import PATIENCE, Compression, Parts, Sent

SPECS = [
    TensorSpec(name="w", shape=(9, 11)),
    TensorSpec(name="b", shape=(11,)),
    TensorSpec(name="tiny", shape=(1, 2)),
    TensorSpec(name="scale", shape=()),
]
WITH_FEEDBACK = ["bf16", "4bit", "1bit", "topk:ratio=8", "randk:ratio=8", "gcac:ratio=8"]


def compression(spec: str) -> Compression:
    def build(parts: Parts | None) -> ModelCompressor:
        return ModelCompressor(SPECS, spec, LayerRule(), 1, 0, parts=parts)

    return Compression(SPECS, build)


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.shape, generator=generator) for spec in SPECS]


def flat(tensors: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([tensor.reshape(-1).numpy() for tensor in tensors])


def push(
    subject: Compression,
    version: int,
    slice: int = 0,
    slices: int = 0,
    *,
    leaving: bool = False,
    stragglers: int = 0,
) -> Sent:
    given = Assignment(id=1, version=version, slice=slice, slices=slices, stragglers=stragglers)
    return subject.compress(
        given, gradients(version), 8, rank=0, version=version, step=version, leaving=leaving
    )


def delivered(sent: Sent) -> np.ndarray[Any, Any]:
    """What a push comes to in whole tensors, with the weight that its slices give it."""
    slice, slices = sent.header
    factor = 1 / max(1, sent.slices)
    found: list[np.ndarray[Any, Any]] = []
    for place, spec in enumerate(SPECS):
        out = np.zeros(spec.elements, np.float32)
        start, end = share(spec.elements, slice, max(1, slices))
        if sent.payloads:
            out[start:end] = decode(sent.payloads[place]) / factor
        found.append(out)
    return np.concatenate(found)


def meant(version: int, slice: int, slices: int) -> np.ndarray[Any, Any]:
    """The gradient of a step, in the same measure."""
    found: list[np.ndarray[Any, Any]] = []
    for gradient in gradients(version):
        out, values = np.zeros(gradient.numel(), np.float32), gradient.reshape(-1).numpy()
        start, end = share(gradient.numel(), slice, max(1, slices))
        out[start:end] = values[start:end] * max(1, slices)
        found.append(out)
    return np.concatenate(found)


@pytest.mark.parametrize("spec", WITH_FEEDBACK)
def test_nothing_that_is_held_back_is_lost_when_slices_change(spec: str) -> None:
    subject = compression(spec)
    turns = [(0, 2), (0, 2), (1, 2), (0, 0), (2, 3), (2, 3), (0, 4), (3, 4), (0, 0), (1, 2)]
    total = np.zeros_like(meant(0, 0, 0))
    expected = np.zeros_like(total)
    for version, (slice, slices) in enumerate(turns):
        total += delivered(push(subject, version, slice, slices))
        expected += meant(version, slice, slices)
    total += delivered(push(subject, 99, 1, 2, leaving=True))
    expected += meant(99, 1, 2)
    np.testing.assert_allclose(total, expected, atol=2e-4)
    assert subject.norm == 0


def test_what_other_slices_hold_goes_along_after_a_while() -> None:
    subject = compression("topk:ratio=8")
    push(subject, 0, 0, 2)
    sent = [push(subject, version, 1, 2) for version in range(1, PATIENCE + 3)]
    whole = [each.header == (0, 0) for each in sent]
    assert whole == [False] * PATIENCE + [True, False]
    assert [payload.elements for payload in sent[PATIENCE].payloads] == [99, 11, 2, 1]


@pytest.mark.parametrize("then", [(0, 2), (1, 2), (0, 0)])
def test_a_refused_push_of_a_slice_comes_back_whatever_the_slice_is_then(then: tuple[int, int]) -> None:
    for spec in ("topk:ratio=8", "none", "qsgd"):
        subject = compression(spec)
        refused = push(subject, 0, 0, 2)
        calm = compression(spec)
        push(calm, 0, 0, 2)
        later = push(subject, 1, *then)
        subject.restore(refused)
        total = delivered(later) + delivered(push(subject, 2, *then, leaving=True))
        expected = meant(0, 0, 2) + meant(1, *then) + meant(2, *then)
        if spec == "qsgd":  # what it loses, it loses
            assert np.isfinite(total).all()
        else:
            np.testing.assert_allclose(total, expected, atol=1e-4)


@pytest.mark.parametrize("spec", ["none", *WITH_FEEDBACK, "qsgd", "signsgd", "dgc:ratio=8", "krngc:ratio=8"])
@pytest.mark.parametrize("slices", [0, 2])
def test_a_push_that_was_not_needed_leaves_what_is_held_back_as_it_was(spec: str, slices: int) -> None:
    subject = compression(spec)
    for version in range(3):
        push(subject, version, 1 if slices else 0, slices, stragglers=1)
    before = flat(subject._compressor.held())  # pyright: ignore[reportPrivateUsage]
    sent = push(subject, 3, 1 if slices else 0, slices, stragglers=1)
    subject.forget(sent)
    after = flat(subject._compressor.held())  # pyright: ignore[reportPrivateUsage]
    if "gc" in spec and spec != "gcac:ratio=8":  # a step of momentum has passed, as if its gradient were 0
        assert np.isfinite(after).all()
    else:
        np.testing.assert_allclose(after, before, atol=1e-5)


@pytest.mark.parametrize("spec", sorted(BUILT_IN))
def test_slices_of_every_compressor_are_payloads_of_that_size(spec: str) -> None:
    for slices in (2, 3, 16):
        for slice in (0, slices - 1):
            subject = compression(spec)
            for version in range(3):
                sent = push(subject, version, slice, slices)
                for each, payload in zip(SPECS, sent.payloads, strict=False):
                    start, end = share(each.elements, slice, slices)
                    assert payload.elements == end - start
                    assert np.isfinite(decode(payload)).all()


def test_members_of_a_group_skip_a_gradient_together() -> None:
    """Whichever slice it is in that is not finite."""
    for slice in (0, 1):
        bad = gradients(0)
        bad[0][0, 0] = float("nan")
        given = Assignment(id=1, version=0, slice=slice, slices=2)
        with pytest.raises(NonFiniteGradient, match="'w'"):
            compression("4bit").compress(given, bad, 8, rank=0, version=0, step=0, leaving=False)


def test_clipping_goes_by_the_whole_gradient() -> None:
    whole = push(compression("bf16:clip=1,feedback=off"), 0)
    halves = [push(compression("bf16:clip=1,feedback=off"), 0, slice, 2) for slice in (0, 1)]
    for place in range(len(SPECS)):
        joined = np.concatenate([decode(half.payloads[place]) for half in halves])
        np.testing.assert_array_equal(joined, decode(whole.payloads[place]))


def test_small_tensors_stay_dense_by_their_whole_shape() -> None:
    sent = push(compression("4bit"), 0, 1, 2)
    assert [type(payload).__name__ for payload in sent.payloads] == [
        *("QuantizedPayload", "DensePayload", "QuantizedPayload", "DensePayload")
    ]
