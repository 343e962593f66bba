"""`gc-bench modes`: speed and accuracy of every mode, also with a slow worker and with workers that are lost.

There are three situations: equal workers, one worker that is ten times slower, and workers of which a random
one is killed every few seconds and started again. The processes, the sockets and the training on digits are
real. Workers also sleep for a given time per sample (`paced`), so that four of them can share two cores.
Compare speeds only within one invocation.

`--local` compares numbers of local steps instead, at full speed: adaptive, 8 and 16, each with and without
correction, and elastic averaging, against sync, over several seeds.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..common.exits import Exit
from ..deploy.report import RunResult, result_of
from ..proto.messages import Phase, StatusResponse
from ..settings import RunSettings
from . import output
from .arguments import at_least_one, json_option, option
from .estimates import estimate, seed_list
from .jobs import DIGITS_SAMPLES, RunningJob, one_slower, run_job, train

WORKERS = 4
SLOWER = 10  # factor of the slow worker
SECONDS_PER_SAMPLE = 0.001  # of emulated computation
LEASE_S = 1.0
WHOLE_S = 1.5  # time for which all workers train before one is killed
MODES = ("sync", "sync:backup=1", "stale:bound=4", "async:rate=inverse", "local")
SITUATIONS = ("even", "one slow", "come and go")
LOCAL = (
    "sync",
    *(
        f"local:steps={steps},correction={correction:g}"
        for correction in (0.1, 0.0)
        for steps in ("adaptive", "8", "16")
    ),
    "local:steps=8,elastic=0.225,correction=0",  # 0.9 / workers, as Zhang et al. (2015) recommend
)


@dataclass(frozen=True, kw_only=True)
class ModesRow:
    """A row of the table: one run.

    Attributes:
        situation: one of `SITUATIONS`.
        samples_per_second: samples trained on, counted once per epoch.
        accuracy: validation accuracy at the end.
        largest_staleness: largest staleness of a push, in clocks in stale mode, in versions in async mode.
        repeated_samples: number of samples that were trained on twice.
        curve: (seconds, accuracy) after each epoch.
    """

    mode: str
    situation: str
    seconds: float
    samples_per_second: float
    accuracy: float
    refused_pushes: int
    largest_staleness: int
    repeated_samples: int
    kills: int
    curve: tuple[tuple[float, float], ...]


def measure(mode: str, situation: str, epochs: int, seed: int, directory: Path) -> ModesRow:
    """Run one job to its end and return its row. `seed` also chooses the workers to kill.

    Raises:
        BenchError: if the job does not finish.
    """
    settings = RunSettings(
        task=f"gradwire.benchmarks.paced:digits:seconds={SECONDS_PER_SAMPLE}",
        workers=WORKERS,
        epochs=epochs,
        seed=seed,
        mode=mode,
        # In stale and async each push makes an update: a lossy downlink would be a second difference.
        downlink="none",
        lease_seconds=LEASE_S,
    )
    chance, kills, whole_since = random.Random(seed), 0, time.monotonic()

    def kill_one(status: StatusResponse, job: RunningJob) -> None:
        """Kill a random worker and start it again, once all workers have trained for `WHOLE_S`."""
        nonlocal kills, whole_since
        whole = sum(member.attached and member.pushes > 0 for member in status.members) == WORKERS
        if not whole or status.phase is not Phase.RUNNING:
            whole_since = time.monotonic()
        elif time.monotonic() - whole_since > WHOLE_S:
            kills += 1
            node = f"worker-{chance.randrange(WORKERS)}"
            job.kill(node)
            job.start(node)

    status = run_job(
        settings,
        directory,
        worker=one_slower(WORKERS, SLOWER if situation == "one slow" else 1),
        watch=kill_one if situation == "come and go" else None,
    )
    result = result_of(settings, status)
    pairs = zip(result.seconds_by_epoch, result.accuracy_by_epoch, strict=True)
    return ModesRow(
        mode=mode,
        situation=situation,
        seconds=result.seconds,
        samples_per_second=status.epoch * DIGITS_SAMPLES / result.seconds,
        accuracy=result.validation_accuracy or 0.0,
        refused_pushes=result.refused_pushes,
        largest_staleness=result.largest_staleness,
        repeated_samples=result.repeated_samples,
        kills=kills,
        curve=tuple((at, accuracy) for at, accuracy in pairs if at is not None and accuracy is not None),
    )


HEADINGS = (
    *("mode", "workers", "samples/s", "of even", "of sync"),
    *("accuracy", "refused", "staleness", "twice", "kills"),
)


def table(rows: Sequence[ModesRow]) -> str:
    """Return a Markdown table, with speeds relative to equal workers in the same mode, and to sync."""
    even = {row.mode: row.samples_per_second for row in rows if row.situation == "even"}
    sync = {row.situation: row.samples_per_second for row in rows if row.mode == "sync"}

    def cells(row: ModesRow) -> Iterable[object]:
        pace = row.samples_per_second
        yield from (f"`{row.mode}`", row.situation, f"{pace:.0f}")
        yield f"{pace / even[row.mode]:.2f}" if row.mode in even else "–"
        yield f"{pace / sync[row.situation]:.2f}" if row.situation in sync else "–"
        yield from (f"{row.accuracy:.3f}", row.refused_pushes, row.largest_staleness)
        yield from (row.repeated_samples, row.kills)

    return output.table(HEADINGS, map(cells, rows))


def local_table(
    task: str, seeds: Sequence[int], epochs: int, directory: Path
) -> tuple[str, list[dict[str, Any]]]:
    """Train a task with each number of local steps and with sync, over several seeds. Return the Markdown
    table, and its rows as JSON objects."""
    rows: list[dict[str, Any]] = []
    for mode in LOCAL:
        runs: list[RunResult] = []
        for seed in seeds:
            settings = RunSettings(
                task=task, workers=WORKERS, compressor="none", epochs=epochs, seed=seed, mode=mode
            )
            runs.append(train(settings, directory / f"{seed}"))
            output.say(f"{mode}, seed {seed}: {runs[-1].validation_accuracy}")
        per_step = [run.steps / (run.local_steps or run.steps) for run in runs]
        accuracies = [run.validation_accuracy or 0.0 for run in runs]
        rows.append({"name": mode, "accuracies": accuracies, "rounds_per_step": fmean(per_step)})

    def cells(row: Mapping[str, Any]) -> Iterable[object]:
        pairs = zip(row["accuracies"], rows[0]["accuracies"], strict=True)
        yield from (f"`{row['name']}`", estimate(row["accuracies"]))
        yield from (estimate([ours - theirs for ours, theirs in pairs]), f"{row['rounds_per_step']:.2f}")

    return output.table(("", "accuracy", "against sync", "rounds per step"), map(cells, rows)), rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "epochs (default: 10; 30 with --local)"
    parser.add_argument("--epochs", type=at_least_one, default=None, metavar="N", help=text)
    option(parser, "--seed", at_least_one, 1, "N", "seed, without --local")
    parser.add_argument("--local", action="store_true", help="compare numbers of local steps instead")
    option(parser, "--task", str, "digits", "SPEC", "task with --local")
    option(parser, "--seeds", seed_list, "1,2,3,4,5", "N,...", "seeds with --local")
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    """Run the benchmark and print its table; return the exit code."""
    with tempfile.TemporaryDirectory() as name:
        if given.local:
            text, plain = local_table(given.task, given.seeds, given.epochs or 30, Path(name))
        else:
            rows: list[ModesRow] = []
            for mode in MODES:
                for situation in SITUATIONS:
                    directory = Path(name) / f"{len(rows)}"
                    rows.append(measure(mode, situation, given.epochs or 10, given.seed, directory))
                    output.say(f"{mode}, {situation}: {rows[-1].seconds:.1f} s")
            text, plain = table(rows), [asdict(row) for row in rows]
    print(text)
    output.write_json(given.json, plain)
    return Exit.DONE
