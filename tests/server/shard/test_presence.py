"""Tensors without a gradient: as torch has it for one worker, and as DDP has it for several."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from pushes import Share, apply, bits, pushed, receive, replica_bits, take

from gradwire.common.parts import ALIGNMENT, Plan, divide
from gradwire.compressors import (
    AbsentPayload,
    Indices,
    LayerRule,
    ModelCompressor,
    Payload,
    PushTerms,
    SparsePayload,
    TensorSpec,
    cutting,
    decode,
    decode_indices,
    wire_bytes,
)
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Tensor
from gradwire.server.job.aggregation import Aggregation, Krum, Median, Trimmed
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.missing import absent, filled, ranges, stretches
from gradwire.server.shard.pending import MEAN, StepRules
from gradwire.worker.session.replica import Replica

SIZES = (40, 3, 5000, 0, 17, 9000, 64)
EVERY = range(len(SIZES))
# Of two dimensions, or a compressor would pass them over.
SHAPES = [(size, 1) for size in SIZES]
TENSORS = tuple(Tensor(name=str(n), shape=shape, dtype="float32") for n, shape in enumerate(SHAPES))
MANIFEST = Manifest(TENSORS, 100)
SMALL, MIDDLE, WHOLE = PLANS = [divide(SIZES, part_bytes) for part_bytes in (1, 20_000, 1 << 30)]


def initial() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def store(
    optimizer: str, plan: Plan, downlink: str = "auto", aggregation: Aggregation = MEAN, **more: Any
) -> SteppedStore:
    options, values = parse_optimizer(optimizer), [value.numpy().reshape(-1).copy() for value in initial()]

    def build(parameters: Sequence[torch.Tensor]) -> Optimizer:
        return Optimizer(options, parameters, 0.1)

    return SteppedStore(
        MANIFEST, values, downlink, build, 5, StepRules(aggregation=aggregation, **more), plan
    )


def drawn(seed: int, present: Sequence[int]) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [each if place in present else None for place, each in enumerate(found)]


def some(draw: random.Random) -> list[int]:
    return [place for place in EVERY if draw.random() < 0.6]


def compressor(spec: str, plan: Plan, rank: int = 0) -> ModelCompressor:
    return ModelCompressor(MANIFEST.specs, spec, LayerRule(), 1, rank, plan=plan)


def push(
    subject: ModelCompressor, gradients: Sequence[torch.Tensor | None], version: int, samples: int = 8
) -> Share:
    step = subject.begin(PushTerms(samples=samples, version=version))
    for place in reversed(EVERY):
        step.add(place, gradients[place])
    step.finish()
    return pushed(samples, step.sent)


TORCH: list[tuple[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = [
    ("sgd:weight_decay=0.1", lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
    ("sgd:momentum=0.9", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    (
        "sgd:momentum=0.9,nesterov=on,weight_decay=0.01",
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    ("adam:weight_decay=0.1", lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1)),
    ("adamw", lambda p: torch.optim.AdamW(p, 0.1)),
    ("adagrad:lr_decay=0.1", lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1)),
]


@pytest.mark.parametrize("plan", PLANS, ids=["small", "middle", "whole"])
@pytest.mark.parametrize(("spec", "make"), TORCH, ids=[spec for spec, _ in TORCH])
def test_one_worker_trains_as_torch_does(
    spec: str, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], plan: Plan
) -> None:
    """To the bit, whichever gradients are None."""
    ours, worker, draw = store(spec, plan), compressor("none", plan), random.Random(1)
    theirs = [value.requires_grad_() for value in initial()]
    reference = make(theirs)
    for version in range(1, 13):
        gradients = drawn(version, some(draw) if version % 4 else EVERY)
        apply(ours, version=version, shares=[push(worker, gradients, version)])
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        reference.step()
        for parameter, value in zip(ours.parameters, theirs, strict=True):
            assert torch.equal(parameter, value)


@pytest.mark.parametrize(
    ("spec", "aggregation"),
    [
        *((spec, MEAN) for spec in ("none", "4bit", "topk:ratio=4", "signsgd", "8bit", "qsgd")),
        *(("4bit", each) for each in (Median(), Trimmed(wrong=1), Krum(wrong=1))),
    ],
    ids=repr,
)
def test_a_round_passes_over_what_nobody_has(spec: str, aggregation: Aggregation) -> None:
    """And has the same bits with every plan."""
    results: list[list[bytes]] = []
    for plan in PLANS:
        ours = store("sgd:momentum=0.9", plan, "none", aggregation)
        workers, draw = [compressor(spec, plan, rank) for rank in range(5)], random.Random(2)
        for version in range(1, 7):
            sets = [some(draw) if version % 3 else [version // 3] for _ in workers]
            shares = [
                push(worker, drawn(10 * version + rank, present), version, 8 + rank)
                for rank, (worker, present) in enumerate(zip(workers, sets, strict=True))
            ]
            before = [parameter.clone() for parameter in ours.parameters]
            apply(ours, version=version, shares=shares)
            for place, (parameter, value) in enumerate(zip(ours.parameters, before, strict=True)):
                if not any(place in present for present in sets):
                    assert torch.equal(parameter, value)
        results.append(replica_bits(ours))
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("aggregation", [MEAN, Median(), Trimmed(wrong=1), Krum(wrong=1)], ids=repr)
@pytest.mark.parametrize("optimizer", ["sgd:momentum=0.9", "adam"])
def test_what_some_have_counts_as_zeros_of_the_others(optimizer: str, aggregation: Aggregation) -> None:
    results: list[list[bytes]] = []
    for explicit in (False, True):
        ours, draw = store(optimizer, MIDDLE, "none", aggregation), random.Random(3)
        workers = [compressor("none", MIDDLE, rank) for rank in range(5)]
        for version in range(1, 6):
            sets = [[place for place in EVERY if draw.random() < 0.3] for _ in workers]
            anywhere = {place for present in sets for place in present}
            shares: list[Share] = []
            for rank, (worker, present) in enumerate(zip(workers, sets, strict=True)):
                gradients = drawn(10 * version + rank, present)
                for place in anywhere if explicit else ():
                    if gradients[place] is None:
                        gradients[place] = torch.zeros(SHAPES[place])
                shares.append(push(worker, gradients, version, 8 + rank))
            apply(ours, version=version, shares=shares)
        results.append(replica_bits(ours))
    assert results[0] == results[1]


def test_the_others_keep_their_weight() -> None:
    ours = store("sgd", WHOLE)
    before = [parameter.clone() for parameter in ours.parameters]
    first, second = drawn(1, EVERY), drawn(2, EVERY)
    shares = [
        push(compressor("none", WHOLE), [*first[:2], *[None] * 5], 1, 6),
        push(compressor("none", WHOLE), [None, second[1], *[None] * 5], 1, 2),
    ]
    apply(ours, version=1, shares=shares)
    one, both, other = (each for each in (first[0], first[1], second[1]) if each is not None)
    torch.testing.assert_close(ours.parameters[0], before[0] - 0.1 * 0.75 * one)
    torch.testing.assert_close(ours.parameters[1], before[1] - 0.1 * (0.75 * both + 0.25 * other))


def test_votes_are_counted_whatever_neighbours_are_absent() -> None:
    """Three against one win, though their payloads have other borders."""
    ours = store("sgd", WHOLE)
    before = ours.parameters[2].clone()
    shares = [
        push(
            compressor("signsgd:feedback=off", WHOLE),
            [None if place in gone else torch.full(shape, value) for place, shape in enumerate(SHAPES)],
            1,
        )
        for value, gone in [(1.0, (0, 5)), (1.0, ()), (-9.0, (1, 6)), (5.0, (1, 4))]
    ]
    apply(ours, version=1, shares=shares)
    torch.testing.assert_close(ours.parameters[2], before - 0.1 * (1 + 1 + 9 + 5) / 4)


@pytest.mark.parametrize("downlink", ["auto", "none", "4bit"])
@pytest.mark.parametrize("spec", ["none", "4bit", "topk:ratio=4", "1bit", "1bit:block=32", "8bit", "fp16"])
def test_replicas_follow(spec: str, downlink: str) -> None:
    """With the same bits in one part and in several; by `auto` what no push has stays as it is."""
    results: list[list[bytes]] = []
    for part_bytes in (20_000, 1 << 30):
        replica = Replica(torch.nn.ParameterList(initial()), 100)
        replica.adopt(replica.manifest.plan(part_bytes))
        replica.version = 0
        ours, draw = store("sgd", replica.plan, downlink), random.Random(4)
        workers = [compressor(spec, replica.plan, rank) for rank in range(2)]
        for version in range(1, 8):
            sets = [some(draw) for _ in workers] if version > 2 else [[*EVERY], [0, 1, 2, 3]]
            shares = [
                push(worker, drawn(10 * version + rank, present), version)
                for rank, (worker, present) in enumerate(zip(workers, sets, strict=True))
            ]
            before = replica_bits(ours)
            take(replica, apply(ours, version=version, shares=shares))
            assert bits(replica) == replica_bits(ours)
            for place, (now, then) in enumerate(zip(replica_bits(ours), before, strict=True)):
                if downlink == "auto" and not any(place in present for present in sets):
                    assert now == then
        results.append(replica_bits(ours))
    assert results[0] == results[1]


def test_nothing_goes_down_of_what_nobody_has() -> None:
    ours, worker = store("adam", MIDDLE), compressor("none", MIDDLE)
    update = apply(ours, version=1, shares=[push(worker, drawn(1, [0, 4]), 1)])
    found = [payload for _, payloads in receive(update, MANIFEST, MIDDLE) for payload in payloads]
    assert sum(map(wire_bytes, found)) == 4 * (SIZES[0] + SIZES[4])
    assert sum(payload.elements for payload in found) == sum(SIZES)
    before = ours.sha256()
    update = apply(ours, version=2, shares=[push(worker, drawn(2, []), 2)])
    assert ours.sha256() == before
    assert update.wire_bytes < 40 * len(MIDDLE.parts)


def test_parts_of_a_tensor_count_by_themselves() -> None:
    """The case is a member that is lost in the middle of its push, whose first parts are final."""
    plan = divide(SIZES, 4 * ALIGNMENT)
    (unit,) = (unit for unit in plan.units if unit.first == 5)
    ours, workers = store("adam", plan), [compressor("none", plan, rank) for rank in range(2)]
    contribution, whole = push(workers[0], drawn(1, EVERY), 1)
    lost = {part: payloads for part, payloads in whole.items() if part <= unit.parts[0]}
    before = ours.parameters[5].clone()
    apply(ours, version=1, shares=[(contribution, lost), push(workers[1], drawn(2, [0]), 1)])
    stepped = ours.parameters[5] != before
    edge = plan.parts[unit.parts[0]].elements
    assert bool(stepped[:edge].all())
    assert not bool(stepped[edge:].any())
    apply(ours, version=2, shares=[push(workers[1], drawn(7, EVERY), 2)])
    # The first step of Adam has the length of the rate, the second of another gradient has not.
    moved = (ours.parameters[5] - before)[edge:]
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_stretches_hold_what_there_is_and_nothing_else(seed: int) -> None:
    draw = random.Random(seed)
    spec = draw.choice(["none", "4bit", "topk:ratio=2", "signsgd", "8bit"])
    sets = [some(draw) for _ in range(3)]
    pushes: list[Sequence[Payload]] = [
        push(compressor(spec, WHOLE, rank), drawn(rank, present), 1)[1][0]
        for rank, present in enumerate(sets)
    ]
    has = np.zeros((3, sum(SIZES)), bool)
    for rank, present in enumerate(sets):
        for place in present:
            has[rank, slice(*WHOLE.starts[place : place + 2])] = True
    values = [np.concatenate([decode(payload) for payload in each]) for each in pushes]
    covered = np.zeros(sum(SIZES), bool)
    found = stretches(pushes)
    for stretch in found:
        here = slice(stretch.start, stretch.end)
        assert not covered[here].any()
        covered[here] = True
        for rank, each in enumerate(stretch.pushes):
            assert has[rank, here].all() == has[rank, here].any() == (not absent(each))
            assert b"".join(decode(payload).tobytes() for payload in each) == values[rank][here].tobytes()
    assert (covered == has.any(axis=0)).all()
    assert all(one[1] < other[0] for one, other in pairwise(ranges(found)))
    assert sum(end - start for start, end in ranges(found)) == covered.sum()

    whole, at = filled({0: pushes[0]}, [{0: each} for each in pushes])[0], 0
    assert np.concatenate([decode(payload) for payload in whole]).tobytes() == values[0].tobytes()
    for payload in whole:
        assert isinstance(payload, AbsentPayload) == (not covered[at])
        at += payload.elements


def test_a_delayed_gradient_is_compensated_where_there_is_one() -> None:
    ours, whole, first = (store("sgd", WHOLE, delay_compensation=0.5) for _ in range(3))
    for subject, present in ((ours, [0, 2]), (whole, EVERY), (first, [])):
        worker = compressor("none", WHOLE)
        apply(subject, version=1, shares=[push(worker, drawn(1, EVERY), 1)], bases=frozenset({0}))
        apply(subject, version=2, shares=[push(worker, drawn(2, present), 2)], base_version=0)
    for place, parameter in enumerate(ours.parameters):
        expected = whole if place in (0, 2) else first
        assert torch.equal(parameter, expected.parameters[place])


def test_a_payload_is_decoded_once_however_often_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [30] * 20
    specs = [TensorSpec(name=str(place), shape=(size, 1)) for place, size in enumerate(sizes)]
    given = [torch.randn(spec.shape) for spec in specs]
    pushes = [
        ModelCompressor(specs, "topk:ratio=10", LayerRule(), 1, rank, plan=divide(sizes)).compress(
            [each if rank == 0 or place % 2 else None for place, each in enumerate(given)], 8, version=0
        )
        for rank in range(2)
    ]
    assert [len(push) for push in pushes] == [1, 20]
    seen: list[Payload] = []

    def spy(payload: SparsePayload) -> Indices:
        seen.append(payload)
        return decode_indices(payload)

    monkeypatch.setattr(cutting, "decode_indices", spy)
    assert len(stretches(pushes)) == 20
    assert len(seen) == 1
