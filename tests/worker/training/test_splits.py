"""Splits of samples among workers: each sample in one share, in another order in each epoch."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.proto.messages import Assignment, Range
from gradwire.worker.training.sharding import Shards
from gradwire.worker.training.splits import parse_split


@pytest.mark.parametrize("split", ["classes:1", "classes:2", "dirichlet:0.1", "dirichlet:100"])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_each_sample_is_in_one_share(split: str, world: int) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 503)
    made = parse_split(split, labels)
    assert made is not None
    shares = [made.share(position, world) for position in range(world)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(503))
    if split == "classes:1" and world == 7:
        assert max(len(set(labels[share].tolist())) for share in shares) <= 3
    if split == "dirichlet:100":
        assert min(map(len, shares)) > 0.5 * 503 / world


def test_shares_are_never_empty() -> None:
    made = parse_split("dirichlet:0.001", np.zeros(3, np.int64))
    assert made is not None
    assert all(len(made.share(position, 50)) for position in range(50))


def test_a_worker_takes_its_own_share_in_another_order_in_each_epoch() -> None:
    labels = np.arange(100) % 10
    split = parse_split("classes:5", labels)
    assert split is not None
    for position in (0, 1):
        shards = Shards(7, 100, split)
        own, orders = set(split.share(position, 2).tolist()), list[list[int]]()
        for epoch in (0, 1):
            seen = list[int]()
            for start in range(0, 100, 20):  # rounds of two workers with ten samples each
                ranges = (Range(start=start + 10 * position, count=10),)
                seen += shards.of(
                    Assignment(
                        id=1, version=0, progress=0.0, epoch=epoch, position=position, world=2, ranges=ranges
                    )
                ).tolist()
            assert set(seen) == own
            orders.append(seen)
        assert orders[0] != orders[1]
    assert Shards(7, 100).of(Assignment(id=1, version=0, progress=0.0)).tolist() == []
