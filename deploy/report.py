"""What a run came to: as data for machines, and as a table for people."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..common.naming import printable
from ..proto.job import job_terms
from ..proto.messages import Phase, StatusResponse
from ..server.job.modes import registry
from ..settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """One evaluation of a run: at which version, after how many epochs and seconds, and what it measured."""

    version: int
    epochs: float
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run. Times are in seconds; bytes are counted at the server, over all workers.

    steps: versions that the server has published.
    seconds: from the first round's opening to the last version.
    evaluations: each with its `epochs` and `version`, `seconds` since training began, and `metrics` by name.
    losses: mean training losses, each with the last version that it is of.
    accuracy_by_epoch: one per epoch, None where the evaluation was lost with the worker that made it; none if
        it did not go by epochs.
    seconds_by_epoch: when each was complete, None where that is None.
    local_steps: that each worker took, in local mode: `steps`, the rounds, divided by them say how often the
        workers exchanged what they had learnt.
    largest_staleness: of a push that was applied: in clocks in stale mode, in versions in async mode.
    step_seconds: from one version to the next, median of the last ones.
    predicted_step_seconds: what a step should have taken, by what the job itself has shown; 0 if that is not
        known.
    options: all of gc-run's, as they were in force.
    repeated_samples: trained on twice, because a worker came back with what another had been given.
    redundancy, uncoded_exchanges, clipped_elements: of coded mode: in the last round; that replaced a coded
        one; of gradients, by all workers.
    wire_bytes_*: with gRPC and HTTP/2 framing, everything that the server received and sent.
    raw_bytes_*: what the same tensors take as bare float32.
    payload_bytes_up: payloads of accepted pushes alone, without any header.
    compressed_payload_bytes_up, compressed_raw_bytes_up: of those, the tensors that came quantized, and what
        they take as float32.
    parameters_sha256: over the final parameters in manifest order; empty if it was stopped before its end.
    finished: whether it came to its end; otherwise the figures are those of the moment it was stopped.
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
        """Wire bytes in both directions until then; every step of a run takes about as many."""
        total = self.wire_bytes_up + self.wire_bytes_down
        return total * version / self.steps if self.steps else 0.0

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last evaluation."""
        return self.evaluations[-1].metrics if self.evaluations else {}


def result_of(settings: RunSettings, status: StatusResponse) -> RunResult:
    """The result, from the last status of a job."""
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
        "steps": status.version,
        "epochs": status.epoch,
        "seconds": status.training_seconds,
        "validation_accuracy": final.get("accuracy"),
        "validation_loss": final.get("loss"),
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


def to_json(result: RunResult, baseline: RunResult | None) -> str:
    """One object: the result's fields, and `baseline` with the same fields or null."""
    content = to_plain(result)
    content["baseline"] = None if baseline is None else to_plain(baseline)
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def to_plain(result: RunResult) -> dict[str, Any]:
    """The fields as JSON can hold them: a figure that is not finite, as of a run that diverged, is None."""
    fields = dataclasses.asdict(result)
    fields["accuracy_by_epoch"] = [_finite(accuracy) for accuracy in result.accuracy_by_epoch]
    fields["evaluations"] = [
        each | {"metrics": {name: _finite(value) for name, value in each["metrics"].items()}}
        for each in fields["evaluations"]
    ]
    return {name: _finite(value) for name, value in fields.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, text: str) -> None:
    """Write the whole file or leave what was there."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def table_of(result: RunResult, baseline: RunResult | None) -> Table:
    """The run, next to the baseline if there is one, with what the difference amounts to."""
    workers, epochs = _count(result.workers, "worker"), _count(result.epochs, "epoch")
    # Text everywhere: a task such as my:fire:x=1, or a metric called [/x], is no markup.
    end = "" if result.finished else ", stopped before its end"
    table = Table(title=_text(f"{result.task}: {workers}, {epochs}, seed {result.seed}{end}"))
    table.add_column("")
    runs = [result] if baseline is None else [result, baseline]
    for run in runs:
        table.add_column(_text(heading(run)), justify="right")
    if baseline is not None:
        table.add_column("difference", justify="right")

    def row(
        name: str,
        figure: Callable[[RunResult], Any],
        show: Callable[[Any], str] = str,
        difference: Callable[[Any, Any], str] = lambda ours, theirs: "",
    ) -> None:
        figures = [figure(run) for run in runs]
        cells = [name, *map(show, figures), *([difference(*figures)] if baseline is not None else [])]
        table.add_row(*map(_text, cells))

    measured = {name for run in runs for name in run.metrics} or {"accuracy", "loss"}
    for name in ("accuracy", "loss", *sorted(measured - {"accuracy", "loss"})):
        if name not in measured:
            continue
        row(f"validation {name}", partial(_metric, name=name), _number, _difference)
    row(
        "training time",
        lambda run: run.seconds,
        "{:.1f} s".format,
        lambda ours, theirs: f"{ratio(ours, theirs)} the time",
    )
    row("time per step", lambda run: run.step_seconds, _milliseconds)
    if any(run.predicted_step_seconds for run in runs):
        row("  as predicted while it ran", lambda run: run.predicted_step_seconds, _milliseconds)
    table.add_section()
    row("bytes up", lambda run: run.wire_bytes_up, size, _fewer)
    row("  against bare float32", lambda run: _fewer(run.wire_bytes_up, run.raw_bytes_up))
    row(
        "  compressed tensors alone",
        lambda run: ratio(run.compressed_raw_bytes_up, run.compressed_payload_bytes_up),
    )
    row("bytes down", lambda run: run.wire_bytes_down, size, _fewer)
    row("  against bare float32", lambda run: _fewer(run.wire_bytes_down, run.raw_bytes_down))
    if result.local_steps:
        row(
            "rounds per local step",
            lambda run: f"{run.steps / run.local_steps:.2f} ({run.steps} of {run.local_steps})",
        )
    mode = registry.parse(result.mode)
    if mode.staleness_unit:
        row(f"largest staleness, {mode.staleness_unit}", lambda run: run.largest_staleness)
    if not mode.pushes_parts:  # as the baseline does
        row("redundancy, at the end", lambda run: run.redundancy if run is result else "–")
        row("exchanges replaced by uncoded ones", lambda run: run.uncoded_exchanges if run is result else "–")
        row("elements of gradients clipped", lambda run: run.clipped_elements if run is result else "–")
    if any(run.refused_pushes for run in runs):
        row("refused pushes", lambda run: run.refused_pushes)
    if any(run.lost_workers for run in runs):
        row("lost workers", lambda run: ", ".join(run.lost_workers))
    return table


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def ratio(numerator: float, denominator: float) -> str:
    """`7.62×`, or a dash where there is nothing to divide by."""
    return f"{numerator / denominator:.2f}×" if denominator else "–"


def heading(result: RunResult) -> str:
    """What tells one run from another: mode, compressor and downlink."""
    if not registry.parse(result.mode).pushes_parts:
        return f"{result.mode.partition(':')[0]}, r = {result.redundancy}"
    mode = "" if result.mode == RunSettings().mode else f"{result.mode}: "
    usual = "auto", "none" if result.compressor == "none" else "auto"
    down = "" if result.downlink in usual else f", {result.downlink} down"
    return f"{mode}{result.compressor}{down}"


def _text(text: str) -> Text:
    """Return what shows every character as it is: rich takes a plain string for markup."""
    return Text(printable(text))


def _metric(run: RunResult, name: str) -> float | None:
    return run.metrics.get(name)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds else "–"


def _fewer(ours: int, theirs: int) -> str:
    """How many times fewer ours are, or more."""
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
