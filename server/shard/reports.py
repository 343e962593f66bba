"""Reports of the shard, which arrive on the event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..job.events import PushKey

if TYPE_CHECKING:
    from ...common.parts import Plan
    from ...proto.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Final:
    """Report that a part of the open round is about to be stepped, which cannot be undone. The shard makes
    it; the conductor receives it.

    Attributes:
        version: version that the round produces.
        keys: pushes that are summed in the part.
        first: whether it is the first part of the round.
        last: whether it is the last part of the round.
    """

    version: int
    part: int
    keys: tuple[PushKey, ...]
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """Report that an `Apply` order has been carried out. The shard answers `apply` with it.

    Attributes:
        passed_over: number of gradients that had no effect, because the aggregation needs more of them.
        gradient_norm: norm of the mean gradient before clipping; NaN if gradients are never clipped.
        square_norms: square norm of the mean gradient of each tensor, as the mean of the last measured
            versions (`norms`); empty before the first one.
        checked: the last version at which a checksum of the replica was computed, and that checksum; (0, 0)
            before the first one.
    """

    version: int
    passed_over: int
    gradient_norm: float
    square_norms: tuple[float, ...]
    checked: tuple[int, int]


class Reported:
    """The last reports of a shard. Other components learn of the shard's state from this object alone.

    It changes on the event loop only, and before a coroutine that awaits the order continues.

    Attributes:
        manifest: list of the model's tensors; None until the shard has parameters.
        version: version of the parameters; 0 before the first `Apply`.
        coordinates: number of coordinates of each tensor with bases, by index of the tensor.
        square_norms: square norm of the mean gradient of each tensor, as the mean of the last measured
            versions; empty before the first one.
        checked: the last version at which a checksum of the replica was computed, and that checksum; (0, 0)
            before the first one.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.version = 0
        self.coordinates: Mapping[int, int] = {}
        self.square_norms: tuple[float, ...] = ()
        self.checked = 0, 0
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan in force. May be read only once the shard has parameters."""
        assert self._plan is not None, "the shard has no parameters yet"
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan

    def applied(self, report: Applied) -> None:
        """Take over version, square norms and checksum from a report."""
        self.version = report.version
        self.square_norms, self.checked = report.square_norms, report.checked
