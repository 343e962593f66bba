"""Figure 2 of the paper on accuracy-aware sparse fusion: seconds until an accuracy is reached.

The paper: VGG16 and ResNets on CIFAR-10; in its text its own method comes to 60 % 1.42 to 2.68 times, and
to 80 % 2.35 to 14 times sooner than three others. It does not say which of them is behind which number.

Here `digits` is trained, by real processes on shaped links; nothing is emulated. The workers' computation
shares this machine's cores, and the accuracy is looked at after every epoch.
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
    """A way to train, by seed.

    Attributes:
        accuracies: final accuracies.
        seconds: for each target, until the first epoch that ended with this accuracy; None if none did.
    """

    method: str
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    seconds: tuple[tuple[float | None, ...], ...]


HEADINGS = ("", "gc-run", *(f"s to {target:.2f}" for target in TARGETS), "accuracy in the end")


def cells(row: TargetRow, method: Method) -> list[object]:
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
    """Return the seconds from the first round to the end of the first epoch with this accuracy, or None."""
    pairs = zip(accuracy_by_epoch, seconds_by_epoch, strict=True)
    return next((at for accuracy, at in pairs if accuracy is not None and accuracy >= target), None)


def train(method: Method, *, workers: int, epochs: int, seed: int, mbit: float, size: int) -> RunResult:
    """Run one job of real daemons behind shaped links. size: bytes of a part."""
    settings = RunSettings(
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
    *, seeds: Sequence[int], workers: int, epochs: int, mbit: float
) -> Iterator[tuple[TargetRow, Method]]:
    """Yield a row for each way to train."""
    sizes = [each.numel() for each in load("digits").model().parameters()]
    for method in methods("digits", sum(sizes)):
        results: list[RunResult] = []
        for seed in seeds:
            results.append(
                train(method, workers=workers, epochs=epochs, seed=seed, mbit=mbit, size=part_bytes(sizes))
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
