"""gc-run with a user's script as every worker: what it reports, and how a script's failure ends it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.common.exits import Exit
from gradwire.deploy import engine
from gradwire.deploy.cli import main
from gradwire.deploy.engine import RunPlan, Watcher, train
from gradwire.deploy.interrupt import Interrupt
from gradwire.deploy.processes import RunError
from gradwire.proto.messages import Phase
from gradwire.settings import RunSettings

pytestmark = pytest.mark.timeout(300)  # a busy machine starts processes slowly

WaitUntilGone = Callable[[list[int], float], None]  # the fixture in conftest.py

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gradwire_gpt.py"
TRAIN = """
import json, os, sys
import torch
import gradwire

print("pid", os.getpid(), "argument", sys.argv[1], flush=True)
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gradwire.connect(**({"compressor": "topk:ratio=2"} if sys.argv[1] == "own" else {})) as job:
    model, optimizer = job.attach(model, optimizer)
    for epoch in job.epochs(2 if sys.argv[1] == "names" else None):
        for x, y in job.batches(data):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            if sys.argv[1] == "raises" and job.rank == 1 and epoch == 1:
                raise ValueError("the script is on fire")
            optimizer.step()
            optimizer.zero_grad()
        if job.evaluating:
            job.log(loss=loss)
    print("metrics", json.dumps(job.metrics))
if sys.argv[1] == "own":
    raise RuntimeError("the disk is full")
"""
SMALL = ("--workers", "2", "--batch-size", "8")
LONG = (*SMALL, "--epochs", "1000000")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The command of a script in the working directory, with its argument."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return lambda argument: f"'{sys.executable}' train.py {argument}"


def pids_of(directory: Path) -> list[int]:
    return [int(log.read_text().split()[1]) for log in directory.glob("worker-*.log")]


def test_a_script_is_reported_as_a_task_is_and_compared_on_request(
    script: Callable[[str], str], tmp_path: Path
) -> None:
    """The script names the number of epochs."""
    arguments = ["--script", script("names"), "--baseline", "--out", "here"]
    assert main([*SMALL, *arguments], dict(os.environ)) == Exit.DONE
    report = json.loads((tmp_path / "here/report.json").read_text())
    assert (report["task"], report["steps"], report["epochs"]) == (script("names"), 8, 2)
    assert (report["compressor"], report["baseline"]["compressor"]) == ("4bit", "none")
    assert (report["finished"], report["baseline"]["finished"]) == (True, True)
    assert (report["validation_loss"], report["evaluations"][1]["metrics"].keys()) == (None, {"loss"})
    assert (tmp_path / "here/plot.png").exists()
    assert (tmp_path / "here/run/parameters.safetensors").exists()
    assert "argument names" in (tmp_path / "here/baseline/worker-1.log").read_text()
    (said,) = re.findall(r"^metrics (.*)$", (tmp_path / "here/baseline/worker-0.log").read_text(), re.M)
    metrics = json.loads(said)
    assert {type(value) for value in metrics.values()} == {float}
    assert (metrics["version"], metrics["accepted_pushes"]) == (8, 8)
    assert 0 < metrics["raw_bytes_up"] < metrics["bytes_up"]
    assert 0 < metrics["payload_bytes_up"] <= metrics["raw_bytes_up"]  # those of `none`
    assert metrics["payload_bytes_down"] > 0
    assert metrics["ratio_up"] == metrics["raw_bytes_up"] / metrics["bytes_up"]
    assert metrics["step_seconds"] > 0
    assert metrics["computing_seconds"] > 0


def test_the_example_runs_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("words for a small model, " * 2000)
    script = f"'{sys.executable}' '{EXAMPLE}' --data text --steps 3 --batch-size 8 --every 1"
    limits = ["--epochs", "0", "--max-steps", "3"]
    assert main(["--script", script, *SMALL, *limits, "--out", "here"], dict(os.environ)) == Exit.DONE
    assert json.loads((tmp_path / "here/report.json").read_text())["steps"] == 3
    assert "step 3: loss " in (tmp_path / "here/run/worker-1.log").read_text()


def test_a_script_that_raises_ends_the_run_with_its_traceback_and_a_report(
    script: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wait_until_gone: WaitUntilGone,
) -> None:
    arguments = ["--script", script("raises"), "--out", "here"]
    assert main([*LONG, *arguments], dict(os.environ)) == Exit.TASK
    said = capsys.readouterr().err
    assert re.search(r"worker-\d \(rank 1, epoch \d+, version 4\) has failed: exit code 1; the end of", said)
    assert said.count("Traceback") == said.count("ValueError: the script is on fire") == 1
    wait_until_gone(pids_of(tmp_path / "here/run"), 5)
    report = json.loads((tmp_path / "here/report.json").read_text())
    assert report["steps"] >= 4
    assert not report["finished"]
    assert report["baseline"] is None


def test_a_script_that_fails_after_the_job_does_not_cost_the_report(
    script: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has the compressor that the script has named."""
    arguments = ["--script", script("own"), "--epochs", "1", "--workers", "1", "--out", "here"]
    assert main(arguments, dict(os.environ)) == Exit.TASK
    assert "RuntimeError: the disk is full" in capsys.readouterr().err
    report = json.loads((tmp_path / "here/report.json").read_text())
    assert (report["finished"], report["compressor"]) == (True, "topk:ratio=2")


def test_a_scripts_own_compressor_must_not_contradict_the_runs(
    script: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--script", script("own"), "--compressor", "4bit", "--workers", "1"]
    assert main(arguments, dict(os.environ)) == Exit.USAGE
    said = capsys.readouterr().err
    assert "--compressor 4bit: worker-0 uses topk:ratio=2, which its script has named" in said


@pytest.fixture
def long_run(script: Callable[[str], str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of a script that has trained an epoch and is far from done."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gradwire.deploy.cli", *LONG, "--script", script("fine"), "--out", "here"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    assert any("/1000000 epochs" in line for line in process.stdout)
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_ends_scripts_and_reports_what_there_is(
    long_run: subprocess.Popen[str], tmp_path: Path, wait_until_gone: WaitUntilGone
) -> None:
    pids = pids_of(tmp_path / "here/run")
    long_run.send_signal(signal.SIGINT)
    _, errors = long_run.communicate(timeout=120)
    assert long_run.returncode == Exit.INTERRUPTED
    assert "Traceback" not in errors
    wait_until_gone(pids, 0)
    assert json.loads((tmp_path / "here/report.json").read_text())["steps"] > 0


def test_scripts_do_not_outlive_a_gc_run_that_is_killed(
    long_run: subprocess.Popen[str], tmp_path: Path, wait_until_gone: WaitUntilGone
) -> None:
    pids = pids_of(tmp_path / "here/run")
    assert len(pids) == 2
    long_run.kill()
    wait_until_gone(pids, 60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--script", "pyton train.py"], ["'pyton train.py'", "no program", "python train.py"]),
        (["--script", "./train.py"], ["not a program", "python train.py"]),
        (["--script", "python 'train.py"], ["--script", "No closing quotation"]),
        (["--script", "python train.py", "--task", "digits"], ["--task digits", "--script"]),
        (["--script", "python train.py", "--schedule", "cosine"], ["--schedule cosine", "job.follow"]),
    ],
)
def test_what_is_wrong_with_a_command_is_said_before_anything_starts(
    arguments: list[str],
    words: list[str],
    script: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments, dict(os.environ)) == Exit.USAGE
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def supervised(tmp_path: Path, server: str, code: str, limit_s: float) -> RunPlan:
    """A run of two processes of a line of Python, with a stand-in as server."""
    return RunPlan(
        settings=RunSettings(
            script=f"'{sys.executable}' -c '{code}'", downlink=server, workers=2, progress_seconds=limit_s
        ),
        directory=tmp_path,
        environ=os.environ,
        server="standin_server",
    )


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupt]:
    """Child processes find the stand-in."""
    monkeypatch.setenv("PYTHONPATH", f"{PROGRAMS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with Interrupt() as caught:
        yield caught


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("pass", r"worker-\d has ended before the job began; a script has to call gradwire\.connect\(\)"),
        ("1 / 0", r"(?s)worker-\d has failed: exit code 1; .*ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", r"worker-\d has failed: SIGKILL; "),
        ("import time; time.sleep(600)", r"worker-0 has not joined the job for 1 s \(--progress-seconds\)"),
    ],
)
def test_a_script_that_never_connects_is_named_with_a_remedy(
    tmp_path: Path, interrupt: Interrupt, code: str, words: str
) -> None:
    limit_s = 1.0 if "sleep" in code else 600.0
    with pytest.raises(RunError, match=words) as caught:
        train(supervised(tmp_path, "gathering", code, limit_s), Watcher(), interrupt)
    assert (caught.value.code, caught.value.status) == (Exit.TASK, None)


def test_a_script_that_does_not_end_after_the_job_is_stopped(
    tmp_path: Path, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch, wait_until_gone: WaitUntilGone
) -> None:
    monkeypatch.setattr(engine, "LEAVE_SECONDS", 0.1)
    code = 'import os, time; print("pid", os.getpid(), flush=True); time.sleep(600)'
    plan = supervised(tmp_path, "finish", code, 10.0)
    assert train(plan, Watcher(), interrupt).phase is Phase.FINISHED
    wait_until_gone(pids_of(tmp_path), 5)
