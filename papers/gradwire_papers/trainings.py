"""Accuracies of the papers, by training on data that everybody has, or on the user's files.

Most runs are simulated: one process trains as all workers and the server would. Those of modes are real jobs
on this machine. The papers' own numbers stand beside ours: they are of other data and networks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from gradwire import load_task
from gradwire.benchmarks import RunResult, SimulatedRun, estimate, say, simulate, train_job
from gradwire.compressors import set_threads

from .result import Conditions, Panel, Result

RATE, BATCH = 1e-3, 64  # of target detection, with Adam


def accuracies(
    conditions: Conditions,
    *,
    theirs: Mapping[str, str],
    files: str,
    otherwise: str,
    epochs: int,
    workers: int = 4,
    batch: int = 32,
    decay: float = 1.0,
    downlink: str = "auto",
) -> Result:
    """Train with each compressor; the result has the accuracies, and a curve for each.

    Args:
        conditions: seeds and files.
        theirs: the paper's numbers by spec of the compressor. The first is the baseline.
        files, otherwise: spec of the task with the user's files, and without; see `Conditions.task`.
        batch: samples of each worker in a step.
        decay: factor of the learning rate from one epoch to the next.
        downlink: spec of the compressor of updates.
    """
    task = conditions.task(files, otherwise)
    options = {"epochs": epochs, "count": workers, "batch": batch, "decay": decay, "downlink": downlink}
    runs = {spec: _simulated(conditions, task, spec, **options) for spec in theirs}
    finals = {spec: [run.accuracies[-1] for run in each] for spec, each in runs.items()}
    first = next(iter(finals.values()))
    rows = [
        (
            f"`{spec}`",
            f"{estimate(found)}",
            f"{estimate([ours - none for ours, none in zip(found, first, strict=True)])}",
            theirs[spec],
        )
        for spec, found in finals.items()
    ]
    numbers = list(range(1, epochs + 1))
    curves = {spec: [list(run.accuracies) for run in each] for spec, each in runs.items()}
    lines = {
        spec: (numbers, [fmean(values) for values in zip(*each, strict=True)])
        for spec, each in curves.items()
    }
    return Result(
        settings=_settings(task, epochs, workers, batch, conditions)
        + (f", learning rate × {decay:g} per epoch" if decay != 1 else ""),
        ours=", ".join(f"`{spec}` {estimate(found)}" for spec, found in finals.items()),
        headings=("compressor", "final accuracy", "against the first", "paper"),
        rows=rows,
        panels=[
            Panel(title=task.partition(",")[0], x="epoch", y="validation accuracy", lines=lines, runs=curves)
        ],
    )


def _simulated(conditions: Conditions, task: str, compressor: str, **options: Any) -> list[SimulatedRun]:
    """Simulate a training with each seed, on one thread, and report it on standard error."""
    torch.set_num_threads(1)
    set_threads(1)
    found: list[SimulatedRun] = []
    for seed in conditions.seeds:
        found.append(simulate(load_task(task), compressor, seed=seed, **options))
        say(f"{task}, {compressor}, seed {seed}: {found[-1].metrics[-1]}")
    return found


def _settings(task: str, epochs: int, workers: int, batch: int, conditions: Conditions) -> str:
    return f"`{task}`, {epochs} epochs, {workers} workers with batches of {batch}, {conditions.seed_text}"


def detection(
    conditions: Conditions, *, theirs: Mapping[str, str], files: str, otherwise: str, epochs: int
) -> Result:
    """Repeat tables 3.3 and 4.3 of the thesis: areas of target detection. Arguments as for `accuracies`."""
    task = conditions.task(files, otherwise)
    options = {"optimizer": "adam", "learning_rate": RATE, "batch": BATCH, "downlink": "none"}
    found = {
        spec: [run.metrics[-1] for run in _simulated(conditions, task, spec, epochs=epochs, **options)]
        for spec in theirs
    }
    areas = {spec: [each["auc"] for each in runs] for spec, runs in found.items()}
    alarms = {spec: [each["false_alarm"] for each in runs] for spec, runs in found.items()}
    apart = [ours - none for ours, none in zip(areas["gcac:ratio=10"], areas["none"], strict=True)]
    return Result(
        settings=_settings(task, epochs, 4, BATCH, conditions) + f", Adam at {RATE:g}",
        ours=f"AUC: none {estimate(areas['none'])}, `gcac` 10× {estimate(areas['gcac:ratio=10'])} "
        f"({estimate(apart)} apart), `krngc` 100× {estimate(areas['krngc:ratio=100'])}",
        headings=("compressor", "AUC", "FPR", "paper: AUC / FPR in %, AeroRIT and Xiongan"),
        rows=[
            (f"`{spec}`", f"{estimate(areas[spec])}", f"{estimate(alarms[spec])}", numbers)
            for spec, numbers in theirs.items()
        ],
    )


def one_machine(conditions: Conditions, *, epochs: int) -> Result:
    """Repeat table 2 of the coded paper: accuracies of one machine."""
    rows: list[tuple[str, ...]] = []
    for network, files in (("mlp", "mnist:model=mlp"), ("cnn", "cifar10:model=resnet20")):
        task = conditions.task(files, f"digits:model={network}")
        runs = _simulated(conditions, task, "none", epochs=epochs, count=1)
        final = f"{estimate([run.accuracies[-1] for run in runs])}"
        rows.append((f"`{task}`", final, "not in the copy at hand"))
    return Result(
        settings=f"one worker, {epochs} epochs, {conditions.seed_text}",
        ours=", ".join(f"{task} {accuracy}" for task, accuracy, _ in rows),
        headings=("task", "final accuracy", "paper"),
        rows=rows,
    )


def modes(
    conditions: Conditions,
    *,
    theirs: Mapping[str, str],
    files: str,
    otherwise: str,
    epochs: int,
    workers: int = 4,
    rates: int = 1,
) -> Result:
    """Train with each mode by real daemons; the result has accuracies, and curves over epochs and seconds.

    Args:
        conditions: seeds and files.
        theirs: the paper's numbers by spec of the mode.
        files, otherwise: spec of the task, as for `accuracies`.
        rates: number of learning rates, each a tenth of the one before it, for equally many epochs.
    """
    task = conditions.task(files, otherwise)
    schedule = f"step:every={max(1, epochs // rates)},gamma=0.1" if rates > 1 else "constant"
    found: dict[str, list[RunResult]] = {}
    for mode in theirs:
        found[mode] = []
        for seed in conditions.seeds:
            result = train_job(
                task=task,
                workers=workers,
                compressor="none",
                epochs=epochs,
                seed=seed,
                mode=mode,
                schedule=schedule,
            )
            say(f"{task}, {mode}, seed {seed}: {result.validation_accuracy}")
            found[mode].append(result)
    rows = [
        (
            f"`{mode}`",
            f"{estimate([run.validation_accuracy or 0.0 for run in runs])}",
            f"{estimate([math.nan if (loss := run.validation_loss) is None else loss for run in runs])}",
            f"{estimate([run.seconds for run in runs])}",
            theirs[mode],
        )
        for mode, runs in found.items()
    ]
    return Result(
        settings=f"`{task}`, {epochs} epochs, {workers} workers on the loopback, {conditions.seed_text}",
        ours=", ".join(f"{mode} {accuracy}" for mode, accuracy, *_ in rows),
        headings=("mode", "final accuracy", "final loss", "seconds", "paper"),
        rows=rows,
        panels=[
            curves(found, "Over epochs", "epoch", over_seconds=False),
            curves(found, "Over time", "seconds", over_seconds=True),
        ],
    )


def curves(found: Mapping[str, Sequence[RunResult]], title: str, x: str, *, over_seconds: bool) -> Panel:
    """Return a panel of the accuracies after each epoch that all runs of a mode know, over epochs or over the
    mean of the runs' seconds."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    curves: dict[str, list[list[float]]] = {}
    for mode, runs in found.items():
        at: list[float] = []
        known: list[list[float]] = []  # by epoch, the accuracy of each run
        accuracies = zip(*(run.accuracy_by_epoch for run in runs), strict=False)
        seconds = zip(*(run.seconds_by_epoch for run in runs), strict=False)
        for epoch, (values, times) in enumerate(zip(accuracies, seconds, strict=False), start=1):
            reached, after = [v for v in values if v is not None], [t for t in times if t is not None]
            if len(reached) == len(after) == len(runs):
                at.append(fmean(after) if over_seconds else float(epoch))
                known.append(reached)
        lines[mode] = at, list(map(fmean, known))
        curves[mode] = [list(each) for each in zip(*known, strict=True)]
    return Panel(title=title, x=x, y="validation accuracy", lines=lines, runs=curves)
