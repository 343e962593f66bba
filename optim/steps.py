"""Torch's optimizers: for each, its options, its state of a parameter, and its step.

Muon's step is computed here: torch has it from release 2.9 on only, and always computes it in bfloat16, which
takes forty times as long on CPUs without instructions for it. Other steps use torch's functional interface,
because creating a `torch.optim.Optimizer` imports all of torch.compile: more than a second of CPU at the
start of every daemon. Torch itself is imported late, too.

Every options class has these members:

    undoes_weights:  True if scaling all gradients by a constant leaves the step unchanged
    has_momentum:    True if a step also moves along earlier gradients
    leaves_zeros:    True if a step changes no element whose gradient is 0
    memory, step:    the initial state of a parameter, and one step of several parameters
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

if TYPE_CHECKING:
    import torch

    Tensors = list[torch.Tensor]
    # State of one parameter by torch's name, such as "exp_avg"; None until the first step creates a tensor.
    Memory = dict[str, torch.Tensor | None]
    # State of several parameters: by torch's name, a tensor for each.
    Memories = dict[str, list[torch.Tensor | None]]


COUNT = "step"  # torch's name for the number of steps taken


def check_fraction(name: str, value: float) -> None:
    """Raise ValueError that begins with `name` unless `value` is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected at least 0 and below 1, got {value:g}")


def check_not_negative(name: str, value: float) -> None:
    """Raise ValueError that begins with `name` unless `value` is finite and at least 0."""
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd:
    """Options of torch's SGD.

    Attributes:
        momentum: factor of the momentum buffer, from 0 to below 1; 0 for no momentum.
        weight_decay: multiple of the parameter that is added to its gradient.
        undoes_weights: False: a scaled gradient makes a scaled step.
    """

    undoes_weights: ClassVar[bool] = False
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_fraction("momentum", self.momentum)
        check_not_negative("weight_decay", self.weight_decay)
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: expected a momentum above 0, got 0")

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    @property
    def leaves_zeros(self) -> bool:
        return not self.momentum and not self.weight_decay

    def memory(self, parameter: torch.Tensor) -> Memory:
        """Return the initial state of `parameter`: a momentum buffer that does not exist yet, or nothing."""
        # None, as in torch: the first gradient becomes the buffer instead of being added to zeros.
        return {"momentum_buffer": None} if self.momentum else {}

    def step(self, parameters: Tensors, gradients: Tensors, memory: Memories, learning_rate: float) -> None:
        """Step `parameters` in place with torch's SGD, and their state in `memory`, by torch's names."""
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
    """Options of torch's Adam, which adds weight decay to the gradient.

    Attributes:
        beta1, beta2: decay of the averages of gradients and of their squares, from 0 to below 1.
        eps: term added to the denominator.
        weight_decay: multiple of the parameter that is added to its gradient.
        undoes_weights: True: scaling all gradients by a constant leaves the step unchanged.
        leaves_zeros: False: an element whose gradient is 0 still moves.
    """

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
        """True if a step also moves along earlier gradients."""
        return self.beta1 > 0

    def memory(self, parameter: torch.Tensor) -> Memory:
        """Return the initial state of `parameter`: step count 0, and averages of zeros."""
        import torch

        def zeros() -> torch.Tensor:
            return torch.zeros_like(parameter, requires_grad=False)

        return {COUNT: no_steps(), "exp_avg": zeros(), "exp_avg_sq": zeros()}

    def step(self, parameters: Tensors, gradients: Tensors, memory: Memories, learning_rate: float) -> None:
        """Step `parameters` in place with torch's Adam or AdamW, and their state in `memory`, by torch's
        names."""
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
    """Options of torch's AdamW: like Adam, but weight decay is applied to the parameter directly."""

    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad:
    """Options of torch's Adagrad, whose rates fall with the sum of all squared gradients.

    Unlike Adam, without weight decay it does not change elements whose gradient is 0. Updates are then as
    sparse as the pushes that they are computed from.

    Attributes:
        lr_decay: decay of the learning rate per step.
        weight_decay: multiple of the parameter that is added to its gradient.
        initial_accumulator_value: initial sum of squared gradients.
        eps: term added to the denominator.
        undoes_weights: True: scaling all gradients by a constant leaves the step almost unchanged.
        has_momentum: False: a step does not move along earlier gradients.
    """

    undoes_weights: ClassVar[bool] = True  # except for the initial value of the sum
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
        """True if a step changes no element whose gradient is 0."""
        return not self.weight_decay and (self.eps > 0 or self.initial_accumulator_value > 0)

    def memory(self, parameter: torch.Tensor) -> Memory:
        """Return the initial state of `parameter`: step count 0, and a sum filled with the initial value."""
        import torch

        total = torch.full_like(parameter, self.initial_accumulator_value, requires_grad=False)
        return {COUNT: no_steps(), "sum": total}

    def step(self, parameters: Tensors, gradients: Tensors, memory: Memories, learning_rate: float) -> None:
        """Step `parameters` in place with torch's Adagrad, and their state in `memory`, by torch's names."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Muon:
    """Options of Muon, which steps matrices, and of the AdamW that steps all other parameters of a job.

    The step is that of `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw". Muon: Jordan et al., 2024; the
    scaling of its step, by which AdamW's rates suit it: Liu et al., arXiv 2502.16982.

    Attributes:
        momentum: decay of the average of gradients, from 0 to below 1; a step uses Nesterov's form of it.
        weight_decay: share of each parameter of two and more dimensions that a step at rate 1 takes off.
        beta1, beta2, eps: options of AdamW.
        split: number of matrices of equal height that a parameter holds one above the other, such as 3 for
            query, key and value.
        undoes_weights: True: scaling all gradients by a constant leaves the step unchanged.
        has_momentum: True: a step also moves along earlier gradients.
        leaves_zeros: False: an element whose gradient is 0 still moves.
    """

    undoes_weights: ClassVar[bool] = True
    has_momentum: ClassVar[bool] = True
    leaves_zeros: ClassVar[bool] = False
    momentum: float = 0.95
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    split: int = 1

    def __post_init__(self) -> None:
        for name in ("momentum", "beta1", "beta2"):
            check_fraction(name, getattr(self, name))
        for name in ("weight_decay", "eps"):
            check_not_negative(name, getattr(self, name))
        if self.split < 1:
            raise ValueError(f"split: expected at least 1, got {self.split}")

    def memory(self, parameter: torch.Tensor) -> Memory:
        """Return the initial state of `parameter`: an average of zeros."""
        import torch

        return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}

    def step(self, parameters: Tensors, gradients: Tensors, memory: Memories, learning_rate: float) -> None:
        """Step `parameters` in place, and update their state in `memory`.

        The first dimension counts the rows of a matrix, the others together its columns.
        """
        for parameter, gradient, average in zip(
            parameters, gradients, memory["momentum_buffer"], strict=True
        ):
            assert average is not None
            average.lerp_(gradient, 1 - self.momentum)
            update = gradient.lerp(average, self.momentum)
            parameter.mul_(1 - learning_rate * self.weight_decay)
            shape = self.split, parameter.shape[0] // self.split, -1
            for block, its_update in zip(parameter.view(shape), update.reshape(shape), strict=True):
                scale = 0.2 * math.sqrt(max(block.shape))
                block.add_(orthogonal(its_update), alpha=-learning_rate * scale)


def no_steps() -> torch.Tensor:
    """Return the step count of a parameter that has taken no step."""
    import torch

    return torch.tensor(0.0, dtype=torch.float32, device="cpu")


def memory_names(options: OptimizerOptions) -> set[str]:
    """Return torch's names of the state tensors of a parameter, such as "exp_avg"."""
    import torch

    return set(options.memory(torch.empty(0, dtype=torch.float32, device="cpu")))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with its singular values brought near 1, by five Newton-Schulz iterations.

    They run in bfloat16 on a GPU and on a CPU with instructions for it, in float32 elsewhere; the result has
    that dtype. Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", with the
    coefficients given there.
    """
    import torch

    a, b, c = 3.4445, -4.7750, 2.0315
    fast = matrix.is_cuda or (matrix.is_cpu and cpu_has_bfloat16())
    found = matrix.to(torch.bfloat16 if fast else torch.float32)
    wide = matrix.shape[0] <= matrix.shape[1]
    found = found if wide else found.T
    length = cast("torch.Tensor", found.norm())
    found = found / length.clamp(min=1e-7)
    for _ in range(5):
        squared = found @ found.T
        found = torch.addmm(found, torch.addmm(squared, squared, squared, beta=b, alpha=c), found, beta=a)
    return found if wide else found.T


@cache
def cpu_has_bfloat16() -> bool:
    """Return True if torch says that this CPU has x86 instructions for products of bfloat16 matrices. Some
    releases that we admit say nothing."""
    import torch

    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


OptimizerOptions = Sgd | Adam | Adagrad | Muon
OPTIMIZERS: Mapping[str, type[OptimizerOptions]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
    "muon": Muon,
}
