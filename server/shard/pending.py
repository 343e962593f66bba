"""The state of a version while the store makes it; `making` has the states of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..job.events import Contribution
from .coordinates import MeanCoordinates
from .mean import Share
from .missing import Stretch
from .norms import SquareNorms


@dataclass(slots=True, eq=False)
class PendingVersion:
    """The state of a version while the store makes it.

    Attributes:
        before: values to roll back to if the step fails.
        taken: numbers of the parts that are no longer open.
        piecewise: for each unit, whether its parts are encoded one by one.
        waiting: pushes of the parts in state waiting, by unit and part.
        summed: ranges of a part that have a gradient, by part, where all parts are summed before the first
            one is stepped; empty otherwise.
        failure: exception that stopped a part; None if there was none.
        weight: multiplies the mean gradient.
        base_version: version that the gradient was computed at, where pushes are applied singly; otherwise
            None.
        contributions: all pushes of the version that have samples.
        norms: square norms of the mean gradient, if they are measured at this version; otherwise None.
        means: mean coordinates of the tensors that are summed so far, by index of the tensor.
        clip: factor by which the gradient is clipped; None where it never is.
    """

    version: int
    before: torch.Tensor = field(init=False)
    taken: set[int] = field(default_factory=set[int])
    piecewise: dict[int, bool] = field(default_factory=dict[int, bool])
    waiting: dict[int, dict[int, Sequence[Share]]] = field(
        default_factory=dict[int, dict[int, Sequence[Share]]]
    )
    summed: dict[int, list[Stretch]] = field(default_factory=dict[int, list[Stretch]])
    failure: Exception | None = None
    weight: float = 1.0
    base_version: int | None = None
    contributions: Sequence[Contribution] = ()
    norms: SquareNorms | None = None
    means: dict[int, MeanCoordinates] = field(default_factory=dict[int, MeanCoordinates])
    clip: float | None = None
