"""Checks that a script can do the work of its job, and that the job allows the script's options."""

from __future__ import annotations

import math
import operator
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...common.configuration import UsageError
from ...common.presets import why_unsuited
from ...common.spec import SpecError
from ...compressors import CompressorSpec, compressor_of
from ...optim.steps import OPTIMIZERS
from ...proto.refusal import Refusal, Refused
from ...settings import JobSettings, JobTerms
from ..session.compression import jobs_compressor
from ..training.work import CodedExchange, Gradients, Local, parse_work

Steps = Literal["server", "local"]
Overlap = Literal["off", "backward"]
Frozen = Literal["server", "local"]


class JobFinished(Refused, SystemExit):
    """The job has ended, so a script cannot join it: its parameters are in the file of `gc-server --output`.

    A script that does not catch it ends with exit code 0 and one line in its log, so that a container which
    is started again once its job is done does not fail.

    Example:
        >>> try:  # after the last epoch
        ...     gradwire.connect()
        ... except gradwire.JobFinished as over:
        ...     print("the job is over")
        the job is over
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.code = 0


class ScriptError(RuntimeError):
    """A script asks for something that its job cannot do; the message says which change is needed.

    Example:
        >>> with gradwire.connect() as job:
        ...     try:
        ...         next(iter(job.batches(dataset)))
        ...     except gradwire.ScriptError as error:
        ...         print(error)
        job.batches: call job.attach(model, optimizer) first
    """


def script_compressor(spec: str, job: JobTerms | None = None) -> tuple[CompressorSpec, bool]:
    """Return the compressor that `spec` names, and True if it is to be turned off where it loses time
    (`auto`).

    Args:
        job: terms of the job that names this compressor; None if the script names it.

    Raises:
        UsageError: the compressor does not exist, or a script cannot use it.
    """
    try:
        compressor, auto = compressor_of(spec) if job is None else jobs_compressor(job)
    except SpecError as error:
        raise UsageError(f"compressor {spec!r}: {error}") from None
    if compressor.entry.model_wide:
        raise UsageError(
            f"compressor {spec!r}: it needs the number of operations of each layer, which only a task can "
            "count; choose another one"
        )
    return compressor, auto


def script_work(terms: JobTerms) -> Gradients | Local:
    """Return the kind of work that the job asks of a script.

    Raises:
        ScriptError: the job trains a task, or its work cannot be done by a script.
    """
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


def check_optimizer(terms: JobTerms, optimizer: torch.optim.Optimizer) -> None:
    """Raise ScriptError for an optimizer of `job.attach` that does not suit the job's preset, or contradicts
    the server's options. The script's counts, so an option of the server that has its default is no
    contradiction."""
    name = type(optimizer).__name__
    known = "muon" if name == "MuonWithAdamW" else name.lower()
    if known in OPTIMIZERS and (why := why_unsuited(terms.preset, "optimizer", known)):
        raise ScriptError(
            f"job.attach: optimizer {name}: the server's {why}; use one of these, or start the server with "
            "another preset"
        )
    if terms.preset:
        return
    usual, wants = JobSettings(), terms.optimizer.partition(":")[0]
    if terms.optimizer != usual.optimizer and known != wants:
        raise ScriptError(
            f"job.attach: optimizer {name}: the server was started with --optimizer {terms.optimizer}; leave "
            "that option out, because the script brings its optimizer"
        )
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if terms.learning_rate != usual.learning_rate and terms.learning_rate not in rates:
        raise ScriptError(
            f"job.attach: learning rate {rates[0]:g}: the server was started with --learning-rate "
            f"{terms.learning_rate:g}; leave that option out, because the script brings its rates"
        )


def check_model(model: nn.Module) -> None:
    """Raise ScriptError for a model that averages its gradients with other processes itself."""
    any_model: Any = model  # torch's types of its modules are partial
    for name, module in any_model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"):
                where = f" ({name!r} in it)" if name else ""
                raise ScriptError(
                    f"job.attach: the model is wrapped in {kind.__name__}{where}, which exchanges gradients "
                    "itself; attach the module that was wrapped (model.module of DistributedDataParallel), "
                    "with an optimizer of its parameters. To compress what DistributedDataParallel "
                    "exchanges, use gradwire.ddp, without a job"
                )


def check_alone() -> None:
    """Raise ScriptError within the forward pass of a DistributedDataParallel that has wrapped the model after
    `job.attach`, as Accelerate does under torchrun."""
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise ScriptError(
            "job.attach: the attached model was wrapped in DistributedDataParallel, which exchanges "
            "gradients itself: start each worker as a process of its own, as gc-run does, without torchrun; "
            "or use gradwire.ddp, without a job"
        )


def check_attached(
    terms: JobTerms, work: Gradients | Local, clip_norm: float, steps: str, frozen: str = "server"
) -> None:
    """Raise ScriptError for arguments of `job.attach` that contradict the job's options."""
    for name, value in (("steps", steps), ("frozen", frozen)):
        if value not in ("server", "local"):
            raise ScriptError(f"job.attach({name}={value!r}): expected 'server' or 'local'")
    if clip_norm and (steps == "local" or isinstance(work, Local)):
        raise ScriptError(
            f"job.attach(clip_norm={clip_norm:g}): workers take the steps, so no process has the mean "
            "gradient; call torch.nn.utils.clip_grad_norm_ before optimizer.step()"
        )
    if not 0.0 <= clip_norm < math.inf:
        raise ScriptError(f"job.attach(clip_norm={clip_norm:g}): expected a number, 0 or more")
    if terms.clip_norm and (steps == "local" or clip_norm not in (0.0, terms.clip_norm)):
        raise ScriptError(
            f"job.attach(clip_norm={clip_norm:g}, steps={steps!r}): the server was started with --clip-norm "
            f"{terms.clip_norm:g}; leave that option out, because the script brings its own"
        )
    if clip_norm and not terms.clip_norm and terms.overlap == "both":
        raise ScriptError(
            f"job.attach(clip_norm={clip_norm:g}): the job has --overlap both, which steps parts before the "
            f"norm is known; start gc-server with --overlap backward, or with --clip-norm {clip_norm:g}"
        )


def check_batch_size(of_job: int, batch_size: int | None) -> None:
    """Raise ScriptError for a batch size of `job.batches` that is not the job's."""
    if batch_size not in (None, of_job):
        raise ScriptError(
            f"job.batches(batch_size={batch_size}): the job has {of_job}; start "
            f"gc-server with --batch-size {batch_size}, or leave out batch_size"
        )


def epochs_of(of_job: int, total: int | None, start: int, used: str) -> int:
    """Return a job's number of epochs: `total`, which the script names, where the server has the default.

    Args:
        of_job: the job's number of epochs so far; 0 if other limits end it.
        used: description of an earlier use of that number, after which it may not change; empty for none.

    Raises:
        ScriptError: `total` contradicts the server's option or the earlier use, `start` is out of range, or
            one of them is no whole number.
    """
    try:
        total, start = None if total is None else operator.index(total), operator.index(start)
    except TypeError:
        raise ScriptError(f"job.epochs({total!r}, start={start!r}): expected whole numbers") from None
    if total is not None and total != of_job:
        if not 1 <= total < 2**32:
            raise ScriptError(f"job.epochs({total}): expected a number of epochs, 1 or more")
        if of_job != JobSettings().epochs:
            raise ScriptError(
                f"job.epochs({total}): the job has {of_job} epochs; start gc-server with --epochs {total}, "
                "or leave out that option or the number"
            )
        if used:
            raise ScriptError(
                f"job.epochs({total}): {used} with {of_job} epochs, the default; write epochs = "
                f"job.epochs({total}) before it, and loop over epochs"
            )
        of_job = total
    if start < 0 or (of_job and start > of_job):
        most = f"0 to {of_job}, the job's number of epochs" if of_job else "0 or more"
        raise ScriptError(
            f"job.epochs(start={start}): expected {most}; start gc-server with --epochs that include "
            "earlier epochs, or name them all, as in job.epochs(20, start=10)"
        )
    return of_job


def overlaps(terms: JobTerms, overlap: str | None) -> bool:
    """Return True if gradients are sent during backward.

    With `--overlap both` they are not: parts would count on arrival, and a step that the script skips could
    not be taken back.

    Raises:
        ScriptError: the choice does not exist, or the job does not allow it.
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
