"""Checks that a script can do what its job and its options ask for."""

from __future__ import annotations

from typing import Literal

from ...common.configuration import UsageError
from ...common.spec import SpecError
from ...compressors import CompressorSpec, compressor_of
from ...settings import JobTerms
from ..training.work import CodedExchange, Gradients, Local, parse_work

Steps = Literal["server", "local"]
Overlap = Literal["off", "backward"]


class ScriptError(RuntimeError):
    """The script asks for what its job cannot do; the message says what to change."""


def script_compressor(spec: str) -> tuple[CompressorSpec, bool]:
    """Return a compressor, and whether it is left where it loses. Raises UsageError."""
    try:
        compressor, auto = compressor_of(spec)
    except SpecError as error:
        raise UsageError(f"compressor {spec!r}: {error}") from None
    if compressor.entry.model_wide:
        raise UsageError(
            f"compressor {spec!r}: its budgets go by the operations of each layer, which only a task can "
            "count; choose another one"
        )
    return compressor, auto


def script_work(terms: JobTerms) -> Gradients | Local:
    """Return the work that the job asks of a script. Raises ScriptError for work that a script cannot do."""
    if not terms.script:
        raise ScriptError(
            f"the server trains the task {terms.task!r}: join it with gc-worker, or start one for scripts: "
            "gc-server --script"
        )
    work = parse_work(terms.work)
    if isinstance(work, CodedExchange):
        raise ScriptError(
            f"mode {terms.mode}: a script cannot exchange coded packets; start the server with --mode sync, "
            "stale, async or local"
        )
    if isinstance(work, Local) and work.delayed:
        raise ScriptError(
            f"mode {terms.mode}: a script's steps cannot begin before their samples are known; start the "
            "server without delayed=on"
        )
    return work


def check_attached(terms: JobTerms, work: Gradients | Local, clip_norm: float, steps: str) -> None:
    """Raises ScriptError for arguments of `job.attach` that do not go with the job."""
    if steps not in ("server", "local"):
        raise ScriptError(f"job.attach(steps={steps!r}): expected 'server' or 'local'")
    if clip_norm and (steps == "local" or isinstance(work, Local)):
        raise ScriptError(
            f"job.attach(clip_norm={clip_norm:g}): workers take the steps, so nobody has the mean gradient; "
            "call torch.nn.utils.clip_grad_norm_ before optimizer.step()"
        )
    if clip_norm != terms.clip_norm:
        raise ScriptError(
            f"job.attach(clip_norm={clip_norm:g}): the job has {terms.clip_norm:g}; start gc-server with "
            f"--clip-norm {clip_norm:g}"
        )


def overlaps(terms: JobTerms, overlap: str | None) -> bool:
    """Whether gradients leave during backward. overlap: as the script wishes it; None for the job's.

    With `both` parts count when they arrive: a step that the script gives up could not be taken back.

    Raises ScriptError.
    """
    if overlap not in (None, "off", "backward"):
        raise ScriptError(
            f"job.attach(overlap={overlap!r}): expected 'off', 'backward', or None for the job's"
        )
    if overlap == "backward" and terms.overlap != "backward":
        raise ScriptError(
            f"job.attach(overlap='backward'): the job has {terms.overlap}; start gc-server with "
            "--overlap backward"
        )
    return terms.overlap == "backward" and overlap != "off"
