"""Requests for further batches (`More`), by scripts that accumulate gradients."""

from __future__ import annotations

from jobs import LEASE_S, Job
from stepping import core_of

from gradwire.server.job import events as e


def test_a_backup_worker_that_waits_for_further_batches_gets_other_work_when_its_round_closes() -> None:
    core = core_of(
        min_workers=3, batch_size=4, epochs=2, lease_seconds=LEASE_S, mode="sync:backup=2", script=True
    )
    job = Job(3, min_workers=3, core=core)
    asked = job.told["w1"].id
    job.step(e.MoreWanted(worker="w1", incarnation=1, assignment=asked, batches=1))
    assert "w1" not in job.assignments
    job.push("w0")
    job.publish()
    assert job.told["w1"].id > asked
