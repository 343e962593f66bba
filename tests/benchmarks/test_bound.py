"""The bound of gc-bench step: worked by hand, and against a simulation that moves bytes one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest

from gradwire.benchmarks.bound import Overlap, produced_by_part, step_bound, upload_and_download
from gradwire.benchmarks.recorder import LinkRecorder, Sample
from gradwire.benchmarks.shaped import SERVER, WARM_UP, Recorded, uploads_and_downloads
from gradwire.benchmarks.star import Star
from gradwire.benchmarks.traces import ComputedStep
from gradwire.common.parts import divide

OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


@pytest.mark.parametrize(
    ("produced", "up", "down", "expected"),
    [
        # Nothing to compute: only `both` has the ways overlap, all but one part.
        ([0, 0, 0, 0], 4, 4, (8, 8, 5)),
        # A fast link: what is left after the computation is the last part, up and down.
        ([3, 6, 9, 12], 4, 4, (20, 17, 14)),
        # The way up is what takes longest: it begins with the first part.
        ([1, 2, 3, 4], 16, 4, (24, 21, 18)),
        # The way down is: it begins when the first part is up.
        ([1, 2, 3, 4], 4, 16, (24, 21, 18)),
        # One tensor of all parts: they are there at once.
        ([8, 8, 8, 8], 4, 4, (16, 16, 13)),
        # The first part comes late, and the others wait for it.
        ([4, 1, 1, 1], 4, 4, (12, 12, 9)),
    ],
)
def test_worked_by_hand(
    produced: Sequence[float], up: float, down: float, expected: tuple[float, float, float]
) -> None:
    shares = [0.25] * 4
    assert tuple(step_bound(overlap, produced, shares, up, down) for overlap in OVERLAPS) == expected


def test_one_part_overlaps_with_nothing() -> None:
    assert [step_bound(overlap, [2.0], [1.0], 3.0, 4.0) for overlap in OVERLAPS] == [9.0] * 3


def simulated(overlap: Overlap, produced: list[int], parts: list[int], up: int, down: int) -> int:
    """Ticks until all of a model is down. produced: ticks. parts: elements. up, down: ticks per element."""
    left_up = [elements * up for elements in parts]
    left_down = [elements * down for elements in parts]
    now = 0
    while any(left_down):
        # What may move in this tick is decided by what was there when it began.
        computed = now >= max(produced) if overlap == "off" else True
        goes_up = next((i for i, left in enumerate(left_up) if left), None)
        goes_down = next(i for i, left in enumerate(left_down) if left)
        may_go_down = not left_up[goes_down] if overlap == "both" else not any(left_up)
        if goes_up is not None and computed and now >= produced[goes_up]:
            left_up[goes_up] -= 1
        if may_go_down:
            left_down[goes_down] -= 1
        now += 1
    return now


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_against_a_simulation(overlap: Overlap) -> None:
    chosen = random.Random(overlap)
    for _ in range(300):
        parts = [chosen.randint(1, 5) for _ in range(chosen.randint(1, 7))]
        produced = [chosen.randint(0, 40) for _ in parts]
        if chosen.random() < 0.7:
            produced.sort()
        up, down = chosen.randint(1, 4), chosen.randint(1, 4)
        total = sum(parts)
        found = step_bound(overlap, produced, [n / total for n in parts], up * total, down * total)
        assert found == pytest.approx(simulated(overlap, produced, parts, up, down))


def test_a_part_is_there_with_the_last_gradient_of_its_unit() -> None:
    # Two small tensors in a part, one large one in three, one more by itself; backward begins with the last.
    plan = divide([4096, 3 * 4096, 2048, 2048], part_bytes=4 * 4096)
    assert [part.elements for part in plan.parts] == [4096, 4096, 4096, 4096, 4096]
    computed = ComputedStep(10.0, (19.0, 17.0, 14.0, 12.0))
    assert produced_by_part(plan, computed) == [4.0, 7.0, 7.0, 7.0, 9.0]


Counts = npt.NDArray[np.float64]


def carried(acknowledged: float) -> tuple[Counts, Counts, Counts]:
    """Times and counts of a step of a second: 1000 bytes up from 0.1 to 0.4 s, 2000 down from 0.5 to 0.9 s.
    acknowledged: so much of what goes one way goes the other way, too."""
    at = np.arange(0, 1.0001, 0.01)
    up, down = np.clip((at - 0.1) / 0.3, 0, 1) * 1000, np.clip((at - 0.5) / 0.4, 0, 1) * 2000
    return at, up + acknowledged * down, down + acknowledged * up


@pytest.mark.parametrize("acknowledged", [0.0, 0.02])
def test_the_ways_of_a_step_are_told_apart(acknowledged: float) -> None:
    at, came, left = carried(acknowledged)
    up, down = upload_and_download(at.tolist(), (came + 5000).tolist(), (left + 7000).tolist())
    assert up == pytest.approx(0.3, rel=0.03)
    assert down == pytest.approx(0.4, rel=0.03)


def test_a_step_in_which_nothing_is_carried_has_no_ways() -> None:
    assert upload_and_download([0.0, 1.0], [5, 5], [7, 7]) == (0.0, 0.0)


def test_each_counted_step_is_taken_from_the_end_of_its_computation() -> None:
    """The second worker begins later, and its share of the update is then still on its way."""
    nodes = [SERVER, "worker-0"]
    recorder = LinkRecorder(Star(nodes, None), nodes)
    at, came, left = carried(0.0)
    for step in range(WARM_UP + 4):
        for time, into, out in zip(at[:-1], came, left, strict=False):
            counts = round(1000 * step + into), round(2000 * step + out)
            recorder.samples.append(Sample(step + time, {SERVER: counts, "worker-0": (0, 0)}))
    first = [ComputedStep(step - 0.15, (step + 0.05,)) for step in range(WARM_UP + 4)]
    second = [ComputedStep(step - 0.1, (step + 0.2,)) for step in range(WARM_UP + 4)]
    found = list(uploads_and_downloads(Recorded(nodes, recorder, [first, second])))
    assert len(found) == 3
    for up, down in found:
        assert up == pytest.approx(0.3, rel=0.03)
        assert down == pytest.approx(0.4, rel=0.03)
