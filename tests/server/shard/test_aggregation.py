"""How gradients become one: against plain numpy, and with workers that are wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pytest

from gradwire.common.spec import SpecError
from gradwire.compressors import DenseFormat, DensePayload, Payload
from gradwire.server.job.aggregation import Krum, Mean, Median, Trimmed, parse_aggregation
from gradwire.server.shard.aggregation import COLUMNS, combine, least_far

Array = npt.NDArray[np.float32]
SIZES = (0, 1, 7, COLUMNS + 3)
LARGEST = float(np.finfo(np.float32).max)


def payload(values: Array) -> Payload:
    data = values.astype(np.float32).view(np.uint8)
    return DensePayload(format=DenseFormat.FLOAT32, elements=values.size, data=data)


def combined(aggregation: Median | Trimmed | Krum, workers: list[list[Array]]) -> list[Array]:
    given = [[payload(each) for each in worker] for worker in workers]
    if isinstance(aggregation, Krum):
        return workers[least_far(aggregation, given)]
    out = np.full(sum(each.size for each in workers[0]), np.nan, np.float32)
    combine(aggregation, given, out)
    return np.split(out, list(accumulate(each.size for each in workers[0]))[:-1])


def drawn(workers: int, seed: int = 0) -> list[list[Array]]:
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(size).astype(np.float32) for size in SIZES] for _ in range(workers)]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_median_is_that_of_each_coordinate(workers: int) -> None:
    given = drawn(workers)
    for tensor, out in enumerate(combined(Median(), given)):
        expected = np.median(np.stack([worker[tensor] for worker in given]).astype(np.float64), axis=0)
        assert np.array_equal(out, expected.astype(np.float32))


@pytest.mark.parametrize(("workers", "wrong"), [(3, 1), (8, 1), (8, 3), (7, 3)])
def test_the_trimmed_mean_leaves_out_both_ends(workers: int, wrong: int) -> None:
    given = drawn(workers)
    for tensor, out in enumerate(combined(Trimmed(wrong=wrong), given)):
        rows = np.sort(np.stack([worker[tensor] for worker in given]), axis=0)
        expected = rows[wrong : workers - wrong].mean(axis=0, dtype=np.float64)
        assert np.array_equal(out, expected.astype(np.float32))


def test_krum_takes_the_gradient_nearest_to_its_neighbours() -> None:
    for seed in range(10):
        given = drawn(7, seed)
        whole = [np.concatenate(worker).astype(np.float64) for worker in given]
        scores = [
            sum(sorted(float(((one - other) ** 2).sum()) for other in whole if other is not one)[: 7 - 2 - 2])
            for one in whole
        ]
        chosen = given[int(np.argmin(scores))]
        assert all(np.array_equal(*pair) for pair in zip(combined(Krum(wrong=2), given), chosen, strict=True))


def test_of_equal_gradients_krum_takes_the_first() -> None:
    given = [drawn(1)[0] for _ in range(5)]
    assert all(np.array_equal(*pair) for pair in zip(combined(Krum(), given), given[0], strict=True))


WRONG: dict[str, Callable[[Array], Array]] = {
    "huge": lambda right: np.full_like(right, np.float32(1e30)),
    "largest": lambda right: np.full_like(right, LARGEST),
    "sign flipped": lambda right: -100 * right,
}


@pytest.mark.parametrize("attack", WRONG)
@pytest.mark.parametrize("aggregation", [Median(), Trimmed(wrong=2), Krum(wrong=2)], ids=lambda a: str(a))
def test_wrong_workers_do_not_move_it_out_of_what_right_ones_sent(
    aggregation: Median | Trimmed | Krum, attack: str
) -> None:
    """Two wrong ones of seven, wherever they stand. The mean has no such bound."""
    for places in itertools.combinations(range(7), 2):
        given = drawn(7)
        right = [worker for place, worker in enumerate(given) if place not in places]
        for place in places:
            given[place] = [WRONG[attack](each) for each in given[place]]
        outs = combined(aggregation, given)
        for tensor, out in enumerate(outs):
            rows = np.stack([worker[tensor] for worker in right])
            assert (out >= rows.min(axis=0)).all()
            assert (out <= rows.max(axis=0)).all()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mean", Mean()),
        ("median", Median()),
        ("trimmed", Trimmed(wrong=1)),
        ("trimmed:wrong=3", Trimmed(wrong=3)),
        ("krum:wrong=2", Krum(wrong=2)),
    ],
)
def test_what_can_be_typed(text: str, expected: Mean | Median | Trimmed | Krum) -> None:
    assert parse_aggregation(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("average", "unknown aggregation 'average'; known aggregations: krum, mean, median, trimmed"),
        ("krum:wrong=0", "wrong: expected 1 to 1000 workers, got 0"),
        ("median:wrong=1", "unknown key 'wrong'; it has no keys"),
    ],
)
def test_what_cannot_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_aggregation(text)


def test_too_few_gradients_are_refused() -> None:
    assert [each.fewest for each in (Mean(), Median(), Trimmed(wrong=2), Krum(wrong=2))] == [1, 1, 5, 7]
    for aggregation in (Krum(), Trimmed(wrong=2)):
        with pytest.raises(ValueError, match="gradients: expected at least 5, got 4"):
            combined(aggregation, drawn(4))


def test_borders_of_payloads_have_no_say() -> None:
    """Workers may divide the same elements differently: one sends large tensors alone, another with small
    ones."""
    given = [[np.concatenate(worker)] for worker in drawn(7)]
    cut = [
        [each[:at], each[at:]] if at else [each]
        for at, (each,) in zip((0, 1, 5, COLUMNS, COLUMNS + 1, 0, 9), given, strict=True)
    ]
    assert sum(each.size for each in given[0]) == sum(SIZES)
    for aggregation in (Median(), Trimmed(wrong=2)):
        outs = [np.full(sum(SIZES), np.nan, np.float32) for _ in range(2)]
        for out, workers in zip(outs, (given, cut), strict=True):
            combine(aggregation, [[payload(each) for each in worker] for worker in workers], out)
        assert np.array_equal(outs[0], outs[1])
    chosen = {
        least_far(Krum(wrong=2), [[payload(each) for each in worker] for worker in workers])
        for workers in (given, cut)
    }
    assert len(chosen) == 1
