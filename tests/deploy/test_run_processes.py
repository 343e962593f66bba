"""gc-run's engine against stand-in daemons: who is named, what ends the run, and that no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.common.exits import Exit
from gradwire.deploy import engine, processes
from gradwire.deploy.engine import RunPlan, Watcher, train
from gradwire.deploy.interrupt import Interrupt, Interrupted
from gradwire.deploy.processes import Child, Children, RunError
from gradwire.proto.messages import Phase, StatusResponse
from gradwire.settings import RunSettings

WaitUntilGone = Callable[[list[int], float], None]  # the fixture in conftest.py

PROGRAMS = Path(__file__).parent / "programs"


class Notes(Watcher):
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.alive: list[int] = []
        self.notes: list[str] = []

    def update(self, status: StatusResponse, alive: int) -> None:
        self.alive.append(alive)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes find the stand-ins."""
    monkeypatch.setenv("PYTHONPATH", f"{PROGRAMS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    with Interrupt() as caught:
        yield caught


def plan(directory: Path, *, server: str = "finish", worker: str = "sleep") -> RunPlan:
    return RunPlan(
        settings=RunSettings(task=server, compressor=worker, workers=2, epochs=1),
        directory=directory,
        server="standin_server",
        worker="standin_worker",
    )


def worker_pids(directory: Path) -> list[int]:
    return [int(re.findall(r"pid (\d+)", log.read_text())[0]) for log in directory.glob("worker-*.log")]


def wait_for_workers(directory: Path, count: int = 2) -> list[int]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        logs = list(directory.glob("worker-*.log"))
        if len(logs) == count and all("pid" in log.read_text() for log in logs):
            return worker_pids(directory)
        time.sleep(0.05)
    raise AssertionError(f"no {count} workers in {directory}")


def test_a_finished_job_gives_its_last_status_and_leaves_no_process(
    tmp_path: Path, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch, wait_until_gone: WaitUntilGone
) -> None:
    monkeypatch.setattr(engine, "LEAVE_SECONDS", 0.2)  # the stand-ins never leave by themselves
    watcher = Notes()
    status = train(plan(tmp_path), watcher, interrupt)
    assert status.phase is Phase.FINISHED
    assert status.parameters_sha256
    assert watcher.alive[-1] == 2
    wait_until_gone(worker_pids(tmp_path), 0)


@pytest.mark.parametrize(
    ("behaviour", "ending"), [("leaves-1", "exit code 1 (internal)"), ("killed", "SIGKILL")]
)
def test_a_lost_worker_is_named_and_the_run_goes_on(
    tmp_path: Path, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch, behaviour: str, ending: str
) -> None:
    monkeypatch.setattr(engine, "LEAVE_SECONDS", 0.2)
    watcher = Notes()
    assert train(plan(tmp_path, worker=behaviour), watcher, interrupt).phase is Phase.FINISHED
    (note,) = watcher.notes
    assert f"worker-0 ended: {ending}" in note
    assert re.search(r"pid \d+", note), "the end of its log is shown"
    assert watcher.alive[-1] == 1


@pytest.mark.parametrize("code", [Exit.USAGE, Exit.REFUSED, Exit.TASK])
def test_a_reason_that_all_workers_share_stops_the_run(
    tmp_path: Path, interrupt: Interrupt, code: Exit
) -> None:
    with pytest.raises(RunError) as caught:
        train(plan(tmp_path, server="forever", worker=f"leaves-{code:d}"), Notes(), interrupt)
    assert caught.value.code is code
    assert f"worker-0 ended: exit code {code:d} ({code.name.lower()})" in str(caught.value)
    assert f"about to exit with {code:d}" in str(caught.value)


def test_a_run_without_workers_stops(
    tmp_path: Path, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LAST_WORD_SECONDS", 0.2)
    watcher = Notes()
    with pytest.raises(RunError, match="no worker is left") as caught:
        train(plan(tmp_path, server="forever", worker="all-4"), watcher, interrupt)
    assert caught.value.code is Exit.INTERNAL
    assert sorted(note.split()[0] for note in watcher.notes) == ["worker-0", "worker-1"]


def test_finishing_may_take_longer_than_the_workers_stay(
    tmp_path: Path, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LAST_WORD_SECONDS", 0.3)
    watcher = Notes()
    status = train(plan(tmp_path, server="finishing", worker="all-0"), watcher, interrupt)
    assert status.phase is Phase.FINISHED
    assert watcher.notes == [], "a worker that is done is no news"


@pytest.mark.parametrize(
    ("behaviour", "ending"), [("leaves-1", "exit code 1 (internal)"), ("killed", "SIGKILL")]
)
def test_a_job_that_can_never_begin_stops(
    tmp_path: Path, interrupt: Interrupt, behaviour: str, ending: str
) -> None:
    watcher = Notes()
    with pytest.raises(RunError) as caught:
        train(plan(tmp_path, server="gathering", worker=behaviour), watcher, interrupt)
    assert caught.value.code is Exit.INTERNAL
    assert f"worker-0 ended: {ending}" in str(caught.value)
    assert "the first round waits for 2 workers, and only 1 are left" in str(caught.value)
    assert watcher.notes == [], "it is said once"


def test_a_server_that_does_not_answer_is_named(
    tmp_path: Path, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LEAVE_SECONDS", 0.2)
    watcher = Notes()
    assert train(plan(tmp_path, server="silent"), watcher, interrupt).phase is Phase.FINISHED
    silent, again = watcher.notes[-2:]
    assert re.match(rf"server \(pid \d+\) has not answered for 2\.\d s; its log is {tmp_path}", silent)
    assert re.match(r"server \(pid \d+\) answers, after 2\.\d s", again)


def test_a_server_that_dies_is_named(
    tmp_path: Path, interrupt: Interrupt, wait_until_gone: WaitUntilGone
) -> None:
    with pytest.raises(RunError, match=r"(?s)server ended: exit code 9;.*out of luck") as caught:
        train(plan(tmp_path, server="dies"), Notes(), interrupt)
    assert caught.value.code is Exit.INTERNAL
    wait_until_gone(worker_pids(tmp_path), 0)


def test_a_server_that_does_not_start_passes_its_reason_on(tmp_path: Path, interrupt: Interrupt) -> None:
    with pytest.raises(RunError, match="expected one of sync, got 'magic'") as caught:
        train(plan(tmp_path, server="usage"), Notes(), interrupt)
    assert caught.value.code is Exit.USAGE
    assert not list(tmp_path.glob("worker-*.log")), "no worker was started"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("server", "begun"), [("gathering", False), ("forever", True)])
def test_a_signal_ends_everything(
    server: str,
    begun: bool,
    tmp_path: Path,
    interrupt: Interrupt,
    number: signal.Signals,
    wait_until_gone: WaitUntilGone,
) -> None:
    """Once training has begun, with the state that it had reached."""

    def send() -> None:
        wait_for_workers(tmp_path)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(Interrupted) as caught:
        train(plan(tmp_path, server=server), Notes(), interrupt)
    sender.join()
    stopped = caught.value
    assert stopped.number is number
    assert (stopped.status is not None) is begun
    assert stopped.status is None or stopped.status.version == 11
    wait_until_gone(worker_pids(tmp_path), 0)


def test_hanging_up_ends_a_run_unless_it_is_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may be under nohup themselves
    try:
        with Interrupt():
            assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Interrupt():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3)
    with Children(tmp_path) as children:
        child = children.start(
            "worker-0", "standin_worker", ["--compressor=stubborn", "--worker-id=worker-0"]
        )
        wait_for_workers(tmp_path, count=1)
    assert child.ending == "SIGKILL"


@pytest.mark.parametrize("behaviour", ["sleep", "stubborn"])
def test_children_do_not_outlive_a_parent_that_is_killed(
    tmp_path: Path, behaviour: str, wait_until_gone: WaitUntilGone
) -> None:
    parent = subprocess.Popen([sys.executable, PROGRAMS / "standin_run.py", tmp_path, behaviour])
    try:
        pids = wait_for_workers(tmp_path)
    finally:
        parent.kill()
        parent.wait()
    wait_until_gone(pids, 30)


PARENT = """
import signal, subprocess, sys, time

def main(argv):
    print("pid", subprocess.Popen(["sleep", "600"]).pid, flush=True)
    if argv == ["polite"]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if argv:
        time.sleep(600)
    return 0
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that starts a process of its own."""
    (tmp_path / "parent_of_sleep.py").write_text(PARENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    return "parent_of_sleep"


def test_what_a_dead_process_has_started_is_ended_too(
    tmp_path: Path, parent: str, wait_until_gone: WaitUntilGone
) -> None:
    with Children(tmp_path) as children:
        child = children.start("worker-0", parent, [])
        assert processes.wait([child], seconds=30)
        wait_until_gone(worker_pids(tmp_path), 5)


@pytest.mark.parametrize("manners", ["polite", "rude"])
def test_what_a_child_has_started_does_not_outlive_gc_run_either(
    parent: str, manners: str, wait_until_gone: WaitUntilGone
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "gradwire.deploy.child", parent, manners],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        pid = int(child.stdout.readline().split()[1])
        time.sleep(0.2)  # for the handler
        child.stdin.close()  # as the kernel does when gc-run is killed
        child.wait(timeout=30)
    wait_until_gone([pid], 5)


def test_a_log_is_shown_from_its_end(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child: Child = children.start("worker-0", "a_module_that_is_not_there", [])
        assert processes.wait([child], seconds=30)
        assert child.ending == "exit code 1 (internal)"
        assert child.last_lines(1) == "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
