"""Sparsifiers, each against a plain reference that is written from its paper's definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.compressors import (
    DensePayload,
    IndexCoding,
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
    validate,
    wire_bytes,
)
from gradwire.compressors.feedback import FeedbackState
from gradwire.compressors.indices import decode_indices, sparse_payload
from gradwire.compressors.k_reciprocal import allot, central, extremes
from gradwire.compressors.sparsifiers import SparseOptions, Values

Array = npt.NDArray[np.float32]


def normal(elements: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(elements).astype(np.float32)


def grid(elements: int, seed: int, steps: int = 9) -> Array:
    """Small multiples of 1/8: arithmetic on them is exact, and many are equal."""
    return (np.random.default_rng(seed).integers(-steps, steps + 1, elements) / 8).astype(np.float32)


def context(seed: int = 0, samples: int = 1, keep: int | None = None) -> StepContext:
    drawn = Random((seed,))
    return StepContext(samples=samples, version=0, epoch=math.inf, random=drawn, shared=drawn, keep=keep)


def bare(spec: str, values: Array, at: StepContext | None = None) -> Payload:
    """One step without feedback."""
    compressor = create_bare(spec)
    state = compressor.init(TensorSpec(name="w", shape=values.shape))
    payload, _ = compressor.compress(torch.from_numpy(values), state, at or context())
    validate(payload)
    return payload


def indices(payload: Payload) -> list[int]:
    assert isinstance(payload, SparsePayload)
    found: list[int] = decode_indices(payload).tolist()
    return found


def model(spec: str, elements: int, rank: int = 0, seed: int = 1) -> ModelCompressor:
    return ModelCompressor([TensorSpec(name="w", shape=(1, elements))], spec, LayerRule(), seed, rank)


def best(scores: npt.NDArray[np.float64], keep: int) -> list[int]:
    """The highest so many; of equal ones those with the lower index."""
    chosen: list[int] = np.sort(np.argsort(-scores, kind="stable")[:keep]).tolist()
    return chosen


# topk and l1


@pytest.mark.parametrize("elements", [1, 50, 20_000])  # the last is long enough for guessing a threshold
@pytest.mark.parametrize("make", [normal, grid])
def test_topk_sends_the_k_largest_of_gradient_and_residual(
    elements: int, make: Callable[[int, int], Array]
) -> None:
    compressor, residual = create("topk:ratio=7,values=float32"), np.zeros(elements, np.float32)
    state = compressor.init(TensorSpec(name="w", shape=(elements,)))
    for step in range(4):
        gradient = make(elements, step)
        payload, state = compressor.compress(torch.from_numpy(gradient), state, context())
        residual += gradient
        chosen = best(np.abs(residual).astype(np.float64), max(1, elements // 7))
        assert indices(payload) == chosen
        assert decode(payload)[chosen].tolist() == residual[chosen].tolist()
        residual[chosen] = 0.0
        assert np.array_equal(state.residual.numpy(), residual)


def test_l1_is_topk_that_forgets() -> None:
    forgetful = model("l1:ratio=10", 500)
    for step in range(4):
        (payload,) = forgetful.compress([torch.from_numpy(normal(500, step)).view(1, -1)], 1, version=step)
        expected = bare("topk:ratio=10", normal(500, step))
        assert payload.data.tobytes() == expected.data.tobytes()
    assert forgetful.ledger.norm() == 0.0


# gcac


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(0, 1 << 30), st.integers(1, 60))
def test_gcac_keeps_what_is_farthest_from_the_element_nearest_to_all(
    elements: int, seed: int, keep: int
) -> None:
    """The thesis compares every pair; a centroid is an element with the least summed distance."""
    values, keep = grid(elements, seed, 40), min(keep, elements)
    distances = np.abs(values[:, None].astype(np.float64) - values).sum(axis=1)
    centroid = values[distances == distances.min()].min()
    chosen = indices(bare("gcac", values, context(keep=keep)))
    farthest = best(np.abs(values.astype(np.float64) - centroid), keep)
    assert chosen == [place for place in farthest if centroid or values[place]]


# krngc


def worst_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Equations 4-5 and 4-6 as printed: the rank of each element in the list of its worst neighbour.

    A similarity falls with the distance, and each list has one denominator, so distances are compared.
    """
    distances = np.abs(values[:, None] - values)
    ranks = 1 + (distances[:, None, :] < distances[:, :, None]).sum(axis=2)
    worst: npt.NDArray[np.int64] = ranks.max(axis=0)
    return worst


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("elements", [1, 2, 5, 8, 23])
def test_the_worst_rank_of_an_element_follows_from_its_place_in_order(elements: int, seed: int) -> None:
    values = np.random.default_rng(seed).permutation(4 * elements)[:elements].astype(np.float64)
    place = values.argsort().argsort() + 1
    assert worst_ranks(values).tolist() == np.maximum(place, elements - place + 1).tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("elements", [1, 2, 5, 8, 23])
def test_krngc_keeps_the_largest_or_the_smallest_worst_ranks(elements: int, seed: int) -> None:
    values = np.random.default_rng(seed).permutation(4 * elements)[:elements].astype(np.float32)
    ranks = worst_ranks(values.astype(np.float64))
    for keep in range(elements + 1):
        distinct = indices(bare("krngc", values, context(keep=keep)))
        literal = indices(bare("krngc:reading=literal", values, context(keep=keep)))
        assert sorted(ranks[distinct]) == sorted(ranks)[elements - keep :]
        assert sorted(ranks[literal]) == sorted(ranks)[:keep]
        # 4-8 for the first k at which the intersection is large enough: none in it is left out for another.
        k = sorted(ranks)[keep - 1] if keep else 0
        assert set(np.flatnonzero(ranks < k)) <= set(literal) <= set(np.flatnonzero(ranks <= k))


@given(st.lists(st.integers(-2, 2), max_size=20), st.integers(0, 20))
def test_both_readings_send_each_element_once_also_where_many_are_equal(
    numbers: list[int], wanted: int
) -> None:
    values, keep = np.array(numbers, np.float32), min(wanted, len(numbers))
    order, start = np.sort(values), (len(numbers) - keep) // 2
    # The odd one is of the end that lies farther from zero.
    lows = (keep + int(keep > 0 and -order[0] > order[-1])) // 2
    ends = [*order[:lows], *order[len(numbers) - keep + lows :]]
    for found, expected in [
        (extremes(values, keep), ends),
        (central(values, keep), order[start : start + keep].tolist()),
    ]:
        assert found.indices.tolist() == sorted(set(found.indices.tolist()))
        assert np.array_equal(found.values, values[found.indices])
        assert np.sort(found.values).tolist() == expected


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1.0, 4.0, 1024.0])), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.5, 1.0]),  # with these powers of two, importance is exact in float32
    st.integers(0, 1 << 30),
    st.data(),
)
def test_allotment_is_a_sort_of_all_elements_by_importance(
    layers: list[tuple[int, float]], kappa: float, seed: int, draw: st.DataObject
) -> None:
    totals = [torch.from_numpy(grid(size, seed + place)) for place, (size, _) in enumerate(layers)]
    flops = [each for _, each in layers]
    keep = draw.draw(st.integers(0, sum(size for size, _ in layers)))
    omega = [np.abs(t.numpy().astype(np.float64)) / f**kappa for t, f in zip(totals, flops, strict=True)]
    ends = np.cumsum([size for size, _ in layers])
    importance = np.concatenate(omega)
    chosen = [place for place in best(importance, keep) if importance[place]]
    expected = np.bincount(np.searchsorted(ends, chosen, side="right"), minlength=len(layers))
    assert allot(totals, flops, kappa, keep) == expected.tolist()


@pytest.mark.parametrize(("kappa", "flops"), [(0.1, (1e9, 3e4, 7e6)), (10, (1e12, 1.0, 1e6)), (0, (1, 5, 9))])
def test_allotment_takes_flops_of_any_size(kappa: float, flops: tuple[float, ...]) -> None:
    totals = [torch.from_numpy(normal(300, seed)) for seed in range(3)]
    omega = [np.abs(t.numpy().astype(np.float64)) / f**kappa for t, f in zip(totals, flops, strict=True)]
    chosen = np.array(best(np.concatenate(omega), 250))
    assert allot(totals, flops, kappa, 250) == np.bincount(chosen // 300, minlength=3).tolist()


@pytest.mark.parametrize("keep", [1, 3000, 150_000, 240_000])
def test_allotment_is_exact_where_samples_guess(keep: int) -> None:
    sizes, flops = (200_000, 40_000, 17), (1e9, 3e4, 7e6)
    totals = [torch.from_numpy(normal(size, seed)) for seed, size in enumerate(sizes)]
    totals[1][: 1 << 14] *= 50  # where the sample takes little of it
    factors = [np.float32((3e4 / each) ** 0.1) for each in flops]
    omega = [np.abs(total.numpy()) * factor for total, factor in zip(totals, factors, strict=True)]
    chosen = np.argsort(-np.concatenate(omega), kind="stable")[:keep]
    expected = np.bincount(np.searchsorted(np.cumsum(sizes), chosen, side="right"), minlength=3)
    assert allot(totals, flops, 0.1, keep) == expected.tolist()


def test_krngc_divides_the_models_ratio_among_its_layers() -> None:
    """Few FLOPs count for a layer; small tensors have no part in it."""
    specs = [
        TensorSpec(name="cheap", shape=(20, 30), flops=1e3),
        TensorSpec(name="bias", shape=(30,), flops=1.0),
        TensorSpec(name="dear", shape=(40, 30), flops=1e9),
        TensorSpec(name="zero", shape=(10, 20), flops=1e3),
    ]
    compressor = ModelCompressor(specs, "krngc:ratio=20,warmup=0,kappa=0.05", LayerRule(), 1, 0)
    gradients = [torch.from_numpy(normal(s.elements, 5)).view(s.shape) for s in specs]
    gradients[3].zero_()
    payloads = compressor.compress(gradients, 1, version=0)
    large = [payload for payload in payloads if isinstance(payload, SparsePayload)]
    totals = [gradients[place].view(-1) for place in (0, 2, 3)]
    expected = allot(totals, [1e3, 1e9, 1e3], 0.05, 100)
    assert [payload.count for payload in large] == expected
    assert expected[0] > expected[1] > expected[2] == 0
    assert sum(expected) == 100


def test_krngc_takes_a_model_with_an_empty_tensor() -> None:
    """Manifests allow an empty dimension. It has no FLOPs, and nothing to send."""
    specs = [TensorSpec(name="empty", shape=(0, 4)), TensorSpec(name="w", shape=(5, 4))]
    compressor = ModelCompressor(specs, "krngc:ratio=4,warmup=0", LayerRule(), 1, 0)
    (payload,) = compressor.compress([torch.zeros(0, 4), torch.ones(5, 4)], 1, version=0)
    assert len(indices(payload)) == 5


# dgc


@pytest.mark.parametrize("elements", [1, 40, 1000])
def test_dgc_is_exact_where_its_sample_is_everything(elements: int) -> None:
    values = grid(elements, 3)
    assert indices(bare("dgc:ratio=5", values)) == indices(bare("topk:ratio=5", values))


def test_dgc_keeps_about_k_and_never_more() -> None:
    """The sample has 20 elements above the threshold, so the number of all above it is off by a fifth."""
    values, counts = normal(200_000), list[int]()
    for seed in range(12):
        chosen = indices(bare("dgc:ratio=100", values, context(seed)))
        assert chosen == best(np.abs(values).astype(np.float64), len(chosen))
        counts.append(len(chosen))
    assert max(counts) <= 2000
    assert min(counts) > 800
    assert np.mean(counts) == pytest.approx(1850, rel=0.1)


def test_dgc_keeps_what_differs_from_zero_of_a_gradient_that_is_nearly_all_zeros() -> None:
    """The gradient is like that of an embedding: the sampled threshold is 0, which everything reaches."""
    values = np.zeros(50_000, np.float32)
    values[::5000] = normal(10)
    assert indices(bare("dgc:ratio=1000", values)) == list(range(0, 50_000, 5000))


# threshold and randk


@pytest.mark.parametrize(("scale", "level"), [("mean", 0.5), ("sum", 0.125)])
def test_threshold_sends_tau_for_what_reaches_it(scale: str, level: float) -> None:
    values = np.array([level, -level, np.nextafter(level, 0, dtype=np.float32), 9, -7, 0, -0.0], np.float32)
    compressor = create(f"threshold:tau=0.5,scale={scale}")
    state = compressor.init(TensorSpec(name="w", shape=(7,)))
    payload, state = compressor.compress(torch.from_numpy(values), state, context(samples=4))
    assert isinstance(state, FeedbackState)
    assert indices(payload) == [0, 1, 3, 4]
    assert decode(payload).tolist() == [level, -level, 0, level, -level, 0, 0]
    assert state.residual.tolist() == (values - decode(payload)).tolist()


def test_randk_draws_alike_for_workers_and_anew_for_versions_and_tensors() -> None:
    specs = [TensorSpec(name=name, shape=(1, 3000)) for name in "ab"]
    workers = [ModelCompressor(specs, "randk:ratio=100", LayerRule(), 7, rank) for rank in (0, 3)]
    drawn: dict[tuple[int, int], list[int]] = {}
    for version in range(3):
        pushes = [
            worker.compress([torch.randn(1, 3000)] * 2, 8, version=version, workers=2) for worker in workers
        ]
        for tensor, (one, other) in enumerate(zip(*pushes, strict=True)):
            drawn[version, tensor] = indices(one)
            assert indices(other) == indices(one)
            # An index in each of 30 equal parts, and no byte for it: only the values travel.
            assert [index // 100 for index in indices(one)] == list(range(30))
            assert one.data.size == wire_bytes(one) == 2 * 30
    assert len({tuple(each) for each in drawn.values()}) == 6


# What sparsifiers share


def test_the_warm_up_takes_the_steps_of_dgc() -> None:
    kept = [1 / SparseOptions(ratio=1000, warmup=4).ratio_at(epoch) for epoch in (0, 1, 2.9, 3, 4, 99)]
    assert kept == pytest.approx([1 - 0.75, 1 - 0.9375, 1 - 0.984, 1 - 0.996, 0.001, 0.001], rel=0.02)
    compressor, gradient = model("dgc:ratio=1000", 1000), [torch.from_numpy(normal(1000)).view(1, -1)]
    counts = [
        len(indices(compressor.compress(gradient, 1, version=version, epoch=epoch)[0]))
        for version, epoch in enumerate([0, 0.99, 1, 2, 3, 4, 5])
    ]
    assert counts == [251, 251, 63, 15, 3, 1, 1]


@pytest.mark.parametrize("name", ["topk", "l1", "randk", "dgc", "gcac", "krngc"])
def test_a_dense_ramp_sends_every_element_until_the_warm_up_is_over(name: str) -> None:
    values, spec = normal(1000), f"{name}:ratio=50,warmup=2,ramp=dense,values=float32,momentum=0"
    compressor = model(spec, 1000)
    for version, epoch in enumerate((0.0, 1.99)):
        (payload,) = compressor.compress(
            [torch.from_numpy(values).view(1, -1)], 1, version=version, epoch=epoch
        )
        assert decode(payload).tolist() == values.tolist()
    (payload,) = compressor.compress([torch.from_numpy(values).view(1, -1)], 1, version=2, epoch=2.0)
    assert len(indices(payload)) == 20


def test_as_many_elements_are_kept_as_the_ratio_fits_in_whole() -> None:
    options = SparseOptions(ratio=10)
    assert [options.keep(elements, 0.0) for elements in (0, 1, 10, 15, 19, 20, 1000)] == [
        0,
        1,
        1,
        1,
        1,
        2,
        100,
    ]


@pytest.mark.parametrize("values", Values)
def test_values_may_travel_in_any_form_and_what_that_loses_is_kept(values: Values) -> None:
    gradient, compressor = normal(3000), create(f"topk:ratio=10,values={values}")
    state = compressor.init(TensorSpec(name="w", shape=(3000,)))
    payload, state = compressor.compress(torch.from_numpy(gradient), state, context())
    chosen = best(np.abs(gradient).astype(np.float64), 300)
    sent, exact = decode(payload)[chosen], gradient[chosen]
    assert indices(payload) == chosen
    assert np.array_equal(state.residual.numpy(), gradient - decode(payload))
    high, low = float(exact[exact > 0].mean()), float(exact[exact < 0].mean())
    means = np.where(exact > 0, np.float32(high), np.float32(low))
    bounds: dict[Values, npt.NDArray[Any]] = {
        Values.FLOAT32: np.zeros(300, np.float32),
        Values.BFLOAT16: np.abs(exact) * 2.0**-8,
        Values.FLOAT16: np.abs(exact) * 2.0**-11,
        Values.EIGHT_BIT: np.full(300, np.abs(exact).max() / 254 * 1.001, np.float32),
        Values.FOUR_BIT: np.abs(exact) / 2,  # the next lower power of two of the mean, or zero
        Values.ONE_BIT: np.abs(means - exact) + 1e-6,
    }
    assert (np.abs(sent - exact) <= bounds[values]).all()


@pytest.mark.parametrize("name", ["topk", "l1", "gcac", "krngc", "dgc", "randk"])
def test_a_ratio_is_kept_in_bytes_too(name: str) -> None:
    """Indices at about their entropy, and bfloat16 values: fewer than 32 bits at any of these ratios."""
    elements, gradient = 1 << 20, [torch.from_numpy(normal(1 << 20)).view(1, -1)]
    for ratio in (10, 100, 1000):
        sent = model(f"{name}:ratio={ratio}", elements).compress(gradient, 1, version=0, epoch=math.inf)
        assert len(sent) > 1  # a part each
        assert 4 * elements / sum(map(wire_bytes, sent)) >= ratio
        parts = [payload for payload in sent if isinstance(payload, SparsePayload)]
        share = sum(payload.count for payload in parts) / elements
        assert share == pytest.approx(1 / ratio, rel=0.3 if name == "dgc" else 1e-3)
        entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) * elements
        if name != "randk":  # spread evenly, which takes less
            assert entropy < 8 * sum(payload.index_bytes for payload in parts) < 1.1 * entropy


def test_a_bitmap_is_sent_where_it_is_the_smaller() -> None:
    """Runs, and gaps of two: Rice codes of one low bit spend a bit on every other zero."""
    gaps = np.concatenate([np.zeros(80, np.int64), np.full(400, 2)])
    where = (np.cumsum(gaps + 1) - 1).astype(np.uint32)
    elements = int(where[-1]) + 1
    values = bare("bf16", normal(where.size))
    assert isinstance(values, DensePayload)
    payload = sparse_payload(elements, where, values)
    validate(payload)
    assert (payload.coding, payload.index_bytes) == (IndexCoding.BITMAP, -(-elements // 8))
    assert indices(payload) == where.tolist()
    # Anything denser is no longer than it either.
    for ratio in (1, 1.5, 2, 3):
        dense = bare(f"topk:ratio={ratio}", normal(10_000))
        assert isinstance(dense, SparsePayload)
        assert dense.index_bytes <= 1250
