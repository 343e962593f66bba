"""Bases: state that the server and all workers of a job share, in which tensors travel as coordinates.

The first bases follow from the job's seed. With each version of the parameters the bases advance by the mean
of the pushes' coordinates, which travels to everybody, to the same bits everywhere. A payload can be decoded
with the bases of the version of its push, and no others.

    worker:  coordinates = those of gradient + residual, in the bases of the version;
    server:  mean = the mean of all pushes' coordinates, in rank order (`reduction.sum_coordinates`);
    both:    mean gradient = expand(mean), bases of the next version = advance(mean).

A compressor that uses bases has the methods of `base.Shared`, and its `CompressorEntry` declares
`coordinates`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from .base import Compressor, Shared, TensorSpec, serves_many
from .feedback import without_feedback
from .layers import LayerRule
from .payload import Float32, ProjectedPayload
from .reduction import sum_coordinates
from .registry import CompressorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Bases:
    """The bases of a model's tensors at one version: a value, which `advance` does not change.

    Attributes:
        specs: tensors of the model.
        compressors: compressor of each tensor that has bases, by index of the tensor.
        counts: number of coordinates of these tensors.
        values: bases of these tensors, float32 of one dimension, never written to.
    """

    specs: Sequence[TensorSpec]
    compressors: Mapping[int, Shared]
    counts: Mapping[int, int]
    values: Mapping[int, Float32]

    @staticmethod
    def start(
        specs: Sequence[TensorSpec],
        chosen: Sequence[CompressorSpec],
        made: Sequence[Compressor],
        seed: int,
        numbers: Sequence[int],
    ) -> Bases:
        """Return the bases at version 0, the same for equal arguments on every machine.

        Args:
            chosen: compressor of each tensor, as declared; see `LayerRule.choose`.
            made: compressor of each tensor, as built.
            seed: seed of the job, at least 0.
            numbers: number of each tensor in the key of its random numbers.
        """
        compressors = {
            index: cast(Shared, without_feedback(made[index]))
            for index, (spec, each) in enumerate(zip(specs, chosen, strict=True))
            if each.coordinates(spec.shape)
        }
        values: dict[int, Float32] = {}
        for index, compressor in compressors.items():
            own = np.random.SeedSequence((seed, numbers[index])).generate_state(1, np.uint64)
            values[index] = compressor.start(specs[index], int(own[0]))
        counts = {index: chosen[index].coordinates(specs[index].shape) for index in compressors}
        return Bases(specs, compressors, counts, values)

    @staticmethod
    def of_job(specs: Sequence[TensorSpec], compressor: CompressorSpec, seed: int) -> Bases:
        """Return the bases at version 0 of all tensors that may travel as coordinates in a job, whichever of
        them a worker sends otherwise. compressor: the job's."""
        rule = LayerRule()
        chosen = [rule.choose(spec, compressor) for spec in specs]
        made = {each: each.build() for each in set(chosen)}
        return Bases.start(specs, chosen, [made[each] for each in chosen], seed, range(len(specs)))

    def expand(self, index: int, coordinates: Float32, out: Float32) -> None:
        """Write the tensor `index` with these coordinates to `out`: float32, shape (elements,)."""
        self.compressors[index].expand(self.specs[index], self.values[index], coordinates, out)

    def expand_each(
        self, coordinates: Mapping[int, Float32], starts: Mapping[int, int], out: Float32
    ) -> None:
        """Write each tensor with these coordinates to `out`, from its element in `starts` on."""
        for compressor, indices in self._by_compressor(coordinates):
            at, given = [starts[index] for index in indices], [coordinates[index] for index in indices]
            if serves_many(compressor):
                specs, bases = self._of(indices)
                compressor.expand_each(specs, bases, given, out, at)
                continue
            for index, start, each in zip(indices, at, given, strict=True):
                self.expand(index, each, out[start : start + self.specs[index].elements])

    def decode(self, index: int, payload: ProjectedPayload) -> Float32:
        """Return the values of a valid payload of tensor `index`: float32, shape (elements,)."""
        coordinates, out = np.empty(payload.count, np.float32), np.empty(payload.elements, np.float32)
        sum_coordinates([payload], [1.0], coordinates)
        self.expand(index, coordinates, out)
        return out

    def advance(self, means: Mapping[int, Float32]) -> Bases:
        """Return the bases of the next version, given the mean coordinates of each tensor that has any.

        The bases of other tensors stay as they are.
        """
        values = dict(self.values)
        for compressor, indices in self._by_compressor(means):
            specs, bases = self._of(indices)
            given = [means[index] for index in indices]
            if serves_many(compressor):
                following = compressor.advance_each(specs, bases, given)
            else:
                following = [*map(compressor.advance, specs, bases, given)]
            values.update(zip(indices, following, strict=True))
        return replace(self, values=values)

    def _by_compressor(self, indices: Iterable[int]) -> Iterator[tuple[Shared, list[int]]]:
        """Yield the tensors of each compressor."""
        found: dict[int, list[int]] = {}
        for index in indices:
            found.setdefault(id(self.compressors[index]), []).append(index)
        for each in found.values():
            yield self.compressors[each[0]], each

    def _of(self, indices: Sequence[int]) -> tuple[list[TensorSpec], list[Float32]]:
        return [self.specs[index] for index in indices], [self.values[index] for index in indices]
