"""Blocks by the speeds of the nodes, against what the paper asks for: equal times, and the same sum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.coded.arithmetic import Exchange, block_sizes, plan
from gradwire.coded.arithmetic.speeds import fractions


def loads(sizes: tuple[int, ...], holders: Sequence[tuple[int, ...]], nodes: int) -> list[int]:
    return [
        sum(size for size, each in zip(sizes, holders, strict=True) if node in each) for node in range(nodes)
    ]


@given(
    st.integers(2, 7).flatmap(
        lambda nodes: st.tuples(
            st.lists(st.floats(0.01, 100), min_size=nodes, max_size=nodes), st.integers(1, nodes - 1)
        )
    ),
    st.integers(0, 5000),
)
def test_each_node_computes_samples_in_proportion_to_its_speed(
    given: tuple[list[float], int], samples: int
) -> None:
    speeds, r = given
    holders = list(combinations(range(len(speeds)), r))
    sizes = block_sizes(samples, holders, speeds)
    assert sum(sizes) == samples
    assert min(sizes) >= 0
    parts = fractions(speeds, r)
    assert sum(parts) == pytest.approx(r)
    slowest_full = min(
        (speed for speed, part in zip(speeds, parts, strict=True) if part > 1 - 1e-9), default=None
    )
    for one, share in zip(speeds, parts, strict=True):
        for other, its in zip(speeds, parts, strict=True):
            if share < 1 - 1e-9 and its < 1 - 1e-9:
                assert share / one == pytest.approx(its / other)  # equally long
        if slowest_full is not None and share < 1 - 1e-9:
            assert one < slowest_full
    # Whole samples: each block is within one of its weight.
    for load, share in zip(loads(sizes, holders, len(speeds)), parts, strict=True):
        assert abs(load - share * samples) <= len(holders) + 1e-6 * samples


@pytest.mark.parametrize(("nodes", "r"), [(2, 1), (4, 1), (4, 2), (5, 4)])
def test_equal_speeds_make_equal_blocks(nodes: int, r: int) -> None:
    holders = list(combinations(range(nodes), r))
    sizes = block_sizes(1000, holders, [3.0] * nodes)
    assert max(sizes) - min(sizes) <= 1


def test_a_node_of_half_the_speed_computes_half_as_much() -> None:
    alone = list(combinations(range(3), 1))
    assert block_sizes(100, alone, [2.0, 2.0, 1.0]) == (40, 40, 20)
    holders: list[tuple[int, ...]] = [*combinations(range(3), 2)]
    assert loads(block_sizes(500, holders, [2.0, 2.0, 1.0]), holders, 3) == [400, 400, 200]


def test_a_node_cannot_compute_more_than_the_batch() -> None:
    holders = list(combinations(range(3), 2))
    assert loads(block_sizes(100, holders, [10.0, 1.0, 1.0]), holders, 3) == [100, 50, 50]


def test_no_block_is_smaller_than_the_least() -> None:
    holders = list(combinations(range(4), 2))
    sizes = block_sizes(17, holders, [5.0, 1.0, 1.0, 1.0], 4)
    assert sum(sizes) == 17
    assert all(size == 0 or size >= 4 for size in sizes)


@pytest.mark.parametrize(("nodes", "r"), [(3, 1), (3, 2), (4, 2), (5, 3), (5, 4)])
def test_decoded_sums_of_uneven_blocks_are_the_plain_sum(nodes: int, r: int) -> None:
    rng, elements, samples = np.random.default_rng(nodes * 10 + r), 11, 60
    gradients = rng.integers(-1000, 1000, (samples, elements))
    made = plan(nodes, r)
    sizes = block_sizes(samples, made.holders, [1.0 + 2 * node for node in range(nodes)])
    ends = np.cumsum(sizes)
    assert len(set(sizes)) > 1
    blocks = {
        block: gradients[end - size : end].sum(0).astype(np.int32).view(np.uint32)
        for block, (end, size) in enumerate(zip(ends, sizes, strict=True))
    }
    held = [
        {block: words for block, words in blocks.items() if node in made.holders[block]}
        for node in range(nodes)
    ]
    exchanges = [Exchange(made, node, held[node], elements) for node in range(nodes)]
    for index, packet in enumerate(made.packets):
        data = exchanges[packet.sender].encoded(index)
        for target in packet.targets:
            exchanges[target].take(index, data)
    for exchange in exchanges:
        assert exchange.complete
        assert exchange.sums().tolist() == gradients.sum(0).tolist()


@pytest.mark.parametrize("spread", [1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5])
@pytest.mark.parametrize(("nodes", "r"), [(2, 1), (4, 2), (5, 3)])
def test_speeds_that_hardly_differ_make_blocks_that_hardly_differ(nodes: int, r: int, spread: float) -> None:
    """Rounding must not leave a node out."""
    holders, draw = list(combinations(range(nodes), r)), np.random.default_rng(1)
    for _ in range(100):
        sizes = block_sizes(1000, holders, (1 + spread * draw.random(nodes)).tolist())
        assert sum(sizes) == 1000
        assert max(sizes) - min(sizes) <= 1
