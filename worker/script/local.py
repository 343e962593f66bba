"""Steps that a script's own optimizer takes on this worker; what they change is pushed like a gradient.

In mode `local` an assignment has several batches, and each `optimizer.step()` but the last returns at once:
the script trains on its own copy, pulled towards the model that the round began with as `worker/tasks/local`
says. With the last step the parameters go back to where they were, the change goes out, and those come that
are made of everybody's. In the other modes, for `job.attach(steps="local")`, an assignment is one batch, and
so one step: the server takes the mean of the changes off the parameters.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...compressors import NonFiniteGradient
from ...proto import messages as m
from ...proto.shares import share
from ..session.session import Session
from .optimizer import JobOptimizer
from .turn import MAX_SKIPPED, NO_WORK, ScriptError

log = logging.getLogger("gradwire.worker")


class LocalTurns:
    """As `turn.Turns`, with the same attributes and methods.

    Attributes:
        loss: of the next step. The push reports that of its first.
    """

    def __init__(
        self,
        session: Session,
        optimizer: JobOptimizer,
        *,
        batch_size: int | None,
        correction: float = 0.0,
        single: bool = False,
        rates: tuple[float, ...] = (),
    ) -> None:
        """
        Args:
            optimizer: whose own steps are taken.
            batch_size: most samples of a step; all of the assignment's if None.
            correction: λ, 0 to 1.
            single: whether pushes become versions one at a time.
            rates: learning rates of the server's step, by parameter group; none for the mode's own.
        """
        self._session = session
        self._optimizer = optimizer
        self._batch_size = batch_size
        self._correction = correction
        self._single = single
        self._rates = rates
        self._assignment: m.Assignment | None = None
        self._batches: list[slice] = []
        self._at = 0  # of the batches
        self._samples = 0  # of the steps that were taken
        self._start: Sequence[torch.Tensor] = ()
        self._reached: set[int] = set()
        self._first_loss: float | None = None
        self._began = 0.0
        self._pushes = 0
        self._skipped = 0
        self.loss = 0.0

    @property
    def open(self) -> bool:
        """Whether there is an assignment to answer."""
        return self._assignment is not None

    @property
    def batch(self) -> slice:
        """Which of the assignment's samples the next step is for."""
        return self._batches[self._at]

    def image(self) -> dict[str, Any]:
        """What the next turn depends on, with none open."""
        return {"pushes": self._pushes, "optimizer": self._optimizer.remembered()}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image`."""
        self._pushes = image["pushes"]
        self._optimizer.remember(image["optimizer"])

    def begin(self, assignment: m.Assignment, samples: int) -> None:
        """An assignment has come, for so many samples."""
        steps = -(-samples // (self._batch_size or samples))
        self._batches = [slice(*share(samples, step, steps)) for step in range(steps)]
        self._assignment, self._at, self._samples, self._first_loss = assignment, 0, 0, None
        self._reached.clear()
        self._start = [parameter.detach().clone() for parameter in self._session.replica.parameters]
        self._began = time.perf_counter()
        self._session.doing("computing")

    @contextmanager
    def apart(self) -> Generator[None]:
        """Nothing leaves during a backward pass."""
        yield

    def push(self, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        """Take a step, with gradients that are `scale` times what they should be. Returns whether it was
        taken, and after the last one whether the change of all can be used, too.

        evaluate: computes the gradients, as often as the optimizer wants them.

        Raises:
            ScriptError: there is no work, or gradients have been unusable in too many steps in a row.
        """
        if self._assignment is None:
            raise ScriptError(NO_WORK)
        self._session.replica.check_complete()
        why = self._step(scale, evaluate)
        if why:
            self._unusable(why)
        return self._over() and not why

    def skip(self, why: str) -> None:
        """Do without the step of this batch."""
        if self._assignment is None:
            raise ScriptError(NO_WORK)
        log.info("version %d: %s; this step contributes nothing", self._assignment.version, why)
        self._over()

    # ---- inside

    def _step(self, scale: float, evaluate: Callable[[], Any] | None) -> str:
        """Returns why it was not taken."""
        parameters = self._session.replica.parameters
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if evaluate is None and not _finite(gradients):  # the optimizer would remember them
            return "a gradient is not finite"
        with torch.no_grad():
            for gradient in gradients if scale != 1.0 else ():
                gradient.div_(scale)
            pulls: list[torch.Tensor] = []
            if self._samples and self._correction:
                pairs = zip(parameters, self._start, strict=True)
                pulls = [(parameter - began).mul_(self._correction) for parameter, began in pairs]
        self._optimizer.step_here(evaluate)
        with torch.no_grad():
            for parameter, pull in zip(parameters, pulls, strict=False):
                parameter.sub_(pull)
        self._reached.update(place for place, each in enumerate(parameters) if each.grad is not None)
        self._samples += self.batch.stop - self.batch.start
        if self._first_loss is None:
            self._first_loss = self.loss
        return ""

    def _over(self) -> bool:
        """A batch is done with. After the last one: push. Returns whether something came of all of them."""
        self._at += 1
        if self._at < len(self._batches):
            return True
        assignment, self._assignment = self._assignment, None
        assert assignment is not None
        changes = self._changes()
        if not self._samples:
            self._session.skip(assignment)
            return False
        try:
            if not _finite([each for each in changes if each is not None]):
                raise NonFiniteGradient("what the steps have changed is not finite")
            self._push(assignment, changes)
        except NonFiniteGradient as error:
            self._session.skip(assignment)
            self._unusable(str(error))
            return False
        self._skipped = 0
        return True

    def _changes(self) -> list[torch.Tensor | None]:
        """Of every parameter that a step has reached; all are put back to where the round began."""
        changes: list[torch.Tensor | None] = []
        with torch.no_grad():
            pairs = zip(self._session.replica.parameters, self._start, strict=True)
            for place, (parameter, began) in enumerate(pairs):
                changes.append(began - parameter if place in self._reached else None)
                parameter.copy_(began)
        self._start = ()
        return changes

    def _push(self, assignment: m.Assignment, changes: Sequence[torch.Tensor | None]) -> None:
        session, seconds = self._session, time.perf_counter() - self._began
        session.doing("compressing")
        single, version = self._single, assignment.version
        pushing = session.begin_step(
            assignment,
            self._samples,
            rank=0 if single else assignment.position,
            version=assignment.id if single else version,
            step=self._pushes if single else version,
            learning_rates=self._rates,
        )
        try:
            for place in reversed(range(len(changes))):
                pushing.add(place, changes[place])
        except NonFiniteGradient:
            session.abandon(pushing)
            raise
        self._pushes += 1
        session.commit(pushing, self._first_loss or 0.0, computing_s=0.0 if self._rates else seconds)

    def _unusable(self, why: str) -> None:
        log.warning("version %d: %s; this contributes nothing", self._session.replica.version or 0, why)
        self._skipped += 1
        if self._skipped >= MAX_SKIPPED:
            raise ScriptError(
                f"{why}, {self._skipped} times in a row: lower the learning rate, or check the data"
            )


def _finite(tensors: Sequence[torch.Tensor]) -> bool:
    held = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    return not held or bool(torch.stack([each.isfinite().all() for each in held]).all())
