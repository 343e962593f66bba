"""The optimizer of a script: torch's in all that schedulers and loops see; the server takes its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class JobOptimizer(torch.optim.Optimizer):
    """Shares its parameter groups with the optimizer that it was made of, so that either may have a
    scheduler. What an optimizer remembers, such as momentum, is the server's."""

    # GradScaler then leaves unscaling, and steps that must not be taken, to `step`.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[float, bool], None]) -> None:
        """step: is given by how much gradients are too large, and whether they have overflown."""
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._of = optimizer
        self._step_of_job = step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Push the gradients, and wait for the parameters that come of everybody's.

        Raises:
            ScriptError: outside of `job.batches`, or gradients that have been unusable for many steps.
            Refused, UnreachableError: the server has ended the membership, or is gone.
        """
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        scale = 1.0 if self.grad_scale is None else float(self.grad_scale)
        overflow = self.found_inf is not None and bool(self.found_inf)
        self._step_of_job(scale, overflow)
        any_optimizer: Any = self._of
        any_optimizer._opt_called = True  # a scheduler of the script's own optimizer asks for it
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, but never in place: a gradient may still be on its way."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer that this one was made of."""
        return self._of.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over rates and other options of groups."""
        self._of.load_state_dict(state_dict)
        self.param_groups = self._of.param_groups
