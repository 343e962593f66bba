"""A short, deterministic share of the fuzzing: every seed, and changes of each that follow from a number."""

from __future__ import annotations

import random
import time
import tracemalloc
from functools import cache

import pytest
from run import mutated, stored
from targets import TARGETS, valid

from gradwire.proto import gradwire_pb2 as pb
from gradwire.proto import wire

CHANGES = 300  # of each target


@cache
def seeds() -> dict[str, list[bytes]]:
    return valid()


@pytest.mark.parametrize("name", TARGETS)
def test_no_seed_and_no_change_of_one_is_more_than_refused(name: str) -> None:
    known = [*seeds()[name], *stored(name)]
    for data in known:
        TARGETS[name](data)
    chance = random.Random(f"suite {name}")
    for number in range(CHANGES):
        data = mutated(chance.choice(known), known, chance)
        try:
            TARGETS[name](data)
        except Exception as error:
            error.add_note(f"change {number} of target {name}: {data.hex()}")
            raise


def nested(levels: int) -> bytes:
    """An unknown field in an unknown field, and so on."""
    data = b""
    for _ in range(levels):
        data = b"\xfa\x01" + wire.varint(len(data)) + data
    return data


BOMBS = {
    "empty submessages": pb.WorkerMessage(part=pb.PartHeader(payloads=[pb.PayloadHeader()] * 200_000)),
    "a repeated number": pb.WorkerMessage(part=pb.PartHeader(learning_rates=[0.0] * 50_000)),
    "a map": pb.WorkerMessage(evaluation=pb.Evaluation(metrics={str(n): 0.0 for n in range(12_500)})),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_unpacks_to_more_than_its_bytes_takes_bounded_memory_and_time(name: str) -> None:
    data = BOMBS[name].SerializeToString()
    tracemalloc.start()
    began = time.thread_time()  # which other processes have no part in
    TARGETS["streams"](data)
    seconds = time.thread_time() - began
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 20, "Python objects alone"
    assert seconds < 10


@pytest.mark.parametrize("group", [False, True])
def test_nesting_is_refused_or_ignored(group: bool) -> None:
    data = b"\xfb\x01" * 200 + b"\xfc\x01" * 200 if group else nested(200)
    for target in TARGETS.values():
        target(data)
