"""Work `local`: a worker takes several steps on its own copy, and pushes the change that the steps have made.

Each local step takes the optimizer's step, and pulls towards the model that the round began with (the
correction, λ):

    w <- w - step(g) - λ (w - w_global)

From there on, the change, w_global - w, is treated like a gradient: it is compressed with its residual,
averaged at the server, weighted by samples, and subtracted. Source: the multi-step paper. Its signs are
printed the other way round; here the step descends and the correction attracts. Where the paper pushes the
last gradient, this pushes the change of all steps.

After the round's last step the parameters return to w_global, so the replica holds the values that the server
expects. A script may take its own steps in the other modes too (`job.attach(steps="local")`). An assignment
is one batch there, and therefore one step, and the server subtracts the mean of the changes.

Clipped (`local:clip=c`), each local step of a task scales its gradient down to the Euclidean norm c. Changes
leave after the last step, because the norm needs all gradients. Overlapped, they leave during the backward
pass of the last step (`overlapped`). The other variants are `Variant`s: `elastic`, `overlay`, `fragments` and
`delayed`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...compressors import NonFiniteGradient
from ...proto import messages as m
from ..metrics import WorkerMetrics
from ..session.pushes import Push
from ..session.replica import as_dense
from ..session.session import Session
from .delayed import Delayed
from .elastic import Elastic
from .fragments import Fragments
from .overlay import Overlay
from .sharding import batches, bounds
from .step import Loss, Strategy, TrainingStep, all_finite, finite, loss_of
from .variant import Changes, Variant
from .work import Local

log = logging.getLogger("gradwire.worker")

UNUSABLE_CHANGE = "the local update contains NaN or infinity"


class LocalOptimizer(Protocol):
    """The optimizer whose steps a worker takes. Its state, such as momentum, persists from round to round."""

    def step_here(self, evaluate: Callable[[], Any] | None) -> None:
        """Take one step on the replica's parameters, in place. evaluate: closure that computes the gradients,
        which the optimizer may call several times; None if the gradients are computed already."""
        ...

    def copy_state(self) -> Any:
        """Return a copy of the optimizer's state, such as its momentum."""
        ...

    def restore_state(self, state: Any) -> None:
        """Replace the optimizer's state by one that `copy_state` returned."""
        ...


class LocalStrategy(Strategy):
    """The strategy of work `local`: takes rounds of local steps, and pushes the change that each has made.

    Attributes:
        variants: variants of each round, in the order in which they move the parameters at its start.
        rates: learning rates of the server's step, by parameter group; empty to use the mode's own.
    """

    def __init__(
        self,
        session: Session,
        metrics: WorkerMetrics,
        optimizer: LocalOptimizer,
        *,
        give_up: type[Exception],
        batch_size: int | None,
        work: Local | None = None,
        single: bool = False,
        final: bool = False,
        rates: tuple[float, ...] = (),
    ) -> None:
        """batch_size: largest number of samples of a local step; None to take all of an assignment's samples
        in one step."""
        super().__init__(session, metrics, give_up=give_up, single=single, final=final)
        self.optimizer, self.rates = optimizer, rates
        self.work = work or Local()
        self.variants: list[Variant] = []
        if self.work.overlay:
            self.variants.append(Overlay(session))
        if self.work.fragments > 1:
            self.variants.append(Fragments(session, self.work.fragments))
        if self.work.elastic:
            self.variants.append(Elastic(self.work.elastic))
        self._batch_size = batch_size

    def first_batch(self, samples: int) -> slice:
        return self.batches(samples)[0]

    def begin(self, assignment: m.Assignment, samples: int) -> LocalStep:
        return LocalStep(self, assignment, bounds(assignment) or self.batches(samples))

    def begin_early(self, expected: m.Assignment, samples: int, before: Changes) -> LocalStep:
        """Begin a round before its assignment has arrived; `LocalStep.answer` pushes its change later.
        expected: assignment that follows unless a member or an evaluation intervenes."""
        return LocalStep(self, expected, self.batches(samples), early=Delayed(before))

    def batches(self, samples: int) -> list[slice]:
        """Divide a round's samples into the batches of its local steps."""
        return batches(samples, self._batch_size or samples, self.session.replica.state.least_samples)

    def image(self) -> dict[str, Any]:
        image = {**super().image(), "optimizer": self.optimizer.copy_state()}
        for variant in self.variants:
            image.update(variant.image())
        return image

    def restore(self, image: Mapping[str, Any]) -> None:
        super().restore(image)
        self.optimizer.restore_state(image["optimizer"])
        for variant in self.variants:
            variant.restore(image)


class LocalStep(TrainingStep):
    """One round of local steps, each with a batch of its own.

    Attributes:
        changes: parameters at the start of the round minus parameters at its end, by tensor; an entry is None
            if no step had a gradient of that tensor. After the answer: the changes that were pushed. None
            before the last step, or if the change is unusable.
    """

    def __init__(
        self,
        strategy: LocalStrategy,
        assignment: m.Assignment,
        bounds: Sequence[slice],
        *,
        early: Variant | None = None,
    ) -> None:
        """early: further variant of a round that begins before its assignment has arrived, so that the last
        batch does not answer it; None otherwise."""
        super().__init__(strategy, assignment, 0, bounds)
        self.changes: Changes | None = None
        self._strategy = strategy
        self._wanted = assignment.steps or len(bounds)  # number of optimizer steps
        self._taken = 0  # optimizer steps so far
        self._first = 0  # the first batch of the present optimizer step
        self._paused: list[torch.Tensor] = []  # parameters, while the model has those of the round's start
        self._exhausted = False
        self._early = early is not None
        self._reached: set[int] = set()
        self._loss: float | None = None  # of the first step that counts: of the model at the round's start
        self._unusable = ""  # reason why the last unusable batch was left out
        self._began = time.perf_counter()
        self._seconds = 0.0
        strategy.session.replica.check_writes()  # before the round: its own writes are its change
        parameters = strategy.session.replica.parameters
        with torch.no_grad():
            self._global = self._start = [parameter.detach().clone() for parameter in parameters]
            variants = strategy.variants if early is None else [early, *strategy.variants]
            moved = [each.start(assignment, parameters) for each in variants]
            if any(moved):
                self._start = [parameter.detach().clone() for parameter in parameters]

    @property
    def seeds(self) -> tuple[int, ...]:
        return (*super().seeds, self.at) if self.at else super().seeds

    @property
    def taken(self) -> int:
        """Number of optimizer steps of this round before the present one."""
        return self._taken

    @property
    def done(self) -> float:
        """Fraction of this round's samples that come before those of the present optimizer step."""
        return float(self._batches[self._first].start / self._batches[-1].stop)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the present batch's step, by the server's schedule."""
        rates = self.assignment.local_rates
        return rates[min(self._taken, len(rates) - 1)] if rates else self.assignment.learning_rate

    # ---- accumulation, for scripts

    @property
    def covered(self) -> int:
        return 0 if self._exhausted or len(self._batches) == 1 else self._first

    def restart(self) -> None:
        self.at = self._first

    @property
    def counted_steps(self) -> int:
        return self._taken if self.assignment.batches else 0

    @property
    def _missing(self) -> int:
        of_step = -(-self._first // self._taken) if self._taken else 1
        return max(1, (self._wanted - self._taken) * of_step - (self.at - self._first))

    def request(self) -> None:
        parameters = self._strategy.session.replica.parameters
        if not self._paused:  # not again after an interrupt: the model has the round's first parameters then
            with torch.no_grad():
                self._paused = [parameter.detach().clone() for parameter in parameters]
        self._copy(self._global)
        super().request()

    def extend(self, assignment: m.Assignment) -> None:
        super().extend(assignment)
        self._wanted = assignment.steps or self._wanted
        self._copy(self._paused)
        self._paused = []

    def finish(self) -> None:
        self._exhausted = True
        self.end()

    def end(self) -> None:
        """End the step: push the local steps that were taken, which is too late if there is other work."""
        if not self._taken:
            super().finish()
            return
        self.open = False
        self._keep(self._changes(self._paused))
        self.answer(self.assignment)

    # ---- batches

    def push(self, loss: Loss, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        why = self._take_step(loss, scale, evaluate)
        if why:
            self._unusable = why
            if self._wanted > 1:
                log.warning("version %d: %s; this local step is left out", self.assignment.version, why)
        return self._next_batch() and not why

    def skip(self, why: str) -> None:
        log.info("version %d: %s; this step contributes nothing", self.assignment.version, why)
        self._next_batch()

    def answer(self, assignment: m.Assignment) -> bool:
        """Push the change that the steps have made, as the answer to an assignment.

        Call it after the last step. The step itself calls it, unless the round was begun early. Returns True
        if the push contributes to the job. Raises the strategy's `give_up` if too many steps in a row have
        contributed nothing.
        """
        strategy, session = self._strategy, self._strategy.session
        self.assignment = assignment
        if not self.samples:
            if self._unusable:
                return self._contribute_nothing(self._unusable)
            session.skip(assignment, batches=self.covered, steps=self.counted_steps)  # no step was usable
            return False
        session.doing("compressing")
        assert self.changes is not None
        push = strategy.begin_push(assignment, self._counted(), strategy.rates)
        try:
            for variant in strategy.variants:
                self.changes = variant.carry(self.changes, assignment.version, everything=session.leaving)
            for index in reversed(range(len(self.changes))):
                push.add(index, self.changes[index])
        except NonFiniteGradient:
            for variant in strategy.variants:
                variant.drop()
            self.changes = None
            return self._contribute_nothing(UNUSABLE_CHANGE, push, self._loss)
        return self._commit(push)

    # ---- inside

    def _copy(self, values: Sequence[torch.Tensor]) -> None:
        replica = self._strategy.session.replica
        with torch.no_grad():
            for parameter, value in zip(replica.parameters, values, strict=True):
                parameter.copy_(value)
        replica.wrote()

    def _counted(self, *, with_batch: bool = False) -> int:
        """Return the number of samples that the push counts. with_batch: the present batch counts, too."""
        if self._strategy.final:  # the server weights parts by it before it knows which steps were left out
            return int(self._batches[-1].stop)
        return self.samples + (self.batch.stop - self.batch.start if with_batch else 0)

    def _commit(self, push: Push) -> bool:
        strategy = self._strategy
        strategy.reset_unusable()
        strategy.commit(push, self._loss, self, computing_s=0.0 if strategy.rates else self._seconds)
        return True

    def _take_step(self, loss: Loss, scale: float, evaluate: Callable[[], Any] | None) -> str:
        """Take the local step of the present batch; return why it is left out, or "" if it is taken."""
        strategy, work = self._strategy, self._strategy.work
        parameters = strategy.session.replica.parameters
        before = loss_of(loss)
        if not finite(before):
            return f"the loss is {before}"
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if evaluate is None and not all_finite(gradients):  # they would enter the optimizer's state for good
            return "a gradient is not finite"
        with torch.no_grad():
            for gradient in gradients if scale != 1.0 else ():
                gradient.div_(scale)
            pulls: list[torch.Tensor] = []
            if self.samples and work.correction:
                pairs = zip(parameters, self._start, strict=True)
                pulls = [(parameter - began).mul_(work.correction) for parameter, began in pairs]
            if work.clip:
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad = as_dense(parameter.grad)
                torch.nn.utils.clip_grad_norm_(parameters, work.clip)
        strategy.optimizer.step_here(evaluate)
        with torch.no_grad():
            for parameter, pull in zip(parameters, pulls, strict=False):
                parameter.sub_(pull)
        self._reached.update(index for index, each in enumerate(parameters) if each.grad is not None)
        if not self.samples:
            self._loss = loss_of(loss)
        self.samples += self.batch.stop - self._batches[self._first].start
        return ""

    def _next_batch(self) -> bool:
        """Continue with the next batch; after the last one, answer, unless the round was begun early. Returns
        False only if an answer was given that contributes nothing."""
        self._count()
        self.open = self._taken < self._wanted
        if self.open:
            return True
        self._put_back(self._changes(self._strategy.session.replica.parameters))
        return self._early or self.answer(self.assignment)

    def _count(self) -> None:
        """Count an optimizer step, with the present batch as its last one."""
        self._taken += 1
        self.at += 1
        self._first = self.at

    def _changes(self, end: Sequence[torch.Tensor]) -> Changes:
        """Return the round's change of each tensor. end: parameters after the last step."""
        with torch.no_grad():
            for variant in self._strategy.variants if self.samples else ():
                found = variant.change(self._start, end)
                if found is not None:
                    return found
            return [
                began - parameter if index in self._reached else None
                for index, (began, parameter) in enumerate(zip(self._start, end, strict=True))
            ]

    def _put_back(self, changes: Changes) -> None:
        """Restore the parameters to the global model, and keep the round's change."""
        self._copy(self._global)
        self._keep(changes)

    def _keep(self, changes: Changes) -> None:
        """Keep the round's change for the push, and free the copies of the parameters."""
        self._start = self._global = self._paused = []
        self._seconds = time.perf_counter() - self._began
        self.changes = changes if self.samples else None
