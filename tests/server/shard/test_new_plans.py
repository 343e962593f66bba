"""A new plan in the middle of a run has no say in the bits: of parameters, replicas, residuals and steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from pushes import apply, bits, replica_bits, snapshot, take

from gradwire.common.parts import ALIGNMENT, Plan, arrange
from gradwire.compressors import LayerRule, ModelCompressor
from gradwire.worker.session.replica import Replica

from . import test_presence as presence
from .test_store_in_parts import KINDS, LARGE, PART_BYTES, divided, large_shares, large_store

SIZES = [spec.elements for spec in LARGE.specs]


def anyhow(seed: int) -> Plan:
    """Any units, and of each large tensor that is one any cuts."""
    draw, units, cuts = random.Random(seed), list[int](), list[int]()
    last, start = len(SIZES), sum(SIZES)
    while last:
        units.append(min(last, draw.choice((1, 1, 2, 3))))
        last -= units[-1]
        start -= sum(SIZES[last : last + units[-1]])
        if units[-1] == 1:
            cuts += [cut for cut in range(start, start + SIZES[last], ALIGNMENT)[1:] if draw.random() < 0.5]
    return arrange(SIZES, units, sorted(cuts))


ALWAYS = [divided(PART_BYTES[0])] * 5
CHANGING = [divided(PART_BYTES[0]), anyhow(1), divided(PART_BYTES[2]), anyhow(2), divided(PART_BYTES[1])]


def trained(
    plans: Sequence[Plan], kinds: Sequence[str], downlink: str, optimizer: str
) -> tuple[list[bytes], list[bytes], list[bytes], list[bytes]]:
    """A version under each plan. Returns parameters, replica, what a worker makes of the updates, and what
    the workers owe."""
    ours, model = large_store(downlink, plans[0], optimizer=optimizer), torch.nn.Module()
    for tensor in LARGE.tensors:
        model.register_parameter(tensor.name, torch.nn.Parameter(torch.zeros(tensor.shape)))
    worker = Replica(model, 100)
    worker.adopt(plans[0])
    take(worker, snapshot(ours))
    compressors = [
        ModelCompressor(LARGE.specs, kinds[rank % len(kinds)], LayerRule(), 1, rank, plan=plans[0])
        for rank in range(5)
    ]
    for step, plan in enumerate(plans):
        if step:
            numbered = replace(plan, number=step + 1)
            ours.adopt(numbered)
            worker.adopt(numbered)
            for compressor in compressors:
                compressor.adopt(numbered)
        take(worker, apply(ours, version=step + 1, shares=large_shares(compressors, step)))
    owed = [each.ledger.residual.numpy().tobytes() for each in compressors]
    return [each.numpy().tobytes() for each in ours.parameters], replica_bits(ours), bits(worker), owed


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("kind", "downlink"),
    [("4bit", "4bit"), ("4bit", "auto"), ("topk", "auto"), ("topk of values", "auto"), ("none", "none"),
     ("mixed", "auto"), ("1bit", "topk:ratio=50")],
)  # fmt: skip
def test_bits_do_not_depend_on_it(kind: str, downlink: str, optimizer: str) -> None:
    expected = trained(ALWAYS, KINDS[kind], downlink, optimizer)
    found = trained(CHANGING, KINDS[kind], downlink, optimizer)
    assert found == expected
    assert found[1] == found[2]


@pytest.mark.parametrize(("spec", "make"), presence.TORCH, ids=[spec for spec, _ in presence.TORCH])
def test_one_worker_trains_as_torch_does(
    spec: str, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
) -> None:
    """Whichever gradients are None, so that neighbours have taken other numbers of steps."""
    plans, draw = presence.PLANS, random.Random(1)
    ours, worker = presence.store(spec, plans[0]), presence.compressor("none", plans[0])
    theirs = [value.requires_grad_() for value in presence.initial()]
    reference = make(theirs)
    for version in range(1, 13):
        gradients = presence.drawn(version, presence.some(draw) if version % 4 else presence.EVERY)
        apply(ours, version=version, shares=[presence.push(worker, gradients, version)])
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        reference.step()
        for parameter, value in zip(ours.parameters, theirs, strict=True):
            assert torch.equal(parameter, value)
        plan = draw.choice(plans)
        for each in (ours, worker):
            each.adopt(plan)


def test_what_has_taken_the_same_steps_is_stepped_as_one_again() -> None:
    small, whole = presence.SMALL, presence.WHOLE
    ours = presence.store("adam", small)
    worker = presence.compressor("none", small)
    apply(ours, version=1, shares=[presence.push(worker, presence.drawn(1, presence.EVERY), 1)])
    for plan, runs in ((whole, len(whole.parts)), (small, len(small.parts))):
        ours.adopt(plan)
        optimizer = ours._optimizer  # pyright: ignore[reportPrivateUsage]
        assert sum(map(len, optimizer._runs)) == runs  # pyright: ignore[reportPrivateUsage]
