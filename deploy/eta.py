"""Progress of a job and the time left."""

from __future__ import annotations

from ..proto.job import job_terms
from ..proto.messages import EpochStatus, StatusResponse
from ..settings import JobTerms, parse_evaluate_every


def fraction(status: StatusResponse) -> float | None:
    """Return the finished fraction of a job, 0 to 1, by its nearest limit; None without a limit.

    The limits are epochs, steps and seconds.
    """
    job = job_terms(status.job)
    parts = [
        done / limit
        for done, limit in (
            (status.epoch + status.epoch_progress, job.epochs),
            (status.version, job.max_steps),
            (status.training_seconds, job.max_seconds),
        )
        if limit
    ]
    return min(1.0, max(parts)) if parts else None


def seconds_left(status: StatusResponse) -> float | None:
    """Estimate the seconds until a job's last step, at the mean speed so far; None if unknown or finished."""
    done = fraction(status)
    if not done or done >= 1 or not status.training_seconds:
        return None
    return status.training_seconds * (1 - done) / done


def duration(seconds: float | None) -> str:
    """Return seconds as `1:02:03` or `2:03`; a dash for None."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def reached(job: JobTerms, epochs: float, version: int) -> str:
    """Return text such as `3/10 epochs  step 120/400`: the progress, and the job's limits where it has them.

    Args:
        job: terms of the job, which hold the limits.
        epochs: epochs done.
        version: steps done.
    """
    parts = [f"{epochs:g}/{job.epochs} epochs" if job.epochs else f"{epochs:.3g} epochs"]
    if job.max_steps:
        parts.append(f"step {version}/{job.max_steps}")
    return "  ".join(parts)


def when(evaluation: EpochStatus, job: JobTerms) -> str:
    """Return text that locates an evaluation in training: by its epoch, or by its step for jobs by steps."""
    every = parse_evaluate_every(job.evaluate_every)
    if every.unit == "epochs" and not job.max_steps:
        epochs = evaluation.epoch if job.evaluate_every == "1epoch" else evaluation.epochs
        return reached(job, round(epochs, 2), evaluation.version)
    return f"step {evaluation.version}" + (f"/{job.max_steps}" if job.max_steps else "")
