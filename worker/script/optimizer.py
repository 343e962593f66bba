"""The optimizer that a script sees: torch's own for schedulers and loops, while the server takes its
steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks  # pyright: ignore[reportPrivateUsage]

from ...optim.optimizer import optimizer_spec
from ...optim.steps import Adagrad, Adam, AdamW, OptimizerOptions, Sgd
from ...proto import messages as m
from ..session.groups import ParameterGroups
from .script_state import copied
from .terms import ScriptError

log = logging.getLogger("gradwire.worker")

# Options of torch's optimizers that the server does not have, with the only value that it accepts.
_WITHOUT = {"dampening": 0, "maximize": False, "amsgrad": False, "differentiable": False}

# Options of a group that the server needs, besides lr. A group may have more: torch adds options that are
# newer than a file, and schedulers add keys of their own, such as initial_lr.
_NEEDED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum", "weight_decay", "nesterov"),
    torch.optim.Adam: ("betas", "eps", "weight_decay"),
    torch.optim.AdamW: ("betas", "eps", "weight_decay"),
    torch.optim.Adagrad: ("lr_decay", "weight_decay", "eps"),
}

# Attributes in which torch's optimizers keep their hooks.
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

# Optimizers with a state that other workers' changes do not reach, and its meaning for a job.
_REMEMBERS = {
    "ASGD": "its averages ('ax') are of this worker's parameters within its local steps, not of the job's",
    "Rprop": "it sets its rates by the signs of this worker's gradients, which differ from batch to batch "
    "and from worker to worker; it is meant for batches of the whole data set",
}

REMEDY = (
    "with job.attach(..., steps='local'), or --mode local or --preset low-communication at the server, each "
    "worker takes its steps itself, and the server averages them"
)
_FIXED = (
    "optimizer.add_param_group: the groups of a job are fixed by job.attach; give the optimizer all "
    "parameters before job.attach, and freeze those to be trained later by requires_grad_(False)"
)


class _StateOfServer(dict[torch.Tensor, Any]):
    """The attribute `state` of an optimizer whose steps the server takes: empty, and raises ScriptError when
    read."""

    def __missing__(self, parameter: torch.Tensor) -> Any:
        raise ScriptError(
            "optimizer.state: the server has the state of this optimizer; call optimizer.state_dict(), which "
            "downloads it"
        )


class JobOptimizer(torch.optim.Optimizer):
    """The optimizer that `Job.attach` returns: its `step` pushes the gradients instead of changing the
    parameters.

    It shares its parameter groups with the script's own optimizer, so that either may have a scheduler, and
    its hooks. If the server takes the steps, hooks of `step` run before this worker's gradients are pushed,
    and after the new parameters have arrived. Its state, such as momentum, is the server's.
    """

    # With this attribute GradScaler leaves two things to `step`: unscaling, and skipping a step. While `step`
    # runs, it sets `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[float, bool, Callable[[], Any] | None], None],
        download_state: Callable[[], Mapping[torch.Tensor, Mapping[str, torch.Tensor]]] = dict,
        *,
        here: bool = False,
    ) -> None:
        """
        Args:
            step: pushes a step. Its arguments: the factor by which gradients are too large, True if they are
                not finite, and the closure that computes them, or None.
            download_state: returns the state of the server's optimizer by parameter, after `begin`.
            here: True if this worker takes the steps itself; any options are allowed then.
        """
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._wrapped = optimizer
        # A hook runs once, whichever of the two optimizers it was registered on, and whenever.
        for kind in _HOOKS:
            setattr(self, kind, getattr(optimizer, kind))
        self.state: Any = optimizer.state
        self._options: list[OptimizerOptions] = []
        self._push, self._download_state = step, download_state
        self._here, self._begun = here, False
        self._sizes = self._group_sizes()

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for a method that only the script's own kind of optimizer has."""
        raise AttributeError(
            f"the optimizer of job.attach has no {name}: call it on the optimizer that was passed to job."
            "attach"
        )

    def begin(self) -> None:
        """Freeze the options of the groups, because the job begins. The state is the server's from now on."""
        if not self._here:
            self._options = [_options(self._wrapped, *each) for each in enumerate(self.param_groups)]
            self.state = _StateOfServer()
        self._begun = True

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        return self._wrapped

    @property
    def initial_state(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        """State of the script's own optimizer by parameter, loaded or left by its steps before the job."""
        return self._wrapped.state

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._wrapped.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ScriptError, because the groups of a job are fixed; only the constructor may add groups."""
        if hasattr(self, "_sizes"):
            raise ScriptError(_FIXED)
        super().add_param_group(param_group)

    def rates(self) -> tuple[float, ...]:
        """Return the present learning rate of each group, as a scheduler has set it."""
        return tuple(float(group["lr"]) for group in self.param_groups)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, and wait for the new parameters. Return the loss of `closure`, if it is given
        and was called.

        Args:
            closure: function that computes gradients and returns the loss; None if they were computed before.

        Raises:
            ScriptError: outside of the loop over batches, after too many steps in a row without finite
                gradients, or when groups or their options have changed since `job.attach`.
            Refused: the server has ended the membership, or refused a push.
            UnreachableError: no server was reached for `give_up_seconds`.
        """
        if self._group_sizes() != self._sizes:
            raise ScriptError(_FIXED)
        found: list[Any] = []
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scale = 1.0 if grad_scale is None else float(grad_scale)
        self._check_options()
        overflow = found_inf is not None and bool(found_inf)

        def push(_: JobOptimizer, closure: Callable[[], Any] | None = None) -> None:
            def evaluate() -> Any:
                assert closure is not None
                with torch.enable_grad():
                    found.append(closure())
                return found[-1]

            self._push(scale, overflow, None if closure is None else evaluate)

        if self._here or overflow:  # the script's own optimizer runs its hooks itself
            push(self, closure)
        else:
            if scale != 1.0 and (self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks):
                self._unscale(scale)
                scale = 1.0
            arguments = () if closure is None else (closure,)
            torch.optim.Optimizer.profile_hook_step(push)(self, *arguments)
        any_optimizer: Any = self._wrapped
        any_optimizer._opt_called = True  # otherwise torch's schedulers warn of a missing optimizer.step()
        return found[0] if found else None

    def _unscale(self, scale: float) -> None:
        """Divide the gradients by the GradScaler's factor, for hooks that read them before the push."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad / scale

    def step_here(self, evaluate: Callable[[], Any] | None) -> None:
        """Take a step of the script's own optimizer, whose closure is `evaluate`."""
        any_optimizer: Any = self._wrapped
        if evaluate is None:
            any_optimizer.step()
        else:
            any_optimizer.step(evaluate)

    def _check_options(self) -> None:
        """Raise ScriptError for a group whose options have changed since the server received them."""
        for number, (group, given) in enumerate(zip(self.param_groups, self._options, strict=False)):
            found = _options(self._wrapped, number, group)
            if found != given:
                raise ScriptError(
                    f"{type(self._wrapped).__name__}, group {number}: the script has changed "
                    f"{optimizer_spec(given)} to {optimizer_spec(found)}; only lr may change in a job: give "
                    "a scheduler that changes momentum, such as OneCycleLR, cycle_momentum=False"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None or to new zeros. Unlike torch's, it never writes to them: they may still be
        being sent."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def copy_state(self) -> dict[Any, Any]:
        """Return a copy, on the host, of the state of this worker's own steps."""
        state: dict[Any, Any] = copied(self._wrapped.state_dict()["state"])
        return state

    def restore_state(self, state: Mapping[Any, Any]) -> None:
        """Replace the optimizer's state by one from `copy_state`; learning rates and options stay the
        script's."""
        groups = self._wrapped.state_dict()["param_groups"]
        self.load_state_dict({"state": dict(state), "param_groups": groups})

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of torch's own optimizer: the state of each stepped parameter, and the
        options of groups.

        If the server takes the steps, its state is downloaded: the bytes of all state tensors.

        Raises:
            ScriptError: this script has left the job.
            Refused: the server has ended the membership.
            UnreachableError: no server was reached for `give_up_seconds`.
        """
        found: dict[str, Any] = self._wrapped.state_dict()
        if self._here or not self._begun:
            return found
        downloaded = self._download_state()
        parameters = [each for group in self._wrapped.param_groups for each in group["params"]]
        state: dict[int, Any] = {}
        for index, parameter in enumerate(parameters):
            if parameter in downloaded:
                state[index] = dict(downloaded[parameter])
            elif isinstance(self._wrapped, torch.optim.Adagrad):  # has state even before its first step
                state[index] = found["state"][index]
        return {**found, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of the script's own kind of optimizer.

        If the server takes the steps, this is possible only before the first batch of a new job; the server's
        optimizer starts from that state. If several workers begin a job, the first one's state counts, as
        with parameters.

        Raises:
            ScriptError: the job has begun and the server takes the steps, or the state_dict belongs to
                another kind of optimizer.
        """
        if self._begun and not self._here and state_dict["state"]:
            raise ScriptError(
                "optimizer.load_state_dict: the job has begun, and the server's optimizer continues from its "
                "own state; load it before the first batch of a new job, on a new gc-server"
            )
        needed = {"lr", *_NEEDED[type(self._wrapped)]} if type(self._wrapped) in _NEEDED else set[str]()
        for number, group in enumerate(state_dict["param_groups"]):
            missing = sorted(needed - group.keys())
            if missing:
                raise ScriptError(
                    f"optimizer.load_state_dict: group {number} has no {', '.join(missing)}: the state_dict "
                    f"belongs to another kind of optimizer than {type(self._wrapped).__name__}"
                )
        self._wrapped.load_state_dict(state_dict)
        self.param_groups = self._wrapped.param_groups
        if self._here or not self._begun:
            self.state = self._wrapped.state


JobOptimizer.step.hooked = True  # type: ignore[attr-defined]  # otherwise torch, too, runs the hooks of `step`


def check_kind(optimizer: Any, *, here: bool, workers: int) -> None:
    """Check that an optimizer of this kind trains the same model in a job as alone; warn if it may not.

    Args:
        here: True if this worker takes the steps.
        workers: smallest number of workers that the job will have.

    Raises:
        ScriptError: it is no optimizer of torch's, or one that cannot work in a job. The message names a
            way that works.
    """
    kind, wrapped = type(optimizer).__name__, _wrapped_by(optimizer)
    inside = f"attach the {wrapped[0]} (.{wrapped[1]}) itself" if wrapped else ""
    if isinstance(optimizer, JobOptimizer):
        raise ScriptError(
            "job.attach: this optimizer belongs to another job; pass the optimizer that the script made"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        remedy = inside or "such as torch.optim.SGD"
        raise ScriptError(f"job.attach: {kind}: expected an optimizer of torch.optim; {remedy}")
    if wrapped and (not here or type(optimizer).__module__.startswith("torch.distributed")):
        raise ScriptError(
            f"job.attach: {kind} wraps {wrapped[0]}, and its own part of a step would be lost; {inside}, or, "
            "if its step needs no other process, pass steps='local'"
        )
    if not here:
        step = vars(optimizer).get("step")
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            log.warning(
                "%s: its step was replaced, and the server, which takes the steps, does not call it; %s",
                *(kind, REMEDY),
            )
        return
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ScriptError(
            "job.attach: SparseAdam: it steps sparse gradients alone, and a job's gradients are dense; use "
            "torch.optim.Adam, and leave out sparse=True of the embeddings"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        why = (
            "LBFGS: its curvature pairs assume that parameters change by its own steps alone. Averages with "
            "other workers, and compression, change them too, and the training may diverge"
        )
        if workers > 1:
            raise ScriptError(
                f"job.attach: {why}. The job has {workers} workers or more; use another optimizer, or "
                "LBFGS in a job of one worker with --compressor none"
            )
        log.warning("%s: use it in a job of one worker with --compressor none", why)
    for name, why in _REMEMBERS.items():
        if any(base.__name__ == name for base in type(optimizer).__mro__):
            log.warning("%s: %s", name, why)
    if wrapped or "schedulefree" in kind.lower():
        log.warning(
            "%s%s: parameter values that it keeps itself, such as slow weights or averages, are this "
            "worker's own and do not follow the job's parameters%s",
            *(kind, f" wraps {wrapped[0]}" if wrapped else "", f"; {inside}" if inside else ""),
        )


def _wrapped_by(optimizer: Any) -> tuple[str, str] | None:
    """Return the kind of the optimizer that another one wraps, and the attribute that has it; or None."""
    for name, value in getattr(optimizer, "__dict__", {}).items():
        if isinstance(value, torch.optim.Optimizer):
            return type(value).__name__, name
    return None


def parameter_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> ParameterGroups:
    """Return the parameter groups for the server's optimizer, without learning rates, which are sent with
    each push.

    Raises:
        ScriptError: the server cannot run this optimizer as torch does, or its parameters are not the
            model's.
    """
    groups = tuple(
        m.Group(optimizer=optimizer_spec(_options(optimizer, number, group)))
        for number, group in enumerate(optimizer.param_groups)
    )
    return ParameterGroups(groups=groups, number_of=_group_numbers(optimizer, model))


def averaging_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> ParameterGroups:
    """Return one group of SGD, with which the server subtracts the workers' averaged changes unchanged (rate
    1).

    Frozen parameters of the optimizer are included, because the script may unfreeze them.

    Raises:
        ScriptError: the parameters of the optimizer are not the model's.
    """
    number_of = dict.fromkeys(_group_numbers(optimizer, model), 0)
    return ParameterGroups(groups=(m.Group(optimizer=optimizer_spec(Sgd())),), number_of=number_of)


def _group_numbers(optimizer: torch.optim.Optimizer, model: nn.Module) -> Mapping[str, int]:
    """Return the number of each parameter's group by the parameter's name; raise ScriptError."""
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
                f"parameter {name!r} requires a gradient, but the optimizer does not have it: give it to the "
                "optimizer, or call requires_grad_(False) on it"
            )
    if number_of:
        raise ScriptError(
            f"the optimizer has {len(number_of)} parameters that the model does not have: create it with "
            "model.parameters()"
        )
    return group_of


def _options(optimizer: torch.optim.Optimizer, number: int, group: dict[str, Any]) -> OptimizerOptions:
    """Return the server's options for one group of an optimizer; raise ScriptError if the server cannot run
    it."""
    kind, values = type(optimizer), {key: group[key] for key in group if key not in ("params", "lr")}
    for key, nothing in _WITHOUT.items():
        if values.pop(key, nothing) != nothing:
            raise ScriptError(
                f"{kind.__name__}, group {number}: {key}={group[key]!r}: the server has no {key}; {REMEDY}"
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
            first = optimizer.defaults["initial_accumulator_value"]  # torch ignores a group's own value
            return Adagrad(initial_accumulator_value=first, **needed)
    except ValueError as error:
        raise ScriptError(f"{kind.__name__}, group {number}: {error}") from None
    raise ScriptError(
        f"{kind.__module__}.{kind.__name__}: the server steps SGD, Adam, AdamW and Adagrad of torch.optim; "
        f"{REMEDY}"
    )
