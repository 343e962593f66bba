"""A hook after the forward pass of a script's model that copies of the model do not inherit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn


def after_forward(model: nn.Module, passed: Callable[[], None]) -> None:
    """Call `passed` after each forward pass of `model`, but not of its copies.

    A script may copy or pickle its model at any time. A copy's forward pass is not the job's, and a process
    that loads the file need not have Gradwire. The model's state as `copy` and `pickle` read it is therefore
    without the hook. A class that defines `__reduce__` itself, as torch.fx.GraphModule does, can be
    deep-copied but not pickled.
    """

    def hook(module: nn.Module, *_: object) -> None:
        if module is model:  # a class may copy itself by other means, with the hook
            passed()

    # torch.compile would trace the hook of a module that it compiles.
    untraced: Any = torch.compiler.disable(hook)
    number: int = model.register_forward_hook(untraced).id

    def plain_state() -> Any:
        of_class: Any = type(model)
        state = of_class.__getstate__(model)
        if not isinstance(state, dict):
            return state
        plain = {**cast("dict[str, Any]", state)}
        plain.pop("__getstate__", None)
        hooks: dict[int, Any] = plain.get("_forward_hooks", {})
        plain["_forward_hooks"] = OrderedDict((key, each) for key, each in hooks.items() if key != number)
        return plain

    # Python looks the method up in the instance first. Modules such as compiled ones redirect setattr.
    model.__dict__["__getstate__"] = plain_state
