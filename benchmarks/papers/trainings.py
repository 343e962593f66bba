"""Accuracies of the papers, by training on data that everybody has, or on the user's files.

Most runs are simulated: one process trains as all workers and the server would. Those of modes are real jobs
on this machine. The papers' own numbers stand beside ours: they are of other data and networks.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ...deploy.report import RunResult
from ...settings import RunSettings
from .. import jobs, output
from ..estimates import estimate
from ..simulation import SimulatedRun
from ..simulation import train as simulate
from .result import DIGITS, Conditions, Panel, Result

# Top-1 accuracy in % of VGGNet-16, ResNet-56 and ResNet-110, by our spec.
TABLE_3_4: Mapping[str, str] = {
    "none": "93.17, 93.07, 93.24",
    "gcac:ratio=10": "93.28, 92.23, 94.07",
    "gcac:ratio=100": "90.84, 90.89, 91.14",
    "l1:ratio=10": "91.46, 91.30, 92.38",
    "l1:ratio=100": "90.32, 89.51, 91.08",
    "topk:ratio=10": "92.45, 91.41, 91.87",
    "topk:ratio=100": "91.48, 90.77, 91.03",
    "dgc:ratio=10": "93.24, 92.52, 93.20",
    "dgc:ratio=100": "92.04, 91.08, 91.65",
    "randk:ratio=10,feedback=off": "90.69, 88.84, 91.41",
    "randk:ratio=100,feedback=off": "75.06, 75.53, 84.61",
}
TABLE_4_4: Mapping[str, str] = {
    "none": "93.17, 93.07, 93.24",
    "krngc:ratio=10": "93.35, 93.19, 94.22",
    "krngc:ratio=50": "93.32, 92.80, 93.84",
    "krngc:ratio=100": "92.78, 92.10, 93.64",
}
TABLE_4_2: Mapping[str, str] = {
    "krngc:ratio=10,warmup=0": "93.24, 93.32, 93.20",
    "krngc:ratio=10,warmup=1": "figure 4.2",
    "krngc:ratio=10,warmup=5": "93.35, 94.12, 94.38",
    "krngc:ratio=10,warmup=5,ramp=dense": "93.26, 94.07, 94.22",
    "krngc:ratio=10,warmup=10": "figure 4.2",
}
# AUC and FPR in %, of AeroRIT and of Xiongan.
TABLES_3_3_AND_4_3: Mapping[str, str] = {
    "none": "95.99 / 1.16, 94.10 / 7.93",
    "gcac:ratio=10": "95.99 / 1.18, 94.10 / 7.94",
    "gcac:ratio=50": "93.28 / 2.15, 92.09 / 7.67",
    "gcac:ratio=100": "87.28 / 5.04, 89.41 / 11.31",
    "l1:ratio=10": "83.94 / 6.67, 89.63 / 10.67",
    "dgc:ratio=10": "95.23 / 1.58, 93.63 / 7.78",
    "topk:ratio=10": "93.38 / 2.36, 93.38 / 8.36",
    "krngc:ratio=10": "96.03 / 1.29, 94.30 / 7.23",
    "krngc:ratio=50": "95.21 / 1.76, 93.59 / 8.62",
    "krngc:ratio=100": "94.83 / 2.13, 93.82 / 10.18",
}
FIGURE_8: Mapping[str, str] = {
    "none": "–",
    "4bit:levels=groups,scale=mean": "highest",
    "4bit:levels=group1,scale=mean": "second",
    "2bit:scale=mean": "lowest",
}
STRATEGIES: Mapping[str, str] = {"none": "baseline", "4bit:levels=groups": "near it", "2bit": "below early"}
# Training accuracy of VGG19, ResNet-50 and ResNet-20, by our mode.
TABLE_2_OF_004: Mapping[str, str] = {
    "sync": "0.8688, 0.7531, 0.7122",
    "local:steps=8,correction=0": "0.8572, 0.7417, 0.6944",
    "local:steps=16,correction=0": "0.8461, 0.7342, 0.6863",
    "local:steps=adaptive,correction=0": "0.8564, 0.7422, 0.7018",
    "local:steps=adaptive,correction=0.1": "0.8651, 0.7495, 0.7072",
}
TABLE_3_OF_004: Mapping[str, str] = {
    "sync": "0.8688, 0.7531, 0.7122",
    "local:steps=8,correction=0.1": "0.8606, 0.7455, 0.6944",
    "local:steps=16,correction=0.1": "0.8563, 0.7381, 0.6863",
    "local:steps=adaptive,correction=0.1": "0.8651, 0.7495, 0.7072",
}
WORKERS = 4
QUICK_WORKERS, QUICK_NODES = 2, 3  # of real jobs on two cores; coded mode needs three
RATE_DECAY = 0.94  # of the 4-bit paper, per epoch


def accuracies(
    conditions: Conditions,
    theirs: Mapping[str, str],
    *,
    task: str,
    epochs: int,
    workers: int = 4,
    batch: int = 32,
    decay: float = 1.0,
    downlink: str = "auto",
) -> Result:
    """Train with each compressor and return accuracies, with a curve for each.

    Args:
        conditions: seeds.
        theirs: the paper's numbers by spec of the compressor. The first is the baseline.
        task: spec of the task.
        epochs: number of epochs.
        workers: number of simulated workers.
        batch: samples of each worker in a step.
        decay: factor of the learning rate from one epoch to the next.
        downlink: spec of the compressor of updates.
    """
    runs: dict[str, list[SimulatedRun]] = {}
    for compressor in theirs:
        runs[compressor] = [
            _simulated(
                task,
                compressor,
                seed=seed,
                epochs=epochs,
                decay=decay,
                count=workers,
                batch=batch,
                downlink=downlink,
            )
            for seed in conditions.seeds
        ]
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
    numbers = range(1, epochs + 1)
    curves = {spec: [list(run.accuracies) for run in each] for spec, each in runs.items()}
    lines = {spec: (list(numbers), mean_curve(each)) for spec, each in curves.items()}
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


def mean_curve(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of several curves at each point."""
    return [fmean(values) for values in zip(*runs, strict=True)]


def _simulated(task: str, compressor: str, **options: Any) -> SimulatedRun:
    """Simulate a training on one thread, and report it on standard error."""
    import torch

    from ...compressors import set_threads
    from ...worker.tasks import load

    torch.set_num_threads(1)
    set_threads(1)
    found = simulate(load(task), compressor, **options)
    output.say(f"{task}, {compressor}, seed {options['seed']}: {found.metrics[-1]}")
    return found


def _settings(task: str, epochs: int, workers: int, batch: int, conditions: Conditions) -> str:
    seeds = ", ".join(map(str, conditions.seeds))
    return f"`{task}`, {epochs} epochs, {workers} workers with batches of {batch}, seeds {seeds}"


def _cifar10(conditions: Conditions) -> str:
    return conditions.task("cifar10", "model=resnet20", DIGITS)


def thesis(conditions: Conditions) -> Result:
    """Repeat table 3.4 and figures 3.6 and 3.7 of the thesis: accuracy by compressor at 10× and 100×."""
    return accuracies(conditions, TABLE_3_4, task=_cifar10(conditions), epochs=10 if conditions.quick else 30)


def k_reciprocal(conditions: Conditions) -> Result:
    """Repeat table 4.4 and figure 4.5 of the thesis: accuracy with k-RNGC."""
    return accuracies(conditions, TABLE_4_4, task=_cifar10(conditions), epochs=10 if conditions.quick else 30)


def warm_up(conditions: Conditions) -> Result:
    """Repeat table 4.2 and figure 4.2 of the thesis: accuracy by the length of the warm-up."""
    return accuracies(conditions, TABLE_4_2, task=_cifar10(conditions), epochs=12 if conditions.quick else 30)


def detection(conditions: Conditions) -> Result:
    """Repeat tables 3.3 and 4.3 of the thesis: areas of target detection."""
    pixels, hidden, epochs = (3000, 100, 10) if conditions.quick else (20_000, 1000, 30)
    made = f"hyperspectral:synthetic={pixels},hidden={hidden}"
    task = conditions.task("hyperspectral", f"hidden={hidden}", made)
    rate, batch = 1e-3, 64
    found = {
        spec: [
            _simulated(
                task,
                spec,
                seed=seed,
                epochs=epochs,
                optimizer="adam",
                learning_rate=rate,
                batch=batch,
                downlink="none",
            ).metrics[-1]
            for seed in conditions.seeds
        ]
        for spec in TABLES_3_3_AND_4_3
    }
    areas = {spec: [each["auc"] for each in runs] for spec, runs in found.items()}
    alarms = {spec: [each["false_alarm"] for each in runs] for spec, runs in found.items()}
    apart = [ours - none for ours, none in zip(areas["gcac:ratio=10"], areas["none"], strict=True)]
    return Result(
        settings=_settings(task, epochs, 4, batch, conditions) + f", Adam at {rate:g}",
        ours=f"AUC: none {estimate(areas['none'])}, `gcac` 10× {estimate(areas['gcac:ratio=10'])} "
        f"({estimate(apart)} apart), `krngc` 100× {estimate(areas['krngc:ratio=100'])}",
        headings=("compressor", "AUC", "FPR", "paper: AUC / FPR in %, AeroRIT and Xiongan"),
        rows=[
            (f"`{spec}`", f"{estimate(areas[spec])}", f"{estimate(alarms[spec])}", theirs)
            for spec, theirs in TABLES_3_3_AND_4_3.items()
        ],
    )


def groups(conditions: Conditions) -> Result:
    """Repeat figure 8 of the 4-bit paper: one group of thresholds and three."""
    return accuracies(
        conditions,
        FIGURE_8,
        task=_cifar10(conditions),
        epochs=10 if conditions.quick else 30,
        decay=RATE_DECAY,
        downlink="none",
    )


def strategies(conditions: Conditions, *, workers: int) -> Result:
    """Repeat figures 9 and 10 of the 4-bit paper: accuracy over epochs with 4 or 2 nodes."""
    return accuracies(
        conditions,
        STRATEGIES,
        task=_cifar10(conditions),
        epochs=10 if conditions.quick else 30,
        workers=workers,
        decay=RATE_DECAY,
        downlink="none",
    )


def strategies_on_images(conditions: Conditions, *, name: str, model: str) -> Result:
    """Repeat figures 11 and 13 of the 4-bit paper: accuracy over epochs on images.

    Args:
        conditions: the conditions.
        name: name of the task.
        model: network, ResNet-20 if the run is to be quick.
    """
    model = "resnet20" if conditions.quick else model
    made = f"{name}:synthetic=256,model={model},augment=off"
    return accuracies(
        conditions,
        STRATEGIES,
        task=conditions.task(name, f"model={model}", made),
        epochs=3 if conditions.quick else 30,
        batch=16,
        decay=RATE_DECAY,
        downlink="none",
    )


# ---- modes, by real jobs on this machine


def modes(
    conditions: Conditions, theirs: Mapping[str, str], *, task: str, epochs: int, workers: int, **options: Any
) -> Result:
    """Train with each mode by real daemons and return accuracies, with curves over epochs and over seconds.

    Args:
        conditions: seeds.
        theirs: the paper's numbers by spec of the mode.
        task: spec of the task.
        epochs: number of epochs.
        workers: number of workers.
        options: further options of gc-run.
    """
    found: dict[str, list[RunResult]] = {}
    for mode in theirs:
        found[mode] = []
        for seed in conditions.seeds:
            settings = RunSettings(
                task=task,
                workers=workers,
                compressor="none",
                epochs=epochs,
                seed=seed,
                mode=mode,
                **options,
            )
            with tempfile.TemporaryDirectory() as folder:
                found[mode].append(jobs.train(settings, Path(folder)))
            output.say(f"{task}, {mode}, seed {seed}: {found[mode][-1].validation_accuracy}")
    rows = [
        (
            f"`{mode}`",
            f"{estimate([run.validation_accuracy or 0.0 for run in runs])}",
            f"{estimate([_finite(run.validation_loss) for run in runs])}",
            f"{estimate([run.seconds for run in runs])}",
            theirs[mode],
        )
        for mode, runs in found.items()
    ]
    seeds = ", ".join(map(str, conditions.seeds))
    return Result(
        settings=f"`{task}`, {epochs} epochs, {workers} workers on the loopback, seeds {seeds}",
        ours=", ".join(
            f"`{mode}` {cells[1]}" for mode, cells in zip(found, (row for row in rows), strict=True)
        ),
        headings=("mode", "final accuracy", "final loss", "seconds", "paper"),
        rows=rows,
        panels=[
            _curves(found, title, x, over_seconds=over_seconds)
            for title, x, over_seconds in (("Over epochs", "epoch", False), ("Over time", "seconds", True))
        ],
    )


def _finite(value: float | None) -> float:
    return value if value is not None else math.nan


def _curves(found: Mapping[str, Sequence[RunResult]], title: str, x: str, *, over_seconds: bool) -> Panel:
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


def local_steps(conditions: Conditions, theirs: Mapping[str, str]) -> Result:
    """Repeat tables 2 and 3 of the multi-step paper, with its four learning rates.

    Args:
        conditions: the conditions.
        theirs: the paper's numbers by mode.
    """
    epochs = 4 if conditions.quick else 40
    task = conditions.task("cifar100", "model=resnet20", DIGITS)
    return modes(
        conditions,
        theirs,
        task=task,
        epochs=epochs,
        workers=QUICK_WORKERS if conditions.quick else WORKERS,
        schedule=f"step:every={epochs // 4},gamma=0.1",
    )


def coded(conditions: Conditions, network: str) -> Result:
    """Repeat figures 4 to 7 of the coded paper: accuracy over time of CSSGD, SSGD and ASGD.

    Args:
        conditions: the conditions.
        network: `mlp` or `cnn`.
    """
    name = {"mlp": "mnist", "cnn": "cifar10"}[network]
    files = {"mlp": "model=mlp", "cnn": "model=resnet20"}[network]
    goal = {"mlp": "82 % is reached by all", "cnn": "70 % is reached by all"}[network]
    return modes(
        conditions,
        {"coded:redundancy=2": goal, "coded:redundancy=1": goal, "async": goal},
        task=conditions.task(name, files, f"digits:model={network}"),
        epochs=4 if conditions.quick else 30,
        workers=QUICK_NODES if conditions.quick else WORKERS,
    )


def one_machine(conditions: Conditions) -> Result:
    """Repeat table 2 of the coded paper: accuracies of one machine."""
    rows: list[tuple[str, ...]] = []
    for network in ("mlp", "cnn"):
        name = {"mlp": "mnist", "cnn": "cifar10"}[network]
        files = {"mlp": "model=mlp", "cnn": "model=resnet20"}[network]
        task = conditions.task(name, files, f"digits:model={network}")
        epochs = 10 if conditions.quick else 40
        runs = [_simulated(task, "none", seed=seed, epochs=epochs, count=1) for seed in conditions.seeds]
        rows.append(
            (f"`{task}`", f"{estimate([run.accuracies[-1] for run in runs])}", "not in the copy at hand")
        )
    return Result(
        settings=f"one worker, {epochs} epochs, seeds {', '.join(map(str, conditions.seeds))}",
        ours=", ".join(f"{task} {accuracy}" for task, accuracy, _ in rows),
        headings=("task", "final accuracy", "paper"),
        rows=rows,
    )
