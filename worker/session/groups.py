"""Parameter groups, from what torch's optimizers take: a mapping for each, with parameters and overrides.

Groups belong to the manifest (`Group`), as specs of the optimizer with all hyperparameters: tasks and scripts
say them in the words of `--optimizer`. A group's learning rate is its own, times the factor of the job's
schedule. Or it comes with each push, in the header of every part, because with `--overlap both` a part is
stepped before there is a commit. There control checks that the members of a round agree before a part is
stored (`RatesReceived`); elsewhere with the commit (`Pushed`), because a script may change its mind, abandon
the push, and send another. The shard takes the rates from the pushes that it applies.
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
        groups: by number, as the manifest has them; none for one group with all that the job says.
        number_of: the number of its group, by name of the parameter.
    """

    groups: tuple[Group, ...] = ()
    number_of: Mapping[str, int] = field(default_factory=dict[str, int])


ONE_GROUP = ParameterGroups()


def parameter_groups(
    model: nn.Module, given: Iterable[Mapping[str, Any]], options: OptimizerOptions
) -> ParameterGroups:
    """The groups in their order; parameters in none of them are in one more, the last, as the job says.

    Args:
        given: as `torch.optim` takes them: `params`, a parameter of the model or several; `lr`, the learning
            rate that the schedule goes by, the job's if it is left out; other options of the optimizer by
            their names here or in torch.
        options: of the job, which those override.

    Raises:
        ValueError: a parameter that is not the model's, or is in two groups; an unknown option, or a value
            that cannot be.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: list[Group] = []
    number_of: dict[str, int] = {}
    for place, each in enumerate(given):
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
                        f"params: expected parameters of the model, got another one, of shape {shape}"
                    )
                if number_of.setdefault(name, place) != place:
                    raise ValueError(f"params: {name!r} is in group {number_of[name]} already")
        except (TypeError, ValueError) as error:
            raise ValueError(f"parameter group {place}: {error}") from None
        groups.append(Group(optimizer=spec, learning_rate=rate))
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    left = [name for name in left if name not in number_of]
    if left and groups:
        number_of.update(dict.fromkeys(left, len(groups)))
        groups.append(Group(optimizer=optimizer_spec(options)))
    return ParameterGroups(groups=tuple(groups), number_of=number_of)


def _members(given: Any) -> Sequence[torch.Tensor]:
    """Raises ValueError for what are no parameters."""
    members = [given] if isinstance(given, torch.Tensor) else list(cast(Iterable[object], given))
    for each in members:
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"params: expected parameters of the model, got a {type(each).__name__}")
    return cast(Sequence[torch.Tensor], members)
