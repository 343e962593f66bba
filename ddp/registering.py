"""The hook and its state for a model, in one call."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..compressors import LayerRule
from .hook import HookState, hook
from .shares import Entropy, Exchange


class Options(TypedDict, total=False):
    """Keywords of `HookState` that are a script's choice; its docstring says what they mean."""

    optimizer: torch.optim.Optimizer | None
    rule: LayerRule | None
    seed: int
    samples: int
    exchange: Exchange
    entropy: Entropy
    process_group: dist.ProcessGroup | None


def register(
    model: DistributedDataParallel, compressor: str = "4bit", **options: Unpack[Options]
) -> HookState:
    """Register the hook on a DDP model, and return its new state. Tensors have the names of the module.

    Args:
        compressor: `name[:key=value,...]`, as for `gradwire.ddp.state`, which has the other keywords, too.

    Raises:
        TypeError: `model` is not a DistributedDataParallel.
        SpecError, ValueError: as for `gradwire.ddp.state`.
        RuntimeError: the model has a hook already.

    Example:
        >>> model = torch.nn.parallel.DistributedDataParallel(model)
        >>> state = gradwire.ddp.register(model, "4bit", optimizer=optimizer)
    """
    # A script without types may give any model.
    if not isinstance(model, DistributedDataParallel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"gradwire.ddp.register: expected a DistributedDataParallel, got {type(model).__name__}; start "
            "at least two processes, and wrap the model first"
        )
    ddp: Any = model  # annotated only in part
    options.setdefault("process_group", ddp.process_group)
    state = HookState(compressor, named_parameters=ddp.module.named_parameters(), **options)
    ddp.register_comm_hook(state, hook)
    return state
