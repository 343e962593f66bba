"""Shards: every sample once per epoch, whoever takes part."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.proto.messages import Assignment, Range
from gradwire.proto.shares import share
from gradwire.proto.straggler_code import straggler_code
from gradwire.worker.training.sharding import batches, coded_parts, epoch_order, shard


def assignment(*ranges: Range) -> Assignment:
    return Assignment(id=1, world=1, version=0, ranges=ranges)


@given(st.integers(0, 500), st.integers(1, 17))
def test_shares_divide_the_samples_evenly_and_leave_none_out(samples: int, world: int) -> None:
    edges = [share(samples, position, world) for position in range(world)]
    assert edges[0][0] == 0
    assert edges[-1][1] == samples
    assert all(a[1] == b[0] for a, b in pairwise(edges))
    sizes = [end - start for start, end in edges]
    assert max(sizes) - min(sizes) <= 1


def test_a_worker_takes_the_samples_of_its_ranges_in_their_order() -> None:
    order = epoch_order(7, 3, 50)
    got = shard(order, assignment(Range(start=40, count=3), Range(start=5, count=2)))
    assert got.tolist() == [*order[40:43], *order[5:7]]
    assert shard(order, assignment()).tolist() == []


@given(st.integers(0, 200), st.integers(1, 40))
def test_batches_are_as_few_and_as_even_as_can_be(samples: int, batch_size: int) -> None:
    parts = [np.arange(samples)[each] for each in batches(samples, batch_size)]
    assert [index for part in parts for index in part] == list(range(samples))
    assert len(parts) == -(-samples // batch_size)
    sizes = [len(part) for part in parts] or [0]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert np.array_equal(epoch_order(1, 2, 50), epoch_order(1, 2, 50))
    assert not np.array_equal(epoch_order(1, 2, 50), epoch_order(1, 3, 50))
    assert not np.array_equal(epoch_order(1, 2, 50), epoch_order(2, 2, 50))


def test_parts_of_unequal_size_are_weighted_with_their_samples() -> None:
    """A mean gradient times its weight times all samples of the member is the coefficient times the sum."""
    place = Assignment(id=1, version=0, world=3, position=1, stragglers=1)
    parts = coded_parts(np.arange(8), place)
    sizes = [len(part.indices) for part in parts]
    assert len(set(sizes)) == 2
    sums = [part.weight * sum(sizes) / size for part, size in zip(parts, sizes, strict=True)]
    assert sums == pytest.approx(straggler_code(3, 1).coefficients(1))
