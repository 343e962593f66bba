"""`gc-bench durability`: cost of --state per step, and the time in which a server reads its journal again.

Real daemons on this machine, `4bit` in both directions. One job is digits, whose steps are short. The other
jobs train a model of 25 million parameters that learns nothing: steps are nothing but the exchange, or have a
second of computing that takes no processor. Each job is trained without --state, and with each --durability,
alternately. A ratio is of the medians over these turns. Then a server is started on the state of the run with
a journal, and reports how long it read. The pushes in the journal took as long to arrive as the training
took. Finally the same is measured for a journal with 10,000 pushes of digits.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import tempfile
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
from .arguments import at_least_one, json_option, option
from .jobs import DIGITS_SAMPLES, run_job, wait_for

DURABILITIES = ("", "none", "journal", "fsync")  # values of --durability; "" for no --state
READ = re.compile(r"and (\d+) pushes of the journal (?:read )?in ([0-9.]+) s")  # in the server's log
WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class DurabilityRow:
    """A row of the table: one job with each durability.

    Attributes:
        job: name of the job.
        step_s: seconds per step, one value for each turn, by value of --durability; "" is without --state.
        training_s: seconds of training of the last run with a journal.
        pushes: number of pushes in that journal.
        read_s: seconds in which a server has read that journal.
    """

    job: str
    step_s: dict[str, list[float]]
    training_s: float
    pushes: int
    read_s: float

    def ratio(self, durability: str) -> float:
        """Return the median time of a step with this durability, relative to that without --state."""
        return statistics.median(self.step_s[durability]) / statistics.median(self.step_s[""])


# Jobs with the large model: seconds that a worker computes per step, by name.
LARGE = {"25 million": 0.0, "25 million and 1 s": 1.0}

HEADINGS = ("job", "ms per step", "`none`", "`journal`", "`fsync`", "pushes", "arrived in", "read in")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The measurement of a journal with many pushes.

    Attributes:
        pushes: number of pushes in the journal.
        journal_bytes: size of the journal.
        arrived_s: seconds in which the pushes have arrived, which is the time of training.
        read_s: seconds in which a server has read them from the journal.
    """

    pushes: int
    journal_bytes: int
    arrived_s: float
    read_s: float


REPLAY_HEADINGS = ("pushes", "journal", "arrived in", "read in", "times faster")


def replay_cells(row: Replay) -> list[object]:
    """Return the cells of one row of the table about the long journal."""
    times = row.arrived_s / row.read_s
    size, arrived, read = f"{row.journal_bytes / 1e6:.0f} MB", f"{row.arrived_s:.1f} s", f"{row.read_s:.1f} s"
    return [row.pushes, size, arrived, read, f"{times:.1f}"]


def cells(row: DurabilityRow) -> list[object]:
    """Return the cells of one row of the table of jobs."""
    return [
        row.job,
        f"{1e3 * statistics.median(row.step_s['']):.1f}",
        *(f"{row.ratio(durability):.3f}" for durability in DURABILITIES[1:]),
        *(row.pushes, f"{row.training_s:.1f} s", f"{row.read_s:.1f} s"),
    ]


SHARED: Mapping[str, Any] = {"workers": WORKERS, "compressor": "4bit", "downlink": "4bit", "http_port": -1}


def digits(epochs: int) -> RunSettings:
    """Return the settings of a job that trains digits."""
    return RunSettings(
        task="digits", epochs=epochs, optimizer="sgd:momentum=0.9", learning_rate=0.05, **SHARED
    )


def large(steps: int, computing_s: float) -> RunSettings:
    """Return the settings of a job with a model of 25 million parameters that learns nothing.

    Args:
        steps: number of steps.
        computing_s: seconds that a worker computes per step, without using a processor.
    """
    options = f"elements=25000000,seconds={computing_s:g},samples={WORKERS * steps}"
    task = f"gradwire.benchmarks.paced:still:{options}"
    return RunSettings(task=task, epochs=1, batch_size=1, learning_rate=0.01, **SHARED)


def measured(name: str, job: RunSettings, turns: int, directory: Path) -> DurabilityRow:
    """Train a job with each durability and read its journal again; return the row.

    Args:
        name: name of the job.
        job: settings of the job.
        turns: number of runs with each durability.
        directory: for states and logs.
    """
    step_s: dict[str, list[float]] = {durability: [] for durability in DURABILITIES}
    training_s = 0.0
    kept = directory / "state"
    for _ in range(turns):
        for durability in DURABILITIES:
            folder = kept if durability == "journal" else directory / f"state-{durability}"
            shutil.rmtree(folder, ignore_errors=True)
            status = trained(job, durability, folder, directory / "logs")
            step_s[durability].append(status.training_seconds / status.version)
            if durability == "journal":
                training_s = status.training_seconds
            step_ms = 1e3 * step_s[durability][-1]
            output.say(f"{name}, {durability or 'without --state'}: {step_ms:.1f} ms per step")
    pushes, read_s = read_again(job, kept, directory / "again")
    return DurabilityRow(job=name, step_s=step_s, training_s=training_s, pushes=pushes, read_s=read_s)


def trained(job: RunSettings, durability: str, state: Path, logs: Path) -> StatusResponse:
    """Train a job with a value of --durability and return the server's last status.

    There are no checkpoints after the first one, so the journal contains the whole job.

    Args:
        job: settings of the job.
        durability: value of --durability; "" trains without --state.
        state: folder of --state.
        logs: folder for logs.
    """
    kept = ("--state", str(state), "--durability", durability, "--checkpoint-every", "1000000steps")
    return run_job(job, logs, server_options=kept if durability else ())


def replay(pushes: int, directory: Path) -> Replay:
    """Train until the journal has at least this many pushes; return the times of writing and reading it."""
    each = WORKERS * math.ceil(DIGITS_SAMPLES / (WORKERS * RunSettings().batch_size))  # pushes in an epoch
    job, state = digits(math.ceil(pushes / each)), directory / "state-replay"
    status = trained(job, "journal", state, directory / "logs")
    size = sum(path.stat().st_size for path in state.glob(f"{SEGMENT}*"))
    # A journal of this size makes the server write a checkpoint. Once it is removed, both segments are read.
    for checkpoint in sorted(state.glob(f"{CHECKPOINT}*"))[1:]:
        shutil.rmtree(checkpoint)
    read, read_s = read_again(job, state, directory / "again")
    assert read == status.pushes, f"{read} of {status.pushes} pushes were read"
    return Replay(pushes=read, journal_bytes=size, arrived_s=status.training_seconds, read_s=read_s)


def read_again(job: RunSettings, state: Path, directory: Path) -> tuple[int, float]:
    """Start a server on an earlier server's state, and wait until it has read the journal.

    Args:
        job: settings of the job.
        state: folder of --state.
        directory: for logs and parameters.

    Returns:
        The number of pushes in the journal, and the seconds that the server has read.
    """
    with Children(directory) as children:
        arguments = server_arguments(job, free_port(), directory / PARAMETERS)
        child = children.start("server", "gradwire.server.cli", [*arguments, "--state", str(state)])
        found = wait_for(lambda: READ.search(child.log.read_text(encoding="utf-8")), [child])
    return int(found[1]), float(found[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--turns", at_least_one, 3, "N", "number of runs of each job with each durability")
    option(parser, "--epochs", at_least_one, 60, "N", "epochs of digits")
    option(parser, "--steps", at_least_one, 64, "N", "steps of the large model")
    option(parser, "--replay", at_least_one, 10_000, "N", "least number of pushes in the last, long journal")
    text = "the only measurement to make (default: all)"
    parser.add_argument("--only", choices=("digits", *LARGE, "replay"), help=text)
    json_option(parser, "the figures")


def run(given: argparse.Namespace) -> int:
    """Make the chosen measurements and print their tables; return the exit code."""
    rows: list[DurabilityRow] = []
    replays: list[Replay] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = {"digits": digits(given.epochs)}
        jobs |= {name: large(given.steps, computing_s) for name, computing_s in LARGE.items()}
        for name, job in jobs.items():
            if given.only in (None, name):
                rows.append(measured(name, job, given.turns, Path(folder)))
        if given.only in (None, "replay"):
            replays.append(replay(given.replay, Path(folder)))
    if rows:
        print(output.table(HEADINGS, map(cells, rows)))
    if replays:
        print(output.table(REPLAY_HEADINGS, map(replay_cells, replays)))
    output.write_json(given.json, [vars(row) for row in (*rows, *replays)])
    return Exit.DONE
