"""Parameter groups and clipping at the server, against torch's optimizers and clip_grad_norm_."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pushes import Share, apply, pushed

from gradwire.common.parts import ALIGNMENT, Plan, divide
from gradwire.compressors import LayerRule, ModelCompressor, PushTerms, decode
from gradwire.optim.optimizer import Optimizer, OptimizerGroup, parse_optimizer
from gradwire.proto import messages as m
from gradwire.proto.manifest import Manifest
from gradwire.server.job.aggregation import parse_aggregation
from gradwire.server.shard.clipping import clip
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.pending import StepRules

SHAPES = ((7, 5), (5,), (300, 30), (30,), (20, 30), (), (100, 90))
GROUP_OF = (0, 1, 0, 1, 0, 1, 1)
TENSORS = tuple(
    m.Tensor(name=f"t{place}", shape=shape, dtype="float32", group=group)
    for place, (shape, group) in enumerate(zip(SHAPES, GROUP_OF, strict=True))
)
JOB = OptimizerGroup(options=parse_optimizer("sgd"), learning_rate=0.1)
SMALL = 4 * ALIGNMENT  # bytes, so that the largest tensor is cut


def manifest(*groups: m.Group) -> Manifest:
    return Manifest(TENSORS, 100, groups)


DECAY = manifest(
    m.Group(optimizer="adamw:weight_decay=0.1"),
    m.Group(optimizer="adamw:weight_decay=0.0", learning_rate=0.02),
)
PLAIN = manifest(m.Group(optimizer="sgd"), m.Group(optimizer="sgd:weight_decay=0.1"))


def initial() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def store(model: Manifest, plan: Plan, downlink: str = "auto", **more: Any) -> SteppedStore:
    values = [value.numpy().reshape(-1).copy() for value in initial()]

    def build(parameters: Sequence[torch.Tensor]) -> Optimizer:
        return Optimizer.of_groups(model.optimizer_groups(JOB), parameters, model.group_of, model.ends)

    return SteppedStore(model, values, downlink, build, 5, StepRules(**more), plan)


def gradients(step: int, rank: int = 0, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def share(
    compressor: ModelCompressor, given: Sequence[torch.Tensor | None], version: int, samples: int = 8
) -> Share:
    making = compressor.begin(PushTerms(samples=samples, version=version))
    for place, gradient in enumerate(given):
        making.add(place, gradient)
    making.finish()
    return pushed(samples, making.sent)


def compressor(plan: Plan, spec: str = "none", rank: int = 0) -> ModelCompressor:
    return ModelCompressor(DECAY.specs, spec, LayerRule(), 1, rank, plan=plan)


def decoded(plan: Plan, given: Share) -> list[torch.Tensor]:
    """Return the decoded push, by tensor; zeros where it has no payload."""
    flat = torch.zeros(plan.elements)
    for number, payloads in given[1].items():
        at = plan.parts[number].start
        for payload in payloads:
            flat[at : at + payload.elements] = torch.from_numpy(decode(payload))
            at += payload.elements
    pairs = zip(plan.starts, plan.starts[1:], SHAPES, strict=False)
    return [flat[start:end].view(shape) for start, end, shape in pairs]


def of_torch(make: Any, first: dict[str, Any], second: dict[str, Any]) -> tuple[list[torch.Tensor], Any]:
    parameters = [value.requires_grad_() for value in initial()]
    of_group = [[each for each, of in zip(parameters, GROUP_OF, strict=True) if of == n] for n in range(2)]
    return parameters, make([{"params": of_group[0], **first}, {"params": of_group[1], **second}], lr=0.1)


def halving(step: int) -> float:
    return float(0.5 ** (step // 2))


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("part_bytes", [SMALL, 1 << 30])
def test_groups_step_as_torchs_param_groups_to_the_bit(part_bytes: int, told: bool) -> None:
    """Also under a plan that comes in between. told: rates come with the pushes instead of the job."""
    plan = DECAY.plan(part_bytes)
    ours = store(DECAY, plan)
    expected, reference = of_torch(
        torch.optim.AdamW, {"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 0.02}
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(reference, halving)
    for step in range(8):
        if step == 4:
            plan = replace(divide([spec.elements for spec in DECAY.specs], 1), number=2)
            ours.adopt(plan)
        given = [share(compressor(plan), gradients(step), step)]
        rates = [group["lr"] for group in reference.param_groups]
        factor = 7.0 if told else halving(step)
        apply(ours, version=step + 1, shares=given, rate_factor=factor, learning_rates=rates if told else ())
        for parameter, gradient in zip(expected, gradients(step), strict=True):
            parameter.grad = gradient
        reference.step()
        scheduler.step()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters, expected, strict=True))


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_what_sparse_pushes_hold_is_stepped_with_its_groups_rate(limit: float) -> None:
    """Without a limit these elements alone are looked at; with one all are clipped before."""
    model = manifest(m.Group(optimizer="sgd"), m.Group(optimizer="sgd", learning_rate=0.5))
    plan = model.plan(SMALL)
    ours, worker = store(model, plan, clip_norm=limit), compressor(plan, "topk:ratio=50,values=float32")
    expected = [value.requires_grad_() for value in initial()]
    groups = [{"params": [expected[place]], "lr": (0.1, 0.5)[group]} for place, group in enumerate(GROUP_OF)]
    reference = torch.optim.SGD(groups)
    for step in range(3):
        given = share(worker, gradients(step), step)
        apply(ours, version=step + 1, shares=[given])
        for parameter, gradient in zip(expected, decoded(plan, given), strict=True):
            parameter.grad = gradient
        if limit:
            torch.nn.utils.clip_grad_norm_(expected, limit)
        reference.step()
        for parameter, value in zip(ours.parameters, expected, strict=True):
            tolerance = 1e-5 if limit else 0.0
            torch.testing.assert_close(parameter, value.detach(), rtol=tolerance, atol=tolerance / 10)


# ---- clipping


@pytest.mark.parametrize("spec", ["none", "4bit", "topk:ratio=8", "8bit", "bf16"])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_the_mean_gradient_is_clipped_as_clip_grad_norm_clips_it(spec: str, scale: float) -> None:
    """Gradients of the one scale are longer than the limit, those of the other are not."""
    plan, limit = PLAIN.plan(SMALL), 2.0
    ours = store(PLAIN, plan, clip_norm=limit)
    workers = [compressor(plan, spec, rank) for rank in range(3)]
    expected, reference = of_torch(torch.optim.SGD, {}, {"weight_decay": 0.1})
    assert math.isnan(ours.gradient_norm)
    for step in range(4):
        given = [
            share(worker, gradients(step, rank, scale), step, samples=8 + rank)
            for rank, worker in enumerate(workers)
        ]
        apply(ours, version=step + 1, shares=given)
        worth = [decoded(plan, each) for each in given]
        for place, parameter in enumerate(expected):
            sums = [each[place] * (8 + rank) for rank, each in enumerate(worth)]
            parameter.grad = torch.stack(sums).sum(0) / (8 + 9 + 10)
        norm = torch.nn.utils.clip_grad_norm_(expected, limit)
        assert (float(norm) > limit) == (scale == 1.0)
        assert ours.gradient_norm == pytest.approx(float(norm), rel=1e-6)
        reference.step()
        for parameter, value in zip(ours.parameters, expected, strict=True):
            torch.testing.assert_close(parameter, value.detach(), rtol=1e-5, atol=1e-7)


def test_what_no_push_has_counts_for_nothing() -> None:
    """Neither in the norm, where the version before had something, nor for the optimizer."""
    plan = PLAIN.plan(SMALL)
    ours, worker = store(PLAIN, plan, clip_norm=1.0), compressor(plan)
    expected, reference = of_torch(torch.optim.SGD, {}, {"weight_decay": 0.1})
    for step, present in enumerate([(0, 1, 2, 3, 4, 5, 6), (1, 4), (0, 2, 5)]):
        given = [each if place in present else None for place, each in enumerate(gradients(step))]
        apply(ours, version=step + 1, shares=[share(worker, given, step)])
        for parameter, gradient in zip(expected, given, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(expected, 1.0)
        assert ours.gradient_norm == pytest.approx(float(norm), rel=1e-6)
        reference.step()
        for parameter, value in zip(ours.parameters, expected, strict=True):
            torch.testing.assert_close(parameter, value.detach(), rtol=1e-5, atol=1e-7)


def test_a_gradient_that_weighs_less_is_clipped_by_its_own_norm() -> None:
    """The case is async mode with inverse rates: the weight is applied after clipping."""
    plan = PLAIN.plan(SMALL)
    ours, whole = store(PLAIN, plan, clip_norm=1.0), store(PLAIN, plan, clip_norm=1.0)
    apply(ours, version=1, shares=[share(compressor(plan), gradients(0), 0)], weight=0.25)
    apply(whole, version=1, shares=[share(compressor(plan), gradients(0), 0)], rate_factor=0.25)
    assert ours.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-6)
    moved = [a - b for a, b in zip(ours.parameters, initial(), strict=True)]
    expected = [a - b for a, b in zip(whole.parameters, initial(), strict=True)]
    torch.testing.assert_close(moved[0], expected[0], rtol=1e-4, atol=1e-6)  # of the group without decay
    torch.testing.assert_close(moved[2], expected[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["mean", "krum:wrong=1", "median"])
def test_parts_have_no_say_in_the_bits_of_a_clipped_step(aggregation: str) -> None:
    found: list[list[bytes]] = []
    for part_bytes in (SMALL, 1 << 30):
        plan = DECAY.plan(part_bytes)
        ours = store(DECAY, plan, clip_norm=1.0, aggregation=parse_aggregation(aggregation))
        workers = [compressor(plan, "4bit", rank) for rank in range(5)]
        for step in range(3):
            given = [share(worker, gradients(step, rank), step) for rank, worker in enumerate(workers)]
            apply(ours, version=step + 1, shares=given)
        found.append([each.numpy().tobytes() for each in ours.parameters])
        assert ours.gradient_norm > 1.0
    assert found[0] == found[1]


def test_threads_have_no_say_in_the_norm() -> None:
    gradient, threads = (
        torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)),
        torch.get_num_threads(),
    )
    found: set[float] = set()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.add(clip(gradient.clone(), [0, 1 << 20], 1.0))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert found.pop() == pytest.approx(
        float(torch.sqrt(torch.sum(torch.square(gradient.double())))), rel=1e-12
    )
