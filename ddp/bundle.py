"""Bundles: tensors of one DDP bucket, or of all buckets, that are compressed together, and their residuals.

DDP rearranges its buckets after the first iteration, so residuals belong to tensors and not to buckets. An
old bundle returns the state of its tensors (`TensorState`), and a new one takes it over. How tensors are
bundled does not affect their bits, except with compressors that choose among the elements of the whole model:
for those, all buckets are one bundle.

This file starts no collective and knows no bucket of torch's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

from ..common.parts import Part, arrange
from ..compressors import (
    CompressorSpec,
    LayerRule,
    ModelCompressor,
    Payload,
    ProjectedPayload,
    PushTerms,
    Spike,
    Step,
    TensorSpec,
    cut_at,
    reduce_payloads,
    sums_of_coordinates,
)
from ..compressors.payload import Float32
from ..proto.manifest import DTYPE, Manifest
from ..proto.messages import Tensor
from .exchange import Reader

Expand = Callable[[Mapping[int, Float32], Float32], None]
PROBED = 256  # first elements of a tensor; only if all of them are 0 is the whole tensor searched


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The settings that all ranks must share. Their text enters the checksum that ranks compare.

    The compressor is adapted to the optimizer; the seed is at least 0; `exchange` and `entropy` are those of
    `HookState`.
    """

    compressor: CompressorSpec
    rule: LayerRule
    seed: int
    exchange: str = "gather"
    entropy: str = "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of the model that DDP wraps.

    Attributes:
        name: name by which its state is saved.
        number: its number, from 0, the same on every rank; it seeds the random numbers.
        norm: Euclidean norm of the parameter's initial values; 0 if the compressor does not use it.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    norm: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorState:
    """One rank's compression state of one tensor between two steps; moves with it from bundle to bundle.

    Attributes:
        residual: gradient that was not sent yet: float32, shape (elements,); None if all elements are 0.
        velocity: accumulated momentum: float32, shape (elements,); None if all elements are 0.
        state: state of the tensor's compressor, or a `SavedState` that was loaded; None for no state.
        usual: running statistics of the gradient's size, by which spikes are found (`spikes.ROWS`).
        bases: bases of the tensor, the same on all ranks: float32; None for those of the beginning, or if the
            tensor has none.
    """

    residual: torch.Tensor | None = None
    velocity: torch.Tensor | None = None
    state: Any = None
    usual: Sequence[float] = (0.0, 0.0, 0.0)
    bases: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class SavedState:
    """A compressor's state as it was loaded from a file: numbers, texts and tensors, by name of the field."""

    values: Mapping[str, Any]


def plain_fields(state: Any) -> dict[str, Any]:
    """Return the fields of a compressor's state by name, as `torch.load(weights_only=True)` can read them.

    Raises:
        TypeError: `state` is no dataclass, or a field is no number, text or tensor.
    """
    if is_dataclass(state) and not isinstance(state, type):
        values = {field.name: getattr(state, field.name) for field in fields(state)}
        if all(isinstance(value, bool | int | float | str | torch.Tensor) for value in values.values()):
            return values
    expected = "a dataclass of numbers, texts and tensors"
    raise TypeError(f"state of a compressor: to save it without pickle, expected {expected}, got {state!r}")


class Bundle:
    """Compresses some tensors of one rank, step by step, and keeps their residuals. Not thread-safe.

    Attributes:
        parameters: the tensors of one bucket, or of all, in the order of their gradients.
        elements: number of elements of the bundle, which travels as one part.
        reader: reader of the ranks' frames.
    """

    def __init__(
        self, terms: Terms, parameters: Sequence[Parameter], states: Mapping[str, TensorState], rank: int
    ) -> None:
        """Take over the states, by name of the tensor; a tensor without one starts from zeros.

        Raises ValueError if a residual or velocity has another shape than its tensor.
        """
        self.parameters = tuple(parameters)
        specs = [TensorSpec(name=each.name, shape=each.shape) for each in parameters]
        self._sizes = [spec.elements for spec in specs]
        # One unit and one part, so that neighbours become one payload.
        plan = arrange(self._sizes, [len(specs)] if specs else [], [])
        self._model = ModelCompressor(
            specs,
            terms.compressor,
            terms.rule,
            terms.seed,
            rank,
            plan=replace(plan, norms=tuple(each.norm for each in parameters)),
            numbers=[each.number for each in parameters],
        )
        self.elements = sum(self._sizes)
        self.reader = Reader(Part(0, self.elements), manifest_of(parameters), self._model.bases.counts)
        self._starts = [0, *accumulate(self._sizes)]
        self._step: Step | None = None
        self._means: dict[int, Float32] = {}
        for index, parameter in enumerate(parameters):
            if parameter.name in states:
                self._restore(index, states[parameter.name])

    def compress(
        self, gradients: torch.Tensor, samples: int, version: int, epoch: float, ranks: int
    ) -> list[Payload]:
        """Compress the gradients of one step; the caller then calls `finish` or `abandon`.

        A tensor whose gradient is all 0 is sent as absent and keeps its residual: DDP hands over a gradient
        of 0 for a parameter that the step did not use, and drops the average.

        Args:
            gradients: gradients of all tensors end to end: float32, shape (elements,), mean over `samples`
                samples. Payloads may share this memory.
            samples: number of samples of this rank's mean gradient.
            version: number of steps before this one.
            epoch: passes over the training samples so far, for the compressor's warm-up.
            ranks: number of ranks.

        Returns:
            The payloads, which cover all elements of the bundle end to end.

        Raises:
            NonFiniteGradient: a gradient has an infinity or a NaN; only `abandon` may follow.
        """
        self._step = self._model.begin(
            PushTerms(samples=samples, version=version, epoch=epoch, workers=ranks)
        )
        pieces = torch.split(gradients, self._sizes)
        sent: list[Payload] = []
        for index, (piece, used) in enumerate(zip(pieces, _used(pieces), strict=True)):
            for payloads in self._step.add(index, piece if used else None).values():
                sent += payloads
        return sent

    @property
    def bases(self) -> Sequence[Float32]:
        """Bases of the tensors that have any, in the order of the bundle."""
        return [*self._model.bases.values.values()]

    def mean(self, pushes: Sequence[Sequence[Payload]], out: Float32) -> None:
        """Write the mean of all ranks' payloads to `out`, as the function `mean` does, also of coordinates.

        `finish` advances the bases by the mean coordinates.
        """
        self._means = {}
        mean(pushes, out, self._expanded)

    def _expanded(self, coordinates: Mapping[int, Float32], out: Float32) -> None:
        self._means = {bisect_right(self._starts, at) - 1: each for at, each in coordinates.items()}
        self._model.bases.expand_each(self._means, dict(enumerate(self._starts)), out)

    def finish(self) -> list[Spike]:
        """Make the residuals of the compressed step permanent, once its payloads have reached all ranks;
        advance the bases.

        Return the gradients that were far larger than usual and therefore sent as float32.
        """
        assert self._step is not None
        spikes = self._step.spikes
        self._step.finish()
        self._model.bases = self._model.bases.advance(self._means)
        self._step, self._means = None, {}
        return spikes

    def abandon(self) -> None:
        """Discard the step that `compress` began; residuals and bases keep their values from before it."""
        self._step, self._means = None, {}

    def tensor_states(self) -> dict[str, TensorState]:
        """Return the compression state of each tensor of the bundle, by name; residuals are copies."""
        ledger = self._model.ledger
        residual = None if ledger.unused else ledger.residual
        bases = self._model.bases.values
        return {
            parameter.name: TensorState(
                residual=None if residual is None else residual[start:end].clone(),
                velocity=None if ledger.velocity is None else ledger.velocity[start:end].clone(),
                state=state,
                usual=usual,
                bases=torch.from_numpy(bases[index].copy()) if index in bases else None,
            )
            for index, (parameter, (start, end), state, usual) in enumerate(
                zip(
                    self.parameters,
                    pairwise(self._starts),
                    ledger.states,
                    ledger.usual.T.tolist(),
                    strict=True,
                )
            )
        }

    def _restore(self, index: int, saved: TensorState) -> None:
        """Copy one tensor's state into the ledger. Raises ValueError if a shape differs from the tensor's."""
        ledger, name = self._model.ledger, self.parameters[index].name
        here = slice(*self._starts[index : index + 2])
        for kind, values in (("residual", saved.residual), ("velocity", saved.velocity)):
            if values is not None and values.shape != (self._sizes[index],):
                got = f"shape {tuple(values.shape)}"
                raise ValueError(f"{kind} of {name!r}: expected shape ({self._sizes[index]},), got {got}")
        if saved.residual is not None:
            ledger.residual[here].copy_(saved.residual)
        if saved.velocity is not None and ledger.velocity is not None:
            ledger.velocity[here].copy_(saved.velocity)
        ledger.usual[:, index] = saved.usual
        bases = self._model.bases
        if saved.bases is not None and index in bases.values:
            if saved.bases.shape != bases.values[index].shape:
                shapes = f"expected shape {bases.values[index].shape}, got {tuple(saved.bases.shape)}"
                raise ValueError(f"bases of {name!r}: {shapes}")
            self._model.bases = replace(bases, values={**bases.values, index: saved.bases.numpy().copy()})
        if isinstance(saved.state, SavedState):
            ledger.states[index] = replace(ledger.states[index], **saved.state.values)
        elif saved.state is not None:
            ledger.states[index] = saved.state


class Bundles:
    """All bundles of a stage, and the states of tensors that are in no bundle at present.

    Attributes:
        waiting: these states, by name of the tensor.
    """

    def __init__(self) -> None:
        self._bundles: dict[tuple[str, ...], Bundle] = {}
        self.waiting: dict[str, TensorState] = {}

    def bundle(self, terms: Terms, parameters: Sequence[Parameter], rank: int) -> Bundle:
        """Return the bundle of these tensors, a new one after a rearrangement."""
        key = tuple(each.name for each in parameters)
        if not key:  # as the share of a rank may be, in several bundles of a step
            return Bundle(terms, (), {}, rank)
        if key not in self._bundles:
            for other in [other for other in self._bundles if not {*other}.isdisjoint(key)]:
                self.waiting.update(self._bundles.pop(other).tensor_states())
            states = {name: self.waiting[name] for name in key if name in self.waiting}
            self._bundles[key] = Bundle(terms, parameters, states, rank)
            for name in states:
                del self.waiting[name]
        return self._bundles[key]

    def begin_anew(self) -> None:
        """Discard the states of tensors that are in no bundle, but for bases, which all ranks share."""
        self.waiting = {
            name: TensorState(bases=each.bases)
            for name, each in self.waiting.items()
            if each.bases is not None
        }

    def saved(self) -> dict[str, Any]:
        """Return the states of all tensors as plain values and host tensors, for `load`.

        Raises TypeError if the state of a third party's compressor is not made of plain values.
        """
        states = dict(self.waiting)
        for bundle in self._bundles.values():
            states.update(bundle.tensor_states())
        return {
            "residuals": {n: each.residual.cpu() for n, each in states.items() if each.residual is not None},
            "velocities": {n: each.velocity.cpu() for n, each in states.items() if each.velocity is not None},
            "states": {n: plain_fields(each.state) for n, each in states.items() if each.state is not None},
            "usual": {n: list(each.usual) for n, each in states.items()},
            "bases": {n: each.bases for n, each in states.items() if each.bases is not None},
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Replace all states by saved ones."""
        residuals, velocities, states = (saved[name] for name in ("residuals", "velocities", "states"))
        usual, bases = saved.get("usual", {}), saved.get("bases", {})  # absent in states of older releases
        self.waiting = {
            name: TensorState(
                residual=residuals.get(name),
                velocity=velocities.get(name),
                state=SavedState(states[name]) if name in states else None,
                usual=usual.get(name, TensorState().usual),
                bases=bases.get(name),
            )
            for name in {**residuals, **velocities, **states, **usual, **bases}
        }
        self._bundles.clear()


def manifest_of(parameters: Sequence[Parameter]) -> Manifest:
    tensors = tuple(Tensor(name=each.name, shape=each.shape, dtype=DTYPE) for each in parameters)
    return Manifest(tensors, train_samples=1)


def _used(pieces: Sequence[torch.Tensor]) -> list[bool]:
    if all(piece.device.type == "cpu" for piece in pieces):
        return [bool(piece[:PROBED].any()) or bool(piece.any()) for piece in pieces]
    found = torch.stack([piece.any() for piece in pieces]).cpu().numpy()  # one wait for the GPU
    return [bool(used) for used in found]


def mean(pushes: Sequence[Sequence[Payload]], out: Float32, expand: Expand | None = None) -> None:
    """Write the mean of all ranks' payloads, which cover `out` end to end, to `out`; ranks are added in their
    order.

    expand: function that writes tensors to `out`; it takes the mean coordinates of each, by its first
        element. A rank that sends the tensor otherwise is added last.
    """
    share, at = 1 / len(pushes), 0
    projected: dict[int, list[ProjectedPayload]] = {}
    rest: list[tuple[int, list[Payload]]] = []
    for aligned in _aligned(pushes):
        sent = [each for each in aligned if isinstance(each, ProjectedPayload)]
        if sent:
            projected[at] = sent
        if len(sent) < len(aligned):
            rest.append((at, [each for each in aligned if not isinstance(each, ProjectedPayload)]))
        at += aligned[0].elements
    if projected:
        assert expand is not None, "only bundles of tensors with bases have coordinates"
        sums = sums_of_coordinates([*projected.values()], share)
        expand(dict(zip(projected, sums, strict=True)), out)
    for at, others in rest:
        here = out[at : at + others[0].elements]
        reduce_payloads(others, [share] * len(others), here, keep=at in projected)


def _aligned(pushes: Sequence[Sequence[Payload]]) -> Iterator[tuple[Payload, ...]]:
    """Yield tuples of one payload of each rank, for the same elements; cut payloads whose borders differ."""
    while len(ends := {tuple(_ends(push)) for push in pushes}) > 1:
        borders = sorted({0, *(end for each in ends for end in each)})
        # Linear codes are cut at bucket borders, so a cut may add a border: hence the loop.
        pushes = [[*chain(*cut_payloads(push, borders))] for push in pushes]
    return zip(*pushes, strict=True)


def _ends(push: Sequence[Payload]) -> Iterator[int]:
    return accumulate(payload.elements for payload in push)


def cut_payloads(payloads: Sequence[Payload], borders: Sequence[int]) -> list[list[Payload]]:
    """Return the payloads of each range between neighbouring borders, given payloads that lie end to end.

    borders: indices of elements, ascending, from 0 to the end of the last payload.
    """
    found: list[list[Payload]] = [[] for _ in borders[1:]]
    at = 0
    for payload in payloads:
        if not payload.elements:
            continue
        end = at + payload.elements
        first, last = bisect_right(borders, at) - 1, bisect_left(borders, end)
        inside = [0, *(border - at for border in borders[first + 1 : last]), payload.elements]
        for cuts, place in zip(cut_at(payload, inside), range(first, last), strict=True):
            found[place] += cuts
        at = end
    return found
