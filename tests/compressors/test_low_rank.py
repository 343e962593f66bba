"""`lowrank`: its kernels against plain numpy, and what its two projections keep of a matrix."""

from __future__ import annotations

import math
from dataclasses import replace

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
from gradwire.compressors.kernels import low_rank
from gradwire.compressors.projections import Factors

Array = npt.NDArray[np.float32]

# Around the borders of a vector (16), of two rows, of a panel (4 vectors) and of a chunk (64 rows).
SHAPES = [(1, 1, 1), (2, 16, 2), (3, 5, 3), (64, 33, 4), (65, 17, 5), (129, 48, 8), (130, 15, 1)]
HUGE = 5e37


def normal(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


def check_products(rows: int, columns: int, rank: int, size: float = 1.0) -> None:
    gradient, residual = (normal((rows, columns), seed) * np.float32(size) for seed in (1, 2))
    left, right = normal((rank, rows), 3), normal((rank, columns), 4)
    given = gradient.reshape(-1), residual.reshape(-1)
    matrix = add_saturating(gradient, residual)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = plain.over_columns(matrix, right), plain.over_rows(matrix, left)
        whole = plain.product(left, right)
    *found, sound = low_rank.project(*given, left, right)
    assert sound
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()
    out = np.empty(rows * columns, np.float32)
    low_rank.expand(left, right, out)
    assert out.tobytes() == whole.tobytes()
    subtracted = residual.copy().reshape(-1)
    low_rank.expand(left, right, subtracted, given[0], subtracted)
    assert subtracted.tobytes() == add_saturating(matrix, -whole).tobytes()
    low_rank.expand(left, right, out, given[0])
    assert out.tobytes() == add_saturating(gradient, -whole).tobytes()


@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_products_have_the_bits_of_plain_numpy(rows: int, columns: int, rank: int) -> None:
    check_products(rows, columns, rank)


def test_products_beyond_float32_are_its_limits() -> None:
    check_products(66, 35, 4, HUGE)


def test_the_number_of_threads_changes_no_bit() -> None:
    rows, columns = 1030, 1031
    gradient, left, right = normal((rows * columns,)), normal((4, rows)), normal((4, columns))
    found = []
    for threads in (1, 4):
        set_threads(threads)
        products, out = low_rank.project(gradient, None, left, right), np.empty_like(gradient)
        low_rank.expand(left, right, out)
        found.append([each.tobytes() for each in (products[0], products[1], out)])
    assert found[0] == found[1]


def check_bases(rank: int, length: int) -> None:
    old = low_rank.orthonormal(normal((rank, length)), np.zeros((rank, length), np.float32))
    singular = normal((rank, length), 1)
    singular[rank // 2 :] = singular[0] * np.float32(-2.0)
    tiny, zero = normal((rank, length), 2) * np.float32(1e-38), np.zeros((rank, length), np.float32)
    huge = normal((rank, length), 3) * np.float32(1e37)
    for given in (normal((rank, length), 4), singular, tiny, huge, zero):
        for olds in (old, zero):
            found = low_rank.orthonormal(given, olds)
            assert found.tobytes() == plain.orthonormal(given, olds).tobytes()
            assert np.abs(found @ found.T - np.eye(rank)).max() < 1e-5
    assert np.abs(low_rank.orthonormal(zero, old) - old).max() < 1e-6


@pytest.mark.parametrize(("rank", "length"), [(1, 1), (3, 3), (4, 33), (2, 100)])
def test_bases_are_orthonormal_whatever_the_mean_was(rank: int, length: int) -> None:
    check_bases(rank, length)


def check_correction(rank: int, rows: int, columns: int) -> None:
    given = normal((rank, rows)), normal((rank, rows), 1), normal((rank, columns)), normal((rank, columns), 1)
    assert low_rank.corrected(*given).tobytes() == plain.corrected(*given).tobytes()


def test_the_correction_has_the_bits_of_plain_numpy() -> None:
    check_correction(3, 20, 33)


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
