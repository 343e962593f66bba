"""Accuracy over epochs of the quantizing compressors, each trained by real processes over several seeds.

    python -m gradwire.benchmarks.accuracy --seeds 1,2,3,4,5 --epochs 30 --markdown FILE --json FILE

Reproduces the order of figure 8 of the 4-bit paper: none ≥ 4bit > 4bit with one group > 2bit, in accuracy
over epochs. The order is judged on the mean over all epochs, the area under the curve, because everything
reaches about the same accuracy in the end; and on differences between runs with the same seed, because their
initial parameters and sample order are the same.

Absolute thresholds can be taken in two ways (`compressors.thresholds.Scale`): as printed, on PyTorch's mean
gradient, and scaled to the summed gradient of the system that they come from. The paper's order is claimed
for the first. For the second it is shown too, and what becomes of it is discussed in docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..deploy.processes import RunError
from ..deploy.report import RunResult, ratio, to_plain, write_atomically
from ..exits import Exit
from ..settings import RunSettings
from . import output
from .arguments import file_to_write, program, whole_numbers
from .cli import exit_code
from .jobs import train


@dataclass(frozen=True)
class Order:
    """Compressors from the best expected accuracy to the worst.

    claimed: the program fails if the order does not hold.
    """

    name: str
    compressors: tuple[str, ...]
    claimed: bool


ORDERS = (
    Order(
        "thresholds as printed, on the mean gradient",
        ("none", "4bit:levels=groups,scale=mean", "4bit:levels=group1,scale=mean", "2bit:scale=mean"),
        claimed=True,
    ),
    Order(
        "thresholds scaled to the summed gradient",
        ("none", "4bit:levels=groups", "4bit:levels=group1", "2bit"),
        claimed=False,
    ),
    Order(
        "levels that follow the gradient, against the paper's groups",
        ("none", "4bit:levels=running", "4bit:levels=groups"),
        claimed=True,
    ),
)
COMPRESSORS = tuple(dict.fromkeys(name for order in ORDERS for name in order.compressors))

SHOWN_EPOCHS = (1, 5, 10, 20, 30)
# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)
MOST_SEEDS = len(_STUDENT) + 1


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds and the half-width of its 95 % interval, None for a single seed."""

    mean: float
    half_width: float | None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.half_width is None else f"{self.mean:.3f} ± {self.half_width:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Of one value, up to `MOST_SEEDS`."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean=mean, half_width=None)
    if len(values) > MOST_SEEDS:
        raise ValueError(f"expected at most {MOST_SEEDS} values, got {len(values)}; extend the quantiles")
    quantile = _STUDENT[len(values) - 2]
    return Estimate(mean=mean, half_width=quantile * statistics.stdev(values) / len(values) ** 0.5)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of an expected order: `better` against `worse`, in the mean over epochs of paired seeds."""

    better: str
    worse: str
    difference: Estimate
    equal_will_do: bool

    @property
    def holds(self) -> bool:
        """Whether the mean difference has the expected sign; where equal will do, up to its interval."""
        if self.equal_will_do:
            return self.difference.mean >= -(self.difference.half_width or 0.0)
        return self.difference.mean > 0

    @property
    def certain(self) -> bool:
        """Whether the interval excludes zero."""
        return abs(self.difference.mean) > (self.difference.half_width or 0.0)

    def __str__(self) -> str:
        sign = "≥" if self.equal_will_do else ">"
        verdict = "holds" if self.holds else "does not hold"
        margin = "" if self.certain else ", within the noise"
        return f"{self.better} {sign} {self.worse}: {verdict}{margin} ({self.difference})"


Runs = Mapping[str, Sequence[RunResult]]  # by compressor; one result per seed, in the same order


def accuracies(run: RunResult) -> list[float]:
    """One per epoch; raise `RunError` if a worker or an evaluation was lost, which would bias the means."""
    if run.lost_workers:
        lost = ", ".join(run.lost_workers)
        raise RunError(Exit.INTERNAL, f"{run.compressor}, seed {run.seed}: lost {lost}; run it again")
    known = [accuracy for accuracy in run.accuracy_by_epoch if accuracy is not None]
    if len(known) != run.epochs:
        raise RunError(Exit.INTERNAL, f"{run.compressor}, seed {run.seed}: an evaluation was lost")
    return known


def area(run: RunResult) -> float:
    """Mean accuracy over all epochs."""
    return statistics.fmean(accuracies(run))


def measured_orders(runs: Runs) -> list[Order]:
    """Those whose compressors were all run."""
    return [order for order in ORDERS if all(compressor in runs for compressor in order.compressors)]


def check_order(order: Order, runs: Runs) -> list[Step]:
    """Each neighbouring pair of an order; equal will do for the first, uncompressed against compressed."""
    return [
        Step(
            better=better,
            worse=worse,
            difference=estimate([area(a) - area(b) for a, b in zip(runs[better], runs[worse], strict=True)]),
            equal_will_do=position == 0,
        )
        for position, (better, worse) in enumerate(pairwise(order.compressors))
    ]


def markdown(runs: Runs) -> str:
    """The table, and below it what became of the expected orders."""
    any_run = next(iter(runs.values()))[0]
    epochs = [epoch for epoch in SHOWN_EPOCHS if epoch <= any_run.epochs]
    seeds = ", ".join(str(run.seed) for run in next(iter(runs.values())))
    rows: list[list[object]] = []
    for compressor, results in runs.items():
        cells = [estimate([accuracies(run)[epoch - 1] for run in results]) for epoch in epochs]
        saving = ratio(sum(run.raw_bytes_up for run in results), sum(run.wire_bytes_up for run in results))
        whole = estimate([area(run) for run in results])
        rows.append([f"`{compressor}`", *cells, whole, f"1/{saving[:-1]}"])
    headings = "compressor", *(f"epoch {epoch}" for epoch in epochs), "mean over epochs", "bytes up"
    lines = [
        f"Validation accuracy on `{any_run.task}`, {any_run.workers} workers, seeds {seeds}: "
        "mean ± half-width of the 95 % interval.",
        "",
        output.table(headings, rows),
    ]
    for order in measured_orders(runs):
        lines += ["", f"{order.name.capitalize()}; difference in the mean over epochs:", ""]
        lines += [f"- {step}" for step in check_order(order, runs)]
    return "\n".join(lines) + "\n"


def measure(
    settings: RunSettings, seeds: Sequence[int], compressors: Sequence[str]
) -> dict[str, list[RunResult]]:
    """Train every compressor with every seed; says on standard error how far it is."""
    runs: dict[str, list[RunResult]] = {compressor: [] for compressor in compressors}
    with tempfile.TemporaryDirectory() as logs:
        for seed in seeds:  # seeds outside: what an interruption leaves is complete seeds
            for compressor in compressors:
                run = dataclasses.replace(settings, compressor=compressor, seed=seed)
                runs[compressor].append(train(run, Path(logs) / f"{seed}-{compressor.replace(':', '-')}"))
                output.say(f"seed {seed}, {compressor}: {accuracies(runs[compressor][-1])[-1]:.4f}")
    return runs


def seed_list(text: str) -> list[int]:
    """Read `1,2,3`: distinct numbers, and no more of them than there are quantiles for."""
    seeds = whole_numbers(text)
    if not 1 <= len(set(seeds)) == len(seeds) <= MOST_SEEDS or min(seeds) < 0:
        raise argparse.ArgumentTypeError(
            f"expected 1 to {MOST_SEEDS} distinct numbers with commas between, from 0 on, got {text!r}"
        )
    return seeds


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exits with 1 when a claimed order does not hold."""
    parser = program(__doc__)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=seed_list, default="1,2,3,4,5", metavar="N,...")
    parser.add_argument("--compressors", nargs="+", default=list(COMPRESSORS), metavar="SPEC")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="every run's report")
    parser.add_argument("--markdown", type=file_to_write, metavar="FILE", help="what is printed")
    return exit_code("accuracy", lambda: run(parser.parse_args(argv)))


def run(given: argparse.Namespace) -> int:
    # The orders are about gradients: what is lost on the way down would be a second cause.
    settings = RunSettings(task=given.task, workers=given.workers, epochs=given.epochs, downlink="none")
    runs = measure(settings, given.seeds, given.compressors)
    text = markdown(runs)
    print(text)
    if given.markdown is not None:
        write_atomically(given.markdown, text)
    output.write_json(given.json, [to_plain(result) for results in runs.values() for result in results])
    claims = [step for order in measured_orders(runs) if order.claimed for step in check_order(order, runs)]
    return Exit.DONE if all(step.holds for step in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
