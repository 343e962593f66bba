"""Plans that are made while a job runs, with real processes."""

from __future__ import annotations

import re

import pytest
from daemons import Daemons, Server, stop
from test_training import finished

from gradwire.common.exits import Exit
from gradwire.deploy.plan import main
from gradwire.proto.messages import StatusResponse


def trained(
    daemons: Daemons, compressor: str, fusion: str, order: str, overlap: str
) -> tuple[Server, StatusResponse]:
    server = daemons.server(
        *("--min-workers", "2", "--epochs", "2", "--batch-size", "32", "--seed", "3", "--replan", "10"),
        *("--overlap", overlap, "--part-bytes", "16384", "--fusion", fusion, "--order", order),
    )
    arguments = ("--compressor", compressor)
    workers = [daemons.worker(server.address, "--worker-id", f"w{n}", *arguments) for n in range(2)]
    status = finished(server)
    assert [worker.wait() for worker in workers] == [0, 0]
    stop(server)
    return server, status


def test_fusion_and_order_have_no_say_in_the_bits_of_what_is_sent_without_loss(daemons: Daemons) -> None:
    found: set[str] = set()
    for fusion, order, overlap in (
        ("bytes", "fifo", "backward"),
        ("none", "p3", "both"),
        ("mgwfbp", "two-phase", "both"),
        ("seamgs", "credit=2", "both"),
        ("mgs=30000", "fifo", "backward"),
    ):
        server, status = trained(daemons, "none", fusion, order, overlap)
        if fusion not in ("bytes", "none"):
            server.wait_for(r"new plan: \d+ units in \d+ parts, because a part takes")
        found.add(status.parameters_sha256)
    assert len(found) == 1


@pytest.mark.parametrize("compressor", ["topk:ratio=10", "4bit"])
def test_a_job_learns_with_merged_parts(daemons: Daemons, compressor: str) -> None:
    server, status = trained(daemons, compressor, "seamgs", "two-phase", "both")
    server.wait_for("new plan: ")
    assert status.evaluations[-1].metrics["accuracy"] > 0.4
    assert status.refused_pushes == 0


def test_gc_plan_asks_a_job_that_runs(daemons: Daemons, capsys: pytest.CaptureFixture[str]) -> None:
    server = daemons.server(
        *("--min-workers", "2", "--epochs", "40", "--batch-size", "8", "--overlap", "both"),
        *("--part-bytes", "16384", "--fusion", "mgwfbp", "--order", "p3"),
    )
    assert main(["--server", server.address]) == Exit.USAGE
    assert "it has too few measurements yet; ask again after 50 steps" in capsys.readouterr().err
    for number in range(2):
        daemons.worker(server.address, "--worker-id", f"w{number}", "--compressor", "4bit")
    server.wait_for("new plan: ")
    assert main(["--server", server.address]) == Exit.DONE
    said = capsys.readouterr().out
    words = r"The job runs with 4bit, sync, overlap both, fusion mgwfbp, order p3: \S+ s per step, predicted"
    assert re.search(words, said.replace("\n", " ")), said
    assert "Recommended: " in said
    assert main(["--server", "127.0.0.1:1"]) == Exit.USAGE
    assert "--server 127.0.0.1:1: no answer" in capsys.readouterr().err
