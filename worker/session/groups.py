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

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...optim.matrices import declared, described
from ...optim.optimizer import optimizer_spec
from ...optim.steps import Muon, OptimizerOptions
from ...proto import messages as m

log = logging.getLogger("gradwire.worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroups:
    """The parameter groups of a model.

    Attributes:
        groups: the groups in order of their number, from 0, as in the manifest; empty for a single group with
            the job's own options.
        at_server: False if the server does not hear of the groups, because workers alone step by them. The
            server then need not cut parts of the model at their borders.
        clip_norm: largest norm of the mean gradient of all groups, which a script names; 0 for the job's.
    """

    groups: tuple[m.Group, ...] = ()
    number_of: Mapping[str, int] = field(default_factory=dict[str, int])
    at_server: bool = True
    clip_norm: float = 0.0


ONE_GROUP = ParameterGroups()


def parameter_groups(
    model: nn.Module, given: Iterable[Mapping[str, Any]], options: OptimizerOptions
) -> ParameterGroups:
    """Check a user's parameter groups, and return them with each parameter's group number.

    Trainable parameters in none of the groups form one more group, the last, with the job's options. With
    Muon, each group is divided by the rule of `optim/matrices`, which the log tells. Raises ValueError if a
    parameter is not the model's, or is in two groups; or an option is unknown or invalid. The message names
    the group.

    Args:
        given: one mapping per group, as for `torch.optim`. `params` is a parameter of the model, or several.
            `lr` is the learning rate that the schedule scales; without it, the job's. Other keys are options
            of the optimizer, by their name in `--optimizer` or in torch. With Muon, `optimizer` may say which
            optimizer steps the group: "muon" or "adamw".
    """
    groups = declared(model, given, options)
    if isinstance(options, Muon):
        log.info("optimizer muon: %s", described(model, groups))
    return ParameterGroups(
        groups=tuple(
            m.Group(optimizer=optimizer_spec(each.options), learning_rate=each.learning_rate)
            for each in groups
        ),
        number_of={name: index for index, each in enumerate(groups) for name in each.names},
        at_server=not isinstance(options, Muon),
    )
