"""Neighbouring tensors that are compressed together: each as if it were alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import plain_selection
import pytest
import torch
from flat import by_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.common.parts import arrange, divide
from gradwire.compressors import (
    LayerRule,
    ModelCompressor,
    NonFiniteGradient,
    Payload,
    SparsePayload,
    TensorSpec,
    decode,
    set_threads,
    validate,
)
from gradwire.compressors.kernels import selection
from gradwire.compressors.kernels.block_selection import select_blocks
from gradwire.compressors.kernels.selection import LEAST
from gradwire.compressors.sparsifiers import ALONE

Array = npt.NDArray[np.float32]

# ---- the kernel

VALUES = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 0.25, -0.25, 0.5, 1.0, -1.0, 3.0, 3.4e38, -3.4e38])


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.lists(VALUES, max_size=9), st.integers(0, 9), VALUES, VALUES), max_size=5),
    st.integers(0, 99),
)
def test_blocks_are_chosen_from_as_a_stable_sort_would(
    blocks: list[tuple[list[float], int, float, float]], seed: int
) -> None:
    sizes = np.array([len(values) for values, *_ in blocks], np.int64)
    values = np.array([value for each, *_ in blocks for value in each], np.float32)
    keeps = np.minimum(np.array([keep for _, keep, _, _ in blocks], np.int64), sizes)
    lowest = np.abs(np.array([lowest for *_, lowest, _ in blocks], np.float32))
    centers = np.array([center for *_, center in blocks], np.float32)
    check(values, sizes.tolist(), keeps.tolist(), lowest, centers)


def check(values: Array, sizes: Sequence[int], keeps: Sequence[int], lowest: Array, centers: Array) -> None:
    given = values, np.array(sizes, np.int64), np.array(keeps, np.int64), lowest, centers
    found, expected = select_blocks(*given), plain_selection.select_blocks(*given)
    assert found.indices.dtype == np.uint32
    assert found.indices.tolist() == expected.indices.tolist()
    assert found.values.tobytes() == expected.values.tobytes()


def layouts(size: int) -> list[Array]:
    rng = np.random.default_rng(size)
    normal = rng.standard_normal(size).astype(np.float32)
    mixed = normal * rng.choice(np.array([1e-44, 1e-3, 1e30], np.float32), size)
    few = np.round(normal)
    return [normal, mixed, few, np.zeros(size, np.float32), np.full(size, -0.25, np.float32), np.sort(normal)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ratio", [1, 3, 100])
def test_blocks_of_all_sizes(ratio: int, threads: int) -> None:
    set_threads(threads)
    blocks = [each for size in (0, 1, 2, 15, 16, 17, 1000, 4096, 16_384) for each in layouts(size)] * 3
    sizes = [block.size for block in blocks]
    keeps = [-(-size // ratio) for size in sizes]
    least = np.full(len(blocks), LEAST, np.float32)
    centers = np.resize(np.array([0.0, 0.25, -1e30], np.float32), len(blocks))
    check(np.concatenate(blocks), sizes, keeps, least, np.zeros_like(least))
    check(np.concatenate(blocks), sizes, keeps, np.abs(centers), centers)


def test_a_block_gives_what_it_gives_by_itself() -> None:
    for block in layouts(5000):
        alone = selection.select(block, 77)
        size, keep = np.array([5000], np.int64), np.array([77], np.int64)
        found = select_blocks(block, size, keep, np.full(1, LEAST, np.float32), np.zeros(1, np.float32))
        assert found.indices.tolist() == alone.indices.tolist()
        assert found.values.tobytes() == alone.values.tobytes()


@pytest.mark.parametrize(
    ("sizes", "keeps", "lowest", "message"),
    [
        ([3, 2], [1, 1], 0.0, "sizes: expected 4 elements"),
        ([2, 2], [3, 1], 0.0, "keeps: "),
        ([2, 2], [1, -1], 0.0, "keeps: "),
        ([2, 2], [1], 0.0, "keeps: "),
        ([5, -1], [1, 1], 0.0, "keeps: "),
        ([2, 2], [1, 1], -1.0, "lowest: "),
        ([2, 2], [1, 1], math.nan, "lowest: "),
    ],
)
def test_what_machine_code_would_misread_is_refused(
    sizes: list[int], keeps: list[int], lowest: float, message: str
) -> None:
    low, centers = np.full(2, lowest, np.float32), np.zeros(2, np.float32)
    with pytest.raises(ValueError, match=message):
        select_blocks(
            np.zeros(4, np.float32), np.array(sizes, np.int64), np.array(keeps, np.int64), low, centers
        )


# ---- whole models

SIZES = (900, 0, 1, 5, 3000, 40, 20_000, 17, 1001, 64, 17_000, 333, 2, 4096)
SPECS = [TensorSpec(name=f"t{place}", shape=(size, 1)) for place, size in enumerate(SIZES)]
TOGETHER = [
    "topk:ratio=10",
    "topk:ratio=10,values=float32,decay=0.5",
    "topk:values=fp16,momentum=0.9,clip=1",
    "l1:ratio=20",
    "dgc:ratio=20,warmup=0",
    "dgc:feedback=off",
    "gcac:ratio=30",
    "threshold:tau=0.02,scale=mean",
]
ONE_BY_ONE = ["randk:ratio=10", "topk:values=8bit", "krngc:warmup=0"]
# Only those whose last bucket is full are followed by another one.
IN_BUCKETS = ["8bit", "8bit:feedback=off", "8bit:momentum=0.9,decay=0.5", "qsgd:bits=3,bucket=32"]


def compressor_of(spec: str, *, apart: bool = False) -> ModelCompressor:
    """apart: each tensor is a unit of its own."""
    plan = arrange(SIZES, [1] * len(SIZES) if apart else [len(SIZES)], [])
    return ModelCompressor(SPECS, spec, LayerRule(), seed=1, rank=0, plan=plan)


def gradients(seed: int) -> list[torch.Tensor]:
    """Among them zeros, equal values, and few that are not zero."""
    rng = np.random.default_rng(seed)
    found = [rng.standard_normal(size).astype(np.float32) * np.float32(0.01) for size in SIZES]
    found[4][rng.random(SIZES[4]) < 0.999] = 0.0
    found[5][:], found[9][:] = 0.0, 0.125
    found[8] = np.round(found[8] * 100) / np.float32(100)
    found[12][:] = [3.4e38, -1e-45]
    return [torch.from_numpy(values).view(spec.shape) for values, spec in zip(found, SPECS, strict=True)]


def kept(subject: ModelCompressor) -> list[bytes]:
    velocity = subject.ledger.velocity
    return [each.numpy().tobytes() for each in (subject.ledger.residual, velocity) if each is not None]


@pytest.mark.parametrize("absent", [(), (0, 6, 7)])
@pytest.mark.parametrize("spec", [*TOGETHER, *ONE_BY_ONE, *IN_BUCKETS])
def test_together_they_send_what_each_would_alone(spec: str, absent: tuple[int, ...]) -> None:
    together, alone = compressor_of(spec), compressor_of(spec, apart=True)
    for version in range(4):
        given: list[torch.Tensor | None] = [*gradients(version)]
        for place in absent:
            given[place] = None
        sent = [
            subject.compress(given, 8, version=version, epoch=version / 2, workers=2)
            for subject in (together, alone)
        ]
        for payload in sent[0]:
            validate(payload)
        pairs = zip(*(by_tensor(payloads, SPECS) for payloads in sent), strict=True)
        assert all(one.tobytes() == other.tobytes() for one, other in pairs)
        assert kept(together) == kept(alone)


def sparse(payloads: Sequence[Payload]) -> int:
    return sum(isinstance(payload, SparsePayload) for payload in payloads)


@pytest.mark.parametrize("spec", TOGETHER)
def test_a_run_is_one_payload(spec: str) -> None:
    (payload,) = compressor_of(spec).compress([*gradients(0)], 8, version=0)
    assert isinstance(payload, SparsePayload)


def test_tensors_whose_buckets_are_full_are_one_payload() -> None:
    sizes = [4096, 8192, 100, 4096, 0, 4096]
    specs = [TensorSpec(name=str(place), shape=(size, 1)) for place, size in enumerate(sizes)]
    for spec, count in (("8bit", 2), ("qsgd:bucket=4096", 2), ("qsgd", 2), ("qsgd:bucket=32", 2)):
        subject = ModelCompressor(specs, spec, LayerRule(), 1, 0, plan=divide(sizes, 1 << 30))
        payloads = subject.compress([torch.randn(each.shape) for each in specs], 8, version=0)
        assert len(payloads) == count, spec
        for payload in payloads:
            validate(payload)


def test_a_large_tensor_takes_the_pass_that_adds_and_selects_in_one() -> None:
    sizes = [100, 100, ALONE, 100, ALONE + 1, ALONE + 1, 100, 100]
    specs = [TensorSpec(name=str(place), shape=(size, 1)) for place, size in enumerate(sizes)]
    subject = ModelCompressor(specs, "topk", LayerRule(), 1, 0, plan=divide(sizes, 1 << 30))
    payloads = subject.compress([torch.randn(each.shape) for each in specs], 8, version=0)
    assert [each.elements for each in payloads] == [ALONE + 300, ALONE + 1, ALONE + 1, 200]


def test_a_run_ends_where_a_gradient_is_missing() -> None:
    given: list[torch.Tensor | None] = [*gradients(0)]
    given[3] = None
    assert sparse(compressor_of("topk").compress(given, 8, version=0)) == 2


@pytest.mark.parametrize("spec", [*TOGETHER, *ONE_BY_ONE, *IN_BUCKETS])
@pytest.mark.parametrize("place", [0, 4, 6, 13])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named(spec: str, place: int, bad: float) -> None:
    subject, given = compressor_of(spec), gradients(1)
    subject.compress([*gradients(0)], 8, version=0)
    before = kept(subject)
    given[place].view(-1)[-1] = bad
    with pytest.raises(NonFiniteGradient, match=f"'t{place}'"):
        subject.compress([*given], 8, version=1)
    assert kept(subject) == before


def test_the_sign_of_a_zero_does_not_depend_on_the_neighbours() -> None:
    sizes, sent = [10, 10], list[bytes]()
    specs = [TensorSpec(name=str(place), shape=(size, 1)) for place, size in enumerate(sizes)]
    for units in ([2], [1, 1]):
        plan = arrange(sizes, units, [])
        subject = ModelCompressor(
            specs, "gcac:ratio=2,feedback=off,values=float32", LayerRule(), 1, 0, plan=plan
        )
        subject.ledger.residual[10:] = 1.0  # put back
        given = torch.tensor([1.0] * 6 + [-0.0] * 4).view(10, 1)
        payloads = subject.compress([given, torch.ones(10, 1)], 8, version=1)
        values = [payload.value_payload() for payload in payloads if isinstance(payload, SparsePayload)]
        sent.append(b"".join(decode(each).tobytes() for each in values))
    assert sent[0] == sent[1]
