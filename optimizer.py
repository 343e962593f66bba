"""The optimizer, from what the operator typed: `sgd:momentum=0.9,weight_decay=1e-4`.

It is torch's own, so momentum, weight decay and the rest are applied exactly once: on the server, to the
aggregated gradient, or in local mode on each worker, to its own. This module imports torch only when an
optimizer is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .spec import parse_one_of

if TYPE_CHECKING:
    import torch


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected at least 0 and below 1, got {value:g}")


def _check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """undoes_weights, here and below: whether a gradient times a constant makes the same step."""

    undoes_weights: ClassVar[bool] = False
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_fraction("momentum", self.momentum)
        _check_not_negative("weight_decay", self.weight_decay)
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: expected a momentum above 0 with it, got none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Weight decay is added to the gradient."""

    undoes_weights: ClassVar[bool] = True

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_fraction("beta1", self.beta1)
        _check_fraction("beta2", self.beta2)
        _check_not_negative("eps", self.eps)
        _check_not_negative("weight_decay", self.weight_decay)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(Adam):
    """Weight decay is decoupled from the gradient."""

    weight_decay: float = 0.01


OptimizerOptions = Sgd | Adam
OPTIMIZERS: Mapping[str, type[OptimizerOptions]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW}


def parse_optimizer(text: str) -> OptimizerOptions:
    """Raises SpecError, which lists what is known."""
    return parse_one_of("optimizer", text, OPTIMIZERS)


def build_optimizer(
    options: OptimizerOptions, parameters: Sequence[torch.Tensor], learning_rate: float
) -> torch.optim.Optimizer:
    import torch

    if isinstance(options, Sgd):
        return torch.optim.SGD(parameters, lr=learning_rate, **dataclasses.asdict(options))
    make = torch.optim.AdamW if isinstance(options, AdamW) else torch.optim.Adam
    return make(
        parameters,
        lr=learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[tuple[str, int, torch.Tensor]]:
    """What it will remember of its parameters, as it is before the first step.

    Returns (what, number of the parameter, tensor). The optimizer keeps it in these tensors from now on, so
    that it can be copied and replaced.
    """
    import torch

    found: list[tuple[str, int, torch.Tensor]] = []
    place = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "betas" in group:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            elif group["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            found += [(what, place, tensor) for what, tensor in state.items()]
            place += 1
    return found
