"""What a worker pushes of its gradients: the slice that its assignment names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.compressors import Compressed, LayerRule, ModelCompressor, NonFiniteGradient, TensorSpec, decode
from gradwire.proto.messages import Assignment
from gradwire.worker.session.compression import Compression

SPECS = [TensorSpec(name="w", shape=(9, 11)), TensorSpec(name="b", shape=(11,))]


def compression(spec: str) -> Compression:
    return Compression(SPECS, ModelCompressor(SPECS, spec, LayerRule(), 1, 0))


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.shape, generator=generator) for spec in SPECS]


def push(
    subject: Compression, version: int, slice: int = 0, slices: int = 0, *, leaving: bool = False
) -> tuple[Compressed, tuple[int, int]]:
    given = Assignment(id=1, world=1, version=version, slice=slice, slices=slices)
    return subject.compress(
        given, gradients(version), 8, rank=0, version=version, step=version, leaving=leaving
    )


def test_members_of_a_group_skip_a_gradient_together() -> None:
    """Whichever slice it is in that is not finite."""
    for slice in (0, 1):
        bad = gradients(0)
        bad[0][0, 0] = float("nan")
        given = Assignment(id=1, world=1, version=0, slice=slice, slices=2)
        with pytest.raises(NonFiniteGradient, match="'w'"):
            compression("4bit").compress(given, bad, 8, rank=0, version=0, step=0, leaving=False)


def test_clipping_goes_by_the_whole_gradient() -> None:
    whole, _ = push(compression("bf16:clip=1,feedback=off"), 0)
    halves = [push(compression("bf16:clip=1,feedback=off"), 0, slice, 2)[0] for slice in (0, 1)]
    for place in range(len(SPECS)):
        joined = np.concatenate([decode(half.payloads[place]) for half in halves])
        np.testing.assert_array_equal(joined, decode(whole.payloads[place]))


def test_small_tensors_stay_dense_by_their_whole_shape() -> None:
    sent, header = push(compression("4bit"), 0, 1, 2)
    assert [type(payload).__name__ for payload in sent.payloads] == ["QuantizedPayload", "DensePayload"]
    assert header == (1, 2)


def test_a_worker_that_leaves_hands_over_whole_tensors() -> None:
    """What it still holds of a slice that is another worker's goes out with them."""
    subject = compression("topk:ratio=8")
    push(subject, 0, 0, 2)
    push(subject, 1, 1, 2)
    sent, header = push(subject, 2, 1, 2, leaving=True)
    assert header == (0, 0)
    assert [payload.elements for payload in sent.payloads] == [99, 11]
    assert subject.ledger.empty


@pytest.mark.parametrize("stragglers", [0, 1])
def test_only_a_push_that_others_may_make_superfluous_keeps_the_state_of_before_it(stragglers: int) -> None:
    given = Assignment(id=1, version=0, stragglers=stragglers)
    sent, _ = compression("4bit").compress(given, gradients(0), 8, rank=0, version=0, step=0, leaving=False)
    assert (sent.before is not None) == bool(stragglers)
