"""The optimizer of a script: torch's in all that schedulers and loops see; the server takes its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...optim.optimizer import optimizer_spec
from ...optim.steps import Adagrad, Adam, AdamW, OptimizerOptions, Sgd
from ...proto import messages as m
from ..session.groups import ParameterGroups
from .script_state import copied
from .terms import ScriptError

# Options of torch's that the server has not, with the only value that means nothing.
_WITHOUT = {"dampening": 0, "maximize": False, "amsgrad": False, "differentiable": False}

# Options of a group that the server needs, besides lr. A group may have others: torch fills in options that
# are newer than a file, and schedulers add keys of their own, such as initial_lr.
_NEEDED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum", "weight_decay", "nesterov"),
    torch.optim.Adam: ("betas", "eps", "weight_decay"),
    torch.optim.AdamW: ("betas", "eps", "weight_decay"),
    torch.optim.Adagrad: ("lr_decay", "weight_decay", "eps"),
}

WAY_OUT = (
    "with job.attach(..., steps='local') each worker takes its steps itself, and the server averages them"
)
_FIXED = (
    "optimizer.add_param_group: the groups of a job are fixed by job.attach; give the optimizer all "
    "parameters before that, and freeze those whose turn comes later by requires_grad_(False)"
)


class _StateOfServer(dict[torch.Tensor, Any]):
    """The attribute `state` of an optimizer whose steps the server takes: empty, and refuses to be asked."""

    def __missing__(self, parameter: torch.Tensor) -> Any:
        raise ScriptError(
            "optimizer.state: the server has the state of this optimizer; call optimizer.state_dict(), which "
            "downloads it"
        )


class JobOptimizer(torch.optim.Optimizer):
    """Shares its parameter groups with the optimizer that it was made of, so that either may have a
    scheduler. What an optimizer remembers, such as momentum, is the server's."""

    # GradScaler then leaves unscaling, and steps that must not be taken, to `step`, for the time of which it
    # sets `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[float, bool, Callable[[], Any] | None], None],
        remembered: Callable[[], Mapping[torch.Tensor, Mapping[str, torch.Tensor]]] = dict,
        *,
        here: bool = False,
    ) -> None:
        """
        Args:
            step: is told by what factor gradients are too large, whether they have overflown, and what
                computes them, if the script says that at the step.
            remembered: gives what the server's optimizer remembers, by parameter; called after `begin`.
            here: whether the steps are this worker's own, with whatever options.
        """
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._of = optimizer
        self.state: Any = optimizer.state
        self._options: list[OptimizerOptions] = []
        self._step_of_job, self._remembered = step, remembered
        self._here, self._begun = here, False
        self._sizes = self._of_groups()

    def begin(self) -> None:
        """The job begins: options of groups are fixed from now on, and the state is the server's."""
        if not self._here:
            self._options = [_options(self._of, *each) for each in enumerate(self.param_groups)]
            self.state = _StateOfServer()
        self._begun = True

    @property
    def of(self) -> torch.optim.Optimizer:
        """The optimizer that it was made of."""
        return self._of

    @property
    def loaded(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        """The optimizer's state when the job began, by parameter: as the script has loaded it, or as steps
        before `job.attach` have left it."""
        return self._of.state

    def _of_groups(self) -> list[int]:
        """Return the number of parameters in each group of the script's own optimizer."""
        return [len(group["params"]) for group in self._of.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ScriptError, but while this optimizer is made."""
        if hasattr(self, "_sizes"):
            raise ScriptError(_FIXED)
        super().add_param_group(param_group)

    def rates(self) -> tuple[float, ...]:
        """The learning rates by group, as a scheduler has left them."""
        return tuple(float(group["lr"]) for group in self.param_groups)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, and wait for the parameters that come of everybody's.

        Raises:
            ScriptError: outside of `job.batches`; gradients that have been unusable for many steps; other
                parameter groups, or other options of one, than at `job.attach`.
            Refused, UnreachableError: the server has ended the membership, or is gone.
        """
        if self._of_groups() != self._sizes:
            raise ScriptError(_FIXED)
        found: list[Any] = []

        def evaluate() -> Any:
            assert closure is not None
            with torch.enable_grad():
                found.append(closure())
            return found[-1]

        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scale = 1.0 if grad_scale is None else float(grad_scale)
        self._check_options()
        overflow = found_inf is not None and bool(found_inf)
        self._step_of_job(scale, overflow, None if closure is None else evaluate)
        any_optimizer: Any = self._of
        any_optimizer._opt_called = True  # a scheduler of the script's own optimizer asks for it
        return found[0] if found else None

    def step_here(self, evaluate: Callable[[], Any] | None) -> None:
        """Take a step of the optimizer that this one was made of."""
        any_optimizer: Any = self._of
        if evaluate is None:
            any_optimizer.step()
        else:
            any_optimizer.step(evaluate)

    def _check_options(self) -> None:
        """Raises ScriptError for a group with other options than when it was given to the server."""
        for number, (group, given) in enumerate(zip(self.param_groups, self._options, strict=False)):
            found = _options(self._of, number, group)
            if found != given:
                raise ScriptError(
                    f"{type(self._of).__name__}, group {number}: the script has changed "
                    f"{optimizer_spec(given)} to {optimizer_spec(found)}; only lr may change in a job: give "
                    "a scheduler that changes momentum, such as OneCycleLR, cycle_momentum=False"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like torch's, but never in place: a gradient may still be in flight."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def copy_state(self) -> dict[Any, Any]:
        """Return a copy, on the host, of the state of the optimizer that takes this worker's own steps."""
        state: dict[Any, Any] = copied(self._of.state_dict()["state"])
        return state

    def restore_state(self, state: Mapping[Any, Any]) -> None:
        """Replace the optimizer's state by one from `copy_state`; rates and options stay the script's."""
        groups = self._of.state_dict()["param_groups"]
        self.load_state_dict({"state": dict(state), "param_groups": groups})

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's own optimizer would: the state of each parameter that was ever stepped, and the
        options of groups. Where the server steps, the state is the server's, and is downloaded: as many bytes
        as the tensors have.

        Raises:
            ScriptError: this script has left the job.
            Refused, UnreachableError: the server has ended the membership, or is gone.
        """
        found: dict[str, Any] = self._of.state_dict()
        if self._here or not self._begun:
            return found
        remembered = self._remembered()
        parameters = [each for group in self._of.param_groups for each in group["params"]]
        state: dict[int, Any] = {}
        for place, parameter in enumerate(parameters):
            if parameter in remembered:
                state[place] = dict(remembered[parameter])
            elif isinstance(self._of, torch.optim.Adagrad):  # it has a state before its first step
                state[place] = found["state"][place]
        return {**found, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict`, with which the job begins: before the first batch. Of the workers that
        begin a job the first one's counts, as with parameters.

        Raises:
            ScriptError: the job has begun with another state; a state_dict of another kind of optimizer.
        """
        if self._begun and not self._here and state_dict["state"]:
            raise ScriptError(
                "optimizer.load_state_dict: the job has begun, and the server's optimizer continues from its "
                "own state; load before the first batch of a new job, on a new gc-server"
            )
        needed = {"lr", *_NEEDED[type(self._of)]} if type(self._of) in _NEEDED else set[str]()
        for number, group in enumerate(state_dict["param_groups"]):
            missing = sorted(needed - group.keys())
            if missing:
                raise ScriptError(
                    f"optimizer.load_state_dict: group {number} has no {', '.join(missing)}: the state_dict "
                    f"is of another kind of optimizer than {type(self._of).__name__}"
                )
        self._of.load_state_dict(state_dict)
        self.param_groups = self._of.param_groups
        if self._here or not self._begun:
            self.state = self._of.state


def parameter_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> ParameterGroups:
    """The groups of an optimizer, as the server steps them. Learning rates go with each push instead.

    Raises ScriptError for what the server cannot run as torch would.
    """
    groups = tuple(
        m.Group(optimizer=optimizer_spec(_options(optimizer, number, group)))
        for number, group in enumerate(optimizer.param_groups)
    )
    return ParameterGroups(groups=groups, number_of=_numbers(optimizer, model))


def averaging(optimizer: torch.optim.Optimizer, model: nn.Module) -> ParameterGroups:
    """One group, from which the server takes off what comes, as it comes, with a learning rate of 1.

    Frozen parameters that the optimizer has are in it, too: the script may unfreeze them.

    Raises ScriptError for parameters that the optimizer lacks, or the model.
    """
    number_of = dict.fromkeys(_numbers(optimizer, model), 0)
    return ParameterGroups(groups=(m.Group(optimizer=optimizer_spec(Sgd())),), number_of=number_of)


def _numbers(optimizer: torch.optim.Optimizer, model: nn.Module) -> Mapping[str, int]:
    """The number of its group, by name of the parameter. Raises ScriptError."""
    number_of = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    group_of: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        number = number_of.pop(id(parameter), None)
        if number is not None:
            group_of[name] = number
        elif parameter.requires_grad:
            raise ScriptError(
                f"parameter {name!r} requires a gradient, and the optimizer has not got it: give it to the "
                "optimizer, or call requires_grad_(False) on it"
            )
    if number_of:
        raise ScriptError(
            f"the optimizer has {len(number_of)} parameters that the model has not: make it of "
            "model.parameters()"
        )
    return group_of


def _options(optimizer: torch.optim.Optimizer, number: int, group: dict[str, Any]) -> OptimizerOptions:
    """The hyperparameters of one group."""
    kind, values = type(optimizer), {key: group[key] for key in group if key not in ("params", "lr")}
    for key, nothing in _WITHOUT.items():
        if values.pop(key, nothing) != nothing:
            raise ScriptError(
                f"{kind.__name__}, group {number}: {key}={group[key]!r}: the server has no {key}; {WAY_OUT}"
            )
    try:
        needed = {key: values[key] for key in _NEEDED.get(kind, ())}
        if kind is torch.optim.SGD:
            return Sgd(**needed)
        if kind in (torch.optim.Adam, torch.optim.AdamW):
            decoupled = values.get("decoupled_weight_decay", kind is torch.optim.AdamW)
            beta1, beta2 = needed.pop("betas")
            return (AdamW if decoupled else Adam)(beta1=beta1, beta2=beta2, **needed)
        if kind is torch.optim.Adagrad:
            first = optimizer.defaults["initial_accumulator_value"]  # torch takes no notice of a group's own
            return Adagrad(initial_accumulator_value=first, **needed)
    except ValueError as error:
        raise ScriptError(f"{kind.__name__}, group {number}: {error}") from None
    raise ScriptError(
        f"{kind.__module__}.{kind.__name__}: the server steps SGD, Adam, AdamW and Adagrad of torch.optim; "
        f"{WAY_OUT}"
    )
