"""Work `gradients`: push the gradient of the mean loss over an assignment's samples.

With overlap, gradients leave while backward produces them. At the step, such a push may turn out to hold
other values than the step's gradients: a gradient arrived twice, a script has changed gradients or learning
rates, or a GradScaler has scaled them. The worker then abandons the push, sends the gradients as they are at
the step, and sends all later gradients at the end of their step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ...compressors import NonFiniteGradient
from ...proto import messages as m
from ..metrics import WorkerMetrics
from ..session.pushes import Push
from ..session.session import Session
from .hooks import GradientHooks
from .sharding import bounds
from .step import Loss, Strategy, TrainingStep, finite, loss_of

log = logging.getLogger("gradwire.worker")


class GradientStrategy(Strategy):
    """The strategy of work `gradients`: pushes the gradient of each assignment's samples.

    Attributes:
        rates: returns the learning rates of the server's step that a push carries, by parameter group; an
            empty tuple stands for the job's schedule.
    """

    def __init__(
        self,
        session: Session,
        metrics: WorkerMetrics,
        *,
        give_up: type[Exception],
        single: bool,
        final: bool,
        overlap: bool,
        rates: Callable[[], tuple[float, ...]] = tuple,
        user_steps: bool = False,
        remedy: str = "",
    ) -> None:
        """user_steps: True if the user's code runs between backward and `push`, and may change gradients."""
        super().__init__(session, metrics, give_up=give_up, single=single, final=final)
        self.rates = rates
        self.remedy = remedy
        if overlap:
            self.hooks = GradientHooks(
                session.replica.parameters, self.times, checked=user_steps, frees=not user_steps
            )

    def begin(self, assignment: m.Assignment, samples: int) -> GradientStep:
        return GradientStep(self, assignment, samples)


class GradientStep(TrainingStep):
    """A step of work `gradients`: one gradient, one push, of one batch or several.

    Parts leave during the backward pass of the last batch. Where the script accumulates, that is the one at
    which it has stepped before; if it continues after that, nothing leaves before its step.
    """

    def __init__(self, strategy: GradientStrategy, assignment: m.Assignment, samples: int) -> None:
        batches = bounds(assignment) or [slice(0, samples)]
        super().__init__(strategy, assignment, batches[0].stop, batches)
        self._strategy = strategy
        self._guessing = False  # whether the script has gone on where it was expected to step
        self._push: Push | None = None  # push to which hooks hand gradients
        self._rates: tuple[float, ...] = ()  # learning rates that the push carries

    @property
    def covered(self) -> int:
        return self.at + 1

    def accumulate(self) -> None:
        super().accumulate()
        if not self.lacking:
            self.samples = self.batch.stop

    def extend(self, assignment: m.Assignment) -> None:
        super().extend(assignment)
        self._guessing = True
        if not self.lacking:
            self.samples = self.batch.stop

    def follow(self) -> None:
        super().follow()
        hooks, number = self._strategy.hooks, self.at + 1
        last = number == len(self._batches) and number >= self.assignment.accumulate and not self._guessing
        if self._push is None and hooks is not None and last:
            self._push = self._begin_push()
            hooks.follow(self._push)

    @property
    def sent(self) -> bool:
        return self._push is not None and bool(self._push.checksums)

    def withdraw(self) -> bool:
        push, self._push = self._push, None
        if push is None or self._strategy.hooks is None:
            return False
        missing = self._strategy.hooks.stop()
        self._strategy.session.abandon(push)
        return len(missing) < len(self._strategy.session.replica.parameters)

    def skip(self, why: str) -> None:
        self.open = False
        if self.withdraw():
            self._strategy.stop_overlap(
                f"{why}, and the gradients that its backward pass had sent are discarded"
            )
        log.info("version %d: %s; this step contributes nothing", self.assignment.version, why)
        self._strategy.session.skip(self.assignment, batches=self.covered)

    def push(self, loss: Loss, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        strategy, session = self._strategy, self._strategy.session
        if evaluate is not None:
            evaluate()
            session.replica.check()
        loss = loss_of(loss)
        self.open = False
        # 1. Keep the push that hooks have filled, unless it holds other values than this step's gradients.
        hooks, missing = strategy.hooks, list[int]()
        if hooks is not None and self._push is not None:
            missing = hooks.stop()
            why = self._unusable_because(hooks, scale)
            if why and strategy.final and self.sent:
                raise strategy.give_up(f"{why}, and some parts have left: use --overlap off for this model")
            if why:
                self.withdraw()
                strategy.stop_overlap(why)
                if hooks.frees:  # the driver computes the batch again, because the gradients are gone
                    self.open = True
                    return False
        push, self._push = self._push, None
        try:
            if push is not None and hooks is not None and hooks.error is not None:
                raise hooks.error
            if not finite(loss):
                return self._contribute_nothing(f"the loss is {loss}", push, loss)
            if push is not None:
                # 2a. Add the remaining tensors: the loss does not reach them, or they have no hook.
                for index in missing:
                    push.add(index, session.replica.gradient(index))
            else:
                # 2b. Begin a push with all gradients, as they are now.
                session.doing("compressing")
                push = self._begin_push()
                self._add_all(push, scale)
        except NonFiniteGradient as error:
            return self._contribute_nothing(str(error), push, loss)
        except BaseException:  # a KeyboardInterrupt too: a notebook may go on with the job
            if push is not None:
                session.abandon(push)
            raise
        # 3. Commit the push.
        strategy.reset_unusable()
        strategy.commit(push, loss, self)
        strategy.times.end()
        session.replica.check_writes()
        session.profile(strategy.times, push)
        return True

    # ---- inside

    def _begin_push(self) -> Push:
        """Begin a push, and remember the learning rates that it carries."""
        self._rates = self._strategy.rates()
        return self._strategy.begin_push(self.assignment, self.samples, self._rates)

    def _add_all(self, push: Push, scale: float) -> None:
        """Add the gradients of all parameters, divided by `scale`, to a push; the last parameter's first."""
        replica, times = self._strategy.session.replica, self._strategy.times
        times.gradients([parameter.numel() for parameter in replica.parameters])
        for index in reversed(range(len(replica.parameters))):
            gradient = replica.gradient(index)
            if gradient is not None and scale != 1.0:
                gradient = gradient / scale
            push.add(index, gradient)
        times.handed()

    def _unusable_because(self, hooks: GradientHooks, scale: float) -> str:
        """Return why the hooks' push does not hold this step's gradients; "" if it does."""
        if hooks.repeated:
            return f"a gradient arrived twice in one step{self._strategy.remedy}"
        if scale != 1.0:
            return "a GradScaler scales the gradients, which is undone at the step"
        if hooks.error is not None:
            return ""
        if self._strategy.rates() != self._rates:
            return "the script changes learning rates between the forward pass and step()"
        if changed := hooks.changed():
            specs = self._strategy.session.replica.manifest.specs
            names = ", ".join(repr(specs[index].name) for index in changed[:3])
            return (
                f"the script changes gradients between backward() and step() ({names}); clipping there clips "
                "one worker's gradients: use job.attach(..., clip_norm=) to clip the mean"
            )
        return ""
