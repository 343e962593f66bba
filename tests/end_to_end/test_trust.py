"""A worker runs only the task that it was told to run, whoever the server is."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemons import Daemons

from gradwire.common.exits import Exit


def test_a_task_that_the_worker_was_not_told_of_is_not_imported(daemons: Daemons, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    server = daemons.server("--task", f"os:system:command=touch {mark}")
    worker = daemons.worker(server.address)
    assert worker.wait() == Exit.USAGE
    assert "start the worker with --allow-task os" in worker.log
    server.wait_for(r"is lost: .*which this worker may not run; .*--allow-task os")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("task", "flags", "code", "words"),
    [
        ("os:system:command=touch {mark}", (), Exit.USAGE, "--allow-task os"),
        ("subprocess:getoutput:cmd=touch {mark}", (), Exit.USAGE, "--allow-task subprocess"),
        # The worker trusts a module, and not what that has imported.
        (
            "trusting:run:cmd=touch {mark}",
            ("--allow-task", "trusting"),
            Exit.USAGE,
            "defined in trusting but in subprocess",
        ),
        # It trusts a task, and no other of the same module.
        ("trusting:make:mark={mark}", ("--task", "trusting:other"), Exit.USAGE, "--task trusting:other"),
        # It reads no file for a server either, whose content gradients would tell.
        ("characters:data=/etc/passwd", (), Exit.USAGE, "--task characters:data=/etc/passwd"),
        (".digits:digits", (), Exit.REFUSED, "unknown task '.digits:digits'"),
        ("..daemon:run", (), Exit.REFUSED, "unknown task '..daemon:run'"),
    ],
)
def test_a_hostile_server_runs_nothing(
    daemons: Daemons, tmp_path: Path, task: str, flags: tuple[str, ...], code: Exit, words: str
) -> None:
    (tmp_path / "trusting.py").write_text(
        "from pathlib import Path\n"
        "from subprocess import getoutput as run\n"
        "def make(mark): Path(mark).touch()\n"
        "def other(): pass\n"
    )
    mark = tmp_path / "mark"
    program = ("hostile_server", task.replace("{mark}", str(mark)), "gradients")
    server = daemons.server(program=program)
    environ = {"PYTHONPATH": str(tmp_path), "GC_ALLOW_TASK": "small_tasks"}
    worker = daemons.worker(server.address, *flags, environ=environ)
    assert worker.wait() == code, worker.log
    assert words in worker.log
    server.wait_for("left: ")
    assert not mark.exists()


def test_a_job_that_makes_no_sense_is_refused(daemons: Daemons) -> None:
    server = daemons.server(program=("hostile_server", "digits", "gradients:single=perhaps"))
    worker = daemons.worker(server.address)
    assert worker.wait() == Exit.REFUSED
    assert "single: expected on or off, got 'perhaps'" in worker.log
