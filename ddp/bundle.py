"""Tensors that are compressed at once, those of a bucket or of all buckets, and what is owed of each.

DDP arranges its buckets anew after the first iteration. What is owed is therefore kept by tensor: a bundle
is given what its tensors owe when it is made, and gives it back when buckets are no longer as they were. A
tensor is compressed to the same bits whichever bundle it is in, but by compressors that choose among the
elements of the whole model: for those all buckets are one bundle.

No collective here, and no bucket of torch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from ..compressors import (
    CompressorSpec,
    LayerRule,
    ModelCompressor,
    Part,
    Payload,
    Spike,
    Step,
    TensorSpec,
    arrange,
    cut_at,
    reduce_payloads,
)
from ..compressors.payload import Float32
from ..proto.manifest import DTYPE, Manifest
from ..proto.messages import Tensor

# A tensor whose first elements are all 0 is looked at as a whole.
LOOK_AT = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What all ranks have to agree on: the compressor, the tensors that it is for, and the seed."""

    compressor: CompressorSpec
    rule: LayerRule
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """number: from 0, the same on every rank; random numbers follow from it. norm: of its first value, 0
    where that has no say."""

    name: str
    number: int
    shape: tuple[int, ...]
    norm: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Owed:
    """What a rank keeps of one tensor between steps.

    residual, velocity: float32, shape (elements,); None for nothing but zeros. state: what the compressor
    remembers, or the `SavedState` of that; None for nothing. usual: size of its gradients (`spikes.ROWS`).
    """

    residual: torch.Tensor | None = None
    velocity: torch.Tensor | None = None
    state: Any = None
    usual: Sequence[float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A compressor's state as plain values, by field."""

    values: Mapping[str, Any]


def plain(state: Any) -> dict[str, Any]:
    """The fields of a compressor's state. Raises TypeError for one that is not made of plain values."""
    if is_dataclass(state) and not isinstance(state, type):
        values = {field.name: getattr(state, field.name) for field in fields(state)}
        if all(isinstance(value, bool | int | float | str | torch.Tensor) for value in values.values()):
            return values
    expected = "a dataclass of numbers, texts and tensors"
    raise TypeError(f"state of a compressor: expected {expected}, to be saved without pickle, got {state!r}")


class Bundle:
    """See the head of this file. Belongs to one rank; not for several threads at once."""

    def __init__(
        self, terms: Terms, parameters: Sequence[Parameter], owed: Mapping[str, Owed], rank: int
    ) -> None:
        """
        Args:
            parameters: at least one, in the order in which their gradients lie end to end.
            owed: by name, of those that owe something.
        """
        self.parameters = tuple(parameters)
        specs = [TensorSpec(name=each.name, shape=each.shape) for each in parameters]
        self._sizes = [spec.elements for spec in specs]
        # One unit and one part, so that neighbours become one payload.
        plan = arrange(self._sizes, [len(specs)], [])
        self._model = ModelCompressor(
            specs,
            terms.compressor,
            terms.rule,
            terms.seed,
            rank,
            plan=replace(plan, norms=tuple(each.norm for each in parameters)),
            numbers=[each.number for each in parameters],
        )
        tensors = tuple(Tensor(name=each.name, shape=each.shape, dtype=DTYPE) for each in parameters)
        self.manifest = Manifest(tensors, train_samples=1)
        self._step: Step | None = None
        for place, parameter in enumerate(parameters):
            if parameter.name in owed:
                self._restore(place, owed[parameter.name])

    @property
    def part(self) -> Part:
        """All of its elements."""
        return Part(0, sum(self._sizes))

    def compress(
        self, gradients: torch.Tensor, samples: int, version: int, epoch: float, ranks: int
    ) -> list[Payload]:
        """The payloads of a step, which lie end to end; then comes `commit` or `abandon`.

        A tensor whose gradient is 0 throughout is sent as absent and keeps its residual: so DDP hands over
        what the step did not use, and it would drop what comes back of it.

        Args:
            gradients: float32, shape (elements,), mean over `samples` samples. Payloads may share its memory.
            version: steps before this one. ranks: that take part, at least 1. epoch: as of `StepContext`.

        Raises:
            NonFiniteGradient: the step can only be abandoned.
        """
        self._step = self._model.begin(samples, version=version, epoch=epoch, workers=ranks)
        pieces = torch.split(gradients, self._sizes)
        sent: list[Payload] = []
        for place, (piece, used) in enumerate(zip(pieces, _used(pieces), strict=True)):
            for payloads in self._step.add(place, piece if used else None).values():
                sent += payloads
        return sent

    def commit(self) -> list[Spike]:
        """Called once the payloads have reached all ranks. Returns gradients that were spikes."""
        assert self._step is not None
        spikes = self._step.spikes
        self._step.commit()
        self._step = None
        return spikes

    def abandon(self) -> None:
        """What is owed is as it was before the step."""
        self._step = None

    def owed(self) -> dict[str, Owed]:
        """By name: copies of what is kept of each tensor."""
        ledger = self._model.ledger
        residual = None if ledger.unused else ledger.residual
        bounds = pairwise(accumulate(self._sizes, initial=0))
        return {
            parameter.name: Owed(
                residual=None if residual is None else residual[start:end].clone(),
                velocity=None if ledger.velocity is None else ledger.velocity[start:end].clone(),
                state=state,
                usual=usual,
            )
            for parameter, (start, end), state, usual in zip(
                self.parameters, bounds, ledger.states, ledger.usual.T.tolist(), strict=True
            )
        }

    def _restore(self, place: int, owed: Owed) -> None:
        ledger, name = self._model.ledger, self.parameters[place].name
        start = sum(self._sizes[:place])
        here = slice(start, start + self._sizes[place])
        for what, values in (("residual", owed.residual), ("velocity", owed.velocity)):
            if values is not None and values.shape != (self._sizes[place],):
                got = f"shape {tuple(values.shape)}"
                raise ValueError(f"{what} of {name!r}: expected shape ({self._sizes[place]},), got {got}")
        if owed.residual is not None:
            ledger.residual[here].copy_(owed.residual)
        if owed.velocity is not None and ledger.velocity is not None:
            ledger.velocity[here].copy_(owed.velocity)
        ledger.usual[:, place] = owed.usual
        if isinstance(owed.state, SavedState):
            ledger.states[place] = replace(ledger.states[place], **owed.state.values)
        elif owed.state is not None:
            ledger.states[place] = owed.state


def _used(pieces: Sequence[torch.Tensor]) -> list[bool]:
    """Which have anything but zeros."""
    if all(piece.device.type == "cpu" for piece in pieces):
        return [bool(piece[:LOOK_AT].any()) or bool(piece.any()) for piece in pieces]
    found = torch.stack([piece.any() for piece in pieces]).cpu().numpy()  # the GPU is waited for once
    return [bool(used) for used in found]


def mean(pushes: Sequence[Sequence[Payload]], out: Float32) -> None:
    """Overwrite `out` (float32, shape (elements,)) with the mean of what ranks sent, added in their order.

    pushes: by rank, payloads that lie end to end over `out`.
    """
    shares = [1 / len(pushes)] * len(pushes)
    at = 0
    for alike in _alike(pushes):
        end = at + alike[0].elements
        reduce_payloads(alike, shares, out[at:end])
        at = end


def _alike(pushes: Sequence[Sequence[Payload]]) -> Iterator[tuple[Payload, ...]]:
    """What ranks sent of the same elements, together: payloads of one may begin where another has none."""
    while len(ends := {tuple(_ends(push)) for push in pushes}) > 1:
        borders = sorted({0, *(end for each in ends for end in each)})
        # A cut may leave the rest of a bucket of linear codes, and so another border.
        pushes = [[*_cut(push, borders)] for push in pushes]
    return zip(*pushes, strict=True)


def _ends(push: Sequence[Payload]) -> Iterator[int]:
    return accumulate(payload.elements for payload in push)


def _cut(push: Sequence[Payload], borders: Sequence[int]) -> Iterator[Payload]:
    at = 0
    for payload in push:
        first, last = np.searchsorted(borders, [at, at + payload.elements])
        inside = [border - at for border in borders[int(first) : int(last) + 1]]
        at += payload.elements
        for pieces in cut_at(payload, inside):
            yield from pieces
