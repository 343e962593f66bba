"""Torch's optimizers, as the options of each, what it remembers of a parameter, and its step.

The steps go through torch's functional interface, because making a `torch.optim.Optimizer` imports the whole
of torch.compile: more than a second of CPU at the start of every daemon. Torch itself is imported late, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    Tensors = list[torch.Tensor]
    # What is remembered of a parameter, by torch's name for it; None before there is anything.
    Memory = dict[str, torch.Tensor | None]
    # Of several parameters.
    Memories = dict[str, list[torch.Tensor | None]]


COUNT = "step"  # torch's name of how many steps were taken


def check_fraction(name: str, value: float) -> None:
    """Raises ValueError."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected at least 0 and below 1, got {value:g}")


def check_not_negative(name: str, value: float) -> None:
    """Raises ValueError."""
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """undoes_weights, here and below: whether a gradient times a constant makes the same step. has_momentum:
    whether a step also goes where earlier gradients pointed. leaves_zeros: whether it leaves elements alone
    whose gradient is 0."""

    undoes_weights: ClassVar[bool] = False
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_fraction("momentum", self.momentum)
        check_not_negative("weight_decay", self.weight_decay)
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: expected a momentum above 0 with it, got none")

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    @property
    def leaves_zeros(self) -> bool:
        return not self.momentum and not self.weight_decay

    def memory(self, parameter: torch.Tensor) -> Memory:
        # As torch has it: the first gradient becomes the buffer, instead of being added to zeros.
        return {"momentum_buffer": None} if self.momentum else {}

    def step(self, parameters: Tensors, gradients: Tensors, memory: Memories, learning_rate: float) -> None:
        from torch.optim.sgd import sgd

        sgd(
            parameters,
            gradients,
            memory.get("momentum_buffer", [None] * len(parameters)),
            has_sparse_grad=any(gradient.is_sparse for gradient in gradients),
            lr=learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            dampening=0.0,
            maximize=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Weight decay is added to the gradient."""

    undoes_weights: ClassVar[bool] = True
    leaves_zeros: ClassVar[bool] = False

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("beta1", self.beta1)
        check_fraction("beta2", self.beta2)
        check_not_negative("eps", self.eps)
        check_not_negative("weight_decay", self.weight_decay)

    @property
    def has_momentum(self) -> bool:
        return self.beta1 > 0

    def memory(self, parameter: torch.Tensor) -> Memory:
        import torch

        def zeros() -> torch.Tensor:
            return torch.zeros_like(parameter, requires_grad=False)

        return {COUNT: torch.tensor(0.0), "exp_avg": zeros(), "exp_avg_sq": zeros()}

    def step(self, parameters: Tensors, gradients: Tensors, memory: Memories, learning_rate: float) -> None:
        from torch.optim.adam import adam
        from torch.optim.adamw import adamw

        step: Any = adamw if isinstance(self, AdamW) else adam
        step(
            parameters,
            gradients,
            memory["exp_avg"],
            memory["exp_avg_sq"],
            [],
            memory[COUNT],
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=learning_rate,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(Adam):
    """Weight decay is decoupled from the gradient."""

    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad:
    """Adaptive rates that fall with the sum of all squared gradients. Unlike Adam, it leaves elements
    without a gradient alone, so updates are as sparse as the pushes that they are made of.
    """

    undoes_weights: ClassVar[bool] = True  # but for what the sum begins with
    has_momentum: ClassVar[bool] = False
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_not_negative("lr_decay", self.lr_decay)
        check_not_negative("weight_decay", self.weight_decay)
        check_not_negative("initial_accumulator_value", self.initial_accumulator_value)
        check_not_negative("eps", self.eps)

    @property
    def leaves_zeros(self) -> bool:
        return not self.weight_decay and (self.eps > 0 or self.initial_accumulator_value > 0)

    def memory(self, parameter: torch.Tensor) -> Memory:
        import torch

        total = torch.full_like(parameter, self.initial_accumulator_value, requires_grad=False)
        return {COUNT: torch.tensor(0.0), "sum": total}

    def step(self, parameters: Tensors, gradients: Tensors, memory: Memories, learning_rate: float) -> None:
        from torch.optim.adagrad import adagrad

        step: Any = adagrad
        step(
            parameters,
            gradients,
            memory["sum"],
            memory[COUNT],
            lr=learning_rate,
            lr_decay=self.lr_decay,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )


OptimizerOptions = Sgd | Adam | Adagrad
OPTIMIZERS: Mapping[str, type[OptimizerOptions]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
}
