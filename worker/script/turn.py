"""One assignment, answered by a script's own backward passes and its call of `optimizer.step()`.

Gradients go to the push as backward makes them, where the job overlaps the two, or all of them at the step.
What the script does to a gradient in between, such as clipping or unscaling, would be missed by a push that
has begun: checksums find it at the step. Then the push is abandoned, the gradients go out as they are now,
and from then on they leave at the step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...compressors import NonFiniteGradient
from ...proto import messages as m
from ..session.hooks import GradientHooks
from ..session.pushing import Pushing
from ..session.session import Session
from ..session.timing import StepTimes

log = logging.getLogger("gradwire.worker")

MAX_SKIPPED = 10  # steps in a row
NO_WORK = (
    "optimizer.step(): there is no work to answer; call it once for each batch, in the loop over "
    "job.batches(...)"
)


class ScriptError(RuntimeError):
    """The script asks for what its job cannot do; the message says what to change."""


class Turns:
    """The turns of one script, one after the other: `begin`, then `push` or `skip`.

    Attributes:
        loss: that the next push reports.
    """

    def __init__(
        self,
        session: Session,
        rates: Callable[[], tuple[float, ...]],
        *,
        single: bool,
        overlap: bool,
        final: bool,
    ) -> None:
        """
        Args:
            rates: the script's learning rates as they are now, by parameter group.
            single: whether gradients become versions one at a time.
            overlap: push parts during the backward pass.
            final: whether parts may count before the push is committed, and cannot be taken back.
        """
        self._session = session
        self._rates = rates
        self._single, self._final = single, final
        self._steps = 0
        self._skipped = 0
        self._times = StepTimes(len(session.replica.parameters))
        self._hooks: GradientHooks | None = None
        if overlap:
            self._hooks = GradientHooks(session.replica.parameters, self._times, checksum=checksum)
            # torch.compile would trace the hook of a module that it compiles.
            untraced: Any = torch.compiler.disable(self._passed)
            session.replica.model.register_forward_hook(untraced)
        self._assignment: m.Assignment | None = None
        self._samples = 0
        self._apart = False
        self._pushing: Pushing | None = None  # that hooks follow
        self._begun_at: tuple[float, ...] = ()  # its learning rates
        self.loss = 0.0

    @property
    def open(self) -> bool:
        """Whether there is an assignment to answer."""
        return self._assignment is not None

    @property
    def batch(self) -> slice:
        """Which of the assignment's samples the next step is for: all."""
        return slice(0, self._samples)

    def image(self) -> dict[str, Any]:
        """What the next turn depends on, with none open."""
        return {"steps": self._steps}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image`."""
        self._steps = image["steps"]

    def begin(self, assignment: m.Assignment, samples: int) -> None:
        """An assignment has come, for so many samples."""
        self._assignment, self._samples, self.loss = assignment, samples, 0.0
        self._session.doing("computing")
        self._times.begin()

    @contextmanager
    def apart(self) -> Generator[None]:
        """Backward passes in it only add to the gradients: another one follows before the step."""
        self._give_up()
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def push(self, scale: float = 1.0, evaluate: Callable[[], Any] | None = None) -> bool:
        """Push the gradients, which are `scale` times what they should be. Returns whether they can be used.

        evaluate: computes them.

        Raises:
            ScriptError: gradients have been unusable in too many steps in a row.
        """
        if evaluate is not None:
            evaluate()
        assignment = self._take()
        self._session.replica.check_complete()
        if not math.isfinite(self.loss):
            self._give_up()
            self._unusable(assignment, f"the loss is {self.loss}")
            return False
        try:
            pushing = self._followed(scale) or self._whole(assignment, scale)
        except NonFiniteGradient as error:
            self._give_up()
            self._unusable(assignment, str(error))
            return False
        self._steps += 1
        self._session.commit(pushing, self.loss)
        self._times.end()
        self._session.profile(self._times, pushing)
        return True

    def skip(self, why: str) -> None:
        """Answer without a gradient."""
        assignment = self._take()
        self._give_up()
        log.info("version %d: %s; this step contributes nothing", assignment.version, why)
        self._session.skip(assignment)

    # ---- inside

    def _take(self) -> m.Assignment:
        if self._assignment is None:
            raise ScriptError(NO_WORK)
        assignment, self._assignment = self._assignment, None
        return assignment

    def _give_up(self) -> None:
        """Abandon what hooks follow, if they do."""
        pushing, self._pushing = self._pushing, None
        if pushing is not None and self._hooks is not None:
            self._hooks.let_go()
            self._session.abandon(pushing)

    def _passed(self, *_: object) -> None:
        """The model's forward pass is over: gradients may come, and a script has set its rates by now."""
        self._session.moved()
        assignment = self._assignment
        if assignment is None or self._apart or not torch.is_grad_enabled():
            return
        self._times.forward()
        self._times.backward()
        if self._pushing is None and self._hooks is not None:
            self._pushing = self._begun(assignment)
            self._hooks.follow(self._pushing)

    def _begun(self, assignment: m.Assignment) -> Pushing:
        version, rank = assignment.version, assignment.position
        if self._single:
            version, rank = assignment.id, 0
        step = self._steps if self._single else assignment.version
        self._begun_at = self._rates()
        return self._session.begin_step(
            assignment, self._samples, rank=rank, version=version, step=step, learning_rates=self._begun_at
        )

    def _followed(self, scale: float) -> Pushing | None:
        """The push that hooks have followed, with what they have not seen. None if there is none, or what it
        holds are not the gradients of this step."""
        hooks, replica = self._hooks, self._session.replica
        if hooks is None or self._pushing is None:
            return None
        missing = hooks.let_go()
        why = ""
        if hooks.repeated:
            why = "a gradient came twice in one step; put all but the last backward pass under job.no_sync()"
        elif scale != 1.0:
            why = "a GradScaler scales the gradients, which is undone at the step"
        elif hooks.error is not None:
            raise hooks.error
        elif self._rates() != self._begun_at:
            why = "the script changes learning rates between the forward pass and step()"
        elif changed := hooks.changed():
            names = ", ".join(repr(replica.manifest.specs[place].name) for place in changed[:3])
            why = (
                f"the script changes gradients between backward() and step() ({names}); where it clips them, "
                "it clips those of one worker: job.attach(..., clip_norm=) clips the mean"
            )
        if why:
            log.warning("from now on gradients leave at step(), not during backward(): %s", why)
            self._give_up()
            self._hooks = None
            return None
        pushing = self._pushing
        for place in missing:  # the loss does not reach them, or hooks do not see it
            pushing.add(place, replica.gradient(place))
        self._pushing, self._skipped = None, 0
        return pushing

    def _whole(self, assignment: m.Assignment, scale: float) -> Pushing:
        """All gradients, as they are now."""
        pushing = self._begun(assignment)
        replica = self._session.replica
        try:
            self._times.gradients([parameter.numel() for parameter in replica.parameters])
            for place in reversed(range(len(replica.parameters))):
                gradient = replica.gradient(place)
                if gradient is not None and scale != 1.0:
                    gradient = gradient / scale
                pushing.add(place, gradient)
            self._times.handed()
            self._skipped = 0
        except NonFiniteGradient as error:
            if not (self._final and pushing.checksums):
                self._session.abandon(pushing)
                raise
            log.warning("version %d: %s; some of its parts have left", assignment.version, error)
            pushing.cease()
            self._count_skipped(str(error))
        return pushing

    def _unusable(self, assignment: m.Assignment, why: str) -> None:
        log.warning("version %d: %s; this step contributes nothing", assignment.version, why)
        self._session.skip(assignment)
        self._count_skipped(why)

    def _count_skipped(self, why: str) -> None:
        self._skipped += 1
        if self._skipped >= MAX_SKIPPED:
            raise ScriptError(
                f"{why} in {self._skipped} steps in a row: lower the learning rate, or check the data"
            )


def checksum(gradient: torch.Tensor) -> int:
    """Of its bits; another one after almost any change."""
    bits = gradient.detach().to_dense().reshape(-1).to(torch.float32).view(torch.int32)
    return int(bits.sum(dtype=torch.int64))
