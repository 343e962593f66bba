"""`--compressor auto` over the steps of simulated jobs: how fast they are, and what goes out of each unit."""

from __future__ import annotations

import logging
from typing import cast

import numpy as np
import pytest

from gradwire.common.parts import Plan, arrange
from gradwire.compressors import DenseFormat, DensePayload, ModelCompressor, Payload
from gradwire.compressors.packing import Packing
from gradwire.planning.worth import Choice, Seen
from gradwire.worker.session import auto
from gradwire.worker.session.auto import Auto

RATIO = 8
SMALL, LARGE = 100, 900_000


PAYLOADS = {
    size: DensePayload(format=DenseFormat.FLOAT32, elements=size // 4, data=np.zeros(size, np.uint8))
    for elements in (SMALL, LARGE)
    for size in (4 * elements, 4 * elements // RATIO)
}


class Simulated:
    """A job on a clock of its own. Takes the place of the compressor."""

    plan: Plan = arrange([SMALL, LARGE], [1, 1], [])
    unit_of = 1, 0  # the last tensors first

    def __init__(
        self, computing: float, link: float, codec: float, *, hidden: float = 0.0, packed: float = 1.0
    ) -> None:
        """Seconds of a step: computing, on the link as float32, and compressing. hidden: of the link's, how
        many go by during the computing. packed: share of compressed bytes that packing leaves."""
        self.computing, self.link, self.codec, self.hidden = computing, link, codec, hidden
        self.clock, self.whole = 0.0, frozenset[int]()
        self.sent = 0, 0.0
        self.packed, self.packing = packed, Packing()
        self.auto = Auto(
            cast("ModelCompressor", self), "4bit", lambda: self.sent, lambda: self.clock, self.packing
        )

    def send_whole(self, units: frozenset[int]) -> None:
        self.whole = units

    def step(self, version: int) -> None:
        self.auto.begin(version)
        self.clock += self.computing
        total, link = SMALL + LARGE, 0.0
        for place, elements in ((1, LARGE), (0, SMALL)):
            number = self.unit_of[place]
            dense = number in self.whole
            # A call takes a while however little it has to do.
            codec = 0.0 if dense else self.codec * (elements / total + 0.001)
            self.clock += codec
            size = 4 * elements // (1 if dense else RATIO)
            payload = PAYLOADS[size]
            self.auto.compressed(place, codec, {number: cast("list[Payload]", [payload])})
            if not dense:
                self.packing.saved_bytes += round((1 - self.packed) * size)
                size = round(self.packed * size)
            taken = self.link * size / (4 * total)
            link += taken
            if self.link:
                self.sent = self.sent[0] + size, self.sent[1] + taken
        waited = max(0.0, link - self.hidden)
        self.clock += waited
        self.auto.waited(waited)

    def run(self, steps: int = 2000) -> float:
        """Seconds of a step."""
        for version in range(steps):
            self.step(version)
        return self.clock / steps


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("hidden", [0.0, 0.1])
def test_no_regret_where_the_link_takes_its_part_of_a_step(part: float, hidden: float) -> None:
    taken = Simulated(1 - part, part, 0.01, hidden=hidden).run()
    assert 1 / taken >= 0.9 / (1 - part + part / RATIO)


@pytest.mark.parametrize(("part", "codec"), [(0.0, 0.2), (0.01, 0.1), (0.05, 0.5)])
def test_next_to_nothing_is_lost_where_compression_cannot_win(part: float, codec: float) -> None:
    assert Simulated(1 - part, part, codec).run() <= 1.02
    assert Simulated(1 - part, part, codec, hidden=part).run() <= 1.02


def test_a_link_that_becomes_slow_or_fast_is_noticed() -> None:
    job = Simulated(1.0, 0.0, 0.2)
    job.run(300)
    assert job.whole == {0, 1}
    job.link = 5.0
    for version in range(300, 1000):
        job.step(version)
    assert job.whole < {0, 1}
    job.link = 0.0
    for version in range(1000, 5000):
        job.step(version)
    assert job.whole == {0, 1}


def test_a_unit_that_is_not_worth_it_goes_as_it_is() -> None:
    job = Simulated(0.5, 0.5, 0.2)
    job.run(300)
    assert job.auto.choice.compressing
    assert job.whole == {job.unit_of[0]}, "the small one"


def test_bytes_are_counted_as_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Seen] = []

    def decided(choice: Choice, found: Seen) -> Choice:
        seen.append(found)
        return choice

    monkeypatch.setattr(auto, "decide", decided)
    Simulated(0.5, 0.5, 0.01, packed=0.4).run(100)
    assert seen[-1].sent_link_s == pytest.approx(0.4 * seen[-1].dense_link_s / RATIO)


def test_what_is_decided_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Simulated(1.0, 0.0, 0.2).run(100)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "compressor auto: trying float32; steps took 1200.4 ms"
    assert said[1] == "compressor auto: using float32 from now on; steps took 1000.0 ms"
    assert len(said) == 2
