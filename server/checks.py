"""Checks of gc-server's options before the start, in addition to those in the options' declarations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from ..common import presets
from ..common.configuration import Effective, UsageError
from ..common.spec import SpecError
from ..optim.optimizer import parse_optimizer
from ..optim.steps import Muon, Sgd
from ..planning import parse_fusion, parse_order, parse_replan
from ..settings import JobOptions, ServerSettings
from ..storage.backends import is_url, shown
from .job import limits
from .job.aggregation import parse_aggregation
from .job.best_policy import parse_keep
from .job.limits import parse_early_stop
from .job.modes import registry
from .job.schedule import parse_schedule

T = TypeVar("T", bound=JobOptions)
WITHOUT_BASES = "auto:compressor=4bit"  # `auto` that cannot choose `lowrank`
BECAUSE = "because of "


def _parse_output(text: str) -> None:
    """Raise ValueError unless the text is empty or names a file in a writable folder."""
    folder = Path(text).absolute().parent
    if text and (Path(text).is_dir() or not os.access(folder, os.W_OK | os.X_OK)):
        raise ValueError(f"expected a file in a folder that exists and can be written to, got {text!r}")


# Checks by option, which raise ValueError. gc-run uses `SPECS` too.
SPECS = {
    "mode": registry.parse,
    "schedule": parse_schedule,
    "early_stop": parse_early_stop,
    "aggregation": parse_aggregation,
    "fusion": parse_fusion,
    "order": parse_order,
    "replan": parse_replan,
}
PARSERS = {**SPECS, "output": _parse_output, "keep": parse_keep}


def check(settings: ServerSettings) -> None:
    """Check that options are allowed together. Raises UsageError if two options contradict each other; the
    message names them and a remedy."""
    mode = registry.parse(settings.mode)
    mode.check(settings)
    if isinstance(mode.optimizer(settings)[0], Muon):
        raise UsageError(
            f"--optimizer {settings.optimizer}: not with --mode {settings.mode}: Muon steps whole matrices, "
            "and the server has them in parts; use --mode local, whose workers take the steps, such as "
            "local:steps=8,correction=0"
        )
    if settings.script and settings.schedule != "constant":
        raise UsageError(
            f"--schedule {settings.schedule}: not with --script, whose scripts have schedulers of their own "
            "(job.follow); leave --schedule out"
        )
    try:
        limits.check(settings)
    except SpecError as error:
        raise UsageError(str(error)) from None
    _check_bases(settings)
    if settings.clip_norm and mode.workers_step:
        why = "workers step the parameters there, and the server has no gradient"
        raise UsageError(
            f"--clip-norm {settings.clip_norm:g}: not allowed with --mode {settings.mode}: {why}; use 0"
        )
    if settings.keep and not settings.output and not settings.state:
        raise UsageError(
            f"--keep {settings.keep}: needs --output or --state, which store that version; give one of them"
        )
    if is_url(settings.state) and settings.durability != "none":
        raise UsageError(
            f"--state {shown(settings.state)} with --durability {settings.durability}: a journal needs a "
            "disk, and a URL takes checkpoints only; use --durability none, or --state with a folder of this "
            "machine"
        )
    if settings.fusion.partition("=")[0] != "bytes" and mode.slices > 1:
        why = "members of a group push slices of the parts there"
        raise UsageError(f"--fusion {settings.fusion}: expected bytes with --mode {settings.mode}: {why}")


def adapted(effective: Effective[T]) -> Effective[T]:
    """Return the options of gc-server or gc-run with values that follow from others.

    The compressor is `none` if the mode needs it and the user has chosen no other. Where the job cannot have
    bases, or a loss of `lowrank` was measured or is unknown, `auto` names `4bit` and so cannot choose it. A
    preset's mode is one for scripts with --script."""
    effective = presets.adapted(effective)
    options: JobOptions = effective.settings
    mode = registry.parse(options.mode)
    if (mode.lossless or not mode.pushes_parts) and not effective.chosen("compressor"):
        return effective.changed(f"{BECAUSE}--mode", compressor="none")
    if options.compressor == "auto":
        excluding = {
            "mode": not mode.keeps_bases,
            "optimizer": not isinstance(parse_optimizer(options.optimizer), Sgd),
            "aggregation": getattr(options, "aggregation", "mean") != "mean",
            "downlink": options.downlink != "auto",
            "script": bool(getattr(options, "script", "")),  # it may have another optimizer
        }
        names = [f"--{name}" for name, excludes in excluding.items() if excludes]
        if names:
            return effective.changed(BECAUSE + ", ".join(names), compressor=WITHOUT_BASES)
    return effective


def check_lossless(settings: JobOptions) -> None:
    """Raise UsageError if the mode cannot use the compressor of --compressor."""
    mode, compressor = registry.parse(settings.mode), settings.compressor
    why = ""
    if not mode.pushes_parts and compressor != "none":
        why = "exchanges gradients in fixed point"
    elif mode.lossless and compressor != "none":
        from ..compressors import compressor_of  # imported late, because --help works without numpy

        why = "" if compressor_of(compressor)[0].lossless else "amplifies the errors of a lossy compressor"
    if why:
        raise UsageError(f"--compressor {compressor}: --mode {settings.mode} {why}; use none")


def _check_bases(settings: ServerSettings) -> None:
    """Raise UsageError if the compressor has bases and the job cannot have them."""
    from ..compressors import compressor_of  # late, as in `check_lossless`

    try:
        compressor, _ = compressor_of(settings.compressor)
    except SpecError:  # a later check says so
        return
    if not compressor.shared:
        return
    why = ""
    if not registry.parse(settings.mode).keeps_bases:
        why = f"--mode {settings.mode}: pushes there may be of older versions or in slices; use --mode sync"
    elif settings.aggregation != "mean":
        why = f"--aggregation {settings.aggregation}: it compares elements; use --aggregation mean"
    if why:
        raise UsageError(
            f"--compressor {settings.compressor}: its coordinates in the newest version's bases can only be "
            f"added up, so not with {why}, or another compressor, such as 4bit"
        )


def check_compressors(settings: ServerSettings) -> None:
    """Check that the compressor of --compressor is valid, and that of --downlink too and suits updates.
    Raises UsageError if one of them is not; the message has the reason."""
    from ..compressors import compressor_of, parse_downlink  # late, as in `check_lossless`

    try:
        compressor, _ = compressor_of(settings.compressor)
    except SpecError as error:
        raise UsageError(f"--compressor: {error}") from None
    if settings.script and compressor.entry.model_wide:
        raise UsageError(
            f"--compressor {settings.compressor}: needs the number of operations of each layer, which only a "
            "task can count; choose another one with --script"
        )
    check_lossless(settings)
    try:
        parse_downlink(settings.downlink)
    except SpecError as error:
        raise UsageError(f"--downlink {settings.downlink}: {error}") from None
