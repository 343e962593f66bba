"""One training step: an assignment, computed and answered once.

Two drivers take these steps, and differ in the owner of the loop. In a task the trainer owns it and calls the
user's code (`worker/tasks/driver`). In a script the user's code owns it and calls ours
(`worker/script/job`). Both do

    step = strategy.begin(assignment, samples)

    while step.open:          # once for each batch
        loss = ...            # forward pass over the samples step.batch, seeded by step.seeds
        step.follow()         # between the forward and the backward pass
        loss.backward()
        step.push(loss)       # or step.skip(why)

There is one `Strategy` for each kind of work (`work`). It lasts as long as the worker is in the job:

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
| computed | local steps taken early, or a coded exchange | answered; discarded |
| answered | the session has the step's one commit, and handles its outcome | – |

The rules, each implemented once:

- **Not finite** (`_contribute_nothing`): the loss or a gradient is NaN or infinite. The step leaves
  parameters, optimizer and residual as they were, and answers its assignment without samples. Where parts
  that have left already count (`final`), the remaining parts are sent empty instead. After ten such steps in
  a row the worker ends. A local step or a block that is not finite is left out, and the rest of its
  assignment counts; if nothing is left, the step answers without samples. In a coded exchange other workers
  wait for packets, so zeros are sent.
- **Late push** (`session/pushes`): a push that the server refuses as stale returns to the residual, and
  leaves with the next push; a redundant push is undone. Steps never wait for outcomes, and never see them.
- **Interrupted round**: an assignment that is sent again after it was answered is not begun again
  (`Session.is_new`). A push that cannot be completed is withdrawn, and the residual is as before the step.
  A step computed before its assignment arrived answers only the expected assignment. If another one arrives,
  parameters, buffers, random numbers and optimizer are restored (`worker/tasks/ahead`).
- **Spike** (`Push.finish`): a gradient more than 100 times as large as usual is sent whole, in float32,
  logged and counted. The step is pushed like any other.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...compressors import PushTerms
from ...proto import messages as m
from ..metrics import WorkerMetrics
from ..session.pushes import Push
from ..session.session import Session
from ..session.timing import StepTimes
from .hooks import GradientHooks
from .sharding import bounds

log = logging.getLogger("gradwire.worker")

MAX_UNUSABLE = 10  # steps in a row that contribute nothing


class Strategy(ABC):
    """Turns assignments of one kind of work into training steps, and keeps the state that the steps share.

    Attributes:
        single: True if each push makes a version of its own, so that a worker may compute several times, or
            never, at one version.
        final: True if the server uses parts before their push is committed, so that no part that has left
            can be taken back.
        hooks: hooks by which parts leave during the backward pass; None if they leave at the end of it.
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
        self.session = session
        self.metrics = metrics
        self.single, self.final = single, final
        self.times = StepTimes(len(session.replica.parameters))
        self.steps = 0
        self.give_up = give_up
        self.hooks: GradientHooks | None = None
        self._held = 0  # commits since the last one with payloads: the compressor's delay holds them back
        self._unusable = 0  # steps in a row that contributed nothing

    # ---- for drivers

    @abstractmethod
    def begin(self, assignment: m.Assignment, samples: int) -> TrainingStep:
        """Begin the step that answers an assignment. The first batch is open."""

    def first_batch(self, samples: int) -> slice:
        """Return the first batch of an assignment of `samples` samples, as a range of positions among
        them."""
        return slice(0, samples)

    def stop_overlap(self, why: str) -> None:
        """Send parts only after the backward pass from now on, and warn of that."""
        log.warning("from now on gradients leave after the backward pass, not during it: %s", why)
        self.hooks = None

    @property
    def busy(self) -> bool:
        """True if an exchange of coded packets is incomplete, so that this worker must not leave yet."""
        return False

    def image(self) -> dict[str, Any]:
        """Return the state that `restore` continues from, as plain values and copies of tensors.

        Call it between two steps. The checkpoint format takes these values.
        """
        return {"held": self._held, "steps": self.steps}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Replace the state by one that `image` returned."""
        self._held, self.steps = image["held"], image["steps"]

    def finish(self) -> None:
        """Called when the job is done: warn if the compressor's delay still holds back gradients."""
        if self._held:
            log.warning(
                "the gradients of the last %d steps were held back by the compressor's delay "
                "and are not in the parameters",
                self._held,
            )

    def hand_over(self) -> None:  # noqa: B027
        """Called when the worker leaves, after its last push: send the replica if it may be the only one."""

    # ---- for steps

    def seeds(self, assignment: m.Assignment) -> tuple[int, int]:
        """Return the two numbers that seed an assignment's random numbers, besides the job's seed.

        1. Where all members compute together: version and position in the round. A rank would not do,
           because it may change when a worker returns after its lease.
        2. Where each push makes a version of its own: the id of the assignment, and 0.
        """
        return (assignment.id, 0) if self.single else (assignment.version, assignment.position)

    def begin_push(
        self, assignment: m.Assignment, samples: int, learning_rates: Sequence[float] = ()
    ) -> Push:
        """Begin the push that answers an assignment. learning_rates: learning rates of the server's step, by
        parameter group; empty to use the job's schedule."""
        version, rank = self.seeds(assignment)
        step = self.steps if self.single else assignment.version
        terms = PushTerms(samples=samples, version=version, step=step, rank=rank)
        return self.session.begin_push(assignment, terms, learning_rates)

    def commit(self, push: Push, loss: float | None, of: TrainingStep, *, computing_s: float = 0.0) -> None:
        """Commit a push, and count it. computing_s: seconds that local steps took, where the mode sets their
        number by it; otherwise 0."""
        self.steps += 1
        sent = self.session.commit(
            push, loss, computing_s=computing_s, batches=of.covered, steps=of.counted_steps
        )
        self._held = 0 if sent else self._held + 1

    def reset_unusable(self) -> None:
        """Reset the count of steps in a row that contributed nothing, after a step that contributes."""
        self._unusable = 0

    def count_unusable(self, why: str) -> None:
        """Count a step that contributes nothing. Raises the strategy's `give_up` if this was the
        `MAX_UNUSABLE`th such step in a row."""
        self.metrics.skipped.inc()
        self._unusable += 1
        if self._unusable >= MAX_UNUSABLE:
            raise self.give_up(
                f"{why} in {self._unusable} steps in a row: lower the learning rate, or check the data and "
                "the loss"
            )


Loss = float | None | Callable[[], float | None]


def loss_of(loss: Loss) -> float | None:
    """Return a loss that may be given by a function, because a closure has yet to compute it."""
    return loss() if callable(loss) else loss


class TrainingStep(ABC):
    """One assignment, from its first batch to its answer. `Strategy.begin` creates it; a driver drives it.

    A script may add up the gradients of several batches before it steps: it calls `accumulate` in place of
    `push` for all but the last. When the step is `lacking` a batch, the script asks for more (`request`), and
    continues with `extend`, `finish` or `end`, as the answer says.

    Attributes:
        at: number of batches before the present one.
    """

    def __init__(
        self, strategy: Strategy, assignment: m.Assignment, samples: int, batches: Sequence[slice]
    ) -> None:
        """batches: ranges of positions among the assignment's samples."""
        self.assignment = assignment
        self.samples: int = samples
        self._batches = list(batches)
        self.open = True
        self.at = 0
        self._of = strategy
        strategy.session.doing("computing")

    # ---- accumulation, for scripts

    @property
    def lacking(self) -> bool:
        """True if another batch is to be computed, and the assignment has none left."""
        return self.open and self.at == len(self._batches)

    @property
    def last(self) -> bool:
        """True if the present batch is the last one that the assignment has now."""
        return self.at + 1 == len(self._batches)

    @property
    def covered(self) -> int:
        """Number of the assignment's batches that the answer stands for; 0 for all."""
        return 0

    @property
    def counted_steps(self) -> int:
        """Number of a script's optimizer steps behind the answer; 0 where the server need not know."""
        return 0

    def restart(self) -> None:
        """Return to the first batch of the optimizer step that is not taken yet: its gradients are lost."""
        self.at = 0

    def accumulate(self) -> None:
        """Continue with the next batch, without an optimizer step: its gradients are added to the others."""
        self.withdraw()
        self.at += 1

    def request(self) -> None:
        """Ask for further batches, and restore the parameters that the server knows while others compute."""
        self._of.session.ask(self.assignment, self.at, self._missing, self.counted_steps)

    def extend(self, assignment: m.Assignment) -> None:
        """Continue with the batches that the assignment has now."""
        self.assignment, self._batches = assignment, bounds(assignment) or self._batches

    def finish(self) -> None:
        """End the step, because the epoch has no further batches: push the local steps that were taken. The
        gradients of the batches after them stay in `grad`."""
        self.open = False
        self._of.session.mark_answered(self.assignment)

    def end(self) -> None:
        """End the step, because the server has assigned other work."""
        self.open = False

    @property
    def _missing(self) -> int:
        return 1

    @property
    def batch(self) -> slice:
        """Range of positions of the present batch among the assignment's samples."""
        return self._batches[self.at]

    @property
    def taken(self) -> int:
        """Number of batches of this step before the present one, where each has an optimizer's step; else
        0."""
        return 0

    @property
    def done(self) -> float:
        """Fraction of this step's optimizer steps that come before the present batch."""
        return 0.0

    @property
    def learning_rate(self) -> float:
        """Learning rate of the present batch's step, by the server's schedule."""
        return self.assignment.learning_rate

    @property
    def seeds(self) -> tuple[int, ...]:
        """Numbers that seed the present batch's random numbers, besides the job's seed."""
        return self._of.seeds(self.assignment)

    def follow(self) -> None:
        """Called between a batch's forward and backward pass: start timing the backward pass.

        Where parts leave during backward, also begin the push.
        """
        self._of.times.backward()

    @abstractmethod
    def push(self, loss: Loss, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        """Use the gradients of the present batch; after the last batch, answer the assignment.

        The gradients are those in `grad` of the replica's parameters. Returns True if the gradients are
        finite and used. After the last batch, True only if the answer contributes to the job as well. Raises
        the strategy's `give_up` if too many steps in a row have contributed nothing.

        Args:
            loss: mean loss of the batch, or a function that returns it after `evaluate`; None if unknown.
            scale: factor by which a GradScaler has multiplied the gradients; the step divides by it.
            evaluate: closure that computes the gradients, where they are not computed yet; None otherwise.
        """

    @abstractmethod
    def skip(self, why: str) -> None:
        """Leave out the present batch; after the last batch, answer the assignment."""

    def withdraw(self) -> bool:
        """Abandon the push that `follow` has begun, if any; the step may begin another push. Returns True if
        the push held gradients already."""
        return False

    @property
    def sent(self) -> bool:
        """True if parts of the push that `follow` has begun were sent."""
        return False

    def _contribute_nothing(self, why: str, push: Push | None = None, loss: float | None = None) -> bool:
        """Answer a step whose loss or gradient is NaN or infinite. Every strategy uses this one rule.

        1. Parts of the push that were sent count already: send the remaining parts empty, and commit.
        2. Otherwise: abandon the push, and answer the assignment without samples.

        Returns:
            True if parts that were sent count all the same.

        Raises:
            The strategy's `give_up`: too many steps in a row have contributed nothing.
        """
        strategy, version = self._of, self.assignment.version
        counts = push is not None and strategy.final and bool(push.checksums)
        if push is not None and counts:
            log.warning("version %d: %s; parts that were sent count, the others are sent empty", version, why)
            push.cancel_remaining()
            strategy.commit(push, loss if finite(loss) else None, self)
        else:
            if push is not None:
                strategy.session.abandon(push)
            log.warning("version %d: %s; this step contributes nothing", version, why)
            strategy.session.skip(self.assignment, batches=self.covered, steps=self.counted_steps)
        strategy.count_unusable(why)
        return counts


def finite(loss: float | None) -> bool:
    """Return True unless a loss is known to be NaN or infinite."""
    return loss is None or math.isfinite(loss)


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if no value of the tensors, dense or sparse, is NaN or infinite.

    Minimum and maximum of a tensor are enough, in one pass that writes nothing: a fiftieth of the time of
    `isfinite`.
    """
    held = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    extremes = [torch.stack(torch.aminmax(each)).isfinite().all() for each in held if each.numel()]
    return not extremes or bool(torch.stack(extremes).all())
