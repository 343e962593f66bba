"""The residual ledger: the part of a worker's gradients that the server does not have yet.

`residual` is one flat float32 buffer in manifest order. Where momentum is corrected, `velocity` is another. A
compressor gets views of both as its state. A worker that is given other parts of the model therefore only
moves views. The residual of its previous parts stays in the buffer, and is sent when the worker gets that
range again, or in its flush. At any time

    everything sent and accepted + residual == everything computed

(sums saturate at the largest finite float32). A step reads the ledger and writes to its *draft*, a second
buffer, which replaces the residual when the step is pushed (`enter`). An abandoned step therefore changes
nothing. There is a method for each outcome of a push:

    keep:      the push counts, and its step will not be undone.
    put_back:  the push came too late (STALE). Its values are added to the residual again.
    forget:    other workers have sent the gradient (REDUNDANT). The residual of before the step is restored.

`put_back` and `forget` leave out ranges in which the push counts all the same. Any number of pushes may be
open, and they may end in any order.

A residual weighs in the next mean as much as its worker's gradient does. The gradient of one of n slices of
the parts weighs n times as much as one of all parts. `slices` is the number of slices for which the residual
is scaled; `set_slices` rescales it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch

from .bases import Bases
from .dense import dense_payload
from .feedback import FeedbackState
from .kernels.devices import saturate
from .payload import DenseFormat, DensePayload, Float64, Payload, ProjectedPayload
from .reduction import add_update, decode
from .spikes import DUE, ROWS

Ranges = Sequence[tuple[int, int]]
BLOCK = 1 << 20  # elements


@dataclass(slots=True, eq=False)
class Before:
    """The contents of the ledger before a step, from which the step can be undone.

    As soon as something other than the step has changed the ledger, `residual` is a difference to add, the
    previous residual minus that after the step, and `velocity` and `states` are None.
    """

    residual: torch.Tensor | None
    velocity: torch.Tensor | None
    states: list[Any] | None
    usual: Float64
    slices: int


@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    """The payloads of one step, with everything the ledger needs when the outcome of the push arrives.

    Attributes:
        payloads: empty if the step only adds to the residual.
        ranges: start and end of each payload, in flat order.
        slices: number of slices for which the values are scaled, at least 1.
        before: contents of the ledger before the step, kept for a push that may turn out redundant.
        bases: bases in which the step's coordinates are; None if it has none.
    """

    payloads: Sequence[Payload] = ()
    ranges: Ranges = ()
    slices: int = 1
    before: Before | None = None
    bases: Bases | None = None


def norm(values: torch.Tensor) -> float:
    """Return the Euclidean norm, accumulated in float64."""
    return float(cast(torch.Tensor, torch.linalg.vector_norm(values, dtype=torch.float64)))


def gathered(buffer: torch.Tensor, ranges: Ranges, device: torch.device) -> torch.Tensor:
    """Return ranges of a buffer, end to end, on a device: a view if possible."""
    pieces = [buffer[start:end] for start, end in ranges]
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return found if found.device == device else found.to(device)


class Ledger:
    """A worker's residual ledger for all tensors of a model. It belongs to one thread.

    Attributes:
        usual: statistics of each tensor's gradients by which spikes are found; float64, see `spikes.ROWS`.
        slices: number of slices for which the residual is scaled, at least 1.
    """

    def __init__(self, elements: Sequence[int], *, velocity: bool = False) -> None:
        """Take the elements of each tensor, in manifest order. velocity: True if momentum is corrected."""
        self.states: list[Any] = [None] * len(elements)
        self.usual: Float64 = np.zeros((len(ROWS), len(elements)))
        self._starts = [0, *accumulate(elements)]
        self.slices = 1
        self._elements = sum(elements)
        self._has_velocity = velocity
        self._residual: torch.Tensor | None = None  # allocated on first use: many jobs never need it
        self._reserved: torch.Tensor | None = None  # zeros that the first use takes
        self._velocity: torch.Tensor | None = None
        self._draft_residual: torch.Tensor | None = None
        self._draft_velocity: torch.Tensor | None = None
        self._device = torch.device("cpu")
        # Of the last pushed step, as long as nothing has changed the ledger since; otherwise None.
        self._latest: Before | None = None

    @property
    def residual(self) -> torch.Tensor:
        """Residual of all tensors: float32, shape (elements of all tensors,)."""
        if self._residual is None:
            self._residual = self._zeros() if self._reserved is None else self._reserved
            self._reserved = None
        return self._residual

    def reserve(self) -> None:
        """Take the memory of residual and draft before the first step; the system hands it out slowly."""
        if self._residual is None and self._reserved is None:
            self._reserved = self._zeros()
            self.draft.zero_()

    @property
    def velocity(self) -> torch.Tensor | None:
        """Velocity of all tensors; None without momentum correction."""
        if self._velocity is None and self._has_velocity:
            self._velocity = self._zeros()
        return self._velocity

    @property
    def draft(self) -> torch.Tensor:
        """Buffer that `enter` makes the residual. A step has to write every element before."""
        if self._draft_residual is None:
            self._draft_residual = torch.empty(self._elements, dtype=torch.float32, device=self._device)
        return self._draft_residual

    @property
    def draft_velocity(self) -> torch.Tensor | None:
        """Buffer that `enter` makes the velocity; None without momentum correction."""
        if self._draft_velocity is None and self._has_velocity:
            self._draft_velocity = torch.empty(self._elements, dtype=torch.float32, device=self._device)
        return self._draft_velocity

    def opened(
        self, ranges: Ranges, device: torch.device, inner: Any, *, begun: bool = False
    ) -> FeedbackState:
        """Return the residual and velocity of some ranges as of one tensor, for `ErrorFeedback` to update in
        place.

        The state's tensors are views of the draft where possible; `write_back` writes back those that are
        copies.

        Args:
            inner: state of the compressor inside `ErrorFeedback`.
            begun: True if the draft already holds the result of `ErrorFeedback.accumulate`; False to begin
                with the ledger's contents.
        """
        beside = begun or device == self._device
        residual = gathered(self.draft if beside else self.residual, ranges, device)
        before = gathered(self.residual, ranges, device) if beside and not begun else None
        velocity = None
        if self.velocity is not None and self.draft_velocity is not None:
            velocity = gathered(self.draft_velocity, ranges, device)
            if not begun:
                velocity.copy_(gathered(self.velocity, ranges, device))
        return FeedbackState(residual=residual, velocity=velocity, inner=inner, before=before)

    def write_back(self, ranges: Ranges, state: FeedbackState) -> None:
        """Write the tensors of a state from `opened` back to the draft, unless they are views of it."""
        if len(ranges) == 1 and state.residual.device == self._device:
            return  # views
        borders = [0, *accumulate(end - start for start, end in ranges)]
        for buffer, values in ((self.draft, state.residual), (self.draft_velocity, state.velocity)):
            if buffer is not None and values is not None:
                for (start, end), (first, last) in zip(ranges, pairwise(borders), strict=True):
                    buffer[start:end].copy_(values[first:last])

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self._elements, dtype=torch.float32, device=self._device)

    @property
    def device(self) -> torch.device:
        return self._device

    def image(self) -> dict[str, Any]:
        """Return all that a new ledger needs to continue, if no push is open: plain values and host
        copies."""
        buffers = {"residual": self._residual, "velocity": self._velocity}
        copies = {name: None if each is None else each.cpu().clone() for name, each in buffers.items()}
        rest = {"states": deepcopy(self.states), "usual": self.usual.copy(), "slices": self.slices}
        return {**copies, **rest}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Continue from an `image` of a ledger of the same tensors; take over its tensors."""
        self._residual, self._velocity = (
            None if image[name] is None else image[name].to(self._device) for name in ("residual", "velocity")
        )
        self.states, self.slices, self._latest = image["states"], image["slices"], None
        self._reserved = None
        self.usual = image["usual"].copy()

    @property
    def unused(self) -> bool:
        """True if the ledger has never held a residual, or has been cleared since."""
        return self._residual is None

    @property
    def empty(self) -> bool:
        return self._residual is None or not bool(self._residual.any())

    def norm(self) -> float:
        # By blocks: torch makes a float64 copy of its argument.
        if self._residual is None:
            return 0.0
        blocks = range(0, self._elements, BLOCK)
        return math.hypot(*(norm(self._residual[start : start + BLOCK]) for start in blocks))

    def to(self, device: torch.device) -> None:
        """Move the buffers to `device`. Views of the previous buffers become invalid."""
        if device == self._device:
            return
        self._device = device
        for name in ("_residual", "_reserved", "_velocity", "_draft_residual", "_draft_velocity"):
            buffer: torch.Tensor | None = getattr(self, name)
            if buffer is not None:
                setattr(self, name, buffer.to(device))

    def set_slices(self, slices: int) -> None:
        """Scale the residual for a new number of slices of the parts. The velocity restarts at 0."""
        self._move_on()
        if slices != self.slices and self._residual is not None:
            saturate(self._residual.mul_(self.slices / slices))
        if self._velocity is not None:
            self._velocity.zero_()
        self.slices = slices

    def enter(self, states: list[Any], usual: Float64, *, drafted: bool, undoable: bool) -> Before | None:
        """Make the draft of a pushed step the residual; return the previous contents if `undoable`.

        Args:
            states: states of the compressors after the step.
            usual: statistics for spikes after the step.
            drafted: True if the step has written the draft; False if there was no residual and none is left.
            undoable: True if the step may have to be undone.
        """
        self._move_on()
        before = None
        if undoable:
            residual, velocity = (self.residual, self.velocity) if drafted else (None, None)
            before = self._latest = Before(residual, velocity, self.states, self.usual, self.slices)
        if drafted:
            self._residual, self._draft_residual = self._draft_residual, self._residual
            self._velocity, self._draft_velocity = self._draft_velocity, self._velocity
            if before is not None:  # `before` owns the buffers that would otherwise be the next draft
                self._draft_residual = self._draft_velocity = None
        else:
            self._residual = None
        self.states, self.usual = states, usual
        return before

    def clear(self) -> None:
        """Drop the residual, because the latest step has sent all of it as float32, for good."""
        self._residual = None

    def keep(self, sent: Compressed) -> None:
        """Drop the contents kept for undoing a push that counts; their buffers become the draft."""
        before = sent.before
        if before is None or before is not self._latest:
            return
        self._latest = None
        there = before.residual is not None and before.residual.device == self._device
        if there and self._draft_residual is None:
            self._draft_residual, self._draft_velocity = before.residual, before.velocity

    def put_back(self, sent: Compressed, but: Ranges = ()) -> None:
        """Add the values of a push that does not count to the residual again, `but` for the ranges in which
        it counts all the same."""
        self._move_on()
        if not sent.payloads:
            return
        for payload, (start, end) in zip(sent.payloads, sent.ranges, strict=True):
            if any(first <= start and end <= last for first, last in but):
                continue
            if isinstance(payload, DensePayload) and payload.format is DenseFormat.FLOAT32:
                self._send_whole_again(start, end)
            owed = self.residual[start:end]
            if isinstance(payload, ProjectedPayload):
                assert sent.bases is not None, "a push of coordinates names their bases"
                decoded = sent.bases.decode(bisect_right(self._starts, start) - 1, payload)
                payload = dense_payload(DenseFormat.FLOAT32, decoded)
            if sent.slices == self.slices:
                add_update(payload, owed)
            else:
                values = torch.from_numpy(decode(payload)).to(owed.device)
                owed.add_(values, alpha=sent.slices / self.slices)
            saturate(owed)

    def _send_whole_again(self, start: int, end: int) -> None:
        """Mark the tensors of a range to be sent as float32 again, because each may be a spike."""
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end)
        self.usual = self.usual.copy()
        self.usual[DUE, first:last] = 1.0

    def forget(self, sent: Compressed, but: Ranges = ()) -> None:
        """Undo a step whose gradient other workers have sent.

        If nothing has changed the ledger since the step, and nothing of the push counts, the ledger is
        restored bit for bit. Otherwise the difference is undone up to rounding, and the velocity stays.

        Without `Compressed.before` no other worker can have sent the gradient, and the values are put back
        instead. but: ranges in which the push counts all the same.
        """
        before = sent.before
        # 1. The gradient was this worker's alone.
        if before is None:
            self.put_back(sent, but)
            return
        # 2. Nothing has changed the ledger since the step: restore its contents.
        if before is self._latest and not but:
            assert before.states is not None
            self._residual, self._velocity, self.states = before.residual, before.velocity, before.states
            self.usual, self._latest = before.usual, None
            return
        # 3. Add the difference that the step made.
        self._move_on()
        if before.residual is not None:
            undone = before.residual.to(self.residual.device)
            for start, end in but:
                undone[start:end] = 0.0
            saturate(self.residual.add_(undone, alpha=before.slices / self.slices))

    def _move_on(self) -> None:
        """Turn the contents kept of the latest step into a difference, before the ledger changes."""
        if self._latest is not None:
            if self._latest.residual is not None:
                before = self._latest.residual.to(self.residual.device)  # the buffer may have moved since
                self._latest.residual = saturate(before.sub_(self.residual))
            self._latest.states = self._latest.velocity = None
            self._latest = None
