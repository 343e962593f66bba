"""gc-status and the server's page: what they say of a job that runs, from outside."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemons, poll

from gradwire.common.exits import Exit
from gradwire.deploy import doctor
from gradwire.deploy.watch import main

JOB = ("--task", "small_tasks:paced:seconds=0.02", "--epochs", "2", "--batch-size", "8", "--seed", "3")


def test_a_look_at_a_job_that_runs_and_watching_it_to_its_end(
    daemons: Daemons, capsys: pytest.CaptureFixture[str]
) -> None:
    server = daemons.server(*JOB, "--min-workers", "2", "--http-port", "0", "--stay")
    port = server.wait_for(r"metrics and probes on port (\d+)")[1]

    def page() -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=60) as answer:
            return json.load(answer)

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
        assert b"status.json" in answer.read()
        assert answer.headers["Content-Security-Policy"]
    workers = [daemons.worker(server.address, "--worker-id", name) for name in ("left", "right")]
    server.wait_for("after 1 epoch, version")

    found = page()
    assert {each["worker"] for each in found["members"]} == {"left", "right"}
    assert all(each["wire_bytes_up"] and each["raw_bytes_up"] for each in found["members"])
    assert {each["lag_versions"] for each in found["members"]} <= {0, 1}
    assert {each["refused_pushes"] for each in found["members"]} == {0}
    assert found["history"][-1][2] > found["history"][0][2]
    assert 0.5 <= found["fraction"] <= 1

    assert main([server.address]) == Exit.DONE
    said = capsys.readouterr().out
    for words in ("small_tasks:paced", "mode sync", "running", "1 of 2 epochs", "left", "right", "accepted"):
        assert words in said
    assert "accuracy 0.5000" in said
    assert "loss" in said

    assert main([server.address, "--json", "--watch", "0.2"]) == Exit.DONE
    looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["phase"] for each in looks][-1] == "finished"
    assert [each["version"] for each in looks] == sorted(each["version"] for each in looks)
    assert looks[0]["steps_per_second"] > 0
    assert looks[0]["seconds_left"] > 0
    assert looks[-1]["seconds_left"] is None
    assert {each["worker"] for each in looks[0]["members"]} == {"left", "right"}
    assert [worker.wait() for worker in workers] == [0, 0]
    poll(lambda: (page()["phase"], page()["members"]) == ("finished", []), "the page does not show the end")


def test_the_doctor_finds_a_server_well_without_a_trace_in_it(
    daemons: Daemons, capsys: pytest.CaptureFixture[str]
) -> None:
    server = daemons.server(*JOB)
    assert doctor.main([server.address]) == Exit.DONE
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["ok"] * 9
    assert main([server.address, "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out)["members"] == []


def test_nobody_there_and_an_address_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["127.0.0.1:1"]) == Exit.UNREACHABLE
    assert "no answer from 127.0.0.1:1" in capsys.readouterr().err
    for wrong, words in (
        ("http://here", "expected host or host:port"),
        ("--watch=0", "expected a number of seconds above 0"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([wrong])
        assert ended.value.code == Exit.USAGE
        assert words in capsys.readouterr().err
