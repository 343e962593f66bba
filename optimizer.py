"""The optimizer, from what the operator typed: `sgd:momentum=0.9,weight_decay=1e-4`.

Its steps are torch's own, so momentum, weight decay and the rest are applied exactly once: on the server, to
the aggregated gradient, or in local mode on each worker, to its own. The steps are taken through torch's
functional interface, because making a `torch.optim.Optimizer` imports the whole of torch.compile: more than a
second of CPU at the start of every daemon. This module imports torch only when an optimizer is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    """undoes_weights, here and below: whether a gradient times a constant makes the same step. has_momentum:
    whether a step also goes where earlier gradients pointed."""

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

    @property
    def has_momentum(self) -> bool:
        return self.beta1 > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(Adam):
    """Weight decay is decoupled from the gradient."""

    weight_decay: float = 0.01


OptimizerOptions = Sgd | Adam
OPTIMIZERS: Mapping[str, type[OptimizerOptions]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW}


def parse_optimizer(text: str) -> OptimizerOptions:
    """Raises SpecError, which lists what is known."""
    return parse_one_of("optimizer", text, OPTIMIZERS)


class Optimizer(ABC):
    """Takes torch's steps, bit for bit, over parameters whose gradient is in `grad`.

    Attributes:
        learning_rate: of the next step.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._parameters = list(parameters)

    def step(self) -> None:
        """Change the parameters in place; one without a gradient stays as it is."""
        import torch

        places = [place for place, each in enumerate(self._parameters) if each.grad is not None]
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        if places:
            with torch.no_grad():
                self._step(places, [self._parameters[place] for place in places], gradients)

    @abstractmethod
    def _step(
        self, places: Sequence[int], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        """places: of the parameters among all."""

    @abstractmethod
    def state(self) -> list[tuple[str, int, torch.Tensor]]:
        """What it remembers of its parameters.

        Returns (what, number of the parameter, tensor). The optimizer keeps it in these tensors from now on,
        so that it can be copied and replaced.
        """


class _SgdSteps(Optimizer):
    def __init__(self, options: Sgd, parameters: Sequence[torch.Tensor], learning_rate: float) -> None:
        super().__init__(parameters, learning_rate)
        self._options = options
        # As torch has it: the first gradient becomes the buffer, instead of being added to zeros.
        self._buffers: list[torch.Tensor | None] = [None] * len(self._parameters)

    def _step(
        self, places: Sequence[int], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        from torch.optim.sgd import sgd

        buffers = [self._buffers[place] for place in places]
        sgd(
            parameters,
            gradients,
            buffers,
            has_sparse_grad=any(gradient.is_sparse for gradient in gradients),
            lr=self.learning_rate,
            momentum=self._options.momentum,
            weight_decay=self._options.weight_decay,
            nesterov=self._options.nesterov,
            dampening=0.0,
            maximize=False,
        )
        if self._options.momentum:
            for place, buffer in zip(places, buffers, strict=True):
                self._buffers[place] = buffer

    def state(self) -> list[tuple[str, int, torch.Tensor]]:
        import torch

        if not self._options.momentum:
            return []
        buffers = [
            torch.zeros_like(parameter, requires_grad=False) if buffer is None else buffer
            for parameter, buffer in zip(self._parameters, self._buffers, strict=True)
        ]
        self._buffers = [*buffers]
        return [("momentum_buffer", place, buffer) for place, buffer in enumerate(buffers)]


class _AdamSteps(Optimizer):
    def __init__(self, options: Adam, parameters: Sequence[torch.Tensor], learning_rate: float) -> None:
        import torch

        super().__init__(parameters, learning_rate)
        self._options = options
        self._steps = [torch.tensor(0.0) for _ in self._parameters]
        self._means = [torch.zeros_like(parameter, requires_grad=False) for parameter in self._parameters]
        self._squares = [torch.zeros_like(parameter, requires_grad=False) for parameter in self._parameters]

    def _step(
        self, places: Sequence[int], parameters: list[torch.Tensor], gradients: list[torch.Tensor]
    ) -> None:
        from torch.optim.adam import adam
        from torch.optim.adamw import adamw

        (adamw if isinstance(self._options, AdamW) else adam)(
            parameters,
            gradients,
            [self._means[place] for place in places],
            [self._squares[place] for place in places],
            [],
            [self._steps[place] for place in places],
            amsgrad=False,
            beta1=self._options.beta1,
            beta2=self._options.beta2,
            lr=self.learning_rate,
            weight_decay=self._options.weight_decay,
            eps=self._options.eps,
            maximize=False,
        )

    def state(self) -> list[tuple[str, int, torch.Tensor]]:
        return [
            each
            for place in range(len(self._parameters))
            for each in (
                ("step", place, self._steps[place]),
                ("exp_avg", place, self._means[place]),
                ("exp_avg_sq", place, self._squares[place]),
            )
        ]


def build_optimizer(
    options: OptimizerOptions, parameters: Sequence[torch.Tensor], learning_rate: float
) -> Optimizer:
    if isinstance(options, Sgd):
        return _SgdSteps(options, parameters, learning_rate)
    return _AdamSteps(options, parameters, learning_rate)
