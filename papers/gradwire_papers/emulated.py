"""Methods of a paper, timed with real daemons on shaped links and emulated computation.

The exchange of the first method, the paper's baseline, is measured without computation. The emulated
computation is then so long that this exchange takes a given share of computation and exchange, one after the
other. All methods compute for so long. Their times are compared with the baseline's; so are the paper's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Literal

from gradwire.benchmarks import Recorded, Setup, check_network, run_ours, say

from .result import Panel, Result

WORKERS = 4
MBIT = 500.0
# Computation between exchanges that are measured alone: the end of an update reaches one worker after the
# other, and no worker may push before all have it.
PAUSE_S = 0.25
# Two times whose ratio is smaller are considered equal.
ALIKE = 1.02


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of training that a paper names, with the options of gc-run for it.

    Attributes:
        name: the paper's.
        paper: the paper's speed-ups over the first method, one for each of its tables that has this method.
        compressor, downlink, overlap, fusion, mode: values of the options of gc-run.
    """

    name: str
    paper: tuple[float, ...] = ()
    compressor: str = "none"
    downlink: str = "auto"
    overlap: Literal["off", "backward", "both"] = "off"
    fusion: str = "bytes"
    mode: str = "sync"

    @property
    def options(self) -> str:
        """The command-line options of gc-run for this method, as Markdown code."""
        parts = [f"--compressor {self.compressor}"]
        parts += [f"--downlink {self.downlink}"] if self.downlink != "auto" else []
        parts += [f"--overlap {self.overlap}"]
        parts += [f"--fusion {self.fusion}"] if self.fusion != "bytes" else []
        parts += [f"--mode {self.mode}"] if self.mode != "sync" else []
        return f"`{' '.join(parts)}`"


@dataclass(frozen=True, kw_only=True)
class StepTimings:
    """The mean or median step of a run.

    Attributes:
        step_seconds: duration of the step.
        computing_seconds: seconds of computation; the rest of the step is communication that nothing hides.
        bytes_in: bytes that the server receives in a step.
        parts: number of parts in which each worker sends them.
    """

    step_seconds: float
    computing_seconds: float
    bytes_in: float
    parts: int


@dataclass(frozen=True, kw_only=True)
class MethodRow(StepTimings):
    """A row of the table: a method on one model.

    Attributes:
        model: name of the model.
        workers: number of workers.
        share: communication as a fraction of the first method's step, 0 to 1.
        method: name of the method.
        speedup: speed-up over the first method.
        paper: the paper's speed-ups.
        sparse_error: fraction of the square norm of the sparse tensors' gradients that is not sent, by the
            plan; None where it is not computed.
    """

    model: str
    workers: int
    share: float
    method: str
    speedup: float
    paper: tuple[float, ...]
    sparse_error: float | None = None


HEADINGS = (
    *("model", "workers", "share", "", "gc-run"),
    *("s per step", "computing", "communicating", "MB in", "parts", "sparse error", "speed-up", "paper's"),
)


def cells(row: MethodRow, method: Method) -> list[str]:
    """Return the cells of one row of the table; `method` gives its options."""
    return [
        *(row.model, f"{row.workers}", f"{row.share:.2f}", row.method, method.options),
        *(f"{row.step_seconds:.3f}", f"{row.computing_seconds:.3f}"),
        f"{row.step_seconds - row.computing_seconds:.3f}",
        *(f"{row.bytes_in / 1e6:.3f}", f"{row.parts}"),
        "–" if row.sparse_error is None else f"{row.sparse_error:.5f}",
        f"{row.speedup:.2f}",
        ", ".join(f"{each:.2f}" for each in row.paper) or "–",
    ]


def computation(exchange_seconds: float, share: float) -> float:
    """Return the seconds of computation for which an exchange takes the fraction `share` of both together."""
    return exchange_seconds * (1 - share) / share


def exchange_seconds(setup: Setup, method: Method) -> float:
    """Measure the seconds of a step's upload, processing and download, with a pause as computation."""
    quick = replace(setup, seconds=PAUSE_S, fusion=method.fusion)
    found = run_ours(quick, method.compressor, "auto", "off")
    return found.step_seconds - found.computing_seconds


def record(setup: Setup, method: Method) -> Recorded:
    """Train a setup with a method, on real daemons, and return the recorded run."""
    fitted = replace(setup, fusion=method.fusion, mode=method.mode)
    return run_ours(fitted, method.compressor, method.downlink, method.overlap)


def split(recorded: Recorded, first: int, last: int) -> tuple[float, float]:
    """Return the mean seconds of the steps `first` to `last` - 1, and those of their computation."""
    steps = last - first
    whole = fmean((trace[last].began - trace[first].began) / steps for trace in recorded.traces)
    computing = fmean(step.seconds for trace in recorded.traces for step in trace[first:last])
    return whole, computing


def speedups(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return by name how many times shorter each time is than the first one."""
    first = next(iter(seconds.values()))
    return {name: first / each for name, each in seconds.items()}


def timings_of(recorded: Recorded) -> StepTimings:
    """Return the timings of a recorded run's median step."""
    return StepTimings(
        step_seconds=recorded.step_seconds,
        computing_seconds=recorded.computing_seconds,
        bytes_in=recorded.bytes_in,
        parts=recorded.parts,
    )


def measure(
    setup: Setup,
    share: float,
    methods: Sequence[Method],
    take: Callable[[Setup, Method], StepTimings] = lambda setup, method: timings_of(record(setup, method)),
) -> list[MethodRow]:
    """Measure each method with the same model and computation, and return a row for each.

    Args:
        share: communication as a fraction of the first method's step, for the rows.
        methods: the first is the baseline.
        take: trains with a method and returns its timings.
    """
    found: list[MethodRow] = []
    for method in methods:
        step = take(setup, method)
        first = found[0].step_seconds if found else step.step_seconds
        say(f"{setup.model}, share {share:g}, {method.name}: {step.step_seconds:.3f} s per step")
        found.append(
            MethodRow(
                model=setup.model,
                workers=setup.workers,
                share=share,
                method=method.name,
                speedup=first / step.step_seconds,
                paper=method.paper,
                **asdict(step),
            )
        )
    return found


def differences(rows: Sequence[MethodRow]) -> list[str]:
    """Return a sentence for each pair of methods on one model whose order differs from the paper's."""
    found: list[str] = []
    for one, other in itertools.permutations(rows, 2):
        if not one.paper or not other.paper:
            continue
        if one.paper[0] > ALIKE * other.paper[0] and one.step_seconds > ALIKE * other.step_seconds:
            theirs = one.paper[0] / other.paper[0]
            ours = one.step_seconds / other.step_seconds
            found.append(
                f"{one.model}, share {one.share:g}: {one.method} is {theirs:.2f} times faster than "
                f"{other.method} in the paper, and takes {ours:.2f} times as long here"
            )
    return found


def of_methods(
    models: Sequence[str],
    measured: Callable[[Setup], Iterable[tuple[list[MethodRow], list[Method]]]],
    *,
    steps: int,
    workers: int,
    mbit: float,
    remark: Callable[[list[MethodRow]], str] | None = None,
) -> Result:
    """Measure the methods of a paper on each model.

    Args:
        models: layer tables of `gradwire.planning.tensors`.
        measured: function from a setup to rows and methods, for each share. A share is communication as a
            fraction of the uncompressed step, 0 to 1.
        steps: number of measured steps.
        mbit: Mbit/s of each link in each direction.
        remark: function from all rows to a remark, printed on standard error.
    """
    check_network()
    rows: list[list[str]] = []
    all_rows: list[MethodRow] = []
    told: list[str] = []
    panels: list[Panel] = []
    for model in models:
        for found, methods in measured(Setup(model=model, workers=workers, mbit=mbit, steps=steps)):
            all_rows += found
            rows += [cells(*each) for each in zip(found, methods, strict=True)]
            title = f"{model}, {found[0].workers} workers"
            told.append(f"{title}: " + ", ".join(f"{row.method} {row.speedup:.2f}" for row in found))
            numbers = list(range(1, len(found) + 1))
            lines = {"ours": (numbers, [row.speedup for row in found])}
            known = [(number, row.paper[0]) for number, row in zip(numbers, found, strict=True) if row.paper]
            if known:
                lines["paper"] = [x for x, _ in known], [y for _, y in known]
            panels.append(Panel(title=title, x="row of the table", y="speed-up", lines=lines))
            for line in differences(found):
                say(line)
    if remark is not None:
        say(remark(all_rows))
    return Result(
        settings=f"{workers} workers unless said, {mbit:g} Mbit/s, {steps} steps, emulated computation",
        ours="speed-ups of " + "; ".join(told),
        headings=HEADINGS,
        rows=rows,
        panels=panels,
    )
