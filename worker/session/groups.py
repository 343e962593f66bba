"""Parameter groups, in the form of torch's optimizers: one mapping each, with parameters and overrides.

Groups belong to the manifest (`Group`), as specs of the optimizer with all hyperparameters. Tasks and scripts
write the options as in `--optimizer`. A group's learning rate has one of two sources:

1. The group's own rate, times the factor of the job's schedule.
2. Each push carries the rate, in the header of every part: with `--overlap both` a part is stepped before
   there is a commit. In that case control checks that the members of a round agree before a part is stored
   (`RatesReceived`). Otherwise control checks at the commit (`Pushed`), because a script may change a rate,
   abandon the push, and send another. The shard takes the rates from the pushes that it applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from ...optim.optimizer import check_learning_rate, number, optimizer_spec, overridden
from ...optim.steps import OptimizerOptions
from ...proto.messages import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroups:
    """The parameter groups of a model.

    Attributes:
        groups: the groups in order of their number, from 0, as in the manifest; empty for a single group with
            the job's own options.
        number_of: number of the parameter's group, by name of the parameter.
    """

    groups: tuple[Group, ...] = ()
    number_of: Mapping[str, int] = field(default_factory=dict[str, int])


ONE_GROUP = ParameterGroups()


def parameter_groups(
    model: nn.Module, given: Iterable[Mapping[str, Any]], options: OptimizerOptions
) -> ParameterGroups:
    """Check a user's parameter groups, and return them with each parameter's group number.

    Trainable parameters in none of the groups form one more group, the last, with the job's options.

    Args:
        model: model whose parameters are grouped.
        given: one mapping per group, as for `torch.optim`. `params` is a parameter of the model, or several.
            `lr` is the learning rate that the schedule scales; without it, the job's. Other keys are options
            of the optimizer, by their name in `--optimizer` or in torch.
        options: options of the job's optimizer, which a group's options override.

    Raises:
        ValueError: a parameter is not the model's, or is in two groups; or an option is unknown or invalid.
            The message names the group.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[Group] = []
    number_of: dict[str, int] = {}
    for index, each in enumerate(given):
        try:
            overrides = dict(each)
            members = _members(overrides.pop("params", ()))
            rate = number("lr", overrides.pop("lr")) if "lr" in overrides else None
            if rate is not None:
                check_learning_rate(rate, "lr")
            spec = optimizer_spec(overridden(options, overrides))
            for parameter in members:
                name = names.get(id(parameter))
                if name is None:
                    shape = tuple(parameter.shape)
                    raise ValueError(
                        f"params: expected parameters of the model, got a foreign one, of shape {shape}"
                    )
                if number_of.setdefault(name, index) != index:
                    raise ValueError(f"params: {name!r} is in group {number_of[name]} already")
        except (TypeError, ValueError) as error:
            raise ValueError(f"parameter group {index}: {error}") from None
        groups.append(Group(optimizer=spec, learning_rate=rate))
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    left = [name for name in left if name not in number_of]
    if left and groups:
        number_of.update(dict.fromkeys(left, len(groups)))
        groups.append(Group(optimizer=optimizer_spec(options)))
    return ParameterGroups(groups=tuple(groups), number_of=number_of)


def _members(given: Any) -> Sequence[torch.Tensor]:
    """Return the tensors of a group's `params`. Raises ValueError if an element is no tensor."""
    members = [given] if isinstance(given, torch.Tensor) else list(cast(Iterable[object], given))
    for each in members:
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"params: expected parameters of the model, got a {type(each).__name__}")
    return cast(Sequence[torch.Tensor], members)
