"""Figure 2 of the paper on accuracy-aware sparse fusion: seconds until an accuracy is reached.

The paper: VGG16 and ResNets on CIFAR-10. By its text, its own method reaches 60 % 1.42 to 2.68 times sooner
than three other methods, and 80 % 2.35 to 14 times sooner. It does not say which method is behind which
number.

Here `digits` is trained, by real processes on shaped links; nothing is emulated. The workers' computation
shares this machine's cores, and the accuracy is measured after every epoch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...deploy.report import RunResult, result_of
from ...settings import RunSettings
from ...worker.tasks import load
from .. import output
from ..estimates import estimate
from ..jobs import nodes_of, run_job
from ..star import Star
from .emulated import Method
from .seamgs import methods, part_bytes

TARGETS = (0.6, 0.8)


@dataclass(frozen=True, kw_only=True)
class TargetRow:
    """A row of the table: one method, over all seeds.

    Attributes:
        method: name of the method.
        seeds: seeds of the runs.
        accuracies: final accuracy, one per seed.
        seconds: for each target, seconds until the first epoch that ended with this accuracy, one per seed;
            None if no epoch did.
    """

    method: str
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    seconds: tuple[tuple[float | None, ...], ...]


HEADINGS = ("", "gc-run", *(f"s to {target:.2f}" for target in TARGETS), "accuracy in the end")


def cells(row: TargetRow, method: Method) -> list[object]:
    """Return the cells of a row of the table, in the order of `HEADINGS`."""
    reached = [[each for each in seconds if each is not None] for seconds in row.seconds]
    return [
        *(row.method, method.options),
        *(
            f"{estimate(each)}"
            if len(each) == len(row.seeds)
            else f"{len(each)} of {len(row.seeds)} seeds do"
            for each in reached
        ),
        estimate(row.accuracies),
    ]


def seconds_to(
    target: float, accuracy_by_epoch: Sequence[float | None], seconds_by_epoch: Sequence[float | None]
) -> float | None:
    """Return the seconds from the first round to the end of the first epoch with this accuracy.

    Args:
        target: accuracy to reach.
        accuracy_by_epoch, seconds_by_epoch: accuracy and time at the end of each epoch, None where unknown.

    Returns:
        The seconds; None if no epoch has this accuracy.
    """
    pairs = zip(accuracy_by_epoch, seconds_by_epoch, strict=True)
    return next((at for accuracy, at in pairs if accuracy is not None and accuracy >= target), None)


def train(
    method: Method, *, task: str, workers: int, epochs: int, seed: int, mbit: float, size: int
) -> RunResult:
    """Run one job of real daemons behind shaped links and return its result.

    Args:
        method: compressor, overlap and fusion of the job.
        task: spec of the task.
        workers: number of workers.
        epochs: number of epochs.
        seed: seed of the job.
        mbit: Mbit/s of each link in each direction.
        size: bytes of a part as float32.
    """
    settings = RunSettings(
        task=task,
        workers=workers,
        epochs=epochs,
        seed=seed,
        compressor=method.compressor,
        overlap=method.overlap,
        fusion=method.fusion,
        part_bytes=size,
    )
    with Star(nodes_of(workers), mbit) as star, tempfile.TemporaryDirectory() as folder:
        return result_of(settings, run_job(settings, Path(folder), star=star))


def measured(
    *, task: str, seeds: Sequence[int], workers: int, epochs: int, mbit: float
) -> Iterator[tuple[TargetRow, Method]]:
    """Train a task with each method and every seed, and yield each method with its row."""
    sizes = [each.numel() for each in load(task).model().parameters()]
    for method in methods(task, sum(sizes)):
        results: list[RunResult] = []
        for seed in seeds:
            results.append(
                train(
                    method,
                    task=task,
                    workers=workers,
                    epochs=epochs,
                    seed=seed,
                    mbit=mbit,
                    size=part_bytes(sizes),
                )
            )
            output.say(f"{method.name}, seed {seed}: {results[-1].seconds:.1f} s")
        row = TargetRow(
            method=method.name,
            seeds=tuple(seeds),
            accuracies=tuple(result.validation_accuracy or 0.0 for result in results),
            seconds=tuple(
                tuple(seconds_to(target, each.accuracy_by_epoch, each.seconds_by_epoch) for each in results)
                for target in TARGETS
            ),
        )
        yield row, method
