"""The parameters in parts: the bits are those of the whole, whatever the parts' size and order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pushes import Applied, Share, apply, bits, dense, pushed, replica_bits, snapshot, take

from gradwire.common.parts import Plan, divide
from gradwire.compressors import LayerRule, ModelCompressor, PushTerms
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Tensor
from gradwire.server.job.aggregation import Aggregation, Krum, Median, Trimmed
from gradwire.server.job.events import Apply
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.mean import add_up
from gradwire.server.shard.pending import MEAN, StepRules
from gradwire.server.shard.store import Encoded
from gradwire.worker.session.replica import Replica

TENSORS = ((3, 2), (17,), (130, 101), (5,), (40, 500), (260, 200), (300,), (9,))
LARGE = Manifest(
    tuple(Tensor(name=f"t{place}", shape=shape, dtype="float32") for place, shape in enumerate(TENSORS)), 100
)
PART_BYTES = (16 << 10, 64 << 10, 4 * LARGE.elements)
KINDS = {
    "4bit": ("4bit",),
    "topk": ("topk:ratio=50",),
    "topk of values": ("topk:ratio=50,values=float32",),
    "8bit": ("8bit",),
    "1bit": ("1bit",),
    "1bit of blocks": ("1bit:block=4096",),
    "bf16": ("bf16",),
    "none": ("none",),
    "mixed": ("4bit", "topk:ratio=50", "none", "8bit", "1bit"),
}


def divided(part_bytes: int) -> Plan:
    return divide([spec.elements for spec in LARGE.specs], part_bytes)


def large_store(
    downlink: str, plan: Plan, aggregation: Aggregation = MEAN, optimizer: str = "sgd"
) -> SteppedStore:
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(spec.elements, generator=generator).numpy() for spec in LARGE.specs]
    options = parse_optimizer(optimizer)
    return SteppedStore(
        LARGE,
        given,
        downlink,
        lambda ps: Optimizer(options, ps, 0.1),
        7,
        StepRules(aggregation=aggregation),
        plan,
    )


def large_shares(compressors: Sequence[ModelCompressor], step: int) -> list[Share]:
    found: list[Share] = []
    for rank, compressor in enumerate(compressors):
        generator = torch.Generator().manual_seed(10 * step + rank)
        making = compressor.begin(PushTerms(samples=8 + rank, version=step))
        for place, spec in enumerate(LARGE.specs):
            making.add(place, torch.randn(spec.shape, generator=generator))
        making.finish()
        found.append(pushed(8 + rank, making.sent))
    return found


def apply_in_parts(ours: SteppedStore, version: int, given: Sequence[Share], order: Sequence[int]) -> Applied:
    """Apply like `apply`, with these parts, in this order, before the others."""
    update = Applied(version)
    ours.begin(version, 1.0)
    for part in order:
        ours.add(part, [(each, push[part]) for each, push in given if push.get(part)], update.add)
    contributions = tuple(each for each, _ in given)
    closing = Apply(version=version, contributions=contributions, rate_factor=1.0, opened_at=0.0)
    update.passed_over = ours.apply(closing, [push for _, push in given], update.add)
    update.finish()
    return update


def follower(ours: SteppedStore, plan: Plan) -> Replica:
    """A worker's copy of the parameters."""
    model = torch.nn.Module()
    for tensor in LARGE.tensors:
        model.register_parameter(tensor.name, torch.nn.Parameter(torch.zeros(tensor.shape)))
    worker = Replica(model, 100)
    worker.adopt(plan)
    take(worker, snapshot(ours))
    return worker


def large_compressors(kinds: Sequence[str], plan: Plan) -> list[ModelCompressor]:
    return [
        ModelCompressor(LARGE.specs, kinds[rank % len(kinds)], LayerRule(), 1, rank, plan=plan)
        for rank in range(max(5, len(kinds)))
    ]


def trained(
    part_bytes: int,
    kinds: Sequence[str],
    downlink: str = "auto",
    aggregation: Aggregation = MEAN,
    *,
    early: random.Random | None = None,
    optimizer: str = "sgd",
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """The parameters, the replica, and what a worker makes of the updates, after a few versions. early:
    chooses the parts that are stepped before the others."""
    plan = divided(part_bytes)
    ours = large_store(downlink, plan, aggregation, optimizer)
    worker, compressors = follower(ours, plan), large_compressors(kinds, plan)
    for step in range(3):
        given, numbers = large_shares(compressors, step), range(len(plan.parts))
        if early is None:
            take(worker, apply(ours, version=step + 1, shares=given))
        else:
            some = early.sample(numbers, early.choice((len(numbers), early.randrange(len(numbers)))))
            take(worker, apply_in_parts(ours, step + 1, given, some))
    return [each.numpy().tobytes() for each in ours.parameters], replica_bits(ours), bits(worker)


def test_the_plans_of_these_tests_cut_tensors_and_join_them() -> None:
    small, medium, whole = map(divided, PART_BYTES)
    assert len(small.parts) > 2 * len(medium.parts) > 4 * len(whole.parts) == 4
    for plan in (small, medium):
        assert any(len(unit.parts) > 1 for unit in plan.units)
        assert any(unit.last - unit.first > 1 for unit in plan.units)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, {}) for kind in KINDS),
        *(("mixed", {"downlink": each}) for each in ("none", "4bit", "8bit", "topk:ratio=50", "fp16")),
        ("topk of values", {"downlink": "none"}),
        *(("mixed", {"aggregation": each}) for each in (Median(), Trimmed(wrong=1), Krum(wrong=1))),
    ],
    ids=str,
)
def test_the_size_of_parts_has_no_say_in_the_bits(kind: str, more: dict[str, Any]) -> None:
    found = [trained(part_bytes, KINDS[kind], **more) for part_bytes in PART_BYTES]
    assert found[0] == found[1] == found[2]
    assert all(replica == worker for _, replica, worker in found)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, {}) for kind in KINDS),
        *(
            ("mixed", {"downlink": each})
            for each in ("none", "4bit", "8bit", "topk:ratio=50", "qsgd", "fp16")
        ),
        *(("mixed", {"aggregation": each}) for each in (Median(), Trimmed(wrong=1), Trimmed(wrong=2))),
        *(
            ("mixed", {"optimizer": each})
            for each in ("sgd:momentum=0.9,nesterov=on", "adamw:weight_decay=0.1", "adagrad")
        ),
    ],
    ids=str,
)
def test_nor_has_the_order_in_which_parts_become_final(kind: str, more: dict[str, Any]) -> None:
    size = PART_BYTES["optimizer" in more]
    expected = trained(size, KINDS[kind], **more)
    for seed in range(1 if more else 2):
        assert trained(size, KINDS[kind], early=random.Random(seed), **more) == expected


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad:lr_decay=0.1"])
@pytest.mark.parametrize("kind", ["topk", "topk of values"])
def test_a_step_of_what_sparse_pushes_hold_leaves_the_bits_of_one_of_everything(
    kind: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(PART_BYTES[0], KINDS[kind], "none", optimizer=optimizer)
    calls = list[int]()
    store: Any = SteppedStore
    step = store._step_elements

    def counted(ours: Any, number: int, places: npt.NDArray[np.int64], *more: Any) -> None:
        part = ours.plan.parts[number]
        assert places.size < part.elements / 2
        calls.append(places.size)
        ours._gradient[part.start : part.end] = np.nan  # of what is not held, nothing is read
        step(ours, number, places, *more)

    monkeypatch.setattr(store, "_step_elements", counted)
    assert trained(PART_BYTES[0], KINDS[kind], optimizer=optimizer)[0] == expected[0]
    assert sum(calls) > 0


@pytest.mark.parametrize("kind", ["4bit", "topk", "none", "mixed"])
@pytest.mark.parametrize("missing", [(4,), (0, 1, 2, 3, 4)], ids=["one", "all"])
def test_replicas_stay_alike_where_parts_of_some_are_empty(kind: str, missing: Sequence[int]) -> None:
    """The workers are lost, or whose gradients are not finite, in the middle of their pushes."""
    plan, chance = divided(PART_BYTES[0]), random.Random(1)
    ours = large_store("auto", plan)
    worker, compressors = follower(ours, plan), large_compressors(KINDS[kind], plan)
    for step in range(4):
        given = large_shares(compressors, step)
        for rank in missing:
            contribution, push = given[rank]
            sent = frozenset(chance.sample(range(len(plan.parts)), len(plan.parts) // 2))
            cut = {part: payloads if part in sent else () for part, payloads in push.items()}
            given[rank] = contribution, cut
        order = chance.sample(range(len(plan.parts)), len(plan.parts))
        take(worker, apply_in_parts(ours, step + 1, given, order))
        assert bits(worker) == replica_bits(ours)


def test_payloads_with_other_borders_come_to_the_same_sum() -> None:
    """One worker joins small tensors, another sends each as it is, and one has a border within a tensor."""
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal(100).astype(np.float32) for _ in range(3)]
    borders = [(100,), (30, 70, 100), (30, 45, 70, 100)]
    given = [
        [dense(*row[start:end]) for start, end in pairwise((0, *ends))]
        for row, ends in zip(rows, borders, strict=True)
    ]
    found, expected = (np.full(100, np.nan, np.float32) for _ in range(2))
    add_up(given, [0.5, 0.25, 0.125], found)
    add_up([[dense(*row)] for row in rows], [0.5, 0.25, 0.125], expected)
    assert np.array_equal(found, expected)
    add_up([], [], found)
    assert not found.any(), "nobody has pushed it"


@pytest.mark.parametrize("version", [1, 2])  # the first one codes whole tensors
def test_payloads_are_freed_once_their_update_has_left(version: int) -> None:
    plan = divided(PART_BYTES[0])
    ours, compressors = large_store("auto", plan), large_compressors(("4bit",), plan)
    if version == 2:
        apply(ours, version=1, shares=large_shares(compressors, 0))
    shares = large_shares(compressors, 1)
    numbers = range(len(plan.parts))
    unit_of = {part: unit.first for unit in plan.units for part in unit.parts}
    held = {part: [ref(each.data) for _, push in shares for each in push[part]] for part in numbers}
    sent = list[int]()

    def send(update: Encoded) -> None:
        gone = [part for part in sent if unit_of[part] != unit_of[update.number]]
        assert not [part for part in gone for each in held[part] if each() is not None]
        sent.append(update.number)

    contributions = tuple(each for each, _ in shares)
    order = Apply(version=version, contributions=contributions, rate_factor=1.0, opened_at=0.0)
    given = [[push for _, push in shares]]
    del shares
    ours.apply(order, given.pop(), send)
    assert sorted(sent) == [*numbers]
