"""Gathers: frames of any sizes arrive whole, and slots follow them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gradwire.common import machine
from gradwire.compressors import LayerRule, parse_compressor
from gradwire.compressors.payload import Bytes
from gradwire.ddp import lost
from gradwire.ddp.bundle import Bundle, Parameter, Terms
from gradwire.ddp.exchange import LENGTH, Collectives, Frame, Gather, Group, to_bytes
from gradwire.ddp.shares import Shares
from gradwire.proto.refusal import Reason, Refused


@pytest.fixture
def gather() -> Iterator[Gather]:
    """Yield the gather of a single rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield Gather(Group(None))
    finally:
        dist.destroy_process_group()


def sent(gather: Gather, size: int, bundle: str = "one") -> int:
    """Bytes that a frame of that size takes, which arrives as it left."""
    frame, before = np.random.default_rng(size).integers(256, size=size).astype(np.uint8), gather.sent
    (arrived,) = gather.end(gather.begin(bundle, frame))
    assert np.array_equal(arrived, frame)
    return gather.sent - before - LENGTH.size


def test_a_slot_is_as_large_as_the_frame_before(gather: Gather) -> None:
    assert [sent(gather, size) for size in (320, 320, 300)] == [320, 320, 320]


def test_what_does_not_fit_a_slot_is_sent_afterwards_and_the_slot_grows(gather: Gather) -> None:
    assert [sent(gather, size) for size in (320, 640, 650, 660)] == [320, 640, 660, 660]


def test_a_slot_that_is_mostly_empty_shrinks(gather: Gather) -> None:
    assert [sent(gather, size) for size in (640, 64, 64)] == [640, 640, 66]


def test_each_bundle_has_a_slot(gather: Gather) -> None:
    assert [sent(gather, 640), sent(gather, 64, "other"), sent(gather, 64, "other")] == [640, 64, 64]


def test_gathers_may_be_on_their_way_together(gather: Gather) -> None:
    frames = [np.full(size, size, np.uint8) for size in (3, 200, 0, 17)]
    flights = [gather.begin(str(place), frame) for place, frame in enumerate(frames)]
    for flight, frame in zip(flights, frames, strict=True):
        assert np.array_equal(gather.end(flight)[0], frame)


def test_a_frame_of_elements_without_payloads_is_refused() -> None:
    """Its mean would never end, or be memory that was never written."""
    tensors = [Parameter(name="weight", number=0, shape=(512, 64))]
    terms = Terms(compressor=parse_compressor("4bit"), rule=LayerRule(), seed=1)
    for reader in (Bundle(terms, tensors, {}, rank=0).reader, *Shares(tensors, 2).readers):
        with pytest.raises(Refused, match="'rank 1', part from tensor 'weight'") as caught:
            reader.parse(to_bytes(Frame(()), 7), 7, rank=1)
        assert caught.value.refusal.reason is Reason.ELEMENTS
    (unused,) = Shares([Parameter(name="bias", number=0, shape=(0,))], 1).readers
    assert not unused.parse(to_bytes(Frame(()), 7), 7, rank=0).payloads


def test_only_ranks_of_the_same_cores_divide_them(gather: Gather, monkeypatch: pytest.MonkeyPatch) -> None:
    made, sent = Collectives(None, "terms"), list[Bytes]()

    def rows(_: Gather, own: Bytes) -> list[Bytes]:  # of ranks that have called so far
        sent.append(own)
        return sent

    monkeypatch.setattr(Gather, "rows", rows)
    for bound, ranks in ([0, 1], 1), ([2, 3], 1), ([0, 1], 2):
        monkeypatch.setattr(machine, "core_numbers", list[int](bound).copy)
        assert made.ranks_here() == ranks


def test_a_store_that_does_not_answer_holds_up_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ends = threading.Event(), threading.Event()  # rank 0 keeps the store, and is stopped

    def answer(*_: object) -> bool:
        asked.set()
        return ends.wait()

    store = SimpleNamespace(set=answer, check=answer)
    ranks = SimpleNamespace(
        get_rank=lambda: 2, get_process_group_ranks=list[int], group=SimpleNamespace(WORLD=range(3))
    )
    of_torch = SimpleNamespace(distributed_c10d=SimpleNamespace(_get_default_store=lambda: store))
    for name, value in {"dist": ranks, "torch_distributed": of_torch, "ANSWERS_S": 0.0}.items():
        monkeypatch.setattr(lost, name, value)
    monkeypatch.setattr(lost, "LAST_ANSWER_S", 0.0)
    assert str(lost.lost(RuntimeError("closed"), None)).startswith("rank 0: no answer: see its log")
    assert asked.wait(60.0)  # by a thread that would otherwise meet the real store
    ends.set()
    ends.set()


def test_a_rank_without_memory_is_not_another_rank_that_is_lost(gather: Gather) -> None:
    def start(**_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Group(None).collective(start)
