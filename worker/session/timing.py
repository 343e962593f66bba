"""The times of a step's computation, tensor by tensor, for the server to plan by.

Backward produces gradients one after the other: what lies between two of them, without what was done with the
first, is the time of the second one's layer. Where work is handed to a device and not waited for, this is
when it was handed over. Likewise in an early forward pass (`worker/tasks/ahead`): what lies between the first
uses of two tensors, without waiting for them, is the time of the first one's layer.

Besides, how much of that time a processor of this machine had to do, and not a device, or nobody: workers on
one machine share its cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...common import machine
from ...proto import messages as m

FIRST, FULL = 5, 50  # steps before the first profile, and of the others


class StepTimes:
    """Sums over steps. Calls come in the order begin, forward, backward, gradient and handed for each tensor,
    end; a step that is broken off does not count. In a forward pass that says so, `used` and `waited` come
    before a tensor is used for the first time."""

    def __init__(
        self,
        tensors: int,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """processor: seconds that this thread had one."""
        self._tensors, self._clock, self._processor = tensors, clock, processor
        self._reported = False
        self._clear()
        self._began_at = self._at = self._processor_at = self._compressing_s = self._busy_s = 0.0
        self._last: float | None = None  # when the step before began
        self._using: int | None = None  # the tensor whose layer is being computed
        self._forward_s: list[float] = []  # by tensor, and what is nobody's
        self._backward_s: list[float] = []

    def _clear(self) -> None:
        self._steps = 0
        self._forward = [0.0] * (self._tensors + 1)
        self._backward = [0.0] * self._tensors
        self._compressing = self._whole = self._busy = 0.0

    def begin(self) -> None:
        """A step begins with its forward pass."""
        self._mark()
        self._began_at = self._at
        self._using, self._compressing_s, self._busy_s = None, 0.0, 0.0
        self._forward_s = [0.0] * (self._tensors + 1)
        self._backward_s = [0.0] * self._tensors

    def used(self, index: int) -> None:
        """A tensor is about to be used, and perhaps waited for."""
        self._pass()
        self._using = index

    def waited(self) -> None:
        """It is there."""
        self._mark()

    def forward(self) -> None:
        """The forward pass is over."""
        self._pass()

    def _pass(self) -> None:
        """Time has passed in the forward pass."""
        passed = self._computed()
        if self._forward_s:
            self._forward_s[self._tensors if self._using is None else self._using] += passed

    def backward(self) -> None:
        """The backward pass begins."""
        self._mark()

    def gradient(self, index: int) -> None:
        """Backward has the gradient of a tensor."""
        passed = self._computed()
        if self._backward_s:
            self._backward_s[index] += passed

    def gradients(self, sizes: Sequence[int]) -> None:
        """Backward has all gradients, at one time: the time is divided by elements."""
        passed, elements = self._computed(), sum(sizes)
        if self._backward_s:
            for index, size in enumerate(sizes):
                self._backward_s[index] += passed * size / max(1, elements)

    def handed(self) -> None:
        """The gradient has been compressed and handed over."""
        began = self._at
        self._mark()
        self._compressing_s += self._at - began

    def _mark(self) -> None:
        self._at, self._processor_at = self._clock(), self._processor()

    def _computed(self) -> float:
        """Seconds since the last mark, all of which went into computing."""
        at, processor_at = self._at, self._processor_at
        self._mark()
        self._busy_s += self._processor_at - processor_at
        return self._at - at

    def end(self) -> None:
        """All of the step has been handed over."""
        if not self._backward_s:
            return
        last, self._last = self._last, self._began_at
        if last is None:  # the first takes longer
            return
        self._steps += 1
        self._forward = [sum(each) for each in zip(self._forward, self._forward_s, strict=True)]
        self._compressing += self._compressing_s
        self._busy += self._busy_s
        self._whole += self._began_at - last
        self._backward = [sum(each) for each in zip(self._backward, self._backward_s, strict=True)]
        self._backward_s = []

    @property
    def due(self) -> bool:
        """Whether there is something to say: after some steps, and after every so many."""
        return self._steps >= (FULL if self._reported else FIRST)

    def profile(self, densities: Sequence[float], sent_bytes: int) -> m.Profile:
        """Return what was measured, and begin anew after a full measurement. densities, sent_bytes: see the
        message `Profile`."""
        steps = self._steps
        *forward, nobodys = (each / steps for each in self._forward)
        backward = [each / steps for each in self._backward]
        # Where the pass has not said, layers that take long backward are taken to take long forward.
        share = nobodys / (sum(backward) or 1.0)
        forward = [each + share * other for each, other in zip(forward, backward, strict=True)]
        computing = sum(forward) + sum(backward)
        found = m.Profile(
            steps=steps,
            forward_seconds=tuple(forward),
            backward_seconds=tuple(backward),
            densities=tuple(densities),
            sent_bytes=sent_bytes,
            compressing_seconds=self._compressing / steps,
            step_seconds=self._whole / steps,
            processor_share=min(1.0, self._busy / steps / computing) if computing else 0.0,
            machine=machine.name(),
        )
        self._reported = True
        if steps >= FULL:
            self._clear()
        return found
