"""Jobs that end by steps or time, and are evaluated by steps, through real processes."""

from __future__ import annotations

from daemons import Daemons

JOB = ("--task", "small_tasks:regression", "--batch-size", "8", "--seed", "3", "--epochs", "0")


def test_steps_end_a_job_and_evaluate_it(daemons: Daemons) -> None:
    schedule = ("--schedule", "cosine:warmup=2steps,minimum=0.1")
    limits = ("--max-steps", "7", "--evaluate-every", "3steps")
    server = daemons.server(*JOB, *limits, *schedule, "--min-workers", "2")
    workers = daemons.workers(server, 2)
    assert [worker.wait() for worker in workers] == [0, 0], workers[0].log
    server.wait_for("the job is finished at version 7")
    evaluated = [line for line in server.messages if line.startswith("evaluation ")]
    assert [line.partition(":")[0] for line in evaluated] == [
        "evaluation 1, version 3",
        "evaluation 2, version 6",
        "evaluation 3, version 7",
    ]
    assert any("the job ends: reached --max-steps 7" in line for line in server.messages)


def test_time_ends_a_job(daemons: Daemons) -> None:
    limits = ("--max-seconds", "1.5", "--mode", "async")
    server = daemons.server(*JOB, *limits)
    worker = daemons.worker(server.address)
    assert worker.wait() == 0, worker.log
    server.wait_for("the job ends: reached --max-seconds 1.5")
    server.wait_for("the job is finished at version [1-9]")
