"""A running job in the planner's terms: the measurements of its server, and its options."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..common.spec import SpecError
from ..compressors import parse_compressor
from ..planning import Link
from ..planning.job import JobProfile, StepOptions, bandwidth_of
from ..planning.predictions import predict, predictable
from ..proto.messages import StatusResponse


@dataclasses.dataclass(frozen=True)
class LiveJob:
    """A running job in the terms of the planner, so that gc-plan and gc-run can predict its steps.

    Attributes:
        name: name of the job's task.
        profile: model, links and computation as the job's server has measured them.
        compressor: spec of the first worker's compressor.
        choice: mode and options of the exchange; the compressor in it is not set.
        step_s: measured seconds of a step.
    """

    name: str
    profile: JobProfile
    compressor: str
    choice: StepOptions
    step_s: float

    def options_in_force(self) -> StepOptions:
        """Return the options that the job runs with, including its compressor.

        Raises:
            SpecError: if the compressor is not installed here, or does not declare the bytes that it sends.
        """
        return dataclasses.replace(self.choice, compressor=parse_compressor(self.compressor).compression())

    def comparison(self) -> str:
        """Return a sentence with the job's options, and the measured and predicted seconds of a step."""
        what = f"{self.compressor}, {self.choice.mode}, overlap {self.choice.overlap}"
        what += f", fusion {self.choice.fusion}, order {self.choice.order}"
        try:
            predicted = predict(self.profile, self.options_in_force()).step_s
        except ValueError as error:
            return f"The job runs with {what}: {self.step_s:.3g} s per step; not predicted: {error}."
        ratio = predicted / self.step_s if self.step_s else float("nan")
        took = f"{self.step_s:.3g} s per step, predicted {predicted:.3g} s ({ratio:.2f} of it)"
        return f"The job runs with {what}: {took}."


def live_job_of(status: StatusResponse, *, workers: int, rtt_s: float = 0.0) -> LiveJob | None:
    """Return the running job of a server's status, in the planner's terms, with as many workers; None if the
    status lacks measurements."""
    measured, job = status.measured, status.job.settings
    if measured is None:
        return None
    byte_s = measured.byte_seconds / _packed(measured.compressor, job.get("entropy", "off"))
    rate = bandwidth_of(Link(start_s=measured.part_seconds, byte_s=byte_s), workers)
    profile = JobProfile(
        shapes=[tuple(tensor.shape) for tensor in measured.tensors],
        forward_s=measured.forward_seconds,
        backward_s=measured.backward_seconds,
        worker_bandwidth=rate,
        server_bandwidth=rate,
        workers=workers,
        start_s=measured.part_seconds,
        rtt_s=rtt_s,
        cores=measured.cores or None,
        on_cores=measured.processor_share,
        square_norms=measured.square_norms,
    )
    overlap: Any = job["overlap"]
    choice = StepOptions(
        mode=predictable(job["mode"]),
        overlap=overlap,
        fusion=measured.fusion,
        order=measured.order,
        part_bytes=measured.part_bytes,
        entropy=job.get("entropy", "off"),
    )
    return LiveJob(job["task"], profile, measured.compressor, choice, status.step_seconds)


def _packed(compressor: str, entropy: str) -> float:
    """Return the share of the bytes of pushes that is left after packing: a server measures its link by bytes
    before packing."""
    try:
        return 1.0 if entropy == "off" else parse_compressor(compressor).compression().up.packed
    except SpecError:  # it is not installed here, or does not declare its bytes
        return 1.0
