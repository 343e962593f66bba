"""gc-run as a user has it: real daemons, real data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from gradwire.common.exits import Exit
from gradwire.deploy import paths, prepare
from gradwire.deploy.cli import main
from gradwire.deploy.processes import WARNING
from gradwire.settings import RunSettings

pytestmark = pytest.mark.timeout(300)  # a busy machine starts five processes slowly

WaitUntilGone = Callable[[list[int], float], None]  # the fixture in conftest.py

SMALL = ("--workers", "2", "--epochs", "2")
ALONE = ("--workers", "1", "--epochs", "1")  # where the number does not matter: each starts an interpreter
LONG = ("--workers", "2", "--epochs", "2000", "--no-baseline")


@dataclass(frozen=True, kw_only=True)
class Ran:
    directory: Path
    report: dict[str, Any]
    printed: str


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gradwire.deploy.cli", *arguments]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """One short run with its baseline."""
    directory = tmp_path_factory.mktemp("run")
    done = subprocess.run(
        command(*SMALL, "--out", "here", "--json", "report.json"),
        cwd=directory,
        env={**os.environ, "GC_OUTPUT": "shared.safetensors"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == Exit.DONE, done.stderr
    return Ran(
        directory=directory, report=json.loads((directory / "report.json").read_text()), printed=done.stdout
    )


def test_report_is_what_was_run(ran: Ran) -> None:
    report = ran.report
    expected = {"task": "digits", "mode": "sync", "compressor": "4bit", "downlink": "auto", "seed": 1}
    assert {key: report[key] for key in expected} == expected
    assert (report["workers"], report["epochs"], report["steps"]) == (2, 2, 44)
    assert len(report["accuracy_by_epoch"]) == 2
    assert report["validation_accuracy"] == report["accuracy_by_epoch"][-1] > 0.15
    assert report["refused_pushes"] == 0
    assert report["lost_workers"] == []
    assert re.fullmatch(r"[0-9a-f]{64}", report["parameters_sha256"])


def test_baseline_is_the_same_run_without_compression(ran: Ran) -> None:
    ours, theirs = ran.report, ran.report["baseline"]
    assert theirs["compressor"] == "none"
    assert theirs["seed"] == ours["seed"]
    assert theirs["steps"] == ours["steps"]
    assert theirs["parameters_sha256"] != ours["parameters_sha256"]
    assert theirs["raw_bytes_up"] == ours["raw_bytes_up"]
    assert theirs["wire_bytes_up"] > 9 * ours["wire_bytes_up"], "gc-run packs, but for the baseline"
    assert theirs["wire_bytes_up"] > theirs["raw_bytes_up"], "framing is counted"


def test_compressed_tensors_alone_take_an_eighth(ran: Ran) -> None:
    assert ran.report["compressed_raw_bytes_up"] / ran.report["compressed_payload_bytes_up"] == pytest.approx(
        8.0, rel=0.03
    )


def test_directory_holds_report_plot_and_logs(ran: Ran) -> None:
    here = ran.directory / "here"
    assert json.loads((here / "report.json").read_text()) == ran.report
    assert (here / "plot.png").read_bytes().startswith(b"\x89PNG")
    for run in ("run", "baseline"):
        logs = {"server.log", "worker-0.log", "worker-1.log"}
        assert {file.name for file in (here / run).iterdir()} == {*logs, "parameters.safetensors"}


def test_each_run_keeps_its_own_parameters(ran: Ran) -> None:
    for report, run in ((ran.report, "run"), (ran.report["baseline"], "baseline")):
        opened: Any = safe_open(
            ran.directory / "here" / run / "parameters.safetensors", "numpy"
        )  # without annotations
        with opened as parameters:
            assert parameters.metadata()["sha256"] == report["parameters_sha256"]
    assert not (ran.directory / "shared.safetensors").exists()


def test_printed_lines_and_table_say_the_same(ran: Ran) -> None:
    assert "4bit: 2/2 epochs" in ran.printed
    assert "none: 2/2 epochs" in ran.printed
    assert f"{ran.report['validation_accuracy']:.4f}" in ran.printed.split("validation accuracy  ")[-1]


def test_a_run_that_took_longer_says_on_which_links_compression_pays(ran: Ran) -> None:
    """The sentence follows from measurements that the server had made before the workers left: a job without
    them does not tell."""
    ours, theirs = ran.report, ran.report["baseline"]
    longer = ours["seconds"] / ours["steps"] / (theirs["seconds"] / theirs["steps"])
    printed = " ".join(ran.printed.split())
    assert (f"{longer:.2f} times as long per step" in printed) == (longer > 1.02)
    assert ("bit/s per machine, for this model and 2 workers." in printed) == (longer > 1.02)


def test_it_says_where_the_metrics_of_every_process_are(ran: Ran) -> None:
    addresses = re.findall(r"(server|worker-\d) (http://127\.0\.0\.1:\d+/metrics)", ran.printed)
    assert {name for name, _ in addresses} == {"server", "worker-0", "worker-1"}


def children_of(pid: int) -> dict[str, int]:
    """Process ids of the daemons that a process has started, by name."""
    found: dict[str, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if parent == pid:
            worker = [part.partition("=")[2] for part in arguments if part.startswith("--worker-id=")]
            found[worker[0] if worker else "server"] = int(entry.name)
    return found


@pytest.fixture
def long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A run that has trained an epoch and is far from done."""
    monkeypatch.setenv("GC_LEASE_SECONDS", "1")
    process = subprocess.Popen(
        command(*LONG, "--json", "report.json"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if ": 1/" in line:
            break
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_leaves_no_process_and_writes_what_there_is(
    long_run: subprocess.Popen[str], tmp_path: Path, wait_until_gone: WaitUntilGone
) -> None:
    children = children_of(long_run.pid)
    assert children.keys() == {"server", "worker-0", "worker-1"}
    long_run.send_signal(signal.SIGINT)
    _, errors = long_run.communicate(timeout=60)
    assert long_run.returncode == Exit.INTERRUPTED
    assert "SIGINT" in errors
    wait_until_gone(list(children.values()), 0)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["finished"], report["baseline"]) == (False, None)
    assert report["epochs"] >= 1
    (directory,) = (tmp_path / "runs").iterdir()
    assert (directory / "plot.png").exists()
    (parameters,) = (directory / "run").glob("*.safetensors")
    version = re.fullmatch(r"parameters\.unfinished-v(\d+)\.safetensors", parameters.name)
    assert version
    assert int(version[1]) >= report["steps"] > 0


def test_a_killed_worker_is_named_and_the_run_goes_on_until_the_server_is_killed(
    long_run: subprocess.Popen[str], wait_until_gone: WaitUntilGone
) -> None:
    assert long_run.stdout is not None
    children = children_of(long_run.pid)
    os.kill(children["worker-1"], signal.SIGKILL)
    lines = iter(long_run.stdout)
    assert any(line.startswith("4bit: worker-1 ended: SIGKILL") for line in lines)
    assert any("epoch" in line for line in lines)
    assert any("epoch" in line for line in lines)
    os.kill(children["server"], signal.SIGKILL)
    _, errors = long_run.communicate(timeout=30)
    assert long_run.returncode == Exit.INTERNAL
    assert "server ended: SIGKILL" in errors
    wait_until_gone(list(children.values()), 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "digit"], ["unknown task 'digit'", "digits"]),
        (["--task", "digits:model=rnn"], ["mlp, cnn", "'rnn'"]),
        (["--compressor", "5bit"], ["5bit", "2bit", "4bit", "bf16"]),
        (["--mode", "magic"], ["--mode", "sync", "'magic'"]),
        (["--downlink", "2bit"], ["2bit", "does not suit updates", "topk"]),
        (["--optimizer", "lion"], ["lion", "adamw"]),
        (["--schedule", "cosine:warm=1"], ["warm", "warmup"]),
        (["--workers", "0"], ["--workers", "at least 1", "'0'"]),
        (["--epochs", "many"], ["--epochs", "whole number", "'many'"]),
        (["--workerz", "3"], ["--workerz"]),
        (["--json", "nowhere/report.json"], ["--json nowhere/report.json", "No such file", "directory"]),
        (["--json", "{file}/report.json"], ["--json {file}/report.json", "Not a directory"]),
        (["--json", "."], ["--json .", "not a file"]),
        (["--out", "{file}"], ["--out {file}", "File exists", "directory"]),
        (["--out", "{file}/sub"], ["--out {file}/sub", "Not a directory"]),
        (["--out", "/proc/sub"], ["--out /proc/sub", "directory"]),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path_factory.mktemp("other") / "file"
    file.touch()
    monkeypatch.chdir(tmp_path)
    given = [argument.replace("{file}", str(file)) for argument in arguments]
    assert main(given, dict(os.environ)) == Exit.USAGE
    errors = capsys.readouterr().err
    assert errors.startswith("gc-run: ")
    assert [word for word in words if word.replace("{file}", str(file)) not in errors] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["4bit:level=one", "none", "digits"], ["'level'", "levels", "scale"]),
        (["4bit", "topk:momentum=0.9", "digits"], ["'topk'", "momentum", "leave it out"]),
        (["4bit", "topk:ratios=9", "digits"], ["'ratios'", "ratio"]),
    ],
)
def test_what_else_is_wrong_with_a_spec_is_said_by_the_process_that_checks_them(
    specs: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last line is what gc-run says, as the cases above show; here no process has to be started."""
    assert prepare.main([*specs, "sgd", "gradients"]) == Exit.USAGE
    said = capsys.readouterr().err.splitlines()[-1]
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("optimizer", "work", "warned"),
    [("adamw", "gradients", 1), ("sgd", "gradients", 0), ("adamw", "local", 0)],
)
def test_what_speaks_against_a_compressor_is_said_before_anything_starts(
    optimizer: str, work: str, warned: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main(["topk", "auto", "digits", optimizer, work]) == Exit.DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == warned
    assert all(line.startswith(f"{WARNING}topk loses where") for line in lines)


def test_runs_of_the_same_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strftime(_: str) -> str:
        return "20261120-230820"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", strftime)
    with paths.run_directory(RunSettings()) as one, paths.run_directory(RunSettings()) as other:
        (one / "report.json").touch()
        assert str(one) == "runs/20261120-230820-digits-4bit"
        assert str(other) == "runs/20261120-230820-digits-4bit-2"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [one.name], "an empty one is removed"


def test_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    with paths.run_directory(RunSettings(out=str(tmp_path))):
        pass
    assert tmp_path.is_dir()


RAISING_TASKS = """
from gradwire.worker.tasks import Task, load

def at_once() -> Task:
    raise RuntimeError("the disk is on fire")

def in_training() -> Task:
    digits = load("digits")

    def loss(model, batch):
        raise RuntimeError("the loss is on fire")

    return Task(
        name="raising", train_samples=digits.train_samples,
        model=digits.model, batch=digits.batch, loss=loss, evaluate=digits.evaluate,
    )
"""


@pytest.mark.parametrize(
    ("function", "words"), [("at_once", "the disk is on fire"), ("in_training", "the loss is on fire")]
)
def test_a_task_that_raises_has_its_own_exit_code(
    function: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "raising_tasks.py").write_text(RAISING_TASKS)
    monkeypatch.chdir(tmp_path)
    assert main([*ALONE, "--task", f"raising_tasks:{function}"], dict(os.environ)) == Exit.TASK
    assert words in capsys.readouterr().err


def test_help_answers_at_once() -> None:
    """A time would fail on a busy machine; here, what would take it is not imported."""
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gradwire.deploy.cli", "--help"],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == Exit.DONE
    assert "usage: gc-run" in shown.stdout
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "gradwire.settings" in imported
    assert not {"torch", "grpc", "numpy", "rich"} & imported
