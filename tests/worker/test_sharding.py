"""Shards: every sample once per epoch, whoever takes part."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.proto.messages import Assignment
from gradwire.proto.shares import share
from gradwire.worker.sharding import epoch_order, shard


def assignment(start: int, samples: int, position: int, world: int) -> Assignment:
    return Assignment(version=0, epoch=0, start=start, samples=samples, position=position, world=world)


@given(st.integers(0, 500), st.integers(1, 17))
def test_shares_divide_the_samples_evenly_and_leave_none_out(samples: int, world: int) -> None:
    edges = [share(samples, position, world) for position in range(world)]
    assert edges[0][0] == 0
    assert edges[-1][1] == samples
    assert all(a[1] == b[0] for a, b in pairwise(edges))
    sizes = [end - start for start, end in edges]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 300), st.integers(0, 5), st.lists(st.integers(1, 6), min_size=1, max_size=40))
def test_an_epoch_with_changing_members_takes_every_sample_once(
    train_samples: int, epoch: int, worlds: list[int]
) -> None:
    order = epoch_order(7, epoch, train_samples)
    start = 0
    taken: list[int] = []
    for world in (*worlds, *[1] * train_samples):
        samples = min(8 * world, train_samples - start)
        for position in range(world):
            taken += shard(order, assignment(start, samples, position, world)).tolist()
        start += samples
    assert sorted(taken) == list(range(train_samples))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert np.array_equal(epoch_order(1, 2, 50), epoch_order(1, 2, 50))
    assert not np.array_equal(epoch_order(1, 2, 50), epoch_order(1, 3, 50))
    assert not np.array_equal(epoch_order(1, 2, 50), epoch_order(2, 2, 50))


@pytest.mark.parametrize("position", range(4))
def test_fewer_samples_than_workers_leave_some_without(position: int) -> None:
    got = shard(np.arange(10), assignment(8, 2, position, 4))
    assert got.tolist() == ([8 + position] if position < 2 else [])
