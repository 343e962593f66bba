"""One training step: an assignment, computed and answered once.

Two drivers take these steps, and differ in who owns the loop: in a task the trainer does and calls the user's
code (`worker/tasks/driver`); in a script the user's code does and calls us (`worker/script/job`). Both do

    step = strategy.begin(assignment, samples)
    while step.open:          # once for each batch
        loss = ...            # forward pass over the samples step.batch; random numbers go by step.seeds
        step.follow()         # the forward pass is over
        loss.backward()
        step.push(loss)       # or step.skip(why)

There is one `Strategy` for each kind of work (`work`). It outlives its steps:

| | gradients | local | coded |
|---|---|---|---|
| a batch | the whole assignment | samples of one local step | a block |
| `push` | sends the gradients | takes the optimizer's step | adds up the block's gradient |
| after the last | commits | sends the change, and commits | sends packets |
| the answer | the commit | the commit | `Session.confirm`, once all packets are here |

A step's life:

| state | means | what follows |
|---|---|---|
| computing | `open`: a batch is computed, nothing is sent | sending; computed; answered |
| sending | parts leave as soon as backward has their gradients | answered; computing, if withdrawn |
| computed | local steps taken early, or a coded exchange | answered; dropped |
| answered | the session has its one commit, and sees to what becomes of it | – |

The rules, each implemented once:

- **Not finite** (`_contribute_nothing`): the loss or a gradient is NaN or infinite. The step leaves
  parameters, optimizer and residual as they were, and answers its assignment without samples. Where parts
  already count (`final`), the remaining parts go empty instead. After ten such steps in a row the worker
  ends. A local step or a block that is not finite is left out, and the rest of its assignment counts; if
  nothing is left, the rule above holds. (In a coded exchange others wait for packets, so zeros are sent.)
- **Late push** (`session/outcomes`): a push that the server refuses as stale goes back into the residual, and
  out with the next push; a redundant one is undone. Steps never wait for outcomes, and never see them.
- **Interrupted round**: an assignment that is sent again after it was answered is not begun again
  (`Session.is_new`). A push that cannot be completed is withdrawn, and the residual is as before the step.
  What was computed before its assignment arrived serves only the assignment that was expected; if another
  one arrives, parameters, buffers, random numbers and optimizer are put back (`worker/tasks/ahead`).
- **Spike** (`Pushing.commit`): a gradient more than 100 times as large as usual is sent whole, in float32,
  logged and counted. The step is pushed like any other.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...proto import messages as m
from ..metrics import WorkerMetrics
from ..session.pushing import Pushing
from ..session.session import Session
from ..session.timing import StepTimes

log = logging.getLogger("gradwire.worker")

MAX_UNUSABLE = 10  # steps in a row that contribute nothing


class Strategy(ABC):
    """How one kind of work becomes pushes, and what its steps share.

    Attributes:
        single: whether each push becomes a version by itself, so that a worker may compute at one version
            twice, or not at all.
        final: whether parts count before their push is committed, and cannot be taken back.
        times: when the present step's forward and backward passes began and ended.
        steps: number of pushes committed so far.
    """

    def __init__(
        self,
        session: Session,
        metrics: WorkerMetrics,
        *,
        give_up: type[Exception],
        single: bool = False,
        final: bool = False,
    ) -> None:
        """
        Args:
            session: receives the pushes.
            metrics: counts the steps that contribute nothing.
            give_up: exception raised after `MAX_UNUSABLE` of these in a row.
            single: see the class.
            final: see the class.
        """
        self.session = session
        self.metrics = metrics
        self.single, self.final = single, final
        self.times = StepTimes(len(session.replica.parameters))
        self.steps = 0
        self.give_up = give_up
        self._held = 0  # commits since the last one that sent something
        self._unusable = 0

    # ---- for drivers

    @abstractmethod
    def begin(self, assignment: m.Assignment, samples: int) -> TrainingStep:
        """Begin the step that answers an assignment. samples: number of samples assigned."""

    @property
    def busy(self) -> bool:
        """Whether other workers wait for this one although no push of it is open."""
        return False

    def image(self) -> dict[str, Any]:
        """Return what the next step depends on, between two steps: plain values and copies of tensors, as
        the checkpoint format takes them."""
        return {"held": self._held, "steps": self.steps}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Continue from an `image`."""
        self._held, self.steps = image["held"], image["steps"]

    def finish(self) -> None:
        """Called when the job is done: warn of gradients that no push has carried."""
        if self._held:
            log.warning(
                "the gradients of the last %d steps were held back by the compressor's delay "
                "and are not in the parameters",
                self._held,
            )

    def hand_over(self) -> None:  # noqa: B027
        """Called when the worker leaves, after its last push: send what no push has carried."""

    # ---- for steps

    def seeds(self, assignment: m.Assignment) -> tuple[int, int]:
        """Return what random numbers depend on besides the job's seed.

        These are the version and the position in the round, where all members compute together: ranks change
        when a worker returns after its lease. Otherwise it is the assignment.
        """
        return (assignment.id, 0) if self.single else (assignment.version, assignment.position)

    def begin_push(
        self, assignment: m.Assignment, samples: int, learning_rates: Sequence[float] = ()
    ) -> Pushing:
        """Begin to push. learning_rates: see `Session.begin_step`."""
        version, rank = self.seeds(assignment)
        return self.session.begin_step(
            assignment,
            samples,
            rank=rank,
            version=version,
            step=self.steps if self.single else assignment.version,
            learning_rates=learning_rates,
        )

    def commit(self, pushing: Pushing, loss: float, *, computing_s: float = 0.0) -> None:
        """Commit a push, and count it."""
        self.steps += 1
        sent = self.session.commit(pushing, loss, computing_s=computing_s)
        self._held = 0 if sent else self._held + 1

    def usable(self) -> None:
        """A step contributes to the job."""
        self._unusable = 0

    def unusable(self, why: str) -> None:
        """Count a step that contributes nothing. Raises `give_up` if there were too many in a row."""
        self.metrics.skipped.inc()
        self._unusable += 1
        if self._unusable >= MAX_UNUSABLE:
            raise self.give_up(
                f"{why} in {self._unusable} steps in a row: lower the learning rate, or check the data and "
                "the loss"
            )


class TrainingStep(ABC):
    """One assignment on its way to its answer; see the head of this file.

    Attributes:
        assignment: the assignment that is answered.
        samples: number of samples that the answer counts.
        open: whether there is a batch to compute.
    """

    def __init__(self, strategy: Strategy, assignment: m.Assignment, samples: int) -> None:
        self.assignment = assignment
        self.samples: int = samples
        self.open = True
        self._of = strategy
        strategy.session.doing("computing")

    @property
    def batch(self) -> slice:
        """Which of the assignment's samples the present batch has."""
        return slice(0, self.samples)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The numbers that seed the present batch's random numbers, besides the job's seed."""
        return self._of.seeds(self.assignment)

    def follow(self) -> None:
        """The forward pass of the batch is over, and its backward pass follows."""
        self._of.times.backward()

    @abstractmethod
    def push(self, loss: float, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        """Take in the gradients of the present batch, which the replica's parameters have; after the last
        batch, answer the assignment.

        Args:
            loss: mean loss of the batch; 0 if unknown.
            scale: factor by which the gradients are too large.
            evaluate: computes the gradients, if they are not there yet.

        Returns:
            Whether the gradients can be used, and after the last batch, whether the assignment's answer holds
            anything.

        Raises:
            The strategy's `give_up`: too many steps in a row have contributed nothing.
        """

    @abstractmethod
    def skip(self, why: str) -> None:
        """Do without the gradients of the present batch. why: a clause for the log."""

    def withdraw(self) -> bool:
        """Abandon the push that `follow` has begun, if any; the step may begin another one.

        Returns:
            Whether gradients had been handed to it.
        """
        return False

    @property
    def sent(self) -> bool:
        """Whether parts of the push that `follow` has begun have left."""
        return False

    def _contribute_nothing(self, why: str, pushing: Pushing | None = None, loss: float = 0.0) -> bool:
        """Answer a step that is not finite. This is the one rule for it; see the head of this file.

        Args:
            why: what is not finite.
            pushing: the push that was begun; None if there is none.
            loss: mean loss of the step.

        Returns:
            Whether parts that have left count all the same.
        """
        strategy, version = self._of, self.assignment.version
        counts = pushing is not None and strategy.final and bool(pushing.checksums)
        if pushing is not None and counts:
            log.warning("version %d: %s; some of its parts have left", version, why)
            pushing.cancel_remaining()
            strategy.commit(pushing, loss if math.isfinite(loss) else 0.0)
        else:
            if pushing is not None:
                strategy.session.abandon(pushing)
            log.warning("version %d: %s; this step contributes nothing", version, why)
            strategy.session.skip(self.assignment)
        strategy.unusable(why)
        return counts


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no value is NaN or infinite.

    The extremes of a tensor tell, in one pass that writes nothing: a fiftieth of the time of `isfinite`.
    """
    held = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    extremes = [torch.stack(torch.aminmax(each)).isfinite().all() for each in held if each.numel()]
    return not extremes or bool(torch.stack(extremes).all())
