"""gc-status: what it makes of an answer."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from gradwire.deploy.texts import duration
from gradwire.deploy.watch import page
from gradwire.proto.job import job_message
from gradwire.proto.messages import EpochStatus, LostStatus, MemberStatus, Phase, StatusResponse, Traffic
from gradwire.proto.status import seconds_left, to_json_dict
from gradwire.settings import JobTerms

STATUS = StatusResponse(
    job=job_message(JobTerms(id="j", work="gradients", epochs=4)),
    phase=Phase.RUNNING,
    waiting="",
    version=1234,
    epoch=1,
    epoch_progress=0.5,
    members=(
        MemberStatus(
            worker="[odd]",
            rank=0,
            attached=False,
            heard_seconds=2.0,
            activity="computing",
            compressor="4bit",
            pushes=7,
        ),
    ),
    lost=(LostStatus(worker="gone", rank=1, reason="not heard of", version=3),),
    evaluations=(EpochStatus(epoch=1, version=800, metrics={"perplexity": 3.5, "loss": 1.25}),),
    traffic=Traffic(wire_bytes_up=10, raw_bytes_up=40),
    pushes=7,
    refused_pushes=0,
    train_loss=0.75,
    training_seconds=30.0,
    parameters_sha256="",
    software="0",
    step_seconds=0.02,
)


def shown(status: StatusResponse) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(page(status))
    return console.export_text()


def test_nothing_that_a_job_says_moves_the_cursor_or_is_taken_for_markup() -> None:
    """Nor breaks the table, whatever the server lets through."""
    hostile = "[/]\x1b[2J\n\u202e[red]w"
    status = replace(
        STATUS,
        waiting=hostile,
        members=(replace(STATUS.members[0], worker=hostile, activity=hostile, compressor=hostile),),
        lost=(LostStatus(worker=hostile, rank=1, reason=hostile, version=3),),
        evaluations=(EpochStatus(epoch=1, version=8, metrics={hostile: 1.0}),),
        software=hostile,
    )
    said = shown(status)
    assert all(line.isprintable() for line in said.split("\n"))
    assert said.count(r"[/]\x1b[2J\n\u202e[red]w") >= 5


def test_everything_is_shown() -> None:
    said = shown(STATUS)
    for words in (
        "1 of 4 epochs, 50% of the next one; version 1,234",
        "20 ms a step, 50 steps/s",
        "0:30 so far, 0:50 left",
        "validation loss 1.2500  validation perplexity 3.5000  (1/4 epochs)",
        "[odd]",
        "2.0 s ago, not connected",
        "lost: gone at version 3: not heard of",
    ):
        assert words in said


def test_before_the_first_step_nothing_is_made_up() -> None:
    status = replace(
        STATUS, version=0, epoch=0, epoch_progress=0.0, step_seconds=0.0, training_seconds=0.0, evaluations=()
    )
    said = shown(replace(status, train_loss=float("nan"), members=()))
    assert "0:00 so far, – left" in said
    assert "steps/s" not in said
    assert "loss" not in said


def test_json_has_no_nan() -> None:
    found = json.loads(json.dumps(to_json_dict(replace(STATUS, train_loss=float("nan"))), allow_nan=False))
    assert found["train_loss"] is None
    assert found["evaluations"][0]["metrics"] == {"perplexity": 3.5, "loss": 1.25}
    assert found["phase"] == "running"
    assert found["seconds_left"] == pytest.approx(50)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0.4, "0:00"), (61, "1:01"), (3599.6, "1:00:00"), (90061, "25:01:01")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_nothing_is_left_of_a_job_that_is_over() -> None:
    assert seconds_left(replace(STATUS, epoch=4, epoch_progress=0.0)) is None


def test_help_imports_nothing_heavy() -> None:
    program = "import sys; from gradwire.deploy.watch import parser; parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "grpc", "numba", "rich"}.isdisjoint(done.stdout.split())
