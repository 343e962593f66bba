"""`gc-bench durability`: what --state costs per step, and how long a server takes to read its journal again.

Real daemons on this machine, `4bit` both ways: digits, whose steps are short, and a model of 25 million
parameters that learns nothing. Each is trained without --state, and with each --durability, in turns; a ratio
is of the medians over the turns. Then a server is started on what the run with a journal has left, and says
how long it read; the pushes in it took as long to arrive as the training took.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..deploy.daemons import server_arguments
from ..deploy.engine import PARAMETERS, free_port
from ..deploy.processes import Children
from ..exits import Exit
from ..settings import RunSettings
from . import output
from .arguments import BenchError, at_least_one, file_to_write
from .jobs import run_job

WAYS = ("", "none", "journal", "fsync")  # of --durability; without --state first
READ = re.compile(r"and (\d+) pushes of the journal read in ([0-9.]+) s")
PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Job:
    name: str
    settings: RunSettings


@dataclass(frozen=True, kw_only=True)
class Row:
    """step_s: by way, of each turn. training_s: of the last with a journal; pushes, read_s: of that."""

    job: str
    step_s: dict[str, list[float]]
    training_s: float
    pushes: int
    read_s: float

    def ratio(self, way: str) -> float:
        return statistics.median(self.step_s[way]) / statistics.median(self.step_s[""])


HEADINGS = ("job", "ms per step", "`none`", "`journal`", "`fsync`", "pushes", "arrived in", "read in")


def cells(row: Row) -> list[object]:
    return [
        row.job,
        f"{1e3 * statistics.median(row.step_s['']):.1f}",
        *(f"{row.ratio(way):.3f}" for way in WAYS[1:]),
        *(row.pushes, f"{row.training_s:.1f} s", f"{row.read_s:.1f} s"),
    ]


def jobs(epochs: int, steps: int) -> list[Job]:
    """epochs: of digits. steps: of the large model."""
    shared: dict[str, Any] = {"workers": 2, "compressor": "4bit", "downlink": "4bit", "http_port": -1}
    digits = RunSettings(
        task="digits", epochs=epochs, optimizer="sgd:momentum=0.9", learning_rate=0.05, **shared
    )
    task = f"gradwire.benchmarks.paced:still:elements=25000000,seconds=0,samples={2 * steps}"
    large = RunSettings(task=task, epochs=1, batch_size=1, learning_rate=0.01, **shared)
    return [Job(name="digits", settings=digits), Job(name="25 million", settings=large)]


def measured(job: Job, turns: int, directory: Path) -> Row:
    step_s: dict[str, list[float]] = {way: [] for way in WAYS}
    training_s = 0.0
    kept = directory / "state"
    for _ in range(turns):
        for way in WAYS:
            folder = kept if way == "journal" else directory / f"state-{way}"
            shutil.rmtree(folder, ignore_errors=True)
            # No checkpoint but the first, so that all of the journal is there to be read.
            state = ("--state", str(folder), "--durability", way, "--checkpoint-every", "1000000steps")
            status = run_job(job.settings, directory / "logs", server_options=state if way else ())
            step_s[way].append(status.training_seconds / status.version)
            if way == "journal":
                training_s = status.training_seconds
            output.say(f"{job.name}, {way or 'without --state'}: {1e3 * step_s[way][-1]:.1f} ms per step")
    pushes, read_s = read_again(job, kept, directory / "again")
    return Row(job=job.name, step_s=step_s, training_s=training_s, pushes=pushes, read_s=read_s)


def read_again(job: Job, state: Path, directory: Path) -> tuple[int, float]:
    """Start a server on what another one has left; how many pushes it read, and the seconds."""
    with Children(directory) as children:
        arguments = server_arguments(job.settings, free_port(), directory / PARAMETERS)
        child = children.start("server", "gradwire.server.cli", [*arguments, "--state", str(state)])
        deadline = time.monotonic() + PATIENCE_S
        while (found := READ.search((directory / "server.log").read_text())) is None:
            if child.code is not None or time.monotonic() > deadline:
                raise BenchError(f"the journal is not read: {child.ending}: {child.last_lines()}")
            time.sleep(0.1)
    return int(found[1]), float(found[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=at_least_one, default=3, help="of each way (default: 3)")
    parser.add_argument("--epochs", type=at_least_one, default=60, help="of digits (default: 60)")
    parser.add_argument("--steps", type=at_least_one, default=30, help="of the large model (default: 30)")
    parser.add_argument("--only", choices=("digits", "25 million"), help="one of the two")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="file for the figures")


def run(given: argparse.Namespace) -> int:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs(given.epochs, given.steps):
            if given.only in (None, job.name):
                rows.append(measured(job, given.turns, Path(folder)))
    print(output.table(HEADINGS, map(cells, rows)))
    output.write_json(given.json, [vars(row) for row in rows])
    return Exit.DONE
