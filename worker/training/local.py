"""Work `local`: a worker takes some steps on its own copy, and pushes what they have changed.

Each local step takes the optimizer's step, and pulls towards the model that the round began with (the
correction, λ):

    w <- w - step(g) - λ (w - w_global)

The change, w_global - w, takes a gradient's place from there on: it is compressed with its residual, averaged
at the server, weighted by samples, and subtracted. Source: the multi-step paper, with descent and attraction
where its signs are printed the other way round, and the change of all steps where it has the last gradient.

The parameters are back at w_global when the round's last step has been taken, so the replica stays what the
server takes it for. A script may take its own steps in the other modes too (`job.attach(steps="local")`): an
assignment is one batch there, and so one step, and the server subtracts the mean of the changes.

*Delayed* (figure 3b of that paper), a worker does not wait for the exchange. Having pushed its change c_s of
round s, it takes the steps of round s + 1 at once, on the samples that the server says it will have
(`Assignment.next`), from the last global model that it has, less its own change:

    x_0 = w_s - c_s
    c_{s+1} = x_0 - x_H, after H steps from x_0
    w_{s+2} = w_{s+1} - outer(mean over workers of c_{s+1})

It pushes c_{s+1} when it has w_{s+1} and the assignment that it expected, and continues from w_{s+1} -
c_{s+1}. So the steps of a round lack what the others have changed in the previous round: a staleness of one
round. With plain averaging and no pull, the points at which workers start a round have the mean w_{s+1}, and
each starts the next one at that mean, moved by its own change since: CoCoD-SGD (Shen et al., IJCAI 2019).
Overlap Local-SGD (Wang et al., 2020) is another one: there a worker keeps its model, and is pulled part of
the way to that mean. The pull of a step is towards x_0, what the worker takes the global model to be:
towards w_s it would take back c_s, which is on its way. The learning rate is that of round s, because the
next one is not known by then.

While a round is computed early, updates wait in the connection: the parameters are back at w_s before
`Session.next` applies any. The shard knows nothing of all this, and control no more than that it has to find
the number of steps one round earlier.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...compressors import NonFiniteGradient
from ...proto import messages as m
from ..metrics import WorkerMetrics
from ..session.session import Session
from .sharding import batches
from .step import Strategy, TrainingStep, all_finite

log = logging.getLogger("gradwire.worker")

Changes = Sequence[torch.Tensor | None]


class LocalOptimizer(Protocol):
    """The optimizer whose steps a worker takes. What it remembers stays from round to round."""

    def step_here(self, evaluate: Callable[[], Any] | None) -> None:
        """Take a step by the parameters' gradients. evaluate: computes these, as often as it is called."""
        ...

    def copy_state(self) -> Any:
        """Return a copy of the optimizer's state, such as its momentum."""
        ...

    def restore_state(self, state: Any) -> None:
        """Replace the optimizer's state by one that `copy_state` returned."""
        ...


class LocalStrategy(Strategy):
    """Steps that push the change of a round of local steps."""

    def __init__(
        self,
        session: Session,
        metrics: WorkerMetrics,
        optimizer: LocalOptimizer,
        *,
        give_up: type[Exception],
        batch_size: int | None,
        correction: float = 0.0,
        single: bool = False,
        final: bool = False,
        rates: tuple[float, ...] = (),
    ) -> None:
        """
        Args:
            session, metrics, give_up, single, final: see `Strategy`.
            optimizer: takes the local steps.
            batch_size: largest number of samples of a local step; None for all of the assignment's.
            correction: λ, 0 to 1.
            rates: learning rates of the server's step, by parameter group; none for the mode's own.
        """
        super().__init__(session, metrics, give_up=give_up, single=single, final=final)
        self.optimizer = optimizer
        self.correction = correction
        self.rates = rates
        self._batch_size = batch_size

    def begin(self, assignment: m.Assignment, samples: int) -> LocalStep:
        return LocalStep(self, assignment, self._batches(samples))

    def begin_early(self, expected: m.Assignment, samples: int, less: Changes) -> LocalStep:
        """Begin a round before its assignment has arrived; `LocalStep.answer` pushes it.

        Args:
            expected: the assignment that will follow if nothing happens.
            samples: number of its samples.
            less: this worker's change of the previous round, which the replica does not have yet.
        """
        return LocalStep(self, expected, self._batches(samples), less=less, early=True)

    def _batches(self, samples: int) -> list[slice]:
        return batches(samples, self._batch_size or samples, self.session.replica.state.least_samples)

    def image(self) -> dict[str, Any]:
        return {**super().image(), "optimizer": self.optimizer.copy_state()}

    def restore(self, image: Mapping[str, Any]) -> None:
        super().restore(image)
        self.optimizer.restore_state(image["optimizer"])


class LocalStep(TrainingStep):
    """One round of local steps, a batch each.

    Attributes:
        changes: what the steps have changed, by tensor, None where no step has reached it; None before the
            last step, and where the change is unusable.
    """

    def __init__(
        self,
        strategy: LocalStrategy,
        assignment: m.Assignment,
        bounds: Sequence[slice],
        *,
        less: Changes = (),
        early: bool = False,
    ) -> None:
        """
        Args:
            bounds: which of the assignment's samples each batch has.
            less, early: see `LocalStrategy.begin_early`.
        """
        super().__init__(strategy, assignment, 0)
        self.changes: Changes | None = None
        self._strategy = strategy
        self._batches = bounds
        self._at = 0  # the present batch
        self._early = early
        self._reached: set[int] = set()
        self._loss = 0.0  # of the first batch that counts: that of the model that the round began with
        self._unusable = ""  # why the last batch that does not count does not
        self._began = time.perf_counter()
        self._seconds = 0.0
        replica = strategy.session.replica
        replica.check_writes()  # what comes later is a part of this worker's change
        with torch.no_grad():
            self._global = self._start = [parameter.detach().clone() for parameter in replica.parameters]
            for parameter, each in zip(replica.parameters, less, strict=False):
                if each is not None:
                    parameter.sub_(each)
            if less:
                self._start = [parameter.detach().clone() for parameter in replica.parameters]

    @property
    def batch(self) -> slice:
        return self._batches[self._at]

    @property
    def seeds(self) -> tuple[int, ...]:
        return (*super().seeds, self._at) if self._at else super().seeds

    def push(self, loss: float, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        why = self._take_step(loss, scale, evaluate)
        if why:
            self._unusable = why
            if len(self._batches) > 1:
                log.warning("version %d: %s; this local step is left out", self.assignment.version, why)
        return self._next_batch() and not why

    def skip(self, why: str) -> None:
        log.info("version %d: %s; this step contributes nothing", self.assignment.version, why)
        self._next_batch()

    def answer(self, assignment: m.Assignment) -> bool:
        """Push what the steps have changed, once the last one is taken. Returns whether that is usable."""
        strategy, session = self._strategy, self._strategy.session
        self.assignment = assignment
        if not self.samples:
            if self._unusable:
                return self._contribute_nothing(self._unusable)
            session.skip(assignment)  # the script has passed over all of them
            return False
        session.doing("compressing")
        assert self.changes is not None
        pushing = strategy.begin_push(assignment, self.samples, strategy.rates)
        try:
            for index in reversed(range(len(self.changes))):
                pushing.add(index, self.changes[index])
        except NonFiniteGradient:
            self.changes = None
            return self._contribute_nothing("the local update contains NaN or infinity", pushing, self._loss)
        strategy.usable()
        strategy.commit(pushing, self._loss, computing_s=0.0 if strategy.rates else self._seconds)
        return True

    # ---- inside

    def _take_step(self, loss: float, scale: float, evaluate: Callable[[], Any] | None) -> str:
        """Take the step of the present batch. Returns why it was not taken; empty if it was."""
        parameters, correction = self._strategy.session.replica.parameters, self._strategy.correction
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if evaluate is None and not all_finite(gradients):  # the optimizer would remember them
            return "a gradient is not finite"
        with torch.no_grad():
            for gradient in gradients if scale != 1.0 else ():
                gradient.div_(scale)
            pulls: list[torch.Tensor] = []
            if self.samples and correction:
                pairs = zip(parameters, self._start, strict=True)
                pulls = [(parameter - began).mul_(correction) for parameter, began in pairs]
        self._strategy.optimizer.step_here(evaluate)
        with torch.no_grad():
            for parameter, pull in zip(parameters, pulls, strict=False):
                parameter.sub_(pull)
        self._reached.update(index for index, each in enumerate(parameters) if each.grad is not None)
        if not self.samples:
            self._loss = loss
        self.samples += self.batch.stop - self.batch.start
        return ""

    def _next_batch(self) -> bool:
        """Go on to the next batch; after the last one, answer. Returns whether the round is usable so far."""
        self._at += 1
        self.open = self._at < len(self._batches)
        if self.open:
            return True
        self._put_back()
        return self._early or self.answer(self.assignment)

    def _put_back(self) -> None:
        """Take what the steps have changed, and put the parameters back to the global model."""
        replica = self._strategy.session.replica
        changes: list[torch.Tensor | None] = []
        with torch.no_grad():
            rows = zip(replica.parameters, self._start, self._global, strict=True)
            for index, (parameter, began, before) in enumerate(rows):
                changes.append(began - parameter if index in self._reached else None)
                parameter.copy_(before)
        replica.wrote()
        self._start = self._global = []
        self._seconds = time.perf_counter() - self._began
        self.changes = changes if self.samples else None
