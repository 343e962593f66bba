"""`gc-bench accuracy`: accuracy or loss that compressors cost, over several seeds.

Three suites, each with its tasks, its rows and its claims; the exit code is 1 if a claim does not hold:

    compressors: every compressor at 10 x and at 100 x on digits, with the MLP and the CNN
    levels: the order of the 4-bit paper's figure 8, by the mean accuracy over all epochs
    adam: the loss of a small GPT, whose optimizer at the server is AdamW

Runs with the same seed share initial parameters and sample order, so differences are computed between them.
In `adam` real daemons train, as gc-run starts them. In the other suites one process trains as all workers and
the server would, and the bytes are those of payloads.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..common.exits import Exit
from ..compressors import create, parse_downlink
from ..deploy.processes import RunError
from ..settings import RunSettings
from . import jobs, output
from .arguments import at_least_one, check_module, file_to_write, option
from .estimates import estimate, seed_list
from .suites import SUITES, Claim, Score, Suite, TrainingSetup

WORKERS = 4
# Options of the jobs that daemons train.
BATCH = 16
SCHEDULE = "cosine:warmup=0.4"
SHOWN_EPOCHS = (1, 5, 10, 20, 30)  # columns of the table, where accuracies after each epoch are known


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training to its end, which `simulate` or `train` performs.

    Attributes:
        downlink: spec of the compressor of updates.
        score: quantity that the suite compares.
    """

    task: str
    setup: TrainingSetup
    seed: int
    epochs: int
    downlink: str
    score: Score


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The result of one training.

    Attributes:
        score: on the validation data, as the suite's `Score` says; None if training diverged.
        by_epoch: accuracy after each epoch; empty for losses.
        bytes_up, bytes_down: bytes of pushes and of updates, over all workers and steps.
    """

    score: float | None
    by_epoch: Sequence[float]
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """A row of the table: one setup on one task, with a result for each seed."""

    setup: TrainingSetup
    runs: Sequence[TrainingRun]


def simulate(job: TrainingJob) -> TrainingRun:
    """Train a job in this process, on one thread, without server and network."""
    import torch

    from ..compressors import set_threads
    from ..worker.tasks import load
    from .simulation import train

    torch.set_num_threads(1)
    set_threads(1)
    found = train(
        load(job.task),
        job.setup.compressor,
        seed=job.seed,
        epochs=job.epochs,
        optimizer=job.setup.optimizer,
        downlink=job.downlink,
    )
    return TrainingRun(
        score=fmean(found.accuracies) if job.score == "mean accuracy" else found.accuracies[-1],
        by_epoch=found.accuracies,
        bytes_up=found.wire_bytes,
        bytes_down=found.down_bytes,
    )


def train(job: TrainingJob) -> TrainingRun:
    """Train a job with real daemons. A job that diverges is a result without a score.

    Raises:
        RunError: if the job fails otherwise than by diverging, or has lost a worker.
    """
    settings = RunSettings(
        task=job.task,
        workers=WORKERS,
        epochs=job.epochs,
        batch_size=BATCH,
        seed=job.seed,
        schedule=SCHEDULE,
        downlink=job.downlink,
        **dataclasses.asdict(job.setup),
    )
    try:
        with tempfile.TemporaryDirectory() as directory:
            found = jobs.train(settings, Path(directory))
    except RunError as error:
        if error.code != Exit.DIVERGED:
            raise
        return TrainingRun(score=None, by_epoch=(), bytes_up=0, bytes_down=0)
    if found.lost_workers:  # its rounds had fewer workers than the claim assumes
        lost = ", ".join(found.lost_workers)
        raise RunError(Exit.INTERNAL, f"{job.setup.compressor}, seed {job.seed}: lost {lost}; run it again")
    return TrainingRun(
        score=found.validation_loss,
        by_epoch=(),
        bytes_up=found.wire_bytes_up,
        bytes_down=found.wire_bytes_down,
    )


def trained(jobs: Sequence[TrainingJob], pool: ProcessPoolExecutor | None) -> list[TrainingRun]:
    """Return the results of jobs: of the processes of `pool`, or of daemons, one job after the other."""
    return list(map(train, jobs) if pool is None else pool.map(simulate, jobs))


def gains(runs: Sequence[TrainingRun], others: Sequence[TrainingRun], score: Score) -> list[float]:
    """Return by seed how much better a run is than the run of another setup; minus infinity if one diverged.

    The gain is the difference of accuracies, or the fraction by which the loss is lower.
    """
    found: list[float] = []
    for run, other in zip(runs, others, strict=True):
        if run.score is None or other.score is None:
            found.append(float("-inf"))
        else:
            found.append(1 - run.score / other.score if score == "loss" else run.score - other.score)
    return found


def broken_claims(claims: Iterable[Claim], rows: Sequence[AccuracyRow], suite: Suite) -> list[str]:
    """Return a sentence for each claim that does not hold. Claims about setups without a row are ignored."""
    by_setup = {row.setup: row.runs for row in rows}
    found: list[str] = []
    for claim in claims:
        runs, others = (
            by_setup.get(dataclasses.replace(suite.baseline, compressor=spec))
            for spec in (claim.compressor, claim.against)
        )
        if runs is not None and others is not None:
            gain = fmean(gains(runs, others, suite.score))
            if gain < claim.least:
                claimed = f"claimed at least {claim.least:+g}"
                found.append(f"{claim.compressor} against {claim.against}: {gain:+.4f}, {claimed}")
    return found


def name_of(setup: TrainingSetup, suite: Suite) -> str:
    """Return Markdown that names a setup: its compressor, and options that differ from the baseline's."""
    texts = [f"`{setup.compressor}`"]
    for name in ("mode", "optimizer", "learning_rate", "clip_norm"):
        value = getattr(setup, name)
        if value != getattr(suite.baseline, name):
            texts.append(f"`--{name.replace('_', '-')} {value}`")
    return " ".join(texts)


def markdown(task: str, rows: Sequence[AccuracyRow], suite: Suite, given: argparse.Namespace) -> str:
    """Return the Markdown table of one task. Its first row is the baseline, to which bytes and scores are
    compared."""
    baseline = rows[0].runs
    epochs = [each for each in SHOWN_EPOCHS if suite.score == "mean accuracy" and each <= given.epochs]

    def bytes_of(runs: Sequence[TrainingRun], way: str) -> str:
        whole = sum(getattr(run, way) for run in baseline)
        return f"1/{whole / sum(getattr(run, way) for run in runs):.1f}"

    def cells(row: AccuracyRow) -> Iterable[object]:
        yield name_of(row.setup, suite)
        scores = [run.score for run in row.runs if run.score is not None]
        if len(scores) < len(row.runs):
            yield from ("diverged", *"–" * (len(headings) - 2))
            return
        yield from (estimate([run.by_epoch[epoch - 1] for run in row.runs]) for epoch in epochs)
        yield estimate(scores)
        found = gains(row.runs, baseline, suite.score)
        yield f"{-100 * fmean(found):+.1f} %" if suite.score == "loss" else _signed(found)
        yield from (bytes_of(row.runs, way) for way in ("bytes_up", "bytes_down"))

    by_epoch = (f"epoch {epoch}" for epoch in epochs)
    headings = "compressor", *by_epoch, suite.score, "against `none`", "bytes up", "bytes down"
    text = f"`{task}`, `--downlink {given.downlink}`, {given.epochs} epochs, seeds "
    text += f"{', '.join(map(str, given.seeds))}; mean ± half-width of the 95 % interval.\n\n"
    return f"{text}{output.table(headings, map(cells, rows))}\n"


def _signed(values: Sequence[float]) -> str:
    found = estimate(values)
    return f"{'+' if found.mean >= 0 else ''}{found}"


def to_json_dict(task: str, row: AccuracyRow, given: argparse.Namespace) -> Mapping[str, Any]:
    """Return a row as a JSON object."""
    return {
        "task": task,
        "downlink": given.downlink,
        **dataclasses.asdict(row.setup),
        "seeds": given.seeds,
        "runs": [dataclasses.asdict(run) for run in row.runs],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"suite: {', '.join(SUITES)}"
    parser.add_argument("suite", choices=[*SUITES], metavar="SUITE", help=text)
    text = "seeds (default: 1,2,3,4,5; 1,2,3 for adam)"
    parser.add_argument("--seeds", type=seed_list, metavar="N,...", help=text)
    text = "epochs of each run; with fewer no claim is checked (default: 30; 4 for adam)"
    parser.add_argument("--epochs", type=at_least_one, metavar="N", help=text)
    parser.add_argument(
        "--tasks", nargs="+", metavar="TASK", help="tasks to train (default: those of the suite)"
    )
    text = "compressors, with the optimizer of the first row (default: all rows)"
    parser.add_argument("--compressors", nargs="+", metavar="SPEC", help=text)
    text = "compressor of the updates (default: auto; none for levels)"
    parser.add_argument("--downlink", metavar="SPEC", help=text)
    option(parser, "--jobs", at_least_one, 2, "N", "number of concurrent runs, in suites without daemons")
    text = "file for all runs as JSON, written again after each row"
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help=text)


def run(given: argparse.Namespace) -> int:
    """Run a suite, print its tables and the claims that do not hold; return 1 if there are any, else 0."""
    suite = SUITES[given.suite]
    if not suite.daemons:
        check_module("sklearn")
    given.seeds = given.seeds or seed_list(suite.seeds)
    given.tasks = given.tasks or suite.tasks
    given.downlink = given.downlink or suite.downlink
    given.epochs = given.epochs or suite.epochs
    claims = suite.claims if given.epochs >= suite.epochs else ()
    parse_downlink(given.downlink)
    for spec in given.compressors or ():
        create(spec)
    setups = suite.setups
    if given.compressors:
        chosen = [dataclasses.replace(suite.baseline, compressor=spec) for spec in given.compressors]
        setups = tuple(dict.fromkeys((suite.baseline, *chosen)))
    texts: list[str] = []
    reports: list[Mapping[str, Any]] = []
    failed: list[str] = []
    with contextlib.ExitStack() as stack:
        pool = None
        if not suite.daemons:
            # Spawned, because torch's threads do not survive a fork.
            pool = ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn"))
            stack.callback(pool.shutdown, cancel_futures=True)
        for task in given.tasks:
            rows: list[AccuracyRow] = []
            for setup in setups:
                wanted = [
                    TrainingJob(
                        task=task,
                        setup=setup,
                        seed=seed,
                        epochs=given.epochs,
                        downlink=given.downlink,
                        score=suite.score,
                    )
                    for seed in given.seeds
                ]
                runs = trained(wanted, pool)
                shown = ", ".join("diverged" if run.score is None else f"{run.score:.4f}" for run in runs)
                output.say(f"{task}, {name_of(setup, suite)}: {shown}")
                rows.append(AccuracyRow(setup=setup, runs=runs))
                reports.append(to_json_dict(task, rows[-1], given))
                output.write_json(given.json, reports)
            texts.append(markdown(task, rows, suite, given))
            failed += [f"{task}: {sentence}" for sentence in broken_claims(claims, rows, suite)]
    print("\n".join(texts))
    for sentence in failed:
        print(f"does not hold: {sentence}")
    return 1 if failed else Exit.DONE
