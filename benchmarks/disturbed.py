"""`gc-bench disturbed`: loss of a preset's job when workers or the server are killed, beside a calm job.

Real daemons train `characters` on this machine. A disturbance comes when half of the rounds are done:

- worker restarted: SIGKILL to one worker in the middle of a round, and a new one in its place at once.
- worker lost: SIGKILL to one worker, without a substitute; the others train on.
- worker joins: one worker starts only now, with an optimizer that has taken no step.
- server restarted: SIGKILL to the server, and a new one on its --state.
- one slow: from the beginning, the last worker sleeps three times as long in every step.

All jobs have as many rounds. With a worker less, these have fewer samples. All workers compute, and sleep
besides for 2 ms per sample.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from ..common.exits import Exit
from ..common.presets import PRESETS
from ..proto.messages import Phase, StatusResponse
from . import output
from .arguments import BenchError, at_least_one, json_option, option, some_of
from .curve import COMPOSITIONS, settings_of
from .estimates import estimate, seed_list
from .jobs import RunningJob, final_loss, one_slower, run_job

SITUATIONS = ("calm", "worker restarted", "worker lost", "worker joins", "server restarted", "one slow")
LEASE_S = 3.0  # time after which the server counts a silent worker as lost
TASK = "gradwire.benchmarks.paced:characters:seconds=0.002"  # of sleep per sample
SLOWER = 3.0  # factor of the slow worker's sleep
KILLED = 1  # rank of the worker that is killed


@dataclass(frozen=True, kw_only=True)
class DisturbedRow:
    """The end of one job.

    Attributes:
        situation: one of `SITUATIONS`.
        seed: seed of the job.
        loss: final validation loss.
        sha256: SHA-256 of the final parameters.
        repeated_samples: number of samples that a lost worker and its substitute both trained on.
        seconds: seconds of all rounds.
    """

    situation: str
    seed: int
    loss: float
    sha256: str
    repeated_samples: int
    seconds: float


def measure(situation: str, given: argparse.Namespace, seed: int) -> DisturbedRow:
    """Train one job to its end, with its disturbance, and return its row.

    Args:
        situation: one of `SITUATIONS`.
        given: parsed options of the command.
        seed: seed of the job.
    """
    settings = settings_of(
        COMPOSITIONS[f"preset {given.preset}"],
        task=TASK,
        workers=given.workers,
        batch_size=given.batch_size,
        steps=given.steps,
        seed=seed,
    )
    last, killed = given.workers - 1, f"worker-{KILLED}"
    # Whether the disturbance came, and then a worker was missing, and after that none was.
    happened = missing = whole = False

    def watch(status: StatusResponse, job: RunningJob) -> None:
        nonlocal happened, missing, whole
        if happened and status.phase is Phase.RUNNING:
            pushing = [each for each in status.members if each.attached and each.pushes]
            missing |= len(pushing) < given.workers
            whole = missing and len(pushing) == given.workers
        if happened or status.phase is not Phase.RUNNING or 2 * status.version < settings.max_steps:
            return
        happened = True
        if situation in ("worker restarted", "worker lost"):
            job.kill(killed)
        if situation == "worker restarted":
            job.start(killed)
        if situation == "worker joins":
            job.start(f"worker-{last}")
        if situation == "server restarted":
            job.kill("server")
            job.start("server")

    late = situation == "worker joins"
    slow = SLOWER if situation == "one slow" else 1.0
    with tempfile.TemporaryDirectory() as directory:
        options = [f"--lease-seconds={LEASE_S}", f"--min-workers={last if late else given.workers}"]
        if situation == "server restarted":
            options.append(f"--state={directory}/state")
        status = run_job(
            settings,
            Path(directory) / "job",
            server_options=options,
            worker=one_slower(given.workers, slow),
            absent=(last,) if late else (),
            watch=watch,
        )
    took_effect = {"worker restarted": whole, "worker joins": whole, "worker lost": missing}
    if not took_effect.get(situation, happened):
        raise BenchError(f"{situation}: the job ended before that took effect; give more --steps")
    return DisturbedRow(
        situation=situation,
        seed=seed,
        loss=final_loss(situation, status),
        sha256=status.parameters_sha256,
        repeated_samples=status.repeated_samples,
        seconds=status.training_seconds,
    )


def table(rows: Sequence[DisturbedRow]) -> str:
    """Return a Markdown table with each situation's loss relative to that of the calm job."""
    calm = {row.seed: row for row in rows if row.situation == "calm"}

    def cells(situation: str, found: Sequence[DisturbedRow]) -> list[object]:
        paired = [row.loss / calm[row.seed].loss - 1 for row in found if row.seed in calm]
        same = sum(row.seed in calm and row.sha256 == calm[row.seed].sha256 for row in found)
        of = f"{same} of {len(found)}" if paired else "–"
        return [
            situation,
            len(found),
            f"{estimate([row.loss for row in found])}",
            f"{100 * fmean(paired):+.1f} %" if paired else "–",
            of,
            sum(row.repeated_samples for row in found),
            f"{fmean(row.seconds for row in found):.0f}",
        ]

    headings = ("", "seeds", "loss", "against calm", "bit-identical to calm", "samples counted twice", "s")
    by_situation = [(name, [row for row in rows if row.situation == name]) for name in SITUATIONS]
    return output.table(headings, [cells(name, found) for name, found in by_situation if found])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = tuple(name for name in PRESETS if name.endswith("communication"))
    text = f"preset of the jobs: {', '.join(names)} (default: {names[0]})"
    parser.add_argument("--preset", choices=names, default=names[0], metavar="NAME", help=text)
    option(parser, "--workers", at_least_one, 4, "N", "number of workers")
    option(parser, "--batch-size", at_least_one, 16, "N", "samples of each worker in a step")
    option(parser, "--steps", at_least_one, 500, "N", "steps of each worker")
    option(parser, "--seeds", seed_list, "1", "N,...", "seeds of the runs")
    option(parser, "--only", some_of(SITUATIONS), ",".join(SITUATIONS), "NAME,...", "disturbances")
    json_option(parser)


def run(given: argparse.Namespace) -> int:
    """Train all jobs and print the table; return the exit code."""
    if given.workers < 2:
        raise BenchError(f"--workers: expected at least 2, got {given.workers}")
    rows: list[DisturbedRow] = []
    for seed in given.seeds:
        for situation in given.only:
            rows.append(measure(situation, given, seed))
            output.say(f"{situation}, seed {seed}: loss {rows[-1].loss:.4f}, {rows[-1].seconds:.0f} s")
    print(table(rows))
    output.write_json(given.json, [asdict(row) for row in rows])
    return Exit.DONE
