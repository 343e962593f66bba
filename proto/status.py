"""Figures and texts that follow from the answer to Status, for gc-status, gc-run and the page of a server."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..common.naming import printable
from .job import job_terms
from .messages import StatusResponse


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


def to_json_dict(status: StatusResponse) -> dict[str, Any]:
    """Return a status as a JSON object, with `steps_per_second` and `seconds_left`, None if unknown."""
    found: dict[str, Any] = json_values(dataclasses.asdict(status))
    del found["padding"], found["departed"]  # requested by neither
    found["phase"] = status.phase.name.lower()
    found["steps_per_second"] = 1 / status.step_seconds if status.step_seconds else None
    found["seconds_left"] = seconds_left(status)
    return found


def json_values(value: Any) -> Any:
    """Convert a value for JSON: keys become strings, NaN and infinities become None."""
    if isinstance(value, dict):
        return {str(key): json_values(each) for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable_texts(value: Any) -> Any:
    """Return a message in which the unprintable characters of all texts are escaped."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, tuple):
        return tuple(printable_texts(each) for each in value)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {printable_texts(key): each for key, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: printable_texts(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
