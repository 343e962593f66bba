"""Muon for matrices and AdamW for the rest as one optimizer of torch, for scripts: `gradwire.optim.muon`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .matrices import Declared
from .optimizer import optimizer_spec, parse_optimizer


class MuonWithAdamW(torch.optim.Optimizer):
    """Steps matrices by Muon and other parameters by AdamW, to the bits of the workers of a task.

    Each group has its optimizer with all options as a spec, under the key `optimizer`, and a rate of its own
    under `lr`, which schedulers set.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Declared], lr: float) -> None:
        """Take the groups of all trainable parameters. lr: that of groups that have none of their own."""
        parameters = dict(model.named_parameters())
        super().__init__(
            [
                {
                    "params": [parameters[name] for name in each.names],
                    "lr": lr if each.learning_rate is None else each.learning_rate,
                    "optimizer": optimizer_spec(each.options),
                }
                for each in groups
            ],
            {"lr": lr},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients in `grad`, which `closure` computes; return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            options = parse_optimizer(group["optimizer"])
            stepped = [each for each in group["params"] if each.grad is not None]
            for each in stepped:
                if not self.state[each]:
                    self.state[each] = options.memory(each)
            if stepped:
                memory = {
                    name: [self.state[each][name] for each in stepped] for name in self.state[stepped[0]]
                }
                options.step(stepped, [each.grad for each in stepped], memory, group["lr"])
        return loss
