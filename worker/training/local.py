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

*Overlapped* (figures 1 and 3b of that paper; `--overlap backward` and `both`), the change of each parameter
leaves during the backward pass of the last step (`LastStep`). Once the parameter's gradient is there, a copy
of the parameter takes the last step, and the change goes into the push. The parameters themselves keep their
values until backward has ended, because it may still use them. The bits are those of steps without overlap.
With `both`, parts of the update come back early, and the first forward pass of the next round waits for them
layer by layer (`worker/tasks/ahead`).

If the last step is not finite or a gradient arrives twice, the optimizer's state of that step is undone, the
push is abandoned, and the round ends as it would without overlap. With `both`, parts that have left cannot be
taken back. Then the last step is left out for the tensors whose change has not left: their change of the
earlier steps does. A push with `both` always counts all samples of its assignment, because the server weights
each part before the push is committed.

*Elastic* (`local:elastic=α`; EASGD: Zhang, Choromanska and LeCun, NIPS 2015), a worker keeps its own
parameters x_i from round to round, and the replica holds the center x̃. After the steps of a round,

    x_i <- x_i - α (x_i - x̃)        x̃ <- x̃ + Σ_i α (x_i - x̃)

with the x̃ that the round began with on both sides. A worker begins its first round at the center. It pushes
α (x̃ - x_i), which the server subtracts with the weight 1. A push that arrives too late goes into the
residual like any other, and moves the center later. If the change of a round is not finite, the worker begins
again at the center. Changes leave after the last step.

*Overlay* (`local:overlay=on`), a worker sees the part of its own changes that it has not sent. With the
residual e, the decay β of the compressor, and W workers in the round:

    x = base = w_global - e / W;  H steps from x;  e <- β e + (base - x);  q = C(e);  e <- e - q;  send q

The server would subtract e / W if the worker could send all of its residual. So the steps of a round continue
from all earlier steps of the worker. The change that is pushed is measured from `base`, and the replica still
returns to w_global. This is an addition of this project.

*Streaming* (`local:fragments=F`; Streaming DiLoCo: Douillard et al., "Streaming DiLoCo with overlapping
communication", 2025), the tensors are divided into F fragments, and the round of version v exchanges the
changes of fragment v mod F alone. A worker carries its changes of the others into the next round: it begins
at w_global less the carried changes, and pushes a fragment's changes of all rounds since its last turn. So a
fragment is exchanged after F rounds, and a round of H / F steps moves an F-th of the bytes. A worker that
leaves pushes all fragments. One that returns at another version has lost its carried changes, like its
residual. At the end of the job the last changes of F - 1 fragments are not in the model.

*Clipped* (`local:clip=c`), each local step of a task scales its gradient down to the Euclidean norm c.
Changes leave after the last step, because the norm needs all gradients.

*Delayed* (not in that paper: there each round begins with the model that the last one made), a worker does
not wait for the exchange. After pushing its change c_s of round s, it takes the steps of round s + 1 at once,
on the samples that the server has announced (`Assignment.next`). It starts from the last global model that it
has, less its own change:

    x_0 = w_s - c_s
    c_{s+1} = x_0 - x_H, after H steps from x_0
    w_{s+2} = w_{s+1} - outer(mean over workers of c_{s+1})

It pushes c_{s+1} when it has w_{s+1} and the assignment that it expected, and continues from w_{s+1} -
c_{s+1}. Therefore the steps of a round lack the changes that other workers made in the previous round: a
staleness of one round. With plain averaging and no pull, this is CoCoD-SGD (Shen et al., IJCAI 2019): the
points at which workers start a round have the mean w_{s+1}. Each worker starts the next round at that mean,
moved by its own change since. Overlap Local-SGD (Wang et al., 2020) is different: there a worker keeps its
model, and is pulled part of the way to that mean.

A step pulls towards x_0, the worker's estimate of the global model. A pull towards w_s would undo c_s, which
is being exchanged. The learning rates are those of round s, because the next ones are not known yet.

While a round is computed early, updates wait in the connection: the parameters return to w_s before
`Session.next` applies any update. The shard takes no part in this. Control only determines the number of
steps one round earlier.
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
from .fragments import Changes, divide, fragments_of
from .hooks import GradientHooks
from .last_step import LastStep, NonFiniteStep, TensorOptimizer
from .sharding import batches, bounds
from .step import Loss, Strategy, TrainingStep, all_finite, finite, loss_of

log = logging.getLogger("gradwire.worker")

UNUSABLE_CHANGE = "the local update contains NaN or infinity"


class LocalOptimizer(Protocol):
    """The optimizer whose steps a worker takes. Its state, such as momentum, persists from round to round."""

    def step_here(self, evaluate: Callable[[], Any] | None) -> None:
        """Take one step on the replica's parameters, in place.

        Args:
            evaluate: closure that computes the gradients, which the optimizer may call several times; None
                if the gradients are computed already.
        """
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
        optimizer: takes the local steps.
        by_tensor: takes the last step of each round; None if changes leave after it.
        correction: λ, 0 to 1: share of its distance from the round's first model by which a step is pulled
            back.
        elastic: α of elastic averaging, 0 to 1; 0 without it.
        overlay: whether a round begins with this worker's share of its own residual already applied.
        clip: largest Euclidean norm of a local step's gradient; 0 for no limit.
        fragments: fragment of each parameter, from 0; each round exchanges one of them.
        own: this worker's parameters between rounds of elastic averaging; None to begin at the center.
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
        correction: float = 0.0,
        elastic: float = 0.0,
        overlay: bool = False,
        clip: float = 0.0,
        fragments: int = 1,
        single: bool = False,
        final: bool = False,
        by_tensor: TensorOptimizer | None = None,
        rates: tuple[float, ...] = (),
    ) -> None:
        """
        Args:
            session: receives the pushes.
            metrics: counts the steps that contribute nothing.
            optimizer: takes the local steps.
            give_up: exception raised after `MAX_UNUSABLE` steps in a row that contributed nothing.
            batch_size: largest number of samples of a local step; None to take all of an assignment's
                samples in one step.
            correction: λ, 0 to 1, the strength of the pull.
            elastic: α of elastic averaging, 0 to 1; 0 without it.
            overlay: whether a round begins with this worker's share of its own residual already applied.
            clip: largest Euclidean norm of a local step's gradient; 0 for no limit.
            fragments: number of fragments of the model, of which each round exchanges one.
            single: whether each push makes a version of its own.
            final: whether the server uses parts before their push is committed.
            by_tensor: takes the last step of each round, so that changes leave during its backward pass; None
                to send them after it.
            rates: learning rates of the server's step, by parameter group; empty to use the mode's own.
        """
        super().__init__(session, metrics, give_up=give_up, single=single, final=final)
        self.optimizer = optimizer
        self.correction = correction
        self.elastic = elastic
        self.overlay = overlay
        self.clip = clip
        self.fragments = fragments_of([each.numel() for each in session.replica.parameters], fragments)
        self.own: list[torch.Tensor] | None = None
        self.rates = rates
        self._batch_size = batch_size
        self.by_tensor = by_tensor
        if by_tensor is not None:
            self.hooks = GradientHooks(session.replica.parameters, self.times)

    def first_batch(self, samples: int) -> slice:
        return self._batches(samples)[0]

    def begin(self, assignment: m.Assignment, samples: int) -> LocalStep:
        less = self.session.residuals(1 / max(1, assignment.world)) if self.overlay else ()
        return LocalStep(self, assignment, bounds(assignment) or self._batches(samples), less=less)

    def begin_early(self, expected: m.Assignment, samples: int, less: Changes) -> LocalStep:
        """Begin a round before its assignment has arrived; `LocalStep.answer` pushes its change later.

        Args:
            expected: assignment that follows unless a member or an evaluation intervenes.
            samples: number of samples of the expected assignment.
            less: this worker's change of the previous round, which the replica lacks: it is subtracted from
                the parameters before the first step.

        Returns:
            The round, with its first batch open.
        """
        return LocalStep(self, expected, self._batches(samples), less=less, early=True)

    def _batches(self, samples: int) -> list[slice]:
        """Divide a round's samples into the batches of its local steps."""
        return batches(samples, self._batch_size or samples, self.session.replica.state.least_samples)

    def image(self) -> dict[str, Any]:
        image = {**super().image(), "optimizer": self.optimizer.copy_state()}
        if self.own is not None:
            image["own"] = [each.clone() for each in self.own]
        return image

    def restore(self, image: Mapping[str, Any]) -> None:
        super().restore(image)
        self.optimizer.restore_state(image["optimizer"])
        if "own" in image:
            pairs = zip(image["own"], self.session.replica.parameters, strict=True)
            self.own = [each.to(parameter.device) for each, parameter in pairs]


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
        less: Changes = (),
        early: bool = False,
    ) -> None:
        """
        Args:
            strategy: strategy of this work.
            assignment: assignment to answer, or the expected one.
            bounds: batches, as ranges of positions among the assignment's samples.
            less: values to subtract from the parameters before the first step, by tensor; empty for none.
            early: whether the assignment has not arrived yet, so that the last batch does not answer it.
        """
        super().__init__(strategy, assignment, 0)
        self.changes: Changes | None = None
        self._strategy = strategy
        self._batches = list(bounds)
        self._wanted = assignment.steps or len(bounds)  # number of optimizer steps
        self._last: LastStep | None = None  # the last step, while its changes leave during backward
        self._taken = 0  # optimizer steps so far
        self._first = 0  # the first batch of the present optimizer step
        self._paused: list[torch.Tensor] = []  # parameters, while the model has those of the round's start
        self._exhausted = False
        self._early = early
        self._reached: set[int] = set()
        self._loss: float | None = None  # of the first step that counts: of the model at the round's start
        self._unusable = ""  # reason why the last unusable batch was left out
        self._began = time.perf_counter()
        self._seconds = 0.0
        replica = strategy.session.replica
        replica.check_writes()  # before the round: its own writes to the parameters are its change
        with torch.no_grad():
            self._global = self._start = [parameter.detach().clone() for parameter in replica.parameters]
            for parameter, each in zip(replica.parameters, less, strict=False):
                if each is not None:
                    parameter.sub_(each)
            for parameter, carried in zip(replica.parameters, strategy.session.carried, strict=False):
                if carried is not None:
                    parameter.sub_(carried.to(parameter.device))
            for parameter, own in zip(replica.parameters, strategy.own or (), strict=False):
                parameter.copy_(own)
            if less or strategy.session.carried:
                self._start = [parameter.detach().clone() for parameter in replica.parameters]

    @property
    def batch(self) -> slice:
        return self._batches[self.at]

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
    def lacking(self) -> bool:
        return self.open and self.at == len(self._batches)

    @property
    def last(self) -> bool:
        return self.at + 1 == len(self._batches)

    @property
    def covered(self) -> int:
        return 0 if self._exhausted or len(self._batches) == 1 else self._first

    def restart(self) -> None:
        self.at = self._first

    @property
    def counted_steps(self) -> int:
        return self._taken if self.assignment.batches else 0

    def accumulate(self) -> None:
        self.withdraw()
        self.at += 1

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
        self._batches, self._wanted = bounds(assignment) or self._batches, assignment.steps or self._wanted
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

    def _copy(self, values: Sequence[torch.Tensor]) -> None:
        """Set the model's parameters."""
        replica = self._strategy.session.replica
        with torch.no_grad():
            for parameter, value in zip(replica.parameters, values, strict=True):
                parameter.copy_(value)
        replica.wrote()

    def follow(self) -> None:
        super().follow()
        strategy = self._strategy
        if (
            strategy.hooks is None
            or strategy.by_tensor is None
            or self._early
            or self.at < len(self._batches) - 1
        ):
            return
        self._last = LastStep(
            strategy.begin_push(self.assignment, self._counted(with_batch=True), strategy.rates),
            strategy.by_tensor,
            strategy.session.replica.parameters,
            self._start,
            strategy.correction if self.samples else 0.0,
        )
        strategy.hooks.follow(self._last)

    @property
    def sent(self) -> bool:
        return self._last is not None and bool(self._last.push.checksums)

    def withdraw(self) -> bool:
        last, self._last = self._last, None
        if last is None or self._strategy.hooks is None:
            return False
        self._strategy.hooks.stop()
        last.undo()
        self._strategy.session.abandon(last.push)
        return bool(last.changes)

    def push(self, loss: Loss, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        if self._last is not None and self._strategy.hooks is not None:
            answered = self._finish_last(self._last, self._strategy.hooks, loss_of(loss))
            if answered is not None:
                return answered
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

        Call it after the last step. The step itself calls it, unless the round was begun early.

        Args:
            assignment: assignment to answer.

        Returns:
            True if the push contributes to the job.

        Raises:
            The strategy's `give_up`: too many steps in a row have contributed nothing.
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
        self.changes, carried = divide(
            self.changes, session.carried, strategy.fragments, assignment.version, everything=session.leaving
        )
        try:
            for index in reversed(range(len(self.changes))):
                push.add(index, self.changes[index])
            if not all_finite([each for each in carried if each is not None]):
                raise NonFiniteGradient("a fragment that is not exchanged yet")
            session.carried = carried
        except NonFiniteGradient:
            self.changes = strategy.own = None
            return self._contribute_nothing(UNUSABLE_CHANGE, push, self._loss)
        return self._commit(push)

    # ---- inside

    def _counted(self, *, with_batch: bool = False) -> int:
        """Return the number of samples that the push counts.

        Args:
            with_batch: whether the present batch counts besides those before.
        """
        if self._strategy.final:  # the server weights parts by it before it knows which steps were left out
            return int(self._batches[-1].stop)
        return self.samples + (self.batch.stop - self.batch.start if with_batch else 0)

    def _finish_last(self, last: LastStep, hooks: GradientHooks, loss: float | None) -> bool | None:
        """Complete the push that hooks have filled during the last backward pass, and answer.

        Returns:
            True if the push contributes to the job. None if it was withdrawn: the last step is then taken as
            without hooks.

        Raises:
            The strategy's `give_up`: a gradient arrived twice, and parts that have left cannot be taken back;
            or too many steps in a row have contributed nothing.
        """
        strategy = self._strategy
        hooks.stop()
        if hooks.repeated:
            why = "a gradient arrived twice in one step"
            if strategy.final and self.sent:
                raise strategy.give_up(f"{why}, and some parts have left: use --overlap off for this model")
            self.withdraw()
            strategy.stop_overlap(why)
            return None
        try:
            if hooks.error is not None:
                raise hooks.error
            if not finite(loss):
                raise NonFiniteStep(f"the loss is {loss}")
            for index in self._rest(last):
                gradient = strategy.session.replica.gradient(index)
                if gradient is None:
                    last.leave_out(index, reached=index in self._reached, pulled=True)
                else:
                    last.add(index, gradient)
        except (NonFiniteStep, NonFiniteGradient) as error:
            if not (strategy.final and self.sent):
                self.withdraw()
                return None
            if finite(loss) and not self.samples:
                self._loss = loss
            return self._answer_in_part(last, error)
        if not self.samples:
            self._loss = loss
        self._end_last(last)
        return self._commit(last.push)

    def _answer_in_part(self, last: LastStep, error: Exception) -> bool:
        """Answer although the last step failed for some tensors, because parts of the push count already."""
        why = str(error) if isinstance(error, NonFiniteStep) else UNUSABLE_CHANGE
        if isinstance(error, NonFiniteStep) and self.samples:
            version = self.assignment.version
            log.warning("version %d: %s; tensors that have not left leave out this local step", version, why)
            try:
                for index in self._rest(last):
                    last.leave_out(index, reached=index in self._reached)
                self._end_last(last)
                return self._commit(last.push)
            except NonFiniteGradient:
                why = UNUSABLE_CHANGE
        self._end_last(last)
        self.changes = None
        return self._contribute_nothing(why, last.push, self._loss)

    def _rest(self, last: LastStep) -> list[int]:
        """Return the indices of the tensors whose changes were not passed on, in descending order."""
        return [index for index in reversed(range(len(self._start))) if index not in last.changes]

    def _end_last(self, last: LastStep) -> None:
        """End the round after its last step, which was taken tensor by tensor."""
        self._last, self.open = None, False
        self._count()
        self.samples = last.push.samples
        self._put_back([last.changes.get(index) for index in range(len(self._start))])

    def _commit(self, push: Push) -> bool:
        """Commit a push that contributes to the job."""
        strategy = self._strategy
        strategy.reset_unusable()
        strategy.commit(push, self._loss, self, computing_s=0.0 if strategy.rates else self._seconds)
        return True

    def _take_step(self, loss: Loss, scale: float, evaluate: Callable[[], Any] | None) -> str:
        """Take the local step of the present batch; return why it is left out, or "" if it is taken."""
        parameters, correction = self._strategy.session.replica.parameters, self._strategy.correction
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
            if self.samples and correction:
                pairs = zip(parameters, self._start, strict=True)
                pulls = [(parameter - began).mul_(correction) for parameter, began in pairs]
            if self._strategy.clip:
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad = as_dense(parameter.grad)
                torch.nn.utils.clip_grad_norm_(parameters, self._strategy.clip)
        self._strategy.optimizer.step_here(evaluate)
        with torch.no_grad():
            for parameter, pull in zip(parameters, pulls, strict=False):
                parameter.sub_(pull)
        self._reached.update(index for index, each in enumerate(parameters) if each.grad is not None)
        if not self.samples:
            self._loss = loss_of(loss)
        self.samples += self.batch.stop - self._batches[self._first].start
        return ""

    def _next_batch(self) -> bool:
        """Continue with the next batch; after the last one, answer, unless the round was begun early.

        Returns:
            False only if an answer was given that contributes nothing.
        """
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

    def _changes(self, parameters: Sequence[torch.Tensor]) -> Changes:
        """Return the round's change of each tensor; in elastic averaging also move this worker's own
        parameters.

        Args:
            parameters: parameters after the last step.
        """
        strategy = self._strategy
        pairs = list(zip(self._start, parameters, strict=True))
        with torch.no_grad():
            if strategy.elastic and self.samples:
                changes = [(before - own).mul_(strategy.elastic) for before, own in pairs]
                moved = zip(pairs, changes, strict=True)
                strategy.own = [own + change for (_, own), change in moved]
                return changes
            return [
                began - parameter if index in self._reached else None
                for index, (began, parameter) in enumerate(pairs)
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
