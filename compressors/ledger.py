"""The residual ledger: what a worker has computed and the server has not got.

`residual` is one flat float32 buffer in manifest order; where momentum is corrected, `velocity` is another. A
compressor gets views of both as its state. So a worker that is given another slice of the tensors moves views
only: what it held of the old slice stays in the buffer, and goes out when it gets that range again, or in its
flush. At any time

    everything sent and accepted + residual == everything computed

(sums saturate at the largest finite float32). A step changes the ledger while it compresses. Afterwards there
are three ways in which it may end otherwise than accepted, and a verb for each:

    rollback    the step was abandoned before it was pushed: exactly the state of before it
    put_back    the push came too late (STALE): what was sent is owed again
    forget      others sent the gradient (REDUNDANT): what is owed is what was owed before the step

Any number of pushes may be open, and settled in any order.

A residual weighs in the next mean as much as its worker's gradient does, and gradients of one of n slices
weigh n times as much as those of whole tensors. `slices` is the measure that the residual is kept in; a new
number of slices rescales it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch

from .kernels.devices import saturate
from .payload import Payload
from .reduction import add_update, decode

Ranges = Sequence[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Before:
    """The ledger as it was before a step; once something else has changed it, by how much the step did.

    Attributes:
        residual, velocity: float32, shape (elements,): the state, or what has to be added to undo the step.
        states: of the compressors, None once it is a difference.
        slices: the measure of the residual.
    """

    residual: torch.Tensor
    velocity: torch.Tensor | None
    states: list[Any] | None
    slices: int


@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    """What one step sends, with what the ledger needs to settle the push.

    Attributes:
        payloads: one for each tensor; none at all where the step only adds to the residual.
        ranges: start and end of what they hold, in the flat buffer.
        slices: the measure of their values, at least 1.
        before: kept for a push that others may make superfluous.
    """

    payloads: Sequence[Payload] = ()
    ranges: Ranges = ()
    slices: int = 1
    before: Before | None = None


def norm(values: torch.Tensor) -> float:
    """Euclidean, accumulated in float64."""
    return float(cast(torch.Tensor, torch.linalg.vector_norm(values, dtype=torch.float64)))


class Ledger:
    """See the head of this file. Belongs to one thread."""

    def __init__(self, elements: Sequence[int], *, velocity: bool = False) -> None:
        """
        Args:
            elements: of each tensor, in manifest order.
            velocity: whether momentum is corrected.
        """
        self.states: list[Any] = [None] * len(elements)  # what each tensor's compressor remembers
        self.slices = 1
        self._starts = [0, *accumulate(elements)]
        self._has_velocity = velocity
        self._residual: torch.Tensor | None = None  # allocated when it is needed: many jobs never do
        self._velocity: torch.Tensor | None = None
        self._device = torch.device("cpu")
        self._latest: Before | None = None  # of the step that was the last thing to happen here

    @property
    def residual(self) -> torch.Tensor:
        """Float32, shape (elements of all tensors,)."""
        if self._residual is None:
            self._residual = torch.zeros(self._starts[-1], device=self._device)
        return self._residual

    @property
    def velocity(self) -> torch.Tensor | None:
        """As `residual`; None without momentum correction."""
        if self._velocity is None and self._has_velocity:
            self._velocity = torch.zeros_like(self.residual)
        return self._velocity

    @property
    def empty(self) -> bool:
        """Whether nothing is owed."""
        return self._residual is None or not bool(self._residual.any())

    def norm(self) -> float:
        """The norm of everything that is owed."""
        return 0.0 if self._residual is None else norm(self._residual)

    def ranges(self, parts: Ranges | None = None) -> Ranges:
        """Where parts of the tensors (start and end in each) lie in the buffer; whole tensors if None."""
        if parts is None:
            return list(pairwise(self._starts))
        return [(at + start, at + end) for at, (start, end) in zip(self._starts, parts, strict=False)]

    def take(self, start: int, end: int) -> torch.Tensor | None:
        """Remove and return what is owed of a range, for a compressor without error feedback to add to its
        gradient; None if that is nothing."""
        if self._residual is None or not self._residual[start:end].any():
            return None
        owed = self._residual[start:end].clone()
        self._residual[start:end] = 0.0
        return owed

    def to(self, device: torch.device) -> None:
        """Move the buffers; views of the old ones are void."""
        self._device = device
        if self._residual is not None:
            self._residual = self._residual.to(device)
        if self._velocity is not None:
            self._velocity = self._velocity.to(device)

    def divide(self, slices: int) -> None:
        """Keep the residual in the measure of so many slices. Momentum starts anew."""
        self._move_on()
        if slices != self.slices and self._residual is not None:
            saturate(self._residual.mul_(self.slices / slices))
        if self._velocity is not None:
            self._velocity.zero_()
        self.slices = slices

    def begin(self, *, undoable: bool) -> Before | None:
        """A step begins. Returns the present state if the step has to be undoable, which takes a copy."""
        self._move_on()
        if undoable:
            velocity = self.velocity
            self._latest = Before(
                residual=self.residual.clone(),
                velocity=None if velocity is None else velocity.clone(),
                states=copy.deepcopy(self.states),
                slices=self.slices,
            )
        return self._latest

    def rollback(self, before: Before) -> None:
        """Undo the last step, to the bit. Nothing else may have happened since it began."""
        assert before is self._latest
        assert before.states is not None
        self.residual.copy_(before.residual)
        if before.velocity is not None and self.velocity is not None:
            self.velocity.copy_(before.velocity)
        self.states[:] = before.states
        self._latest = None

    def put_back(self, sent: Compressed) -> None:
        """What the payloads carried is owed again."""
        self._move_on()
        if not sent.payloads:
            return
        for payload, (start, end) in zip(sent.payloads, sent.ranges, strict=True):
            owed = self.residual[start:end]
            if sent.slices == self.slices:
                add_update(payload, owed)
            else:
                values = torch.from_numpy(decode(payload)).to(owed.device)
                owed.add_(values, alpha=sent.slices / self.slices)
            saturate(owed)

    def forget(self, sent: Compressed) -> None:
        """Undo a step whose gradient others have sent: to the bit if it was the last thing to happen,
        otherwise to rounding; the velocity keeps what later steps have made of it."""
        before = sent.before
        if before is None:  # nobody else can have sent it
            self.put_back(sent)
            return
        if before is self._latest:
            self.rollback(before)
            return
        self._move_on()
        undone = before.residual.to(self.residual.device)
        saturate(self.residual.add_(undone, alpha=before.slices / self.slices))

    def _move_on(self) -> None:
        """Something else happens than the end of the latest step: keep the difference it made."""
        if self._latest is not None:
            before = self._latest.residual.to(self.residual.device)  # the buffer may have moved since
            self._latest.residual = saturate(before.sub_(self.residual))
            self._latest.states = self._latest.velocity = None
            self._latest = None
