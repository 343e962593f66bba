"""The residual ledger: what a worker has computed and the server has not got.

`residual` is one flat float32 buffer in manifest order; where momentum is corrected, `velocity` is another. A
compressor gets views of both as its state. So a worker that is given other parts of the model moves views
only: what it held of the old ones stays in the buffer, and goes out when it gets that range again, or in its
flush. At any time

    everything sent and accepted + residual == everything computed

(sums saturate at the largest finite float32). A step reads the ledger and writes to its *draft*, a second
buffer, which takes the ledger's place when the step is pushed (`commit`). So a step that is abandoned has
changed nothing. There is a verb for each way in which a push may end:

    keep        it counts: nothing of the step will be undone
    put_back    it came too late (STALE): what was sent is owed again
    forget      others sent the gradient (REDUNDANT): what is owed is what was owed before the step

The last two leave out ranges of which the push counts all the same.

Any number of pushes may be open, and settled in any order.

A residual weighs in the next mean as much as its worker's gradient does, and gradients of one of n slices
of the parts weigh n times as much as those of all. `slices` is the measure that the residual is kept in; a
new number of slices rescales it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch

from .feedback import FeedbackState
from .kernels.devices import saturate
from .payload import DenseFormat, DensePayload, Float64, Payload
from .reduction import add_update, decode
from .spikes import DUE, ROWS

Ranges = Sequence[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Before:
    """The ledger as it was before a step; once something else has changed it, by how much the step did.

    Attributes:
        residual, velocity: float32, shape (elements,): the state, or what has to be added to undo the step.
            None for nothing.
        states: of the compressors, None once it is a difference.
        usual: see `Ledger`.
        slices: the measure of the residual.
    """

    residual: torch.Tensor | None
    velocity: torch.Tensor | None
    states: list[Any] | None
    usual: Float64
    slices: int


@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    """What one step sends, with what the ledger needs to settle the push.

    Attributes:
        payloads: none at all where the step only adds to the residual.
        ranges: start and end of what each holds, in flat order.
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


def gathered(buffer: torch.Tensor, ranges: Ranges, device: torch.device) -> torch.Tensor:
    """Return ranges of a buffer, end to end, on a device: a view where they are one that lies there."""
    pieces = [buffer[start:end] for start, end in ranges]
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return found if found.device == device else found.to(device)


class Ledger:
    """See the head of this file. Belongs to one thread."""

    def __init__(self, elements: Sequence[int], *, velocity: bool = False) -> None:
        """
        Args:
            elements: of each tensor, in manifest order.
            velocity: whether momentum is corrected.
        """
        self.states: list[Any] = [None] * len(elements)  # what each tensor's compressor remembers
        # What is usual for each tensor's gradients: see `spikes.ROWS`.
        self.usual: Float64 = np.zeros((len(ROWS), len(elements)))
        self._starts = [0, *accumulate(elements)]
        self.slices = 1
        self._elements = sum(elements)
        self._has_velocity = velocity
        self._residual: torch.Tensor | None = None  # allocated when it is needed: many jobs never do
        self._velocity: torch.Tensor | None = None
        self._draft_residual: torch.Tensor | None = None
        self._draft_velocity: torch.Tensor | None = None
        self._device = torch.device("cpu")
        self._latest: Before | None = None  # of the step that was the last thing to happen here

    @property
    def residual(self) -> torch.Tensor:
        """Float32, shape (elements of all tensors,)."""
        if self._residual is None:
            self._residual = self._zeros()
        return self._residual

    @property
    def velocity(self) -> torch.Tensor | None:
        """As `residual`; None without momentum correction."""
        if self._velocity is None and self._has_velocity:
            self._velocity = self._zeros()
        return self._velocity

    @property
    def draft(self) -> torch.Tensor:
        """What becomes the residual with `commit`; each element has to be written before."""
        if self._draft_residual is None:
            self._draft_residual = torch.empty(self._elements, device=self._device)
        return self._draft_residual

    @property
    def draft_velocity(self) -> torch.Tensor | None:
        """What becomes the velocity."""
        if self._draft_velocity is None and self._has_velocity:
            self._draft_velocity = torch.empty(self._elements, device=self._device)
        return self._draft_velocity

    def opened(
        self, ranges: Ranges, device: torch.device, inner: Any, *, begun: bool = False
    ) -> FeedbackState:
        """Return what a compressor works on, of ranges as of one tensor: views of the draft where that is
        possible. `take` puts it back.

        inner: what the compressor itself remembers. begun: whether the draft holds what a first half of the
        step has left there; otherwise the step begins with what the ledger holds.
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

    def take(self, ranges: Ranges, state: FeedbackState) -> None:
        """Leave in the draft what a compressor has left of `opened`."""
        if len(ranges) == 1 and state.residual.device == self._device:
            return  # these are views
        borders = [0, *accumulate(end - start for start, end in ranges)]
        for buffer, values in ((self.draft, state.residual), (self.draft_velocity, state.velocity)):
            if buffer is not None and values is not None:
                for (start, end), (first, last) in zip(ranges, pairwise(borders), strict=True):
                    buffer[start:end].copy_(values[first:last])

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self._elements, device=self._device)

    @property
    def device(self) -> torch.device:
        return self._device

    def image(self) -> dict[str, Any]:
        """All that it would go on from with no push open, as plain values and copies of its tensors on the
        host."""
        buffers = {"residual": self._residual, "velocity": self._velocity}
        copies = {name: None if each is None else each.cpu().clone() for name, each in buffers.items()}
        rest = {"states": deepcopy(self.states), "usual": self.usual.copy(), "slices": self.slices}
        return {**copies, **rest}

    def restore(self, image: Mapping[str, Any]) -> None:
        """Go on from an `image` of a ledger of the same tensors; takes over its tensors."""
        self._residual, self._velocity = (
            None if image[name] is None else image[name].to(self._device) for name in ("residual", "velocity")
        )
        self.states, self.slices, self._latest = image["states"], image["slices"], None
        self.usual = image["usual"].copy()

    @property
    def unused(self) -> bool:
        """Whether there never was anything to owe."""
        return self._residual is None

    @property
    def empty(self) -> bool:
        """Whether nothing is owed."""
        return self._residual is None or not bool(self._residual.any())

    def norm(self) -> float:
        """The norm of everything that is owed."""
        return 0.0 if self._residual is None else norm(self._residual)

    def to(self, device: torch.device) -> None:
        """Move the buffers; views of the old ones are void."""
        if device == self._device:
            return
        self._device = device
        for name in ("_residual", "_velocity", "_draft_residual", "_draft_velocity"):
            buffer: torch.Tensor | None = getattr(self, name)
            if buffer is not None:
                setattr(self, name, buffer.to(device))

    def set_slices(self, slices: int) -> None:
        """Keep the residual in the measure of so many slices. Momentum starts anew."""
        self._move_on()
        if slices != self.slices and self._residual is not None:
            saturate(self._residual.mul_(self.slices / slices))
        if self._velocity is not None:
            self._velocity.zero_()
        self.slices = slices

    def commit(self, states: list[Any], usual: Float64, *, undoable: bool) -> Before | None:
        """A step is pushed: its draft takes the ledger's place. states, usual: after it.

        Returns the state of before, if the step may have to be undone.
        """
        self._move_on()
        before = None
        if undoable:
            before = self._latest = Before(self.residual, self.velocity, self.states, self.usual, self.slices)
        self._residual, self._draft_residual = self._draft_residual, self._residual
        self._velocity, self._draft_velocity = self._draft_velocity, self._velocity
        if before is not None:  # it keeps the buffers
            self._draft_residual = self._draft_velocity = None
        self.states, self.usual = states, usual
        return before

    def clear(self) -> None:
        """All that was owed went out with the latest step, which cannot be undone: it was float32."""
        self._residual = None

    def commit_without_residual(self, states: list[Any], usual: Float64, *, undoable: bool) -> Before | None:
        """As `commit` of a step of which nothing is kept, where nothing was owed."""
        self._move_on()
        if undoable:
            self._latest = Before(None, None, self.states, self.usual, self.slices)
        self._residual, self.states, self.usual = None, states, usual
        return self._latest

    def keep(self, sent: Compressed) -> None:
        """The push counts. What the latest step could be undone with is the next draft."""
        before = sent.before
        if before is None or before is not self._latest:
            return
        self._latest = None
        there = before.residual is not None and before.residual.device == self._device
        if there and self._draft_residual is None:
            self._draft_residual, self._draft_velocity = before.residual, before.velocity

    def put_back(self, sent: Compressed, but: Ranges = ()) -> None:
        """What the payloads carried is owed again. but: ranges of which it counts all the same."""
        self._move_on()
        if not sent.payloads:
            return
        for payload, (start, end) in zip(sent.payloads, sent.ranges, strict=True):
            if any(first <= start and end <= last for first, last in but):
                continue
            if isinstance(payload, DensePayload) and payload.format is DenseFormat.FLOAT32:
                self._send_whole_again(start, end)
            owed = self.residual[start:end]
            if sent.slices == self.slices:
                add_update(payload, owed)
            else:
                values = torch.from_numpy(decode(payload)).to(owed.device)
                owed.add_(values, alpha=sent.slices / self.slices)
            saturate(owed)

    def _send_whole_again(self, start: int, end: int) -> None:
        """Float32 payloads that are put back go out as float32 again: each may be a spike."""
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, end)
        self.usual = self.usual.copy()
        self.usual[DUE, first:last] = 1.0

    def forget(self, sent: Compressed, but: Ranges = ()) -> None:
        """Undo a step whose gradient others have sent: to the bit if it was the last thing to happen, and
        nothing of it counts; otherwise to rounding, and the velocity keeps what later steps have made of it.
        but: ranges of which the push counts all the same."""
        before = sent.before
        if before is None:  # nobody else can have sent it
            self.put_back(sent, but)
            return
        if before is self._latest and not but:
            assert before.states is not None
            self._residual, self._velocity, self.states = before.residual, before.velocity, before.states
            self.usual, self._latest = before.usual, None
            return
        self._move_on()
        if before.residual is not None:
            undone = before.residual.to(self.residual.device)
            for start, end in but:
                undone[start:end] = 0.0
            saturate(self.residual.add_(undone, alpha=before.slices / self.slices))

    def _move_on(self) -> None:
        """Something else happens than the end of the latest step: keep the difference it made."""
        if self._latest is not None:
            if self._latest.residual is not None:
                before = self._latest.residual.to(self.residual.device)  # the buffer may have moved since
                self._latest.residual = saturate(before.sub_(self.residual))
            self._latest.states = self._latest.velocity = None
            self._latest = None
