"""The result of a run: its figures, as JSON, and as a table for people."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ..proto.job import job_terms
from ..proto.messages import Phase, StatusResponse
from ..proto.status import json_values
from ..server.job.modes import registry
from ..settings import RunSettings
from .console import add_row, table


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """One evaluation of a run: its version, and epochs and seconds of training up to it."""

    version: int
    epochs: float
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The figures of one run, as gc-run reports them: the keys of docs/reference/report.md.

    A number that the status lacks is None, such as an evaluation lost with its worker. For a run that was
    stopped all figures are those at the stop.
    """

    task: str
    mode: str
    compressor: str
    downlink: str
    seed: int
    workers: int
    steps: int
    epochs: int
    seconds: float
    validation_accuracy: float | None
    validation_loss: float | None
    wire_bytes_up: int
    wire_bytes_down: int
    raw_bytes_up: int
    raw_bytes_down: int
    payload_bytes_up: int
    payload_bytes_down: int
    compressed_payload_bytes_up: int
    compressed_raw_bytes_up: int
    refused_pushes: int
    lost_workers: tuple[str, ...]
    parameters_sha256: str
    finished: bool
    accuracy_by_epoch: tuple[float | None, ...]
    seconds_by_epoch: tuple[float | None, ...]
    local_steps: int
    largest_staleness: int
    repeated_samples: int
    redundancy: int
    uncoded_exchanges: int
    clipped_elements: int
    step_seconds: float
    predicted_step_seconds: float
    options: Mapping[str, Any]
    evaluations: tuple[EvaluationResult, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()

    def bytes_at(self, version: int) -> float:
        """Return the bytes on the wire up to `version`, in both directions, if all steps took as many."""
        total = self.wire_bytes_up + self.wire_bytes_down
        return total * version / self.steps if self.steps else 0.0

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last evaluation by name; empty if there is none."""
        return self.evaluations[-1].metrics if self.evaluations else {}

    @property
    def metrics_kind(self) -> str:
        """Adjective of the metrics of evaluations, as `kind_of_metrics` returns it."""
        return kind_of_metrics(self.options["script"])

    def metric(self, name: str) -> float | None:
        """Return the metric of the last evaluation with this name; None if there is none."""
        return self.metrics.get(name)


def result_of(settings: RunSettings, status: StatusResponse) -> RunResult:
    """Return the result of a run from its options and the job's last status."""
    metrics = {evaluation.epoch: evaluation.metrics for evaluation in status.evaluations}
    seconds = {evaluation.epoch: evaluation.seconds for evaluation in status.evaluations}
    final: Mapping[str, float] = metrics[max(metrics)] if metrics else {}
    job = job_terms(status.job)
    epochs = range(1, status.epoch + 1) if job.evaluate_every == "1epoch" else range(0)
    values: dict[str, Any] = {
        field.name: getattr(source, field.name)
        for source in (settings, job, status.traffic, status)
        for field in dataclasses.fields(RunResult)
        if hasattr(source, field.name)
    }
    values |= {
        "task": settings.script or settings.task,
        "compressor": settings.compressor,
        "steps": status.version,
        "epochs": status.epoch,
        "seconds": status.training_seconds,
        # A script may log its training loss under any name.
        "validation_accuracy": None if settings.script else final.get("accuracy"),
        "validation_loss": None if settings.script else final.get("loss"),
        "lost_workers": tuple(lost.worker for lost in status.lost),
        "finished": status.phase is Phase.FINISHED,
        "evaluations": tuple(
            EvaluationResult(
                version=each.version,
                epochs=float(each.epoch) if each.epoch in epochs else each.epochs,
                seconds=each.seconds,
                metrics=each.metrics,
            )
            for each in sorted(status.evaluations, key=lambda each: each.version)
        ),
        "losses": tuple((point.version, point.loss) for point in status.losses),
        "accuracy_by_epoch": tuple(metrics.get(epoch, {}).get("accuracy") for epoch in epochs),
        "seconds_by_epoch": tuple(seconds.get(epoch) for epoch in epochs),
        "options": dataclasses.asdict(settings) | {"overlap": job.overlap},
    }
    return RunResult(**values)


def kind_of_metrics(script: object) -> str:
    """Return the adjective of the metrics of evaluations: those of a script may be of the training, too."""
    return "logged" if script else "validation"


def to_json(result: RunResult, baseline: RunResult | None) -> str:
    """Return a JSON object with the fields of the result, and the key `baseline`.

    Its value has the same fields for the baseline, or is null without one.
    """
    content = dataclasses.asdict(result)
    content["baseline"] = None if baseline is None else dataclasses.asdict(baseline)
    return json.dumps(json_values(content), indent=2, allow_nan=False) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` through a temporary file. After an error the previous file is unchanged."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def table_of(result: RunResult, baseline: RunResult | None) -> Table:
    """Make a table of a run's figures for a terminal, with those of a baseline and the differences."""
    workers, epochs = _count(result.workers, "worker"), _count(result.epochs, "epoch")
    end = "" if result.finished else ", stopped before its end"
    runs = [result] if baseline is None else [result, baseline]
    headings = [*map(heading, runs), *(["difference"] if baseline is not None else [])]
    found = table(f"{result.task}: {workers}, {epochs}, seed {result.seed}{end}", ("",), headings)

    def row(
        name: str,
        figure: Callable[[RunResult], Any],
        show: Callable[[Any], str] = str,
        difference: Callable[[Any, Any], str] = lambda ours, theirs: "",
    ) -> None:
        figures = [figure(run) for run in runs]
        cells = [name, *map(show, figures), *([difference(*figures)] if baseline is not None else [])]
        add_row(found, *cells)

    measured = {name for run in runs for name in run.metrics}
    measured = measured or (set() if result.options["script"] else {"accuracy", "loss"})
    for name in ("accuracy", "loss", *sorted(measured - {"accuracy", "loss"})):
        if name in measured:
            row(f"{result.metrics_kind} {name}", partial(RunResult.metric, name=name), _number, _difference)
    row(
        "training time",
        lambda run: run.seconds,
        "{:.1f} s".format,
        lambda ours, theirs: f"{ratio(ours, theirs)} the time",
    )
    unit = "round" if result.local_steps else "step"
    row(f"time per {unit}", lambda run: run.step_seconds, _milliseconds)
    if any(run.predicted_step_seconds for run in runs):
        row("  predicted during the run", lambda run: run.predicted_step_seconds, _milliseconds)
    found.add_section()
    mode = registry.parse(result.mode)
    in_rounds = not mode.staleness_unit and all(run.steps for run in runs)
    each = f"  of a worker in a {unit}"
    row("bytes up", lambda run: run.wire_bytes_up, size, _fewer)
    if in_rounds:
        row(each, lambda run: size(run.wire_bytes_up / run.steps / run.workers))
    against = "  against float32 every round" if result.local_steps else "  against bare float32"
    row(against, lambda run: _fewer(run.wire_bytes_up, run.raw_bytes_up))
    row(
        "  compressed tensors alone",
        lambda run: ratio(run.compressed_raw_bytes_up, run.compressed_payload_bytes_up),
    )
    row("bytes down", lambda run: run.wire_bytes_down, size, _fewer)
    if in_rounds:
        row(each, lambda run: size(run.wire_bytes_down / run.steps / run.workers))
    row(against, lambda run: _fewer(run.wire_bytes_down, run.raw_bytes_down))
    if result.local_steps:
        row(
            "rounds per local step",
            lambda run: f"{run.steps / run.local_steps:.2f} ({run.steps} of {run.local_steps})",
        )
    if mode.staleness_unit:
        row(f"largest staleness, {mode.staleness_unit}", lambda run: run.largest_staleness)
    if not mode.pushes_parts:  # coded mode; its baseline does not exchange
        row("redundancy, at the end", lambda run: run.redundancy if run is result else "–")
        row("exchanges replaced by uncoded ones", lambda run: run.uncoded_exchanges if run is result else "–")
        row("elements of gradients clipped", lambda run: run.clipped_elements if run is result else "–")
    if any(run.refused_pushes for run in runs):
        row("refused pushes", lambda run: run.refused_pushes)
    if any(run.lost_workers for run in runs):
        row("lost workers", lambda run: ", ".join(run.lost_workers))
    return found


def size(count: float) -> str:
    """Return a number of bytes as text in B, kB, MB, GB or TB, such as `2.50 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def ratio(numerator: float, denominator: float) -> str:
    """Return a ratio as text such as `7.62×`; a dash if a number is 0, as before the first push."""
    return f"{numerator / denominator:.2f}×" if numerator and denominator else "–"


def heading(result: RunResult) -> str:
    """Return the column heading of a run: its mode, compressor and downlink, leaving out default values."""
    if not registry.parse(result.mode).pushes_parts:
        return f"{result.mode.partition(':')[0]}, r = {result.redundancy}"
    mode = "" if result.mode == RunSettings().mode else f"{result.mode}: "
    usual = "auto", "none" if result.compressor == "none" else "auto"
    down = "" if result.downlink in usual else f", {result.downlink} down"
    return f"{mode}{result.compressor}{down}"


def _milliseconds(seconds: float) -> str:
    """Return seconds as text in milliseconds; a dash for 0."""
    return f"{1e3 * seconds:.1f} ms" if seconds else "–"


def _fewer(ours: int, theirs: int) -> str:
    """Return text that says how many times fewer or more `ours` is than `theirs`."""
    text = ratio(theirs, ours)
    if text in ("1.00×", "–"):
        return "same" if text == "1.00×" else text
    return f"{text} fewer" if ours < theirs else f"{ratio(ours, theirs)} more"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _difference(ours: float | None, theirs: float | None) -> str:
    return "–" if ours is None or theirs is None else f"{ours - theirs:+.4f}"
