"""The buffers of a job: whose count, what their mean is, what is pinned (`server/model_state`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import torch

from gradwire.proto.messages import Entry, EntryKind
from gradwire.proto.transfer import Bytes
from gradwire.server.job.events import PushKey
from gradwire.server.shard.model_state import Deposit, ModelState, complete, mean_of

ENTRIES = (
    Entry(name="flag", kind=EntryKind.BUFFER, shape=(), dtype="bool"),
    Entry(name="mean", kind=EntryKind.BUFFER, shape=(2,), dtype="float32"),
    Entry(name="again", kind=EntryKind.TIED, tied_to="weight"),
    Entry(name="count", kind=EntryKind.BUFFER, shape=(), dtype="int64"),
    Entry(name="frozen", kind=EntryKind.FROZEN, shape=(3,), dtype="bfloat16"),
)
BUFFERS = [entry for entry in ENTRIES if entry.kind is EntryKind.BUFFER]


def raw(tensor: torch.Tensor) -> Bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().copy()


def values(mean: float, count: int) -> dict[str, Bytes]:
    return {
        "flag": raw(torch.tensor(True)),
        "mean": raw(torch.full((2,), mean)),
        "count": raw(torch.tensor(count)),
    }


def read(found: Mapping[str, Bytes]) -> tuple[float, int]:
    return float(found["mean"].view(np.float32)[0]), int(found["count"].view(np.int64)[0])


def deposit(mean: float, *, rank: int = 0, samples: int = 0, collection: int = 1, count: int = 0) -> Deposit:
    return Deposit(collection=collection, values=values(mean, count), rank=rank, samples=samples)


def test_the_mean_is_by_samples_and_counters_are_those_of_the_first() -> None:
    found = mean_of(BUFFERS, [deposit(1.0, samples=3, count=7), deposit(5.0, rank=1, samples=1, count=9)])
    assert read(found) == (2.0, 7)


def test_equal_buffers_stay_as_they_are_and_a_nan_does_not_spread() -> None:
    third = 1 / 3
    assert read(mean_of(BUFFERS, [deposit(third, samples=3), deposit(third, samples=5)]))[0] == np.float32(
        third
    )
    assert read(mean_of(BUFFERS, [deposit(float("nan"), samples=3), deposit(5.0, samples=5)]))[0] == 5.0


def test_complex_buffers_are_averaged_and_empty_ones_stay() -> None:
    entries = (
        Entry(name="spectrum", kind=EntryKind.BUFFER, shape=(1,), dtype="complex64"),
        Entry(name="empty", kind=EntryKind.BUFFER, shape=(0, 3), dtype="float32"),
    )
    deposits = [
        Deposit(
            collection=1,
            values={"spectrum": raw(torch.tensor([value])), "empty": raw(torch.empty(0, 3))},
            samples=samples,
        )
        for value, samples in ((2 + 4j, 1), (6 + 0j, 3))
    ]
    found = complete({}, entries, mean_of(entries, deposits))
    assert found["spectrum"].tolist() == [5 + 1j]
    assert (found["empty"].shape, found["empty"].dtype) == ((0, 3), torch.float32)


def begun() -> ModelState:
    state = ModelState()
    state.open(ENTRIES, {**values(0.0, 0), "frozen": raw(torch.ones(3, dtype=torch.bfloat16))})
    return state


async def newest(state: ModelState) -> tuple[float, int]:
    return read(await state.newest())


def bring(
    state: ModelState, worker: str, seq: int, mean: float, *, accepted: bool = True, **terms: int
) -> None:
    """A push with buffers, and the decision on it."""
    key = PushKey(worker, 1, seq)
    state.put(key, deposit(mean, **terms))
    state.decided(key, accepted=accepted, rank=int(worker), samples=4)


async def test_buffers_count_with_their_push() -> None:
    state = begun()
    assert await newest(state) == (0.0, 0)
    bring(state, "0", 1, 2.0)
    bring(state, "1", 1, 100.0, accepted=False)
    state.put(PushKey("2", 1, 5), deposit(50.0))
    state.decided(PushKey("2", 1, 4), accepted=True, rank=2, samples=4)  # an earlier push of it
    assert (await newest(state))[0] == 2.0
    state.decided(PushKey("2", 1, 5), accepted=True, rank=2, samples=4)
    assert (await newest(state))[0] == 26.0
    state.put(PushKey("0", 1, 6), deposit(90.0))
    state.decided(PushKey("0", 1, 7), accepted=True, rank=0, samples=4)  # which had none
    state.decided(PushKey("0", 1, 6), accepted=True, rank=0, samples=4)
    assert (await newest(state))[0] == 26.0


async def test_a_new_collection_replaces_the_one_before_and_what_is_evaluated_stays() -> None:
    state = begun()
    bring(state, "0", 1, 2.0)
    state.pin(1, 10)
    bring(state, "1", 1, 8.0, collection=2)
    bring(state, "0", 2, 100.0, collection=1)
    assert (await newest(state))[0] == 8.0
    assert read(await state.of(1))[0] == 2.0
    state.pin(1, 10)
    assert read(await state.of(1))[0] == 2.0, "told again"
    state.pin(1, 11)
    assert read(await state.of(1))[0] == 8.0, "another member evaluates a later version"
    state.evaluated(1, values(3.0, 1))
    assert read(await state.of(1)) == read(await state.newest()) == (3.0, 1)


def test_what_is_written_has_every_entry_and_shares_no_memory() -> None:
    weight = torch.arange(4.0)
    found = complete(
        {"weight": weight},
        ENTRIES,
        {**values(2.5, 4), "frozen": raw(torch.full((3,), 0.5, dtype=torch.bfloat16))},
    )
    assert {*found} == {"weight", "flag", "mean", "again", "count", "frozen"}
    assert torch.equal(found["again"], weight)
    assert found["again"].data_ptr() != weight.data_ptr()
    assert bool(found["flag"])
    assert (found["count"].dtype, int(found["count"])) == (torch.int64, 4)
    assert torch.equal(found["frozen"], torch.full((3,), 0.5, dtype=torch.bfloat16))


async def test_an_image_waits_for_a_mean_that_begins_while_it_waits_for_another() -> None:
    state = ModelState()
    state.open(BUFFERS, values(0.0, 0))

    def push(worker: str, mean: float) -> None:
        key = PushKey(worker, 1, 1)
        state.put(key, Deposit(collection=1, values=values(mean, 1)))
        state.decided(key, accepted=True, rank=ord(worker), samples=1)
        state.newest()

    push("a", 1.0)
    waiting = asyncio.create_task(state.settled())
    await asyncio.sleep(0)
    push("b", 2.0)
    await waiting
    assert read(state.image()["buffers"])[0] == 1.5
