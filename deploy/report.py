"""The result of a run: as JSON, and as a table for people."""

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
    """One evaluation of a run, with its version, and its time in epochs and in seconds of training."""

    version: int
    epochs: float
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run. The server counts bytes, over all workers.

    Attributes:
        steps: versions that the server has published.
        seconds: from the opening of the first round to the last version.
        losses: pairs of a version and the mean training loss since the previous pair.
        accuracy_by_epoch: one per epoch, None if the evaluation was lost with its worker; empty unless the
            job evaluates once per epoch.
        seconds_by_epoch: time of each of these evaluations, None where that is None.
        local_steps: steps of each worker in local mode, where `steps` counts rounds.
        largest_staleness: of an applied push, in clocks in stale mode, in versions in async mode.
        step_seconds: between versions, median of the last ones.
        predicted_step_seconds: prediction from the job's own measurements; 0 if there is none.
        options: all options of gc-run in force.
        repeated_samples: trained on twice, because a worker returned after its samples were reassigned.
        redundancy: of the last round in coded mode.
        uncoded_exchanges: exchanges that replaced a coded one.
        clipped_elements: gradient elements that fixed point has clipped, over all workers.
        wire_bytes_up, wire_bytes_down: all bytes on the wire, with gRPC and HTTP/2 framing.
        raw_bytes_up, raw_bytes_down: bytes of the same tensors as bare float32.
        payload_bytes_up: payloads of accepted pushes, without headers.
        compressed_payload_bytes_up, compressed_raw_bytes_up: of those, bytes of the quantized tensors, and
            their bytes as float32.
        parameters_sha256: over the final parameters in manifest order; empty if the run was stopped early.
        finished: whether the job was done; if not, all figures are those at the stop.
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
        """Return the wire bytes in both directions up to a version, as if all steps took as many."""
        total = self.wire_bytes_up + self.wire_bytes_down
        return total * version / self.steps if self.steps else 0.0

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last evaluation."""
        return self.evaluations[-1].metrics if self.evaluations else {}

    def metric(self, name: str) -> float | None:
        return self.metrics.get(name)


def result_of(settings: RunSettings, status: StatusResponse) -> RunResult:
    """Return the result by the last status of a job."""
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
    """Return an object of the result's fields, and `baseline` with the same fields or null."""
    content = dataclasses.asdict(result)
    content["baseline"] = None if baseline is None else dataclasses.asdict(baseline)
    return json.dumps(json_values(content), indent=2, allow_nan=False) + "\n"


def json_values(value: Any) -> Any:
    """Return a value for JSON, with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): json_values(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, text: str) -> None:
    """Write the whole file, or leave the previous one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def table_of(result: RunResult, baseline: RunResult | None) -> Table:
    """Return a table of the run and, with a baseline, of that and the differences."""
    workers, epochs = _count(result.workers, "worker"), _count(result.epochs, "epoch")
    # Text everywhere: names of tasks and metrics, such as [/x], are no markup.
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
        if name in measured:
            row(f"validation {name}", partial(RunResult.metric, name=name), _number, _difference)
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
    """Return bytes in B, kB, MB, GB or TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def ratio(numerator: float, denominator: float) -> str:
    """Return a ratio such as `7.62×`, or a dash if the denominator is 0."""
    return f"{numerator / denominator:.2f}×" if denominator else "–"


def heading(result: RunResult) -> str:
    """Return mode, compressor and downlink, as far as they are not the default."""
    if not registry.parse(result.mode).pushes_parts:
        return f"{result.mode.partition(':')[0]}, r = {result.redundancy}"
    mode = "" if result.mode == RunSettings().mode else f"{result.mode}: "
    usual = "auto", "none" if result.compressor == "none" else "auto"
    down = "" if result.downlink in usual else f", {result.downlink} down"
    return f"{mode}{result.compressor}{down}"


def _text(text: str) -> Text:
    """Return text that rich shows as it is; it reads a plain string as markup."""
    return Text(printable(text))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds else "–"


def _fewer(ours: int, theirs: int) -> str:
    """Return how many times fewer or more ours are."""
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
