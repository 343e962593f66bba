"""Features of users' tasks besides computing: they fork, read files, bring batches and gradients of other
kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemons import Daemons

JOB = ("--epochs", "2", "--batch-size", "4", "--seed", "3")


@pytest.mark.parametrize("mode", ["sync", "local:steps=2", "coded"])
def test_everyday_batches_and_sparse_gradients_train_in_every_kind_of_work(
    daemons: Daemons, mode: str
) -> None:
    arguments = ("--task", "small_tasks:everyday", "--mode", mode, "--optimizer", "adamw", *JOB)
    server = daemons.server(*arguments, "--learning-rate", "0.01", "--min-workers", "2")
    workers = daemons.workers(server, 2)
    assert [worker.wait() for worker in workers] == [0, 0], workers[0].log
    server.wait_for("the job is finished")


def test_a_task_may_fork_while_the_worker_is_connected(daemons: Daemons, plain_daemons: Daemons) -> None:
    """A DataLoader with workers, and a child that the task ends. A new interpreter, because what gRPC does at
    a fork is settled when it is imported."""
    server = daemons.server("--task", "small_tasks:everyday:processes=2,samples=12", *JOB)
    worker = plain_daemons.worker(server.address)
    assert worker.wait() == 0, worker.log
    server.wait_for("the job is finished")


def test_characters_of_a_file_are_trained_on_where_the_worker_names_it(
    daemons: Daemons, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    task = f"characters:data={tmp_path / 'text'},context=16,layers=1,width=32"
    server = daemons.server("--task", task, *JOB)
    worker = daemons.worker(server.address, "--task", task)
    assert worker.wait() == 0, worker.log
    worker.wait_for(r"evaluation 2: accuracy 0\.\d+, loss")
