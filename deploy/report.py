"""What a run came to: as data for machines, and as a table for people."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from ..proto.job import job_terms
from ..proto.messages import Phase, StatusResponse
from ..settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. Times are in seconds; bytes are counted at the server, over all workers.

    steps: versions that the server has published.
    seconds: from the first round's opening to the last version.
    accuracy_by_epoch: one per epoch, None where the evaluation was lost with the worker that made it.
    seconds_by_epoch: when each was complete, None where that is None.
    local_steps: that each worker took, in local mode: `steps`, the rounds, divided by them say how often the
        workers exchanged what they had learnt.
    largest_staleness: of a push that was applied: in clocks in stale mode, in versions in async mode.
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
    options: Mapping[str, Any]

    @property
    def bytes_by_epoch(self) -> tuple[float, ...]:
        """Wire bytes in both directions after each epoch; every step of a run takes about as many."""
        total = self.wire_bytes_up + self.wire_bytes_down
        return tuple(total * epoch / self.epochs for epoch in range(1, self.epochs + 1))


def result_of(settings: RunSettings, status: StatusResponse) -> Result:
    """The result, from the last status of a job."""
    metrics = {evaluation.epoch: evaluation.metrics for evaluation in status.evaluations}
    seconds = {evaluation.epoch: evaluation.seconds for evaluation in status.evaluations}
    final = metrics.get(status.epoch) or (metrics[max(metrics)] if metrics else {})
    traffic, job = status.traffic, job_terms(status.job)
    return Result(
        task=job.task,
        mode=job.mode,
        compressor=settings.compressor,
        downlink=job.downlink,
        seed=job.seed,
        workers=settings.workers,
        steps=status.version,
        epochs=status.epoch,
        seconds=status.training_seconds,
        validation_accuracy=final.get("accuracy"),
        validation_loss=final.get("loss"),
        wire_bytes_up=traffic.wire_bytes_up,
        wire_bytes_down=traffic.wire_bytes_down,
        raw_bytes_up=traffic.raw_bytes_up,
        raw_bytes_down=traffic.raw_bytes_down,
        payload_bytes_up=traffic.payload_bytes_up,
        compressed_payload_bytes_up=traffic.compressed_payload_bytes_up,
        compressed_raw_bytes_up=traffic.compressed_raw_bytes_up,
        refused_pushes=status.refused_pushes,
        lost_workers=tuple(lost.worker for lost in status.lost),
        parameters_sha256=status.parameters_sha256,
        finished=status.phase is Phase.FINISHED,
        accuracy_by_epoch=tuple(
            metrics.get(epoch, {}).get("accuracy") for epoch in range(1, status.epoch + 1)
        ),
        seconds_by_epoch=tuple(seconds.get(epoch) for epoch in range(1, status.epoch + 1)),
        local_steps=status.local_steps,
        largest_staleness=status.largest_staleness,
        repeated_samples=status.repeated_samples,
        redundancy=status.redundancy,
        uncoded_exchanges=status.uncoded_exchanges,
        clipped_elements=status.clipped_elements,
        options=dataclasses.asdict(settings),
    )


def to_json(result: Result, baseline: Result | None) -> str:
    """One object: the result's fields, and `baseline` with the same fields or null."""
    content = to_plain(result)
    content["baseline"] = None if baseline is None else to_plain(baseline)
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def to_plain(result: Result) -> dict[str, Any]:
    """The fields as JSON can hold them: a figure that is not finite, as of a run that diverged, is None."""
    fields = dataclasses.asdict(result)
    fields["accuracy_by_epoch"] = [_finite(accuracy) for accuracy in result.accuracy_by_epoch]
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


def table_of(result: Result, baseline: Result | None) -> Table:
    """The run, next to the baseline if there is one, with what the difference amounts to."""
    workers, epochs = _count(result.workers, "worker"), _count(result.epochs, "epoch")
    # Text, because a task such as my:fire:x=1 is no markup.
    end = "" if result.finished else ", stopped before its end"
    table = Table(title=Text(f"{result.task}: {workers}, {epochs}, seed {result.seed}{end}"))
    table.add_column("")
    table.add_column(heading(result), justify="right")
    if baseline is not None:
        table.add_column(heading(baseline), justify="right")
        table.add_column("difference", justify="right")

    def row(name: str, ours: str, theirs: str = "", difference: str = "") -> None:
        table.add_row(name, *((ours, theirs, difference) if baseline is not None else (ours,)))

    other = baseline or result
    row(
        "validation accuracy",
        _number(result.validation_accuracy),
        _number(other.validation_accuracy),
        _difference(result.validation_accuracy, other.validation_accuracy),
    )
    row(
        "validation loss",
        _number(result.validation_loss),
        _number(other.validation_loss),
        _difference(result.validation_loss, other.validation_loss),
    )
    row(
        "training time",
        f"{result.seconds:.1f} s",
        f"{other.seconds:.1f} s",
        ratio(result.seconds, other.seconds) + " the time",
    )
    table.add_section()
    row("bytes up", size(result.wire_bytes_up), size(other.wire_bytes_up), _saving(result, other, "up"))
    row("  against bare float32", _against_raw(result, "up"), _against_raw(other, "up"))
    row(
        "  compressed tensors alone",
        ratio(result.compressed_raw_bytes_up, result.compressed_payload_bytes_up),
        ratio(other.compressed_raw_bytes_up, other.compressed_payload_bytes_up),
    )
    row(
        "bytes down",
        size(result.wire_bytes_down),
        size(other.wire_bytes_down),
        _saving(result, other, "down"),
    )
    row("  against bare float32", _against_raw(result, "down"), _against_raw(other, "down"))
    if result.local_steps:
        row("rounds per local step", _per_step(result), _per_step(other))
    mode = _name_of_mode(result)
    if mode in ("stale", "async"):
        unit = "clocks" if mode == "stale" else "versions"
        row(f"largest staleness, {unit}", str(result.largest_staleness), str(other.largest_staleness))
    if mode == "coded":
        row("redundancy, at the end", str(result.redundancy), "–")
        row("exchanges replaced by uncoded ones", str(result.uncoded_exchanges), "–")
        row("elements of gradients clipped", str(result.clipped_elements), "–")
    if result.refused_pushes or other.refused_pushes:
        row("refused pushes", str(result.refused_pushes), str(other.refused_pushes))
    if result.lost_workers or other.lost_workers:
        row("lost workers", ", ".join(result.lost_workers), ", ".join(other.lost_workers))
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


def heading(result: Result) -> str:
    """What tells one run from another: mode, compressor and downlink."""
    if _name_of_mode(result) == "coded":
        return f"coded, r = {result.redundancy}"
    mode = "" if result.mode == "sync" else f"{result.mode}: "
    down = "" if result.downlink == "none" else f", {result.downlink} down"
    return f"{mode}{result.compressor}{down}"


def _name_of_mode(result: Result) -> str:
    return result.mode.partition(":")[0]


def _saving(ours: Result, theirs: Result, direction: Literal["up", "down"]) -> str:
    name = f"wire_bytes_{direction}"
    return _fewer(getattr(theirs, name), getattr(ours, name))


def _against_raw(result: Result, direction: Literal["up", "down"]) -> str:
    raw, wire = getattr(result, f"raw_bytes_{direction}"), getattr(result, f"wire_bytes_{direction}")
    return _fewer(raw, wire)


def _fewer(theirs: int, ours: int) -> str:
    """How many times fewer ours are, or more."""
    text, inverse = ratio(theirs, ours), ratio(ours, theirs)
    if text in ("1.00×", "–"):
        return "same" if text == "1.00×" else text
    return f"{text} fewer" if ours < theirs else f"{inverse} more"


def _per_step(result: Result) -> str:
    return f"{result.steps / result.local_steps:.2f} ({result.steps} of {result.local_steps})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _difference(ours: float | None, theirs: float | None) -> str:
    return "–" if ours is None or theirs is None else f"{ours - theirs:+.4f}"
