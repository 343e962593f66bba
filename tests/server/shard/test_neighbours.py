"""Neighbours among tensors go down together, to the bits that each would have alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pushes import Share, apply, pushed
from pushes import receive as receive_parts

from gradwire.common.parts import Plan, arrange, divide
from gradwire.compressors import (
    LayerRule,
    ModelCompressor,
    Payload,
    PushTerms,
    SparsePayload,
    TensorSpec,
    decode_indices,
)
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Tensor
from gradwire.server.shard import downlink as way_down
from gradwire.server.shard import encodings
from gradwire.server.shard.making import SteppedStore

SIZES = (300, 40, 5000, 0, 1, 700, 64, 2000)
SPECS = [TensorSpec(name=f"t{place}", shape=(size, 1)) for place, size in enumerate(SIZES)]
MANY = Manifest(tuple(Tensor(name=spec.name, shape=spec.shape, dtype="float32") for spec in SPECS), 100)
# At each version, of two workers. `4bit` and a dense push leave tensors behind, or have all of them changed.
VERSIONS = [
    ("topk:ratio=20", "topk:ratio=20"),
    ("topk:ratio=3", "topk:ratio=50"),
    ("topk:ratio=100", "topk:ratio=20,values=float32"),
    ("topk:ratio=40", "none"),
    ("threshold:tau=1.5,scale=mean", "randk:ratio=30"),
    ("topk:ratio=30", "4bit"),
    ("topk:ratio=30", "topk:ratio=30"),
    ("topk:ratio=50,values=float32", "topk:ratio=50"),
]


def run_of_versions(plan: Plan, absent: int | None) -> tuple[list[list[bytes]], list[list[Payload]]]:
    """The replica after each version, and the payloads that went down."""
    values = [np.linspace(-1, 1, size, dtype=np.float32) for size in SIZES]
    options = parse_optimizer("sgd")
    ours = SteppedStore(MANY, values, "auto", lambda ps: Optimizer(options, ps, 0.1), 5, plan=plan)
    replicas, sent = list[list[bytes]](), list[list[Payload]]()
    for version, compressors in enumerate(VERSIONS, start=1):
        shares: list[Share] = []
        for rank, compressor in enumerate(compressors):
            generator = torch.Generator().manual_seed(100 * version + rank)
            step = ModelCompressor(SPECS, compressor, LayerRule(), 1, rank, plan=plan).begin(
                PushTerms(samples=8, version=version)
            )
            for place, spec in enumerate(SPECS):
                gradient = torch.randn(spec.shape, generator=generator)
                step.add(place, None if place == absent and rank == version % 2 else gradient)
            step.finish()
            shares.append(pushed(8, step.sent))
        update = apply(ours, version=version, shares=shares)
        sent.append([payload for _, each in receive_parts(update, MANY, plan) for payload in each])
        replicas.append([each.numpy().tobytes() for each in (*ours.replica, *ours.parameters)])
    return replicas, sent


@pytest.mark.parametrize("absent", [None, 2, 5])
def test_neighbours_go_down_together_to_the_bits_that_each_would_alone(absent: int | None) -> None:
    together, sent = run_of_versions(divide(SIZES, 1 << 30), absent)
    alone, _ = run_of_versions(arrange(SIZES, [1] * len(SIZES), []), absent)
    assert together == alone
    assert absent is not None or [type(payload) for payload in sent[0]] == [SparsePayload]


@pytest.mark.parametrize("compressor", ["topk:ratio=50,values=float32", "randk:ratio=50,values=float32"])
def test_what_was_chosen_from_a_whole_unit_goes_down_as_it_came(compressor: str) -> None:
    shapes = [(30, 30), (7,), (5, 601), (2, 9000), (40,)]
    tensors = [Tensor(name=str(place), shape=shape, dtype="float32") for place, shape in enumerate(shapes)]
    manifest, options = Manifest(tuple(tensors), 100), parse_optimizer("sgd")
    values = [np.ones(spec.elements, np.float32) for spec in manifest.specs]
    plan = replace(divide([spec.elements for spec in manifest.specs], 1 << 30), merged=True)
    ours = SteppedStore(manifest, values, "auto", lambda ps: Optimizer(options, ps, 0.1), 5, plan=plan)
    models = [ModelCompressor(manifest.specs, compressor, LayerRule(), 1, rank, plan=plan) for rank in (0, 1)]
    for version in (1, 2, 3):
        pushes = [
            model.compress([torch.randn(spec.shape) for spec in manifest.specs], 8, version=version)
            for model in models
        ]
        update = apply(ours, version=version, shares=[pushed(8, payloads) for payloads in pushes])
        ((_, down),) = receive_parts(update, manifest, plan)
        assert [type(payload) for payload in down] == [type(payload) for payload in pushes[0]]
        for number, payload in enumerate(down):
            if isinstance(payload, SparsePayload):
                held = [each[number] for each in pushes]
                union = {
                    index
                    for each in held
                    if isinstance(each, SparsePayload)
                    for index in decode_indices(each).tolist()
                }
                assert decode_indices(payload).tolist() == sorted(union)
        for ours_is, theirs in zip(ours.parameters, ours.replica, strict=True):
            if ours_is.ndim == 2:  # the others go down as bfloat16
                assert torch.equal(ours_is.detach(), theirs)


def test_payloads_are_gone_through_once_where_kinds_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(48, 1), (8,)] * 10
    tensors = [Tensor(name=str(place), shape=shape, dtype="float32") for place, shape in enumerate(shapes)]
    manifest, options = Manifest(tuple(tensors), 100), parse_optimizer("sgd")
    values = [np.zeros(spec.elements, np.float32) for spec in manifest.specs]
    plan = divide([spec.elements for spec in manifest.specs], 1 << 30)
    ours = SteppedStore(manifest, values, "auto", lambda ps: Optimizer(options, ps, 0.1), 5, plan=plan)
    model = ModelCompressor(manifest.specs, "topk:ratio=10", LayerRule(), 1, 0, plan=plan)
    share = pushed(8, model.compress([torch.randn(spec.shape) for spec in manifest.specs], 8, version=0))
    walks: list[int] = []

    def spy(pushes: Sequence[encodings.Placed], borders: npt.NDArray[np.int64]) -> encodings.Held:
        walks.append(borders.size)
        return encodings.held_by(pushes, borders)

    monkeypatch.setattr(way_down, "held_by", spy)
    apply(ours, version=1, shares=[share, share])
    assert walks == [len(shapes) + 1]
