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

WAYS = ("", "none", "journal", "fsync")  # values of --durability; "" for no --state
READ = re.compile(r"and (\d+) pushes of the journal read in ([0-9.]+) s")
WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class DurabilityRow:
    """Seconds of a job's steps, and of reading its journal again.

    Attributes:
        step_s: by value of --durability, one for each turn.
        training_s: of the last run with `journal`, whose journal has `pushes` and was read in `read_s`.
    """

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
    """A journal of many pushes: its size, and the seconds in which they arrived and were read."""

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


def digits(epochs: int) -> RunSettings:
    return RunSettings(
        task="digits", epochs=epochs, optimizer="sgd:momentum=0.9", learning_rate=0.05, **SHARED
    )


def large(steps: int, computing_s: float) -> RunSettings:
    options = f"elements=25000000,seconds={computing_s:g},samples={WORKERS * steps}"
    task = f"gradwire.benchmarks.paced:still:{options}"
    return RunSettings(task=task, epochs=1, batch_size=1, learning_rate=0.01, **SHARED)


def measured(name: str, job: RunSettings, turns: int, directory: Path) -> DurabilityRow:
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
            output.say(f"{name}, {way or 'without --state'}: {1e3 * step_s[way][-1]:.1f} ms per step")
    pushes, read_s = read_again(job, kept, directory / "again")
    return DurabilityRow(job=name, step_s=step_s, training_s=training_s, pushes=pushes, read_s=read_s)


def trained(job: RunSettings, way: str, state: Path, logs: Path) -> StatusResponse:
    """Train without --state if `way` is empty, else with one checkpoint, so that the journal is whole."""
    kept = ("--state", str(state), "--durability", way, "--checkpoint-every", "1000000steps")
    return run_job(job, logs, server_options=kept if way else ())


def replay(pushes: int, directory: Path) -> Replay:
    """Train until the journal has at least this many pushes, and read it."""
    each = WORKERS * math.ceil(DIGITS_SAMPLES / (WORKERS * RunSettings().batch_size))  # in an epoch
    job, state = digits(math.ceil(pushes / each)), directory / "state-replay"
    status = trained(job, "journal", state, directory / "logs")
    size = sum(path.stat().st_size for path in state.glob(f"{SEGMENT}*"))
    # A journal of this size has led to a checkpoint. Without that, both segments are read.
    for checkpoint in sorted(state.glob(f"{CHECKPOINT}*"))[1:]:
        shutil.rmtree(checkpoint)
    read, read_s = read_again(job, state, directory / "again")
    assert read == status.pushes, f"{read} of {status.pushes} pushes were read"
    return Replay(pushes=read, journal_bytes=size, arrived_s=status.training_seconds, read_s=read_s)


def read_again(job: RunSettings, state: Path, directory: Path) -> tuple[int, float]:
    """Start a server on an earlier server's state; return the pushes that it read, and the seconds."""
    with Children(directory) as children:
        arguments = server_arguments(job, free_port(), directory / PARAMETERS)
        child = children.start("server", "gradwire.server.cli", [*arguments, "--state", str(state)])
        found = wait_for(lambda: READ.search(child.log.read_text()), [child])
    return int(found[1]), float(found[2])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--turns", at_least_one, 3, "N", "runs of each kind")
    option(parser, "--epochs", at_least_one, 60, "N", "epochs of digits")
    option(parser, "--steps", at_least_one, 64, "N", "steps of the large model")
    option(parser, "--replay", at_least_one, 10_000, "N", "pushes in the journal that is read at last")
    parser.add_argument("--only", choices=("digits", *LARGE, "replay"), help="measurement to make alone")
    json_option(parser, "the figures")


def run(given: argparse.Namespace) -> int:
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
