"""How a kind of work becomes pushes: one strategy for each kind in `work`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ...proto.messages import Assignment
from ..metrics import Metrics
from ..session.session import Session
from .computation import Computation, SkippedSteps


class Strategy(ABC):
    """What the trainer asks of a strategy, which answers assignments through its session."""

    def __init__(self, session: Session, computation: Computation, metrics: Metrics) -> None:
        self._session = session
        self._computation = computation
        self._metrics = metrics
        self._skipped = SkippedSteps(metrics)

    @property
    def busy(self) -> bool:
        """Whether other workers wait for this one although no push of it is open."""
        return False

    def told(self, assignment: Assignment) -> None:
        """What comes next, before anything is done about it."""
        return

    @abstractmethod
    def work(self, assignment: Assignment) -> None:
        """Compute what the assignment asks for, and answer it.

        Raises:
            TaskFailedError: the task raised, or its gradients stay unusable.
        """

    def image(self) -> dict[str, Any]:
        """What its next work depends on besides the assignment, where no step has begun: plain values and
        copies of tensors (`saved`). What was begun early is given up for it."""
        return {}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image`."""
        return

    def finish(self) -> None:
        """The job is done."""
        return

    def hand_over(self) -> None:
        """The worker leaves: hand over what no push has carried."""
        return
