"""How long a worker looks for a server, and what it says meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest
from http2_proxy import RESETS, Answer, proxy

from gradwire.proto.service import ignore
from gradwire.settings import WorkerSettings
from gradwire.worker.session.attempts import Attempts, UnreachableError
from gradwire.worker.session.connection import Connection


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


def join(answer: Answer) -> None:
    """A worker that joins through a proxy, in a second at most."""
    with proxy(answer) as port:
        address = f"127.0.0.1:{port}"
        connection = Connection(
            address, worker="w", incarnation=1, connect_s=1.0, give_up_s=1.0, sent=ignore, received=ignore
        )
        try:
            connection.join("0", "", ())
        finally:
            connection.close()


@pytest.mark.parametrize(("status", "attempts"), [(404, 1), (413, 1), (502, 3), (504, 3)])
def test_a_proxy_that_cannot_pass_a_call_is_asked_once_and_one_that_may_is_asked_again(
    status: int, attempts: int
) -> None:
    asked: list[int] = []

    def answer(size: int) -> int:
        asked.append(size)
        return status

    with pytest.raises(UnreachableError, match=f"answers with HTTP status {status}; "):
        join(answer)
    assert len(asked) >= attempts if attempts > 1 else len(asked) == 1


def test_a_proxy_that_refuses_a_models_size_is_found_behind_a_failure_without_reason() -> None:
    """nginx resets most uploads that it refuses, before gRPC has read its answer."""
    with pytest.raises(UnreachableError, match=r"HTTP status 413; .*client_max_body_size 0"):
        join(lambda size: 413 if size > 1 << 20 else RESETS)


def test_the_end_names_the_address_and_the_remedy(clock: Clock) -> None:
    async def run() -> None:
        subject = Attempts("host:1", 0.0)
        await subject.pause("UNAVAILABLE: refused")

    with pytest.raises(UnreachableError, match=r"cannot reach host:1 .*is gc-server running there"):
        asyncio.run(run())
    assert time.monotonic() == clock.now
