"""Bundles: tensors that are compressed at once, those of one bucket or of all buckets, with their residuals.

DDP rearranges its buckets after the first iteration, so residuals belong to tensors: a new bundle gets its
tensors' residuals (`Owed`), and an old one returns them. The bundle does not affect a tensor's bits, except
with compressors that choose among the elements of the whole model: for those, all buckets are one bundle.

This file has no collective and no bucket of torch's.
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

LOOK_AT = 256  # first elements; only if these are all 0 is the whole tensor searched


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The terms that all ranks must share: the compressor, the tensors that it applies to, and the seed."""

    compressor: CompressorSpec
    rule: LayerRule
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of the model.

    Attributes:
        number: from 0, the same on every rank; random numbers follow from it.
        norm: Euclidean norm of its first value; 0 if the compressor does not ask for it.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    norm: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Owed:
    """A rank's state of one tensor between steps.

    Attributes:
        residual, velocity: float32, shape (elements,); None if all are 0.
        state: the compressor's state, or a `SavedState`; None for none.
        usual: usual size of its gradients (`spikes.ROWS`).
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
    """Return the fields of a compressor's state. Raises TypeError unless all are plain values."""
    if is_dataclass(state) and not isinstance(state, type):
        values = {field.name: getattr(state, field.name) for field in fields(state)}
        if all(isinstance(value, bool | int | float | str | torch.Tensor) for value in values.values()):
            return values
    expected = "a dataclass of numbers, texts and tensors"
    raise TypeError(f"state of a compressor: expected {expected}, to be saved without pickle, got {state!r}")


class Bundle:
    """Compresses some tensors of one rank. Not thread-safe."""

    def __init__(
        self, terms: Terms, parameters: Sequence[Parameter], owed: Mapping[str, Owed], rank: int
    ) -> None:
        """
        Args:
            parameters: at least one, in the order of their gradients.
            owed: by name; a tensor that is missing owes nothing.
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
        self.part = Part(0, sum(self._sizes))  # all elements
        self._step: Step | None = None
        for place, parameter in enumerate(parameters):
            if parameter.name in owed:
                self._restore(place, owed[parameter.name])

    def compress(
        self, gradients: torch.Tensor, samples: int, version: int, epoch: float, ranks: int
    ) -> list[Payload]:
        """Return the payloads of a step, end to end. The caller then calls `commit` or `abandon`.

        A tensor whose gradient is all 0 is sent as absent and keeps its residual: DDP hands over a gradient
        of 0 for a parameter that the step did not use, and drops the average.

        Args:
            gradients: float32, shape (elements,), mean over `samples` samples. Payloads may share its memory.
            version: number of steps before this one.
            epoch: as in `StepContext`.
            ranks: number of ranks, at least 1.

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
        """Keep the step's residuals once its payloads have reached all ranks; return its spikes."""
        assert self._step is not None
        spikes = self._step.spikes
        self._step.commit()
        self._step = None
        return spikes

    def abandon(self) -> None:
        """Drop the step; residuals stay as they were before it."""
        self._step = None

    def owed(self) -> dict[str, Owed]:
        """Return a copy of each tensor's state, by name."""
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
    """Return for each piece whether it has an element other than 0."""
    if all(piece.device.type == "cpu" for piece in pieces):
        return [bool(piece[:LOOK_AT].any()) or bool(piece.any()) for piece in pieces]
    found = torch.stack([piece.any() for piece in pieces]).cpu().numpy()  # one wait for the GPU
    return [bool(used) for used in found]


def mean(pushes: Sequence[Sequence[Payload]], out: Float32) -> None:
    """Overwrite `out` (float32, shape (elements,)) with the mean of the pushes, added in rank order.

    pushes: for each rank its payloads, which cover `out` end to end.
    """
    shares = [1 / len(pushes)] * len(pushes)
    at = 0
    for alike in _alike(pushes):
        end = at + alike[0].elements
        reduce_payloads(alike, shares, out[at:end])
        at = end


def _alike(pushes: Sequence[Sequence[Payload]]) -> Iterator[tuple[Payload, ...]]:
    """Yield the ranks' payloads of the same elements; payloads are cut where their borders differ."""
    while len(ends := {tuple(_ends(push)) for push in pushes}) > 1:
        borders = sorted({0, *(end for each in ends for end in each)})
        # Linear codes are cut at bucket borders, so a cut may add a border: hence the loop.
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
