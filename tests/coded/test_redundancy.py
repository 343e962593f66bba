"""The model of a step's time."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gradwire.coded.arithmetic import (
    MAX_BLOCKS,
    UncodedTimes,
    fastest,
    plan,
    possible,
    step_seconds,
    without_redundancy,
)


@pytest.mark.parametrize("nodes", range(1, 9))
def test_the_load_of_a_node_is_that_of_the_plan(nodes: int) -> None:
    times = UncodedTimes(computing=0.0, exchanging=1.0)
    for r in possible(nodes):
        # What comes down to all nodes from a server that relays, in block gradients.
        ours, plain = (
            Fraction(sum(len(packet.targets) for packet in made.packets), made.slices)
            for made in (plan(nodes, r), plan(nodes, 1))
        )
        assert step_seconds(times, nodes, r) * float(plain) == pytest.approx(float(ours))


@pytest.mark.parametrize("nodes", range(3, 9))
def test_computing_all_but_one_part_pays_when_exchanging_takes_n_minus_1_times_as_long(nodes: int) -> None:
    assert fastest(UncodedTimes(1.0, (nodes - 1) * 1.01), nodes) == nodes - 1
    assert fastest(UncodedTimes(1.0, (nodes - 1) * 0.99), nodes) == 1


def test_the_fastest_is_the_one_with_the_shortest_step() -> None:
    for nodes in range(1, 15):
        for exchanging in (0.0, 0.1, 1.0, 3.0, 10.0, 1000.0):
            times = UncodedTimes(1.0, exchanging)
            best = fastest(times, nodes)
            assert all(
                step_seconds(times, nodes, best) <= step_seconds(times, nodes, r) for r in possible(nodes)
            )


def test_only_what_has_few_enough_blocks_is_possible() -> None:
    assert possible(1) == [1]
    assert possible(4) == [1, 2, 3]
    assert possible(16) == [1, 2, 3, 13, 14, 15]
    assert all(len(plan(16, r).holders) <= MAX_BLOCKS for r in possible(16))


def test_what_was_measured_with_redundancy_is_brought_to_none() -> None:
    times = UncodedTimes(0.5, 3.0)
    measured = UncodedTimes(3 * 0.5, step_seconds(UncodedTimes(0.0, 3.0), 4, 3))
    found = without_redundancy(4, 3, measured)
    assert (found.computing, found.exchanging) == pytest.approx((times.computing, times.exchanging))
    assert without_redundancy(1, 1, UncodedTimes(2.0, 0.1)) == UncodedTimes(2.0, 0.1)
