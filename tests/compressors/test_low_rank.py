"""`lowrank`: its kernels against plain numpy, and what its two projections keep of a matrix."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import plain_low_rank as plain
import pytest
import torch
from plain_codes import add_saturating

from gradwire.compressors import (
    LayerRule,
    ModelCompressor,
    NonFiniteGradient,
    ProjectedPayload,
    TensorSpec,
    parse_compressor,
    set_threads,
    sum_coordinates,
    validate,
    wire_bytes,
)
from gradwire.compressors.kernels import cpu, linear, low_rank
from gradwire.compressors.kernels.low_rank import Matrices, Sources
from gradwire.compressors.kernels.threads import run
from gradwire.compressors.projections import Factors

Array = npt.NDArray[np.float32]

# Around the borders of a vector (16), of two rows, of a panel (4 vectors) and of a chunk (64 rows).
SHAPES = [(1, 1, 1), (2, 16, 2), (3, 5, 3), (64, 33, 4), (65, 17, 5), (129, 48, 8), (130, 15, 1)]
HUGE = 5e37


def normal(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


def flat(*vectors: Array) -> Array:
    return np.concatenate([each.reshape(-1) for each in vectors])


def check_products(shapes: list[tuple[int, int]], rank: int, size: float = 1.0) -> None:
    """Project matrices of these shapes in one call, and expand and subtract what was found."""
    matrices, gap = Matrices(rank, tuple(shapes)), 3
    sizes = [rows * columns for rows, columns in shapes]
    starts = [sum(sizes[:index]) + gap * index for index in range(len(sizes))]
    gradients, olds = ([normal(shape, seed) * np.float32(size) for shape in shapes] for seed in (1, 2))
    a, q = ([normal((rank, shape[side]), 3) for shape in shapes] for side in (0, 1))
    bases, residual = np.concatenate([*map(flat, a, q)]), normal((sum(sizes) + gap * len(sizes),))
    for start, old in zip(starts, olds, strict=True):
        residual[start : start + old.size] = old.reshape(-1)
    tensors = [torch.from_numpy(each.reshape(-1)) for each in gradients]
    for kept in (residual, None):
        found, sound = low_rank.project(matrices, Sources(tensors, kept, starts), bases)
        assert sound == [True] * len(shapes)
        totals = [*map(add_saturating, gradients, olds)] if kept is not None else gradients
        with np.errstate(over="ignore", invalid="ignore"):
            s, r = [*map(plain.over_columns, totals, q)], [*map(plain.over_rows, totals, a)]
            rests = [*map(plain.corrected, a, s, q, r)]
            wholes = [
                plain.product(np.concatenate([each, base]), np.concatenate([other, rest]))
                for each, base, other, rest in zip(s, a, q, rests, strict=True)
            ]
        assert found.tobytes() == np.concatenate([*map(flat, s, r)]).tobytes()
        if size > 1.0:  # coordinates at the limit may cancel to a NaN
            continue
        out, left = np.zeros_like(residual), np.zeros_like(residual) if kept is None else residual.copy()
        low_rank.expand(matrices, bases, found, out, starts)
        # In place where there is a residual.
        sources = Sources(tensors, None if kept is None else left, starts)
        low_rank.expand(matrices, bases, found, left, starts, sources)
        for start, whole, total in zip(starts, wholes, totals, strict=True):
            here = slice(start, start + whole.size)
            assert out[here].tobytes() == whole.tobytes()
            assert left[here].tobytes() == add_saturating(total, -whole).tobytes()
            assert not out[here.stop : here.stop + gap].any(), "nothing beside the matrices is written"


@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_products_have_the_bits_of_plain_numpy(rows: int, columns: int, rank: int) -> None:
    check_products([(rows, columns)], rank)


def test_one_call_serves_matrices_of_any_shapes() -> None:
    check_products([(64, 64), (3, 5), (130, 17), (64, 64)], 3)


def test_products_beyond_float32_are_its_limits() -> None:
    check_products([(66, 35)], 4, HUGE)


def test_the_number_of_threads_changes_no_bit() -> None:
    matrices, found = Matrices(4, ((1030, 1031), (600, 1000))), []
    sources = Sources([torch.from_numpy(normal((a * b,))) for a, b in matrices.shapes], None, [0, 0])
    bases = normal((4 * (1030 + 1031 + 600 + 1000),))
    for threads in (1, 4):
        set_threads(threads)
        numbers, out = low_rank.project(matrices, sources, bases)[0], np.empty(matrices.elements, np.float32)
        low_rank.expand(matrices, bases, numbers, out, [0, 1030 * 1031])
        found.append([each.tobytes() for each in (numbers, out)])
    assert found[0] == found[1]


def check_bases(rank: int, length: int) -> None:
    singular, zero = normal((rank, length), 1), np.zeros((rank, length), np.float32)
    singular[rank // 2 :] = singular[0] * np.float32(-2.0)
    tiny, huge = normal((rank, length), 2) * np.float32(1e-38), normal((rank, length), 3) * np.float32(1e37)
    old = plain.orthonormal(normal((rank, length)), zero)
    cases = [
        (given, olds) for given in (normal((rank, length), 4), singular, tiny, huge) for olds in (old, zero)
    ]
    cases += [(zero, old), (zero, zero)]
    matrices = Matrices(rank, ((length, length),) * len(cases))
    bases, numbers = (np.concatenate([flat(each[side], each[side]) for each in cases]) for side in (1, 0))
    made = low_rank.orthonormal(matrices, bases, numbers).reshape(len(cases), 2, rank, length)
    for (given, olds), (rows, columns) in zip(cases, made, strict=True):
        assert rows.tobytes() == columns.tobytes() == plain.orthonormal(given, olds).tobytes()
        assert np.abs(rows @ rows.T - np.eye(rank)).max() < 1e-5
    assert np.abs(made[-2, 0] - old).max() < 1e-6


@pytest.mark.parametrize(("rank", "length"), [(1, 1), (3, 3), (4, 33), (2, 100)])
def test_bases_are_orthonormal_whatever_the_mean_was(rank: int, length: int) -> None:
    check_bases(rank, length)


def test_arrays_that_do_not_fit_are_refused() -> None:
    matrices, ones = Matrices(2, ((3, 4),)), np.ones(12, np.float32)
    bases, gradient = np.ones(14, np.float32), torch.ones(12)
    for bad in (torch.ones(11), torch.ones(12, dtype=torch.float64), torch.ones(24)[::2]):
        with pytest.raises(ValueError, match="gradient: expected contiguous float32 of shape"):
            low_rank.project(matrices, Sources([bad], None, [0]), bases)
    with pytest.raises(ValueError, match="matrix of 3 x 4 at 1: expected it within 12 elements"):
        low_rank.project(matrices, Sources([gradient], ones, [1]), bases)
    with pytest.raises(ValueError, match="bases"):
        low_rank.expand(matrices, bases[:-1], bases, ones, [0])
    with pytest.raises(ValueError, match="rank: expected at most the rows"):
        low_rank.orthonormal(Matrices(4, ((3, 4),)), np.ones(28, np.float32), np.ones(28, np.float32))


# The compressor

W = TensorSpec(name="w", shape=(40, 6, 10))


def model(spec: str, specs: tuple[TensorSpec, ...] = (W,), rank: int = 0) -> ModelCompressor:
    return ModelCompressor(specs, f"lowrank:{spec}", LayerRule(), seed=3, rank=rank)


def sent(worker: ModelCompressor, gradient: torch.Tensor, version: int = 0) -> tuple[ProjectedPayload, Array]:
    """The payload of a step of one tensor, and what it decodes to."""
    (payload,) = worker.compress([gradient], samples=1, version=version)
    assert isinstance(payload, ProjectedPayload)
    validate(payload)
    return payload, worker.bases.decode(0, payload)


def test_bases_find_a_matrix_of_low_rank_within_a_few_versions() -> None:
    """The power iteration: of a gradient of the rank, two versions leave nothing."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(40, 2, generator=generator), torch.randn(2, 60, generator=generator)
    gradient, worker = (factors[0] @ factors[1]).view(W.shape), model("rank=2,values=fp16,feedback=off")
    errors = list[float]()
    for version in range(3):
        payload, values = sent(worker, gradient, version)
        errors.append(float(np.linalg.norm(values - gradient.reshape(-1).numpy())))
        mean = np.empty(payload.count, np.float32)
        sum_coordinates([payload], [1.0], mean)
        worker.bases = worker.bases.advance({0: mean})
    assert errors[1] < 2e-3 * errors[0]


@pytest.mark.parametrize("values", Factors)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1.0, 1e30])
def test_nothing_is_lost(values: Factors, size: float) -> None:
    worker = model(f"values={values}")
    computed = np.zeros(W.elements)
    received = np.zeros(W.elements)
    for version in range(3):
        gradient = torch.from_numpy(normal(W.shape, version)) * size
        computed += gradient.reshape(-1).numpy()
        received += sent(worker, gradient, version)[1]
    owed = worker.ledger.residual.numpy()
    bound = 1e-5 * np.abs(computed).max() + 1e-44
    assert np.abs(computed - received - owed).max() <= bound


def test_a_step_passes_over_a_matrix_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, new residual, mean: all other calls read fewer numbers than a matrix has."""
    spec, passes = TensorSpec(name="w", shape=(512, 512)), list[int]()
    worker = model("rank=4", (spec,))

    def counted(kernel: Any, elements: int, *args: Any) -> None:
        passes.append(elements)
        run(kernel, elements, *args)

    for module in (cpu, linear, low_rank):
        monkeypatch.setattr(module, "run", counted)
    payload, _ = sent(worker, torch.from_numpy(normal(spec.shape)))
    mean = np.empty(payload.count, np.float32)
    sum_coordinates([payload], [1.0], mean)
    worker.bases.advance({0: mean})
    assert [each for each in passes if each >= spec.elements] == [spec.elements] * 3


def test_coordinates_are_rounded_without_bias_and_fp16_takes_their_size() -> None:
    gradient = torch.from_numpy(normal(W.shape)) * 1e-20
    exact = sent(model("values=fp16,feedback=off"), gradient)[1]
    scale = np.abs(exact).max()
    drawn = [sent(model("values=4bit,feedback=off", rank=rank), gradient)[1] for rank in range(200)]
    errors = np.mean(drawn, axis=0) - exact
    assert np.abs(errors).max() < 0.05 * scale
    assert np.abs(drawn[0] - exact).max() > 0.05 * scale, "one draw alone is coarse"


def test_an_infinity_or_a_nan_is_found_and_nothing_changes() -> None:
    worker = model("rank=2")
    sent(worker, torch.from_numpy(normal(W.shape)))
    before = worker.ledger.residual.clone()
    for element in (0, 59, 60, W.elements - 1):
        for fault in (math.inf, -math.inf, math.nan):
            gradient = torch.from_numpy(normal(W.shape))
            gradient.view(-1)[element] = fault
            with pytest.raises(NonFiniteGradient, match="gradient of 'w'"):
                sent(worker, gradient, 1)
    assert torch.equal(worker.ledger.residual, before)


def test_bases_follow_from_the_seed_and_the_number_of_the_tensor() -> None:
    twice = W, replace(W, name="v")
    first, second = (model("rank=4", twice, rank).bases for rank in (0, 1))
    assert [each.tobytes() for each in first.values.values()] == [
        each.tobytes() for each in second.values.values()
    ]
    assert first.values[0].tobytes() != first.values[1].tobytes()


@pytest.mark.parametrize(
    ("shape", "count"),
    [((1024, 1024), 8192), ((64, 32, 3, 3), 4 * 352), ((64,), 0), ((8, 9), 0), ((0, 40), 0), ((), 0)],
)
def test_a_matrix_has_coordinates_where_they_are_clearly_fewer(shape: tuple[int, ...], count: int) -> None:
    chosen = parse_compressor("lowrank")
    assert chosen.coordinates(shape) == count
    assert LayerRule().choose(TensorSpec(name="w", shape=shape), chosen).name == (
        "lowrank" if count else "bf16"
    )


@pytest.mark.parametrize(("values", "size"), [("4bit", 4096 + 256), ("8bit", 8192 + 256), ("fp16", 16384)])
def test_the_bytes_are_those_that_plans_count(values: str, size: int) -> None:
    spec = TensorSpec(name="w", shape=(1024, 1024))
    worker = model(f"values={values}", (spec,))
    (payload,) = worker.compress([torch.ones(spec.shape)], samples=1)
    assert wire_bytes(payload) == size
    assert parse_compressor(f"lowrank:values={values}").compression().up.sent_bytes(spec.shape) == size
