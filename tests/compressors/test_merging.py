"""Units that a sparsifier chooses from as a whole, against a plain reference: concatenate, choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import plain_selection
import plain_sparse
import pytest
import torch
from flat import as_push, by_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.common.parts import Plan, arrange, divide
from gradwire.compressors import (
    DensePayload,
    IndexCoding,
    LayerRule,
    ModelCompressor,
    NonFiniteGradient,
    SparsePayload,
    TensorSpec,
    decode,
    registry,
    validate,
)
from gradwire.compressors.joining.merged import shares
from gradwire.compressors.sparsifiers import Density, RandKOptions

Array = npt.NDArray[np.float32]

# Two dimensions: the compressor's. One: dense, and between the others.
SHAPES = [(30, 30), (7,), (0, 4), (1, 1), (5, 601), (40,), (17, 3), (2, 9000), (64, 1), (3,)]
SPECS = [TensorSpec(name=f"t{place}", shape=shape) for place, shape in enumerate(SHAPES)]
SIZES = [spec.elements for spec in SPECS]
CHOSEN_FROM = [place for place, shape in enumerate(SHAPES) if len(shape) == 2]
UNITS = [len(SIZES)], [4, 5, 1], [1] * len(SIZES)
CHOOSING = [
    "topk:ratio=10,values=float32",
    "topk:ratio=30,decay=0.5",
    "topk:momentum=0.9,clip=1",
    "topk:values=8bit",
    "topk:values=4bit",
    "l1:ratio=20",
    "dgc:ratio=20,warmup=0",
    "gcac:ratio=30",
    "randk:ratio=10",
    "randk:ratio=10,draw=uniform",
    "randk:density=norm",
    "threshold:tau=0.02,scale=mean",
]
OTHERS = [
    "none",
    "bf16",
    "4bit",
    "2bit",
    "8bit",
    "qsgd",
    "1bit",
    "1bit:block=4096",
    "signsgd",
    "terngrad",
    "krngc:warmup=0",
]
LARGEST = float(np.finfo(np.float32).max)


def plan_of(units: Sequence[int], *, merged: bool = True) -> Plan:
    """units: of so many tensors, the last ones first."""
    return replace(arrange(SIZES, units, []), merged=merged)


def compressor_of(
    spec: str, units: Sequence[int] = UNITS[0], *, merged: bool = True, rank: int = 0
) -> ModelCompressor:
    plan = plan_of(units, merged=merged)
    return ModelCompressor(SPECS, spec, LayerRule(), seed=1, rank=rank, plan=plan)


def gradients(seed: int) -> list[torch.Tensor | None]:
    """Among them zeros, equal values, huge ones and tiny ones."""
    rng = np.random.default_rng(seed)
    found = [
        (rng.standard_normal(size) * 0.01 * (place + 1)).astype(np.float32)
        for place, size in enumerate(SIZES)
    ]
    found[4][rng.random(SIZES[4]) < 0.9] = 0.0
    found[6][:] = -0.125
    found[3][:] = [3e38, -1e-45, 1e30][seed % 3]
    return [torch.from_numpy(values).view(spec.shape) for values, spec in zip(found, SPECS, strict=True)]


def kept(subject: ModelCompressor) -> list[bytes]:
    velocity = subject.ledger.velocity
    return [each.numpy().tobytes() for each in (subject.ledger.residual, velocity) if each is not None]


def chosen_by(name: str, values: Array, keep: int) -> list[int]:
    """Return the elements that the reference chooses."""
    center = np.float32(0.0)
    if name == "gcac" and values.size:
        center = np.sort(values)[(values.size - 1) // 2]
    found: list[int] = plain_selection.select(values, keep, center=float(center)).indices.tolist()
    return found


@pytest.mark.parametrize("units", UNITS, ids=["one", "three", "each"])
@pytest.mark.parametrize("absent", [(), (0, 4), (7,), tuple(CHOSEN_FROM)])
@pytest.mark.parametrize("name", ["topk", "gcac"])
def test_it_sends_what_is_chosen_from_all_of_a_unit(
    name: str, absent: tuple[int, ...], units: Sequence[int]
) -> None:
    subject = compressor_of(f"{name}:ratio=10,values=float32", units)
    owed = [np.zeros(size, np.float32) for size in SIZES]
    for version in range(4):
        given = gradients(version)
        for place in absent:
            given[place] = None
        sent = by_tensor(subject.compress(given, 8, version=version), SPECS)
        last = len(SIZES)
        for count in units:
            places = [place for place in CHOSEN_FROM if last - count <= place < last and place not in absent]
            last -= count
            if not places:
                continue
            for place in places:
                gradient = given[place]
                assert gradient is not None
                with np.errstate(over="ignore"):
                    owed[place] = np.clip(owed[place] + gradient.numpy().reshape(-1), -LARGEST, LARGEST)
            total = np.concatenate([owed[place] for place in places])
            keep = sum(min(SIZES[place], max(1, SIZES[place] // 10)) for place in places)
            expected = np.zeros_like(total)
            indices = chosen_by(name, total, keep)
            expected[indices] = total[indices]
            got = np.concatenate([sent[place] for place in places])
            assert got.tobytes() == (expected + np.float32(0.0)).tobytes()
            total -= expected
            borders = np.cumsum([SIZES[place] for place in places])[:-1]
            for place, left in zip(places, np.split(total, borders), strict=True):
                owed[place] = left
        residual = np.split(subject.ledger.residual.numpy(), np.cumsum(SIZES)[:-1])
        for place in CHOSEN_FROM:
            assert np.array_equal(residual[place], owed[place])


def test_drawn_indices_are_those_of_the_unit_and_do_not_travel() -> None:
    subject, other = (compressor_of("randk:ratio=10,values=float32", rank=rank) for rank in (0, 1))
    payloads = subject.compress(gradients(0), 8, version=0)
    sparse = [payload for payload in payloads if isinstance(payload, SparsePayload)]
    sizes = [900, 3006, 51 + 18_000 + 64]
    assert [payload.elements for payload in sparse] == sizes
    keep = sum(min(SIZES[place], max(1, SIZES[place] // 10)) for place in CHOSEN_FROM)
    assert [payload.count for payload in sparse] == shares(keep, sizes, 0)
    assert all(payload.coding is IndexCoding.SEEDED and not payload.index_bytes for payload in sparse)
    assert len({payload.seed for payload in sparse}) == len(sizes)
    for payload in sparse:
        indices = plain_sparse.seeded_indices(payload.seed, payload.elements, payload.count)
        assert set(np.flatnonzero(decode(payload))) <= set(indices.tolist())
    # All ranks draw the same.
    theirs = [each for each in other.compress(gradients(1), 8, version=0) if isinstance(each, SparsePayload)]
    assert [payload.seed for payload in theirs] == [payload.seed for payload in sparse]


@given(st.lists(st.integers(0, 50), max_size=8), st.floats(0, 1))
def test_shares_are_fair(sizes: list[int], part: float) -> None:
    keep = round(part * sum(sizes))
    for version in (0, 1, 2, 12_345):
        found = shares(keep, sizes, version)
        assert sum(found) == (keep if sizes else 0)
        for share, size in zip(found, sizes, strict=True):
            assert 0 <= share <= size
            assert abs(share - keep * size / max(1, sum(sizes))) < 1


def test_a_tiny_stretch_has_its_turn() -> None:
    given = [shares(100, [70_000, 16, 29_984], version) for version in range(640)]
    assert 8 <= sum(share for _, share, _ in given) <= 12  # 640 * 100 * 16 / 100_000 = 10.24


@pytest.mark.parametrize("units", UNITS, ids=["one", "three", "each"])
@pytest.mark.parametrize("absent", [(), (0, 6, 7)])
@pytest.mark.parametrize("spec", [*CHOOSING, *OTHERS])
def test_nothing_is_lost(spec: str, absent: tuple[int, ...], units: Sequence[int]) -> None:
    """sent + residual == gradient + old residual, but for one rounding of each side."""
    without = f"{spec}{',' if ':' in spec else ':'}"
    if "momentum" in spec or "decay" in spec or spec in ("none", "l1:ratio=20"):
        return
    subject = compressor_of(f"{without}feedback=on,momentum=0", units)
    for version in range(4):
        given = gradients(version)
        for place in absent:
            given[place] = None
        before = subject.ledger.residual.numpy().astype(np.float64)
        payloads = subject.compress(given, 8, version=version)
        for payload in payloads:
            validate(payload)
        sent = np.concatenate(by_tensor(payloads, SPECS)).astype(np.float64)
        flat = [
            np.zeros(size) if each is None else each.numpy().astype(np.float64).reshape(-1)
            for each, size in zip(given, SIZES, strict=True)
        ]
        total = np.clip(np.concatenate(flat) + before, -LARGEST, LARGEST)
        after = subject.ledger.residual.numpy().astype(np.float64)
        limit = np.maximum((np.abs(total) + np.abs(sent)) * 2.0**-23, 2.0**-149)
        assert (np.abs(sent + after - total) <= limit).all()


@pytest.mark.parametrize("spec", CHOOSING)
def test_as_many_elements_are_kept_as_of_each_tensor_by_itself(spec: str) -> None:
    if spec.startswith(("threshold", "dgc")):
        return  # which do not know beforehand
    counts: list[int] = []
    for merged in (False, True):
        given = [torch.randn(each.shape) for each in SPECS]
        payloads = compressor_of(spec, merged=merged).compress(given, 8, version=0)
        counts.append(sum(each.count for each in payloads if isinstance(each, SparsePayload)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("spec", [*OTHERS, "threshold:tau=0.02,scale=mean"])
def test_whoever_does_not_choose_sends_the_same_bits(spec: str) -> None:
    merged, apart = (compressor_of(spec, merged=merged) for merged in (True, False))
    for version in range(3):
        sent = [
            by_tensor(each.compress(gradients(version), 8, version=version), SPECS)
            for each in (merged, apart)
        ]
        assert all(one.tobytes() == other.tobytes() for one, other in zip(*sent, strict=True))
        assert kept(merged) == kept(apart)


@pytest.mark.parametrize("spec", CHOOSING)
def test_units_of_one_tensor_send_what_they_would_apart(spec: str) -> None:
    merged, apart = (compressor_of(spec, UNITS[2], merged=merged) for merged in (True, False))
    for version in range(3):
        sent = [each.compress(gradients(version), 8, version=version) for each in (merged, apart)]
        assert [payload.data.tobytes() for payload in sent[0]] == [each.data.tobytes() for each in sent[1]]
        assert kept(merged) == kept(apart)


@pytest.mark.parametrize("spec", [*CHOOSING, *OTHERS])
def test_it_may_begin_and_end_within_a_job(spec: str) -> None:
    """To the same bits for everyone, with pushes that come back, and nothing is left after the last."""
    results: list[list[bytes]] = []
    for _ in range(2):
        subject, seen = compressor_of(spec, merged=False), list[bytes]()
        for version, (units, merged) in enumerate([(0, False), (0, True), (1, True), (0, False), (1, True)]):
            subject.adopt(plan_of(UNITS[units], merged=merged))
            payloads = subject.compress(gradients(version), 8, version=version)
            seen += [decode(payload).tobytes() for payload in payloads] + kept(subject)
            if version == 2:
                subject.ledger.put_back(as_push(payloads))
        subject.flush(gradients(9))
        assert not subject.ledger.residual.any()
        results.append(seen)
    assert results[0] == results[1]


@pytest.mark.parametrize("spec", CHOOSING)
@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named(spec: str, place: int, bad: float) -> None:
    subject, given = compressor_of(spec), gradients(1)
    subject.compress(gradients(0), 8, version=0)
    before, gradient = kept(subject), given[place]
    assert gradient is not None
    gradient.view(-1)[-1] = bad
    with pytest.raises(NonFiniteGradient, match=f"'t{place}'"):
        subject.compress(given, 8, version=1)
    assert kept(subject) == before


@pytest.mark.parametrize("spec", CHOOSING)
def test_a_version_that_a_delay_passes_over_is_taken_into_the_residual(spec: str) -> None:
    if spec.startswith(("l1", "dgc")) or "momentum" in spec:
        return
    subject = compressor_of(f"{spec},delay=2")
    assert not subject.compress(gradients(0), 8, version=0)
    assert subject.ledger.residual.any()
    assert subject.compress(gradients(1), 8, version=1)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(CHOOSING), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.data())
def test_any_sizes(spec: str, sizes: list[int], data: st.DataObject) -> None:
    specs = [
        TensorSpec(name=str(place), shape=(size, 1) if data.draw(st.booleans()) else (size,))
        for place, size in enumerate(sizes)
    ]
    subject = ModelCompressor(
        specs, spec, LayerRule(), 1, 0, plan=replace(divide(sizes, 1 << 30), merged=True)
    )
    for version in range(2):
        payloads = subject.compress([torch.randn(each.shape) for each in specs], 8, version=version)
        for payload in payloads:
            validate(payload)
            assert isinstance(payload, SparsePayload | DensePayload)
        assert sum(payload.elements for payload in payloads) == sum(sizes)


def test_every_compressor_is_here() -> None:
    assert {spec.partition(":")[0] for spec in [*CHOOSING, *OTHERS]} | {"fp16", "lowrank"} == set(
        registry.BUILT_IN
    )


# ---- densities by norms

NORMS = (4.0, 99.0, 1.0, 1.0, 3.0, 0.0, 2.0, 5.0, 5.0, 0.0)  # those of the others have no say


def by_norm(*, merged: bool, warmup: str = "0") -> list[SparsePayload]:
    plan = replace(plan_of(UNITS[0] if merged else UNITS[2], merged=merged), norms=NORMS)
    spec = f"randk:density=norm,ratio=3,warmup={warmup}"
    subject = ModelCompressor(SPECS, spec, LayerRule(), 1, 0, plan=plan)
    payloads = subject.compress(gradients(0), 8, version=0, epoch=0.0)
    return [payload for payload in payloads if isinstance(payload, SparsePayload) and payload.elements]


def test_densities_rise_with_the_norms_of_the_parameters() -> None:
    kept_of = {payload.elements: payload.count for payload in by_norm(merged=False)}
    # 0.001 and 0.02 at norms of 1 and 5, and 0.00475 more for each in between.
    assert kept_of == {900: int(900 * 0.01525), 1: 1, 3005: int(3005 * 0.0105), 51: 1, 18_000: 360, 64: 1}


def test_a_merged_unit_keeps_as_many_as_the_densities_of_its_tensors_say() -> None:
    counts = [sum(each.count for each in by_norm(merged=merged)) for merged in (True, False)]
    assert counts[0] == counts[1]


def test_a_warm_up_grows_to_each_density() -> None:
    kept_of = {payload.elements: payload.count for payload in by_norm(merged=False, warmup="1")}
    assert kept_of[18_000] == int(18_000 * 0.02**0.5)


@pytest.mark.parametrize("merged", [False, True])
def test_a_dense_ramp_sends_everything_whatever_the_densities(merged: bool) -> None:
    payloads = by_norm(merged=merged, warmup="1,ramp=dense")
    assert [payload.count for payload in payloads] == [payload.elements for payload in payloads]


def test_planners_are_told_the_densities_by_norms() -> None:
    plan = replace(plan_of(UNITS[2], merged=False), norms=NORMS)
    subject = ModelCompressor(SPECS, "randk:density=norm,warmup=1", LayerRule(), 1, 0, plan=plan)
    for epoch, power in ((0.0, 0.5), (1.0, 1.0)):
        said = dict(zip((spec.elements for spec in SPECS), subject.sent_shares(epoch), strict=True))
        assert said[900] == pytest.approx(0.01525**power)
        assert said[18_000] == pytest.approx(0.02**power)
        sparse = [LayerRule().compresses(spec) for spec in SPECS]
        assert [share < 1 for share in subject.sent_shares(epoch)] == sparse


def test_equal_norms_have_equal_densities_and_unknown_ones_the_ratio() -> None:
    options = RandKOptions(density=Density.NORM)
    assert options.densities([3.0, 3.0]) == pytest.approx([0.0105, 0.0105])
    assert RandKOptions().densities([3.0, 4.0]) is None
    payloads = compressor_of("randk:density=norm,ratio=10", UNITS[2]).compress(gradients(0), 8, version=0)
    assert next(each.count for each in payloads if isinstance(each, SparsePayload)) == 90
