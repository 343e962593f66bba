"""`gc-bench durability`: time in which a server reads its journal again, beside the time of the training.

Real daemons on this machine train digits with `4bit` in both directions, until the journal has --pushes. Then
a server starts on their state and reports for how long it has read.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ..deploy.daemons import server_arguments
from ..deploy.engine import PARAMETERS
from ..deploy.processes import Children
from ..server.durable.folder import CHECKPOINT, SEGMENT
from ..settings import RunSettings
from . import output
from .arguments import at_least_one, json_option, option
from .jobs import DIGITS_SAMPLES, run_job, wait_for

READ = r"and (\d+) pushes of the journal (?:read )?in ([0-9.]+) s"  # in the server's log
WORKERS = 2
HEADINGS = ("pushes", "journal", "arrived in", "read in", "times faster")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The pushes of a journal: how long they took to arrive, and how long a server took to read them."""

    pushes: int
    journal_bytes: int
    arrived_s: float
    read_s: float

    def cells(self) -> list[object]:
        """Return the cells of the table's row, in the order of `HEADINGS`."""
        return [
            *(self.pushes, f"{self.journal_bytes / 1e6:.0f} MB"),
            *(f"{self.arrived_s:.1f} s", f"{self.read_s:.1f} s", f"{self.arrived_s / self.read_s:.1f}"),
        ]


def replay(pushes: int, directory: Path) -> Replay:
    """Train until the journal has at least this many pushes, and have a new server read it."""
    each = WORKERS * math.ceil(DIGITS_SAMPLES / (WORKERS * RunSettings().batch_size))  # pushes in an epoch
    job = RunSettings(
        task="digits",
        workers=WORKERS,
        epochs=math.ceil(pushes / each),
        compressor="4bit",
        downlink="4bit",
        optimizer="sgd:momentum=0.9",
        learning_rate=0.05,
        http_port=-1,
    )
    state = directory / "state"
    # Only the first checkpoint is due, so the journal has the whole job.
    kept = ("--state", str(state), "--checkpoint-every", "1000000steps")
    status = run_job(job, directory / "logs", server_options=kept)
    size = sum(path.stat().st_size for path in state.glob(f"{SEGMENT}*"))
    # A journal of this size makes the server write a checkpoint. Once it is removed, both segments are read.
    for checkpoint in sorted(state.glob(f"{CHECKPOINT}*"))[1:]:
        shutil.rmtree(checkpoint)
    with Children(directory / "again") as children:
        arguments = server_arguments(job, 0, directory / "again" / PARAMETERS)
        child = children.start("server", "gradwire.server.cli", [*arguments, "--state", str(state)])
        found = wait_for(lambda: child.logged(READ), [child])
    assert int(found[1]) == status.pushes, f"{found[1]} of {status.pushes} pushes were read"
    return Replay(
        pushes=status.pushes,
        journal_bytes=size,
        arrived_s=status.training_seconds,
        read_s=float(found[2]),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--pushes", at_least_one, 10_000, "N", "least number of pushes in the journal")
    json_option(parser, "the figures")


def run(given: argparse.Namespace) -> None:
    """Train, read the journal again, and print the times."""
    with tempfile.TemporaryDirectory() as folder:
        row = replay(given.pushes, Path(folder))
    print(output.table(HEADINGS, [row.cells()]))
    output.write_json(given.json, asdict(row))
