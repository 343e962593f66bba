"""Durations of a step's computation, tensor by tensor, by which the server plans.

Backward produces gradients one after the other. The backward time of a layer is the time from the previous
gradient to its own, less the time to compress and queue the previous one. If a GPU computes and the thread
does not wait for it, only the time to start its work is measured. In an early forward pass
(`worker/tasks/ahead`), the forward time of a layer is the time from the first use of its tensor to that of
the next tensor, less the time to wait for tensors.

The fraction of these durations in which this thread used a processor is measured, too. Workers on one machine
share its cores, so only that fraction slows down when cores are short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...common import machine
from ...proto import messages as m

FIRST, FULL = 5, 50  # steps before the first profile, and before each further one


class StepTimes:
    """Sums of durations over steps, from which profiles are computed.

    For each step, the caller calls `begin`, `forward`, `backward`, then `gradient` and `handed` for each
    tensor, and `end`. A step without `end` does not count. An early forward pass also calls `used` and
    `waited` before it uses a tensor for the first time.
    """

    def __init__(
        self,
        tensors: int,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """processor: returns the seconds of processor time that this thread has used."""
        self._tensors, self._clock, self._processor = tensors, clock, processor
        self._reported = False
        self._clear()
        self._began_at = self._at = self._processor_at = self._compressing_s = self._busy_s = 0.0
        self._last: float | None = None  # when the previous step began
        self._using: int | None = None  # the tensor whose layer is being computed
        # Seconds in the present step, by tensor; the last entry is forward time that belongs to no tensor.
        self._forward_s: list[float] = []
        self._backward_s: list[float] = []

    def _clear(self) -> None:
        self._steps = 0
        self._forward = [0.0] * (self._tensors + 1)
        self._backward = [0.0] * self._tensors
        self._compressing = self._whole = self._busy = 0.0

    def begin(self) -> None:
        """Called when a step's forward pass begins: reset the step's durations."""
        self._mark()
        self._began_at = self._at
        self._using, self._compressing_s, self._busy_s = None, 0.0, 0.0
        self._forward_s = [0.0] * (self._tensors + 1)
        self._backward_s = [0.0] * self._tensors

    def used(self, index: int) -> None:
        """Called before the first use of a tensor and the wait for it: end the previous tensor's time."""
        self._add_forward()
        self._using = index

    def waited(self) -> None:
        """Called when the tensor named by `used` has arrived: exclude the time since `used`."""
        self._mark()

    def forward(self) -> None:
        """Called when the forward pass ends: end the time of the tensor in use."""
        self._add_forward()

    def _add_forward(self) -> None:
        """Add the time since the last mark to the forward time of the tensor in use."""
        passed = self._computed()
        if self._forward_s:
            self._forward_s[self._tensors if self._using is None else self._using] += passed

    def backward(self) -> None:
        """Called when the backward pass begins: its time counts from here."""
        self._mark()

    def gradient(self, index: int) -> None:
        """Called when backward has produced a tensor's gradient: add the time since the last one."""
        passed = self._computed()
        if self._backward_s:
            self._backward_s[index] += passed

    def gradients(self, sizes: Sequence[int]) -> None:
        """Called when backward has produced all gradients at once: divide the time among the tensors. sizes:
        number of elements of each tensor, to which its time is proportional."""
        passed, elements = self._computed(), sum(sizes)
        if self._backward_s:
            for index, size in enumerate(sizes):
                self._backward_s[index] += passed * size / max(1, elements)

    def handed(self) -> None:
        """Called when a gradient is compressed and queued for sending: add the time since `gradient`."""
        began = self._at
        self._mark()
        self._compressing_s += self._at - began

    def _mark(self) -> None:
        self._at, self._processor_at = self._clock(), self._processor()

    def _computed(self) -> float:
        """Return the seconds since the last mark, count them as computing, and set a new mark."""
        at, processor_at = self._at, self._processor_at
        self._mark()
        self._busy_s += self._processor_at - processor_at
        return self._at - at

    def end(self) -> None:
        """Called when all gradients of the step are queued for sending: add the step to the sums.

        The first step is left out, because it takes longer.
        """
        if not self._backward_s:
            return
        last, self._last = self._last, self._began_at
        if last is None:
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
        """True if enough steps were measured for a profile: 5 for the first one, 50 for each further one."""
        return self._steps >= (FULL if self._reported else FIRST)

    def profile(self, densities: Sequence[float], sent_bytes: int) -> m.Profile:
        """Return the mean durations of the measured steps; after 50 steps, start measuring anew.

        Args:
            densities: fraction of each tensor's elements that is sent, for the message `Profile`.
            sent_bytes: bytes of a push, for the same message.
        """
        steps = self._steps
        *forward, unassigned = (each / steps for each in self._forward)
        backward = [each / steps for each in self._backward]
        # Forward time that belongs to no tensor is divided in proportion to the tensors' backward times.
        share = unassigned / (sum(backward) or 1.0)
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
