"""Figure 2 of the paper on accuracy-aware sparse fusion: seconds until an accuracy is reached.

The paper: VGG16 and ResNets on CIFAR-10. By its text, its own method reaches 60 % 1.42 to 2.68 times sooner
than three other methods, and 80 % 2.35 to 14 times sooner. It does not say which method is behind which
number.

`target` trains the MLP on digits. `accuracy-seamgs`, which is not in the paper, trains the CNN and asks which
method is nearest to no compression at the same density (with --seeds 1,2,3,4,5). Real processes train on
shaped links; nothing is emulated. The workers' computation shares this machine's cores, and the accuracy is
measured after every epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire import load_task
from gradwire.benchmarks import RunResult, check_network, estimate, say, train_job

from .emulated import WORKERS, Method
from .result import Conditions, Result
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


def cells(row: TargetRow, method: Method) -> list[str]:
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
        f"{estimate(row.accuracies)}",
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


def measured(
    conditions: Conditions, *, task: str, epochs: int, mbit: float, workers: int = WORKERS
) -> Result:
    """Repeat figure 2 of the paper: train a task with each method and every seed behind shaped links."""
    check_network()
    sizes = [each.numel() for each in load_task(task).model().parameters()]
    rows: list[list[str]] = []
    for method in methods(task, sum(sizes)):
        results: list[RunResult] = []
        for seed in conditions.seeds:
            results.append(
                train_job(
                    mbit,
                    task=task,
                    workers=workers,
                    epochs=epochs,
                    seed=seed,
                    compressor=method.compressor,
                    overlap=method.overlap,
                    fusion=method.fusion,
                    part_bytes=part_bytes(sizes),
                )
            )
            say(f"{method.name}, seed {seed}: {results[-1].seconds:.1f} s")
        row = TargetRow(
            method=method.name,
            seeds=tuple(conditions.seeds),
            accuracies=tuple(result.validation_accuracy or 0.0 for result in results),
            seconds=tuple(
                tuple(seconds_to(target, each.accuracy_by_epoch, each.seconds_by_epoch) for each in results)
                for target in TARGETS
            ),
        )
        rows.append(cells(row, method))
    return Result(
        settings=f"`{task}`, {workers} workers, {mbit:g} Mbit/s, {epochs} epochs, {conditions.seed_text}",
        ours=f"s to {TARGETS[0]:g}: " + ", ".join(f"{row[0]} {row[2]}" for row in rows),
        headings=HEADINGS,
        rows=rows,
    )
