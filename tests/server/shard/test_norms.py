"""The square norms of the mean gradient, estimated from what workers send, against the true ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pushes import apply, cut_plan, pushed

from gradwire.common.parts import Plan, arrange, divide
from gradwire.compressors import LayerRule, ModelCompressor, PushTerms, TensorSpec, decode
from gradwire.optim.optimizer import Optimizer, parse_optimizer
from gradwire.planning import NORM_VERSIONS, is_measured
from gradwire.proto.manifest import Manifest
from gradwire.proto.messages import Tensor
from gradwire.server.job.aggregation import Median
from gradwire.server.shard.making import SteppedStore
from gradwire.server.shard.pending import StepRules

Array = npt.NDArray[np.float64]

# The second is sent whole, and has one dimension. Strata of ten elements divide all others evenly.
SHAPES = [(40, 50), (7,), (30, 20), (20, 10)]
SIZES = [math.prod(shape) for shape in SHAPES]
STARTS = [0, *np.cumsum(SIZES).tolist()]
SPECS = [TensorSpec(name=f"t{place}", shape=shape) for place, shape in enumerate(SHAPES)]
MANIFEST = Manifest(tuple(Tensor(name=spec.name, shape=spec.shape, dtype="float32") for spec in SPECS), 100)
SAMPLES = (32, 8, 17)
RATIO = 10
PLANS = {
    "a unit for each": arrange(SIZES, [1] * 4, []),
    "cut into parts": cut_plan([700, 700, 600], [7], [600], [150, 50]),
    "one unit": divide(SIZES, 1 << 30),
    "one merged unit": replace(divide(SIZES, 1 << 30), merged=True),
}
# First and last element of each draw: of a tensor, or of the sparse tensors that lie end to end in a unit.
SEPARATE = [(STARTS[place], STARTS[place + 1]) for place in (0, 2, 3)]
TOGETHER = [(STARTS[0], STARTS[1]), (STARTS[2], STARTS[4])]


def store(plan: Plan, downlink: str = "none", **options: Any) -> SteppedStore:
    values = [np.zeros(size, np.float32) for size in SIZES]
    sgd = parse_optimizer("sgd")
    chosen: dict[str, Any] = {"takes_norms": True, **options}
    rules = StepRules(**chosen)
    return SteppedStore(MANIFEST, values, downlink, lambda ps: Optimizer(sgd, ps, 0.0), 0, rules, plan)


def workers(*specs: str, plan: Plan, owed: float = 0.0) -> list[ModelCompressor]:
    """owed: standard deviation of each residual."""
    found = [
        ModelCompressor(SPECS, spec, LayerRule(), seed=1, rank=rank, plan=plan)
        for rank, spec in enumerate(specs)
    ]
    for rank, each in enumerate(found):
        each.ledger.residual.normal_(std=owed, generator=torch.Generator().manual_seed(rank))
    return found


def gradients(rank: int) -> list[torch.Tensor]:
    """Each tensor has gradients of another size."""
    rng = np.random.default_rng(rank)
    return [
        torch.from_numpy(((place + 1) * rng.standard_normal(shape)).astype(np.float32))
        for place, shape in enumerate(SHAPES)
    ]


def mean() -> Array:
    each = [np.concatenate([g.numpy().reshape(-1) for g in gradients(rank)]) for rank in range(3)]
    return np.average(np.array(each, np.float64), axis=0, weights=SAMPLES)


def by_tensor(values: Array) -> list[float]:
    return [float(np.sum(values[start:end])) for start, end in pairwise(STARTS)]


def step(
    ours: SteppedStore,
    compressors: Sequence[ModelCompressor],
    base: int,
    *,
    measured: bool = True,
    absent: Sequence[tuple[int, int]] = (),
    **order: Any,
) -> list[Array]:
    """Make version base + 1, or the one in `order`; return the decoded push of each worker.

    absent: pairs of a rank and a tensor without a gradient.
    """
    shares, sent = [], list[Array]()
    for rank, compressor in enumerate(compressors):
        begun = compressor.begin(PushTerms(samples=8, version=base, measured=measured))
        for place, gradient in reversed([*enumerate(gradients(rank))]):
            begun.add(place, None if (rank, place) in absent else gradient)
        begun.finish()
        shares.append(pushed(SAMPLES[rank], dict(begun.sent)))
        whole = np.zeros(STARTS[-1])
        for part, payloads in begun.sent.items():
            bounds = compressor.plan.parts[part]
            whole[bounds.start : bounds.end] = np.concatenate([decode(each) for each in payloads])
        sent.append(whole)
    chosen: dict[str, Any] = {"version": base + 1, "shares": shares, **order}
    apply(ours, **chosen)
    return sent


def measured_versions() -> Iterator[int]:
    return filter(is_measured, count())


def variance(draw: str, squares: Array, start: int, end: int) -> float:
    """The variance of d / k times the sum of k of these d squares, of which those of other tensors are 0."""
    d = end - start
    k = d // RATIO
    if draw == "uniform":
        return d * d * (1 - k / d) * float(np.var(squares[start:end], ddof=1)) / k
    return float((d / k) ** 2 * np.var(squares[start:end].reshape(k, RATIO), axis=1).sum())


@pytest.mark.parametrize("draw", ["uniform", "stratified"])
@pytest.mark.parametrize(
    ("name", "downlink"), [*((name, "none") for name in PLANS), ("a unit for each", "auto")]
)
def test_the_estimate_is_unbiased_however_large_the_residuals_are(
    name: str, downlink: str, draw: str
) -> None:
    plan, draws = PLANS[name], 8 * NORM_VERSIONS
    ours = store(plan, downlink)
    spec = f"randk:ratio={RATIO},draw={draw},values=float32"
    compressors = workers(spec, spec, spec, plan=plan, owed=30.0)
    found: list[tuple[float, ...]] = []
    for number, base in enumerate(islice(measured_versions(), draws)):
        step(ours, compressors, base)
        if number % NORM_VERSIONS == NORM_VERSIONS - 1:
            found.append(ours.square_norms)
    assert min(each.ledger.norm() for each in compressors) > 10 * np.linalg.norm(mean())
    estimates, true = np.mean(found, axis=0), by_tensor(mean() ** 2)
    for place in (0, 2, 3):
        (bounds,) = [
            (start, end)
            for start, end in (TOGETHER if plan.merged else SEPARATE)
            if start <= STARTS[place] < end
        ]
        squares = np.zeros(STARTS[-1])
        squares[STARTS[place] : STARTS[place + 1]] = mean()[STARTS[place] : STARTS[place + 1]] ** 2
        error = math.sqrt(variance(draw, squares, *bounds) / draws)
        assert abs(estimates[place] - true[place]) < 4.5 * error
        assert error < 0.1 * true[place]
    # With the residuals in what was sent, the same estimate is off by far.
    biased = store(plan, downlink)
    step(biased, workers(spec, spec, spec, plan=plan, owed=30.0), 0, measured=False)
    assert all(biased.square_norms[place] > 5 * true[place] for place in (0, 2, 3))


@pytest.mark.parametrize("draw", ["uniform", "stratified"])
@pytest.mark.parametrize("name", PLANS)
def test_one_version_is_elements_over_drawn_elements_times_what_was_sent(name: str, draw: str) -> None:
    plan, spec = PLANS[name], f"randk:ratio={RATIO},draw={draw},values=float32"
    ours, compressors = store(plan), workers(spec, spec, spec, plan=plan, owed=3.0)
    sent = np.average(step(ours, compressors, 0), axis=0, weights=SAMPLES)
    squares = by_tensor(sent**2)
    expected = [squares[place] * (1 if place == 1 else RATIO) for place in range(4)]
    assert ours.square_norms == pytest.approx(expected, rel=1e-5)
    assert np.count_nonzero(sent) == sum(SIZES) // RATIO + 7


@pytest.mark.parametrize(
    ("specs", "of"),
    [
        (["none"] * 3, "exact"),
        (["topk:ratio=10,values=float32"] * 3, "sent"),
        (["randk:ratio=10", "topk:ratio=10", "randk:ratio=10"], "sent"),
        (["randk:ratio=10", "none", "randk:ratio=10"], "sent"),
        (["randk:ratio=10", "randk:ratio=20", "randk:ratio=10"], "sent"),
    ],
)
def test_what_is_not_one_draw_counts_as_it_was_sent(specs: list[str], of: str) -> None:
    plan = PLANS["a unit for each"]
    ours = store(plan)
    sent = step(ours, workers(*specs, plan=plan, owed=0.0 if of == "exact" else 1.0), 0)
    expected = mean() if of == "exact" else np.average(sent, axis=0, weights=SAMPLES)
    assert ours.square_norms == pytest.approx(by_tensor(expected**2), rel=1e-5)


@pytest.mark.parametrize("name", PLANS)
def test_a_worker_without_a_gradient_of_a_tensor_counts_as_zeros(name: str) -> None:
    plan, spec = PLANS[name], f"randk:ratio={RATIO},values=float32"
    ours = store(plan)
    absent = [(0, 2), (0, 0), (1, 0), (2, 0)]  # the last three: tensor 0 at all workers
    sent = step(ours, workers(spec, spec, spec, plan=plan, owed=3.0), 0, absent=absent)
    squares = by_tensor(np.average(sent, axis=0, weights=SAMPLES) ** 2)
    drawn = np.count_nonzero(sent[1][STARTS[2] : STARTS[3]])
    assert 20 < drawn < 100
    assert ours.square_norms[0] == 0.0
    assert ours.square_norms[2] == pytest.approx(SIZES[2] / drawn * squares[2], rel=1e-5)
    # In a merged unit the first worker draws from the last tensor alone, and so other elements of it.
    assert ours.square_norms[3] == pytest.approx((1 if plan.merged else RATIO) * squares[3], rel=1e-5)


def test_another_aggregation_than_the_mean_is_measured_as_it_is_stepped() -> None:
    plan, spec = PLANS["a unit for each"], f"randk:ratio={RATIO},values=float32"
    ours = store(plan, aggregation=Median())
    sent = step(ours, workers(spec, spec, spec, plan=plan), 0)
    squares = by_tensor(np.median(sent, axis=0) ** 2)
    expected = [squares[0] * RATIO, squares[1], squares[2] * RATIO, squares[3] * RATIO]
    assert ours.square_norms == pytest.approx(expected, rel=1e-5)


def test_norms_are_measured_in_the_windows_alone_and_are_the_mean_of_the_last_versions() -> None:
    plan, spec = PLANS["a unit for each"], "randk:ratio=10"
    ours, compressors = store(plan), workers(*[spec] * 3, plan=plan)
    seen, ones = [ours.square_norms], list[tuple[float, ...]]()
    for base in range(60):
        alone = store(plan)  # measures this version alone
        copies = workers(*[spec] * 3, plan=plan)
        step(ours, compressors, base, measured=is_measured(base))
        step(alone, copies, base, measured=is_measured(base))
        if is_measured(base):
            ones.append(alone.square_norms)
            expected = np.mean(ones[-NORM_VERSIONS:], axis=0).tolist()
            for place in (0, 2, 3):  # the other one is sent with its residual
                assert ours.square_norms[place] == pytest.approx(expected[place])
        else:
            assert alone.square_norms == ()
            assert ours.square_norms is seen[-1]
        seen.append(ours.square_norms)


def test_a_version_without_gradients_is_left_out_of_the_mean() -> None:
    plan = PLANS["a unit for each"]
    ours, compressors = store(plan), workers(*["randk:ratio=10"] * 3, plan=plan)
    step(ours, compressors, 0)
    before = ours.square_norms
    apply(ours, version=2, shares=[])
    assert ours.square_norms == before


def test_only_jobs_whose_plans_take_norms_measure_them() -> None:
    plan = PLANS["a unit for each"]
    ours = store(plan, takes_norms=False)
    step(ours, workers(*["randk:ratio=10"] * 3, plan=plan), 0)
    assert ours.square_norms == ()


@pytest.mark.parametrize(("base", "version", "measured"), [(3, 30, True), (30, 3, False)])
def test_where_pushes_are_applied_singly_the_version_of_the_gradient_decides(
    base: int, version: int, measured: bool
) -> None:
    plan = PLANS["a unit for each"]
    ours = store(plan)
    step(ours, workers("randk:ratio=10", plan=plan), base, version=version, base_version=base)
    assert bool(ours.square_norms) is measured


def test_delay_compensation_is_no_part_of_the_gradient() -> None:
    plan, found = PLANS["a unit for each"], []
    for strength in (0.0, 1e4):
        ours = store(plan, delay_compensation=strength)
        step(ours, workers("none", plan=plan), 0, base_version=0)
        ours._downlink.replica.add_(1.0)  # pyright: ignore[reportPrivateUsage]  # the parameters have moved
        step(ours, workers("none", plan=plan), 0, version=2, base_version=0)
        found.append(ours.square_norms)
    assert found[0] == found[1]


def test_a_store_that_restores_an_image_goes_on_with_the_same_bits() -> None:
    plan, spec = PLANS["one merged unit"], "randk:ratio=10"
    calm, compressors = store(plan), workers(*[spec] * 3, plan=plan, owed=1.0)
    for base in range(5):
        step(calm, compressors, base)
    other = store(plan)
    other.restore(calm.image())
    assert other.square_norms == calm.square_norms
    same = workers(*[spec] * 3, plan=plan)
    for ours, theirs in zip(same, compressors, strict=True):
        ours.ledger.restore(theirs.ledger.image())
    for base in range(5, 12):
        step(calm, compressors, base, measured=is_measured(base))
        step(other, same, base, measured=is_measured(base))
        assert other.square_norms == calm.square_norms
        assert other.sha256() == calm.sha256()
