"""The state of the server's optimizer that a script saves and another server continues from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradwire.optim.optimizer import Optimizer, OptimizerGroup, parse_optimizer
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.moments import moments_of, recall_of

SPECS = ("adam:weight_decay=0.1", "sgd:momentum=0.9")
SIZES = (10000, 5, 6000, 0, 7)
MANIFEST = Manifest(
    tuple(
        m.Tensor(name=f"t{number}", shape=(size,), dtype="float32", group=number % 2)
        for number, size in enumerate(SIZES)
    ),
    10,
    tuple(m.Group(optimizer=spec) for spec in SPECS),
)
GROUPS = [OptimizerGroup(options=parse_optimizer(spec), learning_rate=0.1) for spec in SPECS]


def store(part_bytes: int) -> SteppedStore:
    plan = MANIFEST.plan(part_bytes)
    values = [np.full(size, 0.5, np.float32) for size in SIZES]
    of = MANIFEST.group_of, MANIFEST.ends
    return SteppedStore(MANIFEST, values, "none", lambda ps: Optimizer.of_groups(GROUPS, ps, *of), plan=plan)


def step(subject: SteppedStore, seed: int, parts: range | None = None) -> None:
    """One with a gradient of its own for each element, wherever it lies."""
    generator = torch.Generator().manual_seed(seed)
    gradient, optimizer = torch.randn(MANIFEST.elements, generator=generator), subject._optimizer  # pyright: ignore[reportPrivateUsage]
    for number in parts or range(len(subject.plan.parts)):
        part, parameter = subject.plan.parts[number], optimizer._parameters[number]  # pyright: ignore[reportPrivateUsage]
        assert parameter.grad is not None
        parameter.grad.copy_(gradient[part.start : part.end])
        optimizer.step(number)


@pytest.mark.parametrize(("before", "after"), [(1 << 20, 1 << 20), (16384, 1 << 20), (1 << 20, 16384)])
def test_another_store_goes_on_to_the_same_bits_however_it_is_divided(before: int, after: int) -> None:
    first, second = store(before), store(after)
    for seed in range(3):
        step(first, seed)
    moments = moments_of(first.remembered(), MANIFEST)
    assert {tensor: sorted(names) for tensor, names in moments.items()} == {
        0: ["exp_avg", "exp_avg_sq", "step"],
        1: ["momentum_buffer"],
        2: ["exp_avg", "exp_avg_sq", "step"],
        4: ["exp_avg", "exp_avg_sq", "step"],
    }
    assert moments[0]["step"].tolist() == [3]
    second._flat.copy_(first._flat)  # pyright: ignore[reportPrivateUsage]
    second.recall(recall_of(moments))
    for each in (first, second):
        step(each, 9)
    assert [value.tobytes() for value in second.values()] == [value.tobytes() for value in first.values()]


def test_what_was_never_stepped_is_left_out_and_begins_anew() -> None:
    first = store(1 << 20)
    assert moments_of(first.remembered(), MANIFEST) == {}
    first.recall(recall_of({}))
    step(first, 1)
    fresh = store(1 << 20)
    step(fresh, 1)
    assert [value.tobytes() for value in fresh.values()] == [value.tobytes() for value in first.values()]


def test_pieces_that_have_missed_steps_have_the_largest_count() -> None:
    first = store(16384)
    cut = [each for each, part in enumerate(first.plan.parts) if part.start < 10000 and part.end <= 10000]
    assert len(cut) > 1
    step(first, 1)
    step(first, 2, range(cut[0], cut[0] + 1))
    moments = moments_of(first.remembered(), MANIFEST)
    assert moments[0]["step"].tolist() == [2]
    assert moments[0]["exp_avg"].size == 10000
