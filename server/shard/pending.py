"""The rules by which a version is made, and its state meanwhile; `making` has the states of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...common.parts import Unit
from ..job.aggregation import Aggregation, Mean
from ..job.events import Contribution
from .coordinates import MeanCoordinates
from .mean import Share
from .missing import Stretch
from .norms import SquareNorms

MEAN = Mean()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRules:
    """How a version is made from pushes.

    Attributes:
        aggregation: rule that combines the gradients of a round.
        delay_compensation: λ of `compensation`; 0 for none.
        clip_norm: largest Euclidean norm of the whole model's gradient that a step takes, 0 for no limit.
            With a limit, no part is stepped before all are summed.
        takes_norms: measure the square norms of the mean gradient at the versions that `is_measured` names.
        keep_last: keep a copy of the replica from before each step, to roll back to if the step fails.
    """

    aggregation: Aggregation = MEAN
    delay_compensation: float = 0.0
    clip_norm: float = 0.0
    takes_norms: bool = False
    keep_last: bool = False


RULES = StepRules()


@dataclass(slots=True, eq=False)
class PendingVersion:
    """The state of a version while the store makes it.

    Attributes:
        before: values to roll back to if the step fails; None before anything is stepped.
        taken: numbers of the parts that are no longer open.
        piecewise: for each unit, whether its parts are encoded one by one.
        waiting: pushes of the parts in state waiting, by unit and part.
        found: ranges with a gradient and their payloads, by part, until it is encoded; empty ones without
            enough pushes for a step.
        failure: exception that stopped a part; None if there was none.
        weight: multiplies the mean gradient.
        base_version: version that the gradient was computed at, where pushes are applied singly; otherwise
            None.
        contributions: all pushes of the version that have samples.
        norms: square norms of the mean gradient, if they are measured at this version; otherwise None.
        means: mean coordinates of the tensors that are summed so far, by index of the tensor.
        due: tensors that are stepped once the updates have left, by number of the part, with its unit.
        clip: factor by which the gradient is clipped; None without clipping or before all are summed.
    """

    version: int
    before: torch.Tensor | None = None
    taken: set[int] = field(default_factory=set[int])
    piecewise: dict[int, bool] = field(default_factory=dict[int, bool])
    waiting: dict[int, dict[int, Sequence[Share]]] = field(
        default_factory=dict[int, dict[int, Sequence[Share]]]
    )
    found: dict[int, list[Stretch]] = field(default_factory=dict[int, list[Stretch]])
    failure: Exception | None = None
    weight: float = 1.0
    base_version: int | None = None
    contributions: Sequence[Contribution] = ()
    norms: SquareNorms | None = None
    means: dict[int, MeanCoordinates] = field(default_factory=dict[int, MeanCoordinates])
    due: dict[int, tuple[Unit, Sequence[int]]] = field(default_factory=dict[int, tuple[Unit, Sequence[int]]])
    clip: float | None = None
