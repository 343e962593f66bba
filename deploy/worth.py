"""The remark of gc-run for a run in which compression made steps slower: on which links it would make them
faster.
"""

from __future__ import annotations

import math
from contextlib import suppress

from ..planning.predictions import break_even
from ..planning.worth import MARGIN
from .live import LiveJob
from .report import RunResult


def remark(result: RunResult, baseline: RunResult | None, job: LiveJob | None) -> str:
    """Return a remark on useful links if the run's steps took longer than uncompressed ones, else "".

    `job` is the compressed run by its server's measurements; None if there are too few.
    """
    if baseline is None or result.mode != baseline.mode or not (result.steps and baseline.steps):
        return ""
    taken_s, plain_s = result.seconds / result.steps, baseline.seconds / baseline.steps
    if taken_s <= (1 + MARGIN) * plain_s:
        return ""
    longer = f"{result.compressor} took {taken_s / plain_s:.2f} times as long per step as no compression"
    said = f"{longer}: the network within one machine is too fast to be worth compressing for."
    bandwidth = 0.0
    if job is not None and result.downlink == "auto":
        with suppress(ValueError):  # gc-plan cannot predict this mode or this compressor
            bandwidth = break_even(job.profile, job.options_in_force(), taken_s=taken_s, plain_s=plain_s)
    if not 0 < bandwidth < math.inf:
        return said
    return (
        f"{said} By gc-plan's model of a link, {result.compressor} pays below about {rate(bandwidth)} per "
        f"machine, for this model and {result.workers} workers."
    )


def rate(bandwidth: float) -> str:
    """Convert bytes per second to text in bits per second with two digits, such as `320 Mbit/s`."""
    mbit = float(f"{8e-6 * bandwidth:.2g}")
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"
