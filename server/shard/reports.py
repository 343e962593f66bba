"""Reports of the shard, which arrive on the event loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..job.events import PushKey

if TYPE_CHECKING:
    from ...compressors import Plan
    from ...proto.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Final:
    """A part of the open round is about to be stepped. Nothing takes it back.

    Attributes:
        version: that the round leads to.
        keys: pushes that count in the part.
        first, last: whether it is the first, the last part of the round.
    """

    version: int
    part: int
    keys: tuple[PushKey, ...]
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """An `Apply` is carried out.

    Attributes:
        passed_over: gradients that had no effect, because they were too few to be aggregated.
        gradient_norm: of the mean gradient before it was clipped; NaN if it never is.
        square_norms: of the mean gradient of each tensor, at the last version at which they were measured;
            empty before that.
        checked: the last version at which a checksum of what every worker has was taken, and that; (0, 0)
            before that.
    """

    version: int
    passed_over: int
    gradient_norm: float
    square_norms: tuple[float, ...]
    checked: tuple[int, int]


class Reported:
    """The last reports of a shard, kept where they arrive. Others learn of the shard's state from here alone.

    It changes on the event loop only, and before whoever awaits the order continues.

    Attributes:
        manifest: None until the shard has parameters.
        version: of the parameters; 0 before the first `Apply`.
        gradient_norm, square_norms, checked: as in `Applied`.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.version = 0
        self.gradient_norm = math.nan
        self.square_norms: tuple[float, ...] = ()
        self.checked = 0, 0
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan in force. Nobody may ask before the shard has parameters."""
        assert self._plan is not None, "the shard has no parameters yet"
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan

    def applied(self, report: Applied) -> None:
        self.version, self.gradient_norm = report.version, report.gradient_norm
        self.square_norms, self.checked = report.square_norms, report.checked
