"""Workers that are not what they seem: replicas that drift, and other data."""

from __future__ import annotations

import pytest
from daemons import Daemons

JOB = ("--batch-size", "4", "--seed", "3", "--learning-rate", "0.01", "--min-workers", "2", "--epochs", "1")
LOSSY = ("--downlink", "4bit")


# Where workers keep no pace, who lags far behind gets a snapshot, which repairs it before it is noticed.
@pytest.mark.parametrize(
    "arguments",
    [LOSSY, (*LOSSY, "--overlap", "both"), ("--compressor", "lowrank:rank=1", "--optimizer", "adam")],
    ids=["sync", "both", "replicas step"],
)
def test_a_replica_that_the_models_code_changes_is_noticed_named_and_replaced(
    daemons: Daemons, arguments: tuple[str, ...]
) -> None:
    server = daemons.server("--task", "small_tasks:drifting", *JOB, *arguments)
    drifting = daemons.worker(server.address, "--worker-id", "other", environ={"DRIFTS": "1"})
    steady = daemons.worker(server.address, "--worker-id", "steady")
    assert [drifting.wait(), steady.wait()] == [0, 0], drifting.log
    server.wait_for("the job is finished")
    found = [line for line in server.messages if "differed from the server's" in line]
    assert len(found) == 1, found  # the checks that follow find nothing
    assert "version 64: the replica of " in found[0]
    assert "(other)" in found[0]
    assert any("the parameters are not the server's at version 64" in line for line in drifting.messages)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_drift_that_is_found_at_the_last_version_does_not_keep_the_job_from_ending(
    daemons: Daemons, mode: str
) -> None:
    server = daemons.server("--task", "small_tasks:drifting", *JOB[:-4], "--max-steps", "64", "--mode", mode)
    drifting = daemons.worker(server.address, environ={"DRIFTS": "1"})
    assert drifting.wait() == 0, drifting.log
    server.wait_for("version 64: the replica of ")
    server.wait_for("the job is finished at version 64")
    assert any("evaluation 1, version 64: " in line for line in server.messages), server.log


def test_a_worker_with_other_data_is_refused(daemons: Daemons) -> None:
    server = daemons.server("--task", "small_tasks:drawn", *JOB)
    first = daemons.worker(server.address)
    server.wait_for("training samples from")
    other = daemons.worker(server.address, environ={"DATA": "0.5"})
    assert other.wait() == 3, other.log
    assert "training samples" in other.log
    assert "the same data set in the same order" in other.log
    second = daemons.worker(server.address)
    assert [first.wait(), second.wait()] == [0, 0], first.log
