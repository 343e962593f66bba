"""The contract that every compressor keeps.

A compressor is a pair of functions over explicit state, in the manner of an optax transformation:

    state = compressor.init(spec)
    payload, state = compressor.compress(gradient, state, context)

It never touches the network, protobuf, threads or the clock. The gradient is a flat, contiguous float32
tensor and is never written to. A state is a value: the returned state replaces the given one. Error feedback
and momentum correction are a wrapper around the compressor (`feedback.ErrorFeedback`), which needs no code
for them.

The other protocols here are optional abilities. A `CompressorEntry` declares most of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from .kernels import Magnitudes
from .payload import Float32, Payload, ProjectedPayload


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A parameter tensor as compressors know it. flops: floating-point operations in the forward pass of its
    layer, per sample; 0 if not measured."""

    name: str
    shape: tuple[int, ...]
    flops: float = 0.0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Random:
    """A source of random numbers that are determined by a key: integers of at least 0.

    The generator is made on first use: making it takes longer than compressing a small tensor.
    """

    key: tuple[int, ...]

    @cached_property
    def generator(self) -> np.random.Generator:
        return np.random.default_rng(self.key)

    @property
    def seed(self) -> int:
        """Seed below 2**64, many times faster than a generator."""
        text = ",".join(map(str, self.key)).encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """The facts about a step that a compressor may use.

    Attributes:
        samples: number of samples over which the mean gradient was taken, at least 1.
        version: version of the parameters at which the gradient was computed; the same for all workers.
        epoch: passes over the training samples so far, fractional; infinite if nothing is to be warmed up.
        random: random numbers of this tensor, rank and version, which make a run repeatable bit for bit.
        shared: random numbers of this tensor and version that are the same on every worker.
        magnitudes: those of the gradient, before any residual is added; None if not known.
        density: fraction of the elements to send, where each tensor has its own (`Choosing`); None otherwise.
        keep: number of elements to send, from a plan for the whole model (`ModelWide`) or for merged tensors
            (`Choosing`); None if the compressor decides.
        bases: the job's bases of the tensor at this version (`Shared`), float32; None if it has none. They
            must not be written to.
        alone: True to send the gradient without the residual, so that the server can measure norms. Set only
            for compressors that are `seeded`.
    """

    samples: int
    version: int
    epoch: float = 0.0
    random: Random
    shared: Random = field(default_factory=lambda: Random((0,)))
    magnitudes: Magnitudes | None = None
    density: float | None = None
    keep: int | None = None
    bases: Float32 | None = None
    alone: bool = False

    @property
    def rng(self) -> np.random.Generator:
        return self.random.generator

    @property
    def shared_seed(self) -> int:
        """Seed below 2**64 that is the same on every worker."""
        return int(np.random.SeedSequence(self.shared.key).generate_state(1, np.uint64)[0])


class Compressor(Protocol):
    """The interface of a compressor: tensors in, payloads out."""

    def init(self, spec: TensorSpec) -> Any: ...

    def compress(self, gradient: torch.Tensor, state: Any, context: StepContext) -> tuple[Payload, Any]:
        """Compress `gradient` (float32, shape (elements,)); return the payload and the next state."""
        ...


class FusedFeedback(Protocol):
    """A compressor that adds the residual, compresses, and stores the new residual, in one pass."""

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor, state: Any, context: StepContext
    ) -> tuple[Payload, Any]:
        """Compress `gradient + residual`; return the payload and the next state.

        Afterwards `residual` (float32, in place) holds `gradient + residual - decode(payload)`, the same bits
        that separate passes for adding, compressing and subtracting would leave.
        """
        ...


class OutOfPlace(Protocol):
    """A fused compressor that can write the new residual to another tensor than the old one, and finds a
    gradient that is not finite during the same pass."""

    @property
    def out_of_place(self) -> bool: ...

    def compress_with_residual(
        self,
        gradient: torch.Tensor,
        residual: torch.Tensor,
        state: Any,
        context: StepContext,
        left: torch.Tensor | None = None,
    ) -> tuple[Payload, Any]:
        """Compress `gradient + residual`; return the payload and the next state.

        Args:
            residual: not changed if `left` is given.
            left: tensor that receives the new residual, `gradient + residual - decode(payload)`; None to
                overwrite `residual` with it.

        Raises:
            FloatingPointError: the gradient lies on the host and is not finite. The contents of `left` are
                then undefined.
        """
        ...


class InBlocks(Protocol):
    """A quantizer that compresses consecutive tensors, with feedback, in one pass over memory."""

    def compress_blocks(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        states: Sequence[Any],
        samples: int,
    ) -> tuple[Payload, list[Any], npt.NDArray[np.float64]]:
        """Compress each `gradient + residual`; the bits are those of `compress_with_residual` for each
        tensor.

        Args:
            gradients: float32, contiguous, of one dimension each.
            residual: residuals of all tensors, end to end; None for zeros, and the errors are dropped.
            left: tensor of the same shape, which receives the new residuals; it may be `residual` itself.
            samples: number of samples over which the mean gradients were taken.

        Returns:
            The payload, with a block for each tensor; the next states; and the sum of |g| for each tensor. If
                one is not finite, its gradient is not, and all other results are invalid.
        """
        ...


class NonFiniteGradient(ValueError):
    """A gradient, of the tensor `name`, that contains an infinity or a NaN. No state was changed.

    Example:
        >>> from gradwire.compressors import LayerRule, ModelCompressor, TensorSpec
        >>> specs = [TensorSpec(name="w", shape=(4, 4))]
        >>> compressor = ModelCompressor(specs, "4bit", LayerRule(), seed=1, rank=0)
        >>> try:
        ...     compressor.compress([torch.full((4, 4), torch.inf)], samples=32, version=0)
        ... except gradwire.NonFiniteGradient as error:
        ...     print(error)
        gradient of 'w' has an infinity or a NaN
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"gradient of {name!r} has an infinity or a NaN")
        self.name = name


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Consecutive tensors that one call compresses, at least one, each by its own statistics.

    Attributes:
        sizes: elements of each tensor; int64, shape (tensors,).
        context: function that returns the context of a tensor, given its index among these.
    """

    sizes: npt.NDArray[np.int64]
    context: Callable[[int], StepContext]

    def part(self, first: int, last: int) -> Neighbours:
        """Return the tensors with indices from `first` up to, but not including, `last`."""
        return Neighbours(self.sizes[first:last], lambda index: self.context(first + index))

    def bounds(self) -> list[tuple[int, int]]:
        """Return (start, end) of each tensor, as indices of elements with all tensors laid end to end."""
        return [*pairwise(accumulate(self.sizes.tolist(), initial=0))]


class Spanning(Protocol):
    """A compressor that can compress consecutive tensors in a few calls."""

    def spanning(self, tensors: Neighbours) -> Compressor:
        """Return a compressor for these tensors laid end to end, to the same bits as for each alone."""
        ...


class Choosing(Protocol):
    """A sparsifier that can choose from several tensors as from one (`joining.merged`). seeded: True if the
    receiver draws the indices from a seed, so that none travel."""

    @property
    def seeded(self) -> bool: ...

    def keep(self, elements: int, context: StepContext) -> int:
        """Return the number of elements that it sends of a tensor of this size: `context.keep`, if that is
        set, which then counts for several tensors together."""
        ...


class Shared(Protocol):
    """A compressor with bases: state that is the same at the server and at every worker of a job, and that
    advances with each version by the mean of the pushes (`bases`).

    Its payloads are `ProjectedPayload`s of the coordinates of gradient + residual in `StepContext.bases`. All
    methods return the same bits for the same arguments on every machine, and write to none of these. It is
    called for tensors only for which `CompressorEntry.coordinates` is not 0.
    """

    def start(self, spec: TensorSpec, seed: int) -> Float32:
        """Return the bases at version 0: float32 of one dimension. seed: below 2**64."""
        ...

    def expand(self, spec: TensorSpec, bases: Float32, coordinates: Float32, out: Float32) -> None:
        """Write the tensor with these coordinates to `out`, float32 of shape (elements,): linear in the
        coordinates, up to rounding."""
        ...

    def advance(self, spec: TensorSpec, bases: Float32, coordinates: Float32) -> Float32:
        """Return the bases of the next version, of the same shape.

        coordinates: those of the mean gradient.
        """
        ...

    def compress_with_residual(
        self, gradient: torch.Tensor, residual: torch.Tensor | None, state: Any, context: StepContext
    ) -> tuple[Payload, Any]:
        """Compress `gradient + residual` as `FusedFeedback` says, with `expand` in place of `decode`."""
        ...


class SharedByMany(Shared, Protocol):
    """A compressor with bases that serves many tensors in one call, to the same bits as a call for each."""

    def expand_each(
        self,
        specs: Sequence[TensorSpec],
        bases: Sequence[Float32],
        coordinates: Sequence[Float32],
        out: Float32,
        starts: Sequence[int],
    ) -> None:
        """Write each tensor as `expand` does, from its element in `starts` on."""
        ...

    def advance_each(
        self, specs: Sequence[TensorSpec], bases: Sequence[Float32], coordinates: Sequence[Float32]
    ) -> list[Float32]:
        """Return the bases of the next version of each tensor."""
        ...

    def compress_each(
        self,
        specs: Sequence[TensorSpec],
        gradients: Sequence[torch.Tensor],
        starts: Sequence[int],
        bases: Sequence[Float32],
        seeds: Sequence[int],
        residual: torch.Tensor,
        left: torch.Tensor,
    ) -> tuple[Sequence[ProjectedPayload], Sequence[bool]]:
        """Compress each gradient plus its residual, on the host, and write the new residual to `left`.

        Args:
            starts: first element of each tensor in `residual` and `left`.
            seeds: seed of each tensor (`Random.seed`).

        Returns:
            Payload of each tensor; and False for each whose gradient is not finite, which makes its other
                results invalid.
        """
        ...


class Stateless:
    """A base for compressors that keep no state between steps."""

    __slots__ = ()

    def init(self, spec: TensorSpec) -> None:
        return None


class Fused:
    """A base for compressors whose `compress_with_residual` also works with None for the residual; the error
    of compression is then dropped."""

    __slots__ = ()

    def compress(self, gradient: torch.Tensor, state: Any, context: StepContext) -> tuple[Any, Any]:
        fused: Any = self  # declared here, the method would make every subclass look fused to a type checker
        compressed: tuple[Any, Any] = fused.compress_with_residual(gradient, None, state, context)
        return compressed


def as_array(residual: torch.Tensor | None) -> Float32 | None:
    return None if residual is None else residual.numpy()


def is_fused(compressor: object) -> TypeGuard[FusedFeedback]:
    # Not by `isinstance`, which takes 40 µs with a protocol: this is called for every tensor in every step.
    return hasattr(compressor, "compress_with_residual")


def serves_many(compressor: Shared) -> TypeGuard[SharedByMany]:
    return hasattr(compressor, "compress_each")


def is_out_of_place(compressor: Compressor) -> TypeGuard[OutOfPlace]:
    return bool(getattr(compressor, "out_of_place", False))


class ModelWide(Protocol):
    """A compressor that divides a budget of elements among all tensors before it compresses any."""

    def plan(
        self, totals: Sequence[torch.Tensor], specs: Sequence[TensorSpec], context: StepContext
    ) -> list[int]:
        """Return the number of elements that each tensor may keep, which it later finds in `context.keep`.

        Args:
            totals: gradient plus residual of each tensor that has a gradient in this step.
            specs: those of the same tensors.
        """
        ...
