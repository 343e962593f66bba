"""How a kind of work becomes pushes: one strategy for each kind in `work`."""

from __future__ import annotations

from typing import Protocol

from ...proto.messages import Assignment


class Strategy(Protocol):
    """What the trainer asks of a strategy. It has a session, and answers assignments through it."""

    @property
    def busy(self) -> bool:
        """Whether other workers wait for this one although no push of it is open."""
        ...

    def work(self, assignment: Assignment) -> None:
        """Compute what the assignment asks for, and answer it.

        Raises:
            TaskFailedError: the task raised, or its gradients stay unusable.
        """
        ...

    def finish(self) -> None:
        """The job is done."""
        ...

    def hand_over(self) -> None:
        """The worker leaves: hand over what no push has carried."""
        ...
