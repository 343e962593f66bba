"""`gc-bench durability`: what --state costs per step, and how long a server takes to read its journal again.

Real daemons on this machine, `4bit` both ways: digits, whose steps are short, and a model of 25 million
parameters that learns nothing, with steps that are nothing but the exchange, and with a second of computing
in each, which takes no processor. Each is trained without --state, and with each --durability, in turns; a
ratio is of the medians over the turns. Then a server is started on what the run with a journal has left, and
says how long it read; the pushes in it took as long to arrive as the training took. At last the same with
10,000 pushes of digits in the journal.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.exits import Exit
from ..deploy.daemons import server_arguments
from ..deploy.engine import PARAMETERS, free_port
from ..deploy.processes import Children
from ..proto.messages import StatusResponse
from ..server.durable.folder import CHECKPOINT, SEGMENT
from ..settings import RunSettings
from . import output
from .arguments import BenchError, at_least_one, file_to_write
from .jobs import DIGITS_SAMPLES, run_job

WAYS = ("", "none", "journal", "fsync")  # of --durability; without --state first
READ = re.compile(r"and (\d+) pushes of the journal read in ([0-9.]+) s")
WORKERS = 2
PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class DurabilityJob:
    name: str
    settings: RunSettings


@dataclass(frozen=True, kw_only=True)
class DurabilityRow:
    """step_s: by way, of each turn. training_s: of the last with a journal; pushes, read_s: of that."""

    job: str
    step_s: dict[str, list[float]]
    training_s: float
    pushes: int
    read_s: float

    def ratio(self, way: str) -> float:
        return statistics.median(self.step_s[way]) / statistics.median(self.step_s[""])


# Seconds that a worker computes for a step.
LARGE = {"25 million": 0.0, "25 million and 1 s": 1.0}

HEADINGS = ("job", "ms per step", "`none`", "`journal`", "`fsync`", "pushes", "arrived in", "read in")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """journal_bytes: what the pushes take."""

    pushes: int
    journal_bytes: int
    arrived_s: float
    read_s: float


REPLAY_HEADINGS = ("pushes", "journal", "arrived in", "read in", "times faster")


def replay_cells(row: Replay) -> list[object]:
    times = row.arrived_s / row.read_s
    size, arrived, read = f"{row.journal_bytes / 1e6:.0f} MB", f"{row.arrived_s:.1f} s", f"{row.read_s:.1f} s"
    return [row.pushes, size, arrived, read, f"{times:.1f}"]


def cells(row: DurabilityRow) -> list[object]:
    return [
        row.job,
        f"{1e3 * statistics.median(row.step_s['']):.1f}",
        *(f"{row.ratio(way):.3f}" for way in WAYS[1:]),
        *(row.pushes, f"{row.training_s:.1f} s", f"{row.read_s:.1f} s"),
    ]


SHARED: Mapping[str, Any] = {"workers": WORKERS, "compressor": "4bit", "downlink": "4bit", "http_port": -1}


def digits(epochs: int) -> DurabilityJob:
    settings = RunSettings(
        task="digits", epochs=epochs, optimizer="sgd:momentum=0.9", learning_rate=0.05, **SHARED
    )
    return DurabilityJob(name="digits", settings=settings)


def large(steps: int, name: str, computing_s: float) -> DurabilityJob:
    what = f"elements=25000000,seconds={computing_s:g},samples={WORKERS * steps}"
    task = f"gradwire.benchmarks.paced:still:{what}"
    settings = RunSettings(task=task, epochs=1, batch_size=1, learning_rate=0.01, **SHARED)
    return DurabilityJob(name=name, settings=settings)


def measured(job: DurabilityJob, turns: int, directory: Path) -> DurabilityRow:
    step_s: dict[str, list[float]] = {way: [] for way in WAYS}
    training_s = 0.0
    kept = directory / "state"
    for _ in range(turns):
        for way in WAYS:
            folder = kept if way == "journal" else directory / f"state-{way}"
            shutil.rmtree(folder, ignore_errors=True)
            status = trained(job, way, folder, directory / "logs")
            step_s[way].append(status.training_seconds / status.version)
            if way == "journal":
                training_s = status.training_seconds
            output.say(f"{job.name}, {way or 'without --state'}: {1e3 * step_s[way][-1]:.1f} ms per step")
    pushes, read_s = read_again(job, kept, directory / "again")
    return DurabilityRow(job=job.name, step_s=step_s, training_s=training_s, pushes=pushes, read_s=read_s)


def trained(job: DurabilityJob, way: str, state: Path, logs: Path) -> StatusResponse:
    """Without --state if there is no way. With no checkpoint but the first, so that all of the journal is
    there to be read."""
    kept = ("--state", str(state), "--durability", way, "--checkpoint-every", "1000000steps")
    return run_job(job.settings, logs, server_options=kept if way else ())


def replay(pushes: int, directory: Path) -> Replay:
    """Of a job of at least so many."""
    each = WORKERS * math.ceil(DIGITS_SAMPLES / (WORKERS * RunSettings().batch_size))  # in an epoch
    job, state = digits(math.ceil(pushes / each)), directory / "state-replay"
    status = trained(job, "journal", state, directory / "logs")
    size = sum(path.stat().st_size for path in state.glob(f"{SEGMENT}*"))
    # So much that it has led to a checkpoint. Without that, both segments are read.
    for checkpoint in sorted(state.glob(f"{CHECKPOINT}*"))[1:]:
        shutil.rmtree(checkpoint)
    read, read_s = read_again(job, state, directory / "again")
    assert read == status.pushes, f"{read} of {status.pushes} pushes were read"
    return Replay(pushes=read, journal_bytes=size, arrived_s=status.training_seconds, read_s=read_s)


def read_again(job: DurabilityJob, state: Path, directory: Path) -> tuple[int, float]:
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
    text = "runs of each kind (default: 3)"
    parser.add_argument("--turns", type=at_least_one, default=3, metavar="N", help=text)
    text = "epochs of digits (default: 60)"
    parser.add_argument("--epochs", type=at_least_one, default=60, metavar="N", help=text)
    text = "steps of the large model (default: 64)"
    parser.add_argument("--steps", type=at_least_one, default=64, metavar="N", help=text)
    text = "pushes in the journal that is read at last (default: 10000)"
    parser.add_argument("--replay", type=at_least_one, default=10_000, metavar="N", help=text)
    parser.add_argument("--only", choices=("digits", *LARGE, "replay"), help="measurement to make alone")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="file for the figures, as JSON")


def run(given: argparse.Namespace) -> int:
    rows: list[DurabilityRow] = []
    replays: list[Replay] = []
    with tempfile.TemporaryDirectory() as folder:
        for job in (digits(given.epochs), *(large(given.steps, *each) for each in LARGE.items())):
            if given.only in (None, job.name):
                rows.append(measured(job, given.turns, Path(folder)))
        if given.only in (None, "replay"):
            replays.append(replay(given.replay, Path(folder)))
    if rows:
        print(output.table(HEADINGS, map(cells, rows)))
    if replays:
        print(output.table(REPLAY_HEADINGS, map(replay_cells, replays)))
    output.write_json(given.json, [vars(row) for row in (*rows, *replays)])
    return Exit.DONE
