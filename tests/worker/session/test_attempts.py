"""How long a worker looks for a server, and what it says meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from gradwire.settings import WorkerSettings
from gradwire.worker.session.attempts import Attempts, UnreachableError


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(asyncio, "sleep", clock.sleep)
    return clock


async def exhaust(allowed_s: float) -> int:
    """Attempts until there shall be none."""
    subject = Attempts("host:1", allowed_s)
    for count in range(1000):
        try:
            await subject.pause("UNAVAILABLE: refused")
        except UnreachableError:
            return count
    raise AssertionError("it never gives up")


def test_it_says_what_it_waits_for_and_how_long_but_rarely(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    count = asyncio.run(exhaust(120.0))
    assert clock.now - 100.0 == pytest.approx(120.0)
    assert count > 20
    assert 4 <= len(caplog.messages) <= 7
    assert caplog.messages[0] == (
        "waiting for a gc-server at host:1, for up to 120 s more: UNAVAILABLE: refused"
    )


def test_time_counts_from_the_failure_and_anew_once_a_transfer_has_come_further(clock: Clock) -> None:
    """A transfer that takes longer than the limit had no second attempt."""

    async def run() -> None:
        subject = Attempts("host:1", 4.0)
        clock.now += 10.0  # the first attempt
        await subject.pause("broken")
        subject.reached(7)
        clock.now += 10.0
        await subject.pause("broken")
        subject.reached(7)  # no further
        clock.now += 10.0
        with pytest.raises(UnreachableError):
            await subject.pause("broken")

    asyncio.run(run())


def test_a_server_that_loads_for_half_a_minute_is_not_given_up_by_default() -> None:
    assert WorkerSettings(server="x").connect_seconds >= 120


def test_the_end_names_the_address_and_the_remedy(clock: Clock) -> None:
    async def run() -> None:
        subject = Attempts("host:1", 0.0)
        await subject.pause("UNAVAILABLE: refused")

    with pytest.raises(UnreachableError, match=r"cannot reach host:1 .*is gc-server running there"):
        asyncio.run(run())
    assert time.monotonic() == clock.now
