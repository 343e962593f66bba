"""The end of a job, as scripts meet it: several jobs in one script, and scripts that come too late."""

from __future__ import annotations

import signal

import pytest
from daemons import Daemon, Daemons, Server

JOB = ("--script", "--batch-size", "8", "--seed", "3", "--downlink", "none")


def serve(daemons: Daemons, workers: int, *more: str, epochs: int = 2) -> Server:
    return daemons.server(*JOB, "--min-workers", str(workers), "--epochs", str(epochs), *more)


def scripts(daemons: Daemons, loop: str, count: int, *servers: Server) -> list[Daemon]:
    addresses = [server.address for server in servers]
    return [
        daemons.program("script_ends", loop, *addresses, "--worker-id", f"w{number}")
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("loop", "workers", "mode"),
    [("nested", 3, "sync"), ("zipped", 2, "sync"), ("zipped", 2, "local:steps=2")],
)
def test_a_script_of_two_jobs_waits_in_neither_for_the_other(
    daemons: Daemons, loop: str, workers: int, mode: str
) -> None:
    servers = [serve(daemons, workers, "--mode", mode) for _ in "ab"]
    both = scripts(daemons, loop, workers, *servers)
    assert [script.wait(60) for script in both] == [0] * workers, both[0].log
    for server in servers:
        server.wait_for("the job is finished at version")
        assert any("after 2 epochs, version" in line for line in server.messages), server.log


def test_a_script_without_the_loop_over_epochs_ends_and_nothing_is_warned_of(daemons: Daemons) -> None:
    server = serve(daemons, 2)
    both = scripts(daemons, "without_epochs", 2, server)
    assert [script.wait(60) for script in both] == [0, 0]
    server.wait_for("the job is finished at version 12")
    warned = [line for line in server.messages if "no member is left" in line]
    assert all('"level": "warning"' not in line for line in warned), warned


def test_a_script_that_was_away_at_the_end_goes_on_after_its_loop(daemons: Daemons) -> None:
    server = serve(daemons, 2, "--lease-seconds", "2", "--stay")
    away, other = scripts(daemons, "slow", 2, server)
    away.wait_for("stepped")
    away.signal(signal.SIGSTOP)
    try:
        assert other.wait(60) == 0, other.log
        server.wait_for("the job is finished")
    finally:
        away.signal(signal.SIGCONT)
    assert away.wait(60) == 0, away.log
    assert away.fields("^ended$")["done"]
    assert away.fields("^ended$")["progress"] == 1
    assert "This worker was away at the end" in away.log
    late = daemons.program("script_ends", "slow", server.address)
    assert late.wait(60) == 0, late.log
    assert "this script has trained nothing: the job has finished" in late.log
    assert "Traceback" not in late.log
    catching = daemons.program("script_ends", "catching", server.address)
    assert catching.wait(60) == 0
    catching.wait_for("caught: the job has finished: all of its 2 epochs are done")
