"""The optimizer, from what the operator typed: `sgd:momentum=0.9,weight_decay=1e-4`.

Its steps are torch's own, so momentum, weight decay and the rest are applied exactly once: on the server, to
the aggregated gradient, or in local mode on each worker, to its own. The steps are taken through torch's
functional interface, because making a `torch.optim.Optimizer` imports the whole of torch.compile: more than a
second of CPU at the start of every daemon. This module imports torch only when an optimizer is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .spec import parse_one_of

if TYPE_CHECKING:
    import torch

    Tensors = list[torch.Tensor]
    # What is remembered, by torch's name for it: a tensor for each parameter, None before there is one.
    Memory = dict[str, list[torch.Tensor | None]]


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected at least 0 and below 1, got {value:g}")


def _check_not_negative(name: str, value: float) -> None:
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
        _check_fraction("momentum", self.momentum)
        _check_not_negative("weight_decay", self.weight_decay)
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: expected a momentum above 0 with it, got none")

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    @property
    def leaves_zeros(self) -> bool:
        return not self.momentum and not self.weight_decay

    def memory(self, parameters: Sequence[torch.Tensor]) -> Memory:
        # As torch has it: the first gradient becomes the buffer, instead of being added to zeros.
        return {"momentum_buffer": [None] * len(parameters)} if self.momentum else {}

    def step(self, parameters: Tensors, gradients: Tensors, memory: Memory, learning_rate: float) -> None:
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
        _check_fraction("beta1", self.beta1)
        _check_fraction("beta2", self.beta2)
        _check_not_negative("eps", self.eps)
        _check_not_negative("weight_decay", self.weight_decay)

    @property
    def has_momentum(self) -> bool:
        return self.beta1 > 0

    def memory(self, parameters: Sequence[torch.Tensor]) -> Memory:
        import torch

        def zeros() -> list[torch.Tensor | None]:
            return [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]

        return {"step": [torch.tensor(0.0) for _ in parameters], "exp_avg": zeros(), "exp_avg_sq": zeros()}

    def step(self, parameters: Tensors, gradients: Tensors, memory: Memory, learning_rate: float) -> None:
        from torch.optim.adam import adam
        from torch.optim.adamw import adamw

        step: Any = adamw if isinstance(self, AdamW) else adam
        step(
            parameters,
            gradients,
            memory["exp_avg"],
            memory["exp_avg_sq"],
            [],
            memory["step"],
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


OptimizerOptions = Sgd | Adam
OPTIMIZERS: Mapping[str, type[OptimizerOptions]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW}


def parse_optimizer(text: str) -> OptimizerOptions:
    """Raises SpecError, which lists what is known."""
    return parse_one_of("optimizer", text, OPTIMIZERS)


class Optimizer:
    """Takes torch's steps, bit for bit, over parameters whose gradient is in `grad`.

    Attributes:
        learning_rate: of the next step.
        leaves_zeros: as the options say.
    """

    def __init__(
        self, options: OptimizerOptions, parameters: Sequence[torch.Tensor], learning_rate: float
    ) -> None:
        self.learning_rate = learning_rate
        self.leaves_zeros = options.leaves_zeros
        self._options = options
        self._parameters = list(parameters)
        self._memory = options.memory(self._parameters)

    def step(self, only: int | None = None) -> None:
        """Change the parameters in place; one without a gradient stays as it is. only: number of one."""
        import torch

        among = range(len(self._parameters)) if only is None else (only,)
        places = [place for place in among if self._parameters[place].grad is not None]
        if not places:
            return
        parameters = [self._parameters[place] for place in places]
        gradients = [each.grad for each in parameters if each.grad is not None]
        memory = {what: [tensors[place] for place in places] for what, tensors in self._memory.items()}
        with torch.no_grad():
            self._options.step(parameters, gradients, memory, self.learning_rate)
        for what, tensors in memory.items():
            for place, tensor in zip(places, tensors, strict=True):
                self._memory[what][place] = tensor

    def state(self) -> list[tuple[str, int, torch.Tensor]]:
        """What it remembers of its parameters.

        Returns (what, number of the parameter, tensor). The optimizer keeps it in these tensors from now on,
        so that it can be copied and replaced.
        """
        import torch

        state: list[tuple[str, int, torch.Tensor]] = []
        for place, parameter in enumerate(self._parameters):
            for what, tensors in self._memory.items():
                tensor = tensors[place]
                if tensor is None:
                    tensor = tensors[place] = torch.zeros_like(parameter, requires_grad=False)
                state.append((what, place, tensor))
        return state
