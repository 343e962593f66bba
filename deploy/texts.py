"""The state of a job as text: progress, time left, losses, speed and bytes, for gc-run and gc-status."""

from __future__ import annotations

import math

from ..proto.messages import EpochStatus, StatusResponse
from ..proto.status import seconds_left
from ..settings import JobTerms, parse_evaluate_every
from .report import kind_of_metrics, ratio, size


def duration(seconds: float | None) -> str:
    """Return seconds as text such as `1:02:03` or `2:03`; a dash for None."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def reached(job: JobTerms, epochs: float, version: int) -> str:
    """Return the progress of a job as text, with its limits: `3/10 epochs  step 120/400`."""
    parts = [f"{epochs:g}/{job.epochs} epochs" if job.epochs else f"{epochs:.3g} epochs"]
    if job.max_steps:
        parts.append(f"step {version}/{job.max_steps}")
    return "  ".join(parts)


def when(evaluation: EpochStatus, job: JobTerms) -> str:
    """Return text that says at which epoch an evaluation took place, or at which step for jobs by steps."""
    every = parse_evaluate_every(job.evaluate_every)
    if every.unit == "epochs" and not job.max_steps:
        epochs = evaluation.epoch if job.evaluate_every == "1epoch" else evaluation.epochs
        return reached(job, round(epochs, 2), evaluation.version)
    return f"step {evaluation.version}" + (f"/{job.max_steps}" if job.max_steps else "")


def training_loss(status: StatusResponse) -> str:
    """Return text with the training loss of the last round."""
    known = math.isfinite(status.train_loss)
    return f"training loss {status.train_loss:.4f}" if known else "training loss unknown"


def metrics(evaluation: EpochStatus, job: JobTerms) -> str:
    """Return text with the metrics of an evaluation: loss and accuracy first, the other metrics by name."""
    kind = kind_of_metrics(job.script)
    first = [name for name in ("loss", "accuracy") if name in evaluation.metrics]
    names = [*first, *sorted(evaluation.metrics.keys() - {*first})]
    return "  ".join(f"{kind} {name} {evaluation.metrics[name]:.4f}" for name in names)


def speed(status: StatusResponse) -> str:
    """Return text with the learning rate, the steps per second and the time left, as far as known."""
    rate = f"learning rate {status.learning_rate:.3g}" if status.learning_rate else ""
    unit = "rounds" if status.local_steps else "steps"
    steps = f"{1 / status.step_seconds:.3g} {unit}/s" if status.step_seconds else ""
    left = seconds_left(status)
    return "  ".join(filter(None, [rate, steps, f"{duration(left)} left" if left else ""]))


def traffic(status: StatusResponse) -> str:
    """Return text with the bytes on the wire in each direction, and their ratio to float32."""
    count = status.traffic
    return (
        f"up {size(count.wire_bytes_up)} ({ratio(count.raw_bytes_up, count.wire_bytes_up)})  "
        f"down {size(count.wire_bytes_down)} ({ratio(count.raw_bytes_down, count.wire_bytes_down)})"
    )


def members(status: StatusResponse, alive: int, workers: int) -> str:
    """Return text with the running processes of those that were started, and the reason why the server
    waits."""
    text = f"workers {alive}/{workers}"
    return f"{text}  {status.waiting}" if status.waiting else text
