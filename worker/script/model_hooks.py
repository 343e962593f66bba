"""Hooks on a script's model that copies of the model do not inherit.

A script may copy or pickle its model at any time. A copy's forward pass is not the job's, and a process that
loads the file need not have Gradwire. The model's state as `copy` and `pickle` read it is therefore without
the hooks. A class that defines `__reduce__` itself, as torch.fx.GraphModule does, can be deep-copied but not
pickled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack


def after_forward(model: nn.Module, passed: Callable[[], None]) -> None:
    """Call `passed` after each forward pass of `model`, but not of its copies."""

    def hook(module: nn.Module, *_: object) -> None:
        if module is model:  # a class may copy itself by other means, with the hook
            passed()

    # torch.compile would trace the hook of a module that it compiles.
    untraced: Any = torch.compiler.disable(hook)
    _hide(model, "_forward_hooks", model.register_forward_hook(untraced).id)


def separate_state(model: nn.Module) -> None:
    """Give each tensor of `model.state_dict()` a storage of its own over the same memory.

    Parameters are views of one buffer. Accelerate and safetensors take tensors of one storage for tied ones,
    and save only the first.
    """

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name, value in state.items() if module is model else ():
            if (
                name.startswith(prefix)
                and type(value) is torch.Tensor
                and value.dtype is torch.float32
                and value.is_contiguous()
                and value.untyped_storage().nbytes() > value.nbytes
            ):
                state[name] = from_dlpack(value)

    handle: Any = model.register_state_dict_post_hook(hook)
    _hide(model, "_state_dict_hooks", handle.id)


def _hide(model: nn.Module, kind: str, number: int) -> None:
    """Leave a hook out of the state that `copy` and `pickle` read."""
    of_class: Any = type(model)
    # Python looks the method up in the instance first. Modules such as compiled ones redirect setattr.
    state_of: Callable[[], Any] = model.__dict__.get("__getstate__", partial(of_class.__getstate__, model))

    def plain_state() -> Any:
        state = state_of()
        if not isinstance(state, dict):
            return state
        plain = {**cast("dict[str, Any]", state)}
        plain.pop("__getstate__", None)
        hooks: dict[int, Any] = plain.get(kind, {})
        plain[kind] = OrderedDict((key, each) for key, each in hooks.items() if key != number)
        return plain

    model.__dict__["__getstate__"] = plain_state
