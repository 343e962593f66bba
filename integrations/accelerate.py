"""Accelerate's `prepare` with compressed gradients.

model, optimizer, loader = gradwire.integrations.accelerate.prepare(accelerator, model, optimizer, loader)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import torch
from accelerate import Accelerator
from torch import nn

from ..ddp import HookState, Options
from .hooks import read, registered, write


def prepare(
    accelerator: Accelerator, *objects: Any, compressor: str = "4bit", **options: Unpack[Options]
) -> Any:
    """Prepare the objects as `accelerator.prepare` does, and register the hook on the model among them.

    The hook's state is `accelerator.hook_state`, or None in a job of one process. `accelerator.save_state`
    and `load_state` include each rank's residuals, in `gradwire-RANK.pt`.

    Args:
        objects: one model, its optimizer, and all else that `accelerator.prepare` accepts.
        compressor: `name[:key=value,...]`, as for `gradwire.ddp.state`, which has the other keywords, too.

    Raises:
        ScriptError: there are several optimizers, or mixed precision is "fp16".
        ValueError: there is no model, or there are several.
    """
    untyped: Any = accelerator  # annotated only in part
    prepared = untyped.prepare(*objects)
    found = prepared if len(objects) > 1 else (prepared,)
    models = [each for each in found if isinstance(each, nn.Module)]
    if len(models) != 1:
        raise ValueError(
            f"gradwire.integrations.accelerate.prepare: expected one model, got {len(models)}; prepare each "
            "further one by accelerator.prepare and gradwire.ddp.register"
        )
    state = registered(
        models[0],
        [each for each in found if isinstance(each, torch.optim.Optimizer)],
        compressor,
        ranks=accelerator.num_processes,
        scaler=accelerator.scaler,
        **options,
    )
    untyped.hook_state = state
    if state is not None:
        _keep(accelerator, state)
    return prepared


def _keep(accelerator: Accelerator, state: HookState) -> None:
    """Save and load the state with the accelerator's, on every rank."""
    name = f"gradwire-{accelerator.process_index}.pt"

    def save(_models: list[Any], _weights: list[Any], folder: str) -> None:
        write(state, Path(folder) / name)

    def load(_models: list[Any], folder: str) -> None:
        read(state, Path(folder) / name)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
