"""What a worker pushes of its gradients, and what it still holds back.

Where members of a round divide the tensors among them (`--redundancy`), each compresses its slice only, with
residual and momentum of that slice. When members come or go the slice may become another one. What is held
back of the old slice then moves on: as far as the new slice covers it, into its residual; the rest waits. It
is taken up when the slice changes again, and after `PATIENCE` pushes, or when the worker leaves, it goes
along with a push of whole tensors, uncompressed. Momentum starts anew.

A residual weighs in the next mean as much as its worker's gradient does, and gradients of slices weigh as
many times more as there are slices. So what moves from slices to whole tensors is multiplied, and the other
way round divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...compressors import DenseFormat, DensePayload, ModelCompressor, Payload, TensorSpec, decode
from ...proto.messages import Assignment
from ...proto.shares import share

PATIENCE = 16  # pushes for which what other slices hold may wait

Parts = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A push without an outcome: its payloads, of which part of each tensor, and what it was made of.

    slices: 0 for whole tensors. gradients: kept where others push them too; empty otherwise. returned: what
    was added to them.
    """

    payloads: Sequence[Payload]
    slice: int = 0
    slices: int = 0
    gradients: Sequence[torch.Tensor] = ()
    returned: Sequence[torch.Tensor | None] = ()
    workers: int = 1
    whole: bool = False  # of whole tensors although its worker has a slice

    @property
    def header(self) -> tuple[int, int]:
        """Slice and slices as they go into the push."""
        return (0, 0) if self.whole or not self.payloads else (self.slice, self.slices)


class Compression:
    """A `ModelCompressor` for the slice that this worker has, and what others have left behind."""

    def __init__(self, specs: Sequence[TensorSpec], build: Callable[[Parts | None], ModelCompressor]) -> None:
        """build: makes a compressor of those parts of the tensors, or of whole ones."""
        self._specs = specs
        self._build = build
        self._slice, self._slices = 0, 0
        self._compressor = build(None)
        self._left: list[torch.Tensor] | None = None  # of other slices: whole, flat, weighed as whole tensors
        self._waited = 0

    @property
    def norm(self) -> float:
        """Euclidean norm of everything that is still to be sent."""
        left = [float(np.linalg.norm(each.numpy().astype(np.float64))) for each in self._left or ()]
        return math.hypot(self._compressor.residual_norm(), *left)

    def compress(
        self,
        assignment: Assignment,
        gradients: Sequence[torch.Tensor],
        samples: int,
        *,
        rank: int,
        version: int,
        step: int,
        leaving: bool,
    ) -> Sent:
        """Mean gradients, of whole tensors, for the slice that the assignment names.

        rank, version, step: as for `ModelCompressor`. leaving: everything goes, uncompressed.
        Raises NonFiniteGradient.
        """
        self._become(assignment.slice, assignment.slices)
        compressor, workers = self._compressor, assignment.world
        # Members of a group compute the same and compress different slices.
        compressor.rank = rank * max(1, self._slices) + self._slice
        shared = self._slices > 1 or assignment.stragglers > 0
        returned = compressor.returned() if shared else ()
        whole = self._left is not None and (leaving or self._waited >= PATIENCE)
        if leaving or whole:
            payloads = compressor.flush(gradients, workers=workers)
        else:
            payloads = compressor.compress(
                gradients, samples, version=version, step=step, epoch=assignment.progress, workers=workers
            )
        if whole:
            payloads = self._with_what_is_left(payloads)
        elif self._left is not None:
            self._waited += 1
        return Sent(
            payloads,
            self._slice,
            self._slices,
            tuple(gradients) if shared else (),
            returned,
            workers,
            whole,
        )

    def restore(self, sent: Sent) -> None:
        """Take back what the server refused."""
        if not sent.payloads:
            return
        if not sent.whole and (sent.slice, sent.slices) == (self._slice, self._slices):
            self._compressor.restore(sent.payloads)
        else:
            values = [torch.from_numpy(decode(payload)) for payload in sent.payloads]
            self._take_in(values, sent.slice, sent.slices, whole=sent.whole)

    def forget(self, sent: Sent) -> None:
        """Undo a push whose gradients others have pushed: what it held besides them is still to be sent.

        Exact up to rounding. Only momentum where it was sent is gone, and that of a slice that changed since.
        """
        if not sent.gradients:
            self.restore(sent)
            return
        if sent.whole:
            self.restore(sent)
            bounds = self._bounds(sent.slice, sent.slices)
            flat = zip(sent.gradients, bounds, strict=True)
            gradients = [-gradient.reshape(-1)[start:end].cpu() for gradient, (start, end) in flat]
            self._take_in(gradients, sent.slice, sent.slices)
            return
        current = (sent.slice, sent.slices) == (self._slice, self._slices)
        compressor = self._compressor if current else self._build(self._parts(sent.slice, sent.slices))
        missing = compressor.undone(sent.payloads, sent.gradients, sent.returned, workers=sent.workers)
        if current:
            compressor.hold(missing)
        else:
            self._take_in(missing, sent.slice, sent.slices)

    # ---- slices

    def _become(self, slice: int, slices: int) -> None:
        if (slice, slices) == (self._slice, self._slices):
            return
        old = self._slice, self._slices
        held = self._compressor.held() if self._compressor.residual_norm() else None
        self._slice, self._slices = slice, slices
        self._compressor = self._build(self._parts(slice, slices))
        self._waited = 0
        if held is not None:
            self._take_in(held, *old)
        else:
            self._settle()

    def _parts(self, slice: int, slices: int) -> Parts | None:
        return self._bounds(slice, slices) if slices > 1 else None

    def _bounds(self, slice: int, slices: int) -> list[tuple[int, int]]:
        return [share(spec.elements, slice, max(1, slices)) for spec in self._specs]

    def _take_in(
        self, values: Sequence[torch.Tensor], slice: int, slices: int, *, whole: bool = False
    ) -> None:
        """Flat values of such a slice, or with its weight of whole tensors, are still to be sent."""
        if self._left is None:
            self._left = [torch.zeros(spec.elements) for spec in self._specs]
        bounds = self._bounds(0, 1) if whole else self._bounds(slice, slices)
        for left, value, (start, end) in zip(self._left, values, bounds, strict=True):
            left[start:end].add_(value, alpha=max(1, slices))
        self._settle()

    def _settle(self) -> None:
        """Move what the present slice covers into its residual."""
        if self._left is None:
            return
        covered: list[torch.Tensor] = []
        for left, (start, end) in zip(self._left, self._bounds(self._slice, self._slices), strict=True):
            covered.append(left[start:end] / max(1, self._slices))
            left[start:end] = 0.0
        self._compressor.hold(covered)
        if not any(left.count_nonzero() for left in self._left):
            self._left = None

    def _with_what_is_left(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Whole tensors: in the present slice the payloads, elsewhere what waits."""
        assert self._left is not None
        merged: list[Payload] = []
        bounds = self._bounds(self._slice, self._slices)
        for left, payload, (start, end) in zip(self._left, payloads, bounds, strict=True):
            values = left / max(1, self._slices)
            values[start:end] = torch.from_numpy(decode(payload))
            data = values.numpy().view(np.uint8)
            merged.append(DensePayload(format=DenseFormat.FLOAT32, elements=left.numel(), data=data))
        self._left, self._waited = None, 0
        return merged
