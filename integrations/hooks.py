"""The hook of gradwire.ddp in a framework: checks of its models and optimizers, and files of each rank."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..ddp import HookState, register
from ..worker.script.terms import ScriptError

log = logging.getLogger("gradwire.integrations")


def registered(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    compressor: str,
    *,
    ranks: int,
    scaler: Any,
    **options: Any,
) -> HookState | None:
    """Register the hook on a model that a framework has wrapped, and return its state. None in a job of one
    process, with a warning.

    Args:
        optimizers: all optimizers of the script.
        ranks: number of processes.
        scaler: the framework's GradScaler; None without one.
        options: those of `gradwire.ddp.Options`.

    Raises:
        ScriptError: the script has several optimizers, or a GradScaler.
        TypeError, SpecError, ValueError, RuntimeError: as for `gradwire.ddp.register`.
    """
    if ranks == 1:
        log.warning("this job has one process, so gradients are neither compressed nor sent")
        return None
    if len(optimizers) != 1:
        raise ScriptError(
            f"gradwire.integrations: expected one optimizer, got {len(optimizers)}, whose exchanges the hook "
            "could not tell apart; call gradwire.ddp.register(model, compressor) on the wrapped model, "
            "without optimizer="
        )
    if scaler is not None:
        raise ScriptError(
            "gradwire.integrations: float16 with a GradScaler changes the scale of gradients, and residuals "
            "keep the earlier one; use bfloat16, or gradwire.ddp.register with compressor='none'"
        )
    wrapped: Any = model
    options["optimizer"] = optimizers[0]
    return register(wrapped, compressor, **options)


def write(state: HookState, path: Path) -> None:
    """Write a rank's state to its own file, which is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    torch.save(state.state_dict(), partial)
    os.replace(partial, path)


def read(state: HookState, path: Path) -> None:
    """Load a rank's state from its file. Without it residuals begin anew, with a warning; counters, norms and
    bases, which all ranks share, come from the file of another rank in the same folder."""
    if path.exists():
        state.load_state_dict(torch.load(path, weights_only=True))
        return
    log.warning("%s: no such file, so this rank's residuals begin anew", path)
    of_any_rank = re.sub(r"gradwire-\d+(\.pt)?$", r"gradwire-[0-9]*\1", glob.escape(path.name))
    for other in sorted(path.parent.glob(of_any_rank))[:1]:
        state.load_state_dict(torch.load(other, weights_only=True))
